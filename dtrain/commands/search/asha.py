"""ASHA, asynchronous successive halving (Li et al., MLSys 2020), as a pure function from the journal to its next event.

Trials train to the first rung; whenever a trial is among the best 1/factor of its rung, it trains on to the next one.
A paused trial is a run that ended at its rung with a checkpoint, and a promoted one is that run resumed. No decision
waits for other trials, so decisions depend on the order of the results: with parallel=1 that order is always the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dtrain.commands.search.space import Space, Values, draw, generator, grid, holds
from dtrain.launch.app import slug
from dtrain.runs.search_journal import Event

STARTUP_TRIALS = 8  # BOHB draws at random until there are so many results


@dataclass(frozen=True)
class Asha:
    """The settings, and the decisions that follow from them."""

    space: Space
    rungs: tuple[int, ...]  # steps, ascending; the last one is the whole run
    factor: int  # each rung keeps 1 of so many trials
    trials: int
    sign: int  # 1: small values are good, -1: large ones
    seed: int
    is_bohb: bool = False  # draw new trials by TPE from the results, instead of at random

    def next_event(self, events: Sequence[Event]) -> Event | None:
        """Return the next training, or None: wait for results, or, if no trial is training, the end."""
        scores = self.scores(events)
        started = [[e["trial"] for e in events if e["event"] == "train" and e["steps"] == rung] for rung in self.rungs]
        chosen = next_job(scores, started, self.factor, self.num_trials())
        if chosen is None:
            return None
        trial, rung = chosen
        train = {"event": "train", "trial": trial, "steps": self.rungs[rung]}
        if rung:
            first = next(e for e in events if e["event"] == "train" and e["trial"] == trial)
            return train | {"run": first["run"], "values": first["values"]}
        values = self.values(trial, events)
        return train | {"run": run_name(trial, values), "values": values}

    def allows(self, event: Event) -> bool:
        """Could this search have decided it?"""
        is_known = type(event.get("trial")) is int and event["trial"] >= 0 and event.get("steps") in self.rungs
        kinds = {"train": holds(self.space, event.get("values")), "result": True}
        return is_known and kinds.get(event["event"], False)

    def scores(self, events: Sequence[Event]) -> list[dict[int, float]]:
        """Return the results of each rung by trial, small is good; a failed trial has infinity."""
        found: list[dict[int, float]] = [{} for _ in self.rungs]
        for event in events:
            if event["event"] == "result":
                found[self.rungs.index(event["steps"])][event["trial"]] = score(event, self.sign)
        return found

    def num_trials(self) -> int:
        points = self.points()
        return self.trials if points is None else min(self.trials, len(points))

    def points(self) -> list[Values] | None:
        """Return the trials of a search over a grid, each combination once; None if trials are drawn."""
        return None if self.is_bohb else grid(self.space, generator(self.seed, "grid"))

    def values(self, trial: int, events: Sequence[Event]) -> Values:
        """Return the settings of a new trial."""
        points = self.points()
        if points is not None:
            return points[trial]
        if self.is_bohb:
            return draw_by_tpe(self.space, events, self.rungs[-1], self.sign, self.seed + trial)
        return draw(self.space, generator(self.seed, "trial", trial))


def score(result: Event, sign: int) -> float:
    return math.inf if result["value"] is None else sign * float(result["value"])


def run_name(trial: int, values: Values) -> str:
    varied = ",".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in values.items())
    return f"{trial}-{slug(varied)}"


def rung_steps(min_steps: int, steps: int, factor: int) -> tuple[int, ...]:
    """Return where trials pause: min_steps, factor times as many, and so on, and the whole run."""
    rungs = []
    while min_steps < steps:
        rungs.append(min_steps)
        min_steps *= factor
    return (*rungs, steps)


def next_job(
    scores: Sequence[dict[int, float]], started: Sequence[Sequence[int]], factor: int, num_trials: int
) -> tuple[int, int] | None:
    """Return (trial, rung) to train next: a promotion, from the highest rung down, or else a new trial.

    At the end, if no trial has reached the last rung, the best one of the highest rung is promoted: a rung of fewer
    trials than `factor` promotes none by itself.
    """
    for rung in range(len(scores) - 2, -1, -1):
        ranked = sorted(scores[rung], key=lambda trial: (scores[rung][trial], trial))
        for trial in ranked[: len(ranked) // factor]:
            if trial not in started[rung + 1] and math.isfinite(scores[rung][trial]):
                return trial, rung + 1
    if len(started[0]) < num_trials:
        return len(started[0]), 0
    is_idle = all(len(scores[rung]) == len(started[rung]) for rung in range(len(scores)))
    if not is_idle or any(map(math.isfinite, scores[-1].values())):
        return None
    for rung in range(len(scores) - 2, -1, -1):
        waiting = {t: s for t, s in scores[rung].items() if t not in started[rung + 1] and math.isfinite(s)}
        if waiting:
            return min(waiting, key=lambda trial: (waiting[trial], trial)), rung + 1
    return None


def draw_by_tpe(space: Space, events: Sequence[Event], last_rung: int, sign: int, seed: int) -> Values:
    """Draw settings by optuna's TPE from all results so far; at random until there are STARTUP_TRIALS.

    TPE ranks a trial that was promoted before those that were not, and trials of one rung by their values. (A model of
    the highest rung alone, as in the BOHB paper, saw only good trials here, and drew new ones far from them.)
    """
    import optuna
    from optuna.trial import TrialState, create_trial

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=STARTUP_TRIALS))
    tried = {e["trial"]: e["values"] for e in events if e["event"] == "train"}
    newest = {e["trial"]: e for e in events if e["event"] == "result"}
    for trial, result in sorted(newest.items()):
        value = None if result["value"] is None else sign * result["value"]
        is_whole = value is not None and result["steps"] == last_rung
        study.add_trial(
            create_trial(
                params=tried[trial], distributions=dict(space), value=value if is_whole else None,
                state=TrialState.COMPLETE if is_whole else TrialState.PRUNED,
                intermediate_values={} if value is None else {result["steps"]: value},
            )
        )  # fmt: skip
    params: Any = study.ask(dict(space)).params
    return dict(params)
