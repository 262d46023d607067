"""Metrics of the user's own (from hooks, a model or a loss) are wherever dtrain's are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import dtrain
from dtrain.api import Result
from dtrain.commands.search.request import check_options, has_own_metrics
from dtrain.runs.folder import newest_metrics
from dtrain.runs.record import read_run
from dtrain.ui.comparison import compare
from dtrain.ui.console import print_summary
from dtrain.ui.progress import Monitor
from dtrain.ui.sweep_table import print_points
from dtrain.ui.tables import print_runs, sort_runs

STEPS = [
    {"step": 1, "loss": 3.0, "train_mae": 0.75, "own": ["train_mae"], "step_s": 0.1, "tokens_per_s": 10.0},
    {"step": 2, "loss": 2.0, "train_mae": 0.5, "own": ["train_mae"], "step_s": 0.1, "tokens_per_s": 10.0},
    {"step": 2, "val_loss": 2.5, "val_f1": 0.625, "own": ["val_f1"]},
    {"step": 2, "weight_norm": 12.5, "own": ["weight_norm"]},
]
OWN = {"train_mae": 0.5, "val_f1": 0.625, "weight_norm": 12.5}


def a_run(path: Path, f1: float = 0.625, **summary: Any) -> Path:
    path.mkdir()
    lines = [line | ({"val_f1": f1} if "val_f1" in line else {}) for line in STEPS]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line | {"time": 1.0}) + "\n" for line in lines))
    facts = {"status": "done", "model": "net", "total_steps": 4, "steps": 2, "val_loss": 2.5}
    own = OWN | {"val_f1": f1}
    (path / "summary.json").write_text(json.dumps(facts | own | {"own_metrics": sorted(own)} | summary))
    (path / "launch.json").write_text(json.dumps({"launches": [{}]}))
    return path


def printed(function: Any, *arguments: Any, **options: Any) -> str:
    console = Console(width=300, color_system=None)
    with console.capture() as text:
        function(*arguments, console=console, **options)
    return str(text.get())


def test_of_a_run_that_still_trains(tmp_path: Path) -> None:
    found = newest_metrics(a_run(tmp_path / "run"))
    assert found["own_metrics"] == sorted(OWN) and found.items() >= OWN.items()


def test_in_the_summary_and_why_it_ended(tmp_path: Path) -> None:
    ended = {"hook": "early_stop", "reason": "val_f1 has not improved", "step": 2}
    text = printed(print_summary, a_run(tmp_path / "run", ended_by=ended))
    assert "val_f1           0.625" in text and "weight_norm      12.5" in text
    assert "ended by         early_stop: val_f1 has not improved" in text
    assert "hooks=none 'resume_allow=[hooks]'" in text


def test_in_tables(tmp_path: Path) -> None:
    a, b = a_run(tmp_path / "a", f1=0.5), a_run(tmp_path / "b", f1=0.75)
    rows = [read_run(a), read_run(b)]
    text = printed(print_runs, rows)
    assert "val_f1" in text and "0.5" in text and "0.75" in text
    assert [Path(row["path"]).name for row in sort_runs(rows, "val_f1")] == ["b", "a"], "larger is better"
    with pytest.raises(ValueError, match="did you mean val_f1"):
        sort_runs(rows, "val_f2")
    assert compare([a, b])["results"]["val_f1"] == [0.5, 0.75]
    assert "weight_norm" in printed(lambda console: print_points(rows, console))


def test_in_the_progress(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    later = run / "metrics.jsonl"
    text = later.read_text()
    later.write_text("")
    console = Console(width=300, color_system=None, force_terminal=False)
    with console.capture() as captured, Monitor(run, console) as monitor:
        monitor.history = {}
        monitor.poll()
        later.write_text(text)
        monitor.poll()
    said = captured.get()
    assert "step 2  validation loss 2.5000  val_f1 0.625" in said
    assert "train_mae 0.75" in said and "step 2  weight_norm 12.5" in said


def test_in_a_frame(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    run = a_run(tmp_path / "run")
    frame = Result(run).metrics()
    assert frame.loc[2].to_dict().items() >= OWN.items() and frame["train_mae"].tolist() == [0.75, 0.5]
    assert frame.equals(dtrain.load(run).metrics)  # type: ignore[union-attr]


def test_as_the_metric_of_a_search() -> None:
    assert not has_own_metrics(["model=gpt2-tiny", "optim.lr=1e-3,1e-2"])
    for words in (["hooks=net.F1"], ["model=net.Net"], ["loss=net.focal"], ["hooks=[early_stop]"]):
        assert has_own_metrics(words)
    assert check_options({}, {"metric": "val_f1"}, True)["direction"] == "maximize"
    assert check_options({}, {"metric": "score", "direction": "minimize"}, True)["direction"] == "minimize"
    for typed, may_be_own, words in (
        ({"metric": "val_f1"}, False, "is not in a run's summary"),
        ({"metric": "score"}, True, "direction=minimize or maximize"),
        ({"metric": "val_los"}, True, "did you mean val_loss"),
    ):
        with pytest.raises(ValueError, match=words):
            check_options({}, typed, may_be_own)
