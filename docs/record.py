"""Draw docs/run.svg, the picture in README.md: commands typed into a real terminal, and what it shows then.

    pip install pyte && python docs/record.py

The commands run as they are shown. Needs two free cores for a minute.
"""

from __future__ import annotations

import os
import pty
import re
import sys
import tempfile
from itertools import groupby
from pathlib import Path

import pyte
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
COLUMNS, LINES = 104, 60
# (the command, the step at which Ctrl-C is pressed)
COMMANDS = [
    ("python launch.py recipe=cpu-tiny strategy=ddp", 100),
    ("python launch.py resume=latest strategy=fsdp", None),
]


def show(command: str, stop_at: int | None, folder: str) -> list[Text]:
    """What the terminal shows after the command, one text for each line."""
    terminal = pyte.Screen(COLUMNS, LINES)
    stream = pyte.ByteStream(terminal)
    process, keyboard = pty.fork()
    if process == 0:
        os.chdir(folder)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        os.environ.update(COLUMNS=str(COLUMNS), LINES=str(LINES), TERM="xterm-256color", PATH=path)
        os.execvp("sh", ["sh", "-c", command])
    while True:
        try:
            stream.feed(os.read(keyboard, 65_536))
        except OSError:  # the last process has closed its end
            break
        steps = re.findall(r"step +(\d+)/", "\n".join(terminal.display))
        if stop_at and steps and int(steps[-1]) >= stop_at:
            os.write(keyboard, b"\x03")
            stop_at = None
    os.waitpid(process, 0)
    os.close(keyboard)
    lines = [line_of(terminal.buffer[y]) for y in range(LINES)]
    while lines and not lines[-1].plain:
        lines.pop()
    return lines


def line_of(row: dict[int, pyte.screens.Char]) -> Text:
    cells = [row[x] for x in range(COLUMNS)]
    line = Text()
    for (color, bold), run in groupby(cells, key=lambda cell: (cell.fg, cell.bold)):
        if re.fullmatch("[0-9a-f]{6}", color):
            color = f"#{color}"
        color = {"default": None, "brown": "yellow"}.get(color, color.replace("bright", "bright_"))
        line.append("".join(cell.data for cell in run), Style(color=color, bold=bold or None))
    line.rstrip()
    return line


def main() -> None:
    with open(os.devnull, "w") as nowhere, tempfile.TemporaryDirectory() as folder:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True, color_system="truecolor")
        (Path(folder) / "launch.py").symlink_to(ROOT / "launch.py")
        for command, stop_at in COMMANDS:
            console.print(Text(f"$ {command}", "bold"))
            for line in show(command, stop_at, folder):
                console.print(line, no_wrap=True)
            console.print()
        (ROOT / "docs" / "run.svg").write_text(console.export_svg(title="dtrain", theme=MONOKAI))


if __name__ == "__main__":
    main()
