"""Parts of the page of `dtrain watch` about one run: where a step goes, its ranks, its nodes and GPUs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from rich.text import Text

from dtrain.runs.live import LiveRun
from dtrain.runs.metrics import gpus_of
from dtrain.ui.curve import BLOCKS
from dtrain.ui.lines import bar, fit, heading, line, one_line
from dtrain.util.format import finite, gib, si, step_time

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
    return one_line(", ".join(reasons))


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
        text = line((f"{'' if i else label:<{margin}}", "dim"), one_line(node))
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
            text = line((f"{one_line(node)}:{one_line(gpu.get('index', '?'))}  ", "dim"))
            text.append(bar((busy or 0) / 100, 16, "green")).append("  " + "  ".join(filter(None, texts)))
            if why := throttled([gpu]):
                text.append(f"  {why}", style="yellow")
            lines.append(fit(text, width))
        lines.append(fit(line("  ").join([line((one_line(node), "dim")), *cpu_parts(sample)]), width))
    return lines
