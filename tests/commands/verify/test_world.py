"""Around a world: signals, and what its ranks find. They are tested wherever something is trained."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading

import pytest
import torch

from dtrain.commands.verify.world import held_back
from tests.world import spawn


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
    spawn(1, look_around)


def look_around() -> None:
    assert {"deepspeed", "torch._inductor.compile_fx"} <= set(sys.modules)
    assert gc.isenabled() and gc.get_freeze_count() > 100_000
