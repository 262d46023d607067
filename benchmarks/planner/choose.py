"""Does the planner choose well? Among rows of one model and GPU count, the layout that it ranks first beside the best.

`python benchmarks/planner/choose.py [--rows]`. What counts is how much slower the chosen one was when measured.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from rows import DATA, read, sources
from score import Scored, score_all

WORST_LIMIT, MEAN_LIMIT = 0.03, 0.015


@dataclass(frozen=True)
class Choice:
    """One group: what was best, and what the planner would have taken."""

    group: str
    best: Scored
    chosen: Scored
    count: int

    @property
    def slowdown(self) -> float:
        """Of the chosen layout, measured, by sample; 0 when it is the best one."""
        return per_sample(self.chosen) / per_sample(self.best) - 1


def per_sample(one: Scored) -> float:
    return one.row.step_s / one.row.layout.global_batch_size


def any_batch(one: Scored) -> str:
    """The group without its global batch: the planner may choose that, too."""
    return one.row.group.rsplit(" batch ", 1)[0]


def same_batch(one: Scored) -> str:
    return one.row.group


def choices(scored: Iterable[Scored], group: Callable[[Scored], str] = same_batch) -> list[Choice]:
    """Every group of two rows or more."""
    groups: dict[str, list[Scored]] = defaultdict(list)
    for one in scored:
        groups[group(one)].append(one)
    return [
        Choice(
            name,
            min(rows, key=per_sample),
            min(rows, key=lambda one: one.predicted / one.row.layout.global_batch_size),
            len(rows),
        )
        for name, rows in sorted(groups.items())
        if len(rows) > 1
    ]


def summary(found: list[Choice]) -> str:
    slowdowns = [choice.slowdown for choice in found]
    mean, worst = sum(slowdowns) / len(slowdowns), max(slowdowns)
    right = sum(slowdown == 0 for slowdown in slowdowns)
    over = sum(slowdown > WORST_LIMIT for slowdown in slowdowns)
    return (
        f"{len(found):4} groups, best chosen in {right}; slower than the best by {mean:.1%} on average (limit "
        f"{MEAN_LIMIT:.1%}), {worst:.1%} at worst (limit {WORST_LIMIT:.0%}, above it: {over})"
    )


def ways(scored: list[Scored]) -> list[tuple[str, list[Choice]]]:
    """The groups by each way to form them, of each source: one with many groups would hide the others."""
    found = []
    for title, group in (("same model, GPUs and batch", same_batch), ("same model and GPUs, any batch", any_batch)):
        for source in sorted({one.row.source for one in scored}):
            groups = choices([one for one in scored if one.row.source == source], group)
            if groups:
                found.append((f"{source}: {title}", groups))
    return found


def report(scored: list[Scored], rows: bool) -> None:
    """A line for each source and way to group; with rows, every group that missed."""
    for title, found in ways(scored):
        print(f"{title:52}{summary(found)}")
        for choice in sorted(found, key=lambda choice: -choice.slowdown) if rows else ():
            if choice.slowdown > 0:
                print(f"  {choice.slowdown:6.1%} {choice.group}, of {choice.count}: {name(choice.chosen)}")
                print(f"         best: {name(choice.best)}")


def name(one: Scored) -> str:
    parts = ", ".join(f"{part} {value:.3g}" for part, value in one.parts.items() if value and part != "total")
    return f"{one.row.label}: {one.row.step_s:.3g} s, predicted {one.predicted:.3g} ({parts})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="*", help="files of the data folder, without .csv (default: all)")
    parser.add_argument("--rows", action="store_true", help="also every group in which the best was not chosen")
    parser.add_argument("--data", type=Path, default=DATA, help="a folder of CSV files with the same columns")
    given = parser.parse_args()
    rows = [row for source in given.sources or sources(given.data) for row in read(source, given.data)]
    report(score_all(rows)[0], given.rows)


if __name__ == "__main__":
    main()
