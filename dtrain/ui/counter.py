"""How far a command is that works through a list: one line on a terminal, elsewhere a line now and then. On stderr."""

from __future__ import annotations

import sys
import time

EVERY_S = 10.0  # between two lines in a pipe
EVERY_ON_TERMINAL_S = 0.2


class Counter:
    """quiet_s: seconds without a line, for what is usually over by then."""

    def __init__(self, done: int, total: int, unit: str, quiet_s: float = 0.0) -> None:
        self.done, self.total, self.unit, self.first = done, total, unit, done
        self.terminal = sys.stderr.isatty()
        self.began = self.shown_at = time.monotonic()
        self.quiet_s, self.is_shown = quiet_s, False

    def add(self) -> None:
        self.done += 1
        now, ended = time.monotonic(), self.done >= self.total
        if now - self.began < self.quiet_s or (ended and self.quiet_s and not self.is_shown):
            return
        if not ended and now - self.shown_at < (EVERY_ON_TERMINAL_S if self.terminal else EVERY_S):
            return
        self.shown_at, self.is_shown = now, True
        left = (now - self.began) / (self.done - self.first) * (self.total - self.done)
        text = f"{self.done} of {self.total} {self.unit}, {left:.0f} s left"
        end = "" if self.terminal and not ended else "\n"
        print(f"\r\x1b[K{text}" if self.terminal else text, end=end, file=sys.stderr, flush=True)
