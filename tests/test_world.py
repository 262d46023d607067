"""Signals around a world; its ranks are tested wherever something is trained."""

from __future__ import annotations

import os
import signal

import pytest

from dtrain.world import held_back


def test_a_signal_that_was_held_back_comes_at_the_end() -> None:
    done = False
    with pytest.raises(KeyboardInterrupt), held_back(signal.SIGINT):
        os.kill(os.getpid(), signal.SIGINT)
        done = True
    assert done
