"""What SLURM says of jobs: asked of squeue, then of sacct and scontrol, whichever the site has and that answers."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

ANSWER_S = 5  # a dead controller takes squeue 9 s, a dead database sacct minutes; nobody waits that long for a table
QUEUED = {"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD", "CONFIGURING"}
ENDED = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    "TIMEOUT", "GONE",
}  # fmt: skip
_silent: set[str] = set()  # commands that failed in this process: a site without accounting is asked once


@dataclass(frozen=True)
class Job:
    """A job, or one task of an array, as SLURM last saw it. GONE: it answered, and does not know this id any more."""

    id: str  # 12, or 12_3 of an array
    state: str
    reason: str = ""  # why it waits, in SLURM's word
    nodes: str = ""  # as SLURM writes them: node[1-4]
    elapsed: float | None = None  # seconds
    limit: float | None = None  # seconds; None = unknown, or none
    submitted: float | None = None  # since the epoch; a requeue counts as a submission
    started: float | None = None  # of a job that waits: when SLURM expects it to start
    exit: str | None = None  # "code:signal"

    @property
    def queued(self) -> bool:
        return self.state in QUEUED

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def active(self) -> bool:
        """On its nodes. A state that we have never heard of counts as that: nobody is called dead by mistake."""
        return not self.queued and not self.ended


class Jobs(dict[str, Job]):
    """Jobs by id; an id is missing when nobody could say. problem: what the command that failed had to say."""

    problem: str = ""


class NoAnswer(Exception):
    """A SLURM command is not here, failed, or took too long."""

    def __init__(self, message: str, missing: bool = False):
        super().__init__(message)
        self.missing = missing


def call(command: Sequence[str], seconds: float | None = None) -> str:
    """The output of a SLURM command; NoAnswer with its own message."""
    seconds = seconds or ANSWER_S
    # SQUEUE_STATES and the like would hide jobs, and a time format of one's own could not be read back.
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
        said = " ".join((done.stderr.strip() or done.stdout.strip()).split())
        raise NoAnswer(said or f"{command[0]} ended with exit code {done.returncode}")
    return done.stdout


def query(job_ids: Iterable[object]) -> Jobs:
    """The jobs with these ids. On a machine without SLURM none is known, which is no problem."""
    wanted = list(dict.fromkeys(i for i in map(str, job_ids) if re.fullmatch(r"\d+(_\d+)?", i)))
    jobs = Jobs()
    if not wanted:
        return jobs
    answered, refused = True, False
    try:
        jobs.update(_squeue(wanted))
    except NoAnswer as error:
        # One id that it has forgotten, alone or (in some versions) among others, makes squeue fail as a whole.
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
    """One job from scontrol, which alone says how it ended where there is no accounting."""
    try:
        text = call(["scontrol", "show", "job", "-o", job_id])
    except NoAnswer:
        return None
    # A job's name is any text and comes first: the last of these words are SLURM's.
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
    # No job names: they may hold any separator. -r: waiting tasks one by one, not as 12_[3-5].
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
    """SLURM's [days-][hours:]minutes:seconds."""
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
