"""`dtrain watch` in real terminals: a tmux window that is resized, and a pseudo-terminal that must be restored."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest

from dtrain.cli import main
from tests.rundirs import in_tmp_path, make  # noqa: F401
from tests.screens import append, metric
from tests.terminals import Tmux, tmux  # noqa: F401
from tests.ui.test_watch import full
from tests.world import ROOT

WATCH = [sys.executable, "-m", "dtrain", "watch"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}


def check(screen: str, columns: int, lines: int) -> None:
    rows = screen.splitlines()
    assert len(rows) == lines and max(map(len, rows)) <= columns, screen
    assert rows[-1].startswith("q quit"), screen


def test_in_a_terminal_that_is_resized(tmux: Tmux) -> None:  # noqa: F811
    run_dir = full("outputs/a/full-run")
    full("outputs/a/other-run")
    tmux.open(80, 24)
    tmux.type(shlex.join([*WATCH, str(run_dir)]), "Enter")
    shown = tmux.until("step 200/1000", "val 4.5", "81% of plan", "8 GPUs", "slowest 15", "WARNING")
    check(shown, 80, 24)
    assert "newest steps" not in shown
    append(run_dir, metric(201, loss=1.2345))
    tmux.until("step 201/1000", "loss 1.2345")
    tmux.resize(200, 50)
    check(tmux.until("loss, newest steps", "tokens/s", "where a step goes", "GPUs"), 200, 50)
    tmux.type("m")
    tmux.until("tokens/s, newest steps")
    tmux.type("C-z")
    tmux.until("Stopped")
    tmux.type("fg", "Enter")
    check(tmux.until("tokens/s, newest steps", "q quit"), 200, 50)
    tmux.resize(80, 24)
    tmux.type("b")
    check(tmux.until("full-run", "other-run", "2 running"), 80, 24)
    tmux.type("Down", "Enter")
    tmux.until("full-run  running", "back")
    tmux.type("Escape")
    tmux.until("2 running")
    tmux.type("q")
    shown = tmux.until("ready> ")
    tmux.type("stty -a | grep -o ' icanon'; echo code $?", "Enter")
    tmux.until("icanon", "code 0")
    assert "running" not in tmux.screen().replace(str(run_dir), ""), "the first screen is back"


def heed_ctrl_c() -> None:
    """Tests that were started with nohup, or in the background of a script, ignore Ctrl-C; so would a new process."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(run_dir: Path, **environment: str) -> tuple[int, int, list[object]]:
    """`dtrain watch` in a pseudo-terminal: its process, the terminal, and the terminal's settings before."""
    terminal, end = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    before = termios.tcgetattr(terminal)
    options: dict[str, Any] = {"stdin": end, "stdout": end, "stderr": end, "env": {**ENVIRONMENT, **environment}}
    process = subprocess.Popen([*WATCH, str(run_dir)], start_new_session=True, preexec_fn=heed_ctrl_c, **options)
    os.close(end)
    return process.pid, terminal, before


def read(terminal: int, until_text: bytes = b"", seconds: float = 60.0) -> bytes:
    """What the terminal got: until this text, or to its end."""
    found, end = b"", time.monotonic() + seconds
    with contextlib.suppress(OSError):  # the last process closed it
        while time.monotonic() < end and not (until_text and until_text in found):
            if select.select([terminal], [], [], 0.2)[0]:
                found += os.read(terminal, 65536)
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_terminal_is_restored_however_it_ends(number: int) -> None:
    pid, terminal, before = start(full(), NO_COLOR="1")
    try:
        shown = read(terminal, b"quit")
        assert b"\x1b[?1049h" in shown and termios.tcgetattr(terminal) != before
        os.kill(pid, number)
        rest = read(terminal)
        assert rest.rstrip().endswith(b"\x1b[?1049l") and b"\x1b[?25h" in rest and b"Traceback" not in rest, rest
        assert os.waitpid(pid, 0)[1] == (0 if number == signal.SIGINT else (128 + number) << 8)
    finally:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    assert not re.search(rb"\x1b\[[\d;]*3[0-7]m", shown), "NO_COLOR"
    assert b"\x1b]0;" not in shown and shown.count(b"\x1b[2J") == 2, "codes of a log do not reach the terminal"


def test_a_pipe_gets_one_picture(capsys: pytest.CaptureFixture[str]) -> None:
    full("outputs/one")
    assert main(["watch", "one"]) == 0
    shown = capsys.readouterr().out
    assert "step 200/1000" in shown and "val 4.5" in shown and "\x1b" not in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_without_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    make("outputs/old", status="done", steps=3, total_steps=3)
    assert main(["watch", "--once"]) == 0
    assert "1 done" in capsys.readouterr().out, "no live run: the list"
    full("outputs/one")
    assert main(["watch", "--once"]) == 0
    assert "── loss" in capsys.readouterr().out, "the only live run"
    full("outputs/two")
    assert main(["watch", "--once"]) == 0
    shown = capsys.readouterr().out
    assert "2 running · 1 done" in shown and "one" in shown and "two" in shown
    assert main(["watch", "nothing-like-it"]) == 2
