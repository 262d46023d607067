"""What checkpointing gives and costs: the rows of `measure.py --groups trade` as the table of docs/performance.md.

python benchmarks/planner/trade.py FILE             prints the table
python benchmarks/planner/trade.py FILE --page      also puts it into docs/performance.md
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "performance.md"
MODES = {"none": "none", "ops": "ops", "selective": "selective (every 2nd)", "full": "full"}


def table(rows: list[dict[str, Any]]) -> str:
    """One line a model and way to run it: GiB and tokens/s of every mode, and what the mode costs of the speed."""
    lines = ["| | " + " | ".join(MODES.values()) + " |", "|---" * (1 + len(MODES)) + "|"]
    groups: dict[tuple[str, int, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        key = (row["model"], row["micro_batch_size"], row["layout"]["compile"])
        groups.setdefault(key, {})[row["activation_checkpointing"]] = row
    for (model, batch, compile), found in groups.items():
        name = f"{model}, batch {batch}, {'eager' if compile == 'none' else 'compiled'}"
        plain = found.get("none", {}).get("tokens_per_s")
        lines.append(f"| {name} | " + " | ".join(cell(found.get(mode), plain) for mode in MODES) + " |")
    return "\n".join(lines)


def cell(row: dict[str, Any] | None, plain: float | None) -> str:
    if row is None or not row.get("tokens_per_s"):
        return "-"
    slower = (
        "" if not plain or row["activation_checkpointing"] == "none" else f", {row['tokens_per_s'] / plain - 1:+.0%}"
    )
    return f"{row['peak_gib']:.1f} GiB · {row['tokens_per_s']:,.0f} tokens/s{slower}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--page", action="store_true")
    given = parser.parse_args()
    made = table([row for row in json.loads(given.file.read_text())["rows"] if "error" not in row])
    print(made)
    if given.page:
        begin, end = "<!-- trade: from measure.py --groups trade -->", "<!-- end of trade -->"
        pattern = re.escape(begin) + ".*?" + re.escape(end)
        text = re.sub(pattern, lambda match: f"{begin}\n{made}\n{end}", PAGE.read_text(), flags=re.DOTALL)
        PAGE.write_text(text)


if __name__ == "__main__":
    main()
