"""What the time until the first step goes to: the phases add up, and a wait in a queue is not among them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dtrain import start
from dtrain.commands import profile
from dtrain.runs.folder import write_json
from dtrain.train import startup
from dtrain.train.pending import FinishedStep
from dtrain.train.startup import StartTimes
from dtrain.util.format import start_text
from tests.world import make_run, summary, train

PHASES = ["process_group", "data", "model", "loader", "checkpoint", "prepare", "first_batch", "compile", "first_step"]


def folder(tmp_path: Path, launch: dict[str, Any], *attempts: dict[str, Any]) -> Path:
    write_json(tmp_path / "launch.json", {"launches": [launch]})
    (tmp_path / "attempts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in attempts))
    return tmp_path


def test_the_clock_starts_with_the_command_or_with_the_attempt(tmp_path: Path) -> None:
    first = {"event": "start", "time": 7.5}
    assert startup.began(folder(tmp_path, {"began": 5.0}, first)) == (5.0, 7.5)
    ended, again = {"event": "end", "time": 90.0}, {"event": "start", "time": 95.0, "attempt": 1}
    assert startup.began(folder(tmp_path, {"began": 5.0}, first, ended, again)) == (None, 95.0), "a restart"
    assert startup.began(folder(tmp_path, {"began": 5.0, "job_id": "1"}, first)) == (None, 7.5), "it was in a queue"
    assert startup.began(folder(tmp_path, {}, first)) == (None, 7.5), "launched by an older version"
    assert startup.began(folder(tmp_path, {"began": 5.0})) == (None, None)
    assert startup.began(tmp_path / "none") == (None, None)


def test_the_phases_add_up_to_the_time_until_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = start.began()
    assert 0 <= time.time() - process < 3600
    times = StartTimes(folder(tmp_path, {"began": process - 3}, {"event": "start", "time": process - 1}))
    for phase in PHASES[:6]:
        times.done(phase)
    monkeypatch.setattr(startup, "compile_s", lambda: 1e9)  # more than there was: the clocks differ
    time.sleep(0.02)
    found = times.first_step(FinishedStep(1, 8, 0.1, 0.01, 0.1, 2.0, 1.0, True, False, False))
    assert list(found) == ["command", "ranks", "imports", *PHASES, "total"]
    assert found["command"] == 2.0 and found["ranks"] == 1.0
    assert found["first_step"] == 0.0 and found["compile"] > 0 and found["first_batch"] == 0.01
    assert abs(found["total"] - (time.time() - process + 3)) < 1
    assert found["total"] == pytest.approx(sum(value for phase, value in found.items() if phase != "total"))


def test_a_run_records_and_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", "cluster.processes=1", "train.stop_after=2")
    assert train(run, 1) == [0]
    found = summary(run)["start_s"]
    assert list(found) == ["imports", *PHASES, "total"], "nobody launched it"
    assert "INFO first step after " in (run / "logs" / "rank-0.log").read_text()
    write_json(run / "launch.json", {})
    assert profile.main([str(run)]) == 0
    shown = capsys.readouterr().out
    assert "first step" in shown and "profile=torch" in shown and f"{found['total']:.2f}" in shown
    assert profile.main([str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["start_s"] == found


def test_text() -> None:
    times = {"command": 1.4, "imports": 4.06, "model": 0.01, "total": 5.47}
    assert start_text(times) == "first step after 5.5 s: command 1.4, imports 4.1"
    assert start_text(None) == start_text({"total": "x"}) == start_text("?") == "-"


def test_when_a_process_began() -> None:
    code = "import time; time.sleep(0.3); from dtrain.start import began; print(began())"
    before = time.time()
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=True)
    assert abs(float(ran.stdout) - before) < 1
