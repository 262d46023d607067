"""The loop of `algorithm=optuna`: ask optuna for settings, launch a run with them, report its result.

The study is a journal of optuna in the search's folder. hydra-optuna-sweeper is not used: its last release requires
optuna below 3.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from dtrain.commands.search.asha import run_name
from dtrain.commands.search.driver import MANY
from dtrain.commands.search.request import Request
from dtrain.commands.search.space import distribution, overrides_of
from dtrain.commands.search.trials import Trials, ending
from dtrain.launch import sweeps
from dtrain.runs.folder import read_summary
from dtrain.runs.protocol import BAD_CONFIG, DONE, FAILED, PREEMPTED
from dtrain.runs.record import Record
from dtrain.runs.search_journal import STUDY


class Search:
    def __init__(self, folder: Path, request: Request) -> None:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.folder, self.options = folder, request.options
        self.study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(folder / STUDY))),
            study_name="search", load_if_exists=True, direction=self.options["direction"],  # type: ignore[arg-type]
        )  # fmt: skip
        seed = int(self.options["seed"]) + len(self.study.trials)  # a resumed search must draw other values
        samplers = {"tpe": optuna.samplers.TPESampler(seed=seed), "random": optuna.samplers.RandomSampler(seed=seed)}
        self.study.sampler = samplers[self.options["sampler"]]
        self.space = {o.key_or_group: distribution(o) for o in request.space}
        self.trials = Trials(folder, request.fixed)

    def run(self) -> int:
        from optuna.trial import TrialState

        for trial in self.study.get_trials(states=[TrialState.RUNNING]):  # from an earlier driver process
            run_dir = self._run_dir(trial.number)
            record = self.trials.look([run_dir])[0]
            if record.status != "done" and not record.is_live and not self.trials.has_launcher(run_dir):
                self._launch(trial.number, trial.params)
        self.trials.stop_on_signals()
        while True:
            waiting = [t.number for t in self.study.get_trials(deepcopy=False, states=[TrialState.RUNNING])]
            for number, record in zip(waiting, self.trials.look(list(map(self._run_dir, waiting))), strict=True):
                code = self._settle(number, record)
                if code is not None:
                    return code
            running = len(self.study.get_trials(deepcopy=False, states=[TrialState.RUNNING]))
            made = len(self.study.get_trials(deepcopy=False))
            if self.trials.stopped and not self.trials.num_launchers():
                print("stopped; the same command resumes it", flush=True)
                return PREEMPTED
            has_room = running < int(self.options["parallel"]) and made < int(self.options["trials"])
            if not self.trials.stopped and has_room:
                asked = self.study.ask(self.space)
                self._launch(asked.number, asked.params)
            elif not running:
                break
            else:
                self.trials.pause()
        done = self.study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
        if not done:
            return FAILED
        best = " ".join(f"{k}={v}" for k, v in self.study.best_params.items())
        number, value = self.study.best_trial.number, self.study.best_value
        print(f"best: trial {number}, {self.options['metric']} {value:.6g} with {best} ({self._run_dir(number).name})")
        return DONE

    def _run_dir(self, number: int) -> Path:
        found = list(self.folder.glob(f"{number}-*"))
        return found[0] if found else self.folder / run_name(number, self.study.trials[number].params)

    def _launch(self, number: int, params: dict[str, Any]) -> None:
        varied = overrides_of(params)
        print(f"trial {number}: {' '.join(varied)}", flush=True)
        self.trials.launch(self._run_dir(number), varied)

    def _settle(self, number: int, record: Record) -> int | None:
        """Report a finished trial's result to the study. Returns an exit code if the whole search must end."""
        from optuna.trial import TrialState

        if self.trials.has_launcher(record.run_dir):
            return None
        run_dir, status, code = record.run_dir, record.status, self.trials.exit_code(record.run_dir)
        if code == BAD_CONFIG:
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
        elif self.trials.stopped:  # it has saved, or had not begun
            return None
        elif status == "cancelled" or code == PREEMPTED:
            print(f"trial {number} was {status}, so the search ends; the same command resumes it", flush=True)
            return PREEMPTED
        else:  # failed, died, or interrupted and no longer queued
            self.study.tell(number, state=TrialState.FAIL)
            print(ending(number, status, run_dir), flush=True)
        newest = [t.state for t in self.study.get_trials(deepcopy=False) if t.state.is_finished()][-MANY:]
        if newest == [TrialState.FAIL] * MANY:
            print(f"{MANY} trials in a row failed, so the search ends", flush=True)
            return FAILED
        return None
