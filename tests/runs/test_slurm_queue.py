"""What SLURM says, when it answers oddly, late or not at all; and the status of a run that follows from it.

What it ordinarily says comes from a real one, in tests/launch/test_after.py.
"""

import json
import time
from pathlib import Path

import pytest

from dtrain.commands.cancel import main as cancel_main
from dtrain.commands.runs import main as runs_main
from dtrain.runs import slurm_queue
from dtrain.runs.slurm_queue import query
from tests import rundirs
from tests.rundirs import Fakes, job, list_runs, make, note, row

in_tmp_path, fakes = rundirs.in_tmp_path, rundirs.fakes


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


@pytest.mark.parametrize(
    "sacct", ["exec sleep 30", "echo 'Slurm accounting storage is disabled' >&2; exit 1", "echo 'a|b'"]
)
def test_accounting_that_is_not_there(fakes: Fakes, monkeypatch: pytest.MonkeyPatch, sacct: str) -> None:
    monkeypatch.setattr(slurm_queue, "ANSWER_S", 0.3)
    calls = fakes(squeue="exit 0", sacct=sacct)
    began = time.monotonic()
    for _ in range(2):
        assert query(["7"])["7"].state == "GONE"
    assert time.monotonic() - began < 20  # not the 30 of a sacct that hangs
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
    monkeypatch.setattr(slurm_queue, "ANSWER_S", 0.3)
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
