"""Hooks in trials: a promoted trial keeps their state, and one that a hook ended has its result."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.search import WarmTrials, search
from dtrain.commands.search.driver import Driver
from dtrain.commands.search.request import algorithm, read_request
from dtrain.runs.search_journal import read_journal
from tests.commands.search.test_driver import TINY, of_kind
from tests.world import summary

# Nothing improves by 1e9: the first evaluation is the best one, and the next ends the run.
STOPS = ["hooks=early_stop", "hooks.early_stop.patience=1", "hooks.early_stop.min_delta=1e9", "optim.lr=1e-3,1e-2"]


def test_a_promoted_trial_keeps_the_state_of_its_hooks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rungs 1, 2 and 4. Without the state, step 2 would be the first evaluation, and the trial would reach step 4."""
    words = ["algorithm=asha", *TINY, *STOPS, "train.steps=4", "factor=2", "min_steps=1"]
    events = search(tmp_path / "asha", words)
    assert [e["steps"] for e in of_kind(events, "train")] == [1, 1, 2, 4]
    results = of_kind(events, "result")
    assert all(e["status"] == "done" for e in results)
    assert results[-1]["value"] == results[-2]["value"], "its hooks have ended it: that is its result"
    found = summary(tmp_path / "asha" / of_kind(events, "train")[-1]["run"])
    assert found["steps"] == found["ended_by"]["step"] == 2 and found["ended_by"]["hook"] == "early_stop"
    assert "at step 2, where hooks=early_stop ended it" in capsys.readouterr().out


def test_a_trial_of_pbt_that_a_hook_ended_is_no_donor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["algorithm=pbt", *TINY, "train.steps=6", "every=3", "population=2", "train.eval_every=1", *STOPS[:3]]
    request = read_request([*words, "optim.lr=tag(log,interval(1e-3,1e-1))"])
    folder = tmp_path / "pbt"
    folder.mkdir()
    assert Driver(folder, request, algorithm(request), WarmTrials(folder, request.fixed)).run() == 3
    events = read_journal(folder)
    assert not of_kind(events, "exploit") and {e["value"] for e in of_kind(events, "result")} == {None}
    assert "no checkpoint of step 3 for others to copy" in capsys.readouterr().out
