"""The page of `dtrain watch` about several runs: a table with small curves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.text import Text

from dtrain.runs.live import Glance
from dtrain.runs.record import run_name
from dtrain.ui.curve import sparkline
from dtrain.ui.lines import fit, line, one_line, spread, status_style
from dtrain.util.format import duration, finite, loss_text, si

WIDE = 120  # from here on, longer curves


def list_page(
    runs: Sequence[Glance], width: int, height: int, selected: int | None = None, title: str = ""
) -> list[Text]:
    """Return a table of runs. selected: the row that is marked, and always visible."""
    width = max(20, width)
    live = sum(run.is_live for run in runs)
    counts = Counter(run.status.rstrip("?") or "unknown" for run in runs)
    state = " · ".join(f"{count} {one_line(status)}" for status, count in counts.items())
    lines = [spread(line((one_line(title), "bold")), line((state, "dim")), width)]
    if not runs:
        return [*lines, fit(line("no runs here yet: start one with `dtrain launch`"), width)][:height]
    rows = [cells_of(run, width) for run in runs]
    names = Counter(row["run"] for row in rows)
    for run, row in zip(runs, rows, strict=True):
        if names[row["run"]] > 1:
            row["run"] = one_line(Path(*run.run_dir.parts[-2:]))
    columns = table_columns(rows, width)
    lines.append(fit(_row([(name, "bold") for name in columns], columns), width))
    room = max(1, height - len(lines))
    first = 0
    if selected is not None and len(runs) > room:
        first = min(max(0, selected - room // 2), len(runs) - room)
    best = _best(runs)
    for i, run in enumerate(runs[first : first + room], first):
        styles = {"status": status_style(run.status), "curve": "cyan"} if i != selected else {}
        cells = [(rows[i][name], styles.get(name, "")) for name in columns]
        text = fit(_row(cells, columns), width, pad=i == selected)
        if i == best and live == 0:
            text.stylize("green")
        if i == selected:
            text.stylize("reverse")
        lines.append(text)
    return lines[:height]


RIGHT = ("step", "loss", "val loss", "tok/s", "ETA")
# columns that a narrow terminal drops first
DROPPED = ("job", "tok/s", "ETA", "val loss", "curve", "step", "loss")


def table_columns(rows: Sequence[dict[str, str]], width: int) -> dict[str, int]:
    """The columns that fit, with their widths; the name takes what is left, up to its longest."""
    sizes = {name: max(len(name), *(line(row[name]).cell_len for row in rows)) for name in rows[0]}
    for name in list(sizes):
        if name not in ("run", "status") and not any(row[name] for row in rows):
            del sizes[name]
    for name in DROPPED:
        least = sum(sizes.values()) - sizes["run"] + min(sizes["run"], 24) + 2 * (len(sizes) - 1)
        if least <= width:
            break
        sizes.pop(name, None)
    rest = sum(size for name, size in sizes.items() if name != "run") + 2 * (len(sizes) - 1)
    sizes["run"] = max(8, min(sizes["run"], width - rest))
    return sizes


def cells_of(run: Glance, width: int) -> dict[str, str]:
    """The texts of a run's row, by column."""
    get = run.record.summary.get
    step, total = finite(run.row.get("step", get("steps"))), finite(get("total_steps"))
    seconds = finite(run.row.get("step_s"))
    is_running = run.status.startswith("running") and None not in (step, total, seconds)
    texts = {
        "run": one_line(label(run)),
        "status": one_line(run.status or "unknown"),
        "step": "" if step is None else f"{step:.0f}" + (f"/{total:.0f}" if total else ""),
        "curve": sparkline(run.losses, 24 if width >= WIDE else 12),
        "loss": loss_text(run.row.get("loss", get("train_loss"))),
        "val loss": loss_text(run.row.get("val_loss", get("val_loss"))),
        "tok/s": si(run.row.get("tokens_per_s", get("tokens_per_s"))),
        "ETA": duration(seconds * (total - step)) if is_running else "",  # type: ignore[operator]
        "job": one_line(run.record.job_id or ""),
    }
    return {name: "" if text == "-" else text for name, text in texts.items()}


def label(run: Glance) -> str:
    """A run's name; for a point of a sweep, with its overrides in it."""
    return run.run_dir.name if _is_point(run.run_dir) else run_name(run.run_dir)


def _is_point(run_dir: Path) -> bool:
    return run_dir.name.partition("-")[0].isdigit() and len(run_dir.name.partition("-")[0]) < 5


def _best(runs: Sequence[Glance]) -> int | None:
    values = [finite(run.record.summary.get("val_loss")) for run in runs]
    known = [i for i, value in enumerate(values) if value is not None]
    return min(known, key=lambda i: values[i] or 0.0) if len(known) > 1 else None


def _row(cells: Iterable[tuple[str, str]], columns: dict[str, int]) -> Text:
    result = line()
    for (text, style), (name, size) in zip(cells, columns.items(), strict=True):
        cell = fit(line((text, style)), size)
        space = " " * (size - cell.cell_len)
        cell = line(space).append(cell) if name in RIGHT else cell.append(space)
        result.append("  " if result else "").append(cell)
    return result
