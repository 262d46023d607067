"""A run whose output nobody reads any more: `| head -3`, or `| tee log` after Ctrl-C, which ends tee first.

It continues. Once it was asked to stop, the rest of its output goes to the terminal: whether it is saved, and how to
resume it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

_unread: set[str] = set()  # of stdout and stderr
_stopping = False


class Unbroken:
    """A stream that does not raise when its reader has gone."""

    def __init__(self, name: str, stream: TextIO):
        self.name, self.stream = name, stream
        self.pending = ""  # written since the last flush: a lost reader is noticed only there

    def write(self, text: str) -> int:
        self.pending += text
        try:
            self.stream.write(text)
        except BrokenPipeError:
            self._lose()
        return len(text)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except BrokenPipeError:
            self._lose()
        if self.pending and self.name in _unread and _stopping:
            to_terminal(self.pending)
        self.pending = ""

    def _lose(self) -> None:
        """Point the file descriptor at /dev/null: what is still in the buffer, and all that follows, goes there."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.stream.fileno())
        os.close(nowhere)
        _unread.add(self.name)
        if self.name == "stdout" and not _stopping:
            rule = "nobody reads the output any more; this does not end the run (dtrain watch shows it)"
            print(f"warning: {rule}", file=sys.stderr, flush=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def unbroken_output() -> Iterator[None]:
    """Let a run continue when nobody reads its output any more."""
    global _stopping
    typed, _stopping = (sys.stdout, sys.stderr), False
    sys.stdout, sys.stderr = Unbroken("stdout", sys.stdout), Unbroken("stderr", sys.stderr)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stdout, sys.stderr = typed


def stopping() -> None:
    """Say from now on on the terminal what nobody reads elsewhere. A signal handler calls this."""
    global _stopping
    _stopping = True


def to_terminal(text: str) -> None:
    """Print where the user typed Ctrl-C, if there is such a place."""
    try:
        terminal = os.open("/dev/tty", os.O_WRONLY | os.O_NOCTTY)
    except OSError:
        return
    with os.fdopen(terminal, "w") as stream:
        stream.write(text)
