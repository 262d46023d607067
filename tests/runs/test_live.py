"""A run that is followed through its files: what is new arrives once, and damage does no harm."""

from __future__ import annotations

import itertools
import json
import os
import time
from pathlib import Path

import pytest

from dtrain.runs import live
from dtrain.runs.folder import Tail
from dtrain.runs.live import BoundedCurve, Glance, LiveRun, sampled
from dtrain.runs.metrics import SYSTEM_FILE
from tests.rundirs import HERE, LOCAL, fakes, in_tmp_path, make  # noqa: F401
from tests.screens import RUNNING, append, metric, write


def running(name: str = "run") -> Path:
    """A run of this very process."""
    launch = {"host": HERE, "pid": os.getpid(), "launches": [{"cluster": LOCAL}]}
    run_dir = make(name, launch=launch, **RUNNING)
    (run_dir / "logs").mkdir()
    return run_dir


@pytest.fixture(autouse=True)
def looks_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FILES_S", "LISTED_S", "RARELY_S"):
        monkeypatch.setattr(live, name, 0.0)


def test_a_long_curve_keeps_its_spikes() -> None:
    points = BoundedCurve()
    for step in range(100_000):
        points.add(step, 99.0 if step == 31_234 else -99.0 if step == 31_235 else step % 7)
    assert len(points.x) < 2 * live.POINTS
    assert (points.x[0], max(points.y), min(points.y)) == (0, 99.0, -99.0)
    gaps = [b - a for a, b in itertools.pairwise(points.x)]
    assert min(gaps) > 0 and max(gaps) < 1000, "as dense at its start as at its end"
    assert points.x[-1] > 99_000


def test_what_is_new_is_read_once() -> None:
    run_dir = running()
    run = LiveRun(run_dir)
    run.poll()
    assert (run.status, run.step, run.eta_s) == ("running", None, None)
    append(run_dir, *(metric(step) for step in range(1, 11)))
    append(run_dir, json.dumps({"step": 10, "val_loss": 3.5}) + "\n", '{"step": 11, "loss"')
    assert run.poll()
    assert (run.step, run.evaluation["val_loss"], len(run.recent)) == (10, 3.5, 10)
    assert run.eta_s == pytest.approx(0.5 * 990)
    assert not run.poll(), "nothing is new"
    append(run_dir, ": 4.0}\n")
    assert run.poll() and run.step == 11
    assert run.curves["loss"].x == list(range(1, 12))


def test_a_resume_drops_the_steps_after_its_checkpoint() -> None:
    run_dir = running()
    append(run_dir, *(metric(step) for step in range(1, 51)))
    run = LiveRun(run_dir)
    run.poll()
    kept = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)[:20]
    (run_dir / "new").write_text("".join(kept) + metric(21, loss=1.25))
    os.replace(run_dir / "new", run_dir / "metrics.jsonl")
    assert run.poll()
    assert run.curves["loss"].x == list(range(1, 22)) and run.row["loss"] == 1.25


def test_of_a_very_long_file_evaluations_and_the_end_are_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "PARSED", 50_000)
    monkeypatch.setattr(live, "END", 20_000)
    run_dir = running()
    lines = [
        metric(step) + (json.dumps({"step": step, "val_loss": 2.0}) + "\n") * (step % 100 == 0) for step in range(5000)
    ]
    append(run_dir, *lines)
    run = LiveRun(run_dir)
    run.poll()
    assert run.curves["val_loss"].x == list(range(0, 5000, 100))
    assert [row["step"] for row in run.recent][-50:] == list(range(4950, 5000))
    assert len(run.curves["loss"].x) < 1000 and run.curves["loss"].x[0] == 0
    append(run_dir, metric(5000))
    assert run.poll() and run.step == 5000


def test_ranks_nodes_checkpoints_and_logs() -> None:
    run_dir = running()
    append(
        run_dir, metric(1), json.dumps({"step": 1, "rank_own_s": [1, 2], "rank_wait_s": [1, 0], "rank_data_s": [0, 0]})
    )
    append(run_dir, "\n", json.dumps({"step": 1, "slow_rank": 1, "slow_text": "rank 1 is slow"}) + "\n")
    for node in ("node1", "node2"):
        (run_dir / SYSTEM_FILE.format(node)).write_text(
            '{"time": 1, "cpu_percent": 5}\n{"time": 2, "cpu_percent": 7}\n'
        )
    (run_dir / "logs" / "rank-0.log").write_text("".join(f"line {i}\n" for i in range(50_000)))
    checkpoint = run_dir / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    run = LiveRun(run_dir)
    run.poll()
    assert run.ranks == {"own_s": [1, 2], "wait_s": [1, 0], "data_s": [0, 0]} and run.slow == "rank 1 is slow"
    assert {node: samples[-1]["cpu_percent"] for node, samples in run.nodes.items()} == {"node1": 7, "node2": 7}
    assert run.checkpoint and run.checkpoint[0] == 1 and abs(run.checkpoint[1] - time.time()) < 60
    assert run.log[-1] == ("rank-0.log", "line 49999") and len(run.log) == live.LOG_LINES
    write(run_dir, "logs/hang.json", {"text": "rank 1 stands still"})
    assert run.poll() and run.standstill == "rank 1 stands still" and run.eta_s is None


@pytest.mark.parametrize(
    "damage",
    [b"\x00\xff\n[1]\nnull\n{}\n", b'{"step": "a", "loss": 1}\n{"step": -1, "loss": {}}\n{"step": true}\n',
     b'{"step": 1e400, "loss": NaN}\n{"step": 3, "loss": [], "rank_own_s": ["x", null, 1]}\n', b"[" * 200_000 + b"\n"],
)  # fmt: skip
def test_damaged_files_do_no_harm(damage: bytes) -> None:
    run_dir = make("run", launch={"launches": 3, "name": 5})
    (run_dir / "logs").mkdir()
    for name in ("metrics.jsonl", "summary.json", "plan.json", "attempts.jsonl", "failure.json", "logs/rank-0.log",
                 "logs/system-a.jsonl", "logs/hang.json", "logs/position-0.json"):  # fmt: skip
        (run_dir / name).write_bytes(damage)
    run, glance = LiveRun(run_dir), Glance(run_dir)
    for _ in range(2):
        run.poll()
        glance.poll()
    assert run.status and glance.status == run.status


def test_a_glance_sees_the_newest_values_and_the_whole_curve() -> None:
    run_dir = running()
    append(run_dir, *(metric(step) for step in range(1, 3001)))
    append(run_dir, json.dumps({"step": 3000, "val_loss": 3.5}) + "\n", metric(3001))
    glance = Glance(run_dir)
    assert glance.poll()
    assert (glance.status, glance.row["step"], glance.row["val_loss"]) == ("running", 3001, 3.5)
    assert glance.losses[0] == pytest.approx(5, abs=0.01) and glance.losses[-1] == pytest.approx(2, abs=0.1)
    assert 50 < len(glance.losses) <= 64
    assert sampled(run_dir / "none", "loss") == []


def test_a_tail_can_begin_near_the_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("".join(f"{i:05}\n" for i in range(1000)))
    tail = Tail(path)
    tail.skip(61)
    assert tail.read() == ([b"%05d" % i for i in range(990, 1000)], False)
    path.write_bytes(b"x" * 5000)
    tail.skip(100)
    assert tail.read(final=True) == ([], False), "one line without an end is not read in pieces"
    tail = Tail(tmp_path / "none")
    tail.skip(10)
    assert tail.read() == ([], False)
