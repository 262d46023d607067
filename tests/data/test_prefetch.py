"""Reading ahead: the same batches however they are read, errors that arrive, processes that end when they should."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from dtrain.data import prefetch
from dtrain.data.adapt import adapted
from dtrain.data.loader import Loader
from dtrain.runs.protocol import STOP_SIGNALS, short_tmp
from dtrain.util import disk_space
from tests.data.test_loader import Drawn, Numbers
from tests.patience import patience

FORK = multiprocessing.get_context("fork")


@contextmanager
def opened(*arguments: Any, **settings: Any) -> Iterator[Loader]:
    loader = Loader(*arguments, **settings)
    try:
        yield loader
    finally:
        loader.close()


def same(ours: tuple[torch.Tensor, torch.Tensor], theirs: tuple[torch.Tensor, torch.Tensor]) -> bool:
    return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(ours, theirs, strict=True))


@settings(max_examples=8, deadline=None)
@given(
    st.sampled_from([Numbers, Drawn]), st.integers(1, 40), st.integers(1, 5), st.integers(1, 2), st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 200), st.integers(1, 5)), min_size=1, max_size=3),
)  # fmt: skip
def test_processes_give_what_the_thread_gives(
    kind: type[Numbers], size: int, per_rank: int, ranks: int, workers: int, runs: list[tuple[int, int]]
) -> None:
    """From any position on, after any jump, on every data rank, bit for bit."""
    batch = per_rank * ranks
    for rank in range(ranks):
        place = (kind(size), batch, 11, rank, ranks)
        with opened(*place) as plain, opened(*place, workers=workers) as loader:
            for start, count in runs:
                for position in range(start, start + count * batch, batch):
                    assert same(loader.batch(position), plain.batch(position))


class Broken(Numbers):
    """Sample 4 cannot be read."""

    def __init__(self, error: Callable[[], Exception]) -> None:
        super().__init__(20)
        self.error = error

    def batch(self, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        if 4 in indices:
            raise self.error()
        return super().batch(indices)


class Untold(Exception):
    """Cannot be pickled: it is made of two arguments and remembers one."""

    def __init__(self, path: str, line: int) -> None:
        super().__init__(f"{path} is torn")


def test_an_error_in_a_process_arrives_as_it_was() -> None:
    cases: list[tuple[Callable[[], Exception], Exception]] = [
        (lambda: ValueError("data.path=x: torn\n  fix: copy it"), ValueError("data.path=x: torn\n  fix: copy it")),
        (lambda: OSError(28, "disk full"), OSError(28, "disk full")),
        (lambda: Untold("a.png", 3), RuntimeError("Untold: a.png is torn")),
    ]
    for error, expected in cases:
        with opened(Broken(error), 4, seed=0, shuffle=False, workers=1) as loader:
            loader.batch(0)
            with pytest.raises(type(expected)) as caught:
                loader.batch(4)
            assert str(caught.value) == str(expected)
            assert type(expected) is RuntimeError or "raise self.error()" in caught.value.__notes__[0], (
                "where it happened"
            )
            assert loader.batch(8)[0].tolist() == [8, 9, 10, 11], "the next is not lost"


def test_a_process_that_dies_is_not_waited_for() -> None:
    class Deadly(Numbers):
        def batch(self, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
            if 4 in indices:
                os.kill(os.getpid(), signal.SIGKILL)  # out of memory
            return super().batch(indices)

    with opened(Deadly(20), 4, seed=0, shuffle=False, workers=1) as loader, pytest.raises(RuntimeError, match="worker"):
        loader.batch(0)
        loader.batch(4)


def test_processes_leave_the_models_draws_alone() -> None:
    before = torch.get_rng_state()
    with opened(Numbers(20), 4, seed=0, workers=1) as loader:
        loader.batch(0)
        loader.batch(8)  # a jump
    assert torch.equal(torch.get_rng_state(), before)


def children_of(loader: Loader) -> list[int]:
    assert isinstance(loader._ahead, prefetch.Processes)
    return [child.pid for child in loader._ahead._children]


def gone(pids: list[int], seconds: float) -> bool:
    """Whether none of them runs, before the seconds are over. Who is dead but not asked after yet is gone, too."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(running(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_stop_signals_do_not_reach_the_processes() -> None:
    with opened(Numbers(100), 4, seed=0, shuffle=False, workers=2) as loader:
        loader.batch(0)
        pids = children_of(loader)
        assert len(pids) == 2
        for pid in pids:
            for number in STOP_SIGNALS:
                os.kill(pid, number)
        for position in range(4, 60, 4):  # more than was ready before the signals
            assert loader.batch(position)[0].tolist() == list(range(position, position + 4))
        assert children_of(loader) == pids and all(running(pid) for pid in pids)
    assert gone(pids, 0.1)
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & set(STOP_SIGNALS), "this process hears them as before"


class Endless(Numbers):
    """Sample 4 is never read to its end."""

    def batch(self, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        if 4 in indices:
            time.sleep(1000)
        return super().batch(indices)


def _rank(connection: Any, start_s: float) -> None:
    started = prefetch._on_start
    prefetch._on_start = lambda worker: (time.sleep(start_s * worker), started(worker))[1]
    loader = Loader(Endless(20), 4, seed=0, shuffle=False, workers=2)
    loader.batch(0)
    connection.send(children_of(loader))
    time.sleep(1000)


@pytest.mark.parametrize("start_s", [0, 0.5], ids=["", "that-had-only-begun"])
def test_a_killed_rank_leaves_no_process_behind(start_s: float) -> None:
    here, there = FORK.Pipe()
    rank = FORK.Process(target=_rank, args=(there, start_s))
    rank.start()
    pids = here.recv()
    assert len(pids) == 2 and all(running(pid) for pid in pids)
    rank.kill()
    rank.join()
    try:
        assert gone(pids, patience(2))  # torch's own watch would take 5 s, and would not end the one that reads
    finally:
        for pid in filter(running, pids):
            os.kill(pid, signal.SIGKILL)


def test_a_program_ends_though_it_did_not_close() -> None:
    code = """
import torch
from dtrain.data.loader import Loader
from tests.data.test_loader import Numbers
loader = Loader(Numbers(20), 4, seed=0, workers=2)
print(loader.batch(0)[0].shape)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=patience(60))
    assert run.returncode == 0 and "[4]" in run.stdout, run.stderr
    assert not run.stderr


def test_datasets_of_one_process_are_read_one_at_a_time() -> None:
    """Training is read ahead while evaluation reads: what the two share need not be made for that."""
    inside, overlaps = threading.Semaphore(1), []

    class Shared(Numbers):
        def batch(self, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
            overlaps.append(not inside.acquire(blocking=False))
            time.sleep(0.005)
            inside.release()
            return super().batch(indices)

    with opened(Shared(100), 4, seed=0) as train, opened(Shared(100), 4, seed=0, shuffle=False) as val:
        for step in range(6):
            train.batch(step * 4)
            val.batch(step * 4)
    assert len(overlaps) >= 12 and not any(overlaps)


def test_processes_read_while_the_step_computes() -> None:
    class Slow(Numbers):
        def batch(self, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
            time.sleep(0.2)
            return super().batch(indices)

    with opened(Slow(100), 4, seed=0, workers=1) as loader:
        loader.batch(0)
        waits = []
        for step in range(1, 6):
            time.sleep(0.4)
            began = time.perf_counter()
            loader.batch(step * 4)
            waits.append(time.perf_counter() - began)
    assert sorted(waits)[2] < 0.15, "what a step waits for is not the reading"


class Counted(Numbers):
    """Counts how often each sample is read, in whatever process."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.counts = torch.zeros(size, dtype=torch.int64).share_memory_()

    def batch(self, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        self.counts[indices] += 1
        return super().batch(indices)


@pytest.mark.parametrize("workers", [0, 2])
def test_validation_is_read_as_far_as_it_is_asked_for(workers: int) -> None:
    """Each evaluation begins again at 0. Once the processes read on and on, and all of that was thrown away."""
    dataset = Counted(22)
    with opened(dataset, 2, seed=0, shuffle=False, workers=workers) as loader:
        for _ in range(5):
            for position in range(0, 8, 2):
                assert loader.batch(position)[0].tolist() == [position, position + 1]
        assert [loader.batch(p)[0][0].item() for p in (8, 10, 12)] == [8, 10, 12], "and further if it is"
        if workers:
            assert dataset.counts[:8].tolist() == [5] * 8
        for _ in range(3):
            assert [loader.batch(p)[0][0].item() for p in range(0, 22, 2)] == list(range(0, 22, 2))
        assert loader.batch(22)[0].tolist() == [0, 1], "past the end, it begins again"
    if workers:
        assert dataset.counts.max() <= 5 + 3 + 2


@pytest.mark.parametrize("workers", [0, 1])
def test_nothing_is_read_past_the_end_of_validation(workers: int) -> None:
    dataset = Counted(7)
    with opened(dataset, 2, seed=0, shuffle=False, workers=workers) as loader:
        for _ in range(3):
            for position in (0, 2, 4):
                loader.batch(position)
    assert dataset.counts.tolist() == [3] * 6 + [0]


LOADER = (
    "from dtrain.data.loader import Loader; from tests.data.test_loader import Numbers\n"
    "loader = Loader(Numbers(8), 4, 0, workers=2); assert len(loader.batch(0)[0]) == 4; loader.close()\n"
)
SERVER = "from dtrain.commands.verify import world; world.start_server()\n"


@pytest.mark.parametrize("code", [LOADER, SERVER])
def test_a_long_tmpdir_is_no_place_for_sockets(code: str, tmp_path: Path) -> None:
    """Of more than the 107 bytes that a socket's path may have. A batch that cannot be sent is waited for for ever."""
    long = tmp_path / ("a-job-of-a-cluster-" * 6)
    long.mkdir()
    code += "import multiprocessing.util; print(multiprocessing.util.get_temp_dir())"
    found = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"TMPDIR": str(long)}, cwd=Path(__file__).parents[2],
        capture_output=True, text=True, timeout=patience(60),
    )  # fmt: skip
    assert found.returncode == 0 and len(found.stdout) < 90 and "/pymp-" in found.stdout, found.stderr
    assert not Path(found.stdout.strip()).exists()


def test_nowhere_a_short_folder_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("long" * 20)))
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ValueError, match=r"TMPDIR=.*longlong: .*\n  fix: set a shorter TMPDIR"):
        short_tmp()


def test_a_full_shared_memory_is_refused_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_space, "shortage", lambda path, needed=1: "full. Fix: …")
    samples = adapted("mine", DataLoader(list(range(8))))
    with pytest.raises(ValueError, match=r"data=mine: is read in processes .*/dev/shm.*\n  fix: a larger") as it:
        Loader(samples, 4, 0)
    assert "loader_workers" not in str(it.value), "no setting of it would help"
