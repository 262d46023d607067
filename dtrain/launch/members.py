"""Who takes part in an elastic run: the usable numbers of ranks or nodes, requests to change them, and who has left.

The number is fixed while ranks train. To change it, all ranks stop after the same step, save, and start again with the
new number: the samples of a step, and so the losses, do not depend on it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtrain.checks.validate import usable_sizes
from dtrain.config import elastic
from dtrain.errors import bad
from dtrain.runs.folder import read_json, write_json
from dtrain.runs.protocol import LEAVE_FILE, RESCUE_FILE, SCALE_FILE
from dtrain.util.format import finite


@dataclass(frozen=True)
class Change:
    """Another number of members."""

    size: int
    gone: set[int]
    why: str


class Members:
    """The numbers that a run may have. A member is a rank of this machine, or a node with its ranks.

    usable: the numbers, if they are known.
    """

    def __init__(self, config: dict[str, Any], usable: list[int] | None = None) -> None:
        found = elastic.range_of(config)
        assert found is not None
        self.range, self.unit, self.usable = found, found.unit, usable or usable_sizes(config)
        self.hosts: list[str] = []  # the nodes' names
        self.ranks_each = config["cluster"]["processes"] if self.unit == "node" else 1

    def fit(self, number: int) -> int:
        """The largest usable number up to this one; 0: there is none."""
        return max((n for n in self.usable if n <= number), default=0)

    def count(self, number: int) -> str:
        return f"{number} {self.unit}{'' if number == 1 else 's'}"

    def requested(self, run_dir: Path) -> int | None:
        """The number that `dtrain scale` asked for."""
        wanted = finite(read_json(run_dir / SCALE_FILE).get("number"))
        return int(wanted) if wanted is not None else None

    def left(self, run_dir: Path) -> set[int]:
        """The members that were asked to stop, while the rest of the run was not."""
        found = (run_dir / LEAVE_FILE).parent.glob((run_dir / LEAVE_FILE).name.format("*"))
        ranks = [path.name.rpartition("-")[2] for path in found]
        return {int(rank) // self.ranks_each for rank in ranks if rank.isdecimal()}

    def change(self, run_dir: Path, now: int, lost: Mapping[int, str]) -> Change | None:
        """What changes after the ranks have stopped: `now` members took part, and some of them are lost, and why."""
        left, wanted = self.left(run_dir), self.requested(run_dir)
        gone = left | set(lost)
        asked = wanted or now - len(gone)
        size = self.fit(asked)
        if not size or not (gone or wanted):
            return None
        events = [f"{self.names(left)} left"] if left else []
        events += dict.fromkeys(lost.values())
        events += [f"{self.count(wanted)} requested"] if wanted else []
        events += [f"{asked} cannot be used"] if size != asked else []
        return Change(size, gone, ", ".join(events))

    def forget(self, run_dir: Path) -> None:
        """Remove the notes of the ranks: the next ones have their own numbers."""
        (run_dir / RESCUE_FILE).unlink(missing_ok=True)
        for path in (run_dir / LEAVE_FILE).parent.glob((run_dir / LEAVE_FILE).name.format("*")):
            path.unlink(missing_ok=True)

    def names(self, members: Collection[int]) -> str:
        """`rank 1`, `ranks 1 and 3`, or the names of nodes."""
        if self.hosts:
            return ", ".join(self.hosts[m] for m in sorted(members))
        one, *others = (str(m) for m in sorted(members))
        return f"{self.unit} {one}" if not others else f"{self.unit}s {', '.join([one, *others[:-1]])} and {others[-1]}"

    def check(self, asked: int) -> None:
        """Raise if the run cannot have this number."""
        if asked not in self.usable:
            rule = f"with {self.range}, the numbers that can be used are {', '.join(map(str, self.usable))}"
            raise bad("scale", asked, rule, f"dtrain scale RUN {self.fit(asked) or self.usable[0]}")


def request(run_dir: Path, asked: int) -> None:
    """Ask the run's supervisor for another number of members."""
    write_json(run_dir / SCALE_FILE, {"number": asked, "time": time.time()})
