"""Turn Python objects into Hydra overrides: classes become importable names, values become Hydra syntax."""

from __future__ import annotations

import builtins
import dis
import functools
import importlib.machinery
import importlib.util
import inspect
import math
import os
import re
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dtrain.config.files import GROUPS, SEVERAL, flatten, options_of, setting_prefix
from dtrain.config.source_files import names_under_main
from dtrain.errors import bad
from dtrain.launch.object_fixes import (
    CALLED_WITH,
    EXAMPLE,
    class_and_settings,
    in_place_of_lambda,
    not_called,
    of_this_process,
    without_names,
)
from dtrain.launch.python_kinds import holds_objects, is_bunch, is_code, is_object, is_tensor, is_with_settings
from dtrain.launch.quoting import quote
from dtrain.util.format import short_path

RAW = ("resume", "recipe")  # read before Hydra, so they must not be quoted


def spell(given: Mapping[str, Any]) -> tuple[list[str], list[Path]]:
    """Return the overrides, groups first, and the folders where the ranks find the named modules."""
    options: list[str] = []
    settings: list[str] = []
    folders: list[Path] = []
    for key, value in given.items():
        if not re.fullmatch(r"\+{0,2}[^\W\d][\w.]*", key):
            raise ValueError(f"{key!r}: is not the name of a setting\n  fix: e.g. **{{'train.steps': 100}}")
        details: Mapping[str, Any] = {}
        if key in CALLED_WITH and (isinstance(value, float) or is_tensor(value)):
            shown, kind = (f"{value:.4g}", "number") if isinstance(value, float) else ("<Tensor>", "tensor")
            raise bad(key, shown, f"is a {kind}, not a function or an option", not_called(key))
        if key in RAW:
            options += spell_raw(key, value)
        elif key in GROUPS and isinstance(value, (bool, int, float)):  # precision=16
            options.append(f"{key}={value_of(key, value)}")
        elif key in SEVERAL and not isinstance(value, (str, Mapping)):
            several = isinstance(value, (list, tuple)) and not is_with_settings(value)
            names, more, places = spell_several(key, value if several else [value])
            options.append(f"{key}=[{','.join(names)}]" if names else f"{key}=none")
            settings += more
            folders += places
        elif key in GROUPS:
            thing, details = parts_of(key, value)
            if isinstance(thing, str):
                check_not_quoted(key, thing)
            if thing is not None:
                name, folder = (thing, None) if isinstance(thing, str) else name_of(key, thing)
                options.append(f"{key}={name}")
                folders += [folder] if folder else []
        elif isinstance(value, Mapping):
            details = value
        else:
            settings.append(f"{key}={value_of(key, value)}")
        for name, item in flatten(plain_keys(key, details)).items() if details else ():
            settings.append(f"{key}.{name}={value_of(f'{key}.{name}', item)}")
    return options + settings, folders


def check_not_quoted(group: str, name: str) -> None:
    """Refuse the name of a class of the script as text: a file beside it may have another class of that name."""
    main = sys.modules["__main__"]
    if name.isidentifier() and name not in options_of(group) and is_code(getattr(main, name, None)):
        raise bad(group, f'"{name}"', "is the name of a class or function of this script, as text", f"{group}={name}")


def spell_raw(key: str, value: Any) -> list[str]:
    """Return the override of a run or a recipe, which is a name or a path; none for the default."""
    is_run = key == "resume"
    if isinstance(value, (Mapping, list, tuple)):
        rule = f"is a {type(value).__name__}, not the name of a {'run' if is_run else 'recipe or its file'}"
        fix = 'resume="latest"' if is_run else "dtrain.fit(**settings) takes settings in a dict"
        raise bad(key, "…", rule, fix)
    if value is None or value is False:
        return []
    if not isinstance(value, (str, os.PathLike)):
        fix = 'resume="latest"' if is_run else 'recipe="FILE.yaml", or a name that dtrain recipes ls shows'
        raise bad(key, value, "must be text", fix)
    return [f"{key}={os.fspath(value)}"]


def spell_several(group: str, values: Sequence[Any]) -> tuple[list[str], list[str], list[Path]]:
    """Return names, overrides of the settings, and folders of several loggers or hooks: each has its own section."""
    names: list[str] = []
    settings: list[str] = []
    folders: list[Path] = []
    objects = [value for value in values if is_object(value)]
    if len(values) > 1 and objects:
        written = ", ".join(class_and_settings(value) for value in values)
        rule = "is an object of this process, but each rank must build its own"
        raise bad(group, ", ".join(f"<{type(one).__name__}>" for one in objects), rule, f"{group}=[{written}]")
    for value in values:
        thing, details = parts_of(group, value)
        if thing is None:
            rule = "settings without the class or option that they belong to"
            raise bad(group, value, rule, f'{group}=[(MyClass, {{"name": value}})]')
        name, folder = (thing, None) if isinstance(thing, str) else name_of(group, thing)
        names.append(name)
        folders += [folder] if folder else []
        prefix = setting_prefix(group, name.rpartition(".")[2])
        for key, item in flatten(plain_keys(prefix, details)).items() if details else ():
            settings.append(f"{prefix}.{key}={value_of(f'{prefix}.{key}', item)}")
    return names, settings, folders


def parts_of(group: str, value: Any) -> tuple[Any, Mapping[str, Any]]:
    """Split a group's value into (option name, class, function or None) and its settings."""
    is_data = group == "data" and isinstance(value, Mapping) and ("train" in value or is_bunch(value))
    if is_data and holds_objects(value):  # and no settings
        raise of_this_process(group, value)
    is_whole = group == "model" and isinstance(value, Mapping) and {*value} & {*GROUPS}
    if is_whole and ("model" in value or holds_objects(value)):  # else the model of a fork may have a setting `loss`
        rule = "is a mapping of all arguments, and model is one of them"
        raise bad(
            "model",
            "{" + ", ".join(f"{key!r}: …" for key in value) + "}",
            rule,
            "two stars before it: dtrain.fit(**settings)",
        )
    if isinstance(value, Mapping):  # settings for the option that is already chosen
        return None, value
    if is_with_settings(value):
        thing, more = parts_of(group, value[0])
        return thing, {**more, **value[1]}
    if isinstance(value, (tuple, list)) and value and is_code(value[0]) and not any(map(holds_objects, value[1:])):
        raise without_names(group, *value)
    if isinstance(value, functools.partial):
        parameters = inspect.signature(value.func).parameters.values() if value.args else ()
        names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        if len(value.args) > len(names):
            raise bad(group, value, "every setting needs a name, but these positional arguments have none", EXAMPLE)
        return value.func, {**dict(zip(names, value.args, strict=False)), **value.keywords}
    return value, {}


def name_of(group: str, thing: Any) -> tuple[str, Path | None]:
    """Return the name by which each rank imports a class or function, and its source folder unless it is installed."""
    if not is_code(thing):
        raise of_this_process(group, thing)
    name, module = thing.__qualname__, thing.__module__ or "builtins"
    if getattr(thing, "__name__", "") == "<lambda>":
        rule = "has no name of its own, by which the ranks could import it"
        raise bad(group, "lambda", rule, in_place_of_lambda(group, thing))
    if not name.isidentifier():  # f.<locals>.Net, Outer.Net
        rule = "is not at the top level of a module, so the ranks cannot import it"
        raise bad(group, name, rule, "move it to the top level of a file, with a name of its own")
    if getattr(sys.modules.get(module), name, None) is not thing:
        rule = f"is not what {module} has under that name, which each rank imports"
        raise bad(group, name, rule, "give it a name of its own there")
    script = None
    if module == "__main__":
        module, script = name_of_script(group, name)
        check_outside_main(group, thing)
    importable = module not in ("__main__", "builtins") and all(part.isidentifier() for part in module.split("."))
    spec = importlib.util.find_spec(module) if importable else None
    origin = Path(spec.origin).resolve() if spec and spec.origin and Path(spec.origin).is_file() else None
    if spec is None or (script and origin != script):
        rule = f"the ranks cannot import it as {module}.{name}"
        raise bad(group, name, rule, "put it into a file with a name that no other module has, e.g. net.py")
    if origin is None:  # a built-in module
        return f"{module}.{name}", None
    folder = origin.parents[module.count(".") + (origin.name == "__init__.py")]
    if folder in [Path(path).resolve() for path in sysconfig.get_paths().values()]:  # installed
        return f"{module}.{name}", None
    # the ranks search the current folder first; Python searches the script's folder first
    top = module.partition(".")[0]
    here = importlib.machinery.PathFinder.find_spec(top, [os.getcwd()])
    if here and here.origin and Path(here.origin).resolve().parent not in (folder, folder / top):
        rule = f"the ranks would import {here.origin} as {top}: they search this folder first"
        raise bad(group, name, rule, "rename one of the two files, or start from another folder")
    return f"{module}.{name}", folder


def name_of_script(group: str, name: str) -> tuple[str, Path | None]:
    """Return the module name of the script that Python runs, and its file unless it was started with -m."""
    main: Any = sys.modules["__main__"]
    if getattr(main, "__spec__", None) is not None:  # python -m package.script
        return str(main.__spec__.name), None
    file = getattr(main, "__file__", None)
    if not file or not Path(file).is_file():
        rule = "was defined in an interactive session, and the ranks cannot import it from there"
        raise bad(group, name, rule, "put it into a file, e.g. net.py, and `from net import …`")
    return Path(file).stem, Path(file).resolve()


def check_outside_main(group: str, thing: Any) -> None:
    """Refuse what the script defines under `if __name__ == "__main__":`, or a function that uses a name set there."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    guarded = names_under_main(file) if file else {}
    name = thing.__name__
    code = getattr(thing, "__code__", None)
    # a decorator's function has the globals of another file, and what a `try` may catch is not looked at
    is_here = getattr(thing, "__globals__", None) is vars(sys.modules["__main__"])
    loads = [*dis.get_instructions(code)] if code and is_here and not code.co_exceptiontable else []
    used = [one.argval for one in loads if one.opname == "LOAD_GLOBAL"]
    if {"__name__", "globals"} & {*used}:  # it asks whether it is in the script
        used = []
    for needed in (name, *used):
        if needed in guarded and (needed == name or not hasattr(builtins, needed)):
            where = f"{short_path(Path(str(file)))}:{guarded[needed]}"
            what = "stands" if needed == name else f"uses {needed}, which is set"
            rule = f'{what} under `if __name__ == "__main__":` ({where}), which the ranks do not run'
            raise bad(group, name, rule, f"move {needed} above that block, to the top level of the file")


def plain_keys(prefix: str, node: Any) -> Any:
    """Return nested mappings as dicts; raise unless every key is text."""
    if not isinstance(node, Mapping):
        return node
    for key in node:
        if not isinstance(key, str) or not key:
            raise bad(prefix, f"{{{key!r}: …}}", "a setting's name must be text", f'{prefix}={{"name": value}}')
    return {key: plain_keys(f"{prefix}.{key}", value) for key, value in node.items()}


def value_of(key: str, value: Any) -> str:
    """Return a value in Hydra syntax; every text is quoted, so that all its characters are literal."""
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # numpy scalars
        value = value.item()
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, float):
        return repr(float(value)) if math.isfinite(value) else {math.inf: "inf", -math.inf: "-inf"}.get(value, "nan")
    if isinstance(value, (str, Path)):
        return quote(os.path.expanduser(value) if re.match(r"~(/|$)", str(value)) else str(value))
    if isinstance(value, (list, tuple)):
        return f"[{','.join(value_of(key, item) for item in value)}]"
    if isinstance(value, Mapping):
        for name in value:  # a mapping in a list: Hydra allows no quoted keys there
            if not re.fullmatch(r"(?!(null|true|false|inf|nan)$)[a-z_]\w*", str(name), re.IGNORECASE | re.ASCII):
                raise bad(key, f"{{{name!r}: …}}", "a name in it must be an identifier", "letters, digits and _ only")
        return "{" + ",".join(f"{name}:{value_of(f'{key}.{name}', item)}" for name, item in value.items()) + "}"
    rule = "a configuration can hold only numbers, text, true, false, null, and lists and mappings of them"
    raise bad(
        key, f"<{type(value).__name__}>", rule, "give the values it is built from, and build it in the constructor"
    )
