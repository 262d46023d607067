"""How far off is `dtrain plan`? Its step time beside what others published, from hardware files alone.

python benchmarks/planner/report.py                     errors per source, beside the limits
python benchmarks/planner/report.py llm_foundry --rows  every row with its parts, worst first
python benchmarks/planner/report.py --page              also writes figures/*.svg and the tables of README.md
python benchmarks/planner/report.py --data FOLDER       your own measurements; the columns are in README.md
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import choose
import our_steps
from page import write_page
from rows import DATA, Row, caution, read, sources
from score import PARTS, Errors, Scored, score_all, with_one_point


@dataclass(frozen=True)
class Limit:
    """What the planner promises on some sources together."""

    title: str
    sources: tuple[str, ...]
    mean: float
    median: float | None = None
    one_point: bool = False  # after one measured row of each (GPU, stack)


LIMITS = (
    Limit("Megatron-LM SC21, tables 1 and 2", ("megatron_sc21_table1", "megatron_sc21_table2"), 0.12, 0.07),
    Limit("llm-foundry", ("llm_foundry",), 0.10),
    Limit("llm-foundry, one row measured per GPU", ("llm_foundry",), 0.06, one_point=True),
    Limit("vTrain, one node", ("vtrain_single_node",), 0.20),
    Limit("our own steps on one H200", (our_steps.SOURCE,), 0.08),
)
HEAD = f"{'':38}{'rows':>5}{'mean':>8}{'median':>8}{'worst':>8}{'bias':>8}"


def line(title: str, errors: Errors, limits: str = "") -> str:
    figures = f"{errors.mean:8.1%}{errors.median:8.1%}{errors.worst:8.1%}{errors.bias:+8.1%}"
    return f"{title:38}{errors.count:5}{figures}  {limits}".rstrip()


def judge(limit: Limit, scored: list[Scored]) -> tuple[Errors, str] | None:
    """The errors that a limit is about, and whether they keep to it; None: its sources were not asked for."""
    chosen = [one for one in scored if one.row.source in limit.sources]
    if {one.row.source for one in chosen} != set(limit.sources):
        return None
    errors = with_one_point(chosen) if limit.one_point else Errors.of(one.error for one in chosen)
    kept = errors.mean <= limit.mean and (limit.median is None or errors.median <= limit.median)
    asked = f"mean {limit.mean:.0%}" + (f", median {limit.median:.0%}" if limit.median else "")
    return errors, f"limit: {asked}: {'kept' if kept else 'MISSED'}"


def print_rows(scored: list[Scored]) -> None:
    """Every row, worst first: measured, predicted, error and the seconds of each part."""
    width = max(len(one.row.label) for one in scored)
    print(f"  {'':{width}}{'measured':>10}{'predicted':>10}{'error':>8}" + "".join(f"{part:>14}" for part in PARTS))
    for one in sorted(scored, key=lambda one: -abs(one.error)):
        parts = "".join(f"{one.parts.get(part, 0.0):14.4g}" for part in PARTS)
        print(f"  {one.row.label:{width}}{one.row.step_s:10.4g}{one.predicted:10.4g}{one.error:+8.1%}{parts}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="*", help="files of the data folder, without .csv (default: all)")
    parser.add_argument("--rows", action="store_true", help="every row with its parts, and every choice that missed")
    parser.add_argument("--data", type=Path, default=DATA, help="a folder of CSV files with the same columns")
    parser.add_argument("--page", action="store_true", help="write figures/*.svg and the tables of README.md")
    given = parser.parse_args()

    everything: list[Scored] = []
    print(HEAD)
    named = [*sources(given.data), *([our_steps.SOURCE] if given.data == DATA else [])]
    for source in given.sources or named:
        rows: list[Row] = our_steps.read_own() if source == our_steps.SOURCE else read(source, given.data)
        scored, missing = score_all(rows)
        for reason in sorted(set(missing)):
            print(f"{source:38}{missing.count(reason)} rows left out: {reason}")
        if not scored:
            continue
        everything += scored
        print(line(source, Errors.of(one.error for one in scored)))
        if source != our_steps.SOURCE and caution(source, given.data):
            print(f"  caution: {caution(source, given.data)}")
        if given.rows:
            print_rows(scored)
    verdicts = [(limit, judged) for limit in LIMITS if (judged := judge(limit, everything))]
    if verdicts:
        print()
    for limit, (errors, verdict) in verdicts:
        print(line(limit.title, errors, verdict))
    print()
    choose.report(everything, given.rows)
    if given.page:
        write_page(everything, [(limit.title, *judged) for limit, judged in verdicts])


if __name__ == "__main__":
    main()
