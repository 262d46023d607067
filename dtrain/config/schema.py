"""Which settings exist and which type each has, without importing torch.

The signature of a constructor is the schema of its section. It is read from the source with `ast`: a typo in a yaml
file or on the command line is found at once, and no second schema has to be kept in sync. For the plain settings, the
type of the default in conf/config.yaml is the schema.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from dtrain.config.build import LIBRARIES, allowed, imported, own_file, untrusted
from dtrain.config.files import (
    GROUPS,
    HOOKS,
    TARGET,
    flatten,
    known_settings,
    main_file,
    option_of,
    options_of,
    read_yaml,
    sections,
)
from dtrain.config.files import section as section_of
from dtrain.config.ranges import check_ranges
from dtrain.config.source import find, source_of
from dtrain.config.source_files import exports
from dtrain.config.untrusted import check_target, check_targets
from dtrain.errors import bad, foreign_option, unknown

CHOICES = {
    "compile": ("auto", "blocks", "whole", "none", True, False),
    "fused_loss": ("auto", True, False),
    "cuda_graphs": ("auto", "none"),
    "activation_checkpointing": ("none", "ops", "selective", "full"),
    "train.nonfinite": ("stop", "skip"),
    "train.spike": ("stop", "skip", "rollback", None),
    "checkpoint.best_mode": ("min", "max", None),
    "script.env": ("torchrun", "horovod", "tensorflow", "jax", "mpi"),
    "script.stop_signal": ("TERM", "INT", "USR1", "USR2", "none"),
}
SWITCHES = dict.fromkeys(("yes", "on", "y", "t", "1", "1.0"), "true") | dict.fromkeys(
    ("no", "off", "n", "f", "0"), "false"
)
NULLABLE = {
    "train.epochs": float,
    "train.micro_batch_size": int,
    "train.max_grad_norm": float,
    "train.stop_after": int,
    "resume": str,
    "fork": str,
    "checkpoint.keep_best": str,
    "init_from": str,
    "script.python": str,
}


def check_keys_and_types(config: dict[str, Any]) -> None:
    check_targets(config)
    base: dict[str, Any] = read_yaml(main_file(config))  # OmegaConf takes 20 ms to read it, for every command
    groups = [next(iter(entry)) for entry in base.pop("defaults") if isinstance(entry, dict)]
    base.pop("hydra")
    known = [g for g in groups if "/" not in g and " " not in g and g != "recipe"]
    check_present("", config, [*base, *known])
    check_plain("trust", config["trust"], base["trust"])  # first: the sections depend on it
    for key, value in config.items():
        if key in known:
            check_group(key, config, config["trust"])
        elif key in base:
            check_plain(key, value, base[key])
        elif key != "choices":  # the chosen option of each group, written by the launcher
            raise unknown(key, known_settings())


def check_run(config: dict[str, Any], trust: Iterable[str], groups: Iterable[str]) -> None:
    """Check a run's own file before anything is built from it: these groups and the plain settings have valid types.

    A file from an older version may have fewer or different settings.
    """
    base: dict[str, Any] = read_yaml(main_file(config))
    check_targets(config)
    for group in groups:
        if group in config:
            check_group(group, config, trust)
            check_ranges(flatten({group: config[group]}))
    for key, default in flatten({k: v for k, v in base.items() if k not in ("defaults", "hydra")}).items():
        section: Any = config
        *parents, name = key.split(".")
        for parent in parents:
            section = section.get(parent, {})
            if not isinstance(section, dict):
                raise bad(parent, section, "is a section", "choose another run; dtrain runs lists them")
        if name in section:
            check_plain(key, section[name], default)


def check_present(prefix: str, section: dict[str, Any], names: Iterable[str]) -> None:
    missing = [prefix + name for name in names if name not in section]
    if missing:
        raise ValueError(f"{missing[0]}: is required and cannot be deleted\n  fix: leave out ~{missing[0]}")


def check_plain(key: str, value: Any, default: Any) -> None:
    """Check a setting of config.yaml: its default there defines the allowed keys and the type."""
    if isinstance(default, dict):
        if not isinstance(value, dict):
            first = next(iter(default))
            is_its = isinstance(value, (int, float)) and type(value) is type(default[first])  # ema=0.999
            fix = f"{key}.{first}={value if is_its else '…'}"
            fix = f"checkpoint.every={value}" if key == "checkpoint" and type(value) is int else fix
            fix = f"resume={value}" if key == "checkpoint" and isinstance(value, str) and value else fix
            raise bad(key, value, f"is a section with the settings {', '.join(default)}", fix)
        check_present(f"{key}.", value, default)
        for name, item in value.items():
            if name not in default:
                raise unknown(f"{key}.{name}", known_settings())
            check_plain(f"{key}.{name}", item, default[name])
        return
    if key == "train.steps" and value is None:
        return  # config/run_length.py has seen train.epochs
    if key in CHOICES:
        annotation = f"Literal[{', '.join(map(repr, CHOICES[key]))}]"
    elif key in NULLABLE:
        annotation = f"{NULLABLE[key].__name__} | None"
    elif isinstance(default, list):
        annotation = "list[str]"
    else:
        annotation = type(default).__name__
    check_type(key, value, annotation, default)


def check_group(group: str, config: dict[str, Any], trust: Iterable[str]) -> None:
    for name, section in sections(config, group).items():
        check_section(name, section, trust)


def check_section(name: str, section: Any, trust: Iterable[str]) -> None:
    """Check a section: the signature of its `_target_` defines the allowed keys and types."""
    group, _, chosen = name.partition(".")
    if chosen and not isinstance(section, dict):
        raise unknown(name, [setting for setting in known_settings() if setting.startswith(f"{group}.")])
    if not isinstance(section, dict) or not isinstance(section.get("_target_"), str) or not section["_target_"]:
        if chosen:
            rule = f"{chosen} is not among the chosen {group.rstrip('s')}s, and has no `_target_`"
            raise bad(name, section, rule, f"add it to the list: {group}=[…,{chosen}]")
        raise bad(name, section, "must name what to build in `_target_`", f"choose an option of conf/{group}/")
    target = section["_target_"]
    check_target(name, section)
    if group == "strategy" and target.startswith("torch."):  # DistributedDataParallel, which wraps a model
        fix = foreign_option(group, target.rpartition(".")[2]) or "strategy=ddp"
        raise bad(group, target, "is torch's own, and no strategy of dtrain", fix)
    if group == HOOKS and allowed(target, trust) and isinstance(source_of(target), ast.FunctionDef):
        rule = "is a function, and a hook is a class with the methods that dtrain calls"
        raise bad(HOOKS, target, rule, "a class with one of these methods: docs/your-own.md#hooks has examples")
    parameters = signature(target, f"{name}._target_", trust)
    if parameters is None:
        return  # **kwargs, or built at run time: only the constructor can check
    if (option := option_of(group, target)) and option.get("_partial_"):  # the training loop passes the rest, e.g. step
        parameters = {name: parameter for name, parameter in parameters.items() if name in option}
    elif option is None and group in PASSED:  # the first argument, and some others by name
        parameters = {key: parameter for key, parameter in list(parameters.items())[1:] if key not in PASSED[group]}
    for key, value in section.items():
        if key in ("_target_", "_partial_"):
            continue
        if key not in parameters:
            if group == "cluster" and is_left_out(target, key, value):
                continue
            raise unknown(f"{name}.{key}", [f"{name}.{p}" for p in parameters])
        annotation, default = parameters[key]
        if not annotation and not target.startswith("dtrain."):
            check_default(f"{name}.{key}", value, target, default)
        shown = (option or {}).get(key)
        check_type(f"{name}.{key}", value, annotation, shown if isinstance(shown, list) else default)
    given = BY_SPLIT if group == "data" and option is None else ()
    missing = [p for p, (_, default) in parameters.items() if default is REQUIRED and p not in (*section, *given)]
    if missing and (option or not section.get("_partial_")):
        annotation = parameters[missing[0]][0]
        raise bad(
            f"{name}.{missing[0]}", "", f"is required by {target}", required(name, target, missing[0], annotation)
        )


PLAIN = {"int", "float", "bool", "str", "list", "dict", "tuple", "None", "Any", "Literal", "Sequence", "Optional",
         "Union", "Mapping", "List", "Dict", "Tuple", "Path", "Iterable", "object", "number", "Number"}  # fmt: skip
CONFIGS = (
    "config",
    "cfg",
    "conf",
    "configuration",
    "args",
    "hparams",
    "hp",
    "hyperparameters",
    "opt",
    "opts",
    "options",
)


def required(name: str, target: str, argument: str, annotation: str) -> str:
    """What to do about an argument without a value: settings are plain values, and no objects of Python."""
    module, _, own = target.rpartition(".")
    group = name.partition(".")[0]
    names = {*re.findall(r"[A-Za-z_]\w*", re.sub(r"Literal\[.*?\]", "Literal", annotation))}
    if target.startswith("dtrain.") or group not in ("model", "data", HOOKS):
        return f"{name}.{argument}=…" + (f"   ({kind_of(annotation)})" if annotation else "")
    if group == HOOKS and argument in ("run", "trainer", "model"):
        return f"leave out {argument} in __init__: begin(self, run) gets the run, and run.model is the model"
    function = source_of(target)
    if keys := keys_of(function, argument) if names <= PLAIN else []:
        return " ".join(f"{name}.{argument}.{key}=…" for key in keys)
    if (names and names <= PLAIN) or (not names and argument not in CONFIGS):
        return f"{name}.{argument}=…" + (f"   ({kind_of(annotation)})" if annotation else "")
    made = f"{argument}={annotation}(…)" if annotation.isidentifier() else f"{argument}=…"
    if group == HOOKS:
        return f"plain values as arguments of {own}.__init__, or a default: {made}"
    maker = f"my_{group}"
    known = exports(module)
    if annotation.isidentifier() and known is not None and annotation not in known | set(dir(builtins)):
        with_it = f"with it, `def {maker}(): return {own}({made})` and {group}={module}.{maker}"
        return f"import or define {annotation} in {module}.py; {with_it}"
    return (
        f"a function that builds it, `def {maker}(): return {own}({made})` in {module}.py, and {group}={module}.{maker}"
    )


def keys_of(function: Any, argument: str) -> list[str]:
    """The keys that a class reads of an argument: config["dim"]."""
    found = (node for node in ast.walk(function) if isinstance(node, ast.Subscript)) if function else ()
    return list(
        dict.fromkeys(
            str(node.slice.value)
            for node in found
            if isinstance(node.value, ast.Name) and node.value.id == argument
            if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str)
        )
    )


def is_left_out(target: str, key: str, value: Any) -> bool:
    """May a class of the user lack this setting of dtrain? Yes, unless somebody chose its value: it may be new."""
    defaults = [section_of("cluster", option).get(key, REQUIRED) for option in options_of("cluster")]
    return not target.startswith("dtrain.") and (key in ("nodes", "processes") or value in defaults)


REQUIRED = object()
BY_SPLIT = ("split", "train")  # data/adapt.py calls a user's data function once for each split
PASSED = {"optim": ("global_batch_size",), "schedule": ("steps",)}  # by the training loop


def signature(target: str, key: str, trust: Iterable[str] = ()) -> dict[str, tuple[str, Any]] | None:
    """Read parameter name → (annotation, default) of a class or function, without importing its module."""

    def permit(name: str) -> None:
        if not allowed(name, trust):
            if name != target and allowed(target, trust) and name.partition(".")[0] in LIBRARIES:
                raise imported(key.removesuffix(f".{TARGET}"), target, name)
            raise untrusted(key, name, trust)

    permit(target)
    if "." not in target:
        raise bad(key, target, "is a module, not a class or function", f"{key}={target}.NAME")
    typed = key if target.startswith("dtrain.") else key.removesuffix(f".{TARGET}")  # the user's own: model=net.Net
    function: Any = find(target, typed, permit)
    if function is None:
        return None  # not Python, or made when the module runs
    if isinstance(function, ast.ClassDef):
        plain = not function.bases and not function.decorator_list
        function = next((n for n in function.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
        if function is None and plain:
            return {}
    if function is None or function.args.kwarg or function.args.vararg:
        return None
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    positional = len(function.args.posonlyargs) + len(function.args.args)
    defaults: list[Any] = [REQUIRED] * (positional - len(function.args.defaults))
    defaults += [*function.args.defaults, *function.args.kw_defaults]
    return {
        a.arg: (
            ast.unparse(a.annotation) if a.annotation else "",
            REQUIRED if d in (REQUIRED, None) else ast.unparse(d),
        )
        for a, d in zip(arguments, defaults, strict=True)
        if a.arg != "self"
    }


def own_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain defaults of the user's own classes and functions, by setting: `model.hidden` is 64."""
    found: dict[str, Any] = {}
    for group in GROUPS:
        for name, section in sections(config, group).items() if group in config else ():
            target = section.get(TARGET) if isinstance(section, dict) else None
            if not isinstance(target, str) or target.startswith("dtrain."):
                continue
            with contextlib.suppress(ValueError):  # reported elsewhere
                for key, (_, default) in (signature(target, name, [target]) or {}).items():
                    with contextlib.suppress(ValueError, SyntaxError):  # required, or an expression
                        found[f"{name}.{key}"] = ast.literal_eval(str(default))
    return found


def check_type(key: str, value: Any, annotation: str, default: Any) -> None:
    if not annotation or fits(value, ast.parse(annotation, mode="eval").body):
        return
    raise bad(key, value, f"must be {kind_of(annotation)}", example(key, value, annotation, default))


def check_default(key: str, value: Any, target: str, default: Any) -> None:
    """Check a value of the user's own code against a default without an annotation: text for a number is a mistake.

    A number or a name in place of false (`dropout=False`, `norm=False`) is none; text in place of a number may be, but
    only of a file in which the user can say so.
    """
    try:
        usual = ast.literal_eval(str(default))
    except (ValueError, SyntaxError):  # required, or an expression
        return
    is_number = isinstance(usual, (int, float)) and not isinstance(usual, bool)
    if not isinstance(value, str):
        return
    if isinstance(usual, bool) and value.lower() in SWITCHES:  # text, and so true: `no`, too
        kind, annotation = "true or false", "bool"
    elif is_number and own_file(target.partition(".")[0]):
        kind, annotation = "a number", "int" if isinstance(usual, int) else "float"
    else:
        return
    name = key.rpartition(".")[2]
    rule = f"must be {kind}, like its default in {target}, {name}={default}"
    more = f"   (or an annotation there: {name}: {annotation} | str = {default})"
    raise bad(key, value, rule, example(key, value, annotation, default) + more)


def kind_of(annotation: str) -> str:
    """Name a type as in a message."""
    words = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text", "None": "null"}
    kind = re.sub(r"\w+", lambda m: words.get(m[0], m[0]), annotation).replace(" | ", " or ")
    kind = re.sub(r"Literal\[(.*)\]", lambda m: "one of " + m[1].replace("'", ""), kind)
    kind = kind.replace("True, False", "true, false").replace("true or false or one of", "true, false or")
    return re.sub(r"list\[(.*)\]", r"a list, each item \1", kind)


def example(key: str, value: Any, annotation: str, default: Any) -> str:
    """Suggest an override of the right type: what was probably meant, or else the default."""
    names = re.findall(r"\w+", annotation)
    number = re.fullmatch(r"(\d[\d_]*(?:\.\d*)?)([kKmM]?)", str(value))
    if {"bool", "True"} & {*names} and (word := SWITCHES.get(str(value).lower())):  # in Hydra's grammar yes is text
        return f"{key}={word}"
    if isinstance(value, list) and len(value) > 1 and names[0] in ("int", "float"):  # a sweep, as in Python
        return f"{key}={value[0]}, or -m {key}={','.join(map(str, value))}"
    if "Literal" in names:
        near = difflib.get_close_matches(str(value), names, 1)
        if near:
            return f"{key}={near[0]}"
        if value is True:  # activation_checkpointing=true: which kind?
            return f"{key}={' or '.join(name for name in names[1:] if name not in ('none', 'None'))}"
    elif names[0] == "list":
        if isinstance(value, str) and (items := re.fullmatch(r"\((.*)\)", value)):  # (0.9,0.95), as in Python
            return f"'{key}=[{items[1]}]'"
        if isinstance(value, (str, int, float)):
            rest = default[1:] if isinstance(default, list) else []  # optim.betas are two
            return f"'{key}=[{','.join(map(str, [value, *rest]))}]'"
    elif "int" in names and number:  # 1e3, 5.0, "5", 100.5 or 1k
        if whole := int(float(number[1]) * {"k": 1e3, "m": 1e6}.get(number[2].lower(), 1)):
            return f"{key}={whole}"
    elif "float" in names and isinstance(value, str) and number and not number[2]:  # "3", in quotes
        return f"{key}={number[1]}"
    elif "str" in names and isinstance(value, (bool, int, float)):
        return f"'{key}=\"{value}\"'"
    if default is REQUIRED or "${" in str(default):
        return f"{key}={ {'int': '1', 'float': '0.001'}.get(annotation, '…') }"
    text = str(default).strip("'")
    return f"{key}={ {'None': 'null', 'True': 'true', 'False': 'false'}.get(text, text) }"


def fits(value: Any, node: ast.expr) -> bool:
    """Does a yaml value match an annotation? Annotations that this function does not know always match."""
    if isinstance(node, ast.BinOp):  # int | None
        return fits(value, node.left) or fits(value, node.right)
    if isinstance(node, ast.Constant):
        return value is None if node.value is None else True
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        if node.value.id == "Literal":
            options = node.slice if isinstance(node.slice, ast.Tuple) else ast.Tuple([node.slice])
            return any(value == o and type(value) is type(o) for o in ast.literal_eval(options))  # 1 is not true
        if node.value.id in ("list", "tuple", "Sequence"):
            inner = node.slice.elts[0] if isinstance(node.slice, ast.Tuple) else node.slice
            return isinstance(value, (list, tuple)) and all(fits(v, inner) for v in value)
        return True
    if not isinstance(node, ast.Name):
        return True
    if isinstance(value, bool):
        return node.id not in ("int", "float", "str", "list")
    types: dict[str, Any] = {"int": int, "float": (int, float), "bool": bool, "str": str, "list": list}
    return isinstance(value, types[node.id]) if node.id in types else True
