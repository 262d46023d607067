"""The lineage of population-based training as an SVG: who copied whose weights, at which step, with which settings."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from dtrain.config.redaction import hide
from dtrain.util.format import as_dict, clean, finite

Event = dict[str, Any]
WIDE, LEFT, RIGHT, TOP, ROW, BOTTOM = 860, 84, 80, 16, 44, 36  # pixels
COLORS = ("#2f6bd6", "#d9622b", "#16906a", "#b0449c", "#9a7200", "#5b50d6", "#0e8fa6", "#c53b47", "#6d7682", "#6f8a14")
MOST_EVENTS = 20_000  # of a file that may come from someone else


def lineage_svg(events: Sequence[Event]) -> str:
    """Draw one row per member. A colour stands for the member that the weights began with, so takeovers show.

    Returns "" if there is nothing to draw. Only shapes, classes and escaped text: it can stand in any page.
    """
    events = [e for e in events[:MOST_EVENTS] if is_sound(e)]
    known = {e["trial"] for e in events}
    events = [e for e in events if e["event"] != "exploit" or e["donor"] in known]
    trains = [e for e in events if e["event"] == "train"]
    if not any(e["event"] == "exploit" for e in events) or not trains:
        return ""
    count, last = max(e["trial"] for e in events) + 1, max(e["steps"] for e in trains)
    tall = TOP + ROW * count + BOTTOM

    def x(steps: int) -> float:
        return round(LEFT + (WIDE - LEFT - RIGHT) * steps / last, 1)

    def y(trial: int) -> float:
        return TOP + ROW * trial + ROW / 2

    lines, arrows, dots, texts = [], [], [], []
    at, origin = dict.fromkeys(range(count), 0), {trial: trial for trial in range(count)}
    results = {(e["trial"], e["steps"]): finite(e.get("value")) for e in events if e["event"] == "result"}
    for e in events:
        trial, steps = e["trial"], e["steps"]
        if e["event"] == "train":
            color = COLORS[origin[trial] % len(COLORS)]
            label = f"member {trial}, steps {at[trial]} to {steps}: {values_text(e.get('values'))}"
            value = results.get((trial, steps))
            label += "" if value is None else f"; {value:.6g} at step {steps}"
            line = f'<line x1="{x(at[trial])}" y1="{y(trial)}" x2="{x(steps)}" y2="{y(trial)}" stroke="{color}"'
            lines.append(f'{line} stroke-width="5"><title>{html.escape(label)}</title></line>')
            at[trial] = steps
        elif e["event"] == "exploit":
            origin[trial] = origin[e["donor"]]  # a donor does not copy at the same step
            color = COLORS[origin[trial] % len(COLORS)]
            label = f"step {steps}: member {trial} copies member {e['donor']}, then {values_text(e.get('values'))}"
            px, top, end = x(steps), y(e["donor"]), y(trial)
            sign = 1 if end > top else -1
            path = f"M{px} {top}C{px + 14} {top + 8 * sign} {px + 14} {end - 20 * sign} {px + 3} {end - 9 * sign}"
            head = f"{px - 1},{end - 11 * sign} {px + 8},{end - 11 * sign} {px + 1},{end - 3 * sign}"
            arrows.append(
                f'<path d="{path}" fill="none" stroke="{color}" stroke-width="1.6"><title>{html.escape(label)}</title>'
                f'</path><polygon points="{head}" fill="{color}"/>'
            )
            dots.append(f'<circle cx="{px}" cy="{end}" r="4" fill="{color}"/>')
    for trial in range(count):
        texts.append(text(LEFT - 10, y(trial) + 4, f"member {trial}", "end"))
        value = results.get((trial, at[trial]))
        if value is not None:
            texts.append(text(x(at[trial]) + 10, y(trial) + 4, f"{value:.6g}"))
    ticks = sorted({e["steps"] for e in trains} | {0})
    every = -(-len(ticks) // 12)
    for steps in [*ticks[:-1:every], ticks[-1]]:
        texts.append(text(x(steps), tall - 14, f"{steps}" if steps else "step 0", "middle"))
    body = "\n".join([*lines, *arrows, *dots, *texts])
    size = f'viewBox="0 0 {WIDE} {tall}" width="{WIDE}" height="{tall}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} class="lineage" role="img" font-size="12" '
        f'font-family="system-ui, sans-serif" aria-label="Who copied whose weights in {count} members">\n'
        f"{body}\n</svg>\n"
    )


def text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="currentColor">{html.escape(words)}</text>'


def values_text(values: Any) -> str:
    """Return settings as text; of a file that may come from someone else, so nothing is taken for granted."""
    items = list(as_dict(values).items())[:20]
    texts = [(str(k)[:60], f"{v:.4g}" if isinstance(v, float) else str(v)[:60]) for k, v in items]
    return hide(clean(", ".join(f"{key}={value}" for key, value in texts)))


def is_sound(event: Event) -> bool:
    """Return whether an event has the numbers that a picture needs."""
    numbers = [event.get("trial"), event.get("steps")] + ([event.get("donor")] if event["event"] == "exploit" else [])
    limits = ((0, 1000), (1, 2**53), (0, 1000))
    return all(type(n) is int and low <= n < most for n, (low, most) in zip(numbers, limits, strict=False))
