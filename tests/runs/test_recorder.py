"""metrics.jsonl as it is written: exact numbers, no NaN, and no step twice after a resume."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from dtrain.runs import recorder


def test_a_line_reads_back_exactly_and_what_is_not_finite_is_null(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"step": 7, "loss": 1 / 3, "lr": 1e-300, "mfu": None, "tokens": 2**60}
    record = recorder.Recorder(tmp_path, 0)
    monkeypatch.setattr(recorder.time, "time", lambda: 1700000000.12345)
    record.write(**values)
    record.write(step=8, loss=math.nan, grad_norm=math.inf, lr=0.1)
    first, second = (tmp_path / "metrics.jsonl").read_text().splitlines()  # while the file is still open
    assert json.loads(first) == values | {"time": 1700000000.123}
    assert second == '{"step": 8, "loss": null, "grad_norm": null, "lr": 0.1, "time": 1700000000.123}'


def test_a_resume_drops_the_steps_that_are_done_again(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    recorder.Recorder(tmp_path, 2).write(step=3, loss=1.0)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
