"""Explain user errors: one message with a fix for each of Hydra's and OmegaConf's many exception types."""

from __future__ import annotations

import ast
import contextlib
import difflib
import json
import re
from collections.abc import Sequence
from pathlib import Path

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from dtrain.config.files import (
    CONF,
    HOOKS,
    LOGGER,
    RECIPES,
    SECRET,
    SEVERAL,
    default_of,
    default_options,
    flatten,
    known_settings,
    options_of,
    read_yaml,
    setting_prefix,
    yaml_loader,
)
from dtrain.config.files import GROUPS as GROUPS
from dtrain.config.source import source_of
from dtrain.config.source_files import exports
from dtrain.config.source_hints import defined_here, nearest_name
from dtrain.errors import OTHERWISE, foreign, foreign_option, unknown
from dtrain.util import disk_space
from dtrain.util.format import argument

TORCH_OPTIMIZERS = ("Adadelta", "Adagrad", "Adam", "Adamax", "ASGD", "NAdam", "RAdam", "Rprop")
OWN = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")  # my_pkg.net.Net: the user's own code, as an option
MISTAKES = (HydraException, OmegaConfBaseException, ValueError, OSError)  # user errors: shown as one message with a fix


def explain(error: BaseException, argv: Sequence[str] = ()) -> str:
    """Return one clear message with a fix for a user error raised by Hydra, OmegaConf or dtrain. argv: as typed."""
    text = explained(error, argv)
    renamed = re.fullmatch(r"((\w+)=.* has no \w+\n  fix: )did you mean (\2=[\w.]+)\?", text)
    if renamed and any(word.startswith("resume=") for word in argv):  # of a class that the run has
        typed = next((word.partition("=")[2].strip("[]") for word in argv if word.startswith("resume_allow=")), "")
        text = f"{renamed[1]}{renamed[3]} 'resume_allow=[{','.join(filter(None, (typed, renamed[2])))}]'"
    for key in {word.partition("=")[0] for word in argv if re.match(r"\w[\w.]*=", word)}:
        text = text.replace(f"++{key}", key)  # added by the launcher, for settings that conf/ does not have
    return text


def explained(error: BaseException, argv: Sequence[str]) -> str:
    text = str(error)
    # one of several options: Hydra does not list what there is
    in_list = re.search(rf"Could not load '(({'|'.join(SEVERAL)})/[^']*)'", text)
    if isinstance(error, MissingConfigException) and (error.options is not None or in_list):  # it is also an OSError
        path = in_list[1] if in_list else str(error.missing_cfg_file)
        group, _, option = path.rpartition("/") if path.startswith("hydra/") else path.partition("/")
        found = [o for o in error.options or options_of(group) if not OWN.fullmatch(o)]  # not those typed before
        options = sorted({*found, *(["auto"] if group == "strategy" else [])})
        if path == f"{LOGGER}/prometheus":  # it asks the run, and is not sent anything
            fix = "cluster.metrics_port=9834, or `dtrain metrics serve`. "
        else:
            fix = meant_option(group, option, options)
        return f"{group}={option}: there is no such option\n  fix: {fix}{group} can be {', '.join(options)}"
    if isinstance(error, OSError) and error.errno in disk_space.FULL:
        return disk_space.explain(error, Path.cwd()).replace(". Fix: ", "\n  fix: ")
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}\n  fix: check the path and its permissions"
    if "  fix: " in text:  # dtrain's own message
        return text
    if isinstance(error, OverrideParseException):
        word = error.override.removeprefix("++") if error.override not in argv else error.override
        shown = word if word.strip() else repr(word)
        name = re.sub(r"\.ya?ml$", "", word)
        if re.fullmatch(r"[\w-][\w./-]*", name) and not Path(word).is_file() and (RECIPES / f"{name}.yaml").is_file():
            return f"{shown}: is not understood as key=value\n  fix: recipe={name}"
        if re.search(r"\.ya?ml$", word) and not re.search(r"[\s=:]", word) and not Path(word).is_file():
            return f"{shown}: there is no such file\n  fix: recipe=FILE.yaml; dtrain recipes ls shows the built-in ones"
        return f"{shown}: is not understood as key=value\n  fix: {probably_meant(word, argv)}"
    there = re.search(r"An item is already at '([\w./@-]+)'", text)
    if there and "." in there[1]:
        plain = next((word[1:] for word in argv if word.startswith(f"+{there[1]}=")), f"{there[1]}=VALUE")
        return f"+{there[1]}: the setting is there already\n  fix: {plain}   (without the +)"
    deleted = re.search(r"Could not delete from config\. '([\w.@/-]+)' does not exist", text)
    if deleted and "." in deleted[1]:
        return f"~{deleted[1]}: there is nothing to take away\n  fix: leave out ~{deleted[1]}"
    flag = re.search(r"Cannot find primary config '(.*?)'|Primary config module|Additional config directory", text)
    if flag:
        return of_config_flag(flag[1] or "", argv)
    key = re.search(r"Could not (?:override|append to|delete from) config.*?'?([\w./@-]+)'?\."
                    r"|Could not override '([\w.@/-]+)'", text)  # fmt: skip
    if key and "HYDRA_FULL_ERROR" not in (key[2] or key[1]):
        name, known = key[2] or key[1], known_settings()
        if name not in known and any(setting.startswith(f"{name}.") for setting in known):
            group, _, option = name.partition(".")
            fix = f"{name}.SETTING=VALUE"
            fix = f"{group}={option}, or {fix}" if group in SEVERAL and option in options_of(group) else fix
            return f"{as_typed(name, argv)}: is a section\n  fix: {fix}   (dtrain explain {name})"
        if name not in known:
            if absent := not_chosen(name):
                return absent
            typed = re.search(r"^To append to your config use \+[^=\n]*=(.*)$", text, re.MULTILINE)
            value = typed[1].strip("'\"") if typed and re.fullmatch(r"'[\w.+/-]*'|\"[\w.+/-]*\"", typed[1]) else ""
            return unknown_setting(name, value or (typed[1] if typed else ""), argv)
        group, _, setting = name.partition(".")
        if group in SEVERAL and "." in setting:
            option = setting.partition(".")[0]
            rule = f"{option} is not among the chosen {group.rstrip('s')}s"
            return f"{name}: {rule}\n  fix: {group}={option}, or {group}=[…,{option}]"
        if not setting:
            fix = f"{name}.SETTING=VALUE"
            if name in GROUPS:
                option = default_options()[name]
                fix = f"{name}={option}, or {name}.SETTING=VALUE; {name} can be {', '.join(options_of(name))}"
            return f"{as_typed(name, argv)}: is a section\n  fix: {fix}"
        files = {option: read_yaml(CONF / group / f"{option}.yaml") for option in options_of(group)}
        having = sorted((o for o in files if setting in files[o]), key=lambda o: len(files[o]))
        having = [o for o in having if o != "3d"] or having  # which needs 4 ranks
        fix = f"leave out {name}, or {group}={' or '.join(having)}"
        chosen = next((w for w in reversed(argv) if w.partition("=")[0] == group), "")
        fixed = any(word.startswith(("recipe=", "resume=", "fork=")) for word in argv)
        who = chosen or (f"the chosen {group}" if fixed or not argv else f"{group}={default_options()[group]}")
        return f"{as_typed(name, argv)}: {who} has no such setting\n  fix: {fix}"
    full_key = getattr(error, "full_key", None)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    noise = ("See ", "Set the env", "full_key:", "object_type=", "reference_type=")
    lines = [line for line in lines if not line.startswith(noise)]
    multiple = re.match(r"Multiple values for ([\w/]+)\. To override a value use '(.*): (.*)'", text)
    ambiguous = re.match(r"Ambiguous value for argument '(.*)'", text)
    if multiple:
        group, _, option = multiple.groups()
        fix = f"in the file, `defaults: [override /{group.removeprefix('/')}: {option}]`"
        return f"{group}={option}: there is a {group} already\n  fix: {fix}"
    if ambiguous:
        setting = ambiguous[1].partition("=")[0]
        comma = re.fullmatch(r"([^=]+)=(?:(0),(\d+)|(\d{1,3}),(000))", ambiguous[1])
        if comma:  # 0,001 and 1,000 are meant as one number
            one = f"{comma[1]}=0.{comma[3]}" if comma[2] else f"{comma[1]}={comma[4]}{comma[5]}"
        elif is_list(setting):
            return f"{ambiguous[1]}: is more than one value\n  fix: '{setting}=[{ambiguous[1].partition('=')[2]}]'"
        else:
            one = ambiguous[1].partition(",")[0].strip()
        values = ambiguous[1].partition("=")[2].split(",")
        is_sweep = setting not in known_settings() or all(accepted(setting, value.strip()) for value in values)
        fix = f"{one}, or -m {ambiguous[1]}" if is_sweep else one
        return f"{ambiguous[1]}: is more than one value\n  fix: {fix}"
    what = (f"{full_key}: " if full_key else "") + (" ".join(lines[:2]) if lines else type(error).__name__)
    return f"{what}\n  fix: dtrain launch --help shows every group and setting"


def of_config_flag(name: str, argv: Sequence[str]) -> str:
    """Explain Hydra's --config-name and --config-path, with which dtrain's own conf/ would be another one."""
    pairs = [word.partition("=") for word in argv]
    flags = {word: value or (argv[i + 1] if i + 1 < len(argv) else "") for i, (word, _, value) in enumerate(pairs)}
    names = {"name": ("--config-name", "-cn"), "path": ("--config-path", "-cp", "--config-dir", "-cd")}
    typed = {kind: next((w for w in flags if w in words), "") for kind, words in names.items()}
    flag = typed["name"] or typed["path"] or "--config-name"
    name = name or flags.get(typed["name"], "")
    places = [Path(flags.get(typed["path"], "."), name), Path(name)] if name else []
    file = next((path for place in places for path in (place, Path(f"{place}.yaml")) if path.is_file()), None)
    stem = name.removesuffix(".yaml")
    fix = f"recipe={stem}" if (RECIPES / f"{stem}.yaml").is_file() else "recipe=FILE.yaml, a file of settings"
    fix = f"recipe={file if '/' in str(file) else f'./{file}'}" if file else fix
    rule = "dtrain has its own main configuration; a file of settings is a recipe"
    return f"{flag}={flags.get(flag, name)}: {rule}\n  fix: {fix}"


def meant_option(group: str, option: str, options: list[str]) -> str:
    """Return what was probably meant by an option that there is not, up to a list of all options."""
    longer = [o for o in options if option and o.startswith(f"{option.lower()}-")]  # a100: a100-40gb or a100-80gb
    same = next((o for o in options if o == option.lower()), "")
    near = [same] if same else longer[:4] or difflib.get_close_matches(option.lower(), options, 1, 0.6)
    meant = None if same else foreign_option(group, option)
    if of_torch := [name for name in TORCH_OPTIMIZERS if group == "optim" and option.lower() == name.lower()]:
        return f"optim=torch.optim.{of_torch[0]}, or optim={near[0] if near else 'adamw'}; "
    if fix := called(group, option):
        return f"{fix}; "
    if group == "loss" and not (same or meant) and (name := nearest_name(option, torch_losses())):
        return f"loss=torch.nn.{name}; "
    if group == "data" and "/" in option:
        return f"data=text data.path={option}; for folders of images: data=images data.path={option}; "
    if group == "model" and Path(option).is_dir():
        return f"model=hf:{option}; "
    if meant and group == "model" and "/" in option:  # who names the Hub means those weights
        return (
            f"model=hf:FOLDER (that save_pretrained() wrote; nothing is downloaded), or {meant} with random weights; "
        )
    if meant:
        return f"{meant}; "
    if group == HOOKS and not near:
        return "hooks=MODULE.CLASS, a class of yours (docs/your-own.md#hooks); "
    return f"did you mean {' or '.join(f'{group}={o}' for o in near)}? " if near else ""


def called(group: str, text: str) -> str:
    """Return what to type for a call, model=net.Net(dim=32): the arguments are settings. "" if it is none."""
    from dtrain.config.schema import signature

    try:
        call = ast.parse(text.strip("'\""), mode="eval").body
    except (SyntaxError, ValueError):
        return ""
    if group not in GROUPS or not isinstance(call, ast.Call) or not re.fullmatch(r"[\w.]+", ast.unparse(call.func)):
        return ""
    target = ast.unparse(call.func)
    if "." not in target and target not in options_of(group):
        target = next(iter(defined_here(target, group)), f"MODULE.{target}")
    names: list[str] = []
    with contextlib.suppress(ValueError):  # there is no such class
        names = [*(signature(target, group, [target.rpartition(".")[0]]) or ())]
    is_function = isinstance(source_of(target), ast.FunctionDef)
    plain = [value for value in call.args if not isinstance(value, (ast.Name, ast.Attribute, ast.Call, ast.Starred))]
    if len(plain) == len(call.args):  # without what dtrain gives: the parameters; outputs and targets
        names = names[1 if group == "optim" else 2 if group in ("loss", "schedule") and is_function else 0 :]
    pairs = [(names[i] if i < len(names) else "NAME", value) for i, value in enumerate(call.args) if value in plain]
    pairs += [(one.arg, one.value) for one in call.keywords if one.arg]
    prefix = setting_prefix(group, target.rpartition(".")[2])
    return " ".join([f"{group}={target}", *(assigned(f"{prefix}.{name}", value) for name, value in pairs)])


def assigned(key: str, node: ast.expr) -> str:
    """Return a setting with a value that is written in Python, ready to paste."""
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return f"{key}=…"
    if isinstance(value, str):
        return argument(key, value)
    if isinstance(value, (dict, set, bytes, complex)) or value is ...:
        return f"{key}=…"
    text = json.dumps(value, separators=(",", ":"))
    return f"{key}={text}" if re.fullmatch(r"[\w.+-]*", text) else f"'{key}={text}'"


def is_list(key: str) -> bool:
    """Does the setting, or the group, take a list?"""
    return key in SEVERAL or isinstance(default_of(key), list)


def as_typed(name: str, argv: Sequence[str]) -> str:
    """Return the word of a command line that is about a setting; the name alone if the word may have a secret."""
    word = next((word for word in argv if word.partition("=")[0].lstrip("+~") == name), name)
    return name if SECRET.search(word) else word


def not_chosen(name: str) -> str:
    """Explain a setting of a hook or logger that no chosen one has; "" if the name is of another kind."""
    group, _, setting = name.partition(".")
    section, _, setting = setting.partition(".")
    options = options_of(group) if group in SEVERAL else []
    if not setting or not options or section in options:
        return ""
    near = difflib.get_close_matches(section.lower(), options, 1, 0.6)
    fix = f"{group}={near[0]} {group}.{near[0]}.{setting}=…" if near else f"{group}=MODULE.{section} {name}=…"
    return f"{name}: {section} is not among the chosen {group.rstrip('s')}s\n  fix: {fix}"


def torch_losses() -> list[str]:
    return sorted(name for name in exports("torch.nn.modules.loss") or () if name.endswith("Loss") and name[0] != "_")


# DeepSpeed's, where the value says which strategy
ZERO_STAGE = ("zero", "zero_stage", "zero_optimization", "zero_optimization.stage", "deepspeed_stage")
DEEPSPEED_FILE = ("deepspeed", "deepspeed_config", "deepspeed_config_file", "ds_config", "deepspeed_plugin")


OPTION_KEYS = ("name", "type", "kind", "class", "cls", "class_name", "class_path", "option", "id")  # optim.name=adam
PRETRAINED = (
    "pretrained",
    "from_pretrained",
    "use_pretrained",
    "pretrained_model",
    "weights",
    "pretrained_model_name_or_path",
)
METRICS = ("metrics", "metric", "compute_metrics", "eval_metrics", "train_metrics", "val_metrics")


def as_option(name: str, value: str) -> str:
    """Explain the option of a group that is typed as one of its settings."""
    group = name.rpartition(".")[0]
    if taken := accepted(group, value):
        fix = f"{group}={taken}   (dtrain explain {group})"
    elif OWN.fullmatch(value):
        fix = f"{group}={value}"
    else:
        options = options_of(group)
        fix = f"{meant_option(group, value, options) if value else ''}{group} can be {', '.join(options)}"
    return f"{name}: there is no such setting\n  fix: {fix}"


def pretrained(name: str, value: str) -> str:
    """Return what to type for pretrained weights."""
    if value.lower() in ("false", "0", "no", "off", "none", "null"):
        return f"leave out {name}"
    if (Path(value) / "config.json").is_file():
        return f"model=hf:{value}"
    if Path(value).is_dir():
        return f"init_from={value}   (dtrain explain init_from)"
    if Path(value).is_file():
        own = f"your own model can load {value} itself, in its __init__"
        return f"init_from=FOLDER, a run or one that save_pretrained() wrote; {own}"
    return "model=hf:FOLDER   (that save_pretrained() wrote; nothing is downloaded)"


def is_foreign(name: str) -> bool:
    """Is it a name that other programs use?"""
    others = any(name in theirs.split() for theirs, _ in OTHERWISE.values())
    return others or foreign(name) is not None or name in ZERO_STAGE or name in DEEPSPEED_FILE


def unknown_setting(name: str, value: str, argv: Sequence[str] = ()) -> str:
    """Explain a name that is none of ours: lr=0.1 is optim.lr=0.1, and wandb=true is logger=wandb.

    argv: all words, for a hook that is chosen already.
    """
    if name.rpartition(".")[0] in GROUPS and name.rpartition(".")[2].lower() in OPTION_KEYS:
        return as_option(name, value)
    if name.rpartition(".")[2].lower() in PRETRAINED:
        return f"{name}: there is no such setting\n  fix: {pretrained(name, value)}"
    if name.rpartition(".")[2].lower() in METRICS:
        note = "a class of yours, docs/your-own.md#hooks; loss=cross_entropy of classes has val_accuracy without it"
        return f"{name}: there is no such setting\n  fix: hooks=MODULE.CLASS   ({note})"
    # DeepSpeed's fp16.enabled=true, and train.fp16=true
    bare = name.lower().removesuffix(".enabled").rpartition(".")[2]
    groups = [group for group in GROUPS if bare in options_of(group)]
    is_on = value.lower() in (("", "true", "1", "yes", "on") if "." not in name else ("true", "yes", "on"))
    is_kind = groups == ["strategy"] and not re.fullmatch(r"false|no|off|[\d.]*", value.lower())  # fsdp=full_shard
    if len(groups) == 1 and (is_on or is_kind):
        group, option = groups[0], bare
        return f"{name}: there is no such setting\n  fix: {group}={option}   (dtrain explain {group})"
    if groups == ["precision"] and value.lower() in ("false", "0", "no", "off"):
        return f"{name}: there is no such setting\n  fix: precision=fp32   (the default)"
    name_alone = re.sub(r"^(deepspeed|ds_config|deepspeed_config)\.", "", name.lower())
    if name_alone in ZERO_STAGE or (name.lower() in DEEPSPEED_FILE and value.endswith(".json")):
        stage = f"zero{value}" if value in ("1", "2", "3") else "fsdp" if name_alone in ZERO_STAGE else "zero3"
        note = "DeepSpeed's; strategy=fsdp shards as stage 3 does" if stage != "fsdp" else "it shards as ZeRO does"
        file = f" strategy.deepspeed_config={value}" if value.endswith(".json") else ""
        return f"{name}: there is no such setting\n  fix: strategy={stage}{file}   ({note})"
    ours, leaf = foreign(name), name.rpartition(".")[2]
    if ours == "resume" and name.startswith("checkpoint.") and value and not Path(value).exists():  # where to save
        note = "where the run is saved; resume=RUN continues one"
        return f"{name}: there is no such setting\n  fix: run_dir={value}   ({note})"
    if leaf == "warmup_ratio" and (steps := steps_of(value, argv)):
        return f"{name}: there is no such setting\n  fix: schedule.warmup_steps={steps}   (a number of steps)"
    if leaf in GROUPS and leaf != name and (taken := accepted(leaf, value)):  # trainer.precision=16-mixed
        return f"{name}: there is no such setting\n  fix: {leaf}={taken}   (dtrain explain {leaf})"
    if ours == "checkpoint.keep_best" and value.startswith("eval_"):  # Trainer's eval_loss
        value = value.replace("eval_", "val_", 1)
    if ours in ("resume", "init_from") and value.lower() in ("last", "true", "latest"):
        return f"{name}: there is no such setting\n  fix: resume=latest   (dtrain explain resume)"
    taken = accepted(ours, value) if ours and value else None
    if ours in GROUPS and value and not taken and (near := meant_option(ours, value.strip("[]"), options_of(ours))):
        return f"{name}: there is no such setting\n  fix: {near.rstrip('; ')}"
    group, _, setting = (ours or "").partition(".")
    if group in SEVERAL and setting:  # patience=3
        option = setting.partition(".")[0]
        is_chosen = any(re.match(rf"{group}=(.*\W)?{option}\b", word) for word in argv)
        fix = f"{'' if is_chosen else f'{group}={option} '}{ours}={taken or '…'}"
        return f"{name}: there is no such setting\n  fix: {fix}   (dtrain explain {group}={option})"
    return str(unknown(name, known_settings(), taken, lambda near: not value or accepted(near, value) is not None))


def steps_of(ratio: str, argv: Sequence[str]) -> int | None:
    """Return a share of the typed train.steps in steps."""
    typed = next((word.partition("=")[2] for word in reversed(argv) if word.startswith("train.steps=")), "")
    if not typed.isdecimal() or not re.fullmatch(r"0?\.\d*[1-9]\d*", ratio):
        return None
    return max(1, round(float(ratio) * int(typed)))


def accepted(name: str, value: str) -> str | None:
    """Return the value as it is typed for a setting or group of ours; None if that would be refused."""
    from dtrain.config import describe, schema
    from dtrain.config.ranges import check_ranges

    if name in GROUPS:
        option = value.strip("[]").lower() if name in SEVERAL else value.lower()
        same = foreign_option(name, option)
        option = same.partition("=")[2] if same and "FOLDER" not in same else option
        return option if option.partition(" ")[0] in options_of(name) else None
    if re.fullmatch(r"[\w.+/-]+", value, re.ASCII) is None:
        return None  # it might need quotes
    parsed = yaml_value(value)
    group, _, key = name.partition(".")
    if group in SEVERAL:  # which of them is chosen decides
        return value
    try:
        if group in GROUPS:
            target = describe.target_of(group, default_options()[group])
            parameters = schema.signature(target, group) or {}
            if key not in parameters:
                return None
            schema.check_type(name, parsed, *parameters[key])
        else:
            known = flatten(read_yaml(CONF / "config.yaml"))
            if name not in known:  # e.g. script.args
                return None
            schema.check_plain(name, parsed, known[name])
        check_ranges({name: parsed})
    except ValueError:
        return None
    return value


def yaml_value(text: str) -> object:
    import yaml

    return yaml.load(text, yaml_loader())


def probably_meant(word: str, argv: Sequence[str] = ()) -> str:
    """Guess the intended override for `fsdp`, `strategy:fsdp`, `train.steps = 5`, `net.py` or `run_dir=a=b`.

    argv: all words, for a setting and a value that a space separates.
    """
    if re.fullmatch(r"[\w./-]+\.py", word):
        return f"script={word}"
    if re.search(r"\.ya?ml$", word) and Path(word).is_file():
        return f"recipe={word if '/' in word else f'./{word}'}"
    if re.fullmatch(r"[\w.]+=\S+,", word) and word in argv:  # -m optim.lr=1e-3, 3e-3
        values = [word]
        for part in argv[argv.index(word) + 1 :]:
            if "=" in part or part.startswith("-") or not values[-1].endswith(","):
                break
            values.append(part)
        together = "".join(values).rstrip(",")
        return f"-m {together}   (no space after a comma)" if "," in together else together
    if drawn := re.fullmatch(r"([\w.]+)=(?:tune\.)?(log_?uniform|q?uniform|q?randint|lograndint)\((.*)\)", word):
        key, kind, bounds = drawn[1], drawn[2], ",".join(drawn[3].replace(" ", "").split(",")[:2])
        space = f"{'range' if 'int' in kind else 'interval'}({bounds})"
        return f"'{key}={f'tag(log,{space})' if 'log' in kind else space}'   (for dtrain search)"
    if word in argv and (word in GROUPS or word in known_settings()):
        following = [part for part in argv[argv.index(word) + 1 :][:2] if part != "="]
        if following and accepted(word, following[0].lstrip("=")):  # strategy fsdp, train.steps = 5
            return f"{word}={accepted(word, following[0].lstrip('='))}"
        if word in GROUPS:
            return f"{word}={default_options()[word]}; {word} can be {', '.join(options_of(word))}"
    for group in GROUPS:
        if word in options_of(group):
            return f"{group}={word}"
    if fix := called(*word.partition("=")[::2]):
        return fix
    pair = re.fullmatch(r"\s*([A-Za-z_][\w.]*)\s*[=:/ ]\s*(.*?)\s*|\s*([A-Za-z_][\w.-]*)\s*", word)
    if pair is None:
        return "key=value"
    key, value = pair[1] or pair[3], (pair[2] or "").strip("=")
    if value.startswith("[") and value.endswith("]") and "=" in value:  # [--cpu-bind=none]
        items = ",".join(f'"{item.strip()}"' for item in value[1:-1].split(","))
        return f"'{key}=[{items}]'"
    if is_list(key) and (pair := re.fullmatch(r"\((.*)\)", value)):  # (0.9,0.95), as in Python
        return f"'{key}=[{pair[1]}]'"
    simple = re.fullmatch(r"[\w./-]*", value, re.ASCII)
    if not simple and key in known_settings() and not accepted(key, "text"):  # a number, or a list
        number = re.search(r"-?\d[\w.+-]*", value)
        if number and accepted(key, number[0]):  # train.steps=[1
            return f"{key}={number[0]}"
        if value.startswith("[") and "]" not in value:
            return f"'{key}={value}]'"
    if simple and not value:  # train.steps==
        default = default_of(key)
        value = str(default) if isinstance(default, (int, float)) and not isinstance(default, bool) else "…"
    return f"{key}={value}" if simple else f"'{key}=\"{value}\"'"
