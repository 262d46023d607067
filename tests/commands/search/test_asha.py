"""ASHA's decisions, with results from a formula instead of runs."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.distributions import CategoricalDistribution, FloatDistribution

from dtrain.commands.search.asha import Asha, next_job, rung_steps

SPACE = {"optim.lr": FloatDistribution(1e-4, 1.0, log=True)}


def quality(event: dict[str, Any]) -> float:
    """A loss that falls with the steps, and has its minimum at lr 0.01."""
    return abs(math.log10(event["values"]["optim.lr"]) + 2) + 10 / event["steps"]


def play(asha: Asha, parallel: int = 1, seed: int = 0, failing: tuple[int, ...] = ()) -> list[dict[str, Any]]:
    """Run a search on the formula: up to `parallel` trials at once, which end in random order."""
    rng, events, training = random.Random(seed), [], []
    while True:
        event = asha.next_event(events) if len(training) < parallel else None
        if event:
            events.append(event)
            training.append(event)
        elif not training:
            return events
        else:
            ended = training.pop(rng.randrange(len(training)))
            value = None if ended["trial"] in failing else asha.sign * quality(ended)
            events.append({"event": "result", **{k: ended[k] for k in ("trial", "steps")}, "value": value})


def trained(events: list[dict[str, Any]]) -> Counter[int]:
    return Counter(e["steps"] for e in events if e["event"] == "train")


def test_rungs() -> None:
    assert rung_steps(1, 9, 3) == (1, 3, 9)
    assert rung_steps(10, 60, 2) == (10, 20, 40, 60)
    assert rung_steps(59, 60, 4) == (59, 60)


def test_a_trial_is_promoted_when_it_is_in_the_best_share_of_its_rung() -> None:
    empty: dict[int, float] = {}
    assert next_job([empty, empty], [[], []], 3, 9) == (0, 0)
    assert next_job([{0: 1.0, 1: 2.0}, empty], [[0, 1], []], 3, 9) == (2, 0), "one third of two is none"
    assert next_job([{0: 1.0, 1: 0.5, 2: 2.0}, empty], [[0, 1, 2], []], 3, 9) == (1, 1)
    assert next_job([{0: 1.0, 1: 0.5, 2: 2.0}, empty], [[0, 1, 2], [1]], 3, 9) == (3, 0), "it was promoted before"
    assert next_job([{0: math.inf, 1: math.inf}, empty], [[0, 1], []], 2, 2) is None, "failed trials are not promoted"


@pytest.mark.parametrize("sign", [1, -1])
def test_it_finds_the_best_of_a_grid_for_less(sign: int) -> None:
    grid = {"optim.lr": CategoricalDistribution([10**-k for k in (0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5)])}
    for seed in range(20):
        events = play(Asha(grid, (10, 30, 90), 3, 20, sign, seed))
        assert trained(events)[10] == 9, "trials=20, but each of the 9 points once"
        longest = [e for e in events if e["event"] == "train" and e["steps"] == 90]
        assert 0.01 in [e["values"]["optim.lr"] for e in longest]
        steps = sum({10: 10, 30: 20, 90: 60}[e["steps"]] for e in events if e["event"] == "train")
        assert steps <= 0.6 * 9 * 90  # asynchronous: what is promoted depends on the order of the points


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 30),
    st.integers(2, 4),
    st.integers(1, 5),
    st.integers(0, 999),
    st.sets(st.integers(0, 29), max_size=9),
)
def test_every_search_ends_and_keeps_the_rules(
    trials: int, factor: int, parallel: int, seed: int, failing: set[int]
) -> None:
    asha = Asha(SPACE, rung_steps(2, 40, factor), factor, trials, 1, seed)
    events = play(asha, parallel, seed, tuple(failing))
    jobs = [(e["trial"], e["steps"]) for e in events if e["event"] == "train"]
    assert len(set(jobs)) == len(jobs), "no trial trains twice to the same rung"
    assert sorted(t for t, s in jobs if s == asha.rungs[0]) == list(range(trials)), "no trial is lost"
    for trial, steps in jobs:
        rung = asha.rungs.index(steps)
        assert rung == 0 or (trial, asha.rungs[rung - 1]) in jobs, "rung by rung"
    if not set(range(trials)) <= failing:
        assert (asha.rungs[-1] in {s for _, s in jobs}) or any(t in failing for t, _ in jobs)
    for event in events:  # a promoted trial keeps its run and its values
        first = next(e for e in events if e["event"] == "train" and e["trial"] == event["trial"])
        assert event["event"] == "result" or (event["run"], event["values"]) == (first["run"], first["values"])


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 99), st.data())
def test_from_any_moment_on_it_ends_the_same(seed: int, data: st.DataObject) -> None:
    """With one trial at a time: what a killed search has written determines the rest."""
    asha = Asha(SPACE, (1, 3, 9), 3, 9, 1, seed)
    whole = play(asha)
    events = whole[: data.draw(st.integers(0, len(whole)))]
    while len(events) < len(whole):
        last = events[-1] if events else {"event": "none"}
        if last["event"] == "train":
            event = {"event": "result", "trial": last["trial"], "steps": last["steps"], "value": quality(last)}
        else:
            event = asha.next_event(events)
        events = [*events, event]
    assert events == whole


def test_bohb_draws_where_the_results_were_good() -> None:
    def median_distance(is_bohb: bool) -> float:
        events = play(Asha(SPACE, (1, 3, 9), 3, 40, 1, 0, is_bohb))
        late = [e["values"]["optim.lr"] for e in events if e["event"] == "train" and e["steps"] == 1][20:]
        return sorted(abs(math.log10(lr) + 2) for lr in late)[len(late) // 2]

    assert median_distance(is_bohb=True) < 0.6 * median_distance(is_bohb=False)
