"""Which rank is named as slow, why, and where that is shown."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dtrain.train import straggler_judge
from dtrain.train.rank_times import FIELDS, RankTimes, cpu_stat, throttled_s
from dtrain.train.straggler_judge import AGAIN, FEW, OF, Judge, Verdict, exposed_comm_s, median_of_others
from tests.patience import patience
from tests.world import ROOT, SMALL, make_run, metrics, summary, train

# ---- the judgement ---------------------------------------------------------------------------------------------


def window(own: list[float], **parts: list[float]) -> np.ndarray:
    """The times of all ranks in a window. The slowest rank does not wait; the others wait for it."""
    times = np.zeros((len(own), len(FIELDS)))
    times[:, FIELDS.index("own")] = own
    times[:, FIELDS.index("wall")] = max(own)
    for name, values in parts.items():
        times[:, FIELDS.index(name)] = values
    return times


def fed(judge: Judge, windows: list[np.ndarray], steps: int = 5, first: int = 0) -> list[tuple[int, Verdict]]:
    """The judge's changes, each with the number of its window."""
    found = []
    for i, times in enumerate(windows):
        found += [(i, verdict) for verdict in judge.add(first + i * steps, first + (i + 1) * steps, times)]
    return found


@given(arrays(float, st.integers(2, 9), elements=st.floats(0, 9)))
def test_median_of_others(values: np.ndarray) -> None:
    expected = [np.median(np.delete(values, i)) for i in range(len(values))]
    assert np.allclose(median_of_others(values), expected)


@given(
    size=st.integers(2, 9), data=st.data(), slowdown=st.floats(1.8, 20), base=st.floats(0.001, 10),
    seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_a_slow_rank_is_named_after_a_few_windows(
    size: int, data: st.DataObject, slowdown: float, base: float, seed: int
) -> None:
    who = data.draw(st.integers(0, size - 1))
    draw, judge = np.random.default_rng(seed), Judge([0] * size)

    def times(factor: float) -> np.ndarray:
        own, blocked = base * draw.uniform(0.93, 1.07, size), np.zeros(size)
        blocked[who] = (factor - 1) * own[who]
        return window(list(own + blocked), blocked=list(blocked))

    assert not fed(judge, [times(1.0) for _ in range(20)])
    ((number, verdict),) = fed(judge, [times(slowdown) for _ in range(5)], first=100)
    assert verdict.rank == who and number == FEW - 1
    assert verdict.since == 101 and verdict.until is None
    assert abs(verdict.slowdown / slowdown - 1) < 0.15


@given(size=st.integers(2, 16), seed=st.integers(0, 2**32 - 1), noise=st.floats(0, 0.12), base=st.floats(0.001, 10))
@settings(max_examples=30)
def test_noise_names_nobody(size: int, seed: int, noise: float, base: float) -> None:
    draw, judge = np.random.default_rng(seed), Judge([0] * size)
    windows = [window(list(base * np.exp(noise * draw.standard_normal(size)))) for _ in range(400)]
    assert not fed(judge, windows)


@given(size=st.integers(2, 8), seed=st.integers(0, 2**32 - 1), lasting=st.integers(1, 20))
@settings(max_examples=12)
def test_an_overloaded_machine_names_nobody(size: int, seed: int, lasting: int) -> None:
    """All ranks compete for CPUs, some for longer than others, and that lasts for several windows."""
    draw, judge, windows = np.random.default_rng(seed), Judge([0] * size), []
    for _ in range(40):
        delay = draw.uniform(0.3, 1.0, size)
        for _ in range(lasting):
            now = list(delay * draw.uniform(0.9, 1.1, size))
            windows.append(window([0.1 * (1 + d) for d in now], delay=[0.1 * d for d in now]))
    assert not fed(judge, windows)


def test_a_rank_with_a_busy_neighbour_is_named_where_the_others_have_none() -> None:
    times = window([1.0, 1.05, 2.0, 1.0], delay=[0.01, 0.03, 1.0, 0.02])
    ((_, verdict),) = fed(Judge([0] * 4), [times] * 4)
    assert (verdict.rank, verdict.cause) == (2, "neighbour")


@pytest.mark.parametrize(
    "parts, cause",
    [
        ({"data": [0.0, 0.9]}, "data"),
        ({"delay": [0.0, 0.9], "throttled": [0.0, 0.8]}, "quota"),
        ({"delay": [0.0, 0.9]}, "neighbour"),
        ({"blocked": [0.0, 0.9]}, "blocked"),
        ({"stopped": [0.1, 0.9]}, "stopped"),
        ({}, "work"),
        ({"data": [0.0, 0.4], "blocked": [0.0, 0.3]}, ""),
    ],
)
def test_the_cause_is_what_grew(parts: dict[str, list[float]], cause: str) -> None:
    ((_, verdict),) = fed(Judge([0, 0]), [window([1.0, 2.0], **parts)] * 4)
    assert (verdict.rank, verdict.cause) == (1, cause)
    why = straggler_judge.CAUSES[cause].format(rank=1)
    assert verdict.text("node7") == f"rank 1 (node7) is 2.0x as slow as the others since step 1: {why}"


def test_more_cpu_time_must_last_longer() -> None:
    """A busy hyperthread beside a rank makes it slower for some seconds; a slower CPU does for good."""
    usual, slow = window([0.25, 0.25]), window([0.4, 0.25])
    assert not fed(Judge([0, 0]), [usual] * 10 + [slow] * 6 + [usual] * 10)
    ((number, verdict),) = fed(Judge([0, 0]), [slow] * 60)
    assert verdict.rank == 0 and verdict.cause == "work" and 20 < number * 5 * 0.4 < 60
    ((number, verdict),) = fed(Judge([0, 0]), [window([0.5, 0.25])] * 10)
    assert verdict.rank == 0 and number == FEW - 1


def test_evenly_slow_ranks_are_not_named() -> None:
    judge = Judge([0] * 3)
    assert not fed(judge, [window([1.0] * 3)] * 10 + [window([5.0] * 3, blocked=[4.0] * 3)] * 50)


def test_one_slow_window_is_counted_but_not_named() -> None:
    judge, even, once = Judge([0] * 3), window([1.0] * 3), window([1.0, 30.0, 1.0])
    assert not fed(judge, [*[even] * 5, once, *[even] * 8, once, *[even] * 8])
    assert judge.one_offs == [0, 2, 0]
    assert [rank["one_off"] for rank in judge.medians()] == [0, 2, 0]


def test_a_rank_that_recovers_is_reported_once_and_may_be_named_again() -> None:
    judge, even, slow = Judge([0] * 3), window([1.0] * 3), window([1.0, 1.0, 3.0])
    found = fed(judge, [slow] * 10 + [even] * 10 + [slow] * 10)
    assert [number for number, _ in found] == [FEW - 1, 10 + AGAIN - 1, 20 + FEW - 1]
    first, second = judge.verdicts
    assert (first.since, first.until, second.since, second.until) == (1, 50, 101, None)
    assert "was 3.0x as slow as the others from step 1 to 50" in first.text("a")


def test_a_rank_that_is_slow_now_and_then_does_not_fill_the_log() -> None:
    judge, even, slow = Judge([0] * 2), window([1.0, 1.0]), window([1.0, 3.0])
    assert len(fed(judge, ([slow] * OF + [even] * AGAIN) * 50)) == straggler_judge.MOST_EVENTS


def test_a_little_slower_is_named_only_if_it_lasts() -> None:
    times = window([1.0, 1.0, 1.35])
    ((number, verdict),) = fed(Judge([0] * 3), [times] * 100, steps=1)
    assert verdict.rank == 2 and 30 < number < 45  # windows of 1.35 s
    assert not fed(Judge([0] * 3), ([times] * 10 + [window([1.0] * 3)] * 10) * 10, steps=1)


def test_what_costs_the_run_little_is_not_named() -> None:
    """The slow rank computes 3 times as long as the others, but most of the step is spent in collectives."""
    times = window([0.01, 0.03])
    times[:, FIELDS.index("wall")] = 1.0
    assert not fed(Judge([0, 0]), [times] * 100)


def test_a_window_with_a_save_in_the_background_is_not_judged() -> None:
    assert not fed(Judge([0, 0]), [window([1.0, 3.0], saving=[1.0, 0.0])] * 20)


def test_stages_of_a_pipeline_may_have_different_work() -> None:
    judge = Judge([0, 1, 2])
    assert not fed(judge, [window([1.0, 2.0, 4.0])] * 50)
    ((_, verdict),) = fed(judge, [window([1.0, 4.0, 4.0], blocked=[0.0, 2.0, 0.0])] * 4)
    assert (verdict.rank, verdict.cause) == (1, "blocked") and abs(verdict.slowdown - 2) < 1e-9
    same_stage = Judge([0, 0, 1, 1])
    assert not fed(same_stage, [window([1.0, 1.0, 3.0, 3.0])] * 50)
    ((_, verdict),) = fed(same_stage, [window([1.0, 2.0, 3.0, 3.0])] * 4)
    assert (verdict.rank, verdict.cause) == (1, "work")


def test_a_slow_host_whose_gpu_is_busy_anyway_is_not_named() -> None:
    times = window([0.1, 0.4])
    times[:, FIELDS.index("wall")] = 1.0
    assert not fed(Judge([0, 0], on_gpu=True), [times] * 20)
    times[:, FIELDS.index("wall")] = 0.42
    assert fed(Judge([0, 0], on_gpu=True), [times] * 20)


def test_communication_is_known_where_ranks_do_not_compete_for_cores() -> None:
    quiet = window([0.9, 1.0], wall=[1.2, 1.2], delay=[0.5, 0.1])
    crowded = window([0.9, 1.2], wall=[1.2, 1.2], delay=[0.0, 0.4])  # all that is not computing counts as delay
    assert exposed_comm_s(quiet, on_gpu=False) == pytest.approx(0.2)
    assert exposed_comm_s(quiet, on_gpu=True) is None and exposed_comm_s(crowded, on_gpu=False) is None
    judge = Judge([0, 0])
    for times in (crowded, quiet, crowded):
        judge.add(0, 5, times)
    assert judge.exposed_comm_s() == 0.2
    assert Judge([0, 0]).exposed_comm_s() is None


def test_a_long_run_is_remembered_in_bounded_memory() -> None:
    judge = Judge([0, 0])
    fed(judge, [window([1.0, 1.1], data=[0.2, 0.3])] * 3000)
    assert len(judge._history) <= straggler_judge.KEPT
    assert judge.medians()[1] == {"rank": 1, "data_s": 0.3, "own_s": 1.1, "wait_s": 0.0, "one_off": 0}


# ---- the measurement -------------------------------------------------------------------------------------------


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> RankTimes:
    monkeypatch.setattr("dtrain.train.rank_times.SAMPLE_S", 0.01)
    before = signal.getsignal(signal.SIGCONT)
    made = RankTimes()
    yield made  # type: ignore[misc]
    made.end()
    signal.signal(signal.SIGCONT, before)


def test_a_sleep_is_own_time_and_a_lock_is_waiting(times: RankTimes, caplog: pytest.LogCaptureFixture) -> None:
    times.start_step()
    time.sleep(0.5)
    times.end_step(0.25)
    wall, own, data, _, _, blocked, stopped, saving = times.take()
    assert blocked > 0.5 * (wall - data) and own > 0.5 * wall and data == 0.25
    assert (stopped, saving) == (0, 0)
    assert "test_stragglers.py" in caplog.text  # where it sleeps
    for _ in range(3):  # earlier samples count for less and less
        times.start_step()
        threading.Lock().acquire() and threading.Event().wait(0.5)
        times.end_step(0.0)
        wall, own, _, _, _, blocked, _, _ = times.take()
    assert wall - own > 0.5 * wall and blocked < 0.5 * wall


def test_on_a_gpu_the_wait_for_results_is_not_own_time() -> None:
    times = RankTimes(on_gpu=True)
    for _ in range(2):
        times.start_step()
        times.end_step(0.25, 7.0)
    wall, own, data, *_ = times.take()
    assert times.steps == 0 and data == 0.25
    assert wall - own == pytest.approx(7.0) and own >= 0.25


def test_stops_are_own_time(tmp_path: Path) -> None:
    code = (
        "import threading, time; from dtrain.train.rank_times import RankTimes\n"
        "times = RankTimes(); print('ready', flush=True); times.start_step(); end = time.perf_counter() + 3\n"
        "while time.perf_counter() < end: threading.Event().wait(0.01)\n"
        "times.end_step(0.0); print(times.take()[6])"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "ready\n"
    while process.poll() is None:
        for number in (signal.SIGSTOP, signal.SIGCONT):
            os.kill(process.pid, number)
            time.sleep(0.1)
    assert float(process.stdout.read()) > 0.5


def test_the_quota_of_a_cgroup_is_found(tmp_path: Path) -> None:
    (tmp_path / "cpu,cpuacct" / "job").mkdir(parents=True)
    (tmp_path / "cpu,cpuacct" / "job" / "cpu.stat").write_text("nr_periods 9\nthrottled_time 1500000000\n")
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "cpu.stat").write_text("usage_usec 5\nthrottled_usec 2500000\n")
    cgroups = tmp_path / "cgroup"
    cgroups.write_text("4:memory:/other\n1:cpu,cpuacct:/job\n0::/\n")
    assert throttled_s(cpu_stat(cgroups, tmp_path)) == 1.5
    cgroups.write_text("0::/job\n")
    assert throttled_s(cpu_stat(cgroups, tmp_path)) == 2.5
    cgroups.write_text("nonsense\n")
    assert cpu_stat(cgroups, tmp_path) is None and throttled_s(None) == throttled_s(tmp_path / "none") == 0


# ---- a real run ------------------------------------------------------------------------------------------------

SLOW = """
import os, time
from dtrain.models.gpt2 import GPT2

class Slow(GPT2):
    def forward(self, inputs, targets=None):
        if os.environ["RANK"] == "1":
            time.sleep(0.2)
        return super().forward(inputs, targets)
"""


def test_a_slow_rank_is_shown_during_the_run_and_after_it(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    command = [sys.executable, str(ROOT / "launch.py"), *SMALL, "run_dir=run", "model._target_=slow.Slow"]
    command += ["trust=[slow]", "train.steps=40", "cluster.processes=2"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    found = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=patience(60))
    assert found.returncode == 0, found.stdout + found.stderr
    run = tmp_path / "run"
    (named,) = [row for row in metrics(run) if "slow_rank" in row]
    assert (named["slow_rank"], named["slow_cause"]) == (1, "blocked") and named["step"] <= 33
    assert found.stdout.count("x as slow as the others since step") == 2  # above the progress, and at the end
    (slow,) = summary(run)["slow_ranks"]
    assert (slow["rank"], slow["until"]) == (1, None)
    fast, late = summary(run)["ranks"]
    assert fast["own_s"] < late["own_s"] and fast["wait_s"] > late["wait_s"]
    assert named["slow_text"] in (run / "logs" / "rank-0.log").read_text()
    assert "slow.py:8, in forward, outside collectives" in (run / "logs" / "rank-1.log").read_text()
    status = subprocess.run(
        [sys.executable, "-m", "dtrain", "status", "run"],
        cwd=tmp_path, env=env | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=patience(60),
    )  # fmt: skip
    assert "slow rank" in status.stdout and slow["text"] in status.stdout


def test_one_rank_has_nobody_to_compare_with(tmp_path: Path) -> None:
    run = make_run(tmp_path, "train.steps=12")
    assert train(run, 1) == [0]
    assert not {"ranks", "slow_ranks"} & summary(run).keys()
    assert not any("rank_own_s" in row for row in metrics(run))
