"""Every attempt's cause is kept and rests on evidence: a user's own error is never taken for a lost node."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dtrain.cli import main
from dtrain.runs import causes
from dtrain.runs.protocol import free_port
from tests.launch.test_local import launch

PEER = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"

# Rank 1 fails in its sixth pass, in each attempt of another cause. Line 12 is where the user's code raises.
MODEL = """
import os, signal
from dtrain.models.gpt2 import GPT2

class Odd(GPT2):
    calls = 0

    def forward(self, inputs, targets=None):
        self.calls += 1
        if os.environ["RANK"] == "1" and self.calls == 6:
            if (attempt := len(open(os.environ["STARTS"]).read())) != 1:
                raise ConnectionResetError(104, "Connection reset by peer")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(inputs, targets)

if os.environ.get("RANK") == "1":
    open(os.environ["STARTS"], "a").write("x")
"""


def test_each_attempt_keeps_its_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A real SIGKILL of which gloo tells rank 0, then a user's ConnectionResetError."""
    (tmp_path / "mine.py").write_text(MODEL)
    words = ["cluster.processes=2", "model._target_=mine.Odd", "trust=[mine]", "checkpoint.every=2"]
    env = {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}", "STARTS": str(tmp_path / "starts")}
    process = launch(tmp_path, *words, "cluster.max_restarts=1", env=env)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 3, output
    reset = "rank 1: ConnectionResetError: [Errno 104] Connection reset by peer (logs/rank-1.log)"
    killed = "rank 1: SIGKILL: the process was killed by SIGKILL (out of memory?) (logs/rank-1.log)"
    lines = [" ".join(line.split()) for line in output.splitlines()]
    assert f"attempt 1 failed: {killed}" in lines, output
    assert any(re.search(r", restart 1 of 1 from step-0000000[24]", line) for line in lines), output
    assert f"attempts attempt 1: {killed}" in lines and f"attempt 2: {reset}" in lines, output
    at = lines.index("at mine.py:12 in forward")
    assert lines[at + 1].startswith("raise ConnectionResetError"), output

    run = tmp_path / "run"
    noted = [json.loads(line) for line in (run / "attempts.jsonl").read_text().splitlines()]
    assert [line["event"] for line in noted] == ["start", "end"] * 2
    assert [line["why"] for line in noted if line["event"] == "end"] == [killed, reset]
    assert (noted[1]["failure"]["rank"], noted[1]["failure"]["type"]) == (1, "SIGKILL"), noted[1]
    last = json.loads((run / "failure.json").read_text())
    assert last["where"].startswith(f"{tmp_path}/mine.py:12"), last
    assert main(["status", str(run)]) == 0
    status = capsys.readouterr().out
    assert status.count(reset) == 1 and killed in status and "mine.py:12 in forward" in status, status


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_words_of_a_message_are_no_evidence() -> None:
    for error in (ConnectionResetError(104, "Connection reset by peer"), BrokenPipeError(32, "Broken pipe"),
                  RuntimeError(f"my data server: {PEER}"), RuntimeError(PEER)):  # fmt: skip
        assert not causes.is_lost_peer(raised(error)), error


GROUP = """
import datetime, os, sys
import torch.distributed as dist
from torch import ones
from dtrain.runs import causes
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
dist.all_reduce(ones(1))
if dist.get_rank() == 1:
    os._exit(0)
try:
    while True:
        dist.all_reduce(ones(1000))
except Exception as error:
    wrapped = RuntimeError("the step failed")
    wrapped.__cause__ = error
    print(causes.is_lost_peer(error), causes.is_lost_peer(wrapped), flush=True)
os._exit(0)
"""


def test_a_real_collective_that_lost_its_peer_is_evidence() -> None:
    env = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen([sys.executable, "-c", GROUP], env=env | {"RANK": str(r)}, stdout=subprocess.PIPE, text=True)
        for r in (0, 1)
    ]
    assert ranks[0].communicate(timeout=120)[0].split() == ["True", "True"]
    assert ranks[1].wait(60) == 0


def test_causes_are_told_once() -> None:
    one, other = {"rank": 1, "type": "E", "message": "a\nb", "log": "l"}, {"type": signal.SIGKILL.name, "message": ""}
    assert causes.distinct([one, other, one]) == ["attempts 1, 3: rank 1: E: a (l)", "attempt 2: SIGKILL: no message"]
    assert causes.distinct([one] * 7) == ["attempts 1, 2, 3, 4, 5 and 2 more: rank 1: E: a (l)"]
