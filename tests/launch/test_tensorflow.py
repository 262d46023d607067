"""The recipe tf-multiworker-digits: two TensorFlow workers learn, are killed, and go on."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.test_local import listen_to_signals
from tests.patience import patience, until
from tests.world import ROOT

pytestmark = [
    pytest.mark.slow,  # a minute, most of it for importing TensorFlow
    pytest.mark.skipif(not importlib.util.find_spec("tensorflow"), reason="needs pip install 'dtrain[tensorflow]'"),
]
RECIPE = ["recipe=tf-multiworker-digits", "run_dir=run"]


def launch(cwd: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(ROOT / "launch.py"), *words], cwd=cwd, env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=listen_to_signals,
    )  # fmt: skip


def epochs(run: Path) -> list[int]:
    path = run / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line["step"] for line in lines if "accuracy" in line]


def test_it_learns_is_killed_and_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["script_args=[--epochs,12,--least-accuracy,0.95]"]
    process = launch(tmp_path, *RECIPE, *words)
    until(lambda: len(epochs(run)) >= 3, "three epochs", 180)
    pids = re.findall(
        r"\d+", subprocess.run(["pgrep", "-f", "tf_multiworker_digits.py"], capture_output=True, text=True).stdout
    )
    os.kill(int(pids[-1]), signal.SIGKILL)
    output, _ = process.communicate(timeout=patience(120))
    assert process.returncode == 3 and "SIGKILL" in output, output
    program = ROOT / "recipes" / "scripts" / "tf_multiworker_digits.py"
    process = launch(tmp_path, "resume=run", f"script={program}")
    output, _ = process.communicate(timeout=patience(240))
    assert process.returncode == 0, output
    assert epochs(run) == list(range(1, 13)), "each epoch once"
    found = re.search(r"held out: loss [\d.]+, accuracy ([\d.]+)", (run / "logs/rank-0.log").read_text())
    assert found and float(found[1]) >= 0.95
