"""Run a launch as a person types it, in this process, with ranks forked from a server that has imported torch.

All but the start of the ranks is the real thing: composition, checks, run folder, supervisor, screen and exit code.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import pytest

from dtrain.cli import main
from dtrain.commands.verify import world
from dtrain.commands.verify.world import World
from dtrain.config import run_file
from dtrain.config.hardware import CPU_FP16
from dtrain.launch.local import Local
from dtrain.launch.torchrun import Torchrun

# Hydra composes a first time only to ask for hydra.mode, which we never set; real processes do it, too.
COMPOSE_ONCE = ("hydra._internal.hydra.Hydra.get_mode", lambda self, **_: None)


class ForkedWorld:
    """The ranks as one process, as a supervisor sees it."""

    def __init__(self, size: int, run_dir: Path, env: dict[str, str]) -> None:
        self.world = World(size, world.train_rank, run_dir, env=env)

    def poll(self) -> int | None:
        codes = [rank.exitcode for rank in self.world.ranks]
        return None if None in codes else next((code for code in codes if code), 0)

    def wait(self) -> int:
        return next((code for code in self.world.join() if code), 0)


class FromServer(Torchrun):
    def start(self, run_dir: Path, log: IO[bytes]) -> ForkedWorld:
        return ForkedWorld(self.num_ranks, run_dir, self.environment())

    def kill(self, process: Any) -> None:
        process.world.kill()


def launch_here(self: Local, run_dir: Path) -> int:
    return FromServer(run_file.load(run_dir), [], self.max_restarts, self.grace_s).launch(run_dir)


@contextlib.contextmanager
def machine() -> Iterator[None]:
    """A machine without GPUs whose runs start fast."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*COMPOSE_ONCE)
        patch.setattr(Local, "launch", launch_here)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv(CPU_FP16, "0")
        patch.setenv("COLUMNS", "80")
        patch.delenv("HYDRA_FULL_ERROR", raising=False)
        yield


def typed(argv: Sequence[str], folder: Path) -> tuple[int, str]:
    """Run a command line in a folder; return its exit code and its screen."""
    before, path, modules = os.getcwd(), list(sys.path), set(sys.modules)
    os.chdir(folder)
    screen = io.StringIO()
    try:
        with contextlib.redirect_stdout(screen), contextlib.redirect_stderr(screen):
            code = main(list(argv))
    finally:
        os.chdir(before)
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
                del sys.modules[name]
    return code, screen.getvalue()


def table() -> Iterator[str]:
    """Each mistake as a person meets it: what was typed or changed, the exit code, and the whole screen."""
    from tests.mistakes import MISTAKES, NET

    yield f"# Mistakes\n\nnet.py, before each mistake:\n\n{indented(NET)}\n"
    for number, mistake in enumerate(MISTAKES, 1):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "net.py").write_text(mistake.source)
            code, screen = typed(mistake.command, Path(folder))
        changed = difflib.unified_diff(NET.splitlines(), mistake.source.splitlines(), "", "", "", "", 0, "")
        lines = [line for line in changed if line[:1] in "+-" and line.strip() not in ("---", "+++")]
        yield f"## {number}. {mistake.name}\n\n    dtrain {' '.join(mistake.command)}\n"
        yield f"net.py:\n\n{indented(chr(10).join(lines))}\n" if lines else ""
        yield f"exit code {code}\n\n{indented(screen)}\n"


def indented(text: str) -> str:
    return textwrap.indent(text.rstrip(), "    ")


if __name__ == "__main__":  # python -m tests.mistakes_run > mistakes.md
    with machine():
        for part in table():
            print(part, flush=True)
