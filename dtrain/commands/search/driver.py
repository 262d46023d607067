"""Runs ASHA and PBT: asks the algorithm for its next event, writes it to the journal, carries it out, and repeats.

The journal decides everything. A process that replaces a killed one reads it, makes up for what was decided and not yet
done, adopts the trials that still train, and resumes those that do not.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

from dtrain.commands.search.asha import Asha, score
from dtrain.commands.search.pbt import Pbt
from dtrain.commands.search.request import Request
from dtrain.commands.search.space import overrides_of
from dtrain.commands.search.trials import Trials, ending
from dtrain.errors import bad
from dtrain.launch import fork, sweeps
from dtrain.runs.find import At
from dtrain.runs.folder import read_summary
from dtrain.runs.protocol import BAD_CONFIG, DONE, FAILED, PREEMPTED
from dtrain.runs.record import Record
from dtrain.runs.search_journal import Event, Journal
from dtrain.util.format import as_dict, counted

MANY = 3  # stop after this many failed trials in a row


class Driver:
    def __init__(self, folder: Path, request: Request, algorithm: Asha | Pbt, trials: Trials | None = None) -> None:
        self.folder, self.request, self.algorithm = folder, request, algorithm
        self.metric, self.parallel = request.options["metric"], int(request.options["parallel"])
        self.journal, self.trials = Journal(folder), trials or Trials(folder, request.fixed)
        self.began = time.time()
        if not all(map(self._is_own, self.journal.events)):
            rule = "holds a search with other settings, whose results would be mixed with these"
            raise bad("dir", folder, rule, "leave out dir=, or name a new folder")

    def _is_own(self, event: Event) -> bool:
        """Could this search have decided it? A journal of someone else must not name code, or a folder elsewhere."""
        runs = [event[key] for key in ("run", "donor_run") if key in event]
        is_name = all(isinstance(run, str) and Path(run).name == run and not run.startswith(".") for run in runs)
        return is_name and self.algorithm.allows(event)

    def run(self) -> int:
        """Return the exit code: 0 all trials were made, 2 bad settings, 3 failed, 75 stopped."""
        self.trials.stop_on_signals()
        for event in self.journal.events:
            if event["event"] == "exploit":
                self._fork(event)  # if the process was killed before
        while True:
            code = self._collect()
            if code is not None:
                return code
            training = self._training()
            if self.trials.stopped:
                if not self.trials.num_launchers():
                    print("stopped; the same command resumes it", flush=True)
                    return PREEMPTED
            elif len(training) < self.parallel and (decided := self.algorithm.next_event(self.journal.events)):
                self.journal.append(decided)
                self._carry_out(decided)
                continue
            elif not training:
                return self._end()
            self.trials.pause()

    def _training(self) -> list[Event]:
        """Return the trainings that have no result yet."""
        done = {(e["trial"], e["steps"]) for e in self.journal.events if e["event"] == "result"}
        return [e for e in self.journal.events if e["event"] == "train" and (e["trial"], e["steps"]) not in done]

    def _carry_out(self, event: Event) -> None:
        if event["event"] == "exploit":
            self._fork(event)
            print(lineage_line(event), flush=True)
        else:
            self._train(event)

    def _fork(self, event: Event) -> None:
        fork.make_run(At(self.folder / event["donor_run"], event["steps"]), self.folder / event["run"])

    def _train(self, event: Event) -> None:
        values = overrides_of(event["values"])
        if ended_by_hook(read_summary(self.folder / event["run"])):
            return  # it trained as far as its hooks let it: its result holds for the later rungs, too
        print(f"trial {event['trial']} to step {event['steps']}: {' '.join(values)}", flush=True)
        # only PBT changes values of a run that has begun
        may_differ = ",".join(event["values"]) if isinstance(self.algorithm, Pbt) else ""
        self.trials.launch(self.folder / event["run"], values, [f"train.stop_after={event['steps']}"], may_differ)

    def _collect(self) -> int | None:
        """Write the results of trials that have ended. Return an exit code if the whole search must end."""
        ended = [e for e in self._training() if not self.trials.has_launcher(self.folder / e["run"])]
        for event, record in zip(ended, self.trials.look([self.folder / e["run"] for e in ended]), strict=True):
            code = self._settle(event, record)
            if code is not None:
                return code
        return None

    def _settle(self, event: Event, record: Record) -> int | None:
        trial, run_dir, status = event["trial"], record.run_dir, record.status
        if record.job_id is not None and not (record.job and record.job.ended):
            return None  # in SLURM's queue, and its files may still be those of its previous training
        step = f"step {event['steps']}"
        summary, code = read_summary(run_dir), self.trials.exit_code(run_dir)
        ended = ended_by_hook(summary)
        if ended and status == "done" and isinstance(self.algorithm, Pbt):
            status = f"at {ended}, it has no checkpoint of step {event['steps']} for others to copy"
        elif status == "done" and (ended or summary.get("steps", 0) >= event["steps"]):
            value = summary.get(self.metric)
            if isinstance(value, (int, float)) and math.isfinite(value):
                self._result(event, float(value), status)
                print(f"trial {trial}: {self.metric} {value:.6g} at {ended or step}", flush=True)
                return None
            status = f"its summary has no {self.metric}"
        elif self.trials.stopped:  # it has saved, or had not begun: the same command resumes it
            return None
        elif status == "cancelled" and (record.cancel_asked or 0) > self.began:
            print(f"trial {trial} was cancelled, so the search ends; the same command resumes it", flush=True)
            return PREEMPTED
        elif code is None and (status != "failed" or not record.launches):  # of an earlier process of this search
            self._train(event)
            return None
        elif code == BAD_CONFIG:  # its message is on the screen
            if not sweeps.points(self.folder):
                return BAD_CONFIG  # no trial was accepted yet: the next one would fail alike
            status = "refused"
        elif status == "cancelled" or code == PREEMPTED:
            print(f"trial {trial} was {status}, so the search ends; the same command resumes it", flush=True)
            return PREEMPTED
        if status == "done":  # of an earlier rung
            status = f"its launcher ended with exit code {code}"
        self._result(event, None, status)
        print(ending(trial, status, run_dir), flush=True)
        newest = [e["value"] for e in self.journal.events if e["event"] == "result"][-MANY:]
        if newest == [None] * MANY:
            print(f"{MANY} trials in a row failed, so the search ends", flush=True)
            return FAILED
        return None

    def _result(self, event: Event, value: float | None, status: str) -> None:
        self.trials.processes.pop(self.folder / event["run"], None)
        result = {"event": "result", "trial": event["trial"], "steps": event["steps"], "value": value}
        self.journal.append(result | {"status": status})

    def _end(self) -> int:
        """Report the best trial of those that trained longest."""
        events = self.journal.events
        results = [e for e in events if e["event"] == "result" and e["value"] is not None]
        if not results:
            return FAILED
        longest = max(e["steps"] for e in results)
        best = min((e for e in results if e["steps"] == longest), key=lambda e: score(e, self.request.sign))
        train = next(e for e in events if e["event"] == "train" and same(e, best))
        for event in events:
            if event["event"] == "exploit":
                print(lineage_line(event))
        print(f"{counted(sum(num_steps(events)), 'step')} in all")
        values = " ".join(overrides_of(train["values"]))
        print(f"best: trial {best['trial']}, {self.metric} {best['value']:.6g} with {values} ({train['run']})")
        return DONE


def ended_by_hook(summary: dict[str, Any]) -> str:
    """Return which hook ended a run before its last step, such as early_stop; "" if none did."""
    ended = as_dict(summary.get("ended_by"))
    return f"step {ended.get('step')}, where hooks={ended['hook']} ended it" if ended.get("hook") else ""


def same(one: Event, other: Event) -> bool:
    return (one["trial"], one["steps"]) == (other["trial"], other["steps"])


def num_steps(events: list[Event]) -> list[int]:
    """Return the steps of each training: from where the trial stood to where it ended."""
    at: dict[int, int] = {}
    found = []
    for event in events:
        if event["event"] == "train":
            found.append(event["steps"] - at.get(event["trial"], 0))
            at[event["trial"]] = event["steps"]
    return found


def lineage_line(event: Event) -> str:
    changed = [
        f"{key} {brief(event['old_values'][key])} → {brief(value)} (donor {brief(event['donor_values'][key])})"
        for key, value in event["values"].items()
    ]
    return f"step {event['steps']}: trial {event['trial']} copies trial {event['donor']}; {', '.join(changed)}"


def brief(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
