"""Draw the messages of a ring all-reduce as an SVG: one row per rank, one bar per message, from the trace of a run.

    python launch.py strategy=ring strategy.trace=3 cluster.processes=4 train.steps=3 run_dir=RUN
    python docs/ring_picture.py RUN [--step 3] [-o docs/pictures/ring.svg]

A bar is the time from the start of a send and receive to its end, and has the number of the chunk that the rank sent.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

WIDTH, LEFT, ROW, BAR, TOP = 760, 70, 54, 34, 46
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#999933")
STYLE = "text{font:13px sans-serif;fill:#888}.chunk{fill:#fff;font-weight:bold;text-anchor:middle}"


def messages_of(run: Path, step: int) -> list[dict[str, Any]]:
    lines = [line for path in run.glob("logs/ring-trace-*.jsonl") for line in path.read_text().splitlines()]
    found = [message for message in map(json.loads, lines) if message["step"] == step]
    if not found:
        raise SystemExit(f"{run} has no trace of step {step}; fix: train it with strategy=ring strategy.trace={step}")
    return found


def picture(messages: list[dict[str, Any]]) -> str:
    ranks = sorted({m["rank"] for m in messages})
    begin, end = min(m["start"] for m in messages), max(m["end"] for m in messages)
    scale = (WIDTH - LEFT - 10) / (end - begin)
    height = TOP + ROW * len(ranks) + 24
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"><style>{STYLE}</style>']
    parts.append(text(LEFT, 18, f"{len(messages) // len(ranks)} messages a rank, {messages[0]['bytes']:,} bytes each"))
    parts.append(text(LEFT, 36, "solid: reduce-scatter · pale: all-gather · number: the chunk that is sent"))
    for row, rank in enumerate(ranks):
        y = TOP + ROW * row
        parts.append(text(4, y + BAR / 2 + 5, f"{rank} → {(row + 1) % len(ranks)}"))
        for m in (m for m in messages if m["rank"] == rank):
            x, width = LEFT + (m["start"] - begin) * scale, max(2.0, (m["end"] - m["start"]) * scale - 1)
            shade = 1 if m["phase"] == "reduce-scatter" else 0.55
            colour = COLOURS[m["chunk"] % len(COLOURS)]
            box = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}"'
            parts.append(f'<rect {box} fill="{colour}" fill-opacity="{shade}"/>')
            parts.append(text(x + width / 2, y + BAR / 2 + 5, str(m["chunk"]), "chunk"))
    parts.append(text(LEFT, height - 8, f"{(end - begin) * 1e3:.1f} ms from the first message to the last"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def text(x: float, y: float, content: str, kind: str = "") -> str:
    of_kind = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{of_kind}>{content}</text>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--step", type=int, default=3, help="counted from the start of the process")
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent / "pictures" / "ring.svg")
    options = parser.parse_args()
    options.output.write_text(picture(messages_of(options.run, options.step)))
    print(f"{options.output}  {options.output.stat().st_size / 1000:.1f} kB")


if __name__ == "__main__":
    main()
