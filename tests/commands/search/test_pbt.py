"""PBT's decisions, with results from a formula instead of runs."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.distributions import FloatDistribution

from dtrain.commands.search.pbt import Pbt, boundary_steps, exploits
from dtrain.commands.search.space import generator

SPACE = {"optim.lr": FloatDistribution(1e-4, 1.0, log=True)}


def make(population: int = 4, seed: int = 0, steps: int = 90) -> Pbt:
    return Pbt(SPACE, boundary_steps(10, steps), population, 0.25, (0.8, 1.2), 0.25, 1, seed)


def play(pbt: Pbt, parallel: int = 1, order: int = 0, failing: Sequence[tuple[int, int]] = ()) -> list[dict[str, Any]]:
    """failing: (member, steps) of trainings that fail."""
    rng, events, training = random.Random(order), [], []
    while True:
        event = pbt.next_event(events) if len(training) < parallel else None
        if event:
            events.append(event)
            training += [event] if event["event"] == "train" else []
        elif not training:
            return events
        else:
            ended = training.pop(rng.randrange(len(training)))
            value = abs(math.log10(ended["values"]["optim.lr"]) + 2) + 10 / ended["steps"]
            value = None if (ended["trial"], ended["steps"]) in failing else value
            events.append({"event": "result", "trial": ended["trial"], "steps": ended["steps"], "value": value})


def of_kind(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [e for e in events if e["event"] == kind]


def test_the_worst_copy_the_best() -> None:
    scores = {0: 3.0, 1: 1.0, 2: 4.0, 3: 2.0}
    assert exploits(scores, 0.25, generator(0)) == [(2, 1)]
    assert {m for m, _ in exploits(scores, 0.5, generator(0))} == {0, 2}
    assert {d for seed in range(20) for _, d in exploits(scores, 0.5, generator(seed))} == {1, 3}
    assert exploits({0: math.inf, 1: math.inf, 2: 1.0, 3: math.inf}, 0.25, generator(0)) == [(0, 2), (1, 2), (3, 2)]
    assert exploits({0: 1.0, 1: 1.0}, 0.25, generator(0)) == [(1, 0)], "ties: by number"


def test_4_members_and_8_perturbations() -> None:
    pbt = make()
    events = play(pbt)
    assert pbt.boundaries == (10, 20, 30, 40, 50, 60, 70, 80, 90)
    assert len(of_kind(events, "train")) == 4 * 9 and len(of_kind(events, "exploit")) == 8
    assert [e["steps"] for e in of_kind(events, "exploit")] == [10, 20, 30, 40, 50, 60, 70, 80]
    finals = [e["value"] for e in of_kind(events, "result") if e["steps"] == 90]
    begin = [e["value"] for e in of_kind(events, "result") if e["steps"] == 10]
    assert max(finals) - min(finals) < max(begin) - min(begin)


def test_the_lineage_is_complete() -> None:
    """Each run begins with a drawn member or with an exploit of a run that stood at that step."""
    events = play(make(population=8, steps=60), parallel=3)
    stands: dict[str, int] = {}
    for e in events:
        if e["event"] == "exploit":
            assert stands[e["donor_run"]] == e["steps"] and e["run"] not in stands
            stands[e["run"]] = e["steps"]
        elif e["event"] == "train":
            assert stands.get(e["run"], 0) == (0 if e["run"] not in stands else e["steps"] - 10)
            stands[e["run"]] = e["steps"]
    assert max(stands.values()) == 60


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 9), st.integers(1, 9), st.integers(0, 99), st.integers(0, 99))
def test_the_timing_changes_nothing(population: int, parallel: int, order: int, seed: int) -> None:
    """Neither how many train at once, nor who ends first."""

    def essence(events: list[dict[str, Any]]) -> list[str]:
        return sorted(str(sorted(e.items())) for e in events)

    assert essence(play(make(population, seed, 40), parallel, order)) == essence(play(make(population, seed, 40)))


def test_a_member_that_failed_copies_a_good_one() -> None:
    events = play(make(), failing=((1, 20), (3, 20)))
    assert {1, 3} <= {e["trial"] for e in of_kind(events, "exploit") if e["steps"] == 20}
    assert len(of_kind(events, "train")) == 4 * 9
    none_left = play(make(), failing=tuple((trial, 20) for trial in range(4)))
    assert max(e["steps"] for e in of_kind(none_left, "train")) == 20
