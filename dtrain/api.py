"""`dtrain.fit(...)`: start a run from a script. It builds overrides and uses the code path of `dtrain launch`."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig

from dtrain.config.hydra_errors import MISTAKES, explain
from dtrain.errors import bad
from dtrain.launch import app as launch
from dtrain.launch.python_fixes import check_names, in_python
from dtrain.launch.python_objects import spell, value_of
from dtrain.launch.user_code import trust_of
from dtrain.runs import causes
from dtrain.runs.folder import read_json, read_summary
from dtrain.runs.protocol import DONE, PREEMPTED, PREFLIGHT
from dtrain.start import VARIABLE
from dtrain.ui import console
from dtrain.util.format import resume_argument

if TYPE_CHECKING:
    from pandas import DataFrame
    from torch import nn

Thing = str | Callable[..., Any] | tuple[Any, Mapping[str, Any]] | Mapping[str, Any]


@dataclass(frozen=True)
class Result:
    """A run that finished, or, on a cluster, one that was queued."""

    run_dir: Path
    trust: tuple[str, ...] = ()  # user modules that the run trusts

    @property
    def summary(self) -> dict[str, Any]:
        """The current content of RUN/summary.json."""
        return read_summary(self.run_dir)

    @property
    def status(self) -> str:
        return str(self.summary.get("status", "queued"))

    def metrics(self) -> DataFrame:
        """Return the metrics of each step and evaluation, your own included, as dtrain.load(run_dir).metrics does."""
        from dtrain.notebook import LoadedRun

        return LoadedRun(self.run_dir).metrics

    def load(self, at: int | str | None = None) -> nn.Module:
        """Return the trained model: an object of your own class, with nothing added, on the CPU, in evaluation mode.

        at: the step of another checkpoint than the newest, or "best" (checkpoint.keep_best).
        """
        from dtrain.notebook import LoadedRun, step_of

        with as_script(self.trust), causes.fixes_for_script():
            step = step_of(self.run_dir, at, "load")
            return LoadedRun(self.run_dir).model(step, (*self.trust, "__main__"))


class RunFailed(RuntimeError):
    """The run started and failed: the first failing rank's message, and the path of its log."""

    def __init__(self, run_dir: Path, code: int) -> None:
        self.run_dir = run_dir
        self.exit_code = self.code_of_dtrain = code
        self.failure = read_json(run_dir / "failure.json")
        message = str(self.failure.get("message") or f"the run ended with {code}").strip()
        message = in_python(message, {})
        if code == PREFLIGHT:
            message = "preflight found a fault on a node"
        elif self.failure.get("rank") is not None:
            message = f"rank {self.failure['rank']}: {self.failure['type']}: {message}"
        place = "".join(f"\n  {line}" for line in console.places(self.failure))
        super().__init__(f"{message}{place}\n  log: {run_dir / self.failure.get('log', 'logs')}")


class Preempted(SystemExit):
    """Ctrl-C or a scheduler's signal: the run saved a checkpoint; the script exits with 75 unless it catches this."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(PREEMPTED)
        self.run_dir = run_dir

    def __str__(self) -> str:
        """What a notebook shows below a stopped cell."""
        return f"the run was stopped, and saved a checkpoint: {resume_argument(self.run_dir)}"


def fit(
    model: Thing | None = None,
    data: Thing | None = None,
    *,
    loss: Thing | None = None,
    strategy: Thing | None = None,
    cluster: Thing | None = None,
    processes: int | None = None,
    steps: int | None = None,
    epochs: float | None = None,
    **settings: Any,
) -> Result:
    """Train like `dtrain launch`, with the same checks, run folder, checkpoints and messages.

    model, data and loss (and any other group) are an option's name ("gpt2-tiny"), a class or function that can be
    imported, functools.partial(Class, dim=32), or (Class, {"dim": 32}). Other settings are nested or dotted:
    train={"seed": 1}, **{"train.seed": 1}. steps and epochs are short for train.steps and train.epochs.

    Raises ValueError for a bad setting, before anything starts; RunFailed if the run fails; Preempted if the run was
    stopped and saved a checkpoint. Uncaught, they exit the script with 2, 3 and 75, as `dtrain launch` does.
    """
    causes.watch_script()
    groups = {"model": model, "data": data, "loss": loss, "strategy": strategy, "cluster": cluster}
    given = {k: v for k, v in groups.items() if v is not None} | settings
    shorts = {"processes": processes, "steps": steps, "epochs": epochs}
    try:
        overrides, folders = overrides_of(given, shorts)
    except ValueError as error:
        raise causes.refused(error) from None
    with hydra_aside(), import_path(folders):
        try:
            ended = launch.start(overrides)
        except MISTAKES as error:
            message = in_python(explain(error), given | {k: v for k, v in shorts.items() if v is not None})
            raise causes.refused(ValueError(message)) from (
                error if os.environ.get("HYDRA_FULL_ERROR") == "1" else None
            )
        except SystemExit as stop:
            if stop.code and stop.code != PREEMPTED:  # Hydra's argument parser printed why
                raise causes.refused(ValueError(f"these overrides are not understood: {overrides}")) from stop
            raise  # dry_run printed its preview
    code, run_dir = ended[-1]
    if code == PREEMPTED:
        raise Preempted(run_dir)
    if code != DONE:
        raise RunFailed(run_dir, code)
    return Result(run_dir, tuple(trust_of(overrides)))


def overrides_of(given: Mapping[str, Any], shorts: Mapping[str, float | None]) -> tuple[list[str], list[Path]]:
    """Return the overrides that a call means, and the folders from which the ranks import what it names."""
    check_place()
    check_names(given)
    overrides, folders = spell(given)
    if not {"model", "data", "recipe", "resume", "fork", "script"} & {key.partition(".")[0] for key in given}:
        console.print_warning(
            "model: none is given, so dtrain's example trains: gpt2-tiny on the source of Python's standard library"
            "\n  fix: dtrain.fit(model=Net, data=my_data)   (docs/your-own.md)"
        )
    for short, value in shorts.items():
        if value is not None:
            name = f"cluster.{short}" if short == "processes" else f"train.{short}"
            word = f"{name}={value_of(short, value)}"
            twice = next((other for other in overrides if other.startswith(f"{name}=") and other != word), None)
            if twice:
                rule = "has two values: its short form has another one"
                raise bad(name, twice.partition("=")[2], rule, f"leave out {short}=, or {name}")
            overrides.append(word)
    return overrides, folders


def check_place() -> None:
    """Refuse to start inside another run, or on a thread that receives no signals."""
    launch.check_alone((), in_fit=True)
    if {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        raise ValueError(
            "dtrain.fit: was called in a rank, which imports the script for its classes\n"
            '  fix: call dtrain.fit under `if __name__ == "__main__":`, and start the script with python, not torchrun'
        )
    started = getattr(multiprocessing.current_process(), "_target", None)
    if getattr(started, "__module__", "") == "torch.multiprocessing.spawn":
        rule = "was called in a process of torch.multiprocessing.spawn, and starts the ranks itself"
        raise ValueError(f"dtrain.fit: {rule}\n  fix: one call outside of it, dtrain.fit(…, processes=2)")
    if threading.current_thread() is not threading.main_thread():
        raise ValueError(
            "dtrain.fit: only the main thread receives Ctrl-C and signals\n  fix: call dtrain.fit from the main thread"
        )


# ---- restore the state of this process -----------------------------------------------------------------------


@contextmanager
def import_path(folders: list[Path]) -> Iterator[None]:
    """Let the ranks import from the folders of the script and of the given objects."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    extra = [*([Path(script).resolve().parent] if script else []), *folders]
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = os.pathsep.join([*map(str, extra), *([before] if before else [])])
    try:
        yield
    finally:
        os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before


@contextmanager
def as_script(modules: Iterable[str]) -> Iterator[None]:
    """Let the name under which the ranks import this script mean the script itself: there is one class of a name."""
    main: Any = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    name = spec.name if spec else Path(getattr(main, "__file__", None) or "").stem
    before = sys.modules.get(name)
    if name in modules:
        sys.modules[name] = main
    try:
        yield
    finally:
        if name in modules:
            del sys.modules[name]
            if before is not None:
                sys.modules[name] = before


@contextmanager
def hydra_aside() -> Iterator[None]:
    """Restore Hydra's and logging's global state: a script may use both itself, and may call fit again."""
    hydra, shared = GlobalHydra.instance(), HydraConfig.instance()
    before = hydra.hydra, shared.cfg
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    others = [x for x in logging.Logger.manager.loggerDict.values() if isinstance(x, logging.Logger)]
    disabled = [x.disabled for x in others]
    hydra.clear()
    try:
        yield
    finally:
        hydra.hydra, shared.cfg = before
        root.setLevel(level)
        root.handlers[:] = handlers
        for logger, was in zip(others, disabled, strict=True):
            logger.disabled = was
