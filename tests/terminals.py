"""A terminal for tests: tmux, which draws what a program writes into it, as a person would see it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.patience import until
from tests.world import ROOT


class Tmux:
    """A terminal of its own, with a shell in it."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket

    def open(self, columns: int, lines: int) -> None:
        shell = ["env", "PS1=ready> ", f"PYTHONPATH={ROOT}", "bash", "--norc", "--noprofile"]
        self.run("-f", "/dev/null", "new-session", "-d", "-x", str(columns), "-y", str(lines), *shell)

    def run(self, *words: str) -> str:
        return subprocess.run(["tmux", "-S", str(self.socket), *words], capture_output=True, text=True).stdout

    def type(self, *keys: str) -> None:
        self.run("send-keys", *keys)

    def resize(self, columns: int, lines: int) -> None:
        self.run("resize-window", "-x", str(columns), "-y", str(lines))

    def screen(self) -> str:
        return self.run("capture-pane", "-p")

    def until(self, *texts: str, timeout: float = 30) -> str:
        """Wait until all of these are on the screen."""
        until(lambda: all(text in self.screen() for text in texts), f"{texts} on the screen", timeout, self.screen)
        return self.screen()


@pytest.fixture
def tmux(tmp_path: Path) -> Iterator[Tmux]:
    if not shutil.which("tmux"):
        pytest.skip("tmux is not installed")
    terminal = Tmux(tmp_path / "tmux")
    yield terminal
    terminal.run("kill-server")
