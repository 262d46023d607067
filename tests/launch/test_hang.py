"""A run that stands still: who is named, after how long, and what happens then."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.launch import hang, wait_graph
from dtrain.runs.protocol import POSITION_FILE
from tests.patience import patience
from tests.world import ROOT, SMALL, summary

# Each way to hold up the others, in the model of one rank at one of its steps.
HUNG = """
import os, re, signal, time
from dtrain.models.gpt2 import GPT2

def sleep(): time.sleep(1000)
def nap(): time.sleep(12)
def lock(): re.match("(a+)+$", "a" * 99 + "b")  # takes for ever, and keeps Python's global lock
def stop(): os.kill(os.getpid(), signal.SIGSTOP)

class Hung(GPT2):
    def forward(self, inputs, targets=None):
        self.calls = getattr(self, "calls", 0) + 1
        if os.environ["RANK"] == os.environ["WHO"] and self.calls == int(os.environ["AT"]):
            if not os.path.exists("healed"):
                open("healed", "w").close()
                globals()[os.environ["HOW"]]()
        return super().forward(inputs, targets)
"""


def hung_run(folder: Path, how: str, who: int, at: int, *overrides: str) -> tuple[int, str]:
    """Exit code and output of a run whose rank `who` hangs in the `at`-th call of its model."""
    (folder / "hung.py").write_text(HUNG)
    command = [sys.executable, str(ROOT / "launch.py"), *SMALL, "run_dir=run", "model._target_=hung.Hung"]
    command += ["trust=[hung]", "train.steps=30", "cluster.hang_timeout=5", *overrides]
    env = os.environ | {"OMP_NUM_THREADS": "1", "HOW": how, "WHO": str(who), "AT": str(at)}
    found = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=patience(60))
    return found.returncode, found.stdout + found.stderr


def test_a_stopped_rank_is_named_and_the_run_restarts(tmp_path: Path) -> None:
    """No step had been saved when the rank was stopped, so the restart begins anew, and ends well."""
    code, output = hung_run(tmp_path, "stop", 1, 7, "cluster.processes=2", "cluster.max_restarts=1")
    assert code == 0, output
    assert "1 of 2 ranks wait in all_reduce" in output
    assert "rank 1 was stopped by a signal or a debugger" in output
    assert summary(tmp_path / "run")["status"] == "done"
    attempts = (tmp_path / "run" / "attempts.jsonl").read_text()
    assert "rank 1: hang: no progress for" in attempts


def test_with_warn_the_rank_is_only_named(tmp_path: Path) -> None:
    """The rank sleeps for longer than the limit, then the run continues, and ends well."""
    code, output = hung_run(tmp_path, "nap", 1, 7, "cluster.processes=2", "cluster.on_hang=warn")
    assert code == 0, output
    assert output.count("no progress for") == 1
    assert "rank 1 is in hung.py:" in output
    assert not (tmp_path / "run" / "logs" / "hang.json").exists()


@pytest.mark.parametrize(
    "how, strategy, ranks, calls, message",
    [
        ("lock", "ddp", 2, 1, "is in hung.py:7, in lock, which does not release Python's global lock"),
        ("sleep", "pipeline", 2, 8, "is in hung.py:5, in sleep"),  # calls: of the model, per step
    ],
    ids=["lock", "sleep"],
)
def test_the_rank_that_holds_up_the_others_is_named(
    tmp_path: Path, how: str, strategy: str, ranks: int, calls: int, message: str
) -> None:
    """All other kinds and strategies: tests/faults/test_corpus.py."""
    settings = [f"strategy={strategy}", f"cluster.processes={ranks}", "train.global_batch_size=24"]
    code, output = hung_run(tmp_path, how, ranks - 1, 6 * calls + 1, *settings)
    assert code == 3, output
    failure = json.loads((tmp_path / "run" / "failure.json").read_text())
    assert failure["rank"] == ranks - 1, output
    assert message in failure["message"], output


# ---- who waits for whom ----------------------------------------------------------------------------------------


def at(moves: int, begun: int, *open_: dict[str, Any], ranks: list[int], stack: str = "x.py:1, in f") -> dict[str, Any]:
    return {
        "rank": 0, "pid": 1, "host": "a", "moves": moves, "phase": "step", "step": 5, "process": "running",
        "groups": {"0": {"ranks": ranks, "begun": begun, "open": list(open_), "calls": calls(*open_)}},
        "threads": {"MainThread": [stack]},
    }  # fmt: skip


def calls(*open_: dict[str, Any]) -> list[list[Any]]:
    return [[one["seq"], f"{one['op']} {one['sizes']}"] for one in open_]


def call(seq: int, op: str = "all_reduce", size: int = 4) -> dict[str, Any]:
    return {"seq": seq, "op": op, "sizes": [[size]]}


@given(st.integers(2, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1), st.integers(1, 5))))
def test_the_rank_that_has_not_begun_the_collective_is_named(drawn: tuple[int, int, int]) -> None:
    size, who, ahead = drawn
    everyone = list(range(size))
    positions = {rank: at(9, 10 + ahead, call(10 + ahead), ranks=everyone) for rank in everyone}
    positions[who] = at(9, 10, call(10), ranks=everyone)  # its own all-reduce is still open, as ddp's overlap with it
    assert wait_graph.culprits(positions)[0] == [who]


@given(st.permutations(range(5)))
def test_a_chain_of_waits_ends_at_the_rank_that_waits_for_nobody(order: list[int]) -> None:
    """Each rank waits for the next one, in a group of two: as tensor inside data parallel does."""
    positions: dict[int, dict[str, Any]] = {rank: at(9, 0, ranks=[]) | {"groups": {}} for rank in order}
    for first, second in itertools.pairwise(order):
        name, ranks = f"{first}-{second}", sorted([first, second])
        positions[first]["groups"][name] = {"ranks": ranks, "begun": 3, "open": [call(3)]}
        positions[second]["groups"][name] = {"ranks": ranks, "begun": 2, "open": []}
    assert wait_graph.culprits(positions)[0] == [order[-1]]


def test_another_collective_at_the_same_place_is_named() -> None:
    everyone = [0, 1, 2]
    positions = {rank: at(9, 7, call(7), ranks=everyone) for rank in everyone}
    positions[1] = at(9, 7, call(7, size=5), ranks=everyone)
    assert wait_graph.culprits(positions)[0] == [1]
    positions[1] = at(9, 7, call(7, op="broadcast"), ranks=everyone)
    assert wait_graph.culprits(positions)[0] == [1]


def test_two_ranks_that_call_different_collectives_name_nobody() -> None:
    """There is no majority: to name one of them would be a guess. Only the user's code gives one of them away."""
    ours = f"{Path(hang.__file__)}:9, in f"
    positions = {rank: at(9, 7, call(7, size=rank + 1), ranks=[0, 1], stack=ours) for rank in (0, 1)}
    ranks, _, text = hang.roll_call(positions)
    assert ranks == []
    assert text == "2 of 2 ranks wait in all_reduce 7 (step 5)"
    torch = "/venv/torch/distributed/distributed_c10d.py:3252, in all_reduce"
    for rank, caller in ((0, ours), (1, "/home/u/net.py:3, in forward")):
        positions[rank]["threads"]["MainThread"] = [torch, caller]
    assert wait_graph.culprits(positions)[0] == [1]


def test_a_skipped_collective_shows_in_a_pattern_that_is_new() -> None:
    """Two ranks left; a step is: gradients, norm, vote. Rank 1 leaves out the norm. The vote has the norm's size."""
    step = ["all_reduce [[99]]", "all_reduce [[2]]", "all_reduce [[2]]"]
    listed = {0: step * 4, 1: step * 3 + [step[0], step[2], step[0]]}
    positions = {rank: at(9, 12, ranks=[0, 1, 2]) for rank in (0, 1)} | {2: {}}
    for rank, names in listed.items():
        positions[rank]["groups"]["0"]["calls"] = [[seq, name] for seq, name in enumerate(names, 1)]
    ranks, called = wait_graph.first_difference(positions)
    assert ranks == [1] and called == {0: "all_reduce [[2]]", 1: "all_reduce [[99]]"}


def test_a_rank_that_waits_for_a_message_while_all_others_wait_for_it_has_skipped_a_collective() -> None:
    """As in a pipeline that sums the gradients of a shared weight by send and recv, after a collective."""
    waits = "/home/u/dtrain/util/collective.py:40, in wait_for_peers"
    positions = {rank: at(9, 8, call(8), ranks=[0, 1, 2]) for rank in (0, 1)}
    positions[2] = at(9, 7, ranks=[0, 1, 2], stack=waits)
    assert wait_graph.culprits(positions) == ([2], True)
    positions[1] = at(9, 7, ranks=[0, 1, 2], stack=waits)  # two exchange something: nobody stands out
    assert wait_graph.culprits(positions) == ([], False)
    positions[1] = at(9, 7, ranks=[0, 1, 2], stack="/home/u/net.py:3, in forward")
    assert wait_graph.culprits(positions) == ([1], False)


def test_a_rank_that_waits_in_send_or_recv_is_not_named() -> None:
    waiting = at(9, 7, ranks=[0, 1], stack="/venv/torch/distributed/pipelining/schedules.py:683, in _wait_batch_p2p")
    positions = {0: waiting, 1: at(9, 7, ranks=[0, 1], stack="/home/u/net.py:3, in forward")}
    assert hang.roll_call(positions)[2] == (
        "1 of 2 ranks wait for a peer (step 5); rank 1 is in net.py:3, in forward (step 5)"
    )


def test_a_rank_that_never_started_comes_first() -> None:
    positions = {0: at(0, 0, ranks=[]), 1: {}, 2: at(0, 0, ranks=[])}
    ranks, _, text = hang.roll_call(positions)
    assert ranks == [1]
    assert text.endswith("rank 1 has not started")


def test_a_rank_that_does_not_answer_is_told_from_one_that_is_known_to_hang() -> None:
    """On SLURM, the first may have lost its node: its job is queued again."""
    silent = {k: v for k, v in at(9, 7, ranks=[]).items() if k not in ("threads", "groups", "process")}
    positions = {0: at(9, 7, ranks=[]), 1: silent, 2: {}, 3: silent | {"printed": ["x.py:1, in f"]}}
    found = hang.Standstill(30.0, 30.0, True, [1], False, "", positions)
    assert [found.has_answered(rank) for rank in range(4)] == [True, False, False, True]
    assert hang.holding_up(silent) == "does not answer: it was stopped, or its node is gone"


def test_hosts_are_named_if_there_are_several() -> None:
    positions = {0: at(9, 7, call(7), ranks=[0, 1]), 1: at(9, 6, ranks=[0, 1]) | {"host": "b"}}
    assert "rank 1 on b is in x.py:1, in f" in hang.roll_call(positions)[2]


# ---- how long is too long --------------------------------------------------------------------------------------


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(hang.time, "monotonic", lambda: self.now)

    def look_for(self, watch: hang.HangWatch, seconds: int) -> list[tuple[float, bool]]:
        """(seconds without progress, stop?) of each standstill that is found in so many looks, one a second."""
        found = []
        for _ in range(seconds):
            self.now += 1
            if one := watch.look():
                found.append((one.seconds, one.stop))
        return found


def write(run_dir: Path, rank: int = 0, **changes: Any) -> None:
    usual = {"counts": {"step": 50, "data": 50}, "slowest": {"step": 0.5, "data": 0.1}, "phase": "step"}
    content = {"rank": rank, "pid": os.getpid(), "host": "a", "pid_namespace": "b", "moves": 100, "step": 50} | usual
    path = run_dir / POSITION_FILE.format(rank)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content | {"threads": {}, "groups": {}} | changes))


def watch_of(run_dir: Path, timeout: float | None = None, ranks: int = 1) -> hang.HangWatch:
    return hang.HangWatch(run_dir, ranks, timeout, lambda positions: None)


@pytest.mark.parametrize(
    "changes, timeout, limit_s",
    [
        ({}, None, 30),
        ({"slowest": {"step": 9.0, "data": 1.0}}, None, 100),
        ({"phase": "data", "slowest": {"step": 9.0, "data": 1.0}}, None, 100),
        ({}, 7.0, 7),
        ({"slowest": {"step": 9.0, "data": 1.0}}, 7.0, 7),
        ({"counts": {"step": 2}}, None, 1800),
        ({"counts": {"step": 2}}, 7.0, 1800),
        ({"phase": "evaluation"}, 7.0, 600),
        ({"phase": "evaluation", "slowest": {"evaluation": 80.0}}, 7.0, 800),
        ({"phase": "save", "slowest": {"save": 0.1}}, 7.0, 600),  # the last one is not in the background
        ({"phase": "save"}, 900.0, 900),
        ({"phase": "compare", "slowest": {"compare": 0.0}}, 7.0, 600),  # the first one
        ({"phase": "compare", "counts": {"compare": 1}, "slowest": {"compare": 0.1}}, 7.0, 7),
        ({"phase": "compare", "counts": {"compare": 1}, "slowest": {"compare": 6.0}}, None, 60),
        ({"phase": "start"}, None, 1800),
        ({"phase": "end"}, 7.0, 600),
    ],
)
def test_the_limit_follows_what_is_usual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], timeout: float | None, limit_s: float
) -> None:
    write(tmp_path, **changes)
    clock, watch = Clock(monkeypatch), watch_of(tmp_path, timeout)
    clock.look_for(watch, 1)
    assert watch.limit_s() == limit_s


def test_it_is_reported_first_and_stopped_much_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    clock, watch = Clock(monkeypatch), watch_of(tmp_path)
    assert clock.look_for(watch, 600) == [(30.0, False)]
    assert clock.look_for(watch, 99) == [(600.0, True)]
    assert json.loads(watch.report.read_text())["seconds"] == 600
    write(tmp_path, moves=101)
    assert clock.look_for(watch, 1) == []
    assert not watch.report.exists()


def test_with_a_limit_of_the_user_it_is_stopped_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    clock, watch = Clock(monkeypatch), watch_of(tmp_path, 7.0)
    assert clock.look_for(watch, 99) == [(7.0, True)]


def test_metrics_are_progress_if_rank_0_cannot_write_its_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its disk is full, or its thread has a fault."""
    write(tmp_path)
    clock, watch = Clock(monkeypatch), watch_of(tmp_path, 7.0)
    (tmp_path / POSITION_FILE.format(0)).write_text("")
    for step in range(20):
        with open(tmp_path / "metrics.jsonl", "a") as file:
            file.write(f"{step}\n")
        assert clock.look_for(watch, 5) == []


def test_a_rank_that_fails_is_given_time_to_write_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    write(tmp_path, rank=1, phase="failing")
    clock, watch = Clock(monkeypatch), watch_of(tmp_path, 7.0, ranks=2)
    assert clock.look_for(watch, 99) == []


def test_a_run_that_moves_while_the_ranks_are_asked_is_not_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)
    path = tmp_path / POSITION_FILE.format(0)
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "threads"}))
    monkeypatch.setattr(hang, "ANSWER_S", 0.0)
    clock = Clock(monkeypatch)
    watch = hang.HangWatch(tmp_path, 1, 7.0, lambda positions: write(tmp_path, moves=101))
    assert clock.look_for(watch, 8) == []


def test_progress_begins_the_count_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, watch = Clock(monkeypatch), watch_of(tmp_path)
    for moves in range(20):
        write(tmp_path, moves=moves)
        assert clock.look_for(watch, 25) == []


def test_a_suspended_supervisor_is_no_standstill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler suspends a job with its supervisor, a laptop sleeps: the clock runs on, the ranks did not."""
    write(tmp_path)
    clock, watch = Clock(monkeypatch), watch_of(tmp_path)
    for _ in range(5):
        assert clock.look_for(watch, 1) == []
        clock.now += 3600


def test_before_the_first_rank_writes_it_counts_as_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, watch = Clock(monkeypatch), watch_of(tmp_path)
    assert clock.look_for(watch, 1850) == [(1800.0, False)]


def test_if_rank_0_cannot_write_another_rank_knows_how_far_the_run_has_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 was stopped a moment after its first step, before the thread wrote again."""
    write(tmp_path, moves=2, counts={"step": 1}, slowest={"step": 0.5})
    write(tmp_path, rank=1, moves=40)
    clock, watch = Clock(monkeypatch), watch_of(tmp_path, 7.0, ranks=2)
    assert clock.look_for(watch, 20) == [(7.0, True)]


def test_a_file_that_is_being_written_is_read_again(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / POSITION_FILE.format(0)
    whole = path.read_text()
    for text in ("", whole[:20], "[1]", '{"rank": 0}'):
        path.write_text(text)
        assert hang.read(path, tries=1) == {}
    path.write_text(whole)
    assert hang.read(path)["moves"] == 100


def test_only_the_stack_of_the_main_thread_is_read_from_a_log(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    before = 'Thread 0x1 (most recent call first):\n  File "/old.py", line 1 in f\n'
    new = (
        'Thread 0x00007f (most recent call first):\n  File "/usr/threading.py", line 9 in wait\n\n'
        'Current thread 0x00007e (most recent call first):\n  File "/home/u/net.py", line 3 in forward\n'
        '  File "/x/dtrain/train/rank.py", line 42 in <module>\n'
    )
    log.write_text(before + new)
    assert hang.printed_stack(log, len(before))[0] == "/home/u/net.py:3, in forward"
    assert hang.printed_stack(log, len(before + new)) == []
    assert hang.printed_stack(tmp_path / "none", 0) == []


def test_states_of_processes() -> None:
    assert hang.process_state(os.getpid()) == "running"
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait()
    assert hang.process_state(ended.pid) == "ended"
