"""What the page of `dtrain report` shows of one run, as plain values. Every file may be missing, damaged or hostile."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from dtrain.config.redaction import hidden
from dtrain.report.curves import Column, Curve, columns, curve, rounded
from dtrain.report.system_data import system_data
from dtrain.report.why import CAUSES, diagnose
from dtrain.runs import comm_profile
from dtrain.runs import environment as launched
from dtrain.runs.folder import latest_checkpoint, predicted, read_json
from dtrain.runs.metrics import NO_CURVE, rows
from dtrain.runs.record import Record
from dtrain.ui.console import LAUNCH, measured_rows, next_commands, resume_command
from dtrain.util.format import as_dict, clean, finite, shell_path, short_path

RESULTS = (
    "steps", "total_steps", "train_loss", "val_loss", "val_accuracy", "tokens_per_s", "mfu", "peak_mem_gib", "wall_s",
    "world_size",
)  # fmt: skip
WORDS = ("model", "strategy", "precision", "started")
FIRST = ("loss", "val_loss", "val_accuracy", "lr", "grad_norm", "tokens_per_s", "mem_gib", "mfu", "step_s", "data_s")
HIDDEN_CURVES = (*NO_CURVE, "val_perplexity")
MOST_CURVES = 24
MOST_EVENTS = 200
MOST_ATTEMPTS = 500
MOST_MESSAGES = 20
STRIP = (64, 120)  # rows and columns of the picture of all ranks
LONGEST_TEXT = 2000  # characters of one text from a run folder


def run_data(record: Record, most: int, most_of_system: int) -> dict[str, Any]:
    """Return one run. most: points of a curve; most_of_system: of a curve of system metrics."""
    run_dir, summary = record.run_dir, record.summary
    row, lines = record.row(), rows(run_dir / "metrics.jsonl")
    plan, known = read_json(run_dir / "plan.json"), columns(lines)
    texts = {
        "name": safe_text(row["name"]),
        "path": safe_text(short_path(run_dir)),
        "status": safe_text(row["status"]),
        **{key: safe_text(row[key]) if row[key] is not None else None for key in WORDS},
        "facts": [[safe_text(part) for part in fact] for fact in measured_rows(run_dir, summary)],
        "unit": safe_text(summary.get("unit") or "tokens"),
        "attempts": attempts(record),
        "why": why(record),
        "events": events(lines),
        "environment": environment(record, plan),
        "commands": commands(record),
        "step_parts": step_parts(run_dir, plan),
        "memory_parts": memory_parts(plan),
        "communication": communication(run_dir),
    }
    return {
        **hidden(texts),
        "live": record.is_live,
        "results": {key: finite(row.get(key)) for key in RESULTS},
        "plan": plan_values(run_dir, plan),
        "curves": curves(known, most),
        "axes": axes(known),
        "skipped": [int(step) for step in skipped(lines)[:MOST_EVENTS]],
        "saves": [int(step) for step in known.get("save_step", ([], []))[1][-MOST_EVENTS:]],
        "ranks": ranks(lines, summary),
        "system": system_data(run_dir, started(record), most_of_system),
    }


def safe_text(value: object) -> str:
    """Return untrusted text without control codes, and not longer than a page shows."""
    return clean(str(value))[:LONGEST_TEXT]


# ---- curves -------------------------------------------------------------------------------------------------------


def curves(known: dict[str, Column], most: int) -> dict[str, Curve]:
    """Every metric that has numbers, the well-known ones first."""
    found: dict[str, Curve] = {}
    for name in dict.fromkeys((*FIRST, *known)):
        is_curve = name in known and name not in HIDDEN_CURVES and not name.startswith(("save_", "rank_"))
        if is_curve and len(found) < MOST_CURVES:
            found[safe_text(name)[:80]] = curve(*known[name], most)
    return found


def axes(known: dict[str, Column], most: int = 100) -> dict[str, list[list[float]]]:
    """Tokens and seconds of training at some steps, between which the page interpolates."""
    found: dict[str, list[list[float]]] = {}
    steps, tokens = known.get("tokens", ([], []))
    timed, each = known.get("step_s", ([], []))
    elapsed: list[float] = []
    last = 0.0
    for step, seconds in zip(timed, each, strict=True):
        elapsed.append((elapsed[-1] if elapsed else 0.0) + seconds * max(1.0, step - last))  # the mean since `last`
        last = step
    for name, xs, ys in (("tokens", steps, tokens), ("seconds", timed, elapsed)):
        if len(xs) > 1:
            kept = sorted({*range(0, len(xs), max(1, len(xs) // most)), len(xs) - 1})
            found[name] = [[rounded(xs[i]) for i in kept], [rounded(ys[i]) for i in kept]]
    return found


def skipped(lines: Sequence[dict[str, Any]]) -> list[float]:
    """Steps whose loss or gradient norm was not finite."""
    found = [finite(line.get("step")) for line in lines if "loss" in line and finite(line["loss"]) is None]
    return [step for step in found if step is not None]


def events(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the run itself reported about a step: slow ranks."""
    found = [
        {"step": finite(line.get("step")), "text": safe_text(line["slow_text"])}
        for line in lines
        if line.get("slow_text")
    ]
    return found[-MOST_EVENTS:]


def ranks(lines: Sequence[dict[str, Any]], summary: dict[str, Any]) -> dict[str, Any] | None:
    """The ranks' own seconds of a step over time. Too many ranks or lines share a cell, which keeps the slowest."""
    found = [(finite(line.get("step")), numbers(line["rank_own_s"])) for line in lines if line.get("rank_own_s")]
    table = [(step, own) for step, own in found if step is not None and own]
    medians = summary.get("ranks")
    of_ranks = [as_dict(one) for one in medians] if isinstance(medians, list) else []
    whole = {key: [rounded(finite(one.get(key)) or 0.0) for one in of_ranks] for key in ("own_s", "data_s", "wait_s")}
    if not table and not of_ranks:
        return None
    count = max([len(own) for _, own in table] + [len(of_ranks)])
    rows_each, columns_each = -(-count // STRIP[0]), max(1, -(-len(table) // STRIP[1]))
    cells = []
    for i in range(0, len(table), columns_each):
        columns = [own for _, own in table[i : i + columns_each]]
        cells.append([slowest(columns, j, j + rows_each) for j in range(0, count, rows_each)])
    steps = [int(table[i][0]) for i in range(0, len(table), columns_each)]
    medians_kept = {key: values[: STRIP[0]] for key, values in whole.items()} if count <= STRIP[0] else {}
    return {"count": count, "ranks_per_row": rows_each, "steps": steps, "own": cells, "medians": medians_kept}


def numbers(value: object) -> list[float | None]:
    return [finite(item) for item in value] if isinstance(value, list) else []


def slowest(columns: Sequence[Sequence[float | None]], start: int, end: int) -> float | None:
    found = [value for column in columns for value in column[start:end] if value is not None]
    return rounded(max(found)) if found else None


# ---- plan and profile ---------------------------------------------------------------------------------------------


def plan_values(run_dir: Path, plan: dict[str, Any]) -> dict[str, float]:
    """The predicted metrics, and the memory of a GPU."""
    limit = finite(as_dict(plan.get("memory_gib")).get("limit"))
    return (predicted(run_dir) or {}) | ({"memory_limit": limit} if limit is not None else {})


def step_parts(run_dir: Path, plan: dict[str, Any]) -> list[dict[str, Any]]:
    """Where a step goes: as profiled on each recorded rank, and as the planner predicted it."""
    found = []
    for path in sorted((run_dir / "profiles").glob("*.json"))[:64]:
        table = read_json(path)
        parts = as_dict(table.get("parts"))
        seconds = {safe_text(name): finite(as_dict(part).get("ms")) for name, part in list(parts.items())[:24]}
        if table.get("kind") == "torch" and any(seconds.values()):
            kept = [[name, rounded(ms / 1000)] for name, ms in seconds.items() if ms and ms > 0]
            found.append({"title": safe_text(f"profiled, rank {table.get('rank')}"), "parts": kept})
    found = found[:8]
    planned = as_dict(plan.get("step_s"))
    if kept := known_parts(planned):
        found.append({"title": "planned", "parts": kept})
    return found


def communication(run_dir: Path) -> dict[str, Any] | None:
    """The messages of the profiled steps and who waits for whom, as text."""
    sent = comm_profile.profile(run_dir)
    if sent is None:
        return None
    return {
        "heads": list(comm_profile.HEADS),
        "hint": comm_profile.HINT,
        "messages": [[safe_text(cell) for cell in comm_profile.cells(row)] for row in sent["messages"][:MOST_MESSAGES]],
        "waits": [safe_text(comm_profile.wait_text(wait)) for wait in sent["waits"][:MOST_MESSAGES]],
        "note": safe_text(sent["problem"]),
    }


def memory_parts(plan: dict[str, Any]) -> dict[str, Any] | None:
    """Where the planner expects the memory to go."""
    memory = as_dict(plan.get("memory_gib"))
    kept = known_parts(memory)
    return {"parts": kept, "limit": finite(memory.get("limit"))} if kept else None


OTHER = ("total", "limit", "reserve")  # in plan.json beside the parts


def known_parts(of: dict[str, Any]) -> list[list[Any]]:
    values = {safe_text(name): finite(value) for name, value in list(of.items())[:24] if name not in OTHER}
    return [[name, rounded(value)] for name, value in values.items() if value and value > 0]


# ---- attempts, cause, environment, commands -------------------------------------------------------------------------


def started(record: Record) -> float | None:
    """When the first attempt began."""
    times = [finite(attempt["started"]) for attempt in record.attempts]
    return next((t for t in times if t is not None), None)


def attempts(record: Record) -> list[dict[str, Any]]:
    """Each start of the run's job and how it ended. A live attempt has no end; one that was killed neither."""
    found = []
    for attempt in record.attempts[-MOST_ATTEMPTS:]:
        nodes = attempt["nodes"] if isinstance(attempt["nodes"], list) else []
        why = str(attempt["why"] or "").strip().splitlines()
        found.append(
            {
                "started": finite(attempt["started"]),
                "ended": finite(attempt["ended"]),
                "from": finite(attempt["from_step"]),
                "to": finite(attempt["step"]),
                "code": finite(attempt["code"]),
                "why": safe_text(why[0])[:300] if why else "",
                "nodes": safe_text(", ".join(map(str, nodes[:8])))
                + (f" and {len(nodes) - 8} more" if len(nodes) > 8 else ""),
            }
        )
    return found


def why(record: Record) -> dict[str, Any] | None:
    """Why the run ended, unless it ended well or has not ended."""
    if record.status.rstrip("?") in ("done", "queued", "starting", "running"):
        return None
    found = diagnose(record)
    cause = "" if found.cause == "nothing" or found.cause not in CAUSES else found.cause
    return {
        "cause": cause,
        "text": safe_text(found.paragraph),
        "evidence": [safe_text(one) for one in found.evidence[:12]],
        "rank": found.rank,
        "step": found.step,
    }


def environment(record: Record, plan: dict[str, Any]) -> list[list[str]]:
    """(label, value) of where and with what the run trains."""
    summary, launch = record.summary, record.launch
    cluster, mesh = as_dict(launch.get("cluster")), as_dict(summary.get("mesh"))
    versions = as_dict(summary.get("versions"))
    others = {n: v for n, v in launched.versions(record.launches).items() if n not in versions}
    parallel = " × ".join(f"{name} {size}" for name, size in list(mesh.items())[:8])
    parameters = finite(summary.get("parameters"))
    batch = finite(summary.get("global_batch_size"))
    micro, accumulation = summary.get("micro_batch_size"), summary.get("accumulation")
    values = {
        "device": summary.get("device"),
        "ranks": summary.get("world_size"),
        "mesh": parallel,
        "nodes": cluster.get("nodes"),
        "host": launch.get("host"),
        "job": record.job_id,
        "parameters": f"{parameters:,.0f}" if parameters else None,
        "batch": f"{batch:.0f} ({micro} a rank × {accumulation})" if batch else None,
        "precision": summary.get("precision"),
        "compile": summary.get("compile"),
        "hardware": plan.get("hardware"),
        "dtrain": versions.get("dtrain") or plan.get("version"),
        **{name: value for name, value in list(versions.items())[:12] if name != "dtrain"},
        **{name: value for name, value in list(others.items())[:24] if name != "dtrain"},
        **dict(launched.rows(record.launches)),
        "folder": short_path(record.run_dir),
        "working folder": launch.get("cwd"),
        "started": when(launch.get("time")),
        "run id": record.launches.get("id"),
        "no plan": plan.get("reason"),
    }
    return [[safe_text(name), safe_text(value)] for name, value in values.items() if value not in (None, "", [], {})]


def when(value: object) -> str | None:
    try:
        return datetime.fromisoformat(str(value)).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
    except ValueError:
        return None


def commands(record: Record) -> list[list[str]]:
    """(what for, command). They are built here: a command line from an untrusted folder is never offered as it is."""
    run_dir, status = record.run_dir, record.status.rstrip("?")
    launches = record.launches.get("launches")
    first = as_dict(launches[0]) if isinstance(launches, list) and launches else {}
    typed = first.get("overrides") or record.launches.get("overrides")
    own = [clean(str(word)) for word in typed] if isinstance(typed, list) else []
    kept = [word for word in own if not word.lstrip("+").startswith(("run_dir=", "resume=", "recipe=as-run"))]
    found = [["look at its state", f"dtrain status {shell_path(run_dir)}"]]
    if status != "done" and (latest_checkpoint(run_dir) or record.is_live):
        found.append(["resume", resume_command(run_dir)])
    found.append(["repeat from the start", shlex.join([*LAUNCH.split(), *kept])])
    known = {command for _, command in found}
    for command in next_commands(run_dir, status, record.summary):
        what = next((w for start, w in NEXT.items() if command.startswith(start)), "train longer")
        found += [[what, command]] if command not in known else []
    return [[what, clean(command)[: 2 * LONGEST_TEXT]] for what, command in found]


NEXT = {"dtrain profile": "profile", "dtrain sample": "sample text", "dtrain evaluate": "evaluate",
        "dtrain export": "export the weights", "dtrain why": "why it ended"}  # fmt: skip
