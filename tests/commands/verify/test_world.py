"""Around a world: signals, and what its ranks find. They are tested wherever something is trained."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dtrain.commands.verify.world import World, held_back
from tests.patience import patience, until
from tests.world import ROOT, start_server


def test_a_signal_that_was_held_back_comes_at_the_end() -> None:
    came, over = [], threading.Event()
    other = threading.Thread(target=over.wait)  # the kernel gives a signal to any thread that does not block it
    other.start()
    before = signal.signal(signal.SIGUSR1, lambda *_: came.append("signal"))
    try:
        with held_back(signal.SIGUSR1):
            os.kill(os.getpid(), signal.SIGUSR1)
            came.append("end of the block")
        assert came == ["end of the block", "signal"]
        os.kill(os.getpid(), signal.SIGUSR1)
        assert len(came) == 3, "the handler of before is back"
    finally:
        signal.signal(signal.SIGUSR1, before)
        over.set()
        other.join()


def test_ranks_find_what_takes_long_imported_and_passed_over_by_collections() -> None:
    if torch.version.cuda or torch.version.hip:
        pytest.skip("DeepSpeed is left to the ranks, which may find a GPU")
    # in a process of its own: the fork server of this one may be that of a test of `dtrain verify strategies=ddp`
    code = (
        "from tests.commands.verify.test_world import look_around\nfrom tests.world import spawn\nspawn(1, look_around)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=patience(120))


def look_around() -> None:
    assert {"deepspeed", "torch._inductor.compile_fx"} <= set(sys.modules)
    assert gc.isenabled() and gc.get_freeze_count() > 100_000


def test_no_other_program_can_take_the_port_of_a_world(tmp_path: Path) -> None:
    start_server()
    with World(2, meet_late, tmp_path) as ranks:
        until(lambda: (tmp_path / "port").exists(), "rank 0's port")
        port = int((tmp_path / "port").read_text())
        with pytest.raises(OSError, match="in use"):
            socket.create_server(("127.0.0.1", port))
        (tmp_path / "go").touch()
        assert ranks.join() == [0, 0]


def meet_late(folder: Path) -> int:
    if os.environ["RANK"] == "0":
        (folder / "port.new").write_text(os.environ["MASTER_PORT"])
        (folder / "port.new").rename(folder / "port")
    while not (folder / "go").exists():
        time.sleep(0.01)
    dist.init_process_group("gloo")
    ranks = torch.ones(())
    dist.all_reduce(ranks)
    return 0 if ranks == 2 else 1
