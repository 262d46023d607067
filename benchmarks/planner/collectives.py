"""How well a line (latency, then bandwidth) describes published NCCL curves: the error of each, from 1 MiB on.

python benchmarks/planner/collectives.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from rows import DATA, records

from dtrain.config.hardware import load
from dtrain.plan.time.collectives import Group, collective_s


def curves() -> dict[tuple[str, str, int, int], list[tuple[int, float]]]:
    """(hardware, collective, nodes, GPUs) → (bytes, seconds)."""
    found = defaultdict(list)
    for row in records(DATA / "nccl_curves.csv"):
        key = (row["hardware"], row["collective"], int(row["nodes"]), int(row["ranks"]))
        found[key].append((int(row["bytes"]), float(row["us"]) / 1e6))
    return found


def errors() -> list[dict[str, Any]]:
    """One row a curve; an error of 0.1: predicted 10% above the measured time."""
    rows = []
    for (name, collective, nodes, ranks), points in curves().items():
        hardware = load(name)
        found = []
        for num_bytes, seconds in points:
            predicted = collective_s(hardware, collective, Group(ranks, ranks // nodes), num_bytes)
            found.append(predicted / seconds - 1)
        rows.append(
            {
                "hardware": name,
                "collective": collective,
                "nodes": nodes,
                "gpus": ranks,
                "points": len(found),
                "mean": statistics.mean(map(abs, found)),
                "bias": statistics.mean(found),
                "worst": max(found, key=abs),
                "large": statistics.mean(abs(e) for e, (size, _) in zip(found, points, strict=True) if size >= 2**24)
                if points[-1][0] >= 2**24
                else math.nan,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = errors()
    print(f"{'hardware':<14}{'collective':<12}{'nodes':>6}{'GPUs':>6}{'points':>8}{'mean':>8}{'≥16 MiB':>9}", end="")
    print(f"{'bias':>8}{'worst':>8}")
    for row in rows:
        head = f"{row['hardware']:<14}{row['collective']:<12}{row['nodes']:>6}{row['gpus']:>6}{row['points']:>8}"
        print(f"{head}{row['mean']:>8.1%}{row['large']:>9.1%}{row['bias']:>+8.1%}{row['worst']:>+8.1%}")
    print(f"mean of all curves: {statistics.mean(row['mean'] for row in rows):.1%}", end="")
    print(f", from 16 MiB on {statistics.mean(row['large'] for row in rows):.1%}")
    if options.json:
        options.json.write_text(json.dumps({"benchmark": "collectives", "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
