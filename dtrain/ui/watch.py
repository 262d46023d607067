"""The page of `dtrain watch` about one run (watch_list.py: several). Functions from what is known to lines of text.

A page has exactly the asked number of columns or fewer, and at most the asked number of lines: parts that matter less
are left out of a small terminal. Everything from a run folder is untrusted, so `one_line` cleans it.
"""

from __future__ import annotations

import time
from typing import Any

from rich.text import Text

from dtrain.runs.live import BoundedCurve, LiveRun
from dtrain.ui.curve import Series, curve
from dtrain.ui.lines import Part, ago, bar, beside, fit, heading, line, one_line, spread, status_style
from dtrain.ui.progress import own_texts
from dtrain.ui.tables import STYLES
from dtrain.ui.watch_ranks import node_lines, node_table, rank_lines, rank_table, step_line, step_table
from dtrain.util.format import duration, finite, gib, loss_text, percent, short_path, si, step_time

WIDE, TALL = 120, 34  # from these on, two columns, and tables of ranks and GPUs
TITLES = {
    "loss": "loss", "val_loss": "validation loss", "tokens_per_s": "tokens/s", "mfu": "MFU", "lr": "learning rate",
    "grad_norm": "gradient norm", "step_s": "step time (s)", "data_s": "wait for data (s)", "mem_gib": "memory (GiB)",
}  # fmt: skip


def run_page(
    run: LiveRun, width: int, height: int, metric: str = "loss", log: bool = False, note: str = "", why: str = ""
) -> list[Text]:
    """Return the page of one run. note: why it has its status. why: the cause of its end."""
    width = max(20, width)
    top = [*header(run, width, note), *alerts(run, width, why)][: max(1, height)]
    room = height - len(top)
    if width >= WIDE and height >= TALL:
        return top + _wide(run, width, room, metric, log)
    # of a small page, 6 lines of curve matter most, then a line on each subject, then the log
    places = place_lines(run, width)
    if height < TALL:
        places = [fit(line(" · ").join(places[:1] + [_narrow(text) for text in places[1:]]), width)]
    details = [*step_line(run, width), *rank_lines(run, width), *node_lines(run, width), *places]
    details = details[: max(0, room - 7)]
    spare = room - len(details) - 1
    log_room = min(len(run.log) + 1, max(4, spare // 3)) if run.log and spare >= 12 else 0
    lines, rows = top, spare - log_room
    if rows >= 4:
        lines += [curve_heading(run, metric, width), *curve_lines(run, metric, width, rows, log)]
    lines += details
    if log_room:
        lines += log_lines(run, width, log_room)
    return lines[:height]


def _wide(run: LiveRun, width: int, room: int, metric: str, log: bool) -> list[Text]:
    """Two columns: curves, and beside them speed, ranks and GPUs; below them the log."""
    bottom = log_lines(run, width, max(4, min(room // 4, len(run.log) + 1)))
    body = room - len(bottom)
    right_width = min(84, (width - 3) * 9 // 20)
    left_width = width - 3 - right_width
    upper = max(8, body * 3 // 5)
    left = [curve_heading(run, metric, left_width), *curve_lines(run, metric, left_width, upper - 1, log)]
    if body - upper >= 6:
        left += recent_lines(run, metric, left_width, body - upper, log)
    details = [*place_lines(run, right_width)]
    tables = [*step_table(run, right_width), *rank_table(run, right_width, 8)]
    tables += node_table(run, right_width, max(3, body - len(tables) - len(details) - 10))
    speed = min(12, body - len(tables) - len(details))
    right = speed_lines(run, right_width, speed) if speed >= 6 else []
    right += tables
    if details:
        right += [heading("run", right_width), *details]
    return beside(left[:body], right[:body], left_width, right_width) + bottom


def header(run: LiveRun, width: int, note: str = "") -> list[Text]:
    """Name and status, progress, and the newest metrics: three lines."""
    get, row = run.record.summary.get, run.row
    status = line((one_line(run.name), "bold"), "  ", (one_line(run.status or "unknown"), status_style(run.status)))
    if note:
        status.append(f" ({one_line(note)})", style="dim")
    elif run.phase not in ("", "step", "data"):
        status.append(f" ({one_line(run.phase)})", style="dim")
    ranks = get("world_size") and f"{get('world_size')} × {get('device') or 'rank'}"
    what = " · ".join(one_line(v) for v in (get("model"), get("strategy"), get("precision"), ranks) if v)
    lines = [spread(status, line((what, "dim")), width)]

    step, total = run.step, run.total_steps
    if step is None:
        step = int(finite(get("steps")) or 0)
    done = f"step {step}" + (f"/{total}  {100 * step / total:.1f}%" if total else "")
    left = f"ETA {duration(run.eta_s)}" if run.eta_s is not None else ""
    if not run.is_live and (wall := finite(get("wall_s"))) is not None:
        left = f"in {duration(wall)}"
    size = width - len(done) - len(left) - 4
    progress = line(done)
    if total and size >= 8:
        progress.append("  ").append(bar(step / total, size, STYLES.get(run.status, "cyan")))
    lines.append(fit(progress.append(f"  {left}"), width))
    lines.append(fields_line(run, row, width))
    return lines


def fields_line(run: LiveRun, row: dict[str, Any], width: int) -> Text:
    """The newest metrics, as many as fit."""
    get = run.record.summary.get
    fields: list[list[Part]] = []

    def field(name: str, text: str, after: str = "") -> None:
        if text != "-":
            fields.append([(f"{name} ", "dim"), text, (f" {after}" if after else "", "dim")])

    loss = row.get("loss", get("train_loss"))
    field("loss", "not finite" if "loss" in row and loss is None else loss_text(loss))
    at = run.evaluation.get("step")
    field("val", loss_text(run.evaluation.get("val_loss", get("val_loss"))), f"at {at}" if at is not None else "")
    field("accuracy", percent(run.evaluation.get("val_accuracy", get("val_accuracy"))))
    for text in own_texts(run.evaluation):
        name, _, value = text.rpartition(" ")
        field(name, value)
    unit = {"tokens": "tok"}.get(str(get("unit") or "tokens"), "samples")
    speed = run.recent_median("tokens_per_s") or finite(get("tokens_per_s"))
    field(f"{unit}/s", si(speed), against(speed, run.plan.get("tokens_per_s")))
    field("step", step_time(run.recent_median("step_s")))
    field("MFU", percent(row.get("mfu", get("mfu"))))
    field("mem", gib(row.get("mem_gib", get("peak_mem_gib"))), against(row.get("mem_gib"), run.plan.get("memory_gib")))
    field("lr", f"{lr:.2e}" if (lr := finite(row.get("lr"))) is not None else "-")
    field("grad", loss_text(row.get("grad_norm")))
    result = line()
    for parts in fields:
        piece = line("   " if result else "", *parts)
        if result.cell_len + piece.cell_len <= width:
            result.append(piece)
    return result


def against(value: object, plan: float | None) -> str:
    """Return `97% of plan`, if there is one."""
    measured = finite(value)
    return f"{100 * measured / plan:.0f}% of plan" if measured is not None and plan else ""


def alerts(run: LiveRun, width: int, why: str) -> list[Text]:
    """What needs a person: a standstill, a failure, a slow rank, or silence."""
    found: list[tuple[str, str, str]] = []
    if run.standstill:
        found.append(("stands still", run.standstill, "bold yellow"))
    elif run.status.startswith("running") and run.recent and (quiet := time.time() - run.record.last_sign) > 60:
        found.append(("quiet", f"nothing new for {duration(quiet)}", "yellow"))
    if why:
        found.append(("why", why, "yellow" if run.status in ("preempted", "cancelled") else "red"))
    elif run.failure:
        rank = f"rank {run.failure['rank']}: " if run.failure.get("rank") is not None else ""
        message = str(run.failure.get("message") or "").strip().splitlines()
        found.append(("failed", f"{rank}{run.failure.get('type')}: {message[-1] if message else ''}", "red"))
    if run.slow and run.is_live and not run.slow.split(":")[0].count(" was "):
        found.append(("slow rank", run.slow, "yellow"))
    lines = []
    for label, text, style in found:
        body = line((f"{label}  ", "dim"), (one_line(text), style))
        # a long sentence gets a second line, and no third
        if body.cell_len > width:
            indent = len(label) + 2
            cut = body.plain.rfind(" ", indent, width) if " " in body.plain[indent:width] else width
            lines += [body[:cut], fit(line(" " * indent).append(body[cut:].plain.lstrip(), style=style), width)]
        else:
            lines.append(body)
    return lines


def curve_heading(run: LiveRun, metric: str, width: int) -> Text:
    steps = run.curves[metric].x if metric in run.curves else []
    note = f"steps {steps[0]:.0f} to {run.step or steps[-1]:.0f}" if steps else ""
    return heading(TITLES.get(metric, one_line(metric)), width, note)


def series_of(run: LiveRun, metric: str) -> list[Series]:
    """The curve of a metric, with validation beside the loss and the plan beside the speed."""
    points = run.curves.get(metric, BoundedCurve())
    found: list[Series] = [(TITLES.get(metric, one_line(metric)), points.x, points.y)]
    if metric == "loss" and "val_loss" in run.curves:
        other = run.curves["val_loss"]
        found.append(("validation", other.x, other.y))
    if metric in run.plan and points.x:
        found.append(("plan", [points.x[0], points.x[-1]], [run.plan[metric]] * 2))
    return found


def curve_lines(run: LiveRun, metric: str, width: int, height: int, log: bool) -> list[Text]:
    return curve(series_of(run, metric), width, height, log, mean=metric not in ("loss", "grad_norm"))  # spikes matter


def recent_lines(run: LiveRun, metric: str, width: int, height: int, log: bool) -> list[Text]:
    """The newest steps of a metric: a quarter of the run, at most those of which all metrics are kept."""
    rows = list(run.recent)[-max(20, (run.step or 0) // 4) :]
    found = [(row["step"], value) for row in rows if (value := finite(row.get(metric))) is not None]
    x, y = [step for step, _ in found], [value for _, value in found]
    title = heading(f"{TITLES.get(metric, one_line(metric))}, newest steps", width)
    return [title, *curve([(metric, x, y)], width, height - 1, log)]


def speed_lines(run: LiveRun, width: int, height: int) -> list[Text]:
    speed, plan = run.recent_median("tokens_per_s"), run.plan.get("tokens_per_s")
    unit = str(run.record.summary.get("unit") or "tokens")
    note = against(speed, plan) or ("no plan for this hardware" if speed else "")
    return [
        heading(f"{one_line(unit)}/s", width, note),
        *curve(series_of(run, "tokens_per_s"), width, height - 1, mean=True),
    ]


def place_lines(run: LiveRun, width: int) -> list[Text]:
    """Checkpoint, job, attempts and folder, a line each."""
    rows: list[tuple[str, str]] = []
    if run.checkpoint:
        rows.append(("saved", f"step {run.checkpoint[0]}, {ago(run.checkpoint[1])}"))
    record, job = run.record, run.job
    if job and job.state != "GONE":
        parts = [f"{job.id} {job.state}"]
        if job.queued and job.submitted:
            parts.append(f"waits {duration(max(0.0, time.time() - job.submitted))}")
        elif job.elapsed is not None:
            # SLURM reports a year for no limit
            limit = f" of {duration(job.limit)}" if job.limit and job.limit < 31536000 else ""
            parts.append(duration(job.elapsed) + limit)
        rows.append(("job", ", ".join([*parts, job.nodes] if job.nodes else parts)))
    elif record.job_id:
        rows.append(("job", record.job_id))
    elif run.is_live and record.launch.get("pid"):
        rows.append(("process", f"{record.launch['pid']} on {record.launch.get('host', '?')}"))
    attempts = record.attempts
    if len(attempts) > 1:
        ends = [f"to step {a['step']}: {a['why'] or a['code']}" for a in attempts[:-1] if a["ended"] is not None]
        rows.append(("starts", f"{len(attempts)}" + (f", the one before {ends[-1]}" if ends else "")))
    rows.append(("folder", short_path(run.run_dir)))
    return [fit(line((f"{label:<8}", "dim"), one_line(text)), width) for label, text in rows]


def _narrow(text: Text) -> Text:
    """Return a line of `place_lines` without the spaces after its label."""
    label = text.plain[:8].rstrip()
    return text[: len(label) + 1].append(text[8:])


def log_lines(run: LiveRun, width: int, height: int) -> list[Text]:
    """The newest lines of the logs, the newest last."""
    if not run.log:
        return [heading("log", width), line(("nothing written yet", "dim"))][:height]
    newest_lines = list(run.log)[-(height - 1) :]
    names = list(dict.fromkeys(name for name, _ in newest_lines))
    lines = [heading("log", width, one_line(", ".join(names)))]
    for name, text in newest_lines:
        prefix = f"{one_line(name.removesuffix('.log'))}  " if len(names) > 1 else ""
        style = "red" if " ERROR " in text else "yellow" if " WARNING " in text else ""
        lines.append(fit(line((prefix, "dim"), (one_line(text), style)), width))
    return lines
