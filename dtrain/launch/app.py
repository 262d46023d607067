"""`python launch.py …`: Hydra composes here, once; the result is checked, written to the run folder and launched.

The order matters: `Gate` runs before Hydra makes any folder, so a refused configuration leaves nothing behind.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import shlex
import shutil
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from dtrain import composed, console, losses, redaction, runs, sweeps
from dtrain.arguments import AUTO, prepare_arguments, read_config
from dtrain.config import CONF, TRUST, bad, build, ranks_per_node, save
from dtrain.contract import BAD_CONFIG, CANCELLED_FILE, DONE, FAILED, PREEMPTED, PREFLIGHT
from dtrain.explain import GROUPS, explain, known_settings
from dtrain.plan import trust
from dtrain.profile import rules as profiling
from dtrain.redaction import redact
from dtrain.resume import check_code, check_profile, check_queue, check_resume, check_unfinished, say_beginning
from dtrain.rundir import latest_checkpoint, locked, read_json, write_json
from dtrain.schema import unknown
from dtrain.strategies import zero_config
from dtrain.untrusted_config import check_own, resolved
from dtrain.validate import validate
from dtrain.words import shell_path

MISTAKES = (HydraException, OmegaConfBaseException, ValueError, OSError)  # a person's, not ours: one message explains


def main(argv: list[str]) -> int:
    """Run `dtrain launch`. Exit codes: 0 done, 2 bad configuration, 3 failed, 4 bad nodes, 75 preempted and saved."""
    full_error = os.environ.get("HYDRA_FULL_ERROR") == "1"
    try:
        ended = start(argv)
    except BrokenPipeError:  # dry_run=true | head
        raise
    except MISTAKES as error:
        if full_error:
            raise
        console.print_error(explain(error))
        return BAD_CONFIG
    except KeyboardInterrupt:  # before a run began: a launcher has handlers of its own
        console.print_error("interrupted")
        return 130
    except SystemExit as stop:  # from the gate, or from Hydra's own argument parser
        return PREEMPTED if stop.code == PREEMPTED else BAD_CONFIG if stop.code else DONE
    codes = [code for code, _ in ended]
    return max(codes, key=[DONE, PREEMPTED, PREFLIGHT, BAD_CONFIG, FAILED].index, default=DONE)  # a sweep's worst


def start(argv: list[str]) -> list[tuple[int, Path]]:
    """Compose and run what the words say; the exit code and folder of each run. A mistake is raised as it is."""
    environ, words = {name: os.environ.get(name) for name in ("HYDRA_FULL_ERROR", TRUST)}, sys.argv
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise, so that the message is ours and the code is 2
    ended: list[tuple[int, Path]] = []
    if os.getcwd() not in sys.path:  # a user's own modules lie there, and the ranks look there too
        sys.path.append(os.getcwd())
    try:
        sys.argv = ["launch.py", *prepare_arguments(argv)]
        OmegaConf.register_new_resolver("dtrain.slug", slug, replace=True)
        task = functools.wraps(run)(lambda cfg: ended.append((run(cfg, argv), Path(cfg.run_dir))))
        with composed.mode_known(sys.argv[1:]):
            hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(task)()
    except SystemExit as stop:
        if stop.__cause__ is not None:  # the gate's way to be heard
            raise stop.__cause__ from None
        raise
    finally:
        sys.argv = words
        for name, value in environ.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
    return ended


def slug(text: str) -> str:
    """Overrides as a folder name: no slashes, no spaces, not longer than file systems take."""
    return re.sub(r"[^\w.,=+-]+", "-", text)[:120].strip("-")


@contextmanager
def heard() -> Iterator[None]:
    """Hydra turns an exception of a callback into a warning and goes on; SystemExit is the way to be heard."""
    try:
        yield
    except Exception as error:
        raise SystemExit(2) from error


class Gate(Callback):
    """Check one run, or every job of a sweep, before Hydra makes a folder; close a sweep with one table."""

    asked: list[dict[str, Any]] | None = None  # the clusters of a sweep's jobs, where all are known before

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        self._check([config])

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        with heard():
            redaction.check(str(config.hydra.sweep.dir), "hydra.sweep.dir")
        if sweeps.known_before(config.hydra):
            folder = Path(config.hydra.sweep.dir)
            with heard():  # first of all where somebody has been: folders that another command is filling look odd
                self.lock = sweeps.lock(folder) if (folder / sweeps.LOCK).exists() else None
            self._check(sweeps.jobs_of(config))
            with heard():
                self.lock = self.lock or sweeps.lock(folder)  # until this process ends
            sweeps.note(folder, sys.argv[1:])
        # else a search, which decides its jobs as it goes; each is checked when it comes

    def _check(self, configs: Iterable[DictConfig]) -> None:
        log = logging.getLogger("dtrain")
        log.disabled = False  # Hydra's logging, which is off, takes every other logger with it
        log.setLevel(logging.WARNING)
        with heard():
            checked = [resolve(config) for config in configs]
            os.environ[TRUST] = ",".join(checked[0]["trust"])  # what dry_run shows
            plans = [trust.plan_of(config) for config in checked]
            for plan, config in zip(plans, checked, strict=True):
                trust.check(config, plan)
            clusters = [build(config["cluster"], config["trust"]) for config in checked]
            self.asked = [config["cluster"] for config in checked]
            for cluster, config in distinct(clusters, checked):
                if config["dry_run"] and config["cluster"].get("launcher") == "submitit":
                    profiling.check_machine(config)  # SLURM is not asked: its script can be shown anywhere
                elif hasattr(cluster, "check"):  # a scheduler, or this machine, knows what it would refuse
                    cluster.check(config)
        if checked[0]["dry_run"]:
            with heard():  # `| head` closes the pipe, and that must not start anything
                for cluster, config, plan in zip(clusters, checked, plans, strict=True):
                    if config["resume"]:
                        say_beginning(Path(config["run_dir"]), sys.stderr)
                    trust.show(plan, sys.stderr)  # stdout has what may be run
                    cluster.dry_run(Path(config["run_dir"]), config)
                    if "deepspeed_config" in config["strategy"]:
                        print("\nDeepSpeed's configuration, made from these settings (we say where a step ends):")
                        print(json.dumps(zero_config.check(config, validate(config)), indent=2))
                sys.stdout.flush()
            raise SystemExit(0)

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        folder = Path(config.hydra.sweep.dir)
        with heard():
            submitted = sweeps.submit(folder, self.asked)
        runs.print_sweep(sweeps.points(folder))
        if submitted:
            print(f"submitted {len(submitted)} jobs; the table at any time: dtrain runs {shell_path(folder)}")


def resolve(cfg: DictConfig) -> dict[str, Any]:
    """The composed configuration as plain, checked values."""
    if "hydra" in cfg:  # before Hydra's own start of the job: the gate
        HydraConfig.instance().set_config(cfg)
    config = plain_values(cfg)
    if config["choices"]["strategy"] == AUTO:
        from dtrain.plan import auto

        auto.settle(cfg, config)
        config = plain_values(cfg)
    validate(config)
    check_own(config)
    losses.check(config)
    if not config["run_dir"]:
        raise bad("run_dir", "", "must name a folder", "run_dir=outputs/my-run")
    run_dir = Path(config["run_dir"]).absolute()
    if "hydra" in cfg and OmegaConf.to_container(cfg.hydra.run) != {"dir": "${run_dir}"}:
        raise bad("hydra.run.dir", cfg.hydra.run.dir, "run_dir says where a run goes", f"run_dir={cfg.hydra.run.dir}")
    config["run_dir"] = str(run_dir)
    redaction.check(config["run_dir"], "run_dir")  # now with the folder that it lies in
    typed = [o.partition("=")[0].lstrip("+") for o in HydraConfig.get().overrides.task]
    if config["cluster"].get("launcher") == "torchrun" and config["cluster"]["nodes"] > 1 and "run_dir" not in typed:
        rule = "its default holds the time, and every node must name the same folder"
        raise bad("run_dir", os.path.relpath(run_dir), rule, "run_dir=… on a file system that all nodes share")
    if config["cluster"].get("node_rank"):
        return config  # a further node of a run whose folder node 0 looks after
    in_sweep = HydraConfig.get().mode == RunMode.MULTIRUN
    if not in_sweep:  # of whose points some may record nothing
        profiling.check_typed(config, typed)
    if in_sweep and (run_dir / "launch.json").exists():  # the same command again: what is unfinished goes on
        config["resume"] = config["run_dir"]
        if not sweeps.unfinished(run_dir):
            return config
    if config["resume"]:
        check_queue(config, run_dir)
        old = read_config(run_dir)
        config["choices"]["recipe"] = old.get("choices", {}).get("recipe")
        check_resume(old, config, config["resume_allow"], run_dir, typed)
        check_code(old, config)
        with locked(run_dir):
            pass  # refused here when the run is still running
        check_unfinished(config, run_dir)
        if not in_sweep:  # a point that is near its end goes on, with the words of all
            check_profile(config, run_dir, typed)
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


def plain_values(cfg: DictConfig) -> dict[str, Any]:
    """The composed configuration with what only this machine can fill in: ranks, choices, absolute paths."""
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
    words: Any = OmegaConf.to_container(HydraConfig.get().overrides.task)  # read one by one they would be looked up
    try:
        config = resolved(cfg, words)
    except InterpolationKeyError as error:  # e.g. text for a model of the user's own that knows no length
        asked = re.search(r"'([\w.]+)' not found", str(error))
        if asked is None or not error.full_key:
            raise
        group, key = asked[1].partition(".")[0], str(error.full_key)
        chosen = HydraConfig.get().runtime.choices.get(group)
        rule = f"is taken from {asked[1]}, which {group}={chosen} has not"
        section = key.partition(".")[0]
        fix = f"leave out {section}= (a {group} of ours brings its own), choose another {group}, or give {key}=…"
        raise ValueError(f"{key}: {rule}\n  fix: {fix}") from error
    redaction.check(config)
    config["run_dir"] = cfg.get("run_dir")  # the one that Hydra will read: in a copy, ${now:} may be a second later
    if config["cluster"].get("processes", 0) is None:
        config["cluster"]["processes"] = ranks_per_node(config["cluster"])
    choices = OmegaConf.to_container(HydraConfig.get().runtime.choices)
    assert isinstance(choices, dict)
    config["choices"] = {g: choices.get(g) for g in (*GROUPS, "recipe", AUTO) if g != AUTO or g in choices}
    # absolute, so that a resume finds them from any folder
    for group, keys in (("data", ("path", "tokenizer")), ("strategy", ("nvme_path", "deepspeed_config"))):
        section = config.get(group, {})
        for key in keys:
            if isinstance(section.get(key), str) and section[key] not in ("", "???"):
                section[key] = str(Path(section[key]).expanduser().absolute())
    if config.get("init_from") and isinstance(config["init_from"], str):  # another type is refused below, by schema.py
        config["init_from"] = str(Path(config["init_from"]).expanduser().absolute())
    return config


def distinct(clusters: Sequence[Any], configs: Sequence[dict[str, Any]]) -> list[tuple[Any, dict[str, Any]]]:
    """One of each kind: many points of a sweep ask for the same."""
    asked = [[config["cluster"], config["nsys"], config["profile"].get("kind")] for config in configs]
    found = {json.dumps(what, sort_keys=True): i for i, what in enumerate(asked)}
    return [(clusters[i], configs[i]) for i in found.values()]


def run(cfg: DictConfig, argv: list[str]) -> int:
    """Hydra's task: write the run folder and hand it to the launcher of the cluster."""
    OmegaConf.update(cfg, "run_dir", HydraConfig.get().runtime.output_dir)  # a sweep's job has its own
    config = resolve(cfg)
    os.environ[TRUST] = ",".join(config["trust"])  # for the ranks, which do not believe the run folder
    run_dir = Path(config["run_dir"])
    os.chmod(run_dir, 0o700)
    in_sweep = HydraConfig.get().mode == RunMode.MULTIRUN
    if in_sweep and config["resume"] and not sweeps.unfinished(run_dir):
        return DONE  # it was, or is under way
    cluster = build(config["cluster"], config["trust"])
    plan = trust.plan_of(config)
    if in_sweep and not sweeps.known_before(HydraConfig.get()):
        trust.check(config, plan)
    if config["cluster"].get("node_rank"):
        wait_for_node_0(run_dir, config)
        return int(cluster.launch(run_dir))
    with locked(run_dir):
        past, newest = run_dir / "config.yaml", latest_checkpoint(run_dir)
        kept = run_dir / f"config-{len(read_json(run_dir / 'launch.json').get('launches', []))}.yaml"
        if past.exists():
            shutil.copy2(past, kept)
        if "node_rank" in config["cluster"]:
            config["cluster"]["node_rank"] = None  # of this node: the others read the file, too
        save(run_dir, config)
        later = in_sweep and hasattr(cluster, "submit")  # all points together, see Gate.on_multirun_end
        record_launch(run_dir, config, argv, prepared=later)
        write_json(run_dir / trust.PLAN, plan)
        if config["resume"]:
            say_beginning(run_dir, sys.stdout)
        trust.show(plan, sys.stdout)
        (run_dir / CANCELLED_FILE).unlink(missing_ok=True)
        try:
            code = DONE if later else int(cluster.launch(run_dir))
        except OSError as error:  # the run has begun: whatever this is, it is no bad setting
            console.print_error(explain(error))
            code = FAILED
        if code in (BAD_CONFIG, FAILED) and kept.exists() and latest_checkpoint(run_dir) == newest:
            os.replace(kept, past)  # nothing came of the changed settings: the next resume starts from the old ones
    if code == PREEMPTED and in_sweep:  # who stops a job stops the sweep
        runs.print_sweep(sweeps.points(run_dir.parent))
        raise SystemExit(PREEMPTED)
    return code


def wait_for_node_0(run_dir: Path, config: dict[str, Any], patience_s: float = 120) -> None:
    """A further node started by hand: node 0 writes the run folder, and must mean the same configuration."""
    mine = redact(config) | {"cluster": config["cluster"] | {"node_rank": None}, "resume": None}
    deadline = time.monotonic() + patience_s
    while True:
        theirs: Any = read_config(run_dir) if (run_dir / "config.yaml").exists() else {}
        if theirs and theirs | {"resume": None} == mine:
            return
        if time.monotonic() > deadline:
            raise bad(
                "cluster.node_rank", config["cluster"]["node_rank"],
                f"node 0 wrote {'another configuration' if theirs else 'nothing'} to {run_dir} in {patience_s:.0f} s",
                "the same command on each node, but for cluster.node_rank, and a run_dir that all of them share",
            )  # fmt: skip
        time.sleep(0.5)


def record_launch(run_dir: Path, config: dict[str, Any], argv: list[str], prepared: bool) -> None:
    past = read_json(run_dir / "launch.json")
    before = past.get("launches", [])
    launch = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "overrides": list(HydraConfig.get().overrides.task),
        "choices": config["choices"],
        "cluster": config["cluster"],
    } | ({"prepared": True} if prepared else {})
    record = {
        "id": past.get("id") or uuid.uuid4().hex,  # of the run: its checkpoints carry it
        "command": shlex.join(["dtrain", "launch", *argv]), "cwd": os.getcwd(),
        "host": socket.gethostname(), "pid": os.getpid(),
        "overrides": launch["overrides"], "launches": [*before, launch],
    }  # fmt: skip
    write_json(run_dir / "launch.json", record)
