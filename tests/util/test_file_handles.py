"""Limits of file handles, as shells and containers set them: real processes with a low one."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from multiprocessing import forkserver
from pathlib import Path

import pytest

from dtrain.commands.verify.world import World, start_server
from dtrain.util import file_handles
from tests.world import ROOT, SMALL


def hold_hands() -> None:
    """What a rank opens: the group of the training, and the one of the saves beside it."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    beside = dist.new_group(backend="gloo")
    dist.all_reduce(torch.ones(1), group=beside)
    held = len(os.listdir("/proc/self/fd"))
    assert dist.get_world_size() < held <= file_handles.needed(dist.get_world_size()), held
    dist.barrier()


def limited(soft: int, hard: int, *command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"PYTHONPATH": f"{ROOT}"}
    words = ["sh", "-c", f'ulimit -Sn {soft} && ulimit -Hn {hard} && exec "$@"', "sh", sys.executable, *command]
    return subprocess.run(words, cwd=cwd, env=environ, capture_output=True, text=True)


def test_ranks_raise_a_low_soft_limit() -> None:
    """Rank 0 of 8 holds 49 handles, and the server that it is forked from allows 40."""
    start_server()
    server: int = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    before = resource.prlimit(server, resource.RLIMIT_NOFILE, (40, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    try:
        assert World(8, hold_hands).join() == [0] * 8
    finally:
        resource.prlimit(server, resource.RLIMIT_NOFILE, before)


def test_a_hard_limit_that_is_too_low_is_refused_with_the_number(tmp_path: Path) -> None:
    words = [*SMALL, "train.global_batch_size=32", "cluster.processes=32", "run_dir=run"]
    done = limited(100, 100, str(ROOT / "launch.py"), *words, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "cluster.processes=32: a rank of 32 needs 160 file handles, and the hard limit is 100" in done.stderr
    assert "ulimit -Hn 160" in done.stderr and not (tmp_path / "run").exists()
    done = limited(100, 100, "-m", "dtrain", "preflight", *words, cwd=tmp_path)
    assert done.returncode == 4 and "a rank of 32 needs 160 file handles" in done.stdout, done.stdout + done.stderr


def test_the_limit_is_raised_to_the_hard_one_and_never_lowered() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        file_handles.raise_limit()
        allowed = file_handles.hard_limit() or file_handles.MOST
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(allowed, file_handles.MOST), before[1])
        file_handles.raise_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(allowed, file_handles.MOST)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(("ranks", "handles"), [(1, 67), (1024, 3136)])
def test_how_many_a_rank_needs(ranks: int, handles: int) -> None:
    assert file_handles.needed(ranks) == handles


RANK = """
import resource, runpy, sys
from dtrain.train import loop, process
process.redirect_output = lambda run_dir, rank: None
loop.main = lambda run_dir: print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], flush=True) or 0
sys.argv = ["rank", "run"]
runpy.run_module("dtrain.train.rank", run_name="__main__")
"""


def test_a_rank_of_srun_raises_the_limit_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """srun's ranks run on other nodes, and get the limit of the shell that submitted the job."""
    monkeypatch.delenv("RANK", raising=False)
    for name in ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES"):
        monkeypatch.setenv(name, "1")
    for name in ("SLURM_PROCID", "SLURM_LOCALID"):
        monkeypatch.setenv(name, "0")
    done = limited(100, 300, "-c", RANK, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.split() == ["300"], done.stdout + done.stderr
