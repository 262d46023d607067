"""A figure of predicted against measured step times, as SVG that needs nothing else: no fonts, scripts or libraries."""

from __future__ import annotations

import math
from html import escape

from score import Errors, Scored

SIDE, LEFT, TOP, BOTTOM = 400, 62, 58, 44  # of the square plot, and what is around it, in pixels
LEGEND = 178
KINDS = (  # name, colour (told apart by colour-blind readers, too: Okabe and Ito's palette), shape
    ("data parallel", "#0072b2", "circle"),
    ("sharded (fsdp, zero3)", "#d55e00", "square"),
    ("tensor", "#009e73", "triangle"),
    ("pipeline", "#cc79a7", "diamond"),
    ("tensor and pipeline", "#6a4c93", "down"),
)
BAND = 0.10  # either side of the diagonal


def kind(one: Scored) -> str:
    """How a row's model is spread, in a word."""
    layout = one.row.layout
    if layout.tp > 1 and layout.pp > 1:
        return "tensor and pipeline"
    if layout.pp > 1:
        return "pipeline"
    if layout.tp > 1:
        return "tensor"
    return "sharded (fsdp, zero3)" if layout.data in ("fsdp", "grad_op", "zero3") else "data parallel"


def draw(title: str, scored: list[Scored]) -> str:
    """The figure of one source: logarithmic axes, the diagonal, a band of 10%, and a point for each row."""
    seconds = [value for one in scored for value in (one.row.step_s, one.predicted)]
    low, high = math.log10(min(seconds)), math.log10(max(seconds))
    margin = max(0.06 * (high - low), 0.04)
    low, high = low - margin, high + margin
    if high - low < 0.5:  # so that points which lie close are not spread over the whole plot
        middle = (low + high) / 2
        low, high = middle - 0.25, middle + 0.25

    def x(value: float) -> float:
        return LEFT + SIDE * (math.log10(value) - low) / (high - low)

    def y(value: float) -> float:
        return TOP + SIDE * (high - math.log10(value)) / (high - low)

    errors = Errors.of(one.error for one in scored)
    width, height = LEFT + SIDE + LEGEND, TOP + SIDE + BOTTOM
    subtitle = (
        f"{errors.count} rows · error {errors.mean:.1%} on average, median {errors.median:.1%}, worst "
        f"{errors.worst:.0%}, bias {errors.bias:+.1%}"
    )
    shift = SIDE * math.log10(1 + BAND) / (high - low)
    corners = [
        (LEFT, TOP + SIDE - shift), (LEFT + SIDE - shift, TOP), (LEFT + SIDE, TOP), (LEFT + SIDE, TOP + shift),
        (LEFT + shift, TOP + SIDE), (LEFT, TOP + SIDE),
    ]  # fmt: skip
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="12" fill="#24292f">',
        f"<title>{escape(title)}: predicted against measured seconds of a step</title>",
        f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="26" font-size="16" font-weight="600">{escape(title)}</text>',
        f'<text x="{LEFT}" y="45" fill="#57606a">{escape(subtitle)}</text>',
        f'<rect x="{LEFT}" y="{TOP}" width="{SIDE}" height="{SIDE}" fill="#f6f8fa"/>',
        f'<polygon points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in corners)}" fill="#dde7f3"/>',
    ]
    for tick in ticks(low, high):
        drawn += [
            f'<path d="M{x(tick):.1f} {TOP}V{TOP + SIDE}M{LEFT} {y(tick):.1f}H{LEFT + SIDE}" stroke="#ffffff"/>',
            f'<text x="{x(tick):.1f}" y="{TOP + SIDE + 17}" text-anchor="middle">{tick:g}</text>',
            f'<text x="{LEFT - 7}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>',
        ]
    drawn += [
        f'<path d="M{LEFT} {TOP + SIDE}L{LEFT + SIDE} {TOP}" stroke="#57606a" stroke-width="1.2"/>',
        f'<text x="{LEFT + SIDE / 2}" y="{height - 9}" text-anchor="middle">measured, seconds a step</text>',
        f'<text text-anchor="middle" transform="translate(17 {TOP + SIDE / 2}) rotate(-90)">predicted</text>',
    ]
    opacity = 0.85 if len(scored) < 150 else 0.45
    size = 4.5 if len(scored) < 150 else 3.2
    for one in scored:
        colour, shape = next((colour, shape) for name, colour, shape in KINDS if name == kind(one))
        label = f"{one.row.label}: measured {one.row.step_s:.4g} s, predicted {one.predicted:.4g} s ({one.error:+.1%})"
        place = mark(shape, x(one.row.step_s), y(one.predicted), size)
        drawn.append(
            f'<path d="{place}" fill="{colour}" fill-opacity="{opacity}"><title>{escape(label)}</title></path>'
        )
    drawn += legend(scored)
    return "\n".join([*drawn, "</svg>", ""])


def legend(scored: list[Scored]) -> list[str]:
    """What the points and the lines mean, beside the plot."""
    left, line, lines = LEFT + SIDE + 16, TOP + 14, []
    for name, colour, shape in KINDS:
        rows = [one for one in scored if kind(one) == name]
        if rows:
            mean = Errors.of(one.error for one in rows).mean
            lines += [
                f'<path d="{mark(shape, left + 5, line - 4, 5)}" fill="{colour}"/>',
                f'<text x="{left + 17}" y="{line}">{name}</text>',
                f'<text x="{left + 17}" y="{line + 15}" fill="#57606a">{len(rows)} rows, {mean:.1%}</text>',
            ]
            line += 38
    lines += [
        f'<path d="M{left - 1} {line - 4}h12" stroke="#57606a" stroke-width="1.2"/>',
        f'<text x="{left + 17}" y="{line}">as measured</text>',
        f'<rect x="{left - 1}" y="{line + 11}" width="12" height="10" fill="#dde7f3"/>',
        f'<text x="{left + 17}" y="{line + 20}">within {BAND:.0%}</text>',
    ]
    return lines


def mark(shape: str, x: float, y: float, r: float) -> str:
    """The outline of a point, as the path of an SVG."""
    if shape == "circle":
        return f"M{x - r:.1f} {y:.1f}a{r} {r} 0 1 0 {2 * r} 0a{r} {r} 0 1 0 {-2 * r} 0z"
    if shape == "square":
        s = 0.88 * r
        return f"M{x - s:.1f} {y - s:.1f}h{2 * s:.1f}v{2 * s:.1f}h{-2 * s:.1f}z"
    if shape == "diamond":
        s = 1.2 * r
        return f"M{x:.1f} {y - s:.1f}l{s:.1f} {s:.1f}l{-s:.1f} {s:.1f}l{-s:.1f} {-s:.1f}z"
    up = 1 if shape == "triangle" else -1
    return f"M{x:.1f} {y - up * 1.2 * r:.1f}l{1.15 * r:.1f} {up * 2 * r:.1f}h{-2.3 * r:.1f}z"


def ticks(low: float, high: float) -> list[float]:
    """Round numbers of seconds between two powers of ten: 1, 2 and 5 of each decade, fewer when there are many."""
    steps: tuple[float, ...] = (1,) if high - low > 3 else (1, 2, 5) if high - low > 0.8 else (1, 1.5, 2, 3, 4, 5, 6, 8)
    found = [step * 10.0**power for power in range(math.floor(low), math.ceil(high) + 1) for step in steps]
    return [float(f"{tick:.3g}") for tick in found if low <= math.log10(tick) <= high]
