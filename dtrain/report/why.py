"""Why a run ended: the cause, the rank that came first, whose it is, whether to start again, and the evidence.

`diagnose` reads only the run folder, and SLURM's answer if the caller has asked it. Where the evidence does not decide,
the diagnosis says so.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dtrain.config.run_file import flat_config
from dtrain.report.evidence import Evidence, last_error, line_of, metrics_before_the_end
from dtrain.runs.folder import latest_checkpoint, newest_step, read_json
from dtrain.runs.protocol import BAD_CONFIG, HANG_FILE, POSITION_FILE
from dtrain.runs.record import Record
from dtrain.ui.console import can_resume, next_commands, skipped_text, used
from dtrain.util.format import as_dict, finite

AGAIN = "Starting again resumes from {origin}."
SAME = "Starting again without a change would end the same way."


@dataclass(frozen=True)
class Cause:
    """A class of causes. `again`: whether starting again helps."""

    whose: str
    again: str
    advice: str = ""


YOURS, MACHINE, UNKNOWN = "It is in your code.", "It is the machine's.", "Whose fault it is cannot be told from this."
CAUSES = {
    "nothing": Cause("", ""),
    "stopped": Cause("It was asked for.", AGAIN),
    "code": Cause(YOURS, SAME, "Correct the line above, then resume."),
    "exit": Cause(
        "The process ended itself.", SAME, "Look for sys.exit or os._exit in your code and in the libraries it calls."
    ),
    "numbers": Cause("It is in the training itself: data, model, learning rate or precision.", SAME),
    "settings": Cause("A rank refused a setting; its message has the fix.", SAME),
    "setup": Cause("The ranks do not run the same thing.", SAME),
    "collective": Cause(
        "It is in the code that the ranks run.",
        SAME,
        "Every rank must make the same collectives in the same order: look for a branch on the rank.",
    ),
    "hang": Cause(UNKNOWN, AGAIN, "cluster.max_restarts=3 restarts a hung run by itself."),
    "loader": Cause(UNKNOWN, AGAIN, "Loader processes are usually killed for memory: try fewer train.loader_workers."),
    "killed": Cause(
        "It came from outside: a person, a job scheduler, or the kernel for lack of memory.",
        AGAIN,
        "If memory was short: fewer ranks, or a smaller train.micro_batch_size.",
    ),
    "crash": Cause("It is in C code: a library, an extension, or the hardware.", AGAIN),
    "memory": Cause(
        MACHINE,
        SAME,
        "Use fewer ranks on this machine, a smaller train.micro_batch_size, fewer train.loader_workers, "
        "or more memory for the job.",
    ),
    "gpu memory": Cause(
        "The model and batch do not fit into the GPU.", SAME, "Try a smaller train.micro_batch_size, or `dtrain plan`."
    ),
    "gpu": Cause("It is the GPU or its driver.", AGAIN, "If the same GPU fails again, take its node out of the job."),
    "storage": Cause(MACHINE, SAME, "Make room, or mend the file system, then resume."),
    "network": Cause("It is the network between the ranks, as far as can be told.", AGAIN),
    "corruption": Cause("It is the hardware: memory or GPU.", AGAIN, "Nothing wrong was saved. Test that host."),
    "checkpoint": Cause(UNKNOWN, SAME),
    "node": Cause("It is the cluster's.", AGAIN),
    "time": Cause("The job's time was up.", AGAIN),
    "start": Cause(UNKNOWN, AGAIN),
    "died": Cause(UNKNOWN, AGAIN),
    "object": Cause("No line of yours is in its traceback, but it came up while dtrain used what you gave it.", SAME),
    "dtrain": Cause("No line of yours is involved: it may be a bug in dtrain or in a library.", SAME),
    "unknown": Cause(UNKNOWN, AGAIN),
}


@dataclass
class Diagnosis:
    """cause: a key of CAUSES. what: sentences about what happened."""

    cause: str
    what: str
    rank: int | None = None
    node: str | None = None
    step: int | None = None
    evidence: list[Evidence] = field(default_factory=list)
    consequences: list[int] = field(default_factory=list)  # ranks that failed because of it
    again: str = ""
    advice: str = ""
    next: list[str] = field(default_factory=list)

    @property
    def paragraph(self) -> str:
        ranks = ", ".join(map(str, self.consequences[:8])) + (", …" if len(self.consequences) > 8 else "")
        many = len(self.consequences) > 1
        then = f"Rank{'s' if many else ''} {ranks} failed as a consequence." if ranks else ""
        what = self.what[:1].upper() + self.what[1:]
        return " ".join(filter(None, [what, then, CAUSES[self.cause].whose, self.again, self.advice]))


def diagnose(record: Record) -> Diagnosis:
    """Say why the newest launch of a run ended, or that it has not."""
    run_dir, status = record.run_dir, record.status.rstrip("?")
    failure = read_json(run_dir / "failure.json") if record.reported_status == "failed" else {}
    if status in ("queued", "starting", "running"):
        found = of_live_run(record)
    elif status == "done":
        early = {
            "paused": "Its search paused it: it trains on if its result is among the best (dtrain search, repeated).",
            "replaced": "Its search replaced it by a copy of a better one, which trains on in a folder of its own.",
        }
        ended = early.get(record.shown_status, "The run ended well.")
        found = Diagnosis("nothing", f"{ended}{of_skipped(record)}")
    elif status in ("preempted", "cancelled"):
        found = of_stop(record)
    elif failure:
        found = of_failure(run_dir, failure)
    else:
        found = of_silence(record)
    if found.cause not in ("nothing",):
        complete(found, record)
    return found


def complete(found: Diagnosis, record: Record) -> None:
    """Add where the rank was, what the others reported, the metrics before the end, and what to do."""
    run_dir = record.run_dir
    position = read_json(run_dir / POSITION_FILE.format(found.rank if found.rank is not None else 0))
    found.node = position.get("host") if found.rank is not None else None
    metrics = metrics_before_the_end(run_dir)
    # the last position of a rank that was killed may be old: the step after the last metrics is nearer
    known = [as_step(position.get("step")), *(one.step + 1 for one in metrics)]
    found.step = max((step for step in known if step), default=None)
    found.evidence += [one.evidence for one in metrics]
    cause = CAUSES[found.cause]
    newest = latest_checkpoint(run_dir)
    origin = f"step {newest_step(run_dir)}" if newest else "the beginning, because nothing was saved yet"
    if cause.again == AGAIN and not newest and saves_nothing(run_dir):
        found.again = "The run saves no checkpoint (checkpoint.save=false): the same command starts it from step 1."
    found.again = found.again or cause.again.format(origin=origin)
    found.advice = found.advice or cause.advice
    if can_resume(run_dir, record.summary) or found.cause == "stopped":
        found.next = found.next or next_commands(run_dir, "preempted", record.summary)
    else:
        found.advice = found.advice.replace(", then resume.", ", then start the run again.")


def saves_nothing(run_dir: Path) -> bool:
    return (flat_config(run_dir) or {}).get("checkpoint.save") is False


def short_form(run_dir: Path, failure: dict[str, Any]) -> str:
    """The cause, whose it is and whether starting again helps, for the last screen of a failed run."""
    found = of_failure(run_dir, failure)
    cause = CAUSES[found.cause]
    newest = f"step {newest_step(run_dir)}" if latest_checkpoint(run_dir) else "the beginning"
    return f"{found.cause}. {cause.whose} {cause.again.format(origin=newest)}"


def as_step(value: object) -> int | None:
    found = finite(value)
    return int(found) if found else None


# ---- a run that failed, and whose supervisor recorded it ---------------------------------------------------------


def of_failure(run_dir: Path, failure: dict[str, Any]) -> Diagnosis:
    """From failure.json: the first failure, as the supervisor found it."""
    rank = failure.get("rank") if isinstance(failure.get("rank"), int) else None
    kind, message = str(failure.get("type") or ""), str(failure.get("message") or "")
    log = Path(str(failure.get("log") or "")).name  # the folder is untrusted: no path of its own
    evidence = [Evidence("failure.json", None, f"{kind}: {first_line(message)}")]
    lines = failure.get("kernel")
    kernel = [line for line in lines if isinstance(line, str)] if isinstance(lines, list) else []
    own = last_error(run_dir / "logs" / log) if log.endswith(".log") and rank is not None else None
    if own:
        evidence.append(own)
    who = "the run" if rank is None else f"rank {rank}"
    cause, what = classify(run_dir, failure, kind, message, kernel, own)
    found = Diagnosis(cause, what.replace("{who}", who), rank, evidence=evidence)
    if cause == "numbers" and (parts := re.split(r"\n(?:  fix|Fix): ", message, maxsplit=1))[1:]:  # by the rank
        fix = first_line(parts[1])
        found.advice = f"{fix[:1].upper()}{fix[1:]}."
    if FIX in message and (cause == "memory" or (cause == "code" and not failure.get("where"))):
        found.advice = f"Fix: {first_line(message.partition(FIX)[2])}."
    unnamed = cause == "corruption" and not ONE_RANK.search(message)  # without a majority, nobody is named
    if unnamed or cause in ("numbers", "network") or (cause == "settings" and "must be the same" not in message):
        found.rank = None  # every rank reports it, and the first one to do so is chance
    if failure.get("type") in ("hang", "collective mismatch") and (run_dir / HANG_FILE).is_file():
        found.evidence.append(Evidence(HANG_FILE, None, "the stacks and collectives of all ranks"))
    found.evidence += [Evidence("kernel log", None, line) for line in kernel[-3:]]
    found.evidence += exit_codes(run_dir)
    for note in notes(run_dir):
        is_other = isinstance(note.get("rank"), int) and note["rank"] != found.rank
        if is_other and note.get("lost_peer") and cause != "network":
            found.consequences.append(note["rank"])
    found.consequences.sort()
    return found


FIX = "\n  fix: "  # in a message of dtrain, or after one of torch
ONE_RANK = re.compile(r"^step \d+: rank \d+ \([^)]*\) (?:differs from its replicas|held |computed )")
ERRNO = re.compile(r"\[Errno (\d+)\]")
STORAGE = {5: "a file could not be read or written (I/O error)", 28: "a file system is full", 122: "a quota is used up",
           24: "the process has no file handles left", 23: "the machine has no file handles left",
           116: "a file on a network file system is stale", 30: "a file system is read-only"}  # fmt: skip
GPU = re.compile(
    r"CUDA error|CUDNN_STATUS|CUBLAS_STATUS|uncorrectable ECC|fallen off the bus|NVRM: Xid|device-side", re.I
)
GPU_MEMORY = re.compile(r"OutOfMemoryError|CUDA out of memory|CUDNN_STATUS_ALLOC_FAILED|NCCL.*out of memory", re.I)
HOST_MEMORY = re.compile(r"DefaultCPUAllocator: can't allocate|Cannot allocate memory|\bMemoryError\b|std::bad_alloc")
LOADER = re.compile(r"DataLoader worker .* (is killed by signal: |exited unexpectedly|ended with exit code)")


def classify(
    run_dir: Path, failure: dict[str, Any], kind: str, message: str, kernel: list[str], own: Evidence | None
) -> tuple[str, str]:
    """(cause, sentence); `{who}` in the sentence is the rank."""
    where = f" at {failure['where']}" if failure.get("where") else ""
    says, refused = first_line(message), failure.get("exit_code") == BAD_CONFIG
    for matches, cause, sentence in (
        (kind == "hang", "hang", f"The run stood still: {says}."),
        (kind == "collective mismatch", "collective", f"{{who}} called other collectives: {says}."),
        (kind == "SIGKILL", *killed(run_dir, failure, kernel)),
        (kind == "early exit" or kind.startswith("exit code"), *exited(own)),
        (kind.startswith("SIG"), *crashed(run_dir, failure, kind, kernel)),
        (kind == "start", "start", f"The ranks did not start: {says}."),
        (kind == "stopped", "stopped", f"The run was asked to stop, and was ended: {says}."),
        (kind == "disk", "storage", f"{says}."),
        (kind in ("NonFiniteError", "SpikeError"), "numbers", f"{says}."),
        (kind in ("ReplicaError", "CorruptionError"), "corruption", f"{says}."),
        (kind == "CheckpointError", "checkpoint", f"A checkpoint could not be used: {says}"),
        (kind == "SystemExit", "exit", f"{{who}} called sys.exit({says}){where}."),
        ("must be the same on all ranks" in message, "setup", f"The ranks differ: {says}."),
        (refused and failure.get("where"), "code", f"{{who}} refused your code{where}: {says}."),
        (refused, "settings", f"A setting was refused by the ranks: {says}."),
        (GPU_MEMORY.search(f"{kind}: {message}"), "gpu memory", f"{{who}} ran out of GPU memory{where}: {says}."),
        (HOST_MEMORY.search(f"{kind}: {message}"), "memory", f"{{who}} was refused memory of the host{where}: {says}."),
        (LOADER.search(message), "loader", f"A loader process of {{who}} ended: {says}"),
        (failure.get("lost_peer"), "network", "The ranks lost their connections, though no process had ended."),
        (GPU.search(message), "gpu", f"A GPU operation of {{who}} failed{where}: {says}."),
        (storage(kind, message), "storage", f"{{who}}: {storage(kind, message)}{where}: {says}."),
        (kind == "launch", "start", "The program that starts the ranks failed before any rank reported an error."),
        (failure.get("where"), "code", f"{{who}} failed with {kind}{where}: {says}."),
        (FIX in message, "code", f"{{who}} failed with {kind}: {says}."),  # a mistake that dtrain knows
        (used(failure), "object", f"{{who}} failed with {kind}: {says}. dtrain was using {'; '.join(used(failure))}."),
        (own is not None or failure.get("traceback"), "dtrain", f"{{who}} failed with {kind}: {says}."),
    ):  # fmt: skip
        if matches:
            return cause, sentence
    return "unknown", f"{{who}} failed with {kind or 'an error'}, and left no evidence of why."


def killed(run_dir: Path, failure: dict[str, Any], kernel: list[str]) -> tuple[str, str]:
    """SIGKILL: by the kernel for lack of memory, if it says so."""
    pid = pid_of(run_dir, failure.get("rank"))
    of_memory = [line for line in kernel if re.search(rf"Killed process {pid}\b", line)]
    if of_memory:
        limit = "its memory limit (cgroup)" if "cgroup" in of_memory[-1] else "a lack of memory on the machine"
        return "memory", f"The kernel killed {{who}} because of {limit}."
    doubt = "" if can_read_kernel_log() else "; the kernel's log, which would say so, cannot be read here"
    return "killed", f"{{who}} was killed by SIGKILL. No sign that the kernel did it for lack of memory{doubt}."


def pid_of(run_dir: Path, rank: object) -> int:
    pid = read_json(run_dir / POSITION_FILE.format(rank)).get("pid") if isinstance(rank, int) else None
    return pid if isinstance(pid, int) else -1


def can_read_kernel_log() -> bool:
    return os.access("/dev/kmsg", os.R_OK)


def exited(own: Evidence | None) -> tuple[str, str]:
    if own:  # it could not write its report, for example on a full disk
        cause = "storage" if storage("OSError", own.text) else "memory" if HOST_MEMORY.search(own.text) else "code"
        return cause, f"{{who}} failed, and could not write its error report: {own.text}."
    return "exit", "{who} ended by itself before the run did, without an error."


def crashed(run_dir: Path, failure: dict[str, Any], kind: str, kernel: list[str]) -> tuple[str, str]:
    pid = pid_of(run_dir, failure.get("rank"))
    if any("Xid" in line and re.search(rf"\bpid='?{pid}\b", line) for line in kernel):
        return "gpu", f"{{who}} crashed with {kind}, and the GPU's driver reported an error (Xid)."
    names = {"SIGSEGV": "an invalid memory access", "SIGBUS": "a mapped file or shared memory that is gone or full",
             "SIGABRT": "C code called abort()", "SIGILL": "an illegal instruction"}  # fmt: skip
    return "crash", f"{{who}} crashed with {kind}" + (f": {names[kind]}." if kind in names else ".")


def storage(kind: str, message: str) -> str:
    """What is wrong with a file system, if the error is about that."""
    found = ERRNO.search(message)
    is_os_error = found and (kind.endswith("Error") or kind == "OSError")
    return STORAGE.get(int(found[1]), "") if found and is_os_error else ""


def notes(run_dir: Path) -> list[dict[str, Any]]:
    """What the ranks reported."""
    return [read_json(path) for path in sorted((run_dir / "logs").glob("failure-*.json"))]


def exit_codes(run_dir: Path) -> list[Evidence]:
    """What the program that started the ranks saw of the ranks' ends."""
    return [
        Evidence(f"logs/{name}", number_of, text)
        for name in ("torchrun.log", "starter.log", "srun.log")
        for number_of, text in line_of(run_dir / "logs" / name, r"exitcode\s*:|Exited with exit code|Killed|oom")
    ][-3:]


def first_line(message: str) -> str:
    lines = [line.strip() for line in message.strip().splitlines() if line.strip()]
    return lines[0][:300].rstrip(".") if lines else "no message"


# ---- a run without a recorded failure ------------------------------------------------------------------------------


def of_live_run(record: Record) -> Diagnosis:
    if record.standstill:
        report = read_json(record.run_dir / HANG_FILE)
        ranks = report.get("ranks") if isinstance(report.get("ranks"), list) else []
        rank = ranks[0] if ranks and isinstance(ranks[0], int) else None
        evidence = [Evidence(HANG_FILE, None, "the stacks and collectives of all ranks")]
        cause = "collective" if report.get("differ") else "hang"
        return Diagnosis(cause, f"The run stands still: {record.standstill}.", rank, evidence=evidence)
    words = {"queued": "waits in the queue", "starting": "is starting", "running": "is running"}
    return Diagnosis("nothing", f"The run {words[record.status.rstrip('?')]}, and nothing has failed.")


def of_skipped(record: Record) -> str:
    """What to know of steps that made no update."""
    text = skipped_text(record.summary)
    if text == "-":
        return ""
    usual = (
        "" if ":" in text or record.summary.get("precision") != "fp16" else ", as is usual while fp16's scale settles"
    )
    return f" Steps without an update: {text}{usual}. logs/rank-0.log names them."


def of_stop(record: Record) -> Diagnosis:
    job = record.job
    if job and job.state == "TIMEOUT":
        return Diagnosis("time", "SLURM ended the job at its time limit.", evidence=list(of_job(record)))
    by = "dtrain cancel" if record.cancel_asked else "a signal or a stop file"
    if record.status == "cancelled" and not record.cancel_asked:
        by = "scancel"
    saved = (
        f"It saved step {newest_step(record.run_dir)}." if latest_checkpoint(record.run_dir) else "Nothing was saved."
    )
    return Diagnosis("stopped", f"The run was stopped by {by}. {saved}", evidence=list(of_job(record)))


def of_job(record: Record) -> Iterator[Evidence]:
    if record.job and record.job.state != "GONE":
        yield Evidence("SLURM", None, f"job {record.job.id}: {record.job.state}, exit code {record.job.exit or '?'}")


def of_silence(record: Record) -> Diagnosis:
    """The launcher or the job ended without a record."""
    job, run_dir, evidence = record.job, record.run_dir, list(of_job(record))
    states = {
        "OUT_OF_MEMORY": ("memory", "SLURM killed the job because it used more memory than it asked for."),
        "TIMEOUT": ("time", "SLURM ended the job at its time limit, before a checkpoint was written."),
        "DEADLINE": ("time", "SLURM ended the job at its deadline."),
        "NODE_FAIL": ("node", "A node of the job was lost."),
        "BOOT_FAIL": ("node", "A node of the job could not be started."),
        "PREEMPTED": ("stopped", "Another job took the nodes."),
    }
    if job and job.state in states:
        return Diagnosis(*states[job.state], evidence=evidence)
    errors = {path: last_error(path) for path in sorted((run_dir / "logs").glob("rank-*.log"))}
    found = [(path, error) for path, error in errors.items() if error]
    pid = record.launch.get("pid")
    if record.status == "died" and record.launch.get("host") == socket.gethostname():
        gone = f"The launcher (process {pid}) is gone and recorded no end: it was killed, or the machine went down."
        if booted_since(record.last_sign):
            return Diagnosis("node", "The machine was restarted while the run was alive.", evidence=evidence)
        return Diagnosis("died", f"{gone} Which of the two is not known.", evidence=evidence)
    if found:
        evidence += [error for _, error in found[:3]]
        return Diagnosis("unknown", "No first failure was recorded; the logs below have errors.", evidence=evidence)
    return Diagnosis("unknown", "Nothing in the run folder says why it ended.", evidence=evidence)


def booted_since(when: float) -> bool:
    """Was this machine started after that time?"""
    try:
        fields = dict(line.split(None, 1) for line in Path("/proc/stat").read_text().splitlines() if " " in line)
        return int(fields["btime"]) > when > 0
    except (OSError, KeyError, ValueError):
        return False


def as_data(found: Diagnosis) -> dict[str, Any]:
    """For --json and tests."""
    data = {key: value for key, value in vars(found).items() if key != "evidence"}
    return as_dict(data | {"paragraph": found.paragraph, "evidence": [vars(one) for one in found.evidence]})
