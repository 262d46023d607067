"""Format numbers, durations, losses and paths for people to read or type.

Every format accepts any object and returns "-" if it cannot use it: files come from other versions and crashed runs.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from pathlib import Path
from typing import Any


def number(value: object) -> float | None:
    """Return the value as a float, or None: run files come from other versions and from crashed writers."""
    try:
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
    except OverflowError:  # an integer of hundreds of digits
        return None


def finite(value: object) -> float | None:
    """Like `number`, but None also for NaN and the infinities: use it for calculations."""
    found = number(value)
    return found if found is not None and math.isfinite(found) else None


def counted(count: object, word: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{count} {word}" + ("" if count == 1 else "s")


def kind_of(value: object) -> str:
    """Name the type of a value with its article: a list, an int."""
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def start_text(start: object) -> str:
    """`first step after 34.2 s: imports 4.1, compile 25.6, …`, of a summary's start_s; phases below 1% are left out."""
    phases = {name: seconds for name, value in as_dict(start).items() if (seconds := number(value)) is not None}
    total = phases.pop("total", None)
    if total is None:
        return "-"
    shown = (f"{name.replace('_', ' ')} {s:.1f}" for name, s in phases.items() if s >= max(0.01 * total, 0.05))
    return f"first step after {total:.1f} s: {', '.join(shown)}"


def without_nan(value: Any) -> Any:
    """Replace NaN and the infinities by null, because they are not valid JSON."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def si(value: object) -> str:
    """Format as 124.4M, 1.56B, 65.5K, 512."""
    n = number(value)
    if n is None:
        return "-"
    if not math.isfinite(n):
        return str(n)
    if 0 < abs(n) < 1:
        return f"{n:.3g}"
    units = ["", "K", "M", "B", "T"]
    unit = 0
    # 999.95 instead of 1000, because it would be rounded to 1000.0.
    while abs(n) >= 999.95 and unit < len(units) - 1:
        n, unit = n / 1000, unit + 1
    text = f"{n:.2f}" if abs(n) < 9.995 else f"{n:.1f}"
    return text.rstrip("0").rstrip(".") + units[unit]


def three_digits(value: float) -> str:
    """Format as 0.123, 4.56, 789, and 4,190, which `.3g` would write as 4.19e+03."""
    return f"{value:.3g}" if abs(value) < 999.5 or not math.isfinite(value) else f"{value:,.0f}"


def duration(seconds: object) -> str:
    """Format as 4.2s, 42s, 1m 23s, 2h 05m, 3d 04h."""
    s = number(seconds)
    if s is None or not math.isfinite(s) or s < 0:
        return "-"
    if round(s, 1) < 10:
        return f"{s:.1f}s"
    whole = round(s)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole // 60 % 60:02d}m"
    return f"{whole // 86400}d {whole // 3600 % 24:02d}h"


def step_time(seconds: object) -> str:
    """Format a step's time more precisely than `duration` below ten seconds: milliseconds below one."""
    s = number(seconds)
    return duration(s) if s is None or not 0 <= s < 10 else f"{three_digits(1000 * s)} ms" if s < 1 else f"{s:.2f}s"


def loss_text(value: object) -> str:
    n = number(value)
    if n is None:
        return "-"
    return f"{n:.4f}" if n == 0 or 1e-3 <= abs(n) < 1e5 or not math.isfinite(n) else f"{n:.3e}"


def percent(fraction: object) -> str:
    n = number(fraction)
    return "-" if n is None else f"{100 * n:.1f}%"


def gib(value: object) -> str:
    n = number(value)
    return "-" if n is None else f"{n:.2f} GiB" if n < 10 else f"{n:.1f} GiB"


def size_text(num_bytes: float) -> str:
    """Format as 3 B, 1.5 KiB, 12 MiB."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.3g} {name}" if num_bytes / unit < 1000 else f"{num_bytes / unit:.0f} {name}"
    return f"{num_bytes:.0f} B"


def perplexity(value: object) -> str:
    n = number(value)
    return si(n) if n is not None and n < 5e8 else "-"  # above e^20 the number is meaningless


def clean(text: str) -> str:
    """Strip color codes and control characters from untrusted text: they confuse terminals."""
    text = re.sub(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|.)", "", text)
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "", text)


def short_path(path: Path) -> str:
    """Return the path as a user would type it: relative if inside the current folder. Not quoted."""
    full, here = Path(os.path.abspath(path)), Path.cwd()
    return str(full.relative_to(here)) if full.is_relative_to(here) else str(full)


def shell_path(path: Path) -> str:
    """Return `short_path`, ready to paste into a shell."""
    text = short_path(path)
    return shlex.quote("./" + text if text.startswith("-") else text)


def argument(key: str, value: str) -> str:
    """Return `KEY=VALUE`, ready to paste: quoted for Hydra's grammar first, then for the shell.

    A sweep folder's name contains `=` and `,`, which Hydra rejects or reads as a sweep unless quoted.
    """
    if not re.fullmatch(r"[A-Za-z0-9_./@-]+", value):
        # Hydra: a backslash is literal, except before a quote.
        value = '"' + re.sub(r'(\\*)("|$)', lambda m: m[1] * 2 + ('\\"' if m[2] else ""), value) + '"'
    return shlex.quote(f"{key}={value}")


def resume_argument(path: Path) -> str:
    text = short_path(path)
    # a folder named `12` or `null` must not be read as a number or as null
    return argument("resume", text if "/" in text else "./" + text)
