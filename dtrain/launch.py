"""`python launch.py …`: Hydra composes here, once; the result is checked, written to the run folder and launched.

The order matters: `Gate` runs before Hydra makes any folder, so a refused configuration leaves nothing behind.
"""

from __future__ import annotations

import difflib
import functools
import json
import os
import re
import shlex
import socket
import sys
import time
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dtrain import console, runs
from dtrain.config import CONF, RECIPES, SECRET, bad, build, count_gpus, flatten, save
from dtrain.validate import check_resume, unknown, validate

GROUPS = sorted(p.name for p in CONF.iterdir() if p.is_dir())


def main(argv: list[str]) -> int:
    """Run `dtrain launch`. Exit codes: 0 done, 2 bad configuration, 3 failed while running, 75 preempted and saved."""
    full_error = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise, so that the message below is ours and the code is 2
    exit_codes: list[int] = []
    try:
        arguments = prepare_arguments(argv)
        sys.argv = ["launch.py", *arguments]
        OmegaConf.register_new_resolver("dtrain.slug", slug, replace=True)
        task = functools.wraps(run)(lambda cfg: exit_codes.append(run(cfg)))
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(task)()
    except (HydraException, OmegaConfBaseException, ValueError, OSError) as error:
        if full_error:
            raise
        console.print_error(explain(error))
        return 2
    except SystemExit as stop:  # from the gate
        if stop.__cause__ is None:
            return int(stop.code or 0)
        if full_error:
            raise stop.__cause__ from None
        console.print_error(explain(stop.__cause__))
        return 2
    finally:
        os.environ.pop("HYDRA_FULL_ERROR", None)
        if full_error:
            os.environ["HYDRA_FULL_ERROR"] = "1"
    return max(exit_codes, default=0)


# ---- before Hydra: the words that are ours -------------------------------------------------------------------


def prepare_arguments(argv: list[str]) -> list[str]:
    """Turn `--dry-run`, `recipe=FILE` and `resume=RUN` into what Hydra composes; leave the rest as typed."""
    argv = ["dry_run=true" if a == "--dry-run" else a for a in argv]
    given = {a.split("=", 1)[0]: a.split("=", 1)[1] for a in argv if "=" in a and not a.startswith("-")}
    for key in given:
        if SECRET.search(key):
            raise bad(key, "…", "looks like a secret, and a configuration is written to disk in several places",
                      "give it in an environment variable")
    store_recipes()
    if "recipe" in given and re.search(r"[/\\]|\.ya?ml$", given["recipe"]):
        path = Path(given["recipe"]).expanduser()
        if not path.is_file():
            raise bad("recipe", given["recipe"], "there is no such file", "dtrain recipes ls shows the built-in ones")
        store_recipe(path)
        argv = [f"recipe={path.stem}" if a == f"recipe={given['recipe']}" else a for a in argv]
    if given.get("resume", "null") != "null":
        if "recipe" in given or {"-m", "--multirun"} & set(argv):
            raise bad("resume", given["resume"], "a run goes on with its own configuration, one run at a time",
                      "leave out recipe= and -m")
        run_dir = runs.find_run(given["resume"])
        store_as_run(run_dir, overridden=[g for g in GROUPS if g in given])
        argv = [a for a in argv if not a.startswith(("resume=", "run_dir="))]
        argv += ["recipe=as-run", f"resume={quote(run_dir)}", f"run_dir={quote(run_dir)}"]
    return argv


def quote(path: Path) -> str:
    """A path as a Hydra value: quoted, so that spaces, commas and equals signs are only characters."""
    return "'" + str(path).replace("\\", "\\\\").replace("'", "\\'") + "'"


def store_recipes() -> None:
    for path in sorted(RECIPES.glob("*.yaml")):
        store_recipe(path)


def store_recipe(path: Path) -> None:
    try:
        node = OmegaConf.load(path)
    except Exception as error:  # yaml errors have many types; all of them mean: this file is not yaml
        raise bad("recipe", path, f"is not valid yaml: {error}", "mend the file") from error
    if not isinstance(node, DictConfig):
        raise bad("recipe", path, "must be a yaml mapping of settings", "dtrain recipes cp cpu-tiny my.yaml")
    ConfigStore.instance().store(group="recipe", name=path.stem, node=node, package="_global_")


def store_as_run(run_dir: Path, overridden: list[str]) -> None:
    """Offer a run's own config.yaml as a recipe: every value as it was, less the groups named on the command line.

    So a resume does not depend on what conf/ or a recipe says today.
    """
    config = read_config(run_dir)
    choices = config.pop("choices", {})
    for key in ("run_dir", "resume", "resume_allow", "dry_run", *overridden):
        config.pop(key, None)
    config["train"].pop("stop_after", None)  # it meant the launch that has stopped
    defaults = [{f"override /{g}": choices[g]} for g in GROUPS if g in choices and g not in overridden]
    node = OmegaConf.create({"defaults": [*defaults, "_self_"], **config})
    ConfigStore.instance().store(group="recipe", name="as-run", node=node, package="_global_")


def read_config(run_dir: Path) -> dict[str, Any]:
    try:
        config = OmegaConf.to_container(OmegaConf.load(run_dir / "config.yaml"))
    except OSError as error:
        raise bad("resume", run_dir, f"its config.yaml cannot be read ({error.strerror})", "name a run folder; dtrain runs lists them") from error
    assert isinstance(config, dict)
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
        from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
        from hydra.core.override_parser.overrides_parser import OverridesParser

        if not str(config.hydra.sweeper._target_).endswith("BasicSweeper"):
            return  # a search decides its jobs as it goes; each is checked when it comes
        overrides = OverridesParser.create().parse_overrides(list(config.hydra.overrides.task))
        loader = GlobalHydra.instance().config_loader()
        jobs = [j for batch in BasicSweeper.split_arguments(overrides, None) for j in batch]
        self._check([loader.load_sweep_config(config, list(job)) for job in jobs])

    def _check(self, configs: list[DictConfig]) -> None:
        # Hydra turns an exception of a callback into a warning; SystemExit is the way to be heard
        try:
            resolved = [resolve(config) for config in configs]
        except (ValueError, OSError, OmegaConfBaseException, HydraException) as error:
            raise SystemExit(2) from error
        if resolved[0]["dry_run"]:
            for config in resolved:
                build(config["cluster"]).dry_run(Path(config["run_dir"]), config)
            raise SystemExit(0)

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        folder = Path(config.hydra.sweep.dir)
        runs.print_sweep(sorted((p.parent for p in folder.glob("*/launch.json")), key=lambda p: int(p.name.split("-")[0])))


def resolve(cfg: DictConfig) -> dict[str, Any]:
    """The composed configuration as plain, checked values."""
    if "hydra" in cfg:  # before Hydra's own start of the job: the gate
        HydraConfig.instance().set_config(cfg)
    plain = OmegaConf.masked_copy(cfg, [str(k) for k in cfg if k not in ("hydra", "recipe")])
    config: Any = OmegaConf.to_container(plain, resolve=True)
    if config["cluster"].get("processes", 0) is None:
        config["cluster"]["processes"] = count_gpus() or 2
    choices = OmegaConf.to_container(HydraConfig.get().runtime.choices)
    assert isinstance(choices, dict)
    config["choices"] = {g: choices.get(g) for g in (*GROUPS, "recipe")}
    config["run_dir"] = str(Path(config["run_dir"]).absolute())
    for key in ("path", "tokenizer"):  # absolute, so that a resume finds them from any folder
        if isinstance(config["data"].get(key), str) and config["data"][key] != "???":
            config["data"][key] = str(Path(config["data"][key]).expanduser().absolute())
    validate(config)
    run_dir = Path(config["run_dir"])
    if config["resume"]:
        old = read_config(run_dir)
        config["choices"]["recipe"] = old.get("choices", {}).get("recipe")
        check_resume(old, config, config["resume_allow"], run_dir)
    elif (run_dir / "launch.json").exists():
        raise bad("run_dir", config["run_dir"], "there is a run in this folder already",
                  f"resume={config['run_dir']} to go on with it, or another run_dir")
    writable = next(p for p in (run_dir, *run_dir.parents) if p.exists())
    if not writable.is_dir() or not os.access(writable, os.W_OK | os.X_OK):
        raise bad("run_dir", config["run_dir"], f"{writable} cannot be written to", "run_dir=… somewhere that is yours")
    return config


def run(cfg: DictConfig) -> int:
    """Hydra's task: write the run folder and hand it to the launcher of the cluster."""
    config = resolve(cfg)
    run_dir = Path(HydraConfig.get().runtime.output_dir).absolute()
    config["run_dir"] = str(run_dir)
    os.chmod(run_dir, 0o700)
    save(run_dir, config)
    record_launch(run_dir, config)
    return int(build(config["cluster"]).launch(run_dir))


def record_launch(run_dir: Path, config: dict[str, Any]) -> None:
    path = run_dir / "launch.json"
    before = json.loads(path.read_text())["launches"] if path.exists() else []
    launch = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "overrides": list(HydraConfig.get().overrides.task),
        "choices": config["choices"],
        "cluster": config["cluster"],
    }
    record = {
        "command": shlex.join(["python", *sys.argv]), "cwd": os.getcwd(), "host": socket.gethostname(), "pid": os.getpid(),
        "overrides": launch["overrides"], "launches": [*before, launch],
    }  # fmt: skip
    path.write_text(json.dumps(record, indent=1) + "\n")


# ---- messages ------------------------------------------------------------------------------------------------


def explain(error: BaseException) -> str:
    """One clear message for a person's mistake, from Hydra's and OmegaConf's several kinds of exception."""
    text = str(error)
    if isinstance(error, (ValueError, OSError)):
        return text
    if isinstance(error, OverrideParseException):
        return f"{error.override}: is not understood ({text})\n  fix: key=value; put quotes around values with spaces, brackets or commas"
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        options = sorted(error.options)
        near = difflib.get_close_matches(option, options, 1, 0.4)
        fix = f"did you mean {group}={near[0]}? " if near else ""
        return f"{group}={option}: there is no such option\n  fix: {fix}{group} can be {', '.join(options)}"
    key = re.search(r"Could not (?:override|append to|delete from) config.*?'?([\w./@-]+)'?\.|Could not override '([\w.@/-]+)'", text)
    if key and "HYDRA_FULL_ERROR" not in (key[2] or key[1]):
        return str(unknown(key[2] or key[1], known_settings()))
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith(("See ", "Set the env"))]
    return "\n  ".join(lines[:4]) if lines else type(error).__name__


def known_settings() -> list[str]:
    """Every setting of the default configuration, and the groups, for did-you-mean."""
    names = set(GROUPS)
    config = OmegaConf.to_container(OmegaConf.load(CONF / "config.yaml"))
    assert isinstance(config, dict)
    names |= {k for k in flatten(config) if not k.startswith(("defaults", "hydra"))}
    for path in CONF.glob("*/*.yaml"):
        section = OmegaConf.to_container(OmegaConf.load(path))
        assert isinstance(section, dict)
        names |= {f"{path.parent.name}.{k}" for k in section if not str(k).startswith("_")}
    return sorted(names)
