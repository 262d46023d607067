"""dtrain status, logs and cancel without a cluster: local runs, and a SLURM that answers oddly, late or not at all.

What SLURM ordinarily says comes from a real one, in tests/launchers/test_after.py.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtrain import logs, squeue
from dtrain.jobs import cancel_main, logs_main, query, status_main
from dtrain.records import load
from dtrain.runs import main as runs_main
from tests import rundirs
from tests.rundirs import HERE, list_runs, make

in_tmp_path, dead_pid = rundirs.in_tmp_path, rundirs.dead_pid
LOCAL = {"_target_": "dtrain.launchers.local.Local", "max_restarts": 0}
SLURM = {"_target_": "dtrain.launchers.slurm.Slurm", "nodes": 2, "processes": 2}
Fakes = Callable[..., Path]


@pytest.fixture(autouse=True)
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    """SLURM's commands are shell scripts that a test writes; each call is noted. Without any, there is no SLURM."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(squeue, "_silent", set())

    def write(**scripts: str) -> Path:
        for name, script in scripts.items():
            (folder / name).write_text(
                f'#!/bin/sh\nPATH=/bin:/usr/bin\necho "{name} $*" >> {tmp_path}/calls\n{script}\n'
            )
            (folder / name).chmod(0o755)
        return tmp_path / "calls"

    return write


def job(job_id: str, **more: Any) -> dict[str, Any]:
    return {"command": "dtrain launch cluster=slurm", "launches": [{"cluster": SLURM, "job_id": job_id, **more}]}


def note(run_dir: Path, **lines: float) -> None:
    """attempts.jsonl: note(run, start=step, end=step)."""
    with open(run_dir / "attempts.jsonl", "a") as file:
        for event, step in lines.items():
            more = (
                {"job_id": "7", "restart": 0, "nodes": ["node1", "node2"]} if event == "start" else {"why": "preempted"}
            )
            file.write(json.dumps({"event": event, "time": time.time(), "step": step, "code": 75, **more}) + "\n")


def row(job_id: str, state: str, reason: str = "None", nodes: str = "") -> str:
    return f"echo '{job_id}|{state}|{nodes}|1:02|1-00:00:00|2030-01-02T03:04:05|N/A|{reason}'"


# ---------------------------------------------------------------- query


def test_without_slurm_nothing_is_known() -> None:
    assert query(["7", "8_1"]) == {} and query(["7"]).problem == "" and query([]) == {}


def test_what_squeue_says_is_read_whatever_else_it_prints(fakes: Fakes) -> None:
    odd = row("8_3", "PENDING", "ReqNodeNotAvail, UnavailableNodes:a|b")
    calls = fakes(squeue=f"echo 'CLUSTER: x'; echo; echo 'a|b'; {row('7', 'NEW_STATE', nodes='n[1-2]')}; {odd}")
    jobs = query(["7", "8_3", "7", "nonsense", "-p", None])
    assert jobs["7"].active and not jobs["7"].queued and not jobs["7"].ended  # of an unknown state: not dead
    assert (jobs["7"].nodes, jobs["7"].elapsed, jobs["7"].limit, jobs["7"].started) == ("n[1-2]", 62, 86400, None)
    assert jobs["8_3"].queued and jobs["8_3"].reason == "ReqNodeNotAvail, UnavailableNodes:a|b"
    assert calls.read_text().count("\n") == 1 and " -j 7,8_3 " in calls.read_text()


def test_the_users_settings_for_squeue_do_not_reach_it(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQUEUE_STATES", "RUNNING")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    fakes(squeue='echo "7|$SQUEUE_STATES$SLURM_TIME_FORMAT||||||"')
    assert query(["7"])["7"].state == "standard"


def test_a_squeue_that_fails_because_of_one_unknown_id(fakes: Fakes) -> None:
    """As some versions do; then each job is asked for alone. Its name is any text."""
    name = "x JobState=RUNNING Reason=None "
    shown = f"JobId=7 JobName={name} UserId=u(1) JobState=FAILED Reason=NonZeroExitCode Dependency=(null) ExitCode=3:0"
    more = "RunTime=00:01:02 TimeLimit=UNLIMITED NodeList=node1 BatchHost=node1 SubmitTime=2030-01-02T03:04:05 End=x"
    refuse = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
    fakes(squeue=refuse, scontrol=f'[ "$4" = 7 ] && echo "{shown} {more}" || exit 1')
    jobs = query(["7", "8"])
    assert jobs["8"].state == "GONE" and not jobs.problem
    assert (jobs["7"].state, jobs["7"].reason, jobs["7"].exit) == ("FAILED", "NonZeroExitCode", "3:0")
    assert (jobs["7"].elapsed, jobs["7"].limit, jobs["7"].nodes) == (62, None, "node1")


@pytest.mark.parametrize("sacct", ["exec sleep 30", "echo 'Slurm accounting storage is disabled' >&2; exit 1", "echo 'a|b'"])
def test_accounting_that_is_not_there(fakes: Fakes, monkeypatch: pytest.MonkeyPatch, sacct: str) -> None:
    monkeypatch.setattr(squeue, "ANSWER_S", 0.3)
    calls = fakes(squeue="exit 0", sacct=sacct)
    began = time.monotonic()
    for _ in range(2):
        assert query(["7"])["7"].state == "GONE"
    assert time.monotonic() - began < 2
    assert calls.read_text().count("sacct") == (2 if "a|b" in sacct else 1)  # it is not asked again


def test_what_accounting_remembers(fakes: Fakes) -> None:
    old = "7|CANCELLED by 1000|0:15|None assigned|0|Partition_Limit|2030-01-02T03:04:05|Unknown"
    fakes(squeue="exit 0", sacct=f"echo '{old}'; echo '8_1|TIMEOUT|0:0|n1|3600|60|x|y'; echo '7.batch|FAILED||||||'")
    jobs = query(["7", "8_1"])
    assert set(jobs) == {"7", "8_1"}
    assert (jobs["7"].state, jobs["7"].nodes, jobs["7"].exit) == ("CANCELLED", "", "0:15")
    assert (jobs["8_1"].limit, jobs["8_1"].elapsed, jobs["8_1"].ended) == (3600, 3600, True)


# ---------------------------------------------------------------- the status of a run


@pytest.mark.parametrize("squeue_says", [None, "echo 'cannot contact slurm controller' >&2; exit 1", "exec sleep 30"])
def test_nobody_dies_because_slurm_is_silent(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], squeue_says: str | None
) -> None:
    monkeypatch.setattr(squeue, "ANSWER_S", 0.3)
    if squeue_says:
        fakes(squeue=squeue_says)
    make("outputs/a", launch=job("7"), status="running")
    make("outputs/b", launch=job("8"))
    assert {run["path"]: run["status"] for run in list_runs()} == {"outputs/a": "running", "outputs/b": "queued?"}
    assert runs_main([]) == 0
    said = capsys.readouterr().out
    assert ("SLURM did not answer" in said) == bool(squeue_says)
    with pytest.raises(ValueError, match=r"outputs/a: .*\n  fix: on a machine of the cluster: scancel 7"):
        cancel_main(["outputs/a"])
    assert not Path("outputs/a/cancelled").exists()


@pytest.mark.parametrize(
    ("said", "begun", "state", "expected"),
    [
        (None, False, "PENDING", "queued"),
        (None, False, "CONFIGURING", "queued"),
        (None, False, "RUNNING", "running"),
        ("running", True, "RUNNING", "running"),
        ("running", True, "COMPLETING", "running"),
        ("running", True, "PENDING", "preempted"),  # requeued from outside, or a node was lost
        ("running", True, "NODE_FAIL", "preempted"),
        ("running", True, "PREEMPTED", "preempted"),
        ("running", True, "CANCELLED", "cancelled"),
        ("running", True, "OUT_OF_MEMORY", "died"),
        ("running", True, "", "died"),
        (None, False, "", "died"),
        (None, False, "FAILED", "failed"),  # it never came to write anything
        ("preempted", True, "RUNNING", "running"),  # started again, and nothing said since
        ("failed", True, "RUNNING", "failed"),
        ("done", True, "RUNNING", "done"),
    ],
)
def test_status_of_a_job(fakes: Fakes, said: str | None, begun: bool, state: str, expected: str) -> None:
    fakes(squeue=row("7", state) if state else "exit 0")
    run = make("outputs/a", launch=job("7"), **({"status": said} if said else {}))
    if begun:
        note(run, start=0)
    assert list_runs()[0]["status"] == expected


def test_a_run_that_has_ended_is_not_asked_for(fakes: Fakes) -> None:
    calls = fakes(squeue="exit 0", sacct="exit 0")
    for name, status in (("a", "done"), ("b", "failed"), ("c", "preempted")):
        note(make(f"outputs/{name}", launch=job("7"), status=status), start=0, end=5)
    assert sorted(run["status"] for run in list_runs()) == ["done", "failed", "preempted"]
    assert not calls.exists()


def test_a_resumed_run_is_queued_whatever_its_last_attempt_said(fakes: Fakes) -> None:
    fakes(squeue=row("8", "PENDING", "Priority"))
    launches = [job("7")["launches"][0], job("8")["launches"][0]]
    run = make("outputs/a", launch={"launches": launches}, status="failed")
    (run / "failure.json").write_text("{}")
    note(run, start=0, end=5)
    (run / "cancelled").write_text(json.dumps({"time": 1.0, "launches": 1}))  # of the launch before
    assert list_runs()[0]["status"] == "queued"


def test_another_cluster_s_job_of_the_same_id_is_not_ours(fakes: Fakes) -> None:
    fakes(squeue=row("7", "RUNNING"))
    make("outputs/a", launch=job("7", time="2031-01-01T00:00:00+00:00"), status="running")
    assert list_runs()[0]["status"] == "died"


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
    assert shown[1] == "status preempted (waits in the queue again: BeginTime: SLURM lets a requeued job wait a little)"
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
    assert "resume=" in shown[5]
    assert status_main(["multirun/d/t"]) == 0
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert table[0] == ["#", "overrides", "status", "job"] and [t[-1] for t in table[1:]] == ["7_0", "7_1"]
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
    assert shown.err == "[rank-1.log has nothing in it; this is outputs/a/logs/batch.log]\n"
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
        assert process.wait(5) == -signal.SIGTERM
    finally:
        process.kill()
        process.wait()
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"outputs/a: process {process.pid} was asked to save and end" and "resume=" in said[1]
    (run / "summary.json").write_text('{"status": "preempted"}')
    assert list_runs()[0]["status"] == "cancelled"
    assert cancel_main(["a"]) == 0
    assert capsys.readouterr().out.startswith("outputs/a: cancelled already; nothing to cancel\n")


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
        with pytest.raises(ValueError, match=r"folders of runs\n  fix: "):
            cancel_main([word])
    assert not list(Path().rglob("cancelled"))


def test_a_cancel_that_slurm_refuses_leaves_the_run_as_it_was(fakes: Fakes) -> None:
    fakes(squeue=row("7", "RUNNING"), scancel="echo 'scancel: error: Access/permission denied' >&2; exit 1")
    run = make("outputs/a", launch=job("7"), status="running")
    with pytest.raises(ValueError, match=r"cancel: scancel: error: Access/permission denied\n  fix: "):
        cancel_main(["a"])
    assert not (run / "cancelled").exists() and load([run])[0][0].status == "running"
