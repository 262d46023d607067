"""Curves in a terminal, drawn with braille characters: a character has 2 × 4 dots. Also sparklines of one line.

`curve` returns lines of rich text and prints nothing, so that a caller can put them anywhere.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dtrain.util.format import si

if TYPE_CHECKING:
    from rich.text import Text

Series = tuple[str, Sequence[float], Sequence[float]]  # name, x, y
STYLES = ("cyan", "yellow", "green", "magenta", "blue", "red")  # of the series, in their order
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # bit of a dot, by row and column in its character
LARGEST_DRAWN = 1e100  # larger values are not drawn: the arithmetic would overflow
BLOCKS = "▁▂▃▄▅▆▇█"


def curve(
    series: Sequence[Series],
    width: int,
    height: int,
    log: bool = False,
    x_name: str = "step",
    styles: Sequence[str] = STYLES,
    mean: bool = False,
) -> list[Text]:
    """Draw the series into `height` lines of at most `width` columns: the plot, its axes and, for several, a legend.

    Where several points share a column of dots, all values from the smallest to the largest are marked, so that a
    spike of one step stays visible; mean: only their mean. Values that are not finite, or not positive with `log`, are
    left out.
    """
    from rich.text import Text

    kept = [(name, *_usable(x, y, log)) for name, x, y in series]
    if mean:
        kept = [(name, *_means(x, y, width)) for name, x, y in kept]
    legend = height >= 6 and len(series) > 1
    rows = max(1, height - (3 if legend else 2))
    xs = [x for _, x_values, _ in kept for x in x_values]
    ys = [y for _, _, y_values in kept for y in y_values]
    if not ys:
        return [Text("no values yet"[:width], style="dim")] + [Text("") for _ in range(height - 1)]
    low, high = _range(min(ys), max(ys))
    constant = _is_constant(min(ys), max(ys))
    ticks = [(ys[0], si(10 ** ys[0] if log else ys[0]))] if constant else _ticks(low, high, rows, log)
    labels = {_row(value, low, high, rows): text for value, text in ticks}
    margin = max((len(text) for text in labels.values()), default=0) + 1
    columns = max(2, width - margin - 1)
    first, last = min(xs), max(xs)
    last = first if _is_constant(first, last) else last
    plot = _Dots(columns, rows)
    for i, (_, x_values, y_values) in reversed(list(enumerate(kept))):  # the first series is on top
        plot.line(x_values, y_values, (first, last), (low, high), styles[i % len(styles)])
    lines = []
    for row, text in enumerate(plot.lines()):
        axis = f"{labels[row]:>{margin - 1}} ┤" if row in labels else " " * margin + "│"
        lines.append(Text.assemble((axis, "dim"), text))
    lines += [Text(" " * margin + line, style="dim") for line in _x_axis(first, last, columns, x_name)]
    if legend:
        lines.append(_legend([name for name, _, _ in kept], margin + 1, width, styles))
    for line in lines:
        line.no_wrap = True
        line.truncate(width)
    return lines[-height:] if height < len(lines) else lines


def sparkline(values: Sequence[float], width: int) -> str:
    """Return a line of blocks, the newest value last; each block is the mean of its share of the values."""
    found = [value for value in values if abs(value) < LARGEST_DRAWN]
    if not found or width < 1:
        return ""
    count = min(width, len(found))
    _, means = _means(found, found, count)
    low, high = min(means), max(means)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((mean - low) * scale)] for mean in means)


class _Dots:
    """A grid of braille characters, each with the style of the series that marked it last."""

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self.bits = [[0] * columns for _ in range(rows)]
        self.styles = [[""] * columns for _ in range(rows)]

    def line(
        self,
        x: Sequence[float],
        y: Sequence[float],
        x_range: tuple[float, float],
        y_range: tuple[float, float],
        style: str,
    ) -> None:
        """Mark the values of each column of dots, and connect it with the column before."""
        x_scale = (2 * self.columns - 1) / ((x_range[1] - x_range[0]) or 1)
        y_scale = (4 * self.rows - 1) / ((y_range[1] - y_range[0]) or 1)
        spans: dict[int, list[int]] = {}  # dot column: lowest, highest and last dot
        for x_value, y_value in zip(x, y, strict=True):
            column = round((min(x_value, x_range[1]) - x_range[0]) * x_scale)
            dot = round((y_range[1] - y_value) * y_scale)
            span = spans.setdefault(column, [dot, dot, dot])
            span[:] = min(span[0], dot), max(span[1], dot), dot
        before: tuple[int, int] | None = None
        for column in sorted(spans):
            top, bottom, end = spans[column]
            if before is not None:
                self._connect(before, (column, min(max(before[1], top), bottom)), style)
            for dot in range(top, bottom + 1):
                self._mark(column, dot, style)
            before = column, end

    def _connect(self, start: tuple[int, int], end: tuple[int, int], style: str) -> None:
        (x0, y0), (x1, y1) = start, end
        count = max(x1 - x0, abs(y1 - y0))
        for i in range(1, count):
            self._mark(x0 + round((x1 - x0) * i / count), y0 + round((y1 - y0) * i / count), style)

    def _mark(self, x: int, y: int, style: str) -> None:
        row, column = y // 4, x // 2
        self.bits[row][column] |= DOTS[y % 4][x % 2]
        self.styles[row][column] = style

    def lines(self) -> list[Text]:
        from rich.text import Text

        lines = []
        for bits, styles in zip(self.bits, self.styles, strict=True):
            line, start = Text(), 0
            for i in range(1, self.columns + 1):
                if i == self.columns or styles[i] != styles[start]:
                    chars = (chr(0x2800 + bit) if bit else " " for bit in bits[start:i])
                    line.append("".join(chars), style=styles[start])
                    start = i
            lines.append(line)
        return lines


def _usable(x: Sequence[float], y: Sequence[float], log: bool) -> tuple[list[float], list[float]]:
    lowest = 1e-100 if log else -LARGEST_DRAWN
    points = [
        (a, b) for a, b in zip(x, y, strict=True) if abs(a) < LARGEST_DRAWN and lowest < b < LARGEST_DRAWN
    ]  # false for NaN
    return [a for a, _ in points], [math.log10(b) if log else b for _, b in points]


def _means(x: list[float], y: list[float], count: int) -> tuple[list[float], list[float]]:
    """Return the means of at most so many groups of neighbouring points."""
    if len(x) <= count:
        return x, y
    parts = [slice(len(x) * i // count, len(x) * (i + 1) // count) for i in range(count)]
    return [statistics.fmean(x[part]) for part in parts], [statistics.fmean(y[part]) for part in parts]


def _is_constant(low: float, high: float) -> bool:
    """Whether the difference is below what a float can show."""
    return high - low <= max(1e-200, 1e-9 * max(abs(low), abs(high)))


def _range(low: float, high: float) -> tuple[float, float]:
    if not _is_constant(low, high):
        return low, high
    around = max(abs(low) * 0.05, 1e-150)  # a constant is drawn in the middle
    return low - around, high + around


def _row(value: float, low: float, high: float, rows: int) -> int:
    return round((high - value) / (high - low) * (4 * rows - 1)) // 4


def _steps(low: float, high: float, most: int, least: float = 0.0) -> list[float]:
    """Return at most about `most` round values in the range: multiples of 1, 2 or 5 times a power of ten."""
    raw = max(least, (high - low) / max(1, most))
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _ticks(low: float, high: float, rows: int, log: bool) -> list[tuple[float, str]]:
    """Return (position, label) of the y axis."""
    most = max(2, min(6, rows // 2))
    if not log:
        values = _steps(low, high, most)
        if len(values) < 2:
            values = [low, high]
        return [(value, _tick(value, values[1] - values[0])) for value in values]
    decades = range(math.floor(low), math.ceil(high) + 1)
    for factors in (range(1, 10), (1, 2, 5), (1, 3), (1,)):  # the densest that fits
        found = [p for decade in decades for f in factors if low <= (p := decade + math.log10(f)) <= high]
        if len(found) <= most:
            break
    if len(found) < 2:
        found = [low, high]
    return [(p, f"{10**p:.3g}" if p < 4 else si(10**p)) for p in found[:: math.ceil(len(found) / most)]]


def _tick(value: float, step: float) -> str:
    """Write a tick with the digits that tell it from the next one, `step` away."""
    if value and (step < 1e-4 or abs(value) >= 1e15):
        return f"{value:.1e}"
    if abs(value) >= 10_000 and step >= 10:
        return si(value)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{value:.{digits if value else min(digits, 1)}f}"


def _x_axis(first: float, last: float, columns: int, name: str) -> list[str]:
    """Return the line below the plot, and the labels below that line."""
    least = 1.0 if float(first).is_integer() and float(last).is_integer() else 0.0  # steps, not hours
    ticks = _steps(first, last, max(3, columns // 10), least) if last > first else [first]
    line, labels = ["─"] * columns, [" "] * columns
    free = 0  # first column without a label
    for value in ticks:
        column = round((value - first) / ((last - first) or 1) * (columns - 1))
        text = _tick(value, ticks[1] - ticks[0] if len(ticks) > 1 else 1.0)
        start = min(max(0, column - len(text) // 2), columns - len(text))
        if start < free:
            continue
        line[column] = "┬"
        labels[start : start + len(text)] = text
        free = start + len(text) + 1
    text = "".join(labels)
    if name and columns - len(name) > free:
        text = text[: columns - len(name)] + name
    return ["└" + "".join(line), " " + text]


def _legend(names: Sequence[str], margin: int, width: int, styles: Sequence[str]) -> Text:
    from rich.text import Text

    line = Text(" " * margin)
    for i, name in enumerate(names):
        line.append("  ━━ " if i else "━━ ", style=styles[i % len(styles)])
        line.append(name)
    line.truncate(width, overflow="ellipsis")
    return line
