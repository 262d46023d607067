"""Metrics are read back as they were written; what is damaged or missing is left out."""

from __future__ import annotations

from pathlib import Path

from dtrain.runs.metrics import larger_is_better, rows, series, system_files


def test_rows_and_series(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert rows(path) == []
    path.write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "loss": null}\n{"step": 2, "val_loss": 3}\n{"step": 3, "lo')
    read = rows(path)
    assert [row["step"] for row in read] == [1, 2, 2]
    assert series(read, "loss") == ([1], [2.5])
    assert series(read, "val_loss") == ([2], [3.0])
    assert series(read, "accuracy") == ([], [])


def test_the_nodes_of_system_files(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for name in ("system-node2.jsonl", "system-node1.example.org.jsonl", "rank-0.log"):
        (tmp_path / "logs" / name).touch()
    assert list(system_files(tmp_path)) == ["node1.example.org", "node2"]


def test_a_name_of_a_metric_tells_which_values_are_good() -> None:
    small, large = ("val_loss", "val_perplexity", "my_rmse"), ("val_accuracy", "val_top5", "tokens_per_s", "val_f1")
    assert [larger_is_better(name) for name in (*small, *large)] == [False] * 3 + [True] * 4
    assert larger_is_better("val_thing") is None and larger_is_better("loss_of_accuracy") is None
