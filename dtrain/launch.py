"""`python launch.py …`: Hydra composes here, once; the result is checked, written to the run folder and launched.

The order matters: `Gate` runs before Hydra makes any folder, so a refused configuration leaves nothing behind.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import shlex
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from dtrain import console, runs
from dtrain.config import CONF, RECIPES, SECRET, bad, build, count_gpus, save
from dtrain.contract import BAD_CONFIG, DONE, FAILED, PREEMPTED
from dtrain.explain import GROUPS, explain, known_settings, options_of
from dtrain.rundir import latest_checkpoint, locked, read_json, write_json
from dtrain.schema import unknown
from dtrain.strategies import zero_config
from dtrain.validate import check_resume, validate

MISTAKES = (HydraException, OmegaConfBaseException, ValueError, OSError)  # a person's, not ours: one message explains


def main(argv: list[str]) -> int:
    """Run `dtrain launch`. Exit codes: 0 done, 2 bad configuration, 3 failed while running, 75 preempted and saved."""
    full_error = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise, so that the message below is ours and the code is 2
    exit_codes: list[int] = []
    if os.getcwd() not in sys.path:  # a user's own modules lie there, and the ranks look there too
        sys.path.append(os.getcwd())
    try:
        arguments = prepare_arguments(argv)
        sys.argv = ["launch.py", *arguments]
        OmegaConf.register_new_resolver("dtrain.slug", slug, replace=True)
        task = functools.wraps(run)(lambda cfg: exit_codes.append(run(cfg, argv)))
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(task)()
    except MISTAKES as error:
        if full_error:
            raise
        console.print_error(explain(error))
        return 2
    except SystemExit as stop:  # from the gate, or from Hydra's own argument parser
        if stop.__cause__ is None:
            return PREEMPTED if stop.code == PREEMPTED else BAD_CONFIG if stop.code else DONE
        if full_error or not isinstance(stop.__cause__, MISTAKES):
            raise stop.__cause__ from None
        console.print_error(explain(stop.__cause__))
        return 2
    finally:
        os.environ.pop("HYDRA_FULL_ERROR", None)
        if full_error:
            os.environ["HYDRA_FULL_ERROR"] = "1"
    return max(exit_codes, key=[DONE, PREEMPTED, BAD_CONFIG, FAILED].index, default=DONE)  # the worst of a sweep


# ---- before Hydra: the words that are ours -------------------------------------------------------------------


def prepare_arguments(argv: list[str]) -> list[str]:
    """Turn `--dry-run`, `recipe=FILE` and `resume=RUN` into what Hydra composes; leave the rest as typed."""
    argv = ["dry_run=true" if a == "--dry-run" else a for a in argv]
    ours = "|".join([*GROUPS, "recipe", "resume", "run_dir"])
    argv = [re.sub(rf"^\++({ours})=", r"\1=", a) for a in argv]  # +strategy=fsdp
    argv = [re.sub(r"^([\w.+]+=)~(?=/|$)", lambda m: m[1] + str(Path.home()), a) for a in argv]  # no shell does it here
    argv = [a for a in argv if a != "recipe=null"]  # the default, which Hydra does not let one type
    for word in argv:
        name, _, value = word.lstrip("-").partition("=")
        if word.startswith("-") and name in known_settings():
            raise ValueError(f"{word}: settings have no dashes\n  fix: {name}={value or '…'}")
    given = {a.split("=", 1)[0]: a.split("=", 1)[1] for a in argv if "=" in a and not a.startswith("-")}
    for key, value in given.items():
        if SECRET.search(key):
            raise bad(
                key,
                "…",
                "looks like a secret, and a configuration is written to disk in several places",
                "give it in an environment variable",
            )
        if key in GROUPS and re.search(r"^(null)?$|\[|\.\.|\.ya?ml$", value):
            raise bad(
                key,
                value,
                f"names one option of conf/{key}/, without .yaml",
                f"{key} can be {', '.join(options_of(key))}",
            )
    if "run_dir" in given and {"-m", "--multirun"} & set(argv):
        raise bad("run_dir", given["run_dir"], "a sweep makes a folder for each job", "hydra.sweep.dir=FOLDER")
    store_recipes()
    if "recipe" in given and re.search(r"[/\\]|\.ya?ml$", given["recipe"]):
        path = Path(given["recipe"]).expanduser()
        if not path.is_file():
            raise bad("recipe", given["recipe"], "there is no such file", "dtrain recipes ls shows the built-in ones")
        store_recipe(path)
        argv = [f"recipe={path.stem}" if a == f"recipe={given['recipe']}" else a for a in argv]
    if given.get("resume", "null") != "null":
        if "recipe" in given or {"-m", "--multirun"} & set(argv):
            raise bad(
                "resume",
                given["resume"],
                "a run goes on with its own configuration, one run at a time",
                "leave out recipe= and -m",
            )
        run_dir = runs.find_run(given["resume"])
        store_as_run(run_dir, overridden=[g for g in GROUPS if g in given])
        argv = [a for a in argv if not a.startswith(("resume=", "run_dir="))]
        argv += ["recipe=as-run", f"resume={quote(run_dir)}", f"run_dir={quote(run_dir)}"]
    return argv


def quote(path: Path) -> str:
    """A path as a Hydra value: quoted, so that spaces, commas and equals signs are only characters.

    Hydra takes a backslash as an escape only before a quote.
    """
    return "'" + re.sub(r"(\\*)('|\Z)", lambda m: m[1] * 2 + m[2].replace("'", "\\'"), str(path)) + "'"


def store_recipes() -> None:
    for path in sorted(RECIPES.glob("*.yaml")):
        store_recipe(path)


def store_recipe(path: Path) -> None:
    try:
        node = OmegaConf.load(path)
    except Exception as error:  # yaml errors have many types; all of them mean: this file is not yaml
        raise bad("recipe", path, f"is not valid yaml: {error}", "mend the file") from error
    if not isinstance(node, DictConfig) or not all(re.fullmatch(r"[\w.-]+", str(key)) for key in node):
        raise bad("recipe", path, "must be a yaml mapping of settings", "dtrain recipes cp cpu-tiny my.yaml")
    for key in ("resume", "trust"):  # else a file from elsewhere could name any code and trust it, too
        if node.get(key):
            raise bad("recipe", path, f"{key} is for the command line", f"take it out of the file and type {key}=…")
    ConfigStore.instance().store(group="recipe", name=path.stem, node=node, package="_global_")


def store_as_run(run_dir: Path, overridden: list[str]) -> None:
    """Offer a run's own config.yaml as a recipe: every value as it was, less the groups named on the command line.

    So a resume does not depend on what conf/ or a recipe says today.
    """
    config = read_config(run_dir)
    choices = config.pop("choices", None) or {}
    # trust is typed anew: a run folder may come from elsewhere
    for key in ("run_dir", "resume", "resume_allow", "dry_run", "trust", *overridden):
        config.pop(key, None)
    config["train"].pop("stop_after", None)  # it meant the launch that has stopped
    defaults = [{f"override /{g}": choices[g]} for g in GROUPS if g in choices and g not in overridden]
    node = OmegaConf.create({"defaults": [*defaults, "_self_"], **config})
    ConfigStore.instance().store(group="recipe", name="as-run", node=node, package="_global_")


def read_config(run_dir: Path) -> dict[str, Any]:
    try:
        config = OmegaConf.to_container(OmegaConf.load(run_dir / "config.yaml"))
    except Exception as error:  # of the file system, or one of yaml's many types
        why = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise bad(
            "resume", run_dir, f"its config.yaml cannot be read ({why})", "another run; dtrain runs lists them"
        ) from error
    if not isinstance(config, dict) or not isinstance(config.get("train"), dict):
        raise bad("resume", run_dir, "its config.yaml is not that of a run", "another run; dtrain runs lists them")
    return {str(k): v for k, v in config.items()}


def slug(text: str) -> str:
    """Overrides as a folder name: no slashes, no spaces, not longer than file systems take."""
    return re.sub(r"[^\w.,=+-]+", "-", text)[:120].strip("-")


# ---- Hydra's side --------------------------------------------------------------------------------------------


class Gate(Callback):
    """Check one run, or every job of a sweep, before Hydra makes a folder; close a sweep with one table."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        self._check([config])

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        if str(config.hydra.sweeper._target_).endswith("BasicSweeper"):
            self._check(sweep_jobs(config))
        # else a search, which decides its jobs as it goes; each is checked when it comes

    def _check(self, configs: Iterable[DictConfig]) -> None:
        # Hydra turns an exception of a callback into a warning and goes on; SystemExit is the way to be heard
        try:
            resolved = [resolve(config) for config in configs]
            clusters = [build(config["cluster"], config["trust"]) for config in resolved]
        except Exception as error:
            raise SystemExit(2) from error
        if resolved[0]["dry_run"]:
            for cluster, config in zip(clusters, resolved, strict=True):
                cluster.dry_run(Path(config["run_dir"]), config)
                if "deepspeed_config" in config["strategy"]:
                    print(
                        "\nDeepSpeed's configuration, made from these settings (where a step ends we tell the engine):"
                    )
                    print(json.dumps(zero_config.check(config, validate(config)), indent=2))
            raise SystemExit(0)

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        folder = Path(config.hydra.sweep.dir)
        folders = [p.parent for p in folder.glob("*/launch.json")]
        runs.print_sweep(sorted(folders, key=lambda p: (len(p.name.split("-")[0]), p.name)))  # 2-… before 10-…


def sweep_jobs(config: DictConfig) -> Iterator[DictConfig]:
    """The configuration of each job of a sweep, with the folder that it will have."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser

    loader = GlobalHydra.instance().config_loader()
    overrides = OverridesParser.create(loader).parse_overrides(list(config.hydra.overrides.task))
    folder = Path(config.hydra.sweep.dir)  # asked of this config, which is the sweeper's: its ${now:} is settled here
    jobs = [job for batch in BasicSweeper.split_arguments(overrides, None) for job in batch]
    seen: set[str] = set()
    for number, job in enumerate(jobs):
        cfg = loader.load_sweep_config(config, list(job))
        with read_write(cfg), open_dict(cfg):
            cfg.hydra.job.num = number
            cfg.run_dir = str(folder / cfg.hydra.sweep.subdir)
        if cfg.run_dir in seen:
            raise bad(
                "hydra.sweep.subdir",
                cfg.hydra.sweep.subdir,
                "two jobs would have the same folder",
                "hydra.sweep.subdir='${hydra.job.num}'",
            )
        seen.add(cfg.run_dir)
        yield cfg


def resolve(cfg: DictConfig) -> dict[str, Any]:
    """The composed configuration as plain, checked values."""
    if "hydra" in cfg:  # before Hydra's own start of the job: the gate
        HydraConfig.instance().set_config(cfg)
    for group in GROUPS:
        if group in cfg and not isinstance(cfg[group], DictConfig):
            raise bad(
                group,
                cfg[group],
                "is a section, and an option is chosen by the defaults list",
                f"type {group}=OPTION, or in a file `defaults: [override /{group}: OPTION]`",
            )
    if "choices" in cfg:
        raise unknown("choices", known_settings())
    plain = OmegaConf.masked_copy(cfg, [str(k) for k in cfg if k not in ("hydra", "recipe")])
    config: Any = OmegaConf.to_container(plain, resolve=True)
    config["run_dir"] = cfg.get("run_dir")  # the one that Hydra will read: in a copy, ${now:} may be a second later
    if config["cluster"].get("processes", 0) is None:
        config["cluster"]["processes"] = count_gpus() or 2
    choices = OmegaConf.to_container(HydraConfig.get().runtime.choices)
    assert isinstance(choices, dict)
    config["choices"] = {g: choices.get(g) for g in (*GROUPS, "recipe")}
    # absolute, so that a resume finds them from any folder
    for group, keys in (("data", ("path", "tokenizer")), ("strategy", ("nvme_path", "deepspeed_config"))):
        section = config.get(group, {})
        for key in keys:
            if isinstance(section.get(key), str) and section[key] not in ("", "???"):
                section[key] = str(Path(section[key]).expanduser().absolute())
    validate(config)
    if not config["run_dir"]:
        raise bad("run_dir", "", "must name a folder", "run_dir=outputs/my-run")
    run_dir = Path(config["run_dir"]).absolute()
    if "hydra" in cfg and OmegaConf.to_container(cfg.hydra.run) != {"dir": "${run_dir}"}:
        raise bad("hydra.run.dir", cfg.hydra.run.dir, "run_dir says where a run goes", f"run_dir={cfg.hydra.run.dir}")
    config["run_dir"] = str(run_dir)
    if config["resume"]:
        old = read_config(run_dir)
        config["choices"]["recipe"] = old.get("choices", {}).get("recipe")
        check_resume(old, config, config["resume_allow"], run_dir)
        check_unfinished(config, run_dir)
        with locked(run_dir):
            pass  # refused here when the run is still running
    elif (run_dir / "launch.json").exists():
        raise bad(
            "run_dir",
            config["run_dir"],
            "there is a run in this folder already",
            f"resume={config['run_dir']} to go on with it, or another run_dir",
        )
    elif run_dir.is_dir() and any(p.name != ".hydra" for p in run_dir.iterdir()):
        raise bad("run_dir", config["run_dir"], "the folder is not empty, and holds no run", "run_dir=… a new folder")
    writable = next(p for p in (run_dir, *run_dir.parents) if os.path.lexists(p))
    try:
        tempfile.TemporaryFile(dir=writable).close()  # the truth, also for root and on read-only file systems
    except OSError as error:
        raise bad(
            "run_dir",
            config["run_dir"],
            f"{writable} cannot be written to ({error.strerror})",
            "run_dir=… somewhere that is yours",
        ) from error
    return config


def check_unfinished(config: dict[str, Any], run_dir: Path) -> None:
    """A resume that has nothing to do is a mistake: somebody wanted more steps."""
    newest = latest_checkpoint(run_dir)
    done = int(newest.name.removeprefix("step-")) if newest else 0
    for key in ("steps", "stop_after"):
        if (config["train"][key] or math.inf) <= done:
            fix = f"train.{key}={2 * done}" + (" 'resume_allow=[train.steps]'" if key == "steps" else "")
            raise bad(f"train.{key}", config["train"][key], f"the run has made {done} steps already", fix)


def run(cfg: DictConfig, argv: list[str]) -> int:
    """Hydra's task: write the run folder and hand it to the launcher of the cluster."""
    OmegaConf.update(cfg, "run_dir", HydraConfig.get().runtime.output_dir)  # a sweep's job has its own
    config = resolve(cfg)
    run_dir = Path(config["run_dir"])
    os.chmod(run_dir, 0o700)
    with locked(run_dir):
        past, newest = run_dir / "config.yaml", latest_checkpoint(run_dir)
        kept = run_dir / f"config-{len(read_json(run_dir / 'launch.json').get('launches', []))}.yaml"
        if past.exists():
            shutil.copy2(past, kept)
        save(run_dir, config)
        record_launch(run_dir, config, argv)
        try:
            code = int(build(config["cluster"], config["trust"]).launch(run_dir))
        except OSError as error:  # the run has begun: whatever this is, it is no bad setting
            console.print_error(explain(error))
            code = FAILED
        if code in (BAD_CONFIG, FAILED) and kept.exists() and latest_checkpoint(run_dir) == newest:
            os.replace(kept, past)  # nothing came of the changed settings: the next resume starts from the old ones
    if code == PREEMPTED and HydraConfig.get().mode == RunMode.MULTIRUN:  # who stops a job stops the sweep
        runs.print_sweep([p.parent for p in sorted(run_dir.parent.glob("*/launch.json"))])
        raise SystemExit(PREEMPTED)
    return code


def record_launch(run_dir: Path, config: dict[str, Any], argv: list[str]) -> None:
    before = read_json(run_dir / "launch.json").get("launches", [])
    launch = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "overrides": list(HydraConfig.get().overrides.task),
        "choices": config["choices"],
        "cluster": config["cluster"],
    }
    record = {
        "command": shlex.join(["dtrain", "launch", *argv]), "cwd": os.getcwd(),
        "host": socket.gethostname(), "pid": os.getpid(),
        "overrides": launch["overrides"], "launches": [*before, launch],
    }  # fmt: skip
    write_json(run_dir / "launch.json", record)
