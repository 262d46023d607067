"""`python launch.py …`: Hydra composes once; dtrain checks the result, writes it to the run folder and launches it.

`Gate` runs before Hydra creates any folder, so a rejected configuration leaves nothing behind.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from dtrain.checks import profile as profiling
from dtrain.checks.resume import go_back, say_beginning
from dtrain.checks.validate import largest, usable_sizes, validate
from dtrain.checks.warnings import warnings
from dtrain.config import elastic, redaction
from dtrain.config.build import TRUST
from dtrain.config.files import CONF, is_script
from dtrain.config.hydra_errors import MISTAKES, explain
from dtrain.config.redaction import redact
from dtrain.config.run_file import save
from dtrain.errors import bad
from dtrain.launch import compose_cache, fork, sweeps
from dtrain.launch.accumulation import check_accumulation
from dtrain.launch.arguments import prepare_arguments
from dtrain.launch.cluster import build_cluster
from dtrain.launch.launch_record import record_launch
from dtrain.launch.recipes import in_recipe
from dtrain.launch.resolve import resolve
from dtrain.launch.resume_arguments import read_config
from dtrain.launch.script_arguments import main_config
from dtrain.launch.script_rank import identity
from dtrain.plan import fits, free_space, run_prediction
from dtrain.runs import folder, tags
from dtrain.runs.find import At
from dtrain.runs.folder import latest_checkpoint, locked, read_json, write_json
from dtrain.runs.protocol import (
    BAD_CONFIG,
    CANCELLED_FILE,
    DONE,
    FAILED,
    PREEMPTED,
    PREFLIGHT,
    SCRIPT_RUN,
    SCRIPT_TYPED,
)
from dtrain.start import VARIABLE
from dtrain.start import began as process_began
from dtrain.strategies import deepspeed_config
from dtrain.ui import console, sweep_table
from dtrain.ui.unread import unbroken_output
from dtrain.util.format import counted, shell_path


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
        console.print_error(in_recipe(explain(error, argv), argv))
        return BAD_CONFIG
    except KeyboardInterrupt:  # before a run started: launchers install their own signal handlers
        console.print_error("interrupted")
        return 130
    except SystemExit as stop:  # raised by the gate or by Hydra's argument parser
        return PREEMPTED if stop.code == PREEMPTED else BAD_CONFIG if stop.code else DONE
    codes = [code for code, _ in ended]
    return max(codes, key=[DONE, PREEMPTED, PREFLIGHT, BAD_CONFIG, FAILED].index, default=DONE)  # a sweep's worst


def start(argv: list[str]) -> list[tuple[int, Path]]:
    """Compose and launch the runs that `argv` describes; return (exit code, run folder) per run. Errors propagate."""
    environ, typed_argv = {name: os.environ.get(name) for name in ("HYDRA_FULL_ERROR", TRUST, SCRIPT_TYPED)}, sys.argv
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise, so that dtrain formats the error and exits with 2
    ended: list[tuple[int, Path]] = []
    began = [command_began()]  # of the first run; a sweep starts the next one when it comes to it
    if os.getcwd() not in sys.path:  # the user's own modules are here; the ranks import from here too
        sys.path.append(os.getcwd())
    try:
        check_alone(argv)
        check_accumulation(argv)
        sys.argv = ["launch.py", *prepare_arguments(argv)]
        OmegaConf.register_new_resolver("dtrain.slug", slug, replace=True)

        @functools.wraps(run)
        def task(cfg: DictConfig) -> None:
            with unbroken_output():
                ended.append((run(cfg, argv, began.pop() if began else time.time()), Path(cfg.run_dir)))

        with compose_cache.mode_known(sys.argv[1:]), compose_cache.cached_files():
            name = main_config(sys.argv[1:])
            hydra.main(version_base="1.3", config_path=str(CONF), config_name=name)(task)()
    except SystemExit as stop:
        if stop.__cause__ is not None:  # an exception raised inside a Hydra callback, see `raise_through_hydra`
            raise stop.__cause__ from None
        raise
    finally:
        sys.argv = typed_argv
        for name, value in environ.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
    return ended


def check_alone(argv: Sequence[str], in_fit: bool = False) -> None:
    """Refuse to start a whole run in each process of torchrun, accelerate, deepspeed, mpirun, horovodrun or srun.

    The first process says so; the others wait until it has, as torchrun ends all when one does.
    """
    started = processes_of(os.environ)
    if started is None or any(re.match(r"\+*cluster\.node_rank=\d", word) for word in argv):  # a launcher on each node
        return
    starter, rank, total, nodes = started
    if rank:
        time.sleep(3)
        raise SystemExit(BAD_CONFIG)
    fix = f"python {Path(sys.argv[0]).name}, with dtrain.fit(processes={total}, …)"
    if not in_fit:
        names = {word.lstrip("+").partition("=")[0] for word in argv}
        more = [] if names & {"cluster", "cluster.processes"} else [f"cluster.processes={total}"]
        if nodes > 1:
            more = [] if "cluster" in names else ["cluster=slurm", f"cluster.nodes={nodes}"]
        fix = f"dtrain launch {shlex.join([*more, *argv])}"
    if starter == "srun":
        fix += "; if each task is to be a run of its own: unset SLURM_STEP_NUM_TASKS"
    raise ValueError(f"{starter}: is not needed: dtrain starts the ranks, and this is {total} whole runs\n  fix: {fix}")


def processes_of(environ: Mapping[str, str]) -> tuple[str, int, int, int] | None:
    """Return who started this launcher several times, this one's number, how many there are, and on how many nodes."""
    if VARIABLE in environ or SCRIPT_RUN in environ:  # a rank of dtrain's own, or a program that it runs
        return None
    if "SLURM_PTY_PORT" in environ:  # the shell of srun --pty: only the first task has the terminal
        environ = {name: value for name, value in environ.items() if not name.startswith(("SLURM_STEP_", "PMI_"))}
    elastic = "accelerate launch" if "ACCELERATE_MIXED_PRECISION" in environ else "torchrun"
    for starter, mark, rank, total, on_node in (
        (elastic, "TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
        ("deepspeed", "CROSS_SIZE", "RANK", "WORLD_SIZE", "LOCAL_SIZE"),
        ("horovodrun", "HOROVOD_RANK", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE"),
        (
            "mpirun",
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ),
        ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", ""),  # not of an allocation's shell
        ("mpirun", "PMI_RANK", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    ):
        numbers = [environ.get(name, "") for name in (rank, total)]
        if mark in environ and all(number.isdecimal() for number in numbers) and int(numbers[1]) > 1:
            number, processes = map(int, numbers)
            here = environ.get(on_node, "")
            nodes = -(-processes // int(here)) if here.isdecimal() and int(here) else 1
            if starter == "srun" and environ.get("SLURM_STEP_NUM_NODES", "").isdecimal():
                nodes = int(environ["SLURM_STEP_NUM_NODES"])
            return starter, number, processes, nodes
    return None


def command_began() -> float:
    """When the command was typed: this process is the command's, or a notebook that has been running for long."""
    now, process = time.time(), process_began()
    return process if now - process < 10 else now


def slug(text: str) -> str:
    """Turn overrides into a folder name: no slashes, no spaces, no ++, within file system length limits."""
    name = re.sub(r"[^\w.,=+-]+", "-", text)
    return re.sub(r"(?<![\w.])\++", "", name)[:120].strip("-")  # a number keeps its sign: 1e+5


@contextmanager
def raise_through_hydra() -> Iterator[None]:
    """Re-raise exceptions as SystemExit: Hydra turns any other exception in a callback into a warning and continues."""
    try:
        yield
    except Exception as error:
        raise SystemExit(2) from error


class Gate(Callback):
    """Check one run, or every job of a sweep, before Hydra creates a folder; print one table when a sweep ends."""

    asked: list[dict[str, Any]] | None = None  # cluster settings of the sweep's jobs, if all jobs are known up front

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        self._check([config])

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        with raise_through_hydra():
            redaction.check(str(config.hydra.sweep.dir), "hydra.sweep.dir")
        if sweeps.known_before(config.hydra):
            folder = Path(config.hydra.sweep.dir)
            with raise_through_hydra():  # check the lock first: folders still being filled look broken
                self.lock = sweeps.lock(folder) if (folder / sweeps.LOCK).exists() else None
            with raise_through_hydra():
                jobs = list(sweeps.jobs_of(config))
            self._check(jobs)
            with raise_through_hydra():
                self.lock = self.lock or sweeps.lock(folder)  # held until this process ends
            sweeps.note(folder, sys.argv[1:], jobs)
        # else: a search chooses its jobs as it runs; each job is checked when it starts

    def _check(self, configs: Iterable[DictConfig]) -> None:
        log = logging.getLogger("dtrain")
        log.disabled = False  # Hydra's logging is off, and turning it off disables every other logger
        log.setLevel(logging.WARNING)
        with raise_through_hydra():
            checked = [resolve(config) for config in configs]
            os.environ[TRUST] = ",".join(checked[0]["trust"])  # dry_run prints it
            plans = [run_prediction.plan_of(largest(config)) for config in checked]
            for plan, config in zip(plans, checked, strict=True):
                check_fit(config, plan)
            clusters = [build_cluster(config["cluster"], config["trust"]) for config in checked]
            self.asked = [config["cluster"] for config in checked]
            for cluster, config in distinct(clusters, checked):
                if config["dry_run"] and config["cluster"].get("launcher") == "submitit":
                    profiling.check_machine(config)  # sbatch is not called: its script can be previewed on any machine
                elif hasattr(cluster, "check"):  # the scheduler or this machine can reject the request
                    cluster.check(largest(config))
        if checked[0]["dry_run"]:
            with raise_through_hydra():  # `| head` closes the pipe; the error must not fall through to a launch
                for cluster, config, plan in zip(clusters, checked, plans, strict=True):
                    if config["resume"] and not is_script(config) and not config["cluster"].get("run_root"):
                        say_beginning(Path(config["run_dir"]), sys.stderr)
                    run_prediction.show(plan, sys.stderr)  # stdout is reserved for the runnable script
                    show_warnings(config, plan)
                    cluster.dry_run(Path(config["run_dir"]), config)
                    if "deepspeed_config" in config.get("strategy", {}):
                        # after a manifest, which must stay valid yaml, to stderr
                        where = sys.stderr if config["cluster"].get("kind") else sys.stdout
                        print(
                            "\nDeepSpeed's configuration, generated from these settings "
                            "(dtrain decides where a step ends):",
                            file=where,
                        )
                        print(json.dumps(deepspeed_config.check(config, validate(config)), indent=2), file=where)
                sys.stdout.flush()
            raise SystemExit(0)

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        folder = Path(config.hydra.sweep.dir)
        with raise_through_hydra():
            submitted = sweeps.submit(folder, self.asked)
        sweep_table.print_sweep(sweeps.points(folder))
        jobs = f"submitted {counted(len(submitted), 'job')}; " if submitted else ""
        print(f"{jobs}the table at any time: dtrain runs {shell_path(folder)}")


def check_fit(config: dict[str, Any], plan: dict[str, Any]) -> None:
    """Check that the run fits in memory and on the disk.

    With a range of ranks, also with the smallest number, whose shards are largest.
    """
    if not is_script(config):
        fits.check(largest(config), plan)
        if usable := usable_sizes(config):
            smallest = elastic.sized(config, usable[0])
            fits.check(smallest, run_prediction.plan_of(smallest))
    free_space.check(largest(config))


def distinct(clusters: Sequence[Any], configs: Sequence[dict[str, Any]]) -> list[tuple[Any, dict[str, Any]]]:
    """Keep one of each distinct request: many points of a sweep ask for the same resources."""
    asked = [[config["cluster"], config.get("nsys"), config.get("profile", {}).get("kind")] for config in configs]
    found = {json.dumps(what, sort_keys=True): i for i, what in enumerate(asked)}
    return [(clusters[i], configs[i]) for i in found.values()]


def run(cfg: DictConfig, argv: list[str], began: float) -> int:
    """Run as Hydra's task function: write the run folder and pass it to the cluster's launcher."""
    OmegaConf.update(cfg, "run_dir", HydraConfig.get().runtime.output_dir)  # each job of a sweep has its own
    config = resolve(cfg)
    os.environ[TRUST] = ",".join(config["trust"])  # for the ranks, which do not trust the run folder
    if is_script(config):
        typed = [*os.environ.get(SCRIPT_TYPED, "").splitlines(), identity(config["script"])]
        os.environ[SCRIPT_TYPED] = "\n".join(dict.fromkeys(typed))  # several in a sweep
    run_dir = Path(config["run_dir"])
    os.chmod(run_dir, 0o700)
    in_sweep = HydraConfig.get().mode == RunMode.MULTIRUN
    if in_sweep and config["resume"] and not sweeps.unfinished(run_dir):
        return DONE  # already finished, or already running
    cluster = build_cluster(config["cluster"], config["trust"])
    plan = run_prediction.plan_of(largest(config))
    if in_sweep and not sweeps.known_before(HydraConfig.get()):
        check_fit(config, plan)
    if config["cluster"].get("node_rank"):
        wait_for_node_0(run_dir, config)
        return int(cluster.launch(run_dir))
    with locked(run_dir):
        past, newest = run_dir / "config.yaml", latest_checkpoint(run_dir)
        kept = run_dir / f"config-{len(read_json(run_dir / 'launch.json').get('launches', []))}.yaml"
        if past.exists():
            shutil.copy2(past, kept)
        if "node_rank" in config["cluster"]:
            config["cluster"]["node_rank"] = None  # this node's rank; the other nodes read this file too
        save(run_dir, config)
        later = in_sweep and hasattr(cluster, "submit")  # all points are submitted together, see Gate.on_multirun_end
        record_launch(run_dir, config, argv, began, prepared=later)
        if config.get("tags") and not config["resume"]:
            tags.change(run_dir, add=config["tags"])
        # a point of a sweep that was stopped before it had the checkpoint is resumed, too
        if config.get("fork") and (in_sweep or not config["resume"]) and not fork.is_placed(run_dir):
            begin_fork(run_dir, fork.parse(config["fork"]), config["schedule"].get("warmup_steps") or 0)
        if config["resume"] and not is_script(config):
            go_back(config, run_dir, sys.stdout)
        write_json(run_dir / folder.PLAN, plan)
        if config["resume"] and not is_script(config) and not config["cluster"].get("run_root"):
            say_beginning(run_dir, sys.stdout)
        if in_sweep and not later and (place := sweeps.place(run_dir)):
            print(f"{place}: {run_dir.name}")
        run_prediction.show(plan, sys.stdout)
        show_warnings(config, plan)
        (run_dir / CANCELLED_FILE).unlink(missing_ok=True)
        try:
            code = DONE if later else int(cluster.launch(run_dir))
        except OSError as error:  # the run has started, so this is not a configuration error
            console.print_error(explain(error))
            code = FAILED
        if code in (BAD_CONFIG, FAILED) and kept.exists() and latest_checkpoint(run_dir) == newest:
            os.replace(kept, past)  # no checkpoint with the new settings: the next resume uses the old ones
    if code == PREEMPTED and in_sweep:  # stopping one job stops the sweep
        sweep_table.print_sweep(sweeps.points(run_dir.parent))
        print("the same command continues the sweep")
        raise SystemExit(PREEMPTED)
    return code


def show_warnings(config: dict[str, Any], plan: dict[str, Any]) -> None:
    whole = largest(config)
    for line in (*warnings(whole), *run_prediction.slow_cpu(whole, plan)):
        console.print_warning(line)


def begin_fork(run_dir: Path, at: At, warmup_steps: int) -> None:
    """Place the checkpoint; without it, the folder is no run."""
    try:
        fork.place(at, run_dir)
    except BaseException:
        (run_dir / "launch.json").unlink()
        raise
    print(fork.say(at, read_json(run_dir / "launch.json")["forked_from"].get("anew", []), warmup_steps), flush=True)


def wait_for_node_0(run_dir: Path, config: dict[str, Any], patience_s: float = 120) -> None:
    """Wait on a node started by hand: node 0 writes the run folder, and its configuration must match."""
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
                "run the same command on each node, except for cluster.node_rank, with a run_dir that all nodes share",
            )  # fmt: skip
        time.sleep(0.5)
