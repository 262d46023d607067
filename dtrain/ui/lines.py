"""Pieces of a page of text: lines cut to a width, headings, bars, columns. Text from files is cleaned."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence

from rich.text import Text

from dtrain.config.redaction import hide
from dtrain.ui.tables import STYLES
from dtrain.util.format import clean, duration

Part = str | tuple[str, str]


def one_line(text: object) -> str:
    """Return untrusted text as one line without control, colour or direction codes, and without secrets."""
    return _one_line(str(text))


@functools.lru_cache(5000)  # a page has mostly the texts of the page before, and looking for secrets takes 0.3 ms
def _one_line(text: str) -> str:
    joined = " ".join(hide(clean(text)).expandtabs(4).splitlines())
    return "".join(char for char in joined if char.isprintable())


def line(*parts: Part) -> Text:
    return Text.assemble(*parts, no_wrap=True)


def fit(text: Text, width: int, pad: bool = False) -> Text:
    """Cut a line to the width, by cells: some characters take two."""
    text.truncate(max(0, width), overflow="ellipsis", pad=pad)
    return text


def heading(title: str, width: int, note: str = "") -> Text:
    text = line(("── ", "dim"), (title, "bold"), (f"  {note}" if note else "", "dim"), " ")
    return fit(text.append("─" * max(0, width - text.cell_len), style="dim"), width)


def bar(share: float, width: int, style: str = "cyan") -> Text:
    """Return a bar for a share of 0 to 1, in halves of a character."""
    halves = round(min(1.0, max(0.0, share)) * 2 * width)
    text = line(("━" * (halves // 2) + ("╸" if halves % 2 else ""), style))
    return text.append("─" * (width - text.cell_len), style="dim")


def spread(left: Text, right: Text, width: int) -> Text:
    """Put two texts on one line; the right one gives way."""
    room = width - left.cell_len - right.cell_len
    return fit(left.append(" " * room).append(right) if room >= 2 else left, width)


def beside(left: list[Text], right: list[Text], left_width: int, right_width: int, gap: int = 3) -> list[Text]:
    """Join two columns, line by line."""
    rows = max(len(left), len(right))
    left, right = ([*column, *(line() for _ in range(rows - len(column)))] for column in (left, right))
    return [
        line().append(fit(a, left_width, pad=True)).append(" " * gap).append(fit(b, right_width))
        for a, b in zip(left, right, strict=True)
    ]


def ago(when: float) -> str:
    return f"{duration(max(0.0, round(time.time() - when)))} ago"


def status_style(status: str) -> str:
    return f"bold {STYLES.get(status.rstrip('?'), 'cyan')}"


def keys_line(keys: Sequence[tuple[str, str]], width: int, note: str = "") -> Text:
    text = line()
    for key, meaning in keys:
        text.append("   " if text else "").append(key, style="bold").append(f" {meaning}", style="dim")
    return spread(text, line((one_line(note), "dim")), width)
