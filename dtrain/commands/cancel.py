"""`dtrain cancel`: end a run, or a whole sweep, and print how to resume."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

from dtrain.commands.run_parser import RunParser
from dtrain.commands.runs import sweep_points
from dtrain.runs.find import find_run
from dtrain.runs.folder import is_locked, write_json
from dtrain.runs.protocol import CANCELLED_FILE
from dtrain.runs.record import Record, load
from dtrain.runs.slurm_queue import NoAnswer, call
from dtrain.ui.console import resume_command
from dtrain.util.format import as_dict, shell_path, short_path


def main(argv: list[str]) -> int:
    """`dtrain cancel`: end a run, or a whole sweep, and print how to resume."""
    parser = RunParser("dtrain cancel", description="Stop a run; its checkpoints are kept.")
    parser.add_argument("run", help="a run folder, a part of its name, or latest; or a sweep's folder")
    parser.add_argument("--save", action="store_true", help="a running job saves a checkpoint first")
    options = parser.parse_args(argv)
    points = _one_sweep(options.run)
    records, problem = load(points or [find_run(options.run)], ask_all=True)
    live = [r for r in records if r.is_live]
    for record in live:
        _check_reach(record, problem)
    for record in live:  # first: a supervisor that is ending checks for it before it requeues the job
        mark = {"time": time.time(), "launches": record.num_launches, "job_id": record.job_id}
        write_json(record.run_dir / CANCELLED_FILE, mark)
    saving = [r for r in live if r.job and r.job.active and (options.save or r.on_kubernetes)]
    # pending jobs first: a job that saves and ends would free nodes for them
    _scancel([], [r for r in live if r.job and r not in saving])
    _scancel(["--batch", "--signal=USR1"], saving)
    for pid in {r.launch["pid"] for r in live if r.job_id is None}:
        try:
            os.kill(pid, signal.SIGTERM)
        except ProcessLookupError:
            pass  # already ended
    for record in records:
        _say_done(record, live, saving, alone=not points)
    if points and live:
        print(f"resume the unfinished runs: {records[0].launches.get('command') or 'repeat the command'}")
    return 0


def _one_sweep(word: str) -> list[Path]:
    """Return the points of a sweep's folder. Reject a folder of sweeps: `dtrain cancel .` must not end everything."""
    points = sweep_points(word)
    folders = sorted({p.parent for p in points})
    if points and folders != [Path(word).expanduser()]:
        names = "".join(f"\n    {short_path(f)}" for f in folders[:10])
        raise ValueError(f"cancel {word}: the folder holds {len(folders)} run folders\n  fix: name one of them:{names}")
    return points


def _check_reach(record: Record, problem: str) -> None:
    """Raise before anything is done if this machine cannot end the run."""
    run, launch = short_path(record.run_dir), record.launch
    if record.job_id is not None:
        if record.job is None:
            why = problem or "there are no SLURM commands on this machine"
            fix = f"on a machine of the cluster: scancel {record.job_id}"
            if record.on_kubernetes:
                fix = f"kubectl delete {' '.join(record.job_id.split('/')[::2])}"
            raise ValueError(f"cancel {run}: {why}\n  fix: {fix}")
        return
    pid, host = launch.get("pid"), launch.get("host")
    if host != socket.gethostname():
        raise ValueError(f"cancel {run}: it runs on {host}\n  fix: run the same command there, or kill {pid}")
    try:
        cmdline = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        cmdline = b""
    # a script that called dtrain.fit has any name, but holds the folder's lock
    if not isinstance(pid, int) or not (b"launch" in cmdline or b"dtrain" in cmdline or is_locked(record.run_dir)):
        raise ValueError(
            f"cancel {run}: process {pid} is not a dtrain launcher any more\n"
            f"  fix: nothing is running; resume with {resume_command(record.run_dir)}"
        )


def _scancel(options: list[str], records: list[Record]) -> None:
    _delete([r for r in records if r.on_kubernetes])
    ids = [r.job.id for r in records if r.job and not r.on_kubernetes]
    if not ids:
        return
    try:
        call(["scancel", *options, *ids], seconds=30)
    except NoAnswer as error:
        for record in records:  # the job continues, and must be requeued if interrupted
            (record.run_dir / CANCELLED_FILE).unlink(missing_ok=True)
        raise ValueError(f"cancel: {error}\n  fix: try again; by hand: scancel {' '.join(ids)}") from None


def _delete(records: list[Record]) -> None:
    """Delete jobs of Kubernetes: their pods get a stop signal, save within cluster.grace_s, and end."""
    if not records:
        return
    from dtrain.runs import kubernetes_api  # imported late: most runs need no client

    for record in records:
        assert record.job is not None
        kind, namespace, name = record.job.id.split("/")
        try:
            api = kubernetes_api.Api(as_dict(record.launch.get("cluster")).get("context"))
            api.delete(kind, namespace, name)
            if kind == "trainjob":
                api.delete("trainingruntime", namespace, name)
        except kubernetes_api.NoAnswer as error:
            (record.run_dir / CANCELLED_FILE).unlink(missing_ok=True)  # the job continues
            raise ValueError(f"cancel: {error}\n  fix: try again; by hand: kubectl delete {kind} {name}") from None


def _say_done(record: Record, live: list[Record], saving: list[Record], alone: bool) -> None:
    run = short_path(record.run_dir)
    resume = f"resume with: {resume_command(record.run_dir)}"
    if record not in live:
        print(f"{run}: {record.status} already; nothing to cancel")
        if alone and record.status != "done":
            print(resume)
        return
    job = f"job {record.job.id} ({'queued' if record.job.queued else 'running'})" if record.job else ""
    if record in saving:
        print(f"{run}: {job} was asked to save and end; dtrain logs -f {shell_path(record.run_dir)}")
    elif record.job:
        print(f"{run}: {job} cancelled")
    else:
        print(f"{run}: process {record.launch['pid']} was asked to save and end")
    if alone:
        print(resume)
