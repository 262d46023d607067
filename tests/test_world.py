"""Signals around a world; its ranks are tested wherever something is trained."""

from __future__ import annotations

import os
import signal

from dtrain.world import held_back


def test_a_signal_that_was_held_back_comes_at_the_end() -> None:
    came = []
    before = signal.signal(signal.SIGUSR1, lambda *_: came.append("signal"))
    try:
        with held_back(signal.SIGUSR1):
            os.kill(os.getpid(), signal.SIGUSR1)
            came.append("end of the block")
        assert came == ["end of the block", "signal"]
    finally:
        signal.signal(signal.SIGUSR1, before)
