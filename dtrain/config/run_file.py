"""A run's config.yaml: written by the launcher, read by the ranks and by every command that inspects a run."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from dtrain.config.build import own_file
from dtrain.config.files import ADDRESSES, CODE, GROUPS, LOGGER, TARGET, flatten, is_script, yaml_loader
from dtrain.config.redaction import redact
from dtrain.config.untrusted import MOST_IN_A_RUN, check_file, read, read_text
from dtrain.errors import bad
from dtrain.util.format import as_dict
from dtrain.util.regular_file import read_bytes

SERVER = re.compile(rf"{LOGGER}\.\w+\.({'|'.join(ADDRESSES)})")  # a setting
IS_SERVER = re.compile(rf"^ +({'|'.join(ADDRESSES)}): (?!null)".encode(), re.M)  # a line of config.yaml
IS_PROGRAM, PROGRAM = re.compile(rb"^script:", re.M), re.compile(r"[\w/ .+-]+")
OWN_TARGET = re.compile(r"^ +_target_: (?!dtrain\.)([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)$", re.M | re.ASCII)
ADDRESS = re.compile(r"\w[\w+.-]*:[\w/.:%+-]+", re.ASCII)  # nothing that a shell or Hydra reads, and no password


def save(run_dir: Path, config: dict[str, Any]) -> None:
    """Write config.yaml, complete and resolved; values under secret-like keys are redacted."""
    from omegaconf import OmegaConf

    temporary = run_dir / ".config.yaml.tmp"
    OmegaConf.save(OmegaConf.create(redact(config)), temporary)
    os.replace(temporary, run_dir / "config.yaml")


class Settings(dict[str, Any]):
    """A dict whose keys are also attributes. An OmegaConf read takes 20 µs, and the training loop reads often."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__({k: Settings(v) if isinstance(v, dict) else v for k, v in values.items()})

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def load(run_dir: Path) -> Settings:
    """Read config.yaml as the launcher wrote it; the ranks call this. A tampered folder executes nothing."""

    return Settings(read_run(run_dir))


def allows(resume_allow: Iterable[str], name: str) -> bool:
    """Does resume_allow name this setting, or a part of it?"""
    return any(allowed == name or allowed.startswith(f"{name}.") for allowed in resume_allow)


# former module paths of conf/ targets: the config.yaml of older runs still has them
OLD_MODULES = {
    "dtrain.comm.preflight": "dtrain.preflight.run",
    "dtrain.data.labelled": "dtrain.data.text_classification",
    "dtrain.data.lines": "dtrain.data.stdlib_lines",
    "dtrain.data.masked": "dtrain.data.masked_lm",
    "dtrain.hardware": "dtrain.config.hardware",
    "dtrain.launchers.local": "dtrain.launch.local",
    "dtrain.launchers.slurm": "dtrain.launch.slurm",
    "dtrain.losses": "dtrain.models.losses",
    "dtrain.optim": "dtrain.optim.build",
    "dtrain.precision": "dtrain.optim.precision",
    "dtrain.schedule": "dtrain.optim.schedule",
    "dtrain.strategies.zero": "dtrain.strategies.deepspeed",
}


OLD_LOGGERS = {
    f"{module}.{name}": option
    for module in ("dtrain.loggers", "dtrain.train.loggers")
    for name, option in (("NoLogger", ""), ("Wandb", "wandb"))
}


def with_current_targets(config: dict[str, Any]) -> dict[str, Any]:
    """Replace former module paths of dtrain's own classes with the current ones."""
    config = dict(config)
    for group in GROUPS:
        section = config.get(group)
        if isinstance(section, dict) and isinstance(section.get(TARGET), str):
            module, _, name = section[TARGET].rpartition(".")
            if module in OLD_MODULES:
                config[group] = section | {TARGET: f"{OLD_MODULES[module]}.{name}"}
    logger = config.get(LOGGER)
    if isinstance(logger, dict) and logger.get(TARGET) in OLD_LOGGERS:  # when there could be only one
        name = OLD_LOGGERS[logger[TARGET]]
        config[LOGGER] = {name: logger | {TARGET: f"dtrain.loggers.{name}.Wandb"}} if name else {}
    return config


# settings of an older version's checkpoints
OLD_CHECKPOINT = {
    "save": True, "incremental": 0, "peer": False, "peer_every": 0, "keep_best": None, "best_mode": None,
}  # fmt: skip


def completed(config: dict[str, Any]) -> dict[str, Any]:
    """Fill in settings that an older version did not write, with that version's behavior."""
    if is_script(config):
        return config
    precision, checkpoint = config.get("precision"), config.get("checkpoint")
    if isinstance(precision, dict) and precision.get("_target_") == "dtrain.optim.precision.Precision":
        precision.setdefault("stream", "float32")
    if isinstance(checkpoint, dict):
        checkpoint.setdefault("background", True)
        for setting, value in OLD_CHECKPOINT.items():
            checkpoint.setdefault(setting, value)
    if isinstance(config.get("train"), dict):
        config["train"].setdefault("spike", None)
        config["train"].setdefault("epochs", None)
        every = config["train"].pop("check_replicas_every", 500)  # its former name and default
        if isinstance(config.get("guard", {}), dict):
            config["guard"] = {"replicas_every": every, "replay_every": 0} | config.get("guard", {})
    config.setdefault("ema", {"decay": 0.0, "evaluate": False})
    return {"nsys": False, "cuda_graphs": "none", "profile": {"_target_": "dtrain.profile.record.Profile"}} | config


def fingerprint(run_dir: Path, name: str = "config.yaml") -> str:
    return hashlib.sha256(read_bytes(run_dir / name)).hexdigest()


class Version(NamedTuple):
    """A configuration of a run."""

    cfg: Mapping[str, Any]
    launch: int | None = None  # that it was of, from 1; None: of the newest, or not known


def version(run_dir: Path, sha256: str) -> Version | None:
    """Return the configuration with this fingerprint: config.yaml, or one that was kept when a resume replaced it."""
    for name in ("config.yaml", *sorted(path.name for path in run_dir.glob("config-*.yaml"))):
        with suppress(OSError):
            if fingerprint(run_dir, name) == sha256:
                number = name.removeprefix("config-").removesuffix(".yaml")
                return Version(Settings(read_run(run_dir, name=name)), int(number) if number.isdecimal() else None)
    return None


def read_run(run_dir: Path, setting: str = "run", name: str = "config.yaml") -> dict[str, Any]:
    """Read a run's config.yaml as plain values; nothing in it is executed."""
    path = run_dir / name
    try:
        config = read(path, MOST_IN_A_RUN)
    except FileNotFoundError:
        raise
    except Exception as error:  # from the file system, or one of yaml's many types
        why = getattr(error, "strerror", None) or " ".join(str(error).split())
        rule = f"its {name} cannot be read ({why})"
        raise bad(setting, run_dir, rule, "choose another run; dtrain runs lists them") from error
    if not isinstance(config, dict):
        rule = f"its {name} is not that of a run"
        raise bad(setting, run_dir, rule, "choose another run; dtrain runs lists them")
    config = with_current_targets({str(k): v for k, v in config.items()})
    checked = dict(config)
    if isinstance(config.get("cluster"), dict):  # shell code contains ${…}, and must be typed again for a resume
        checked["cluster"] = {k: v for k, v in config["cluster"].items() if k not in CODE}
    check_file(path, checked)
    return config


def flat_config(run_dir: Path) -> dict[str, Any] | None:
    """Return config.yaml as {"train.steps": 100, …}, with a list as one value; None if it cannot be read."""
    import yaml  # imported late: 28 ms, and OmegaConf with the other

    try:
        tree = yaml.load(read_text(run_dir / "config.yaml"), yaml_loader())
    except (OSError, ValueError, yaml.YAMLError):
        return None
    flat = flatten(as_dict(tree))
    flat.pop("run_dir", None)  # always differs, and is the table's heading
    return flat


def servers(run_dir: Path) -> list[str]:
    """Return the addresses of a run's trackers as overrides: a resume wants them typed again, as the folder may lie."""
    with suppress(OSError):
        if IS_SERVER.search(read_bytes(run_dir / "config.yaml")):
            found = {key: value for key, value in (flat_config(run_dir) or {}).items() if SERVER.fullmatch(key)}
            typed = {key: value for key, value in found.items() if isinstance(value, str)}
            return [f"{key}={value}" for key, value in typed.items() if ADDRESS.fullmatch(value)]
    return []


def modules(run_dir: Path) -> list[str]:
    """Return the modules of a user's own code that a run names: they must be trusted again, as the folder may lie.

    Only files of the user, found from the working folder but not in the run folder, and torch's own optimizers and
    layers. A folder without __init__.py is not named: any folder could be one.
    """
    inside = Path(run_dir).resolve()
    found: list[str] = []
    with suppress(OSError):
        for target in OWN_TARGET.findall(read_bytes(run_dir / "config.yaml").decode(errors="replace")):
            module = target.rpartition(".")[0]
            is_torch = module.startswith(("torch.optim", "torch.nn"))
            file = None if is_torch else own_file(module.partition(".")[0])
            is_own = file is not None and file.is_file() and not is_beside(file, inside)
            if module and (is_torch or is_own):
                found.append(module if is_torch else module.partition(".")[0])
    return list(dict.fromkeys(found))


def is_beside(file: Path, run_dir: Path) -> bool:
    """Is the module in the run folder, or a package that the run folder is in?"""
    return file.is_relative_to(run_dir) or (file.name == "__init__.py" and run_dir.is_relative_to(file.parent))


def program(run_dir: Path) -> list[str]:
    """Return `script=FILE` of a run of a user's own program: a resume wants it typed again, as the folder may lie."""
    with suppress(OSError):
        if IS_PROGRAM.search(read_bytes(run_dir / "config.yaml")):
            path = (flat_config(run_dir) or {}).get("script.path")
            return [shlex.quote(f"script={path}")] if isinstance(path, str) and PROGRAM.fullmatch(path) else []
    return []
