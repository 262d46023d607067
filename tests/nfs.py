"""A network file system as one process meets it: what was not there is still not there, for half a minute.

Each client of NFS keeps negative entries: a path that it asked for in vain is answered from memory, although another
client has made it since. A change of the client's own to a folder makes it ask the server again. Inside of `mounted`
this process is such a client of everything below a folder, in what Python does there (os, open, pathlib, shutil).
Simulated: two kernels and a server would be the real thing.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

SECONDS = 30.0  # acdirmin, Linux's default
O_TMPFILE = getattr(os, "O_TMPFILE", 0)


class Client:
    """Which paths this process believes not to exist, and until when."""

    def __init__(self, root: Path, clock: Callable[[], float]) -> None:
        self.root, self.clock = os.path.abspath(root), clock
        self.missing: dict[str, float] = {}

    def path(self, name: Any) -> str | None:
        """The path, if it is one of ours; a number is a file that is open already."""
        if isinstance(name, int) or name is None:
            return None
        path = os.path.abspath(os.fsdecode(name))
        return path if path.startswith(f"{self.root}/") else None

    def look_up(self, path: str, creates: bool = False) -> None:
        """As the kernel walks: every folder on the way counts. What is about to be made need not be there."""
        while path != self.root:
            if not creates and self.missing.get(path, 0) > self.clock():
                raise FileNotFoundError(errno.ENOENT, "no such file, says the cache", path)
            path, creates = os.path.dirname(path), False

    def asks(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def ask(name: Any = ".", *arguments: Any, **more: Any) -> Any:
            path = self.path(name)
            if path is None:
                return function(name, *arguments, **more)
            self.look_up(path)
            try:
                return function(name, *arguments, **more)
            except FileNotFoundError:
                self.remember(path)
                raise

        return ask

    def remember(self, path: str) -> None:
        """What is missing is the first folder on the way that is not there."""
        parts = Path(path).relative_to(self.root).parts
        for i in range(len(parts)):
            part = os.path.join(self.root, *parts[: i + 1])
            if not os.access(part, os.F_OK):
                self.missing[part] = self.clock() + SECONDS
                return

    def changes(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def change(*names: Any, **more: Any) -> Any:
            paths = [path for path in map(self.path, names[:2]) if path is not None]
            for path in paths:
                self.look_up(path, creates=True)
            try:
                return function(*names, **more)
            finally:
                folders = {os.path.dirname(path) for path in paths}
                self.missing = {p: until for p, until in self.missing.items() if os.path.dirname(p) not in folders}

        return change

    def opens(self, function: Callable[..., Any], creates: Callable[..., bool]) -> Callable[..., Any]:
        asking, making = self.asks(function), self.changes(function)

        def open_file(name: Any, *arguments: Any, **more: Any) -> Any:
            return (making if creates(*arguments, **more) else asking)(name, *arguments, **more)

        return open_file


def _by_mode(mode: str = "r", *_: Any, **__: Any) -> bool:
    return mode[0] in "wax"


def _by_flags(flags: int, *_: Any, **__: Any) -> bool:
    if O_TMPFILE and flags & O_TMPFILE == O_TMPFILE:
        raise OSError(errno.EOPNOTSUPP, "NFS has no files without a name")
    return bool(flags & os.O_CREAT)


@contextlib.contextmanager
def mounted(root: Path, clock: Callable[[], float] = time.monotonic) -> Iterator[Client]:
    """Make this process a client of its own for everything below `root`."""
    client = Client(root, clock)
    with contextlib.ExitStack() as stack:
        for name in ("stat", "lstat", "scandir", "listdir"):
            stack.enter_context(mock.patch.object(os, name, client.asks(getattr(os, name))))
        for name in ("mkdir", "rename", "replace", "unlink", "remove", "rmdir"):
            stack.enter_context(mock.patch.object(os, name, client.changes(getattr(os, name))))
        stack.enter_context(mock.patch.object(os, "open", client.opens(os.open, _by_flags)))
        for module in (builtins, io):
            stack.enter_context(mock.patch.object(module, "open", client.opens(io.open, _by_mode)))
        yield client
