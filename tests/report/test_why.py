"""What `dtrain why` says about run folders, also about damaged ones."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.commands import why as command
from dtrain.report.why import CAUSES, diagnose
from dtrain.runs.record import Record
from dtrain.runs.slurm_queue import Job

USERS = "/home/u/net.py:12, in forward"


def failure(kind: str, message: str, rank: int | None = 1, **more: Any) -> dict[str, Any]:
    base = {"rank": rank, "type": kind, "message": message, "exit_code": 3, "log": f"logs/rank-{rank}.log"}
    return base | {"traceback": "Traceback", "where": "", "lost_peer": False, "kernel": []} | more


KILLED = "Memory cgroup out of memory: Killed process 77 (python) total-vm:1kB"
XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid=77, GPU has fallen off the bus"
CASES = [
    (failure("RuntimeError", "shapes do not fit", where=USERS), "code", 1),
    (failure("ConnectionResetError", "[Errno 104] Connection reset by peer", where=USERS), "code", 1),
    (failure("AttributeError", "'NoneType' object has no attribute 'x'"), "dtrain", 1),
    (failure("TypeError", "'Loader' object is not callable", objects=["data=net.Points, net.py:3"]), "object", 1),
    (failure("IndexError", "loss=cross_entropy: targets are 0 to 7\n  fix: as many outputs as classes"), "code", 1),
    (
        failure("hang", "no progress for 31s: 3 of 4 ranks wait in all_reduce 812; rank 1 is in my.py:8, in f"),
        "hang",
        1,
    ),
    (
        failure("collective mismatch", "it called broadcast [[3]] where the others called all_reduce [[5]]"),
        "collective",
        1,
    ),
    (failure("SIGKILL", "the process was killed by SIGKILL (out of memory?)"), "killed", 1),
    (failure("SIGKILL", "the process was killed by SIGKILL (out of memory?)", kernel=[KILLED]), "memory", 1),
    # of another process: no evidence about this rank
    (failure("SIGKILL", "the process was killed by SIGKILL", kernel=[KILLED.replace("77", "78")]), "killed", 1),
    (failure("SIGSEGV", "the process was killed by SIGSEGV"), "crash", 1),
    (failure("SIGABRT", "killed by SIGABRT", kernel=[XID]), "gpu", 1),
    (failure("SIGABRT", "killed by SIGABRT", kernel=[XID.replace("77", "78")]), "crash", 1),  # another job's
    (failure("early exit", "the process ended before the run did, and wrote no error report"), "exit", 1),
    (failure("exit code 7", "the process ended with exit code 7 and wrote no error report"), "exit", 1),
    (failure("SystemExit", "1", where=USERS), "exit", 1),
    (failure("NonFiniteError", "step 9: loss nan, gradient norm nan: not finite"), "numbers", None),
    (failure("ReplicaError", "step 9: rank 1 (a) differs from its replicas in model.x"), "corruption", 1),
    (failure("CheckpointError", "no checkpoint is intact"), "checkpoint", 1),
    (failure("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2 GiB", where=USERS), "gpu memory", 1),
    (failure("RuntimeError", "DefaultCPUAllocator: can't allocate memory: you tried", where=USERS), "memory", 1),
    (failure("OSError", "[Errno 28] the disk of /x is full. Fix: make room", where=USERS), "storage", 1),
    (failure("OSError", "[Errno 5] Input/output error: '/data/x'", where=USERS), "storage", 1),
    (failure("RuntimeError", "DataLoader worker (pid 9) is killed by signal: Killed. "), "loader", 1),
    (failure("RuntimeError", "[…gloo/…] Connection closed by peer", lost_peer=True), "network", None),
    (failure("RuntimeError", "CUDA error: uncorrectable ECC error encountered", where=USERS), "gpu", 1),
    (failure("ValueError", "data: differs\n  fix: restore it", exit_code=2), "settings", None),
    (failure("ValueError", "dtrain=…: must be the same on all ranks: rank 1 (a) has 0", exit_code=2), "setup", 1),
    (failure("start", "no rank had started after 60 s", None), "start", None),
    (failure("launch", "torchrun ended with 1", None, traceback=""), "start", None),
    (failure("stopped", "the run did not save within cluster.grace_s=300 seconds", None), "stopped", None),
]


def folder_of(run_dir: Path, found: dict[str, Any]) -> Path:
    logs = run_dir / "logs"
    logs.mkdir(parents=True)
    (run_dir / "launch.json").write_text(json.dumps({"pid": 1, "host": "elsewhere", "launches": [{}]}))
    (run_dir / "summary.json").write_text(json.dumps({"status": "failed", "steps": 8, "total_steps": 30}))
    (run_dir / "failure.json").write_text(json.dumps(found))
    rows = [{"step": step, "loss": 3.0, "grad_norm": 1.0, "step_s": 0.1, "data_s": 0.0} for step in range(1, 9)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run_dir / "attempts.jsonl").write_text('{"event": "start", "time": 1, "step": 0, "nodes": ["a"]}\n')
    position = {"rank": 1, "pid": 77, "host": "a", "moves": 9, "phase": "step", "step": 9}
    (logs / "position-1.json").write_text(json.dumps(position))
    (logs / "failure-0.json").write_text(json.dumps({"rank": 0, "lost_peer": True, "message": "closed by peer"}))
    if found["traceback"] and not found["type"].startswith(("SIG", "exit", "early")):
        (logs / "rank-1.log").write_text(f"INFO rank 1\nTraceback\n{found['type']}: {found['message']}\n")
    return run_dir


@pytest.mark.parametrize(
    "found, cause, rank", CASES, ids=lambda value: value["type"] if isinstance(value, dict) else ""
)
def test_cause_and_rank(tmp_path: Path, found: dict[str, Any], cause: str, rank: int | None) -> None:
    said = diagnose(Record.read(folder_of(tmp_path / "run", found)))
    assert (said.cause, said.rank) == (cause, rank)
    assert said.paragraph and "{" not in said.paragraph
    assert said.evidence[0].file == "failure.json"
    assert said.step == 9


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(CASES), st.lists(st.tuples(st.integers(0, 99), st.floats(0, 1), st.booleans()), min_size=1))
def test_a_damaged_folder_gives_the_same_cause_or_none(
    case: tuple[dict[str, Any], str, int | None], damage: list[tuple[int, float, bool]]
) -> None:
    """Files are cut off at any byte, or missing: then `why` may know less, but never claims something else."""
    found, cause, rank = case
    less = {"unknown", "died", "nothing"}  # nothing: what is left looks like a run that is still running
    if cause == "memory":
        less |= {"killed"}  # without the rank's process number, the kernel's line cannot be attributed
    if cause == "gpu":
        less |= {"crash"}
    with tempfile.TemporaryDirectory() as folder:
        run_dir = folder_of(Path(folder) / "run", found)
        files = sorted(path for path in run_dir.rglob("*") if path.is_file() and path.name != "launch.json")
        for which, share, remove in damage:
            path = files[which % len(files)]
            if remove:
                path.unlink(missing_ok=True)
            elif path.exists():
                path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
        said = diagnose(Record.read(run_dir))
    assert said.cause in {cause} | less
    assert said.rank in (rank, None)


def test_runs_that_did_not_fail(tmp_path: Path) -> None:
    run_dir = folder_of(tmp_path / "run", CASES[0][0])
    (run_dir / "failure.json").unlink()
    for status, cause in (("done", "nothing"), ("running", "nothing")):
        (run_dir / "summary.json").write_text(json.dumps({"status": status}))
        assert diagnose(Record.read(run_dir)).cause == cause
    (run_dir / "attempts.jsonl").write_text('{"event": "start", "time": 1}\n{"event": "end", "time": 2}\n')
    (run_dir / "summary.json").write_text(json.dumps({"status": "preempted"}))
    assert diagnose(Record.read(run_dir)).cause == "stopped"


@pytest.mark.parametrize(
    "state, cause", [("OUT_OF_MEMORY", "memory"), ("TIMEOUT", "time"), ("NODE_FAIL", "node"), ("FAILED", "unknown")]
)
def test_what_slurm_knows(tmp_path: Path, state: str, cause: str) -> None:
    run_dir = folder_of(tmp_path / "run", CASES[0][0])
    for name in ("failure.json", "summary.json"):
        (run_dir / name).unlink()
    (run_dir / "launch.json").write_text(json.dumps({"job_id": "7", "launches": [{"job_id": "7"}]}))
    shutil.rmtree(run_dir / "logs")
    record = Record.read(run_dir)
    record.job = Job("7", state, exit="0:9")
    said = diagnose(record)
    assert said.cause in (cause, "stopped")
    if cause != "unknown":
        assert f"job 7: {state}, exit code 0:9" in str(said.evidence[0])


def test_every_cause_has_its_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert {cause for _, cause, _ in CASES} <= CAUSES.keys()
    run_dir = folder_of(tmp_path / "run", CASES[0][0])
    assert command.main([str(run_dir)]) == 0
    screen = capsys.readouterr().out
    for part in ("code", "rank 1, on a, step 9", USERS, "Starting again", "logs/rank-1.log:3", "resume="):
        assert part in screen
    assert command.main([str(run_dir), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cause"] == "code"


def test_odd_and_hostile_folders(tmp_path: Path) -> None:
    """A run folder is untrusted: its values are shown, and nothing else is done with them."""
    (tmp_path / "secret.log").write_text("ValueError: a secret\n")
    odd = failure("early exit", "ended {x}", log=f"{tmp_path}/secret.log", kernel=5, where="{0}.py:1")
    run_dir = folder_of(tmp_path / "run", odd)
    (run_dir / "logs" / "position-1.json").write_text('{"pid": "(", "step": Infinity, "host": "a"}')
    (run_dir / "logs" / "rank-1.log").write_text("ValueError: bad batch {'x': 3}\n")
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write('{"step": NaN, "loss": 1.0}\n')
    said = diagnose(Record.read(run_dir))
    assert said.cause == "exit" and "secret" not in str(said.evidence)
    (run_dir / "failure.json").write_text(json.dumps(odd | {"log": "logs/rank-1.log"}))
    said = diagnose(Record.read(run_dir))
    assert said.cause == "code" and "{'x': 3}" in said.paragraph
    (run_dir / "failure.json").write_text(json.dumps(odd | {"type": "SIGKILL", "kernel": ["Killed process ("]}))
    assert diagnose(Record.read(run_dir)).cause == "killed"


def test_without_a_majority_no_rank_is_blamed(tmp_path: Path) -> None:
    text = "step 9: rank 0 (a) and rank 1 (b) differ in model.x. Replicas must be equal bit for bit"
    assert diagnose(Record.read(folder_of(tmp_path / "run", failure("ReplicaError", text)))).rank is None


def test_a_stopped_run_that_saves_nothing_is_not_promised_a_resume(tmp_path: Path) -> None:
    run_dir = folder_of(tmp_path / "run", failure("x", "y"))
    (run_dir / "failure.json").unlink()
    (run_dir / "attempts.jsonl").unlink()
    (run_dir / "summary.json").write_text(json.dumps({"status": "preempted", "steps": 8, "saves": 0}))
    (run_dir / "config.yaml").write_text("checkpoint: {save: false}\n")
    said = diagnose(Record.read(run_dir))
    assert "saves no checkpoint (checkpoint.save=false)" in said.paragraph and "resumes" not in said.paragraph
    assert not said.next


def test_a_sweep_names_each_failed_point_with_its_cause_and_a_command(tmp_path: Path, capsys: Any) -> None:
    bad = failure("NonFiniteError", "step 9: loss nan\n  fix: a smaller optim.lr", change={"optim.lr": 0.001})
    for name, found in (("0-lr=1", bad), ("1-lr=2", failure("RuntimeError", "shapes", where=USERS)), ("2-lr=3", None)):
        run_dir = folder_of(tmp_path / "sweep" / name, found or failure("x", "y"))
        launch = {"launches": [{"overrides": ["data=x", f"optim.lr={name[-1]}"]}], "host": "elsewhere"}
        (run_dir / "launch.json").write_text(json.dumps(launch))
        if found is None:
            (run_dir / "failure.json").unlink()
            (run_dir / "summary.json").write_text(json.dumps({"status": "done"}))
    points = {f"{i}-lr={i + 1}": ["data=x", f"optim.lr={i + 1}"] for i in range(4)}
    (tmp_path / "sweep" / "sweep.json").write_text(json.dumps({"points": points}))
    assert command.main([str(tmp_path / "sweep")]) == 0
    said = capsys.readouterr().out
    assert "4: 2 failed, 1 done, 1 not started" in said
    first, second = said.partition("1   optim.lr=2")[::2]
    assert "0   optim.lr=1  failed  numbers\n" in first and "A smaller optim.lr." in first
    assert "optim.lr=0.001 'resume_allow=[optim.lr]'\n" in first
    assert "Rank 1 failed with RuntimeError at /home/u/net.py:12" in second and "resume=" in second
    assert "runs 3 points again" in second
    assert command.main([str(tmp_path / "sweep"), "--json"]) == 0
    assert [one["cause"] for one in json.loads(capsys.readouterr().out)] == ["numbers", "code"]


def test_a_mistake_that_dtrain_explains_is_no_bug_of_dtrain(tmp_path: Path) -> None:
    message = "loss=cross_entropy: targets are 0 to 7, but the model gives 3 scores\n  fix: as many outputs as classes"
    said = diagnose(Record.read(folder_of(tmp_path / "run", failure("IndexError", message))))
    assert said.cause == "code" and said.advice == "Fix: as many outputs as classes."
    assert "bug in dtrain" not in said.paragraph and "line above" not in said.paragraph


def test_an_allocation_larger_than_the_memory_is_not_answered_with_fewer_ranks(tmp_path: Path) -> None:
    asked = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1600000000000 bytes"
    message = f"{asked}\n  fix: a smaller model or batch: this allocation alone is 1490 GiB"
    for where in ("", USERS):
        said = diagnose(
            Record.read(folder_of(tmp_path / f"run{len(where)}", failure("RuntimeError", message, where=where)))
        )
        assert said.cause == "memory" and said.advice.startswith("Fix: a smaller model or batch")
