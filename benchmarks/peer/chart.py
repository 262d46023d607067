"""The results of peers.py as bars, a panel a model, in SVG that needs nothing else: no fonts, scripts or libraries."""

from __future__ import annotations

from html import escape
from typing import Any

NAMES, BAR, FIGURES, GAP = 190, 200, 150, 26  # pixels: the peers' names, a bar of `widest`, figures, between columns
LINE, HEAD, TOP = 19, 34, 64
COLOURS = {"dtrain": "#0072b2", "plain": "#57606a", "": "#b6bec8"}  # ours, the yardstick, the others


def draw(results: dict[str, Any]) -> str:
    """Each peer's speed over plain torch's, with its tokens or images a second, MFU and memory."""
    panels: dict[str, list[dict[str, Any]]] = {}
    for row in results["rows"]:
        if row.get("ratio_to_plain"):
            panels.setdefault(row["case"], []).append(row)
    widest = max(row["ratio_to_plain"] for rows in panels.values() for row in rows)
    heights = {case: HEAD + LINE * len(rows) + 14 for case, rows in panels.items()}
    column = NAMES + BAR + FIGURES
    ends, places = [TOP, TOP], {}  # panels fill the shorter of two columns
    for case, height in heights.items():
        side = ends.index(min(ends))
        places[case] = (20 + side * (column + GAP), ends[side])
        ends[side] += height
    width, bottom = 2 * column + GAP + 40, max(ends) + 10
    versions = results["versions"]
    subtitle = (
        f"{results['hardware']}, torch {versions['torch']}, bf16. Bars: speed over plain torch + compile (the line)."
    )
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom}" width="{width}" height="{bottom}" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="12" fill="#24292f">',
        "<title>Training speed beside other tools</title>",
        f'<rect width="{width}" height="{bottom}" rx="8" fill="#ffffff"/>',
        '<text x="20" y="28" font-size="16" font-weight="600">Training speed beside other tools</text>',
        f'<text x="20" y="48" fill="#57606a">{escape(subtitle)}</text>',
    ]
    for case, rows in panels.items():
        drawn += panel(rows, *places[case], widest)
    return "\n".join([*drawn, "</svg>", ""])


def panel(rows: list[dict[str, Any]], left: float, top: float, widest: float) -> list[str]:
    """One model: the fastest peer first."""
    first, unit = rows[0], "tokens" if "tokens_per_s" in rows[0] else "images"
    length = f" × {first['seq_len']}" if first.get("seq_len") else ""
    start, one = left + NAMES, BAR / widest
    lines = [
        f'<text x="{left}" y="{top + 20}" font-weight="600">{first["model"]}, batch {first["batch"]}{length}</text>',
        f'<text x="{start + BAR + 8}" y="{top + 20}" fill="#57606a">{unit}/s · MFU · GiB</text>',
    ]
    for i, row in enumerate(sorted(rows, key=lambda row: -row["ratio_to_plain"])):
        y = top + HEAD + LINE * i
        kind = next(kind for kind in COLOURS if row["name"].startswith(kind))
        weight = ' font-weight="600"' if kind == "dtrain" else ""
        figures = f"{row[f'{unit}_per_s']:,.0f} · {row['mfu']:.0%} · {row['peak_mem_gib']:.0f}"
        ratio = row["ratio_to_plain"]
        lines += [
            f'<text x="{start - 7}" y="{y + 10}" text-anchor="end"{weight}>{escape(row["name"])}</text>',
            f'<rect x="{start}" y="{y}" width="{ratio * one:.1f}" height="13" fill="{COLOURS[kind]}">'
            f"<title>{escape(row['name'])}: {ratio:.2f} × plain torch</title></rect>",
            f'<text x="{start + 5}" y="{y + 10}" font-size="10" fill="#ffffff">{ratio:.2f}</text>',
            f'<text x="{start + BAR + 8}" y="{y + 10}">{figures}</text>',
        ]
    bottom = top + HEAD + LINE * len(rows) - 3
    lines.append(f'<path d="M{start + one:.1f} {top + HEAD - 4}V{bottom}" stroke="#d55e00" stroke-width="1.3"/>')
    return lines
