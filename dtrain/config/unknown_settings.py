"""Explain a setting that is none of ours: lr=0.1, wandb=true, and the names that other programs have for them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from dtrain.config.files import (
    CONF,
    GROUPS,
    SEVERAL,
    default_options,
    flatten,
    known_settings,
    options_of,
    read_yaml,
    yaml_loader,
)
from dtrain.config.meant_option import OWN, meant_option
from dtrain.errors import OTHERWISE, foreign, foreign_option, unknown

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
    if ours == "cluster.processes" and re.search("gpu|nproc", leaf) and value and has_nodes(argv):
        return f"{name}: there is no such setting\n  fix: cluster.gpus_per_node={value}   (dtrain explain cluster)"
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


def has_nodes(argv: Sequence[str]) -> bool:
    """Is a cluster typed whose nodes have a number of GPUs?"""
    typed = [word.partition("=")[2] for word in argv if word.startswith("cluster=")]
    option = typed[-1] if typed else default_options()["cluster"]
    return option in options_of("cluster") and "gpus_per_node" in read_yaml(CONF / "cluster" / f"{option}.yaml")


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
