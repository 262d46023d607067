"""Inside a SLURM allocation: a supervisor on the first node checks the nodes, starts the ranks, requeues the job.

After any interruption the ranks save, and the run resumes in the same folder. A signal before the time limit and
preemption end here with PREEMPTED, and the job is requeued; after an external `scontrol requeue` or a lost node SLURM
requeues it. attempts.jsonl lists each start, and a run without progress is given up.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from dtrain.checks.validate import validate
from dtrain.config import run_file
from dtrain.config.build import build
from dtrain.config.redaction import hide
from dtrain.launch import nsys
from dtrain.launch.failures import failure
from dtrain.launch.supervisor import Supervisor, hang_settings
from dtrain.preflight import network_env
from dtrain.preflight.start import python_command
from dtrain.runs import causes
from dtrain.runs.folder import (
    last_launch,
    locked,
    newest_step,
    note_attempt,
    parse_line,
    read_json,
    read_summary,
    write_json,
)
from dtrain.runs.protocol import (
    ATTEMPTS_FILE,
    BAD_CONFIG,
    CANCELLED_FILE,
    DONE,
    FAILED,
    PREEMPTED,
    PREFLIGHT,
    STACK_SIGNAL,
    STOP_SIGNALS,
    free_port,
)
from dtrain.runs.slurm_queue import query
from dtrain.start import environment

LOCK_S = 180.0  # wait for the last attempt's supervisor to exit; NFS frees a lost node's lock after 90 s
OUR_CODES = [str(code) for code in (BAD_CONFIG, FAILED)]
TAIL = 2**21  # bytes from the end of a rank's log: NCCL's startup output is smaller; earlier starts come before it
REQUEUE_TRIES = 20  # SLURM's controller may be unavailable for some minutes


class Srun(Supervisor):
    """The ranks of one job step: one task per rank, on the healthy nodes."""

    log_name = "srun.log"
    killed_node = ""  # set if all ranks of this node were killed at once

    def __init__(self, config: dict[str, Any], nodes: list[str], master_addr: str, master_port: str) -> None:
        self.config, self.nodes, self.cluster = config, nodes, config["cluster"]
        self.master = {"MASTER_ADDR": master_addr, "MASTER_PORT": master_port}
        self.start_s = self.cluster["start_s"]
        num_ranks, cluster = len(nodes) * self.cluster["processes"], self.cluster
        super().__init__(num_ranks, cluster["max_restarts"], cluster["grace_s"], *hang_settings(cluster))
        self.is_one_host = len(nodes) == 1

    def command(self, run_dir: Path) -> list[str]:
        rank = [*python_command(self.config, "dtrain.train.rank"), str(run_dir)]
        return [
            *srun(self.cluster, self.nodes, self.cluster["processes"]), "--kill-on-bad-exit=1", *self.cluster["srun"],
            *nsys.around(self.config, run_dir, "rank-%q{SLURM_PROCID}", rank),
        ]  # fmt: skip

    def environment(self) -> dict[str, str]:
        # self.master overrides a MASTER_ADDR that the user set
        return (
            network_env.environment(self.config, os.environ)
            | self.master
            | environment(python_command(self.config, ""))
        )

    def on_stop(self) -> None:
        """Signal the tasks: a network file system may hide a new stop file for a minute."""
        if self.config.get("nsys"):
            return  # nsys would get the signal too, and die from it
        # if the job is being requeued, scancel retries every 5 s for a minute; the ranks have received SIGTERM by then
        scontrol("scancel", "--signal=USR1", job_id(), timeout=4)

    def ask_for_stacks(self, positions: dict[int, Any]) -> None:
        """Signal all tasks, also those of other nodes; a task that has no handler ignores this signal."""
        scontrol("scancel", f"--signal={STACK_SIGNAL.name.removeprefix('SIG')}", job_id(), timeout=4)

    def failure_is_known(self) -> bool:
        """Did the rank that held up the others answer?"""
        return self.standstill is not None and any(map(self.standstill.has_answered, self.standstill.ranks))

    def on_first_step(self, run_dir: Path) -> None:
        """Check NCCL's choice, if NCCL_DEBUG=INFO logged it: sockets in place of InfiniBand are easy to miss."""
        from dtrain.preflight import nccl_log

        output = (run_dir / "logs" / "rank-0.log").read_bytes()[-TAIL:].decode(errors="replace")
        if found := nccl_log.mismatch(self.config, output):
            say(f"warning: {found}")

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """Send TERM, so that srun ends the step; killing srun would leave the tasks on other nodes running."""
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            super().kill(process)

    def place(self) -> dict[str, Any]:
        return {"job_id": job_id(), "restart": int(os.environ.get("SLURM_RESTART_COUNT", "0")), "nodes": self.nodes}

    def killed_ranks(self, output: str) -> list[tuple[int, str]]:
        self.killed_node = killed_node(output, self.cluster["processes"]) if len(self.nodes) > 1 else ""
        return killed_ranks(output)


def killed_ranks(output: str) -> list[tuple[int, str]]:
    """(rank, signal) of the first task that died, according to srun: `srun: error: node2: task 3: Killed`."""
    names = {"Killed": "SIGKILL", "Out Of Memory": "SIGKILL", "Segmentation fault": "SIGSEGV", "Aborted": "SIGABRT"}
    names |= {"Bus error": "SIGBUS", "Illegal instruction": "SIGILL", "Floating point exception": "SIGFPE"}
    names |= {"User defined signal 1": "SIGUSR1", "User defined signal 2": "SIGUSR2", "Terminated": "SIGTERM"}
    found = re.search(rf"srun: error: \S+ tasks? (\d+)[\d,-]*: ({'|'.join(names)}|Exited with exit code (\d+))", output)
    if not found or found[3] in OUR_CODES:  # ranks that exit with one of our codes leave a failure note
        return []
    code = int(found[3] or 0)
    by_shell = {128 + number: number.name for number in signal.Signals}  # how a wrapper around Python reports a signal
    return [(int(found[1]), names.get(found[2]) or by_shell.get(code) or f"exit code {code}")]


def killed_node(output: str, ranks_per_node: int) -> str:
    """The node whose ranks died first and all at once. The cause is the node or a late kill by SLURM, not a rank."""
    found = re.search(r"srun: error: (\S+): tasks? (\d+)(?:-(\d+))?: (\w+)", output)
    whole = found and found[4] == "Killed" and int(found[3] or found[2]) - int(found[2]) + 1 == ranks_per_node > 1
    return found[1] if found and whole else ""


def silent_nodes(run_dir: Path, nodes: list[str], ranks_per_node: int) -> list[str]:
    """The nodes where no rank wrote a failure note."""
    notes = {int(path.stem.removeprefix("failure-")) for path in (run_dir / "logs").glob("failure-*.json")}
    ranks = {node: range(i * ranks_per_node, (i + 1) * ranks_per_node) for i, node in enumerate(nodes)}
    return [node for node in nodes if notes.isdisjoint(ranks[node])]


def srun(cluster: dict[str, Any], nodes: list[str], tasks_per_node: int) -> list[str]:
    """Build srun for these nodes of the job. --overlap: a hanging step must not block the next one."""
    names = ("cpus_per_task", "container_image", "container_mounts")
    given = [f"--{name.replace('_', '-')}={cluster[name]}" for name in names if cluster[name]]
    return [
        "srun", "--export=ALL", "--overlap", f"--nodes={len(nodes)}", f"--nodelist={','.join(nodes)}",
        f"--ntasks={len(nodes) * tasks_per_node}", f"--ntasks-per-node={tasks_per_node}", "--distribution=block",
        "--label", *given,
    ]  # fmt: skip


def scontrol(*command: str, timeout: float = 60) -> str:
    """Return the output of a SLURM command, or "" if it fails: the job must survive an unavailable controller."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", None) or str(error)
        say(f"{shlex.join(command)}: {output.strip()}")
        return ""


# ---- the job -------------------------------------------------------------------------------------------------


def main(run_dir: str) -> None:
    """Entry point for submitit. The exit code becomes the job's."""
    sys.exit(Job(Path(run_dir)).run())


class Job:
    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.stopped = False
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):  # until the supervisor installs its own
            signal.signal(number, self._on_signal)
        self.id = job_id()
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):  # the user's own, wrong for this job
            os.environ.pop(name, None)
        self.nodes = scontrol("scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]).split()

    def run(self) -> int:
        logs = self.run_dir / "logs"
        logs.mkdir(exist_ok=True)
        descriptor = os.open(logs / "batch.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        restart = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        say(f"{time.strftime('%F %T')} job {self.id}, start {restart + 1}, on {', '.join(self.nodes)}")
        if not self._lock():
            return self._end(PREEMPTED, f"another job held the run folder for {LOCK_S:.0f} s")
        ours = last_launch(read_json(self.run_dir / "launch.json")).get("job_id")
        if (self.run_dir / CANCELLED_FILE).exists() or ours not in (None, self.id):
            say(f"the run no longer belongs to this job: it was cancelled, or belongs to job {ours}")
            return PREEMPTED
        config = run_file.load(self.run_dir)
        last_step = min(config["train"]["steps"], config["train"]["stop_after"] or config["train"]["steps"])
        summary = read_summary(self.run_dir)
        if summary.get("status") == "done" and summary["steps"] >= last_step:  # requeued after it had finished
            return DONE
        note_attempt(self.run_dir, "start", job_id=self.id, restart=restart, nodes=self.nodes)
        idle = idle_starts(self.run_dir)
        if idle > config["cluster"]["max_idle_starts"]:
            why = (
                f"{idle} starts in a row from step {newest_step(self.run_dir)}, and none reached another checkpoint. "
                "Fix: logs/batch.log says why; a smaller checkpoint.every, a longer cluster.time or cluster.grace_s"
            )
            return self._end(FAILED, failure(None, "no progress", why, "logs/batch.log"))
        return self._end(*self._run(config))

    def _on_signal(self, number: int, frame: object) -> None:
        self.stopped = True

    def _lock(self) -> bool:
        """Lock the run folder until this process ends; the last attempt's supervisor may still be exiting."""
        deadline = time.monotonic() + LOCK_S
        while time.monotonic() < deadline:
            try:
                self.lock = locked(self.run_dir)
                self.lock.__enter__()
                return True
            except ValueError:
                time.sleep(1)
        return False

    def _run(self, config: dict[str, Any]) -> tuple[int, dict[str, Any] | str]:
        """Run preflight, then the ranks; return the exit code and the reason."""
        nodes = self.nodes
        check = build(config["preflight"])
        if check.level != "off":
            report = check.run(config, self.run_dir, nodes, starter(config), say, stop=lambda: self.stopped)
            if self.stopped:
                return PREEMPTED, "stopped before the ranks had started"
            if not report.ok:
                nodes = [node for node in nodes if node not in report.bad]
                why = "; ".join(f"{node}: {text}" for node, texts in report.bad.items() for text in texts)
                if not check.exclude_bad or not nodes:
                    if newest_step(self.run_dir):  # it ran before: the next nodes may be better
                        return PREEMPTED, f"preflight: {why}"
                    return PREFLIGHT, failure(None, "preflight", why, "logs/batch.log")
                say(f"continuing without {', '.join(report.bad)} ({why})")
                try:
                    validate(dict(config) | {"cluster": dict(config["cluster"]) | {"nodes": len(nodes)}})
                except ValueError as error:
                    return PREFLIGHT, failure(None, "preflight", f"{why}. Without them: {error}", "logs/batch.log")
        for line in network_env.differences(config, os.environ):
            say(line)
        try:
            nsys.prepare(config, self.run_dir)
        except ValueError as error:  # checked only here: cluster.setup may provide nsys on the nodes, not at submission
            return BAD_CONFIG, failure(None, "nsys", str(error), "logs/batch.log") | {"exit_code": BAD_CONFIG}
        ranks = Srun(config, nodes, address_of(nodes[0]), str(free_port()))
        if self.stopped:  # nothing to save yet
            return PREEMPTED, "stopped before the ranks had started"
        code = ranks.supervise(self.run_dir, stop=lambda: self.stopped)
        if code == FAILED and ranks.failure.get("lost_peer") and len(nodes) > 1:
            gone = silent_nodes(self.run_dir, nodes, config["cluster"]["processes"])
            what = f"a node was lost ({', '.join(gone)})" if gone else "the connection between nodes was lost"
            return PREEMPTED, f"{what}: {ranks.failure['message'].splitlines()[0]}"
        if code == FAILED and ranks.failure["type"] == "hang" and len(nodes) > 1 and not ranks.failure_is_known():
            return PREEMPTED, ranks.failure["message"]  # a node was lost, or the network between nodes
        if code == FAILED and ranks.never_started:  # srun sometimes hangs when a node has just come back
            return PREEMPTED, ranks.failure["message"]
        if code == FAILED and ranks.failure["type"] == "SIGKILL" and not ranks.ranks_began:
            # no rank imported torch yet: a late kill by SLURM, meant for the previous start, whose step had this number
            return PREEMPTED, "the ranks were killed before they had started"
        if code == FAILED and ranks.failure["type"] == "SIGKILL" and ranks.killed_node:
            return PREEMPTED, f"all ranks of {ranks.killed_node} were killed at once"
        if code == FAILED and ranks.failure["type"] in {number.name for number in STOP_SIGNALS}:
            return PREEMPTED, f"{ranks.failure['type']} arrived before the ranks could handle it"  # Python was starting
        if code == FAILED and (job := query([self.id]).get(self.id)) and job.state != "RUNNING":
            # SLURM requeues the job itself, or was told not to
            return PREEMPTED, "SLURM ended the job before it could save"
        return code, ranks.failure if code not in (DONE, PREEMPTED) else read_summary(self.run_dir).get("status", "")

    def _end(self, code: int, why: dict[str, Any] | str) -> int:
        """Record how the job ended; requeue it if it was interrupted and can resume."""
        text = why if isinstance(why, str) else why["message"]
        cause = causes.one_line(why) if isinstance(why, dict) and why.get("rank") is not None else text
        note_attempt(self.run_dir, "end", code=code, why=cause)
        if isinstance(why, dict):
            with contextlib.suppress(OSError):  # on a full disk SLURM still has the exit code
                write_json(self.run_dir / "failure.json", why)
                write_json(self.run_dir / "summary.json", read_summary(self.run_dir) | {"status": "failed"})
            say(f"failed: {text}")
        elif code == PREEMPTED:
            if (summary := read_summary(self.run_dir)).get("status") == "failed":  # only this start: the run resumes
                write_json(self.run_dir / "summary.json", summary | {"status": "preempted"})
                (self.run_dir / "failure.json").unlink(missing_ok=True)
            self._requeue(text)
        return code

    def _requeue(self, why: str) -> None:
        config = run_file.load(self.run_dir)
        if not config["cluster"]["requeue"] or (self.run_dir / CANCELLED_FILE).exists():
            return
        for tries in range(REQUEUE_TRIES):
            job = query([self.id]).get(self.id)
            # only from RUNNING: a cancelled job must not come back, and a job being requeued needs no second request
            if job and job.state != "RUNNING":
                return
            if tries == 0:
                say(f"{why}: requeueing")
            if job:
                scontrol("scontrol", "requeue", self.id)  # its TERM does not end this process: our handler catches it
            time.sleep(1 if job else 5)
        say("the job could not be requeued; resume with resume=" + shlex.quote(str(self.run_dir)))


def say(text: str) -> None:
    """Write to batch.log; on a full disk drop the line, because logging must not crash the supervisor."""
    with contextlib.suppress(OSError):
        os.write(1, f"{hide(text)}\n".encode())


def job_id() -> str:
    """Job id for SLURM commands. An array's last task has the array's own plain id, which would address all tasks."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array else os.environ["SLURM_JOB_ID"]


def idle_starts(run_dir: Path) -> int:
    """Count the newest job's consecutive starts from the same checkpoint, including the newest start.

    Restarts inside a job (cluster.max_restarts) have their own limit and do not count.
    """
    path = run_dir / ATTEMPTS_FILE
    lines = [parse_line(line) for line in path.read_bytes().splitlines()] if path.exists() else []
    outer = [line for line in reversed(lines) if line.get("event") == "start" and not line.get("attempt")]
    starts = [(line.get("job_id"), line.get("step")) for line in outer]
    return next((i for i, start in enumerate(starts) if start != starts[0]), len(starts))


def address_of(node: str) -> str:
    """Return a node's address as SLURM knows it: its name may not resolve."""
    found = re.search(r"NodeAddr=(\S+)", scontrol("scontrol", "show", "node", node))
    return found[1] if found else node


def starter(config: dict[str, Any]) -> Any:
    """Return a function that starts a preflight program on nodes of this job with srun."""

    def start(
        argv: list[str], nodes: list[str], tasks_per_node: int, env: dict[str, str], log: Path
    ) -> subprocess.Popen[bytes]:
        command = [*srun(config["cluster"], nodes, tasks_per_node), *argv]
        with open(log, "ab") as file:
            return subprocess.Popen(
                command,
                env=os.environ | env | environment(argv),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    return start
