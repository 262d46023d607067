"""The process that forks the ranks: which rank ended first, and which ones dtrain itself has killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dtrain.launch import forked
from dtrain.launch.forked import Forked, ForkedRanks
from dtrain.launch.local import Local, can_fork
from dtrain.launch.torchrun import Torchrun
from dtrain.runs.protocol import ELASTIC
from dtrain.train.starter import is_from_outside
from tests.patience import patience, until

# a starter whose ranks do this instead of training
RANKS = """
import os, signal, sys, time
from pathlib import Path
from dtrain.train import rank, starter

def train(run_dir, number):
    print("rank", number, os.environ["RANK"], os.environ["WORLD_SIZE"], file=sys.stderr, flush=True)
    (run_dir / f"began-{number}-{os.getpid()}").touch()
    WHAT[number]()
    return 0

def end(number):
    return lambda: os.kill(os.getpid(), number)

WHAT = {what}
rank.train = train
starter.Starter(Path(sys.argv[1]), 1).run()
"""

PRELOADS = """
starter.count_gpus = lambda: int(os.environ["GPUS"])
starter.preload(Path(sys.argv[1]))
assert str("torch" in sys.modules) == os.environ["EXPECTED"]

def train(run_dir, number):
    assert "dtrain.train.loop" in sys.modules
    return 0

rank.train = train
"""


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ForkedRanks]]:
    monkeypatch.setattr(forked, "PEERS_S", 0.1)
    processes: list[subprocess.Popen[bytes]] = []

    def start(what: str) -> ForkedRanks:
        command = [sys.executable, "-c", RANKS.replace("{what}", what), str(tmp_path)]
        with open(tmp_path / "log", "wb") as log:
            processes.append(
                subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True
                )
            )
        return ForkedRanks(processes[-1], 2, 0.1)

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def ended(ranks: ForkedRanks) -> list[tuple[int, int]]:
    until(lambda: ranks.poll() is not None, "the end of the ranks", 30)
    return ranks.exits


def began(folder: Path) -> dict[int, int]:
    """Process of each rank."""
    until(lambda: len(list(folder.glob("began-*"))) == 2, "both ranks", 30)
    return {int(rank): int(pid) for _, rank, pid in (path.name.split("-") for path in folder.glob("began-*"))}


SLEEP = "lambda: time.sleep(600)"


@pytest.mark.parametrize(
    ("what", "exits", "code"),
    [
        (f"[{SLEEP}, end(9)]", [(1, -9)], -9),  # the other rank is killed, and not named
        (f"[{SLEEP}, end(11)]", [(1, -11)], -11),
        (f"[lambda: os._exit(7), {SLEEP}]", [(0, 7)], 7),
        ("[lambda: os._exit(75), lambda: os._exit(75)]", [(0, 75), (1, 75)], 75),
        ("[lambda: None, lambda: None]", [(0, 0), (1, 0)], 0),
    ],
)
def test_the_rank_that_ended_by_itself_is_named(
    started: Callable[[str], ForkedRanks], what: str, exits: list[tuple[int, int]], code: int
) -> None:
    ranks = started(what)
    assert sorted(ended(ranks)) == exits and ranks.returncode == code


def test_ranks_that_the_supervisor_kills_are_no_failure(started: Callable[[str], ForkedRanks], tmp_path: Path) -> None:
    ranks = started(f"[{SLEEP}, {SLEEP}]")
    began(tmp_path)
    ranks.kill()
    assert ended(ranks) == [] and ranks.returncode == -9


def test_a_starter_that_does_not_answer_is_killed_with_its_ranks(
    started: Callable[[str], ForkedRanks], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped, or still imports torch."""
    monkeypatch.setattr(forked, "KILL_S", 0.2)
    ranks = started(f"[{SLEEP}, {SLEEP}]")
    processes = began(tmp_path)
    ranks.starter.send_signal(signal.SIGSTOP)
    ranks.kill()
    assert ended(ranks) == [] and ranks.returncode == -9
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes.values()), "the end of the ranks", 30)


def test_a_starter_that_dies_is_noticed_though_a_rank_has_left_a_process(
    started: Callable[[str], ForkedRanks], tmp_path: Path
) -> None:
    ranks = started(f"[lambda: os.fork() and time.sleep(600) or time.sleep(20), {SLEEP}]")
    began(tmp_path)
    ranks.starter.kill()
    began_at = time.monotonic()
    ended(ranks)
    assert ranks.returncode == -9 and time.monotonic() - began_at < patience(10)


def test_of_ranks_that_end_together_the_killed_one_is_the_cause(
    started: Callable[[str], ForkedRanks], tmp_path: Path
) -> None:
    """While the starter gets no CPU, rank 1 is killed, and rank 0 aborts because it has lost its peer."""
    ranks = started(f"[{SLEEP}, {SLEEP}]")
    processes = began(tmp_path)
    ranks.starter.send_signal(signal.SIGSTOP)
    os.kill(processes[1], signal.SIGKILL)
    os.kill(processes[0], signal.SIGABRT)
    until(lambda: all(map(has_ended, processes.values())), "both ends", 30)
    ranks.starter.send_signal(signal.SIGCONT)
    assert ended(ranks) == [(1, -9), (0, -6)]
    log = (tmp_path / "log").read_text()
    assert f"rank 1, process {processes[1]}: exitcode: -9 (SIGKILL)" in log, "for dtrain why"


def has_ended(pid: int) -> bool:
    """Can its parent collect it? The first thread of a killed process is a zombie before the others have ended."""
    is_zombie = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return is_zombie and len(os.listdir(f"/proc/{pid}/task")) == 1


def test_what_counts_as_killed_from_outside() -> None:
    assert is_from_outside(-signal.SIGKILL) and is_from_outside(-signal.SIGTERM)
    assert not any(map(is_from_outside, (0, 1, 3, 75, -signal.SIGSEGV, -signal.SIGABRT)))


@pytest.mark.parametrize(("gpus", "elastic", "imported"), [(0, "", True), (1, "", False), (1, "1", True)])
def test_with_gpus_the_ranks_import_torch(tmp_path: Path, gpus: int, elastic: str, imported: bool) -> None:
    script = RANKS.replace("rank.train = train", PRELOADS).replace("{what}", "[lambda: None, lambda: None]")
    (tmp_path / "config.yaml").write_text("{}\n")
    env = {**os.environ, "GPUS": str(gpus), "EXPECTED": str(imported)} | ({ELASTIC: elastic} if elastic else {})
    command = [sys.executable, "-c", script, str(tmp_path)]
    order = b'{"ranks": 2, "rescue_s": 0, "peers_s": 0}\n'
    with subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as it:
        assert it.stdin is not None and it.stdout is not None and it.stderr is not None
        it.stdin.write(order)
        it.stdin.flush()
        answer = it.stdout.readline()
        it.stdin.close()
        assert answer and sorted(json.loads(answer)["ended"]) == [[0, 0], [1, 0]], it.stderr.read().decode()


def test_what_forks_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def config(**settings: Any) -> dict[str, Any]:
        cluster = {"processes": 2, "nodes": 1} | settings.pop("cluster", {})
        return {"cluster": cluster, "strategy": {"_target_": "dtrain.strategies.fsdp.FSDP"}, **settings}

    monkeypatch.setattr(forked, "gpus_per_node", lambda cluster: 1)
    monkeypatch.setattr("dtrain.launch.local.gpus_per_node", lambda cluster: 1)
    assert can_fork(config(cluster={"fork": "always"})) and not can_fork(config())
    monkeypatch.setattr("dtrain.launch.local.gpus_per_node", lambda cluster: 0)
    assert can_fork(config())
    assert not any(map(can_fork, (config(nsys=True), config(script={"file": "a.py"}), config(cluster={"fork": False}))))
    ranges = config(cluster={"processes": "1:2", "fork": False})
    with pytest.raises(ValueError, match=r"cluster.fork=False: the ranks of a range are always forked"):
        Local().check(ranges)
    local = Local()
    assert type(local._supervisor(config())) is Forked
    assert type(local._supervisor(config(cluster={"fork": False}))) is Torchrun
