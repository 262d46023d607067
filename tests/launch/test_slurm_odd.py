"""SLURM on a bad day: slow, refusing, silent, or starting a job again that has ended. A run is never in two jobs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from dtrain.cli import main
from dtrain.config.hardware import CPU_FP16, no_cpu_fp16
from dtrain.runs.record import read_run
from tests import slurm
from tests.patience import patience
from tests.slurm import Cluster
from tests.slurm_runs import NODES_1, attempts, exact, failure, here, job_id, said, submit, until
from tests.world import ROOT, summary

cluster = slurm.cluster
__all__ = ["here"]


def in_front(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, script: str) -> Path:
    """A command of ours before SLURM's own on the path; "$REAL" in the script is theirs."""
    real = subprocess.run(["which", name], capture_output=True, text=True, check=True).stdout.strip()
    path = folder / "front" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/bash\nREAL={real}\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
    return path


def test_a_sweep_that_is_typed_twice_at_once_is_submitted_once(
    here: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_front(here, monkeypatch, "sbatch", '[ "$1" = --test-only ] || sleep 5; exec $REAL "$@"')
    command = [sys.executable, str(ROOT / "launch.py"), "-m", *NODES_1, "train.steps=3", "optim.lr=1e-3,2e-3"]
    command.append("hydra.sweep.dir=sweep")
    first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    until(lambda: (here / "sweep" / "sweep.json").exists(), "the first command's start")
    second = subprocess.run(command, capture_output=True, text=True, timeout=patience(60))
    output, _ = first.communicate(timeout=patience(60))
    assert first.returncode == 0, output
    assert second.returncode == 2 and "another command is using this folder" in second.stderr, second
    ids = cluster.run("squeue", "-h", "-r", "-t", "all", "-o", "%F").stdout.split()
    assert len({job_id(run).partition("_")[0] for run in (here / "sweep").glob("[01]-*")} & set(ids)) == 1


def test_what_slurm_refuses_in_the_end_is_an_error_and_not_about_to_start(
    here: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limit = "sbatch: error: AssocMaxSubmitJobLimit"
    path = in_front(
        here, monkeypatch, "sbatch", f'[ "$1" = --test-only ] && exec $REAL "$@"; echo "{limit}" >&2; exit 1'
    )
    assert main(["launch", *NODES_1, "train.steps=3", "run_dir=run"]) == 2
    assert "AssocMaxSubmitJobLimit" in capsys.readouterr().err
    assert read_run(here / "run")["status"] == "failed" and "AssocMax" in failure(here / "run")["message"]
    sweep = ["launch", "-m", *NODES_1, "train.steps=3", "optim.lr=1e-3,2e-3"]
    assert main(sweep) == 2
    assert "AssocMaxSubmitJobLimit" in capsys.readouterr().err
    path.unlink()
    assert main(sweep) == 0, "the same command submits what could not be submitted"
    assert "submitted 2 jobs" in capsys.readouterr().out


def test_when_nobody_knows_whether_a_job_is_queued_nothing_is_submitted(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = submit(*NODES_1, "train.steps=3", "cluster.sbatch={begin: now+600}")
    for name in ("squeue", "sacct", "scontrol"):
        in_front(here, monkeypatch, name, "echo 'no answer' >&2; exit 1")
    assert main(["launch", f"resume={run}"]) == 2
    error = capsys.readouterr().err
    assert f"whether its job {job_id(run)} is still queued" in error and "fix: " in error
    assert len(json.loads((run / "launch.json").read_text())["launches"]) == 1


def test_a_queued_run_is_not_resumed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = submit(*NODES_1, "train.steps=3", "cluster.sbatch={begin: now+600}")
    assert main(["launch", f"resume={run}"]) == 2
    assert f"its job {job_id(run)} is in SLURM's queue (pending)" in capsys.readouterr().err


def test_a_run_that_has_ended_keeps_its_results(here: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Started again after its end; or ended between its last save and its summary."""
    monkeypatch.setenv("RANK", "0")  # of the user's own shell, and not of this world
    monkeypatch.setenv("WORLD_SIZE", "1")
    run = submit(*NODES_1, "train.steps=4", "cluster.processes=2", "train.eval_batches=1")
    cluster.wait(job_id(run))
    before, curve = summary(run), exact(run)
    assert before["status"] == "done" and len(curve) == 4, said(run)
    cluster.run("scontrol", "requeue", job_id(run))
    cluster.wait(job_id(run), "COMPLETED", restarts=1)
    assert summary(run) == before

    (run / "summary.json").write_text(json.dumps(before | {"status": "running", "train_loss": None, "val_loss": None}))
    assert main(["launch", f"resume={run}"]) == 0
    cluster.wait(job_id(run))
    keys = ("status", "steps", "train_loss", "val_loss", "weights_sha256")
    assert [summary(run)[k] for k in keys] == [before[k] for k in keys], said(run)
    assert exact(run) == curve


def test_a_rank_that_cannot_start_is_a_failure_and_no_interruption(here: Path, cluster: Cluster) -> None:
    """srun then ends the other ranks with TERM, which is not what happened."""
    python = here / "python"
    python.write_text(f'#!/bin/sh\n[ "$SLURM_PROCID" = 1 ] && exit 1\nsleep 2; exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    run = submit(*NODES_1, "cluster.processes=2", f"cluster.python={python}")
    cluster.wait(job_id(run))
    assert failure(run)["rank"] == 1 and "exit code 1" in failure(run)["message"], said(run)
    assert len(attempts(run, "start")) == 1 and attempts(run, "end")[0]["code"] == 3


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
@pytest.mark.usefixtures("here")
def test_a_node_whose_cpu_lacks_fp16_says_so_and_the_login_node_does_not(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher cannot know the nodes' CPUs, so it takes the job whatever its own CPU can do."""
    monkeypatch.setenv(CPU_FP16, "0")
    where = ["cluster.processes=2", f"cluster.setup=['export {CPU_FP16}=0']"]
    run = submit(*NODES_1, *where, "strategy=zero1", "precision=fp16")
    assert cluster.wait(job_id(run), timeout=120) == "FAILED", said(run)
    found, here_said = failure(run), str(no_cpu_fp16("zero1")).replace(f"of {socket.gethostname()} ", "of node1 ")
    assert (found["message"], found["exit_code"]) == (here_said, 2)
    assert cluster.job(job_id(run))["ExitCode"] == "2:0" and len(attempts(run, "start")) == 1


def test_an_sbatch_that_does_not_answer_is_named(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    in_front(here, monkeypatch, "sbatch", "exec sleep 60")
    monkeypatch.setattr("dtrain.launch.slurm.TEST_S", 1)
    assert main(["launch", *NODES_1, "run_dir=run"]) == 2
    said = capsys.readouterr().err
    assert "cluster=slurm: `sbatch --test-only` did not answer within 1 s\n  fix: scontrol ping" in said
    assert not Path("run").exists()
