"""`dtrain search`: search for the best settings with optuna, one run folder per trial, on this machine or on SLURM.

The study is a journal in the sweep's folder, and every trial is a run, so the search can end at any time in any way:
the same command resumes it. hydra-optuna-sweeper is not used: its last release requires optuna below 3.
"""

from __future__ import annotations

import math
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep
from hydra.errors import HydraException

from dtrain import start
from dtrain.config.files import CODE, GROUPS, RECIPES
from dtrain.config.hydra_errors import explain
from dtrain.config.untrusted import read
from dtrain.errors import bad
from dtrain.launch import sweeps
from dtrain.launch.app import slug
from dtrain.runs import record as records
from dtrain.runs.folder import read_summary
from dtrain.runs.protocol import BAD_CONFIG, DONE, FAILED, PREEMPTED
from dtrain.ui import console, tables
from dtrain.util.format import shell_path

if TYPE_CHECKING:
    import optuna

USAGE = """usage: dtrain search trials=N [parallel=P] SETTING=SPACE ... [setting=value ...]

  optim.lr=tag(log,interval(1e-4,1e-2))    a number in this interval; log: sampled on a log scale
  schedule.warmup_steps=int(interval(10,100))
  train.global_batch_size=range(8,65,8)    start, stop (excluded), step
  strategy=ddp,fsdp                        one of these

  trials=20      how many runs in all          parallel=1       how many at once
  metric=val_loss     a key of summary.json    direction=minimize|maximize
  sampler=tpe|random                           seed=0
  dir=FOLDER     default: multirun/<date>/<time>-search; the same command again resumes the search
  detach=true|false   true: continue in the background; default: true on SLURM only

A recipe may hold all of it in a section `search:` (recipes/search-lr.yaml). Results at any time: dtrain runs FOLDER."""
DEFAULTS = {
    "trials": "20", "parallel": "1", "metric": "val_loss", "direction": "minimize", "sampler": "tpe", "seed": "0",
    "dir": "", "detach": "",
}  # fmt: skip
METRICS = (
    "val_loss", "val_accuracy", "val_top5", "val_perplexity", "train_loss", "tokens_per_s", "mfu", "peak_mem_gib",
    "wall_s",
)  # fmt: skip
LOCAL_S, QUEUE_S = 0.5, 5.0  # how often to check trials on this machine, and in a queue
MANY = 3  # stop after this many failed trials in a row


@dataclass(frozen=True)
class Request:
    options: dict[str, str]  # the keys of DEFAULTS
    space: list[Override]
    fixed: list[str]


def main(argv: list[str]) -> int:
    """Exit codes: 0 all trials were made, 2 bad settings, 3 none succeeded, 75 stopped; the same command resumes."""
    if not argv or {"-h", "--help"} & set(argv):
        print(USAGE)
        return 0
    try:
        import optuna
    except ModuleNotFoundError:
        raise bad("search", "", "optuna is not installed", "pip install 'dtrain[search]'") from None
    request = read_request(argv)
    typed = ["search", *sorted(a for a in argv if not a.startswith(("dir=", "detach=", "trials=", "parallel=")))]
    folder = Path(request.options["dir"] or sweeps.earlier(typed) or time.strftime("multirun/%Y-%m-%d/%H-%M-%S-search"))
    if request.options["detach"] == "true" or (not request.options["detach"] and _is_submitted(request)):
        return _detach(argv, folder)
    with sweeps.lock(folder):
        sweeps.note(folder, typed)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        code = Search(folder, request).run()
    tables.print_sweep(sweeps.points(folder))
    return code


def read_request(argv: Sequence[str]) -> Request:
    recipe = next((a.partition("=")[2] for a in argv if a.startswith("recipe=")), None)
    section: Any = {}
    if recipe:
        path = Path(recipe).expanduser() if recipe.endswith((".yaml", ".yml")) else RECIPES / f"{recipe}.yaml"
        if path.is_file():
            section = recipe_section(path)
            check_space(path, section)
    settings = DEFAULTS | {k: str(v) for k, v in section.items() if k != "space"}
    overrides = [str(word) for word in section.get("space", [])]
    for word in argv:
        key, equals, value = word.partition("=")
        if word.startswith("-") or not equals:
            raise ValueError(f"{word}: is not understood as key=value\n  fix: dtrain search --help")
        if key in settings:
            settings[key] = value
        else:
            overrides.append(word)
    for key in ("trials", "parallel", "seed"):
        if not settings[key].isdecimal() or int(settings[key]) < (key != "seed"):
            raise bad(key, settings[key], "must be a whole number, at least 1", f"{key}={DEFAULTS[key]}")
    if settings["metric"] not in METRICS:
        raise bad("metric", settings["metric"], "is not in a run's summary", f"metric can be {', '.join(METRICS)}")
    for key, options in (("direction", ("minimize", "maximize")), ("sampler", ("tpe", "random"))):
        if settings[key] not in options:
            raise bad(key, settings[key], f"must be {' or '.join(options)}", f"{key}={DEFAULTS[key]}")
    unknown = set(settings) - set(DEFAULTS)
    if unknown:
        raise bad(
            f"search.{unknown.pop()}", "…", "there is no such setting", f"use one of {', '.join(DEFAULTS)}, space"
        )
    # typed overrides win over the recipe's
    parsed = {o.key_or_group: o for o in parse(overrides)}
    space = [o for o in parsed.values() if o.is_sweep_override()]
    if not space:
        raise bad("search", "", "nothing varies", "e.g. 'optim.lr=tag(log,interval(1e-4,1e-2))'")
    fixed = [str(o.input_line) for o in parsed.values() if not o.is_sweep_override()]
    for override in space:
        try:
            distribution(override)
        except ValueError as error:
            if "  fix: " in str(error):
                raise
            key = override.key_or_group
            why = f"is not a search space ({str(error).strip().rstrip('.')})"
            raise bad(
                key, override.get_value_string(), why, f"{key}=interval(LOW,HIGH), range(FROM,TO) or a,b"
            ) from error
    return Request(settings, space, fixed)


def recipe_section(path: Path) -> Any:
    try:
        tree = read(path)
    except Exception as error:  # yaml errors have many types; each means that the file is not a recipe
        raise bad("recipe", path, f"cannot be read: {error}", "correct the file") from error
    return (tree.get("search") or {}) if isinstance(tree, dict) else {}


def check_space(path: Path, section: Any) -> None:
    """Check an untrusted recipe's space, which becomes overrides of the trials: it may set only what a recipe may."""
    space = section.get("space", []) if isinstance(section, dict) else None
    if not isinstance(space, list):
        raise bad("recipe", path, "its `search` must be a section with a list `space`", "dtrain recipes show search-lr")
    for override in parse([str(word) for word in space]):
        key, line = str(override.key_or_group), str(override.input_line)
        if not override.is_sweep_override():
            raise bad("search.space", line, "must vary", "put a fixed setting into the recipe itself")
        code = any(key == f"cluster.{name}" or key.startswith(f"cluster.{name}.") for name in CODE)
        typed = key.startswith(("hydra", "trust", "resume", "recipe", "run_dir"))
        own = key in GROUPS and "." in line.partition("=")[2]  # my_pkg.Net: typing a name would trust it
        if code or typed or own or not re.fullmatch(r"[a-z]\w*(\.[a-zA-Z]\w*)*", key) or "${" in line:
            raise bad(
                "search.space",
                line,
                "code and trust may be given on the command line only",
                f"give it there: '{key}=…'",
            )


def parse(overrides: list[str]) -> list[Override]:
    try:
        return OverridesParser.create().parse_overrides(overrides)
    except HydraException as error:
        raise ValueError(explain(error)) from error


def distribution(override: Override) -> optuna.distributions.BaseDistribution:
    """Convert Hydra's sweep syntax to an optuna distribution."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    sweep = override.value()
    if isinstance(sweep, ChoiceSweep):
        values = [str(getattr(item, "text", item)) if isinstance(item, str) else item for item in sweep.list]
        return CategoricalDistribution([v if isinstance(v, (bool, int, float)) else str(v) for v in values])
    if isinstance(sweep, IntervalSweep):
        assert sweep.start is not None and sweep.end is not None
        if isinstance(sweep.start, int) and isinstance(sweep.end, int):
            return IntDistribution(sweep.start, sweep.end, log="log" in sweep.tags)
        return FloatDistribution(float(sweep.start), float(sweep.end), log="log" in sweep.tags)
    if isinstance(sweep, RangeSweep) and sweep.start is not None and sweep.stop is not None:
        last = sweep.start + (math.ceil((sweep.stop - sweep.start) / sweep.step) - 1) * sweep.step
        if all(isinstance(n, int) for n in (sweep.start, last, sweep.step)):
            return IntDistribution(int(sweep.start), int(last), step=int(sweep.step))
        return FloatDistribution(float(sweep.start), float(last), step=float(sweep.step))
    key = override.key_or_group
    raise bad(key, override.input_line, "cannot be searched", f"{key}=choice(…), interval(…) or range(…)")


def _is_submitted(request: Request) -> bool:
    """Are the trials submitted to a scheduler, which outlives this terminal?"""
    overrides = [w for w in request.fixed if w.startswith(("cluster", "recipe"))]
    from dtrain.launch.compose import compose

    return compose(overrides)["cluster"].get("launcher") == "submitit"


def _detach(argv: list[str], folder: Path) -> int:
    """Continue in a separate process that survives the end of the terminal."""
    sweeps.lock(folder).close()  # creates the folder; raises if the search is already running
    overrides = [a for a in argv if not a.startswith(("detach=", "dir="))]
    with open(folder / "search.log", "ab") as log:
        process = subprocess.Popen(
            [*start.command("dtrain.cli"), "search", *overrides, f"dir={folder}", "detach=false"],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    time.sleep(3)  # long enough to see an early error
    if process.poll() not in (None, DONE):
        console.print_error((folder / "search.log").read_text(errors="replace").removeprefix("error: ").strip())
        return process.poll() or FAILED
    print(f"searching in the background (process {process.pid} here; log in {shell_path(folder / 'search.log')})")
    print(f"results   dtrain runs {shell_path(folder)}")
    print(f"cancel    dtrain cancel {shell_path(folder)}      (the same command resumes it)")
    return DONE


class Search:
    """The loop: ask optuna for settings, launch a run with them, report its result."""

    def __init__(self, folder: Path, request: Request) -> None:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        self.folder, self.request, self.options = folder, request, request.options
        self.study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(folder / "study.journal"))),
            study_name="search", load_if_exists=True, direction=self.options["direction"],  # type: ignore[arg-type]
        )  # fmt: skip
        seed = int(self.options["seed"]) + len(self.study.trials)  # a resumed search must draw other values
        samplers = {"tpe": optuna.samplers.TPESampler(seed=seed), "random": optuna.samplers.RandomSampler(seed=seed)}
        self.study.sampler = samplers[self.options["sampler"]]
        self.space = {o.key_or_group: distribution(o) for o in request.space}
        self.stopped = False
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def run(self) -> int:
        from optuna.trial import TrialState

        for trial in self.study.get_trials(states=[TrialState.RUNNING]):  # from an earlier driver process
            record = self._look([trial.number])[0]
            if record.status != "done" and not record.is_live:
                self._launch(trial.number, trial.params)
        for stop in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(stop, self._on_signal)
        while True:
            waiting = [t.number for t in self.study.get_trials(deepcopy=False, states=[TrialState.RUNNING])]
            for number, record in zip(waiting, self._look(waiting), strict=True):
                code = self._settle(number, record)
                if code is not None:
                    return code
            running = len(self.study.get_trials(deepcopy=False, states=[TrialState.RUNNING]))
            made = len(self.study.get_trials(deepcopy=False))
            if self.stopped and not any(p.poll() is None for p in self.processes.values()):
                print("stopped; the same command resumes it", flush=True)
                return PREEMPTED
            if not self.stopped and made < int(self.options["trials"]) and running < int(self.options["parallel"]):
                asked = self.study.ask(self.space)
                self._launch(asked.number, asked.params)
            elif not running:
                break
            else:
                local = any(process.poll() is None for process in self.processes.values())
                self._pause(LOCAL_S if local else QUEUE_S)
        done = self.study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
        if not done:
            return FAILED
        best = " ".join(f"{k}={v}" for k, v in self.study.best_params.items())
        number, value = self.study.best_trial.number, self.study.best_value
        print(f"best: trial {number}, {self.options['metric']} {value:.6g} with {best}")
        return DONE

    def _on_signal(self, number: int, frame: object) -> None:
        """Stop the search: local trials save and end; queued trials continue."""
        self.stopped = True
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()

    def _run_dir(self, number: int) -> Path:
        found = list(self.folder.glob(f"{number}-*"))
        return found[0] if found else self.folder / f"{number}-{slug(self._varied(self.study.trials[number].params))}"

    def _varied(self, params: dict[str, Any]) -> str:
        return ",".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in params.items())

    def _launch(self, number: int, params: dict[str, Any]) -> None:
        run_dir = self._run_dir(number)
        varied = [f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in params.items()]
        overrides = [*self.request.fixed, *varied, f"run_dir='{run_dir}'"]
        if (run_dir / "launch.json").exists():
            overrides = [f"resume={run_dir}"]
        print(f"trial {number}: {' '.join(varied)}", flush=True)
        command = [*start.command("dtrain.cli"), "launch", *overrides]
        # a separate session: this process gets Ctrl-C and forwards it
        self.processes[number] = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)

    def _look(self, numbers: Sequence[int]) -> list[records.Record]:
        """Read the state of the trials, with one SLURM query for all."""
        return records.load([self._run_dir(number) for number in numbers], ask_all=True)[0]

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.stopped:
            time.sleep(0.1)

    def _settle(self, number: int, record: records.Record) -> int | None:
        """Report a finished trial's result to the study. Returns an exit code if the whole search must end."""
        from optuna.trial import TrialState

        process = self.processes.get(number)
        if process is not None and process.poll() is None:
            return None
        run_dir, status = record.run_dir, record.status
        if process is not None and process.returncode == BAD_CONFIG:
            self.study.tell(number, state=TrialState.FAIL)  # its message is on the screen
            if not sweeps.points(self.folder):
                return BAD_CONFIG  # no trial was accepted yet: the next one would fail alike
            print(f"trial {number}: refused", flush=True)  # e.g. a micro-batch that cannot fit
        elif record.is_live:
            return None
        elif status == "done":
            value = read_summary(run_dir).get(self.options["metric"])
            if isinstance(value, (int, float)) and math.isfinite(value):
                self.study.tell(number, float(value))
                print(f"trial {number}: {self.options['metric']} {value:.6g}", flush=True)
            else:
                self.study.tell(number, state=TrialState.FAIL)
                print(f"trial {number}: its summary has no {self.options['metric']}", flush=True)
        elif status == "cancelled" or (process is not None and process.returncode == PREEMPTED):
            if self.stopped:
                return None
            print(f"trial {number} was {status}, so the search ends; the same command resumes it", flush=True)
            return PREEMPTED
        else:  # failed, died, or interrupted and no longer queued
            self.study.tell(number, state=TrialState.FAIL)
            print(f"trial {number}: {status}; dtrain status {shell_path(run_dir)}", flush=True)
        newest = [t.state for t in self.study.get_trials(deepcopy=False) if t.state.is_finished()][-MANY:]
        if newest == [TrialState.FAIL] * MANY:
            print(f"{MANY} trials in a row failed, so the search ends", flush=True)
            return FAILED
        return None
