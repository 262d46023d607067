"""The pages of `dtrain watch`: one run, or a list of runs. Functions from what is known to lines of text.

A page has exactly the asked number of columns or fewer, and at most the asked number of lines: parts that matter less
are left out of a small terminal. Everything from a run folder is untrusted, so `plain` cleans it.
"""

from __future__ import annotations

import functools
import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from dtrain.config.redaction import hide
from dtrain.runs.live import Glance, LiveRun, Points
from dtrain.runs.record import run_name
from dtrain.ui.curve import BLOCKS, Series, curve, sparkline
from dtrain.ui.tables import STYLES
from dtrain.util.format import as_dict, clean, duration, finite, gib, loss_text, percent, short_path, si, step_time

WIDE, TALL = 120, 34  # from these on, two columns, and tables of ranks and GPUs
TITLES = {
    "loss": "loss",
    "val_loss": "validation loss",
    "tokens_per_s": "tokens/s",
    "mfu": "MFU",
    "lr": "learning rate",
}
TITLES |= {"grad_norm": "gradient norm", "step_s": "step time (s)", "data_s": "wait for data (s)", "mem_gib": "memory"}
Part = str | tuple[str, str]


# ---- small pieces ------------------------------------------------------------------------------------------------


def plain(text: object) -> str:
    """Return untrusted text as one line without control, colour or direction codes, and without secrets."""
    return _plain(str(text))


@functools.lru_cache(5000)  # a page has mostly the texts of the page before, and looking for secrets takes 0.3 ms
def _plain(text: str) -> str:
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


# ---- one run -----------------------------------------------------------------------------------------------------


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
    status = line((plain(run.name), "bold"), "  ", (plain(run.status or "unknown"), status_style(run.status)))
    if note:
        status.append(f" ({plain(note)})", style="dim")
    elif run.phase not in ("", "step", "data"):
        status.append(f" ({plain(run.phase)})", style="dim")
    ranks = get("world_size") and f"{get('world_size')} × {get('device') or 'rank'}"
    what = " · ".join(plain(v) for v in (get("model"), get("strategy"), get("precision"), ranks) if v)
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
        body = line((f"{label}  ", "dim"), (plain(text), style))
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
    return heading(TITLES.get(metric, plain(metric)), width, note)


def series_of(run: LiveRun, metric: str) -> list[Series]:
    """The curve of a metric, with validation beside the loss and the plan beside the speed."""
    points = run.curves.get(metric, Points())
    found: list[Series] = [(TITLES.get(metric, plain(metric)), points.x, points.y)]
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
    title = heading(f"{TITLES.get(metric, plain(metric))}, newest steps", width)
    return [title, *curve([(metric, x, y)], width, height - 1, log)]


def speed_lines(run: LiveRun, width: int, height: int) -> list[Text]:
    speed, plan = run.recent_median("tokens_per_s"), run.plan.get("tokens_per_s")
    unit = str(run.record.summary.get("unit") or "tokens")
    note = against(speed, plan) or ("no plan for this hardware" if speed else "")
    return [
        heading(f"{plain(unit)}/s", width, note),
        *curve(series_of(run, "tokens_per_s"), width, height - 1, mean=True),
    ]


# ---- where a step goes, ranks ------------------------------------------------------------------------------------

PARTS = (("own", "cyan", "█"), ("wait", "yellow", "▒"), ("data", "magenta", "░"))  # a step's parts


def step_parts(run: LiveRun) -> dict[str, float]:
    """Mean seconds of a step by part. Own work includes waiting for data; that is shown apart."""
    if run.ranks.get("own_s"):
        own, wait, data = (_mean(run.ranks.get(name, [])) for name in ("own_s", "wait_s", "data_s"))
        return {"own": max(0.0, own - data), "wait": wait, "data": data}
    whole, waited = run.recent_median("step_s"), run.recent_median("data_s")
    return {} if whole is None or waited is None else {"own": max(0.0, whole - waited), "data": waited}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def step_line(run: LiveRun, width: int, label: str = "step") -> list[Text]:
    """Where a step's time goes, on one line."""
    parts = step_parts(run)
    whole = sum(parts.values())
    if not whole:
        return []
    text = line((f"{label:<8}" if label else "", "dim"))
    for form in ("{name} {time} {share:.0f}%", "{name} {share:.0f}%"):  # the second one where there is little room
        legend = line()
        for name, style, char in PARTS:
            if name in parts:
                share = 100 * parts[name] / whole
                legend.append(f"  {char} ", style=style)
                legend.append(form.format(name=name, time=step_time(parts[name]), share=share))
        size = max(0, min(40, width - text.cell_len - legend.cell_len))
        if size >= 10:
            break
    ends = 0.0
    used = 0
    for name, style, char in PARTS:
        ends += parts.get(name, 0.0)
        upto = round(size * ends / whole)
        text.append(char * (upto - used), style=style)
        used = upto
    return [fit(text.append(legend), width)]


def step_table(run: LiveRun, width: int) -> list[Text]:
    found = step_line(run, width, "")
    return [heading("where a step goes", width), *found] if found else []


def rank_heights(own: Sequence[float]) -> str:
    """One block per rank: its own work, from the fastest rank's half to the slowest rank."""
    low, high = min(own) / 2, max(own)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((value - low) * scale)] for value in own)


def rank_lines(run: LiveRun, width: int, label: str = "ranks") -> list[Text]:
    """All ranks on one line: a block each, and the slowest."""
    own = run.ranks.get("own_s", [])
    if len(own) < 2:
        return []
    slowest = max(range(len(own)), key=own.__getitem__)
    others = sorted(own)[len(own) // 2 - (len(own) % 2 == 0)]
    note = f"  own work of {len(own)} ranks, slowest {slowest}: {step_time(own[slowest])}"
    note += f" ({own[slowest] / others:.2f} × median)" if others else ""
    label = f"{label:<8}" if label else ""
    room = width - len(label) - len(note)
    strip = rank_heights(own)
    if len(own) > room:  # too many: the slowest of each group stands for it
        strip = rank_heights([max(own[i : i + math.ceil(len(own) / max(8, room))]) for i in _starts(own, max(8, room))])
    text = line((label, "dim"), (strip, "cyan"), note)
    return [fit(text, width)]


def _starts(values: Sequence[float], most: int) -> range:
    return range(0, len(values), math.ceil(len(values) / most))


def rank_table(run: LiveRun, width: int, most: int) -> list[Text]:
    """A line per rank with its times, the slowest ranks first if there are many."""
    own = run.ranks.get("own_s", [])
    if len(own) < 2:
        return []
    ranks = list(range(len(own)))
    note = "own work and waiting, in a step"
    if len(own) > most:
        ranks = sorted(ranks, key=lambda rank: -own[rank])[: most - 1]
        note = f"the slowest of {len(own)}"
    longest = max(o + w for o, w in zip(own, run.ranks.get("wait_s") or own, strict=False))
    lines = [heading("ranks", width, note)]
    if len(own) > most:
        lines += rank_lines(run, width, "")
    for rank in ranks:
        wait, data = (_at(run.ranks.get(name, []), rank) for name in ("wait_s", "data_s"))
        texts = [f"own {step_time(own[rank]):>8}", f"wait {step_time(wait):>8}", f"data {step_time(data):>8}"]
        while len(texts) > 1 and width - 8 - sum(len(text) + 2 for text in texts) < 8:
            texts.pop()
        size = max(0, width - 8 - sum(len(text) + 2 for text in texts))
        filled = round(size * own[rank] / longest) if longest else 0
        waiting = round(size * (own[rank] + wait) / longest) - filled if longest else 0
        text = line((f"{rank:>6}  ", "dim"), ("█" * filled, "cyan"), ("▒" * waiting, "yellow"))
        text.append(" " * max(0, size - filled - waiting))
        for one in texts:
            text.append("  " + one)
        lines.append(fit(text, width))
    return lines


def _at(values: Sequence[float], index: int) -> float:
    return values[index] if index < len(values) else 0.0


# ---- nodes and GPUs ----------------------------------------------------------------------------------------------


def newest(run: LiveRun) -> list[tuple[str, dict[str, Any]]]:
    return [(node, samples[-1]) for node, samples in sorted(run.nodes.items()) if samples]


def gpus_of(sample: dict[str, Any]) -> list[dict[str, Any]]:
    found = sample.get("gpus")
    return [as_dict(gpu) for gpu in found] if isinstance(found, list) else []


def _numbers(gpus: Iterable[dict[str, Any]], name: str) -> list[float]:
    return [value for gpu in gpus if (value := finite(gpu.get(name))) is not None]


def throttled(gpus: Iterable[dict[str, Any]]) -> str:
    """The reasons for which GPUs run below their clock, and the errors that they reported."""
    reasons: dict[str, None] = {}
    for gpu in gpus:
        found = gpu.get("throttle")
        reasons |= dict.fromkeys(str(reason) for reason in (found if isinstance(found, list) else []))
        found = gpu.get("xid")
        reasons |= dict.fromkeys(f"XID {xid}" for xid in (found if isinstance(found, list) else []))
        if finite(gpu.get("ecc_errors")):
            reasons["ECC errors"] = None
    return plain(", ".join(reasons))


def memory_of(values: dict[str, Any]) -> str:
    used, total = finite(values.get("memory_gib")), finite(values.get("memory_total_gib"))
    return "" if used is None else f"{used:.1f}/{total:.0f} GiB" if total else gib(used)


def node_lines(run: LiveRun, width: int, label: str = "nodes") -> list[Text]:
    """A line per node: its GPUs together, then its CPU, as far as they fit."""
    nodes, lines = newest(run), []
    margin = 8 if label else 0
    for i, (node, sample) in enumerate(nodes):
        if i == 3 and len(nodes) > 4:
            lines.append(line((f"{'':<{margin}}and {len(nodes) - i} more nodes", "dim")))
            break
        text = line((f"{'' if i else label:<{margin}}", "dim"), plain(node))
        for piece in [*gpu_parts(gpus_of(sample)), *cpu_parts(sample)]:
            if text.cell_len + piece.cell_len + 2 <= width:
                text.append("  ").append(piece)
        lines.append(fit(text, width))
    return lines


def gpu_parts(gpus: list[dict[str, Any]]) -> list[Text]:
    """The GPUs of a node together: mean load, largest memory and temperature, and the sum of their power."""
    if not gpus:
        return []
    busy = _numbers(gpus, "utilization_percent")
    used = f" {_mean(busy):.0f}%" if busy else ""
    used += f" ({min(busy):.0f} to {max(busy):.0f})" if len(busy) > 1 else ""
    parts = [line(f"{len(gpus)} GPU{'s' if len(gpus) > 1 else ''}{used}")]
    if why := throttled(gpus):
        parts.append(line((why, "yellow")))
    if memory := _numbers(gpus, "memory_gib"):
        parts.append(line(f"{max(memory):.1f} GiB"))
    if power := _numbers(gpus, "power_w"):
        parts.append(line(f"{sum(power):.0f} W"))
    if heat := _numbers(gpus, "temperature_c"):
        parts.append(line(f"{max(heat):.0f}°C"))
    return parts


def cpu_parts(sample: dict[str, Any]) -> list[Text]:
    cpu = finite(sample.get("cpu_percent"))
    parts = [f"CPU {cpu:.0f}%"] if cpu is not None else []
    parts += [memory_of(sample)] if memory_of(sample) else []
    for name, keys in (("net", ("net_in_mib_s", "net_out_mib_s")), ("disk", ("disk_read_mib_s", "disk_write_mib_s"))):
        values = [finite(sample.get(key)) for key in keys]
        if None not in values:
            parts.append(f"{name} ↓{si(values[0])} ↑{si(values[1])} MiB/s")
    return [line(part) for part in parts]


def node_table(run: LiveRun, width: int, most: int) -> list[Text]:
    """A line per GPU where there is room for all, else a line per node."""
    nodes = newest(run)
    if not nodes:
        return []
    count = sum(len(gpus_of(sample)) + 1 for _, sample in nodes)
    if count > most or not any(gpus_of(sample) for _, sample in nodes):
        return [heading("nodes", width), *node_lines(run, width, "")]
    lines = [heading("GPUs", width)]
    for node, sample in nodes:
        for gpu in gpus_of(sample):
            busy = finite(gpu.get("utilization_percent"))
            texts = [f"{busy:>3.0f}%" if busy is not None else "", memory_of(gpu)]
            texts += [f"{v:.0f} W" if (v := finite(gpu.get("power_w"))) is not None else ""]
            texts += [f"{v:.0f}°C" if (v := finite(gpu.get("temperature_c"))) is not None else ""]
            text = line((f"{plain(node)}:{plain(gpu.get('index', '?'))}  ", "dim"))
            text.append(bar((busy or 0) / 100, 16, "green")).append("  " + "  ".join(filter(None, texts)))
            if why := throttled([gpu]):
                text.append(f"  {why}", style="yellow")
            lines.append(fit(text, width))
        lines.append(fit(line("  ").join([line((plain(node), "dim")), *cpu_parts(sample)]), width))
    return lines


# ---- where it runs, checkpoints, log -----------------------------------------------------------------------------


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
    return [fit(line((f"{label:<8}", "dim"), plain(text)), width) for label, text in rows]


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
    lines = [heading("log", width, plain(", ".join(names)))]
    for name, text in newest_lines:
        prefix = f"{plain(name.removesuffix('.log'))}  " if len(names) > 1 else ""
        style = "red" if " ERROR " in text else "yellow" if " WARNING " in text else ""
        lines.append(fit(line((prefix, "dim"), (plain(text), style)), width))
    return lines


# ---- several runs ------------------------------------------------------------------------------------------------


def list_page(
    runs: Sequence[Glance], width: int, height: int, selected: int | None = None, title: str = ""
) -> list[Text]:
    """Return a table of runs. selected: the row that is marked, and always visible."""
    width = max(20, width)
    live = sum(run.is_live for run in runs)
    counts = Counter(run.status.rstrip("?") or "unknown" for run in runs)
    state = " · ".join(f"{count} {plain(status)}" for status, count in counts.items())
    lines = [spread(line((plain(title), "bold")), line((state, "dim")), width)]
    if not runs:
        return [*lines, fit(line("no runs here yet: start one with `python launch.py`"), width)][:height]
    rows = [cells_of(run, width) for run in runs]
    names = Counter(row["run"] for row in rows)
    for run, row in zip(runs, rows, strict=True):
        if names[row["run"]] > 1:
            row["run"] = plain(Path(*run.run_dir.parts[-2:]))
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
        "run": plain(label(run)),
        "status": plain(run.status or "unknown"),
        "step": "" if step is None else f"{step:.0f}" + (f"/{total:.0f}" if total else ""),
        "curve": sparkline(run.losses, 24 if width >= WIDE else 12),
        "loss": loss_text(run.row.get("loss", get("train_loss"))),
        "val loss": loss_text(run.row.get("val_loss", get("val_loss"))),
        "tok/s": si(run.row.get("tokens_per_s", get("tokens_per_s"))),
        "ETA": duration(seconds * (total - step)) if is_running else "",  # type: ignore[operator]
        "job": plain(run.record.job_id or ""),
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


# ---- the last line -----------------------------------------------------------------------------------------------


def keys_line(keys: Sequence[tuple[str, str]], width: int, note: str = "") -> Text:
    text = line()
    for key, meaning in keys:
        text.append("   " if text else "").append(key, style="bold").append(f" {meaning}", style="dim")
    return spread(text, line((plain(note), "dim")), width)
