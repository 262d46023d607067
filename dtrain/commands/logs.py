"""`dtrain logs`: print the logs of a run's ranks, once or continuously."""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from dtrain.commands.run_parser import RunParser
from dtrain.runs.find import find_run
from dtrain.runs.folder import LogTail, shown
from dtrain.runs.record import Record, load
from dtrain.util.format import as_dict, number, shell_path, short_path
from dtrain.util.regular_file import open_regular

LOOK_S = 0.5  # how often files are checked
ASK_S = 15.0  # how often SLURM is queried; sites discourage more
SURE_S = 5.0  # an ended job may be requeued: after the loss of a node, SLURM takes seconds for that


def main(argv: list[str]) -> int:
    """`dtrain logs`: print the end of a log, and with -f new lines."""
    parser = RunParser("dtrain logs", description="Show the logs of a run's ranks.")
    parser.add_argument("run", help="a run folder, a part of its name, or latest")
    parser.add_argument("-f", "--follow", action="store_true", help="show new lines until the run has ended")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--rank", type=int, metavar="N", help="one rank's log (default: rank 0; with -f, --batch, too)")
    which.add_argument("--batch", action="store_true", help="the log of the supervisor inside the SLURM job")
    parser.add_argument("-n", default="50", metavar="LINES", help="how many of the last lines, or all (default: 50)")
    options = parser.parse_args(argv)
    if not re.fullmatch(r"\d+|all", options.n):
        raise ValueError(f"-n {options.n}: must be a number of lines\n  fix: -n 200, or -n all")
    lines = None if options.n == "all" else int(options.n)
    run_dir = find_run(options.run)
    batch, rank = run_dir / "logs" / "batch.log", run_dir / "logs" / f"rank-{options.rank or 0}.log"
    record = Record.read(run_dir)
    _check_rank(record, options.rank or 0)
    paths = [batch] if options.batch else [rank]
    try:
        if record.is_elsewhere:
            _show_pod(record, options.rank or 0, lines, options.follow)
        elif options.follow:
            # Healthy ranks log little; the user wants to see the supervisor's progress.
            follow(run_dir, paths if options.batch or options.rank is not None else [batch, rank], lines)
        elif not _show(paths[0], lines):
            _show_other(run_dir, paths[0], lines)
    except KeyboardInterrupt:
        pass  # Ctrl-C is how the user ends it
    return 0


def follow(run_dir: Path, paths: Sequence[Path], lines: int | None = 50) -> None:
    """Print logs as they grow until the run has ended.

    Waits for a job that has not started yet, and for one that was requeued.
    """
    tails: dict[Path, LogTail | None] = dict.fromkeys(paths)
    shown, last, seen, job = "", None, None, None
    asked = over_since = -math.inf
    while True:
        last = _more(tails, last, lines)
        record, now = Record.read(run_dir), time.monotonic()
        news = (record.reported_status, record.num_launches, record.attempts)
        if record.job_id and (now - asked >= ASK_S or news != seen):
            (record,), _ = load([run_dir], ask_all=True)
            job, asked, seen = record.job, now, news
        record.job = job
        if record.is_final and (record.job_id is None or _supervisor_ended(record)):
            break
        if record.is_live:
            over_since = -math.inf
        elif over_since == -math.inf:
            over_since = now
        elif now - over_since > (SURE_S if record.job_id or record.reported_status == "failed" else 0):
            break
        else:
            asked = min(asked, now - ASK_S + 1)  # is it really over? query again in a second
        text = _waiting(record, any(tails.values()))
        if text and text != shown:
            _note(text)
        shown = text
        time.sleep(LOOK_S)
    _more(tails, last, lines, final=True)
    if not any(tails.values()):
        _show_other(run_dir, paths[0], lines)
    _note(f"the run is {record.status}; dtrain status {shell_path(run_dir)}")


def _supervisor_ended(record: Record) -> bool:
    """Whether the supervisor has ended: it writes its last lines after the ranks report that they are done."""
    return bool(record.attempts) and record.attempts[-1]["ended"] is not None


def _waiting(record: Record, any_yet: bool) -> str:
    """Explain why there is no output, if none is expected yet."""
    if record.job and record.job.queued:
        reason = f" ({record.job.reason})" if record.job.reason else ""
        return f"waiting: {record.status}{reason}"
    return "" if any_yet else f"waiting: {record.status}, and nothing was written yet"


def _more(tails: dict[Path, LogTail | None], last: Path | None, lines: int | None, final: bool = False) -> Path | None:
    """Print the new lines of each file, with a heading where the file changes; return the last printed file."""
    for path, tail in tails.items():
        heading = path if len(tails) > 1 and path != last else None
        if tail is None:
            tails[path] = _show(path, lines, final, heading)
            new = tails[path] is not None
        else:
            new = _write(tail.read(final)[0], heading)
        last = path if new else last
    return last


def _show(path: Path, lines: int | None, final: bool = True, heading: Path | None = None) -> LogTail | None:
    """Print the last lines of a file; return its tail, or None if it is empty. final: include an incomplete line."""
    try:
        with open_regular(path) as file:
            end = file.seek(0, os.SEEK_END)
            size = 65536
            while True:
                start = 0 if lines is None else max(0, end - size)
                file.seek(start)
                data = file.read(end - start)
                if start == 0 or data.count(b"\n") > (lines or 0):
                    break
                size *= 4
    except OSError:
        return None
    whole = len(data) if final else data.rfind(b"\n") + 1
    data, end = data[:whole], end - len(data) + whole
    if not data:
        return None
    found = shown(data)
    _write(found if lines is None else found[max(0, len(found) - lines) :], heading)
    tail = LogTail(path)
    tail.offset, tail.before = end, data[-64:]
    return tail


def _write(lines: list[bytes], heading: Path | None = None) -> bool:
    if lines and heading:
        print(f"==> {heading.name} <==")
    for line in lines:
        print(line.decode(errors="replace"))
    if lines:
        sys.stdout.flush()
    return bool(lines)


def _note(text: str) -> None:
    """Print to stderr: stdout has the log, and may be a file."""
    print(f"[{text}]", file=sys.stderr, flush=True)


def _check_rank(record: Record, rank: int) -> None:
    files = (record.run_dir / "logs").glob("rank-*.log")
    there = {int(p.stem[5:]) for p in files if p.stem[5:].isdigit()}
    cluster = as_dict(record.launch.get("cluster"))
    nodes, processes, size = (
        number(v) for v in (cluster.get("nodes"), cluster.get("processes"), record.summary.get("world_size"))
    )
    size = size or (nodes * processes if nodes and processes else None)
    if rank in there or (rank >= 0 and size is None and not there) or 0 <= rank < (size or 0):
        return
    last = max([*there, int(size or 0) - 1])
    raise ValueError(
        f"--rank={rank}: the run has rank{'s 0 to ' + str(last) if last else ' 0 alone'}\n  fix: --rank={last}"
    )


def other_logs(run_dir: Path, job_id: str | None) -> list[Path]:
    """List other logs: the supervisor's, and the job's output from before the supervisor started."""
    places = [run_dir / "submitit", run_dir.parent / "submitit"] if job_id else []  # of a run; of a sweep's array
    submitit = [p for place in places for p in sorted(place.glob(f"*/{job_id}_*log.*"))]
    logs = [run_dir / "logs" / f"{name}.log" for name in ("batch", "srun", "torchrun", "ray", "starter")]
    return [p for p in (logs[0], *submitit, *logs[1:]) if p.is_file() and p.stat().st_size]


def _show_other(run_dir: Path, path: Path, lines: int | None) -> None:
    """Show another log if the requested one is empty."""
    (record,), _ = load([run_dir])
    ranks = sorted((run_dir / "logs").glob("rank-*.log"))
    others = [p for p in (*other_logs(run_dir, record.job_id), *ranks) if p != path]
    if not others and record.on_kubernetes:
        _show_pod(record, 0, lines, follow=False)
        return
    if not others:
        _note(f"nothing was written yet; the run is {record.status}: dtrain status {shell_path(run_dir)}")
        return
    _note(f"{path.name} is empty; showing {short_path(others[0])}")
    _show(others[0], lines)


def _show_pod(record: Record, rank: int, lines: int | None, follow: bool) -> None:
    """Show the log of the newest pod of a rank's node: the output of its supervisor, with that of rank 0."""
    from dtrain.runs import kubernetes_api  # imported late: most runs need no client

    cluster = as_dict(record.launch.get("cluster"))
    _, namespace, name = str(record.job_id).split("/")
    api = kubernetes_api.Api(cluster.get("context"))
    try:
        node = rank // int(number(cluster.get("processes")) or 1)
        pods = [pod for pod in api.pods(namespace, name) if kubernetes_api.node_rank(pod) == node]
        if not pods:
            _note(f"there is no pod of node {node} (any more): dtrain status {shell_path(record.run_dir)}")
            return
        for line in api.log(namespace, pods[-1], lines, follow):
            _write([line])
    except kubernetes_api.NoAnswer as error:
        raise ValueError(f"logs: {error}\n  fix: kubectl logs -l {kubernetes_api.RUN_LABEL}={name}") from None
