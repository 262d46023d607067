"""metrics.csv in the run folder: one line a step, for spreadsheets."""

from __future__ import annotations

import csv
import itertools
import os
import shutil
from pathlib import Path

from dtrain.loggers.tracker import BySteps, Held, Row, RunFacts

FILE = "metrics.csv"


class Csv:
    """Always has the values of metrics.jsonl: it is written again from the start when a resumed run drops steps."""

    mirrors, takes_system, is_remote = True, False, False

    def __init__(self, every: int = 1) -> None:
        self.every = every

    def open(self, run: RunFacts) -> Held:
        self.path = run.run_dir / FILE
        self.columns, self.steps = ["step"], BySteps()
        self._replace(self.path.with_name(f".{FILE}.tmp"))
        return {}

    def log(self, rows: list[Row]) -> None:
        self._write(list(self.steps.add(rows)))

    def finish(self, run: RunFacts) -> None:
        self._write(self.steps.rest())
        self.file.close()

    def _replace(self, temporary: Path, old: Path | None = None) -> None:
        """Write a new file with the present columns, and the lines of the old one; older lines are shorter."""
        temporary.unlink(missing_ok=True)
        with open(temporary, "x", newline="") as file:  # x: never through a link in a folder of someone else's
            csv.writer(file).writerow(self.columns)
            if old:
                with open(old, newline="") as lines:
                    next(lines)
                    shutil.copyfileobj(lines, file)
        os.replace(temporary, self.path)
        self.file = open(self.path, "a", newline="")  # noqa: SIM115 (until the follower ends)

    def _write(self, rows: list[Row]) -> None:
        found = dict.fromkeys(itertools.chain.from_iterable(row.values for row in rows))
        new = [key for key in found if key not in self.columns]
        if new:
            self.columns += new
            self.file.close()
            self._replace(self.path.with_name(f".{FILE}.tmp"), self.path)
        values = self.columns[1:]
        csv.writer(self.file).writerows([row.step, *map(row.values.get, values)] for row in rows)
        self.file.flush()
