"""`dtrain watch`: a live page of one run, or of several, in the terminal. It only reads the run folder."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain.commands.run_parser import RunParser
from dtrain.commands.runs import sweep_points
from dtrain.commands.status import reason
from dtrain.report.why import diagnose
from dtrain.runs.find import find_run
from dtrain.runs.live import FILES_S, Glance, LiveRun, Queue
from dtrain.runs.record import ROOTS, all_runs
from dtrain.ui.console import stdout_console
from dtrain.ui.lines import keys_line
from dtrain.ui.sweep_table import point
from dtrain.ui.watch import run_page
from dtrain.ui.watch_list import list_page
from dtrain.util.format import short_path

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

LOOK_S = 0.5  # between two looks at the files
DRAW_S, CLOCK_S = 1.0, 2.0  # between two pictures: at least, and if nothing is new, because ages grow
FIND_S = 5.0  # between two looks for new runs
SNAPSHOT_ROWS = 36  # of a page that is printed once
METRICS = ("loss", "tokens_per_s", "grad_norm", "lr", "step_s", "data_s", "mfu", "mem_gib")


def main(argv: list[str]) -> int:
    """`dtrain watch`: follow a run, or several."""
    parser = RunParser("dtrain watch", description="Follow a run, or a sweep, live in the terminal.")
    parser.add_argument(
        "run",
        nargs="?",
        metavar="RUN|SWEEP",
        help="a run folder, a part of its name, or latest; or a folder of runs (default: the run that is live now)",
    )
    parser.add_argument("--once", action="store_true", help="print one picture and end, as in a pipe")
    options = parser.parse_args(argv)
    console = stdout_console()
    view = first_view(options.run)
    if options.once or not console.is_terminal or console.is_dumb_terminal:
        return print_once(console, view)
    with contextlib.suppress(KeyboardInterrupt), Screen(console) as screen:
        loop(screen, view)
    return 0


def first_view(word: str | None) -> View:
    """What the words of the command line mean."""
    if word is not None:
        folder = Path(word).expanduser()
        return ListView([folder], short_path(folder)) if sweep_points(word) else RunView(find_run(word))
    roots = [Path(root) for root in ROOTS]
    view = ListView(roots, "runs")
    view.poll(wait=True)
    live = [run for run in view.runs if run.is_live]
    return RunView(live[0].run_dir, view) if len(live) == 1 else view


def print_once(console: Console, view: View) -> int:
    """Print a picture without moving the cursor."""
    view.poll(wait=True)
    for text in view.page(min(console.width, 160), SNAPSHOT_ROWS):
        text.rstrip()
        console.print(text, soft_wrap=True, highlight=False)
    return 0


# ---- what is on the screen -----------------------------------------------------------------------------------


class View:
    """A page that follows files and keys."""

    keys: Sequence[tuple[str, str]] = ()

    def __init__(self) -> None:
        self.queue = Queue()

    def poll(self, wait: bool = False) -> bool:
        """Read what is new; return whether something is. wait: for SLURM's answer too."""
        raise NotImplementedError

    def page(self, width: int, height: int) -> list[Text]:
        raise NotImplementedError

    def press(self, key: str) -> View | None:
        """Handle a key. Return the view to show next; None ends the program."""
        raise NotImplementedError

    def problem(self) -> str:
        return f"SLURM does not answer: {self.queue.problem}" if self.queue.problem else ""


class RunView(View):
    """One run."""

    def __init__(self, run_dir: Path, back: ListView | None = None) -> None:
        super().__init__()
        self.run, self.back = LiveRun(run_dir), back
        self.metric, self.log = "loss", False
        self.why, self.note, self._noted_at = ("", ""), "", -math.inf
        self.keys = [("q", "quit"), ("b", "all runs" if back is None else "back"), ("m", "metric"), ("l", "log scale")]

    def poll(self, wait: bool = False) -> bool:
        if self.run.record.launches and not self.run.record.job_id:
            return self.run.poll()
        self.queue.poll([self.run.run_dir], wait)
        return self.run.poll(self.queue.jobs.get(self.run.run_dir))

    def page(self, width: int, height: int) -> list[Text]:
        run = self.run
        if run.status != self.why[0]:  # the diagnosis reads logs, so only once
            ended = run.status in ("failed", "died")
            self.why = run.status, diagnose(run.record).paragraph if ended else ""
        if time.monotonic() - self._noted_at >= FILES_S:  # it asks for the status again, which reads files
            self.note, self._noted_at = reason(run.record), time.monotonic()
        return run_page(run, width, height, self.metric, self.log, self.note, self.why[1])

    def press(self, key: str) -> View | None:
        if key in ("q", "Q"):
            return None
        if key in ("b", "escape", "left"):
            self.back = self.back or ListView([Path(root) for root in ROOTS], "runs", self.run.run_dir)
            return self.back
        if key == "l":
            self.log = not self.log
        if key in ("m", "M", "tab"):
            names = [name for name in METRICS if name in self.run.curves]
            names += sorted(name for name in self.run.curves if name not in (*METRICS, "val_loss"))
            at = names.index(self.metric) if self.metric in names else -1
            self.metric = names[(at + (-1 if key == "M" else 1)) % len(names)] if names else "loss"
        return self


class ListView(View):
    """Several runs, one of which is marked."""

    keys = (("q", "quit"), ("↑↓", "choose"), ("enter", "open"))

    def __init__(self, roots: Sequence[Path], title: str, marked: Path | None = None) -> None:
        super().__init__()
        self.roots, self.title, self.marked = roots, title, marked
        self.runs: list[Glance] = []
        self._found_at = -math.inf

    def poll(self, wait: bool = False) -> bool:
        before = [run.run_dir for run in self.runs]
        if time.monotonic() - self._found_at >= FIND_S:
            self._found_at = time.monotonic()
            known = {run.run_dir: run for run in self.runs}
            self.runs = [known.get(path) or Glance(path) for path in self.order(all_runs(self.roots))]
        with_jobs = [run.run_dir for run in self.runs if not run.record.launches or run.record.is_open]
        self.queue.poll(with_jobs, wait)
        changed = [run.poll(self.queue.jobs.get(run.run_dir)) for run in self.runs]
        return any(changed) or before != [run.run_dir for run in self.runs]

    def order(self, found: list[Path]) -> list[Path]:
        """A sweep in the order of its points, others with the newest first."""
        is_sweep = len({path.parent for path in found}) == 1 and all(point(path)[0] < 1e5 for path in found)
        return sorted(found, key=point) if is_sweep else found

    @property
    def selected(self) -> int:
        return next((i for i, run in enumerate(self.runs) if run.run_dir == self.marked), 0)

    def page(self, width: int, height: int) -> list[Text]:
        is_live = sys.stdout.isatty()
        return list_page(self.runs, width, height, self.selected if is_live else None, self.title)

    def press(self, key: str) -> View | None:
        if key in ("q", "Q", "escape"):
            return None
        moves = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -10, "page down": 10, "home": -(10**9), "end": 10**9}
        if key in moves and self.runs:
            self.marked = self.runs[min(max(0, self.selected + moves[key]), len(self.runs) - 1)].run_dir
        if key in ("enter", "right", "l") and self.runs:
            self.marked = self.runs[self.selected].run_dir
            return RunView(self.marked, self)
        return self


def loop(screen: Screen, view: View) -> None:
    """Read, draw and handle keys until the user leaves."""
    drawn_at, size, is_new = -math.inf, (0, 0), True
    while True:
        is_new |= view.poll()
        now = time.monotonic()
        if screen.size() != size or now - drawn_at >= (DRAW_S - LOOK_S / 4 if is_new else CLOCK_S):
            drawn_at, size, is_new = now, screen.size(), False
            draw(screen, view)
        until = now + LOOK_S
        while (left := until - time.monotonic()) > 0:
            for key in screen.keys(left):
                following = view.press(key)
                if following is None:
                    return
                if following is not view:
                    view = following
                    view.poll()
                draw(screen, view)
            if screen.size() != size:
                break


def draw(screen: Screen, view: View) -> None:
    width, height = screen.size()
    lines = view.page(width, height - 1)
    from rich.text import Text

    lines += [Text("") for _ in range(height - 1 - len(lines))]
    screen.show([*lines, keys_line(view.keys, width, view.problem() or time.strftime("%H:%M:%S"))])


# ---- the terminal --------------------------------------------------------------------------------------------

KEYS = {
    b"\x1b[A": "up", b"\x1b[B": "down", b"\x1b[C": "right", b"\x1b[D": "left", b"\x1bOA": "up", b"\x1bOB": "down",
    b"\x1bOC": "right", b"\x1bOD": "left", b"\x1b[5~": "page up", b"\x1b[6~": "page down", b"\x1b[H": "home",
    b"\x1b[F": "end", b"\x1b[1~": "home", b"\x1b[4~": "end", b"\x1b": "escape", b"\r": "enter", b"\n": "enter",
    b"\t": "tab",
}  # fmt: skip


class Screen:
    """The terminal's second screen without a cursor, and keys without Enter; all of it is undone at the end.

    Only lines that changed are written: less for a slow connection, and less to compute.
    """

    def __init__(self, console: Console) -> None:
        self.console, self.lines = console, list[Any]()
        self.input = sys.stdin.fileno() if sys.stdin.isatty() else None
        self.before: Any = None  # the terminal's settings
        self.handlers: dict[int, Any] = {}
        self.drawn_size = (0, 0)

    def __enter__(self) -> Screen:
        for number in (signal.SIGTERM, signal.SIGHUP):
            self.handlers[number] = signal.signal(number, _leave)
        self.handlers[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._suspend)
        self._begin()
        return self

    def __exit__(self, *error: object) -> None:
        self._end()
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def _begin(self) -> None:
        if self.input is not None:
            import termios
            import tty

            self.before = termios.tcgetattr(self.input)
            tty.setcbreak(self.input, termios.TCSADRAIN)
        self.lines = []
        self._write("\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J")  # second screen, no cursor, no wrapping

    def _end(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # the terminal may be gone
            self._write("\x1b[0m\x1b[?7h\x1b[?25h\x1b[?1049l")
        if self.before is not None:
            import termios

            with contextlib.suppress(OSError, termios.error):
                termios.tcsetattr(self.input or 0, termios.TCSADRAIN, self.before)

    def _suspend(self, number: int, frame: object) -> None:
        """Ctrl-Z: give the shell its screen, and take it again with `fg`."""
        self._end()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._begin()
        self.drawn_size = (0, 0)

    def size(self) -> tuple[int, int]:
        try:
            size = os.get_terminal_size(sys.stdout.fileno())
        except OSError:
            return 80, 24
        return max(20, size.columns), max(2, size.lines)

    def show(self, lines: list[Text]) -> None:
        """Write the lines that differ from those on the screen."""
        out = []
        if self.size() != self.drawn_size:
            self.drawn_size, self.lines = self.size(), []
            out.append("\x1b[2J")
        for i, text in enumerate(lines[: self.drawn_size[1]]):
            if i < len(self.lines) and self.lines[i] == text and self.lines[i].style == text.style:
                continue
            with self.console.capture() as written:
                self.console.print(text, end="", soft_wrap=True, highlight=False)
            rest = "\x1b[K" if text.cell_len < self.drawn_size[0] else ""  # else it would erase the last character
            out.append(f"\x1b[{i + 1};1H{written.get()}\x1b[0m{rest}")
        self.lines = lines
        if out:
            # between these marks, terminals that know them show nothing half-drawn
            self._write("\x1b[?2026h" + "".join(out) + "\x1b[?2026l")

    def keys(self, seconds: float) -> Iterator[str]:
        """Wait for keys at most this long."""
        if self.input is None:
            time.sleep(seconds)
            return
        if not select.select([self.input], [], [], seconds)[0]:
            return
        data = os.read(self.input, 1024)
        if not data:  # the terminal is gone
            raise KeyboardInterrupt
        while data:
            found = next((known for known in sorted(KEYS, key=len, reverse=True) if data.startswith(known)), data[:1])
            yield KEYS.get(found, found.decode(errors="replace"))
            data = data[len(found) :]

    def _write(self, text: str) -> None:
        self.console.file.write(text)
        self.console.file.flush()


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)
