"""Turn the configuration that Hydra composed into plain values, and check them and the run folder they name."""

from __future__ import annotations

import itertools
import os
import tempfile
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError

from dtrain.checks import loss
from dtrain.checks import profile as profiling
from dtrain.checks.loggers import check_resumed
from dtrain.checks.resume import (
    check_checkpoints,
    check_code,
    check_profile,
    check_queue,
    check_resume,
    check_unfinished,
)
from dtrain.checks.validate import validate
from dtrain.config import redaction, run_length
from dtrain.config.files import GROUPS, SEVERAL, is_script, options_of
from dtrain.config.hardware import ranks_per_node
from dtrain.config.needed import missing
from dtrain.config.untrusted import check_own, resolved
from dtrain.errors import bad
from dtrain.launch import fork, sweeps
from dtrain.launch.options import AUTO
from dtrain.launch.resume_arguments import read_config
from dtrain.plan import free_space
from dtrain.runs.folder import locked, read_summary
from dtrain.util import disk_space
from dtrain.util.format import argument


def resolve(cfg: DictConfig) -> dict[str, Any]:
    """Return the composed configuration as plain, checked values."""
    if "hydra" in cfg:  # called from the gate, before Hydra starts the job
        HydraConfig.instance().set_config(cfg)
    config = plain_values(cfg)
    if config["choices"].get("strategy") == AUTO:
        from dtrain.launch import auto

        auto.settle(cfg, config)
        config = plain_values(cfg)
    validate(config)
    check_own(config)
    if not is_script(config):
        loss.check(config)
    run_dir = absolute_run_dir(cfg, config)
    if config["cluster"].get("node_rank"):
        return config  # a further node: node 0 manages the run folder
    typed = typed_settings()
    in_sweep = HydraConfig.get().mode == RunMode.MULTIRUN
    if not in_sweep and not is_script(config):  # points of a sweep may have profile=none
        profiling.check_typed(config, typed)
    if in_sweep and (run_dir / "launch.json").exists():  # the same sweep command again: resume unfinished runs
        config["resume"] = config["run_dir"]
        if not sweeps.unfinished(run_dir):
            return config
    if config["resume"]:
        check_resumes(config, run_dir, typed, in_sweep)
    elif (run_dir / "launch.json").exists():
        fix = f"{argument('resume', config['run_dir'])}, or another run_dir"
        if read_summary(run_dir).get("status") == "done":  # nothing is left to resume
            fix = f"{free_name(config['run_dir'])}; to train on, resume= with more steps"
        raise bad("run_dir", config["run_dir"], "this folder already has a run", fix)
    elif config.get("fork"):
        old = read_config(fork.parse(config["fork"]).run_dir)
        config["choices"]["recipe"] = old.get("choices", {}).get("recipe")
        fork.check(old, config)
        check_code(old, config)
        check_resumed(old, config)
    check_folder(config, run_dir)
    return config


def typed_settings() -> list[str]:
    return [o.partition("=")[0].lstrip("+") for o in HydraConfig.get().overrides.task]


def absolute_run_dir(cfg: DictConfig, config: dict[str, Any]) -> Path:
    """Check where the run folder is, and make it absolute in the configuration, too."""
    if not config["run_dir"]:
        raise bad("run_dir", "", "must name a folder", "run_dir=outputs/my-run")
    run_dir = Path(config["run_dir"]).absolute()
    if "hydra" in cfg and OmegaConf.to_container(cfg.hydra.run) != {"dir": "${run_dir}"}:
        fix = f"run_dir={cfg.hydra.run.dir}"
        raise bad("hydra.run.dir", cfg.hydra.run.dir, "the run folder is set by run_dir", fix)
    config["run_dir"] = str(run_dir)
    redaction.check(config["run_dir"], "run_dir")  # checked again, now as an absolute path
    is_shared = config["cluster"].get("launcher") == "torchrun" and config["cluster"]["nodes"] > 1
    if is_shared and "run_dir" not in typed_settings():
        rule = "its default contains the time, but every node must use the same folder"
        raise bad("run_dir", os.path.relpath(run_dir), rule, "run_dir=… on a file system that all nodes share")
    return run_dir


def check_resumes(config: dict[str, Any], run_dir: Path, typed: list[str], in_sweep: bool) -> None:
    """Check that the run can be resumed with these settings."""
    check_queue(config, run_dir)
    old = read_config(run_dir)
    config["choices"]["recipe"] = old.get("choices", {}).get("recipe")
    if not in_sweep:  # a point of a sweep starts again
        check_checkpoints(old, config, run_dir)
    check_resume(old, config, config["resume_allow"], run_dir, typed)
    check_code(old, config)
    check_resumed(old, config)
    with locked(run_dir):
        pass  # raises if the run is still running
    check_unfinished(config, run_dir)
    if not in_sweep and not is_script(config):  # a sweep's overrides apply to all points, also to one near its end
        check_profile(config, run_dir, typed)


def check_folder(config: dict[str, Any], run_dir: Path) -> None:
    """Check that the run folder is a resumed run's, or new and writable."""
    outer = next((p for p in run_dir.resolve().parents if (p / "launch.json").is_file()), None)
    if outer and not config["resume"]:
        rule = f"lies inside the folder of another run, {outer}"
        raise bad("run_dir", config["run_dir"], rule, "leave out run_dir=, or choose one elsewhere")
    if run_dir.is_dir() and not config["resume"] and any(p.name != ".hydra" for p in run_dir.iterdir()):
        raise bad("run_dir", config["run_dir"], "the folder is not empty and has no run", free_name(config["run_dir"]))
    writable = next(p for p in (run_dir, *run_dir.parents) if os.path.lexists(p))
    try:
        tempfile.TemporaryFile(dir=writable).close()  # the only reliable check, also for root and read-only mounts
    except OSError as error:
        if error.errno in disk_space.FULL and (text := disk_space.shortage(writable)):
            raise free_space.full(run_dir, text) from error
        rule = f"{writable} cannot be written to ({error.strerror})"
        raise bad(
            "run_dir", config["run_dir"], rule, "leave out run_dir=, or choose one that you can write to"
        ) from error


def free_name(run_dir: str) -> str:
    """Return run_dir= with a name like this one that no folder has."""
    names = (f"{run_dir}-{number}" for number in itertools.count(2))
    return argument("run_dir", next(name for name in names if not Path(name).exists()))


def plain_values(cfg: DictConfig) -> dict[str, Any]:
    """Return the composed configuration, completed with ranks, choices and absolute paths of this machine."""
    for group in GROUPS:
        if group in cfg and not isinstance(cfg[group], DictConfig):
            raise bad(
                group,
                cfg[group],
                "is a section; options are chosen in the defaults list",
                f"in the file, `defaults: [override /{group}: {cfg[group] or 'OPTION'}]`",
            )
    if "choices" in cfg and not (isinstance(cfg["choices"], DictConfig) and cfg["choices"]):
        raise bad(
            "choices", cfg["choices"], "is written by dtrain: the chosen option of each group", "leave out choices"
        )
    for name, value in cfg["choices"].items() if "choices" in cfg else ():
        fix = f"leave out choices.{name}" + (f"; {name} can be {', '.join(options_of(name))}" if name in GROUPS else "")
        raise bad(f"choices.{name}", value, "is written by dtrain: the chosen option of each group", fix)
    overrides: Any = OmegaConf.to_container(HydraConfig.get().overrides.task)  # one by one, they would resolve
    try:
        config = resolved(cfg, overrides)
    except InterpolationKeyError as error:
        if text := missing(error, HydraConfig.get().runtime.choices, cfg, overrides):
            raise ValueError(text) from error
        raise
    redaction.check(config)
    run_length.keep_one_length(config, overrides)
    config["run_dir"] = cfg.get("run_dir")  # Hydra's own value: in a copy, ${now:} may resolve to a later second
    if config["cluster"].get("processes", 0) is None:
        config["cluster"]["processes"] = ranks_per_node(config["cluster"])
    choices = OmegaConf.to_container(HydraConfig.get().runtime.choices)
    assert isinstance(choices, dict)
    groups = [group for group in GROUPS if group in config]
    config["choices"] = {g: choices.get(g) for g in (*groups, "recipe", AUTO) if g != AUTO or g in choices}
    config["choices"] |= {g: ",".join(config[g]) or "none" for g in SEVERAL if g in groups}
    # absolute, so that a resume from any working directory finds them
    for group, keys in (("data", ("path", "tokenizer")), ("strategy", ("nvme_path", "deepspeed_config"))):
        section = config.get(group, {})
        for key in keys:
            if isinstance(section.get(key), str) and section[key] not in ("", "???"):
                section[key] = str(Path(section[key]).expanduser().absolute())
    if config.get("init_from") and isinstance(config["init_from"], str):  # other types are rejected later
        config["init_from"] = str(Path(config["init_from"]).expanduser().absolute())
    return config
