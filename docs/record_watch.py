"""Draw docs/watch.svg, the picture of `dtrain watch` in docs/monitoring.md, from a run that trains meanwhile.

    python docs/record_watch.py [RUN]

Without RUN it starts one: two free cores for two minutes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI

from dtrain.commands.watch import RunView
from dtrain.runs.find import find_run
from dtrain.ui.lines import keys_line

ROOT = Path(__file__).resolve().parent.parent
COLUMNS, LINES, STEPS = 120, 36, 250
LAUNCH = ["-m", "dtrain", "launch", "recipe=cpu-tiny", "train.steps=300", "train.eval_every=25", "checkpoint.every=50"]


def picture(run_dir: Path) -> str:
    view = RunView(run_dir)
    view.poll(wait=True)
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True, color_system="truecolor")
        for line in [*view.page(COLUMNS, LINES - 1), keys_line(view.keys, COLUMNS)]:
            console.print(line, soft_wrap=True, highlight=False)
        return console.export_svg(title="dtrain watch", theme=MONOKAI)


def main() -> None:
    if len(sys.argv) > 1:
        (ROOT / "docs" / "watch.svg").write_text(picture(find_run(sys.argv[1])))
        return
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        run = subprocess.Popen([sys.executable, *LAUNCH], env=environment, stdout=subprocess.DEVNULL)
        try:
            while not any(f'"step": {STEPS},' in path.read_text() for path in Path("outputs").rglob("metrics.jsonl")):
                assert run.poll() is None, "the run ended too early"
                time.sleep(1)
            (ROOT / "docs" / "watch.svg").write_text(picture(find_run("latest")))
        finally:
            run.terminate()
            run.wait()


if __name__ == "__main__":
    main()
