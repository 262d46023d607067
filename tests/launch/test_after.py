"""After submission, on a real SLURM: dtrain runs, status, logs and cancel, with and without accounting."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dtrain.commands import logs
from dtrain.commands.cancel import main as cancel_main
from dtrain.commands.logs import main as logs_main
from dtrain.commands.runs import main as runs_main
from dtrain.commands.status import describe
from dtrain.runs import slurm_queue
from dtrain.runs.record import Record, load
from dtrain.runs.slurm_queue import query
from tests import rundirs, slurm
from tests.launch.test_slurm_odd import in_front
from tests.patience import patience
from tests.patience import until as wait_until
from tests.rundirs import list_runs, make
from tests.slurm import Cluster
from tests.slurm_runs import said
from tests.world import ROOT, SMALL, metrics

cluster, accounting_cluster, in_tmp_path = slurm.cluster, slurm.accounting_cluster, rundirs.in_tmp_path
SETTINGS = {"_target_": "dtrain.launch.slurm.Slurm", "nodes": 2, "processes": 1, "requeue": True}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_queue, "_silent", set())
    monkeypatch.setattr(logs, "ASK_S", 1.0)
    monkeypatch.setattr(logs, "LOOK_S", 0.1)


@pytest.fixture
def free(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """The cluster without the jobs of the test before, and its address in the environment."""
    monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
    cluster.run("scancel", "--full", "--signal=KILL", "--user=root")
    cluster.run("scancel", "--user=root")
    wait_until(lambda: not cluster.run("squeue", "-h").stdout, "an empty queue", 60, cluster.state)
    return cluster


def submitted(path: str, job_id: str, **summary: Any) -> Path:
    """A run folder as the launcher leaves it after sbatch."""
    launch = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "cluster": SETTINGS, "job_id": job_id}
    return make(path, launch={"command": "dtrain launch -m a=1,2", "launches": [launch]}, **summary)


def record(run: Path) -> Record:
    return load([run])[0][0]


def until(run: Path, status: str, timeout: float = 20) -> Record:
    wait_until(lambda: record(run).status == status, f"{run} is {status}", timeout, lambda: str(record(run)))
    return record(run)


def test_statuses_of_many_jobs_from_one_question(
    free: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    big = free.sbatch("--nodes=2", "--time=30", "--job-name=a|b c", script="sleep 60")
    array = free.sbatch("--array=0-3%1", script="sleep 60")
    wide = free.sbatch("--nodes=3", "--exclusive", script="sleep 1")
    held = free.sbatch("--hold", script="sleep 1")
    bad = free.sbatch(script="exit 3")
    outside = free.sbatch(script="sleep 60")
    free.run("scancel", outside)
    submitted("outputs/big", big)
    for i in range(4):
        submitted(f"outputs/array{i}", f"{array}_{i}")
    for name, job_id in {"wide": wide, "held": held, "bad": bad, "outside": outside, "gone": "9999"}.items():
        submitted(f"outputs/{name}", job_id)
    submitted("outputs/done", "9998", status="done")
    for job_id, state in ((big, "RUNNING"), (bad, "FAILED"), (outside, "CANCELLED")):
        free.wait(job_id, state)
    asked, original = [], slurm_queue.call

    def counted(command: list[str], seconds: float | None = None) -> str:
        asked.append(command[0])
        return original(command, seconds)

    monkeypatch.setattr(slurm_queue, "call", counted)
    found = {run["path"].split("/")[1]: run["status"] for run in list_runs()}
    assert found == {
        "big": "running", "array0": "running", "array1": "queued", "array2": "queued", "array3": "queued",
        "wide": "queued", "held": "queued", "bad": "failed", "outside": "cancelled", "gone": "died", "done": "done",
    }  # fmt: skip
    assert asked == ["squeue", "sacct"]  # the second in vain, for `gone`, and never again
    jobs = query([big, f"{array}_3", held, bad])
    assert asked == ["squeue", "sacct", "squeue"]
    assert (jobs[big].nodes, jobs[big].limit) == ("node[1-2]", 1800)
    assert abs((jobs[big].submitted or 0) - time.time()) < 30
    assert (jobs[f"{array}_3"].reason, jobs[held].reason) == ("JobArrayTaskLimit", "JobHeldUser")
    assert describe(record(Path("outputs/bad")))["job"]["exit"] == "3:0"
    assert describe(record(Path("outputs/held")))["reason"].startswith("JobHeldUser: it is held")
    assert runs_main(["outputs", "--sort", "started"]) == 0
    assert f"{array}_2" in capsys.readouterr().out


def test_cancel(free: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    array = free.sbatch("--array=0-2%1", script="sleep 60")
    runs = [submitted(f"multirun/d/t/{i}-a={i}", f"{array}_{i}") for i in range(3)]
    other = free.sbatch(script="sleep 60")
    until(runs[0], "running")
    assert cancel_main(["1-a=1"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"multirun/d/t/1-a=1: job {array}_1 (queued) cancelled\nresume with: ")
    assert until(runs[1], "cancelled") and record(runs[2]).status == "queued" and record(runs[0]).status == "running"
    assert cancel_main(["multirun/d/t"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"multirun/d/t/0-a=0: job {array}_0 (running) cancelled",
        "multirun/d/t/1-a=1: cancelled already; nothing to cancel",
        f"multirun/d/t/2-a=2: job {array}_2 (queued) cancelled",
        "resume the unfinished runs: dtrain launch -m a=1,2",
    ]
    for run in runs:
        until(run, "cancelled")
    assert free.job(other)["JobState"] in ("RUNNING", "PENDING")
    assert cancel_main(["0-a=0"]) == 0
    assert "nothing to cancel" in capsys.readouterr().out


def test_cancel_with_a_save_asks_the_supervisor(free: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch script gets USR1, its steps do not; a task of an array that waits is just cancelled, also by a machine
    so slow that the first task ends, and makes room, before the next command."""
    in_front(tmp_path, monkeypatch, "scancel", '$REAL "$@"; code=$?; [[ "$*" = *USR1* ]] && sleep 4; exit $code')
    trap = f"trap 'echo saved >> {tmp_path}/heard; exit 0' USR1; echo up >> {tmp_path}/heard; srun sleep 60 & wait"
    array = free.sbatch("--array=0-1%1", script=trap)
    runs = [submitted(f"multirun/d/t/{i}", f"{array}_{i}") for i in range(2)]
    wait_until((tmp_path / "heard").exists, "the job's start", 60, free.state)
    assert cancel_main(["multirun/d/t", "--save"]) == 0
    assert json.loads((runs[0] / "cancelled").read_text())["job_id"] == f"{array}_0"
    for run in runs:
        until(run, "cancelled")
    assert (tmp_path / "heard").read_text() == "up\nsaved\n"


def test_logs_follow_a_job_from_the_queue_through_a_requeue(
    free: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "outputs" / "a"
    script = f"""
cd {run}; echo "start $SLURM_RESTART_COUNT" >> logs/batch.log
printf '{{"event": "start", "job_id": "%s", "time": 1}}\\n' $SLURM_JOB_ID >> attempts.jsonl
if [ -z "$SLURM_RESTART_COUNT" ]; then echo '{{"status": "running"}}' > summary.json; sleep 60; exit; fi
echo trained >> logs/rank-0.log; echo '{{"status": "done"}}' > summary.json
sleep 0.5; echo bye >> logs/batch.log; echo '{{"event": "end", "time": 2}}' >> attempts.jsonl"""
    blocker = free.sbatch("--nodes=3", "--exclusive", script="sleep 60")
    free.wait(blocker, "RUNNING")
    job_id = free.sbatch("--requeue", "--exclusive", script=script)
    submitted("outputs/a", job_id)
    (run / "logs").mkdir()

    def disturb() -> None:
        time.sleep(1)
        free.run("scancel", blocker)
        free.wait(job_id, "RUNNING")
        while not (run / "summary.json").exists():
            time.sleep(0.1)
        free.run("scontrol", "requeue", job_id)

    thread = threading.Thread(target=disturb)
    thread.start()
    assert logs_main(["a", "-f"]) == 0
    thread.join()
    shown = capsys.readouterr()
    assert shown.out.startswith("==> batch.log <==\nstart \n") and "==> rank-0.log <==\ntrained\n" in shown.out
    assert [line for line in shown.out.splitlines() if line[0] in "sb"] == ["start ", "start 1", "bye"]
    notes = shown.err.splitlines()
    assert notes[0] in ("[waiting: queued (Resources)]", "[waiting: queued]", "[waiting: queued (Priority)]")
    assert any(line.startswith("[waiting: preempted") for line in notes)
    assert notes[-1] == "[the run is done; dtrain status outputs/a]"


def test_with_accounting_the_past_is_known(
    accounting_cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The controller is stopped, which is how it looks when it has forgotten its jobs, and the database answers."""
    it = accounting_cluster
    monkeypatch.setenv("SLURM_CONF", it.env["SLURM_CONF"])
    jobs = {"bad": it.sbatch("--time=30", script="exit 3"), "array": it.sbatch("--array=0-1", script="sleep 60")}
    it.wait(f"{jobs['array']}_1", "RUNNING")  # a task that is cancelled before leaves no trace
    it.run("scancel", f"{jobs['array']}_1")
    it.wait(jobs["bad"])
    it.wait(f"{jobs['array']}_1", "CANCELLED")
    submitted("outputs/bad", jobs["bad"])
    submitted("outputs/array", f"{jobs['array']}_1", status="running")
    submitted("outputs/gone", "9999", status="running")
    statuses = {"outputs/bad": "failed", "outputs/array": "cancelled", "outputs/gone": "died"}
    assert {run["path"]: run["status"] for run in list_runs()} == statuses
    task = ("sacct", "-X", "-n", "-P", "-o", "JobID,State", "-j", f"{jobs['array']}_1")
    known_there = f"{jobs['array']}_1|CANCELLED"  # to the database, 3 s later
    wait_until(lambda: known_there in it.run(*task).stdout, known_there, 15, lambda: it.run(*task).stdout)
    it.stop_controller()
    try:
        monkeypatch.setattr(slurm_queue, "ANSWER_S", 0.5)
        known = query([jobs["bad"], f"{jobs['array']}_1", "9999"])
        bad = known[jobs["bad"]]
        assert (bad.state, bad.exit, bad.nodes, bad.limit) == ("FAILED", "3:0", "node1", 1800)
        assert known[f"{jobs['array']}_1"].state == "CANCELLED" and "9999" not in known and known.problem
        assert runs_main([]) == 0
        *table, problem = capsys.readouterr().out.splitlines()
        assert {line.split()[0]: line.split()[1] for line in table[1:]} == {**statuses, "outputs/gone": "running"}
        assert problem.startswith("SLURM did not answer, so this is from the run folders only: squeue")
        with pytest.raises(ValueError, match=r"outputs/gone: squeue did not answer .*\n  fix: "):
            cancel_main(["gone"])
    finally:
        it.start_controller()


def dtrain(it: Cluster, *words: str) -> str:
    env = {**it.client_env(), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "dtrain", *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=patience(90))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_real_run_is_watched_and_cancelled_with_a_checkpoint(free: Cluster) -> None:
    slurm_settings = ["cluster=slurm", "cluster.gpus_per_node=0", "cluster.processes=1", "cluster.nodes=2"]
    endless = ["train.steps=100000", "preflight=off", "run_dir=outputs/a"]
    dtrain(free, "launch", *SMALL, *slurm_settings, *endless)
    run = Path("outputs/a").absolute()
    until(run, "running")
    watch = threading.Thread(target=lambda: shown.append(dtrain(free, "logs", "-f", "a")))
    shown: list[str] = []
    watch.start()
    wait_until(lambda: len(metrics(run)) > 3, "three steps", 120, lambda: said(run) + free.state())
    data = json.loads(dtrain(free, "status", "a", "--json"))
    assert (data["status"], data["job"]["state"], data["job"]["nodes"]) == ("running", "RUNNING", "node[1-2]")
    assert data["steps"] >= 3 and data["eta_s"] > 0 and len(data["attempts"]) == 1
    assert "was asked to save and end" in dtrain(free, "cancel", "a", "--save")
    watch.join(patience(60))
    assert "step" in shown[0] and "loss" in shown[0]
    found = until(run, "cancelled")
    assert found.attempts[-1]["code"] == 75
    data = json.loads(dtrain(free, "status", "a", "--json"))
    assert data["checkpoint"] and data["reason"] == "by dtrain cancel" and "resume=" in data["next"][0]
    assert free.job(str(found.job_id))["JobState"] != "PENDING"  # not queued again
    assert os.listdir(run / "checkpoints")
