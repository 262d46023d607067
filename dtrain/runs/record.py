"""State of a run: its files, its job on SLURM or Kubernetes, and the status that follows from both."""

from __future__ import annotations

import glob
import os
import re
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from dtrain.runs.folder import file_clock, last_launch, launch_time, parse_line, read_json, read_summary
from dtrain.runs.metrics import own_metrics
from dtrain.runs.protocol import ATTEMPTS_FILE, CANCELLED_FILE, HANG_FILE
from dtrain.runs.search_journal import JOURNAL
from dtrain.runs.slurm_queue import Job, query
from dtrain.runs.tags import tags_of
from dtrain.util.format import as_dict, number
from dtrain.util.regular_file import read_bytes

ROOTS = ("outputs", "multirun")
QUIET_S = 600  # a running run that wrote nothing for this long gets a `?`: compiling or saving takes less
SKEW_S = 300  # clocks of a login node and of the controller differ by less
RESULTS = ("train_loss", "val_loss", "val_accuracy", "tokens_per_s", "mfu", "peak_mem_gib", "wall_s")
ERRORS = ("step_error", "memory_error")  # errors of the prediction


def run_folders(root: Path, levels: int = 4) -> Iterator[Path]:
    """Yield the folders with a launch.json at or below root; never descend into one: checkpoints have many files."""
    if (root / "launch.json").is_file():
        yield root
        return
    if levels == 0:
        return
    try:
        with os.scandir(root) as entries:
            folders = [e.path for e in entries if e.name[0] != "." and e.is_dir(follow_symlinks=False)]
    except OSError:  # missing or not readable
        return
    for folder in sorted(folders):
        yield from run_folders(Path(folder), levels - 1)


def started(run_dir: Path, launches: dict[str, Any] | None = None) -> float:
    """Return when a run was last launched, in seconds since the epoch."""
    path = run_dir / "launch.json"
    try:
        written = path.stat().st_mtime
    except OSError:  # removed in the meantime
        return 0.0
    noted = launch_time(read_json(path) if launches is None else launches)
    # The mtime orders two launches within one second; it is only valid if the folder was not copied.
    return written if noted is None or abs(written - noted) < 2 else noted


def run_name(run_dir: Path) -> str:
    """Return the folder's name without the leading time of day."""
    return re.sub(r"^\d\d-?\d\d-?\d\d(-\d+)?-(?=.)", "", run_dir.name)


@dataclass(eq=False)
class Record:
    """One run. config.yaml is not read: it takes 20 times longer than the rest."""

    run_dir: Path
    launches: dict[str, Any]  # launch.json
    summary: dict[str, Any]
    job: Job | None = None  # None: no job, no need to ask, or SLURM gave no answer

    @classmethod
    def read(cls, run_dir: Path) -> Record:
        return cls(run_dir, read_json(run_dir / "launch.json"), read_summary(run_dir))

    @cached_property
    def launch(self) -> dict[str, Any]:
        return last_launch(self.launches)

    @property
    def job_id(self) -> str | None:
        found = self.launch.get("job_id")
        return None if found is None or found == "" else str(found)

    @property
    def on_kubernetes(self) -> bool:
        return self.job_id is not None and "/" in self.job_id

    @property
    def scheduler(self) -> str:
        return "Kubernetes" if self.on_kubernetes else "SLURM"

    @property
    def is_elsewhere(self) -> bool:
        """Whether the run folder is on a volume of Kubernetes that this machine does not mount."""
        return self.on_kubernetes and as_dict(self.launch.get("cluster")).get("run_root") is not None

    @property
    def num_launches(self) -> int:
        launches = self.launches.get("launches")
        return len(launches) if isinstance(launches, list) else 0

    @cached_property
    def attempts(self) -> list[dict[str, Any]]:
        """Each start of the run's job with its end; `ended` is None if it was killed or is still running."""
        found: list[dict[str, Any]] = []
        try:
            lines = read_bytes(self.run_dir / ATTEMPTS_FILE).splitlines()
        except OSError:
            lines = []
        for line in map(parse_line, lines):
            if line.get("event") == "start":
                keys = {k: line.get(k) for k in ("job_id", "restart", "nodes", "ranks")}
                ends = dict.fromkeys(("ended", "code", "why", "step"))
                found.append({**keys, "started": line.get("time"), "from_step": line.get("step"), **ends})
            elif line.get("event") == "placed" and found:
                found[-1]["nodes"] = line.get("nodes")
            elif line.get("event") == "end" and found:
                found[-1].update(ended=line.get("time"), **{k: line.get(k) for k in ("code", "why", "step")})
        return found

    @property
    def has_begun(self) -> bool:
        """Whether the newest launch has started: until then the files describe the previous one."""
        if self.job_id is None or (not self.attempts and self.num_launches < 2):
            return bool(self.summary)
        return any(str(a["job_id"]) == self.job_id for a in self.attempts)

    @property
    def reported_status(self) -> str | None:
        """The status that the newest launch wrote, if any."""
        if self.job_id is not None and not self.has_begun:
            return None
        status = self.summary.get("status")
        return str(status) if status else "failed" if (self.run_dir / "failure.json").is_file() else None

    @property
    def interrupted(self) -> bool:
        """Whether it reported a stop with a checkpoint and was not started again since."""
        return self.reported_status == "preempted" and (not self.attempts or self.attempts[-1]["ended"] is not None)

    @property
    def cancel_asked(self) -> float | None:
        """When `dtrain cancel` was run for this launch; a cancel from before a resume does not count."""
        asked = read_json(self.run_dir / CANCELLED_FILE)
        return number(asked.get("time")) if asked.get("launches") == self.num_launches else None

    @property
    def is_open(self) -> bool:
        """Whether only SLURM knows the run's state."""
        return self.job_id is not None and self.reported_status not in ("done", "failed") and not self.interrupted

    @property
    def is_final(self) -> bool:
        """Whether the newest launch reported that it is finished for good."""
        if self.reported_status != "failed":
            return self.reported_status == "done"
        if self.job_id is not None:
            return bool(self.attempts) and self.attempts[-1]["ended"] is not None
        return not as_dict(self.launch.get("cluster")).get("max_restarts")

    @property
    def is_live(self) -> bool:
        """Whether it runs, or will run without user action. For a job: as far as SLURM was asked."""
        if self.is_final:
            return False
        if self.job:
            return not self.job.ended
        if self.job_id is not None:
            return self.reported_status != "failed"  # unknown: assume alive; two jobs in one folder are worse
        return self.status.rstrip("?") in ("queued", "starting", "running")

    @property
    def status(self) -> str:
        """The most likely status: queued, starting, running, preempted, failed, done, cancelled or died.

        `died`: it reported running, but its process or job is gone. `?`: unknown, and no file changed for long.
        """
        reported, job = self.reported_status, self.job
        if reported in ("done", "failed"):
            return reported
        if self.interrupted:
            return "cancelled" if self.cancel_asked and not (job and not job.ended) else "preempted"
        if reported not in (None, "running", "preempted"):
            return str(reported)
        if self.job_id is None or job is None:
            word = self._without_slurm(reported)
            over = self.job_id is not None or word == "died"  # a local run may still be saving
            return "cancelled" if over and self.cancel_asked else word
        if job.queued:
            return "preempted" if self.has_begun else "queued"
        if job.active:
            return "running"
        if self.is_elsewhere and job.state == "COMPLETED":
            return "done"
        if self.cancel_asked or job.state == "CANCELLED":
            return "cancelled"
        if reported is None and job.state in ("FAILED", "BOOT_FAIL", "OUT_OF_MEMORY", "TIMEOUT", "DEADLINE"):
            return "failed"
        # SLURM requeues a job some seconds after it lost a node.
        return "preempted" if job.state in ("PREEMPTED", "NODE_FAIL") else "died"

    def _without_slurm(self, reported: str | None) -> str:
        launch, cluster = self.launch, as_dict(self.launch.get("cluster"))
        word = "running" if reported else "starting" if self.job_id is None else "queued"
        pid = launch.get("pid")
        # A submitted job outlives the process that submitted it, so that pid is irrelevant.
        target = str(cluster.get("_target_", "local"))
        ours = "local" in target or "ray_cluster" in target or cluster.get("launcher") == "torchrun"
        # A run that was never submitted ends with its launcher.
        ours = (ours or reported is None) and self.job_id is None and launch.get("host") == socket.gethostname()
        if ours and isinstance(pid, int) and pid > 0:
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return "died"
            except (OSError, OverflowError):
                pass  # someone else's process: alive
        return word if word != "queued" and self.quiet_s < QUIET_S else word + "?"

    @property
    def shown_status(self) -> str:
        """The status for tables: of a trial that its search stopped early, `paused`, or `replaced` by a copy (PBT)."""
        steps, total = number(self.summary.get("steps")), number(self.summary.get("total_steps"))
        is_short = steps is not None and total is not None and steps < total and not self.summary.get("ended_by")
        folder = self.run_dir.parent
        if not (self.status == "done" and is_short and (folder / JOURNAL).is_file()):
            return self.status
        copies = folder.glob(f"{glob.escape(self.run_dir.name.partition('-')[0])}-at-{steps:.0f}-from-*")
        return "replaced" if any(copies) else "paused"

    @property
    def rank_range(self) -> str | None:
        """`2:4 ranks` or `2:8 nodes`, if the number may change while the run trains."""
        cluster, names = as_dict(self.launch.get("cluster")), (("processes", "ranks"), ("nodes", "nodes"))
        return next((f"{cluster[key]} {what}" for key, what in names if isinstance(cluster.get(key), str)), None)

    @property
    def standstill(self) -> str | None:
        """Who holds up the run, if it stands still now."""
        text = read_json(self.run_dir / HANG_FILE).get("text") if self.is_live else None
        return str(text) if text else None

    @property
    def last_sign(self) -> float:
        """When the run last wrote a file, in seconds since the epoch."""
        times = [0.0]
        for name in ("summary.json", "metrics.jsonl", "launch.json"):
            try:
                times.append((self.run_dir / name).stat().st_mtime)
            except OSError:
                pass
        return max(times)

    @property
    def quiet_s(self) -> float:
        """Seconds since it last wrote a file, by the clock that stamps its files."""
        return file_clock(self.run_dir) - self.last_sign

    def row(self) -> dict[str, Any]:
        """Return the run as a table row."""
        run: dict[str, Any] = {
            "path": str(self.run_dir),
            "name": self.summary.get("name") or self.launches.get("name") or run_name(self.run_dir),
            "status": self.shown_status,
            "job_id": self.job_id,
        }
        for key in ("model", "strategy", "precision", "world_size", "steps", "total_steps", *RESULTS):
            run[key] = self.summary.get(key)
        run |= {"own_metrics": own} if (own := own_metrics(self.summary)) else {}
        run |= errors(self.summary)
        run["tags"] = tags_of(self.run_dir) or None
        origin = as_dict(self.launches.get("forked_from"))
        run["forked_from"] = f"{origin['run']}@{origin.get('step', origin.get('steps'))}" if "run" in origin else None
        # UTC, so that text order is time order.
        run["started"] = datetime.fromtimestamp(started(self.run_dir, self.launches), UTC).isoformat(
            timespec="microseconds"
        )
        return run


def errors(summary: dict[str, Any]) -> dict[str, float | None]:
    """Relative error of the prediction: 0.1 means 10% more time or memory than measured."""
    predicted = as_dict(summary.get("predicted"))

    def apart(guess: object, measured: object) -> float | None:
        a, b = number(guess), number(measured)
        return a / b - 1 if a and b else None

    # inverted for rates: half the speed is twice the time
    return {
        "step_error": apart(summary.get("tokens_per_s"), predicted.get("tokens_per_s")),
        "memory_error": apart(predicted.get("memory_gib"), summary.get("peak_mem_gib")),
    }


def load(run_dirs: Sequence[Path], ask_all: bool = False) -> tuple[list[Record], str]:
    """Read the runs, with one query of the scheduler for all whose files are not conclusive; also return why it failed.

    ask_all: also query the jobs of runs that report they have ended.
    """
    records = [Record.read(Path(d)) for d in run_dirs]
    asked = [r for r in records if r.job_id and (ask_all or r.is_open)]
    jobs = query(r.job_id for r in asked)
    if on_kubernetes := [r for r in asked if r.on_kubernetes]:
        from dtrain.runs import kubernetes_api  # imported late: most runs need no client

        places = [(str(r.job_id), as_dict(r.launch.get("cluster")).get("context")) for r in on_kubernetes]
        found, problem = kubernetes_api.query(places)
        jobs.update(found)
        jobs.problem = jobs.problem or problem
    for i, record in enumerate(records):
        if record not in asked or not (job := jobs.get(str(record.job_id))):
            continue
        if job.ended:  # it may have ended after the files were read
            record = records[i] = Record.read(record.run_dir)
        since = launch_time(record.launches)
        # A new cluster counts job ids from 1 again: a job older than this launch is a different one.
        alien = since is not None and job.submitted is not None and job.submitted < since - SKEW_S
        record.job = Job(job.id, "GONE") if alien else job
    return records, jobs.problem


def read_run(run_dir: Path) -> dict[str, Any]:
    return load([run_dir])[0][0].row()


def all_runs(roots: Sequence[str | Path] = ROOTS) -> list[Path]:
    """List every run below the roots, newest launch first."""
    # A root inside another root must not list its runs twice.
    folders = {os.path.abspath(run): run for root in roots for run in run_folders(Path(root))}
    return sorted(folders.values(), key=started, reverse=True)
