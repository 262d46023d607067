"""The supervisor against file servers whose clock is not its own, and beside the logs of a thousand ranks."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path

import pytest

from dtrain.launch import attempt_files, hang
from dtrain.launch.attempt_files import AttemptFiles
from dtrain.launch.failures import first_failure, is_timeout, of_standstill
from dtrain.launch.hang import Standstill
from dtrain.launch.supervisor import Supervisor

# What a rank writes, dated by a file server whose clock is SKEW seconds away from the supervisor's.
RANK = """
import os, time
def write(name, text):
    with open(name, "a") as file:
        file.write(text)
    os.utime(name, (time.time() + {skew},) * 2)
"""
HEALTHY = """
write("logs/rank-0.log", "rank 0")
time.sleep(2.5)
write("summary.json", '{"status": "done"}')
"""


class Ranks(Supervisor):
    """Starts a program in place of the ranks."""

    log_name = "ranks.log"

    def __init__(self, program: str, skew: float, start_s: float) -> None:
        super().__init__(1, 0, 5)
        self.config = {"cluster": {}}
        self.program, self.start_s = RANK.format(skew=skew) + program, start_s

    def command(self, run_dir: Path) -> list[str]:
        return [sys.executable, "-S", "-c", f"import os; os.chdir({str(run_dir)!r})\n{self.program}"]

    def environment(self) -> dict[str, str]:
        return {}

    def killed_ranks(self, log: str) -> list[tuple[int, str]]:
        return []


def resumed_run(run_dir: Path, skew: float) -> Path:
    """A run folder with the log of an earlier attempt, written a moment ago."""
    (run_dir / "logs").mkdir()
    old = run_dir / "logs" / "rank-0.log"
    old.write_text("the attempt before\n")
    os.utime(old, (time.time() + skew - 0.1,) * 2)
    return run_dir


@pytest.mark.parametrize("skew", [-60, 60])
def test_a_healthy_run_is_left_alone_whatever_the_clocks_say(skew: int, tmp_path: Path) -> None:
    ranks = Ranks(HEALTHY, skew, start_s=2)
    assert ranks.supervise(resumed_run(tmp_path, skew)) == 0, ranks.failure
    assert ranks.ranks_began and not ranks.never_started


@pytest.mark.parametrize("skew", [-60, 60])
def test_ranks_that_never_start_are_noticed_whatever_the_clocks_say(skew: int, tmp_path: Path) -> None:
    ranks = Ranks("time.sleep(600)", skew, start_s=0.5)
    assert ranks.supervise(resumed_run(tmp_path, skew)) == 3
    assert ranks.never_started and not ranks.ranks_began, "the log of the attempt before is not a sign of life"


def test_the_first_step_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A SLURM job then reads in the log which network NCCL has chosen."""
    seen: list[Path] = []
    monkeypatch.setattr(Ranks, "on_first_step", lambda self, run_dir: seen.append(run_dir))
    steps = "".join(f"write('metrics.jsonl', '{{\"step\": {step}}}\\n')\n" for step in (1, 2))
    ranks = Ranks(HEALTHY.replace("time.sleep(2.5)\n", "time.sleep(0.3)\n" + steps + "time.sleep(0.5)\n"), 0, start_s=9)
    assert ranks.supervise(resumed_run(tmp_path, 0)) == 0, ranks.failure
    assert seen == [tmp_path] and ranks.stepped

    seen.clear()
    (tmp_path / "second").mkdir()
    assert Ranks(HEALTHY, 0, start_s=9).supervise(resumed_run(tmp_path / "second", 0)) == 0
    assert seen == [], "no step was made"


def test_a_failed_rank_ends_peers_that_wait_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtrain.launch.supervisor.PEERS_S", 0.2)
    note = {"time": 1.0, "rank": 7, "type": "E", "message": "it broke", "exit_code": 3, "log": "l", "traceback": ""}
    fails = f"write('logs/failure-7.json', {json.dumps(note)!r})\ntime.sleep(600)"
    ranks = Ranks(HEALTHY.partition("time.sleep")[0] + fails, -60, start_s=10)
    assert ranks.supervise(resumed_run(tmp_path, -60)) == 3
    assert ranks.failure["message"] == "it broke"


def test_the_first_failure_is_first_by_the_servers_clock(tmp_path: Path) -> None:
    """Node b's clock is an hour behind, so its note claims to be older; the file server saw it later."""
    (tmp_path / "logs").mkdir()
    for rank, said, written in ((0, 5000.0, 100.0), (1, 1400.0, 101.0)):
        path = tmp_path / "logs" / f"failure-{rank}.json"
        path.write_text(json.dumps({"time": said, "rank": rank, "message": f"error of {rank}"}))
        os.utime(path, (written, written))
    found = first_failure(tmp_path)
    assert found and found["rank"] == 0


def test_a_rank_that_left_without_a_note_is_named_before_those_that_lost_it(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for rank in (0, 2):
        note = {"time": 1.0, "rank": rank, "message": "Connection reset by peer", "lost_peer": True}
        (tmp_path / "logs" / f"failure-{rank}.json").write_text(json.dumps(note))
    found = first_failure(tmp_path, ended=[0, 1])
    assert found and (found["rank"], found["type"]) == (1, "early exit")
    assert (first_failure(tmp_path, ended=[0]) or {})["rank"] == 0


def test_torchs_own_timeout_does_not_hide_the_rank_that_hung(tmp_path: Path) -> None:
    assert is_timeout({"type": "RuntimeError", "message": "[…gloo/…] Timed out waiting 1800000ms for recv"})
    assert is_timeout({"type": "SIGABRT", "message": "the process was killed by SIGABRT"})
    assert not is_timeout({"type": "ValueError", "message": "data.path=x: no such file", "lost_peer": False})


def test_a_fault_in_the_watch_for_hangs_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hang, "read", lambda *_, **__: {}["a fault"])
    assert Ranks(HEALTHY, 0, 60).supervise(resumed_run(tmp_path, 0)) == 0
    assert capsys.readouterr().out.count("the watch for hangs failed, and is off now: KeyError") == 1


def test_a_thousand_logs_are_not_listed_while_nothing_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "logs").mkdir()
    for rank in range(1024):
        (tmp_path / "logs" / f"rank-{rank}.log").touch()
    os.utime(tmp_path / "logs", (1e9, 1e9))  # the next change is not in the same tick of the file system's clock
    now = 1000.0
    monkeypatch.setattr(attempt_files.time, "monotonic", lambda: now)
    files = AttemptFiles(tmp_path)
    calls = {"listdir": 0, "stat": 0}

    def counted(name: str) -> None:
        real = getattr(os, name)

        def call(*arguments: object, **more: object) -> object:
            calls[name] += 1
            return real(*arguments, **more)

        monkeypatch.setattr(os, name, call)

    counted("listdir")
    counted("stat")
    for _ in range(100):  # of a second each
        assert not files.has_failed()
        now += 1
    assert calls == {"listdir": 2 + 3, "stat": 100}, "a listing or two at first, then one in 30 s; one stat a second"
    (tmp_path / "logs" / "failure-9.json").write_text("{}")
    assert files.has_failed(), "seen at the next look"


def test_ranks_get_as_many_file_handles_as_the_hard_limit_allows(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = "import resource; limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]\n"
    told = 'write(\'summary.json\', \'{"status": "done", "limit": %d}\' % limit)'
    (tmp_path / "logs").mkdir()
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, before[1]))
        assert Ranks(count + told, 0, start_s=60).supervise(tmp_path) == 0
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 64, "this process is left as it was"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert json.loads((tmp_path / "summary.json").read_text())["limit"] > 64


def test_a_rank_that_all_ranks_report_is_named_only_if_it_is_one(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    note = {"time": 1.0, "rank": 0, "type": "CorruptionError", "lost_peer": False, "exit_code": 3}
    one = "step 50: rank 2 (a) held model.x, which changed in memory"
    several = "step 50: rank 0 (a), rank 1 (b) and rank 2 (c) computed gradient of x twice"
    for message, rank in ((one, 2), (several, 0)):
        (tmp_path / "logs" / "failure-0.json").write_text(json.dumps(note | {"message": message}))
        assert (first_failure(tmp_path) or {})["rank"] == rank


def test_a_rank_that_gloo_aborted_is_not_blamed_for_a_hang(tmp_path: Path) -> None:
    """Rank 0 skipped an all-reduce, so gloo aborted rank 2, which got a tensor of another size."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-2.log").write_text("terminate called after throwing 'gloo::EnforceNotMet'\n")
    usual = [[seq, f"all_reduce [[{(9, 2)[seq % 2]}]]"] for seq in range(10)]
    skipped = [*usual[:9], [9, "all_reduce [[9]]"]]
    position = {"process": "running", "threads": {"MainThread": ["x.py:1, in f"]}}
    groups = [{"0 gloo": {"ranks": [0, 1, 2], "begun": 9, "open": [], "calls": calls}} for calls in (skipped, usual)]
    positions = {0: position | {"groups": groups[0]}, 1: position | {"groups": groups[1]}, 2: {"process": "ended"}}
    found = Standstill(5.0, 5.0, True, [2], False, "rank 2 has ended", positions)
    said = of_standstill(tmp_path, found)
    assert (said["type"], said["rank"]) == ("collective mismatch", 0)
    (tmp_path / "logs" / "rank-2.log").write_text("")
    assert of_standstill(tmp_path, found)["type"] == "hang"
