"""`dtrain comm bench --svg`: bus bandwidth over message size, one panel per backend and group, by matplotlib."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from dtrain.report.page import replace


def draw(result: dict[str, Any], file: Path) -> None:
    """Write the picture: measured bandwidth as lines, what is expected as dashes in the same color."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams["svg.hashsalt"] = "dtrain"  # the same measurements give the same bytes
    panels = list(dict.fromkeys((row["backend"], row["where"]) for row in result["rows"]))
    figure = Figure(figsize=(5.5 * max(1, len(panels)), 4.2), layout="constrained")
    for place, (backend, where) in enumerate(panels, 1):
        axes = figure.add_subplot(1, len(panels), place)
        mine = [row for row in result["rows"] if (row["backend"], row["where"]) == (backend, where)]
        for i, kind in enumerate(dict.fromkeys(row["kind"] for row in mine)):
            rows = [row for row in mine if row["kind"] == kind]
            points = [row["num_bytes"] for row in rows], [row["bus_gb_s"] for row in rows]
            axes.plot(*points, marker="o", markersize=3, linewidth=1.2, color=f"C{i}", label=kind)
            known = [row for row in rows if row["expected"]]
            expected = [row["bus_gb_s"] * row["p50"] / row["expected"] for row in known]
            axes.plot([row["num_bytes"] for row in known], expected, "--", linewidth=0.9, color=f"C{i}")
        several = len(result["nodes"]) > 1 and where == "all"
        ranks = f"{len(result['nodes'])} nodes × {result['ranks_per_node']} ranks"
        axes.set_title(f"{backend}, {ranks if several else 'inside a node'}", fontsize=10, loc="left")
        axes.set(xscale="log", yscale="log", xlabel="bytes of the message", ylabel="GB/s on the bus")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=7, frameon=False)
    out = io.BytesIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    replace(file, out.getvalue())
