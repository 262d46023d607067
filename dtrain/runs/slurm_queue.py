"""Query SLURM for jobs: squeue first, then sacct and scontrol, as far as the site has them and they answer."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

ANSWER_S = 5  # with a dead controller squeue takes 9 s, with a dead database sacct takes minutes: too long for a table
QUEUED = {"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD", "CONFIGURING"}
ENDED = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    "TIMEOUT", "GONE",
}  # fmt: skip
_silent: set[str] = set()  # commands that failed in this process: a site without accounting is asked once


@dataclass(frozen=True)
class Job:
    """A job, or one array task, as SLURM last reported it. GONE: SLURM answered, but no longer knows this id."""

    id: str  # 12, or 12_3 in an array
    state: str
    reason: str = ""  # why it is pending, as SLURM names it
    nodes: str = ""  # in SLURM's notation: node[1-4]
    elapsed: float | None = None  # seconds
    limit: float | None = None  # seconds; None: unknown or unlimited
    submitted: float | None = None  # since the epoch; a requeue counts as a submission
    started: float | None = None  # for a pending job: the start that SLURM expects
    exit: str | None = None  # "code:signal"

    @property
    def queued(self) -> bool:
        return self.state in QUEUED

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def active(self) -> bool:
        """Whether it is on its nodes. An unknown state counts as active: a live job must not be reported as dead."""
        return not self.queued and not self.ended


class Jobs(dict[str, Job]):
    """Jobs by id; an id is missing if no command knew it. problem: the message of the command that failed."""

    problem: str = ""


class NoAnswer(Exception):
    """A SLURM command is missing, failed, or took too long."""

    def __init__(self, message: str, missing: bool = False):
        super().__init__(message)
        self.missing = missing


def call(command: Sequence[str], seconds: float | None = None) -> str:
    """Return the output of a SLURM command; raise NoAnswer with the command's message."""
    seconds = seconds or ANSWER_S
    # SQUEUE_STATES etc. would hide jobs, and a custom time format could not be parsed.
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SQUEUE_", "SACCT_"))}
    env["SLURM_TIME_FORMAT"] = "standard"
    try:
        done = subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds, errors="replace"
        )
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"{command[0]} did not answer within {seconds:.0f} s") from None
    except OSError as error:
        raise NoAnswer(f"{command[0]}: {error.strerror}", missing=True) from None
    if done.returncode:
        message = " ".join((done.stderr.strip() or done.stdout.strip()).split())
        raise NoAnswer(message or f"{command[0]} ended with exit code {done.returncode}")
    return done.stdout


def query(job_ids: Iterable[object]) -> Jobs:
    """Return the jobs with these ids. Without SLURM on this machine the result is empty, and `problem` too."""
    wanted = list(dict.fromkeys(i for i in map(str, job_ids) if re.fullmatch(r"\d+(_\d+)?", i)))
    jobs = Jobs()
    if not wanted:
        return jobs
    answered, refused = True, False
    try:
        jobs.update(_squeue(wanted))
    except NoAnswer as error:
        # One forgotten id makes squeue fail as a whole, alone or (in some versions) among others.
        refused = answered = "nvalid job id" in str(error)
        if not answered and not error.missing:
            jobs.problem = str(error)
    if (rest := [i for i in wanted if i not in jobs]) and "sacct" not in _silent:
        try:
            jobs.update({i: job for i, job in _sacct(rest).items() if i in rest})
        except NoAnswer:
            _silent.add("sacct")
    for job_id in [i for i in wanted if i not in jobs] if answered else []:
        known = show(job_id) if refused and len(wanted) > 1 else None
        jobs[job_id] = known or Job(job_id, "GONE")
    return jobs


def show(job_id: str) -> Job | None:
    """Get one job from scontrol: without accounting, only scontrol knows how a job ended."""
    try:
        text = call(["scontrol", "show", "job", "-o", job_id])
    except NoAnswer:
        return None
    # A job's name is free text and comes first: match the last occurrence of these fields.
    state = re.match(r".* JobState=(\S+) Reason=(\S*) Dependency=", text)
    if not state:
        return None

    def field(pattern: str) -> str:
        found = re.search(pattern, text[state.end() :])
        return found[1] if found else ""

    times = field(r" (RunTime=\S+ TimeLimit=\S+) "), field(r" (SubmitTime=\S+) "), field(r" (StartTime=\S+) ")
    run_time, _, limit = times[0].partition(" ")
    return Job(
        job_id,
        state[1],
        _word(state[2]),
        _word(field(r" NodeList=(\S*)")),
        _seconds(run_time[8:]),
        _seconds(limit[10:]),
        _epoch(times[1][11:]),
        _epoch(times[2][10:]),
        field(r" ExitCode=(\d+:\d+)") or None,
    )


def _squeue(job_ids: list[str]) -> dict[str, Job]:
    # No job names: they may contain any separator. -r: list pending tasks one by one, not as 12_[3-5].
    output = call(["squeue", "-h", "-r", "-t", "all", "-j", ",".join(job_ids), "-o", "%i|%T|%N|%M|%l|%V|%S|%r"])
    jobs = {}
    for line in output.splitlines():
        match line.split("|", 7):
            case [job_id, state, nodes, elapsed, limit, submitted, started, reason]:
                times = _seconds(elapsed), _seconds(limit), _epoch(submitted), _epoch(started)
                jobs[job_id] = Job(job_id, state, _word(reason), _word(nodes), *times)
    return jobs


def _sacct(job_ids: list[str]) -> dict[str, Job]:
    fields = "JobID,State,ExitCode,NodeList,ElapsedRaw,TimelimitRaw,Submit,Start"
    output = call(["sacct", "-X", "-n", "-P", "-j", ",".join(job_ids), "-o", fields])
    jobs = {}
    for line in output.splitlines():
        match line.split("|"):
            case [job_id, state, code, nodes, elapsed, limit, submitted, started]:
                jobs[job_id] = Job(
                    job_id,
                    state.split(" ")[0],  # CANCELLED by 1000
                    "",
                    "" if nodes == "None assigned" else nodes,
                    float(elapsed) if elapsed.isdigit() else None,
                    60 * float(limit) if limit.isdigit() else None,
                    _epoch(submitted),
                    _epoch(started),
                    code or None,
                )
    return jobs


def _word(text: str) -> str:
    return "" if text in ("None", "(null)", "N/A") else text


def _seconds(text: str) -> float | None:
    """Parse SLURM's [days-][hours:]minutes:seconds."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if not found:
        return None  # UNLIMITED, INVALID, Partition_Limit
    days, hours, minutes, seconds = (int(n or 0) for n in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _epoch(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None  # N/A, Unknown
