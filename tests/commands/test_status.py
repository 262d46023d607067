"""dtrain status, logs and cancel without a cluster: of local runs, and of run folders made by hand."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dtrain.commands import logs
from dtrain.commands.cancel import main as cancel_main
from dtrain.commands.logs import main as logs_main
from dtrain.commands.status import main as status_main
from dtrain.runs import system
from dtrain.runs.record import load
from tests import rundirs
from tests.patience import patience
from tests.rundirs import HERE, LOCAL, Fakes, job, list_runs, make, note, row

in_tmp_path, fakes = rundirs.in_tmp_path, rundirs.fakes


# ---------------------------------------------------------------- status


def test_status_of_a_local_run(capsys: pytest.CaptureFixture[str]) -> None:
    run = make(
        "outputs/d/a", launch={"pid": os.getpid(), "host": HERE, "launches": [{"cluster": LOCAL}]},
        status="running", total_steps=100, tokens_per_step=1000,
    )  # fmt: skip
    (run / "metrics.jsonl").write_text('{"step": 40, "loss": 2.5, "tokens_per_s": 500.0}\n')
    assert status_main(["latest"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "run              outputs/d/a",
        "status           running",
        f"process          {os.getpid()} on {HERE}",
        "progress         step 40/100  loss 2.5000  500 tok/s  ETA 2m 00s",
        "next             dtrain logs -f outputs/d/a",
        "                 dtrain cancel outputs/d/a",
    ]
    assert status_main(["latest", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["status"], data["eta_s"], data["job"], data["attempts"]) == ("running", 120, None, [])


def test_status_says_how_to_get_system_metrics(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = LOCAL | {"system_metrics_every": 5}
    launch = {"pid": os.getpid(), "host": HERE, "launches": [{"cluster": cluster}]}
    run = make("outputs/d/a", launch=launch, status="running")
    hint = "system metrics   none without psutil: pip install 'dtrain[monitor]'"
    for installed, written in ((True, False), (False, False), (False, True)):
        monkeypatch.setattr(system, "is_installed", lambda installed=installed: installed)
        if written:
            (run / "logs").mkdir()
            (run / "logs" / "system-a.jsonl").touch()
        assert status_main(["latest"]) == 0
        assert (hint in capsys.readouterr().out) is not (installed or written)


def test_status_of_a_run_that_stands_still(capsys: pytest.CaptureFixture[str]) -> None:
    run = make(
        "outputs/d/a", launch={"pid": os.getpid(), "host": HERE, "launches": [{"cluster": LOCAL}]},
        status="running", total_steps=100, tokens_per_step=1000,
    )  # fmt: skip
    (run / "metrics.jsonl").write_text('{"step": 40, "loss": 2.5, "tokens_per_s": 500.0}\n')
    (run / "logs").mkdir(exist_ok=True)
    (run / "logs" / "hang.json").write_text('{"text": "1 of 2 ranks wait; rank 1 is in x.py:3, in f"}')
    assert status_main(["latest"]) == 0
    output = capsys.readouterr().out
    assert "stands still     1 of 2 ranks wait; rank 1 is in x.py:3, in f" in output
    assert "ETA" not in output


def test_status_of_a_job_with_a_history(fakes: Fakes, capsys: pytest.CaptureFixture[str]) -> None:
    fakes(squeue=row("7", "PENDING", "BeginTime"))
    run = make("outputs/a", launch=job("7"), status="preempted", steps=20, total_steps=100, train_loss=2.0)
    note(run, start=0, end=10)
    note(run, start=10)
    note(run, start=10, end=20)
    (run / "checkpoints" / "step-00000020").mkdir(parents=True)
    (run / "checkpoints" / "step-00000020" / "manifest.json").write_text("{}")
    (run / "preflight.json").write_text('{"ok": false, "bad": {"node2": ["eth0 is down\\n  fix: ip link"]}}')
    (run / "logs").mkdir()
    for name in ("rank-0.log", "rank-1.log", "batch.log"):
        (run / "logs" / name).write_text("x\n")
    assert status_main(["a"]) == 0
    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert shown[1] == "status preempted (queued again: BeginTime: SLURM delays a requeued job a little)"
    assert shown[2].startswith("job 7 · PENDING · waits")
    assert shown[3].startswith("attempts 1 ") and "from step 0 to step 10, preempted" in shown[3]
    assert shown[4].endswith("node1,node2 from step 10 killed") and "to step 20" in shown[5]
    assert shown[6:] == [
        "progress step 20/100 loss 2.0000",
        "checkpoint outputs/a/checkpoints/step-00000020",
        "preflight bad nodes",
        "node2: eth0 is down",
        "fix: ip link",
        "logs outputs/a/logs/rank-0.log (and 1 more)",
        "outputs/a/logs/batch.log",
        "next dtrain logs -f outputs/a",
        "dtrain cancel outputs/a",
    ]


def test_status_of_a_failed_run_and_of_a_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    run = make("multirun/d/t/0-a=1", launch=job("7_0"), status="failed")
    (run / "failure.json").write_text('{"rank": 3, "type": "ValueError", "message": "loss is NaN"}')
    make("multirun/d/t/1-a=2", launch=job("7_1"), status="done")
    assert status_main(["multirun/d/t/0-a=1"]) == 0
    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert shown[1:5] == ["status failed", "job 7_0", "first error rank 3: ValueError", "loss is NaN"]
    assert "dtrain why" in shown[5] and len(shown) == 6, "no step was made: there is nothing to resume"
    assert status_main(["multirun/d/t"]) == 0
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert table[0] == ["#", "overrides", "status", "job"] and [t[-1] for t in table[1:3]] == ["7_0", "7_1"]
    assert "NaN" in table[3], "why the job failed"
    assert status_main(["multirun/d/t", "--json"]) == 0
    assert [r["job_id"] for r in json.loads(capsys.readouterr().out)] == ["7_0", "7_1"]


# ---------------------------------------------------------------- logs


def test_logs_show_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    run = make("outputs/a", status="done", world_size=2)
    (run / "logs").mkdir()
    lines = [f"line {i} " + "x" * 5000 for i in range(100)]  # more than one block
    (run / "logs" / "rank-0.log").write_text("\n".join(lines))
    (run / "logs" / "batch.log").write_bytes(b"\xff\n")
    for n, expected in (("2", lines[-2:]), ("0", []), ("all", lines), ("1000", lines), (None, lines[-50:])):
        assert logs_main(["a", *(["-n", n] if n else [])]) == 0
        assert capsys.readouterr().out.splitlines() == expected
    assert logs_main(["a", "--batch"]) == 0
    assert capsys.readouterr().out == "\ufffd\n"
    assert logs_main(["a", "--rank", "1"]) == 0  # it is there, and silent
    shown = capsys.readouterr()
    assert shown.err == "[rank-1.log is empty; showing outputs/a/logs/batch.log]\n"
    with pytest.raises(ValueError, match=r"--rank=2: the run has ranks 0 to 1\n  fix: "):
        logs_main(["a", "--rank", "2"])
    with pytest.raises(ValueError, match=r"-n x: .*\n  fix: "):
        logs_main(["a", "-n", "x"])


def test_logs_of_a_job_whose_python_did_not_start(fakes: Fakes, capsys: pytest.CaptureFixture[str]) -> None:
    fakes(squeue="exit 0")
    make("multirun/d/t/1-a=2", launch=job("7_1"))
    folder = Path("multirun/d/t/submitit/123")
    folder.mkdir(parents=True)
    for name in ("7_0_0_log.out", "7_1_0_log.out"):
        (folder / name).write_text(f"{name}: python: command not found\n")
    assert logs_main(["1-a=2"]) == 0
    assert capsys.readouterr().out == "7_1_0_log.out: python: command not found\n"
    (folder / "7_1_0_log.out").unlink()
    assert logs_main(["1-a=2"]) == 0
    assert "nothing was written yet; the run is died" in capsys.readouterr().err


def test_logs_follow_a_local_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(logs, "LOOK_S", 0.02)
    launch = {"pid": os.getpid(), "host": HERE, "launches": [{"cluster": LOCAL}]}
    run = make("outputs/a", launch=launch, status="running")
    (run / "logs").mkdir()

    def train() -> None:
        time.sleep(0.2)
        with open(run / "logs" / "rank-0.log", "w") as file:
            for text in ("one\n", "tw", "o\n", "three"):
                file.write(text)
                file.flush()
                time.sleep(0.1)
        (run / "summary.json").write_text('{"status": "done"}')

    thread = threading.Thread(target=train)
    thread.start()
    assert logs_main(["a", "-f", "--rank", "0"]) == 0
    thread.join()
    shown = capsys.readouterr()
    assert shown.out == "one\ntwo\nthree\n"
    assert shown.err.splitlines() == [
        "[waiting: running, and nothing was written yet]",
        "[the run is done; dtrain status outputs/a]",
    ]


def test_ctrl_c_ends_logs_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    make("outputs/a", launch={"pid": os.getpid(), "host": HERE, "launches": [{"cluster": LOCAL}]}, status="running")

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(logs.time, "sleep", interrupt)
    assert logs_main(["a", "-f"]) == 0


# ---------------------------------------------------------------- cancel


def test_cancel_a_local_run(capsys: pytest.CaptureFixture[str]) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "dtrain", "launch"])
    while b"dtrain" not in Path(f"/proc/{process.pid}/cmdline").read_bytes():
        time.sleep(0.01)  # it has just been started
    try:
        run = make(
            "outputs/a", launch={"pid": process.pid, "host": HERE, "launches": [{"cluster": LOCAL}]}, status="running"
        )
        assert cancel_main(["a", "--save"]) == 0
        assert process.wait(patience(5)) == -signal.SIGTERM
    finally:
        process.kill()
        process.wait()
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"outputs/a: process {process.pid} was asked to save and end" and "resume=" in said[1]
    (run / "summary.json").write_text('{"status": "preempted"}')
    assert list_runs()[0]["status"] == "cancelled"
    assert cancel_main(["a"]) == 0
    assert capsys.readouterr().out.startswith("outputs/a: cancelled already; nothing to cancel\n")


def test_cancel_a_run_of_a_script_that_called_fit() -> None:
    holds = "import fcntl, sys, time; f = open(sys.argv[1], 'a'); fcntl.flock(f, 2); print(flush=True); time.sleep(60)"
    Path("lock").touch()
    process = subprocess.Popen([sys.executable, "-c", holds, "lock"], stdout=subprocess.PIPE)
    try:
        assert process.stdout and process.stdout.readline()
        launch = {"pid": process.pid, "host": HERE, "launches": [{"cluster": LOCAL}]}
        os.link("lock", make("outputs/a", launch=launch, status="running") / ".lock")
        assert cancel_main(["a"]) == 0 and process.wait(patience(5)) == -signal.SIGTERM
    finally:
        process.kill()
        process.wait()


def test_cancel_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    stranger = subprocess.Popen(["/bin/sleep", "60"])
    try:
        launch = {"pid": stranger.pid, "host": HERE, "launches": [{"cluster": LOCAL}]}
        make("outputs/a", launch=launch, status="running")
        with pytest.raises(ValueError, match=r"is not a dtrain launcher any more\n  fix: "):
            cancel_main(["a"])
        make("outputs/b", launch={**launch, "host": "elsewhere"}, status="running")
        with pytest.raises(ValueError, match=r"it runs on elsewhere\n  fix: "):
            cancel_main(["b"])
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()
    make("multirun/d/t1/0-a=1", status="running")
    make("multirun/d/t2/0-a=1", status="running")
    for word in ("multirun/d", "multirun", "."):
        with pytest.raises(ValueError, match=r"run folders\n  fix: "):
            cancel_main([word])
    assert not list(Path().rglob("cancelled"))


def test_a_cancel_that_slurm_refuses_leaves_the_run_as_it_was(fakes: Fakes) -> None:
    fakes(squeue=row("7", "RUNNING"), scancel="echo 'scancel: error: Access/permission denied' >&2; exit 1")
    run = make("outputs/a", launch=job("7"), status="running")
    with pytest.raises(ValueError, match=r"cancel: scancel: error: Access/permission denied\n  fix: "):
        cancel_main(["a"])
    assert not (run / "cancelled").exists() and load([run])[0][0].status == "running"
