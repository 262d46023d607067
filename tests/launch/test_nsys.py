"""nsys=true, with a stand-in for nsys on PATH: what it is given, and that the ranks train under it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dtrain.cli import main
from tests import slurm, slurm_runs
from tests.slurm import Cluster
from tests.slurm_runs import NODES_1, failure, said, submit, until
from tests.world import ROOT, SMALL, summary

cluster, here = slurm.cluster, slurm_runs.here

NSYS = """#!/bin/sh
# a stand-in: notes its words, then runs the program as nsys does
echo "$@" >> "$NSYS_LOG"
[ "$1" = profile ] || exit 1
shift
while [ "${1#--}" != "$1" ]; do shift; done
exec "$@"
"""


@pytest.fixture
def nsys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program of that name on PATH; where it notes what it was given."""
    program = tmp_path / "bin" / "nsys"
    program.parent.mkdir()
    program.write_text(NSYS)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("NSYS_LOG", str(tmp_path / "nsys.log"))
    return tmp_path / "nsys.log"


def test_nsys_goes_around_torchrun(nsys: Path, tmp_path: Path) -> None:
    words = [*SMALL, "nsys=true", "cluster.processes=2", "profile.start=3", "profile.num_steps=1", "train.steps=4"]
    command = [sys.executable, str(ROOT / "launch.py"), *words, f"run_dir={tmp_path}/run"]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (given,) = nsys.read_text().splitlines()
    assert f"--output={tmp_path}/run/profiles/node-0 " in given
    assert "torch.distributed.run" in given and "--kill=none" in given
    assert (tmp_path / "run" / "profiles").is_dir()
    assert summary(tmp_path / "run")["status"] == "done"


@pytest.mark.parametrize(
    "words",
    [
        ["nsys=true"],
        ["nsys=true", "dry_run=true"],
        ["-m", "nsys=true,false", "dry_run=true"],  # also when the last point of a sweep needs none
        ["nsys=true", "dry_run=true", "cluster=slurm", "cluster.launcher=torchrun", "cluster.node_rank=0",
         "cluster.master_addr=localhost"],
    ],
)  # fmt: skip
def test_nsys_that_is_not_there_is_refused_before_anything_starts(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    folder = "hydra.sweep.dir" if "-m" in words else "run_dir"
    assert main(["launch", *SMALL, *words, f"{folder}={tmp_path}/run"]) == 2
    assert "nsys=true: there is no nsys on PATH" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_job_is_shown_where_there_is_no_nsys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither is a job refused that is submitted: only its nodes need it, and are asked there."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["launch", *SMALL, "nsys=true", "cluster=slurm", "dry_run=true", f"run_dir={tmp_path}/run"]) == 0
    assert "nsys profile " in capsys.readouterr().out


def test_nsys_goes_around_each_rank_of_a_slurm_job(
    cluster: Cluster, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node that submits need not have it: cluster.setup, which runs in the job, brings it here."""
    words = [*NODES_1, "cluster.processes=2", "nsys=true", "profile.start=3", "profile.num_steps=1", "train.steps=4"]
    without = submit(*words, run="without")
    until(lambda: (without / "failure.json").exists(), "a job without nsys ends")
    assert failure(without)["type"] == "nsys" and failure(without)["exit_code"] == 2
    assert "there is no nsys on PATH" in failure(without)["message"]
    program = here / "bin" / "nsys"
    program.parent.mkdir()
    program.write_text(NSYS)
    program.chmod(0o755)
    setup = f"cluster.setup=['export PATH={program.parent}:$PATH NSYS_LOG={here}/nsys.log']"
    run = submit(*words, setup, run="with")
    until(lambda: (run / "summary.json").exists() and summary(run)["status"] in ("done", "failed"), "the job ends")
    assert summary(run)["status"] == "done", said(run)
    given = (here / "nsys.log").read_text().splitlines()
    assert len(given) == 2  # one a rank; nsys itself puts the rank in the name of its report
    assert all(f"--output={run}/profiles/rank-%q{{SLURM_PROCID}} " in line for line in given)
