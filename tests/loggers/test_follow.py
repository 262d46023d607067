"""The follower as a process: it is killed, files are replaced, servers are dead or silent, and nothing is lost."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dtrain import start
from dtrain.launch.follower import Follower
from dtrain.loggers import follow
from dtrain.loggers.follow import Feed, Source, locked
from dtrain.loggers.tracker import REST, BySteps, Row
from tests.loggers import read_back
from tests.patience import patience, until

TARGETS = {
    "csv": "dtrain.loggers.csv.Csv", "tensorboard": "dtrain.loggers.tensorboard.TensorBoard",
    "wandb": "dtrain.loggers.wandb.Wandb", "trackio": "dtrain.loggers.trackio.Trackio",
    "mlflow": "dtrain.loggers.mlflow.Mlflow",
}  # fmt: skip


def make_run(folder: Path, **loggers: dict[str, Any]) -> Path:
    """The files of a run that the follower reads."""
    (folder / "logs").mkdir(parents=True)
    sections = {name: {"_target_": TARGETS[name], **settings} for name, settings in loggers.items()}
    config = {"name": "run", "train": {"steps": 9}, "logger": sections, "choices": {"model": "gpt2-tiny"}}
    (folder / "config.yaml").write_text(json.dumps(config))
    launch = {"id": "0123456789abcdef", "command": "dtrain launch", "launches": [{"time": "2026-11-14T10:00:00"}]}
    (folder / "launch.json").write_text(json.dumps(launch))
    (folder / "summary.json").write_text(json.dumps({"status": "running"}))
    (folder / "metrics.jsonl").touch()
    return folder


def train(run: Path, first: int, last: int, note: float = 0.0) -> None:
    """Write what rank 0 writes when it resumes after step `first`: later lines go, and new ones are appended."""
    path = run / "metrics.jsonl"
    kept = [line for line in path.read_text().splitlines() if json.loads(line)["step"] <= first]
    temporary = path.with_name(".metrics.jsonl.tmp")
    temporary.write_text("".join(line + "\n" for line in kept))
    os.replace(temporary, path)
    with open(path, "a", buffering=1) as file:
        for step in range(first + 1, last + 1):
            line: dict[str, Any] = {"step": step, "loss": 1 / step, "mfu": None, "step_s": note + step / 7}
            file.write(json.dumps(line | {"time": 1.7e9 + step}) + "\n")
            if step % 5 == 0:
                file.write(json.dumps({"step": step, "val_loss": 2 / step, "time": 1.7e9 + step}) + "\n")


def end(run: Path, status: str = "done") -> None:
    (run / "summary.json").write_text(json.dumps({"status": status, "steps": 9, "train_loss": 0.5}))


@contextmanager
def followed(run: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [*start.command("dtrain.loggers.follow"), str(run)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=os.environ | start.environment())
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def steps(points: read_back.Points) -> dict[str, list[int]]:
    return {name: [step for step, _ in found] for name, found in points.items()}


@pytest.mark.parametrize("more", [(), ("trackio", "wandb")], ids=["files", "all"])
def test_a_killed_follower_loses_and_repeats_nothing(
    more: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when metrics.jsonl was cut back in between, as by a resumed run."""
    for library in ("tensorboard", *more):
        pytest.importorskip(library)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    settings: dict[str, dict[str, Any]] = {"trackio": {}, "wandb": {"mode": "offline"}}
    run = make_run(tmp_path / "run", csv={}, tensorboard={}, **{name: settings[name] for name in more})
    train(run, 0, 12)

    def has(newest: int) -> bool:
        time.sleep(0.5)  # the follower has a lower priority than this test
        if more:
            found = read_back.of_trackio(run, tmp_path / "trackio")
        else:  # a file gets a step when the next one has begun
            found, newest = read_back.of_csv(run) if (run / "metrics.csv").exists() else {}, newest - 1
        return steps(found).get("loss") == list(range(1, newest + 1))

    with followed(run) as process:
        until(lambda: has(12), "the steps in a tracker")
        process.send_signal(signal.SIGKILL)  # W&B has some of them
    train(run, 10, 21, note=1000.0)  # the times of the repeated steps differ
    with followed(run) as process:
        until(lambda: has(21), "the steps in a tracker")
        process.send_signal(signal.SIGTERM)  # a scheduler sends it to all processes of a job
        train(run, 15, 30, note=2000.0)  # while it follows
        end(run)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(patience(120)) == 0
    truth = read_back.truth(run)
    assert read_back.of_csv(run) == truth, "files are written again, and equal to metrics.jsonl"
    events = read_back.of_tensorboard(run)
    assert steps(events) == steps(truth)
    for name, points in truth.items():
        assert [value for _, value in events[name]] == pytest.approx([value for _, value in points], rel=1e-6)
    if more:
        trackio = read_back.of_trackio(run, tmp_path / "trackio")
        for points in (trackio, read_back.of_wandb(run)):
            assert steps(points) == steps(truth)
            assert points["loss"] == truth["loss"] and points["val_loss"] == truth["val_loss"]
        assert trackio["step_s"][11] == (12, 12 / 7), "the first value that arrived"
    assert json.loads((run / follow.STATE).read_text())["csv"] == {"complete": True, "problem": ""}


def test_many_rows_reach_wandb_in_order(tmp_path: Path) -> None:
    """They go another way, which is faster."""
    pytest.importorskip("wandb")
    run = make_run(tmp_path / "run")
    train(run, 0, 450)
    end(run)
    Feed("wandb", {"_target_": TARGETS["wandb"], "mode": "offline"}, run).send()
    assert read_back.of_wandb(run) == read_back.truth(run)
    assert read_back.wandb_summary(run)["loss"] == 1 / 450 and read_back.wandb_summary(run)["train_loss"] == 0.5
    Feed("wandb", {"_target_": TARGETS["wandb"], "mode": "offline"}, run).send()
    assert read_back.of_wandb(run) == read_back.truth(run), "again: nothing is new"


@pytest.fixture
def silent() -> Iterator[str]:
    """A server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("kind", ["dead", "silent"])
def test_a_server_that_does_not_answer_is_given_up_and_named(
    kind: str, silent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trackio")
    monkeypatch.setattr("dtrain.launch.follower.QUIET_S", 0.0)
    monkeypatch.setenv("TRACKIO_WRITE_TOKEN", "x")
    url = silent if kind == "silent" else "http://127.0.0.1:9"
    run = make_run(tmp_path / "run", csv={}, trackio={"server_url": url})
    code = "import os, pathlib, sys\nfrom dtrain.loggers import follow\nfollow.LAST_S = 1.0\n"
    code += "os._exit(follow.main(pathlib.Path(sys.argv[1])))"
    monkeypatch.setattr("dtrain.launch.follower.start.command", lambda module: [sys.executable, "-c", code])
    follower, said = Follower(run, json.loads((run / "config.yaml").read_text())["logger"]), list[str]()
    follower.start()
    train(run, 0, 7)
    end(run)
    follower.finish(said.append, lambda: False)
    assert read_back.of_csv(run)["loss"] == read_back.truth(run)["loss"], "the other tracker has everything"
    assert said[0] == "sending the rest of the metrics to csv, trackio"
    assert said[1].startswith("trackio did not get all metrics (")
    assert said[1].endswith(f"dtrain log {run} logger=trackio logger.trackio.server_url={url}") and len(said) == 2


def test_a_follower_that_crashes_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, said = make_run(tmp_path / "run", csv={}), list[str]()
    monkeypatch.setattr("dtrain.launch.follower.start.command", lambda module: [sys.executable, "-c", "1 / 0"])
    follower = Follower(run, {"csv": {}})
    follower.start()
    follower.finish(said.append, lambda: False)
    assert said == [
        f"csv did not get all metrics (see logs/trackers.log); this sends the rest: dtrain log {run} logger=csv"
    ]
    assert "ZeroDivisionError" in (run / follow.LOG).read_text()


def test_a_second_ctrl_c_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, said = make_run(tmp_path / "run", csv={}), list[str]()
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    monkeypatch.setattr("dtrain.launch.follower.start.command", lambda module: sleep)
    follower = Follower(run, {"csv": {}})
    follower.start()
    began = time.monotonic()
    follower.finish(said.append, lambda: True)
    assert time.monotonic() - began < 60 and len(said) == 1


def test_no_logger_starts_no_process(tmp_path: Path) -> None:
    follower = Follower(tmp_path, {})
    follower.start()
    follower.finish(pytest.fail, lambda: False)
    assert follower.process is None and not list(tmp_path.iterdir())


def test_one_process_at_a_time_sends_a_run(tmp_path: Path) -> None:
    refused = pytest.raises(ValueError, match=r"another process is sending this run to csv\n  fix: ")
    with locked(tmp_path, "csv"), refused, locked(tmp_path, "csv"):
        pass
    with locked(tmp_path, "csv"), locked(tmp_path, "mlflow"):
        pass


# ---- what is read --------------------------------------------------------------------------------------------


def test_rows_are_what_the_tracker_does_not_have(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    train(run, 0, 11)
    source = Source(run, {"loss": 9, "step_s": 10, REST: 4}, system=False)
    (rows,) = source.rows()
    assert [(row.step, sorted(row.values)) for row in rows] == [
        (5, ["val_loss"]), (10, ["loss"]), (10, ["val_loss"]), (11, ["loss", "step_s"])
    ]  # fmt: skip
    assert list(source.rows()) == []
    train(run, 8, 12)  # repeated lines are known, and a new one is not
    assert [(row.step, row.time) for rows in source.rows() for row in rows] == [(12, 1.7e9 + 12)]


@pytest.mark.parametrize("name", ["csv", "wandb"])
def test_every_nth_step(name: str, tmp_path: Path) -> None:
    """Evaluations and the last step always arrive, and a resumed run continues."""
    if name != "csv":
        pytest.importorskip(name)
    run, section = make_run(tmp_path / "run"), {"_target_": TARGETS[name], "every": 4}
    section |= {"mode": "offline"} if name == "wandb" else {}
    train(run, 0, 10)
    end(run)
    read = read_back.of_csv if name == "csv" else read_back.of_wandb
    Feed(name, section, run).send()
    assert steps(read(run)) == {"loss": [4, 8, 10], "step_s": [4, 8, 10], "val_loss": [5, 10]}
    train(run, 10, 17)
    Feed(name, section, run).send()
    last = [4, 8, 12, 16, 17] if name == "csv" else [4, 8, 10, 12, 16, 17]  # a file is written again
    assert steps(read(run)) == {"loss": last, "step_s": last, "val_loss": [5, 10, 15]}
    assert set(read(run)["loss"]) <= set(read_back.truth(run)["loss"])


def test_damaged_lines_are_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    damaged = [
        '{"step": 1, "loss": 1}',
        '{"st',
        "[1]",
        '{"loss": 3}',
        '{"step": "2", "loss": 3}',
        '{"step": -1}',
        "\x00",
    ]
    odd = '{"step": 3, "loss": "text", "b": true, "c": null, "d": [1], "e": NaN, "f": 1e999, "g": 2}'
    (run / "metrics.jsonl").write_text("\n".join([*damaged, odd]) + "\n" + '{"step": 4, "loss": 1')
    (rows,) = Source(run, {}, system=True).rows()
    assert [(row.step, row.values) for row in rows] == [(1, {"loss": 1}), (3, {"g": 2})]


def test_a_run_without_times_gets_those_of_its_steps(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    lines = [{"step": 1, "step_s": 2.0}, {"step": 3, "step_s": 2.0}, {"step": 3, "val_loss": 1.0}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (rows,) = Source(run, {}, system=False).rows()
    assert [row.time - rows[0].time for row in rows] == [0, 4, 4]


def test_system_metrics_belong_to_the_step_of_their_time(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    train(run, 0, 4)
    gpus = [{"index": 1, "power_w": 300.0, "throttle": ["power cap"]}]
    samples = [
        {"time": 1.7e9 - 5, "cpu_percent": 7},
        {"time": 1.7e9 + 2.5, "cpu_percent": 9.5, "gpus": gpus},
        {"time": "x"},
    ]
    (run / "logs" / "system-node-1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in samples))
    (rows,) = Source(run, {}, system=True).rows()
    assert [row.step for row in rows] == [0, 1, 2, 2, 3, 4]
    gpu = {"system/node-1/gpu1/power_w": 300.0, "system/node-1/gpu1/throttled": 1.0}
    assert rows[0].values == {"system/node-1/cpu_percent": 7}
    assert rows[3].values == {"system/node-1/cpu_percent": 9.5, **gpu}


def test_a_step_is_one_row() -> None:
    steps, row = BySteps(), lambda step, **values: Row(step, 0.0, values)
    assert list(steps.add([row(1, a=1.0), row(1, b=2.0)])) == []
    assert list(steps.add([row(2, a=3.0), row(1, c=4.0)])) == [row(1, a=1.0, b=2.0)]
    assert steps.rest() == [row(2, a=3.0, c=4.0)] and steps.rest() == []


def test_a_tracker_is_opened_again_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    class Odd:
        mirrors = takes_system = is_remote = False
        opened, got = 0, list[int]()

        def open(self, run: object) -> dict[str, int]:
            self.opened += 1
            return {REST: max(self.got, default=0)}

        def log(self, rows: list[Row]) -> None:
            self.got += [row.step for row in rows[:2]]  # it stores some of them, and then the connection is lost
            if self.opened < 3:
                raise SystemExit("lost")
            self.got += [row.step for row in rows[2:]]

        def finish(self, run: object) -> None:
            pass

    monkeypatch.setattr(follow, "RETRY_S", (0.0, 0.0))
    run, ended = make_run(tmp_path / "run", csv={}), threading.Event()
    train(run, 0, 7)
    feed = Feed("csv", {"_target_": TARGETS["csv"]}, run)
    feed.tracker = odd = Odd()
    ended.set()
    feed.follow(ended)
    assert odd.opened == 3 and sorted(set(odd.got)) == list(range(1, 8)) and feed.done and feed.problem == ""


def test_system_metrics_come_in_the_order_of_the_steps(tmp_path: Path) -> None:
    """Also when all of it is sent at once: W&B takes one row a step, in order."""
    pytest.importorskip("wandb"), pytest.importorskip("tensorboard")
    run = make_run(tmp_path / "run", wandb={"mode": "offline"}, tensorboard={})
    train(run, 0, 20)
    gpu = {"index": 3, "power_w": 700.0, "throttle": ["power cap"], "xid": [31, 79]}
    samples = [{"time": 1.7e9 + step + 0.5, "cpu_percent": float(step), "gpus": [gpu]} for step in range(1, 21)]
    (run / "logs" / "system-a.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    end(run, "failed")
    for name in ("wandb", "tensorboard"):
        section = json.loads((run / "config.yaml").read_text())["logger"][name]
        Feed(name, section, run).send()
    for points in (read_back.of_wandb(run), read_back.of_tensorboard(run)):
        assert points["system/a/cpu_percent"] == [(step, float(step)) for step in range(1, 21)]
        assert points["system/a/gpu3/throttled"][0] == (1, 1.0) and points["system/a/gpu3/xid"][0] == (1, 79)
        assert [step for step, _ in points["loss"]] == list(range(1, 21)), "the last step of a failed run, too"


def test_links_in_a_run_folder_are_not_followed(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run, outside = make_run(tmp_path / "run", csv={}, tensorboard={}), tmp_path / "outside"
    outside.mkdir()
    (outside / "events.out.tfevents.1.x.1.dtrain").write_text("mine")
    (outside / "table").write_text("mine")
    (run / "tensorboard").symlink_to(outside)
    (run / ".metrics.csv.tmp").symlink_to(outside / "table")
    (run / "metrics.csv").symlink_to(outside / "table")
    train(run, 0, 3)
    with pytest.raises(ValueError, match="is a link"):
        Feed("tensorboard", {"_target_": TARGETS["tensorboard"]}, run).send()
    Feed("csv", {"_target_": TARGETS["csv"]}, run).send()
    assert {path.read_text() for path in outside.iterdir()} == {"mine"}
    assert read_back.of_csv(run) == read_back.truth(run)


def test_a_follower_that_cannot_start_fails_no_run(tmp_path: Path) -> None:
    run, said = make_run(tmp_path / "run", csv={}), list[str]()
    (run / "logs").rmdir()
    (run / "logs").touch()  # mkdir fails
    follower = Follower(run, {"csv": {}})
    follower.start()
    follower.finish(said.append, lambda: False)
    assert said == [f"csv got no metrics: its process did not start; this sends them: {follower.command('csv')}"]
