"""`dtrain status`: the state of a launched run on one screen, on any launcher. See also logs and cancel."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain.commands.logs import other_logs
from dtrain.commands.run_parser import RunParser
from dtrain.commands.runs import sweep_points
from dtrain.runs import system
from dtrain.runs.find import find_run
from dtrain.runs.folder import latest_checkpoint, read_json
from dtrain.runs.metrics import system_files
from dtrain.runs.record import Record, load
from dtrain.runs.slurm_queue import show
from dtrain.ui.console import next_commands, places, say, slow_ranks, stdout_console
from dtrain.ui.sweep_table import print_sweep
from dtrain.ui.tables import STYLES, say_problem
from dtrain.util.format import as_dict, counted, duration, loss_text, number, shell_path, short_path, si, without_nan

if TYPE_CHECKING:
    from rich.console import Console

# SLURM's most common reasons for a pending job, explained for newcomers.
REASONS = {
    "Resources": "it is next, and waits for free nodes",
    "Priority": "other jobs have a higher priority",
    "BeginTime": "SLURM delays a requeued job a little",
    "JobArrayTaskLimit": "cluster.array_parallelism points of the sweep are already running",
    "Dependency": "it waits for another job",
    "DependencyNeverSatisfied": "the job it waits for failed, so it will never start",
    "PartitionTimeLimit": "cluster.time is above the partition's limit, so it will never start",
    "PartitionNodeLimit": "cluster.nodes is above the partition's limit, so it will never start",
    "PartitionDown": "the partition is down",
    "ReqNodeNotAvail": "a node that it asks for is down or reserved",
    "JobHeldUser": "it is held; `scontrol release` releases it",
    "JobHeldAdmin": "an administrator holds it",
    "Reservation": "its reservation has not started",
}


def main(argv: list[str]) -> int:
    """`dtrain status`: one run, or one sweep, on one screen."""
    parser = RunParser("dtrain status", description="Show a run's state and the next command.")
    parser.add_argument("run", help="a run folder, a part of its name, or latest; or a sweep's folder")
    parser.add_argument("--json", action="store_true", help="print data instead of text")
    options = parser.parse_args(argv)
    points = sweep_points(options.run)
    if points and not options.json:
        print_sweep(points)
        return 0
    records, problem = load(points or [find_run(options.run)], ask_all=not points)
    data = [record.row() for record in records] if points else describe(records[0])
    if options.json:
        print(json.dumps(without_nan(data), indent=2, default=str))
    else:
        assert isinstance(data, dict)
        console = stdout_console()
        print_status(records[0], data, console)
        say_problem(problem, console)
    return 0


def describe(record: Record) -> dict[str, Any]:
    """Return everything that `dtrain status` shows, as data."""
    run_dir, summary, job = record.run_dir, record.summary, record.job
    if job and job.ended and job.exit is None and job.state != "GONE" and not record.on_kubernetes:
        job = show(job.id) or job
    checkpoint = latest_checkpoint(run_dir)
    row, begun = record.row(), record.job_id is None or record.has_begun
    steps, total, speed = (number(row[k]) for k in ("steps", "total_steps", "tokens_per_s"))
    per_step, eta = number(summary.get("tokens_per_step")), None
    standstill = record.standstill
    if row["status"].startswith("running") and not standstill and None not in (steps, total, speed, per_step) and speed:
        eta = per_step / speed * (total - steps)  # type: ignore[operator]
    return {
        **row,
        "reason": reason(record),
        "job": asdict(job) if job else None,
        "attempts": record.attempts,
        "cancel_asked": record.cancel_asked,
        "last_sign": record.last_sign,
        "eta_s": eta,
        "standstill": standstill,
        "slow_ranks": slow_ranks(summary),
        "rank_range": record.rank_range,
        "checkpoint": str(checkpoint) if checkpoint else None,
        "preflight": read_json(run_dir / "preflight.json") or None,
        "failure": (read_json(run_dir / "failure.json") or None) if begun else None,
        "logs": [str(p) for p in sorted((run_dir / "logs").glob("*.log"), key=lambda p: (len(p.name), p.name))],
        "next": commands(record),
    }


def reason(record: Record) -> str:
    """Return the text in brackets after the status."""
    status, job = record.status, record.job
    if job and job.queued:
        word = job.reason or job.state
        limits = "a limit of your account or its QOS" if word.startswith(("QOS", "Assoc", "MaxSubmit")) else ""
        why = REASONS.get(word.split(",")[0], limits)
        again = "queued again: " if status == "preempted" else ""
        return again + (f"{word}: {why}" if why else word)
    if status == "cancelled":
        return "by dtrain cancel" if record.cancel_asked else "not by dtrain"
    if record.cancel_asked and record.is_live:
        return f"asked to end {duration(max(0.0, time.time() - record.cancel_asked))} ago"
    if job and job.state == "GONE":
        return f"{record.scheduler} no longer knows its job" if status in ("died", "preempted") else ""
    if job and record.on_kubernetes and job.state == "FAILED":
        return job.reason
    odd = job and (status in ("died", "preempted") or job.state not in ("RUNNING", "COMPLETED", "FAILED"))
    return f"its job is {job.state}" if job and odd else ""


def commands(record: Record) -> list[str]:
    """Suggest the next commands."""
    run = shell_path(record.run_dir)
    if record.is_live:
        return [f"dtrain logs -f {run}", f"dtrain cancel {run}"]
    status = record.status
    return next_commands(record.run_dir, "preempted" if status == "cancelled" else status, record.summary)


def print_status(record: Record, data: dict[str, Any], console: Console) -> None:
    """Print the screen of `dtrain status`."""

    def line(label: str, *parts: str | tuple[str, str]) -> None:
        say(console, (f"{label:<17}", "dim"), *parts)

    line("run", short_path(record.run_dir))
    why = f" ({data['reason']})" if data["reason"] else ""
    line("status", (data["status"], f"bold {STYLES.get(data['status'], 'cyan')}"), why)
    _print_place(record, data["job"], line)
    _print_attempts(record, line)
    if data["rank_range"]:
        now = f"{data['world_size'] or '?'} now, " if record.is_live else ""
        line("ranks", f"{now}{data['rank_range']} (dtrain scale {shell_path(record.run_dir)} N)")
    if data["steps"] is not None:
        fields = [f"step {data['steps']}" + (f"/{data['total_steps']}" if data["total_steps"] else "")]
        fields += [f"loss {loss_text(data['train_loss'])}"] if data["train_loss"] is not None else []
        fields += [f"validation loss {loss_text(data['val_loss'])}"] if data["val_loss"] is not None else []
        fields += [f"{si(data['tokens_per_s'])} tok/s"] if data["tokens_per_s"] is not None else []
        fields += [f"ETA {duration(data['eta_s'])}"] if data["eta_s"] is not None else []
        line("progress", "  ".join(fields))
    if data["standstill"]:
        line("stands still", (data["standstill"], "yellow"))
    elif data["status"].startswith("running") and (quiet := record.quiet_s) > 60:
        line("", (f"nothing new for {duration(quiet)}", "yellow"))
    for i, text in enumerate(data["slow_ranks"]):
        line("" if i else "slow rank", (text, "yellow"))
    wanted = as_dict(record.launch.get("cluster")).get("system_metrics_every")
    if wanted and record.is_live and not system_files(record.run_dir) and not system.is_installed():
        line("system metrics", f"none without psutil: {system.INSTALL}")
    if data["checkpoint"]:
        line("checkpoint", short_path(Path(data["checkpoint"])))
    if data["preflight"]:
        bad = as_dict(data["preflight"].get("bad"))
        ok = bool(data["preflight"].get("ok"))
        line("preflight", ("ok", "green") if ok else ("bad nodes" if bad else "not ok", "bold red"))
        for node, texts in bad.items():
            for text in "; ".join(map(str, texts if isinstance(texts, list) else [texts])).splitlines():
                line("", text if text.startswith(" ") else f"{node}: {text}")
    failure = as_dict(data["failure"])
    if failure and data["status"] != "done" and not (failure.get("type") == "preflight" and data["preflight"]):
        rank = f"rank {failure['rank']}: " if failure.get("rank") is not None else ""
        line("first error", (f"{rank}{failure.get('type') or 'error'}", "bold red"))
        for text in [t for t in str(failure.get("message") or "").splitlines() if t.strip()][-5:]:
            line("", text)
        for i, text in enumerate(places(failure)):
            line("" if i else "at", text)
    for i, path in enumerate(_worth_reading(record, data)):
        line("" if i else "logs", path)
    if data["status"] in ("preempted", "cancelled") and not data["next"]:
        line(
            "next", "nothing was saved (checkpoint.save=false), so it cannot be resumed: the same command starts again"
        )
    for i, command in enumerate(data["next"]):
        line("" if i else "next", (command, "cyan"))


def _print_place(record: Record, job: dict[str, Any] | None, line: Any) -> None:
    if record.job_id is None:
        launch = record.launch
        if record.is_live and launch.get("pid"):
            line("process", f"{launch['pid']} on {launch.get('host', '?')}")
        return
    parts = [record.job_id]
    if job and job["state"] != "GONE":
        parts.append(job["state"])
        if job["state"] == "PENDING" and job["submitted"]:
            parts.append(f"waits {duration(max(0.0, time.time() - job['submitted']))}")
            # If other jobs have no time limit, SLURM expects a start in a year or so: meaningless.
            if job["started"] and 0 < job["started"] - time.time() < 30 * 86400:
                parts.append(f"expected in {duration(job['started'] - time.time())}")
        elif job["elapsed"] is not None:
            limit = number(job["limit"])  # SLURM reports a year for no limit
            parts.append(duration(job["elapsed"]) + (f" of {duration(limit)}" if limit and limit < 31536000 else ""))
        if job["exit"] not in (None, "0:0") and job["state"] in ("FAILED", "CANCELLED", "OUT_OF_MEMORY", "TIMEOUT"):
            code, _, number_of = str(job["exit"]).partition(":")
            parts.append(f"signal {number_of}" if number_of not in ("", "0") else f"exit code {code}")
    line("job", " · ".join(parts))
    if job and job["nodes"]:
        line("nodes", job["nodes"])


def _print_attempts(record: Record, line: Any) -> None:
    attempts = record.attempts
    if record.job_id is None and len(attempts) < 2:
        return  # a plain run on this machine: the other lines are enough
    if hidden := max(0, len(attempts) - 8):
        line("attempts", f"{len(attempts)}, the newest being")
    for i, attempt in enumerate(attempts[hidden:], hidden):
        began, ended = number(attempt["started"]), number(attempt["ended"])
        when = time.strftime("%m-%d %H:%M:%S", time.localtime(began)) if began else "?"
        nodes = attempt["nodes"] if isinstance(attempt["nodes"], list) else []
        where = ",".join(map(str, nodes[:4])) + (f" and {len(nodes) - 4} more" if len(nodes) > 4 else "")
        where += f" {counted(attempt['ranks'], 'rank')}" if attempt.get("ranks") else ""
        end = "still running" if i == len(attempts) - 1 and record.status == "running" else "killed"
        if ended is not None:
            why = str(attempt["why"] or "").strip().splitlines()
            end = f"to step {attempt['step']}, {why[0][:200] if why else 'exit code ' + str(attempt['code'])}"
        took = f", {duration(ended - began)}" if began and ended is not None else ""
        line("" if i else "attempts", f"{i + 1}  {when}  {where}  from step {attempt['from_step']} {end}{took}")


def _worth_reading(record: Record, data: dict[str, Any]) -> list[str]:
    ranks = [Path(p) for p in data["logs"] if Path(p).name.startswith("rank-")]
    others = other_logs(record.run_dir, record.job_id)[: 1 if ranks or record.is_live else 2]
    more = f" (and {len(ranks) - 1} more)" if len(ranks) > 1 else ""
    return [short_path(p) + more for p in ranks[:1]] + [short_path(p) for p in others]
