"""Horovod programs under `script=`: one that knows nothing of dtrain, and the recipe horovod-digits."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.launch.test_script import launch, run, summary
from tests.patience import patience, until
from tests.world import ROOT

pytest.importorskip("horovod", reason="Horovod is not built: make horovod")
# a Horovod program: rank 1 fails once
PROGRAM = """
import os, sys
import horovod.torch as hvd
import torch

hvd.init()
assert hvd.local_rank() == hvd.rank() and hvd.local_size() == hvd.size() == 2 and hvd.cross_size() == 1
total = hvd.allreduce(torch.full((3,), float(hvd.rank() + 1)), op=hvd.Sum)
print("the sum is", total.tolist(), flush=True)
if hvd.rank() == 1 and not os.path.exists("healed"):
    open("healed", "w").close()
    raise ConnectionError("the camera is gone")
hvd.shutdown()
hvd.init()  # again, as an elastic program does it
print("the mean is", hvd.allreduce(torch.tensor(float(hvd.rank()))).item(), flush=True)
"""


def test_a_program_that_knows_nothing_of_dtrain(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    words = ["script=program.py", "script.env=horovod", "cluster.processes=2", "cluster.max_restarts=1", "run_dir=run"]
    code, output = run(tmp_path, *words)
    assert code == 0, output
    assert "attempt 1 failed: rank 1: ConnectionError: the camera is gone (logs/rank-1.log)" in output
    for rank in range(2):
        log = (tmp_path / f"run/logs/rank-{rank}.log").read_text()
        assert log.count("the sum is [3.0, 3.0, 3.0]") == 2 and log.count("the mean is 0.5") == 1, log


@pytest.mark.slow  # the program above starts the same way; this one trains
def test_the_recipe_learns_is_killed_and_goes_on(tmp_path: Path) -> None:
    words = ["recipe=horovod-digits", "script_args=[--epochs,15,--least-accuracy,0.95]", "run_dir=run"]
    process = launch(tmp_path, *words)
    until(lambda: len(epochs(tmp_path / "run")) >= 3, "three epochs", 120)
    found = subprocess.run(["pgrep", "-f", f"^.*-u {ROOT}/recipes/scripts/horovod_digits.py"], stdout=subprocess.PIPE)
    os.kill(int(found.stdout.split()[-1]), signal.SIGKILL)
    output, _ = process.communicate(timeout=patience(120))
    assert process.returncode == 3 and "SIGKILL" in output, output
    before = len(epochs(tmp_path / "run"))
    assert before < 15
    process = launch(tmp_path, "resume=run", f"script={ROOT}/recipes/scripts/horovod_digits.py")
    output, _ = process.communicate(timeout=patience(120))
    assert process.returncode == 0, output
    assert epochs(tmp_path / "run") == list(range(1, 16)), "each epoch once"
    assert summary(tmp_path / "run")["status"] == "done"
    accuracy = re.search(r"held out: accuracy ([\d.]+)", (tmp_path / "run/logs/rank-0.log").read_text())
    assert accuracy and float(accuracy[1]) >= 0.95


def epochs(run_dir: Path) -> list[int]:
    path = run_dir / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line["step"] for line in lines if "loss" in line]
