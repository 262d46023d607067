"""Inside a SLURM allocation: a supervisor on the first node checks the nodes, starts the ranks, requeues the job.

After any interruption the ranks save, and the run resumes in the same folder. A signal before the time limit and
preemption end here with PREEMPTED, and the job is requeued; after an external `scontrol requeue` or a lost node SLURM
requeues it. attempts.jsonl lists each start, and a run without progress is given up.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from dtrain.checks.validate import validate
from dtrain.config import elastic, run_file
from dtrain.config.build import build
from dtrain.config.files import is_script
from dtrain.launch import nsys, script_rank
from dtrain.launch.attempts import idle_starts, is_done
from dtrain.launch.failures import failure
from dtrain.launch.members import Members
from dtrain.launch.srun import Srun, job_id, say, scontrol, silent_nodes, srun
from dtrain.preflight import network_env
from dtrain.preflight.start import end, python_command
from dtrain.runs import causes
from dtrain.runs.folder import (
    last_launch,
    locked,
    newest_step,
    note_attempt,
    read_json,
    read_summary,
    write_json,
)
from dtrain.runs.protocol import (
    BAD_CONFIG,
    CANCELLED_FILE,
    DONE,
    FAILED,
    PREEMPTED,
    PREFLIGHT,
    STOP_SIGNALS,
)
from dtrain.runs.slurm_queue import query
from dtrain.start import command, environment
from dtrain.ui.console import resume_command

LOCK_S = 180.0  # wait for the last attempt's supervisor to exit; NFS frees a lost node's lock after 90 s
GUARDS = 3  # nodes that watch the first one of an elastic job
REMOVE_S = 30.0  # for removing the copies in memory of a job that does not come back
REQUEUE_TRIES = 20  # SLURM's controller may be unavailable for some minutes


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
        if is_done(self.run_dir, config):
            return DONE
        saved = {"saved": script_rank.newest_save(self.run_dir)} if is_script(config) else {}
        note_attempt(self.run_dir, "start", job_id=self.id, restart=restart, nodes=self.nodes, **saved)
        idle = idle_starts(self.run_dir)
        knows_saves = (self.run_dir / "checkpoints").is_dir()  # else a program saves elsewhere, if it does
        if idle > config["cluster"]["max_idle_starts"] and (knows_saves or not is_script(config)):
            origin = "the same checkpoint" if is_script(config) else f"step {newest_step(self.run_dir)}"
            why = (
                f"{idle} starts in a row from {origin}, and none reached another checkpoint. "
                "Fix: logs/batch.log says why; a smaller checkpoint.every, a longer cluster.time or cluster.grace_s"
            )
            return self._end(FAILED, failure(None, "no progress", why, "logs/batch.log"))
        return self._end(*self._run(config))

    def _on_signal(self, number: int, frame: object) -> None:
        self.stopped = True

    def _lock(self) -> bool:
        """Lock the run folder until this process ends; the last attempt's supervisor may still be exiting."""
        self.lock = locked(self.run_dir, LOCK_S)
        try:
            self.lock.__enter__()
        except ValueError:
            return False
        return True

    def _run(self, config: dict[str, Any]) -> tuple[int, dict[str, Any] | str]:
        """Run preflight, then the ranks; return the exit code and the reason."""
        nodes, members = self.nodes, None
        if elastic.range_of(config):
            members = Members(config)
            config = elastic.sized(config, len(nodes))
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
                    if not members:
                        validate(dict(config) | {"cluster": dict(config["cluster"]) | {"nodes": len(nodes)}})
                except ValueError as error:
                    return PREFLIGHT, failure(None, "preflight", f"{why}. Without them: {error}", "logs/batch.log")
        for line in network_env.differences(config, os.environ):
            say(line)
        try:
            nsys.prepare(config, self.run_dir)
        except ValueError as error:  # checked only here: cluster.setup may provide nsys on the nodes, not at submission
            return BAD_CONFIG, failure(None, "nsys", str(error), "logs/batch.log") | {"exit_code": BAD_CONFIG}
        if members and members.fit(len(nodes)) < len(nodes):
            usable = ", ".join(map(str, members.usable))
            say(f"{len(nodes)} nodes cannot be used: with {members.range}, the usable numbers are {usable}")
            nodes = nodes[: members.fit(len(nodes))]
            if not nodes:
                return PREEMPTED, "too few nodes"
        ranks = Srun(config, nodes, members)
        if members:
            self._start_guards(config, nodes[1 : 1 + GUARDS])
        if self.stopped:  # nothing to save yet
            return PREEMPTED, "stopped before the ranks had started"
        code = ranks.supervise(self.run_dir, stop=lambda: self.stopped)
        nodes = ranks.nodes  # an elastic run may have lost some
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

    def _start_guards(self, config: dict[str, Any], nodes: list[str]) -> None:
        """Let other nodes watch this one; outside of a container, which has no SLURM commands."""
        plain = {"container_image": None, "container_mounts": None, "cpus_per_task": None}
        begin = starter({"cluster": config["cluster"] | plain})
        guard, log = [*command("dtrain.launch.slurm_guard"), str(self.run_dir)], self.run_dir / "logs" / "guard.log"
        for node in nodes:  # a step each: SLURM ends a step that lost one of its nodes
            begin(guard, [node], 1, {}, log)

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
            self._remove_copies()
        elif code == PREEMPTED:
            if (summary := read_summary(self.run_dir)).get("status") == "failed":  # only this start: the run resumes
                write_json(self.run_dir / "summary.json", summary | {"status": "preempted"})
                (self.run_dir / "failure.json").unlink(missing_ok=True)
            self._requeue(text)
        return code

    def _remove_copies(self) -> None:
        """Free the memory of checkpoint.peer on each node, as the job does not come back: others use the nodes next."""
        config = run_file.load(self.run_dir)
        if not config.get("checkpoint", {}).get("peer"):
            return
        argv = [*python_command(config, "dtrain.runs.memory"), str(self.run_dir)]
        process = starter(config)(argv, self.nodes, 1, {}, self.run_dir / "logs" / "batch.log")
        end([process], REMOVE_S)
        if process.returncode:
            say("the copies in memory (checkpoint.peer) could not be removed from every node")

    def _requeue(self, why: str) -> None:
        config = run_file.load(self.run_dir)
        if not config["cluster"]["requeue"] or (self.run_dir / CANCELLED_FILE).exists():
            self._remove_copies()
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
        say(f"the job could not be requeued; resume with: {resume_command(self.run_dir)}")


def starter(config: dict[str, Any]) -> Any:
    """Return a function that starts a preflight program on nodes of this job with srun."""

    def start(
        argv: list[str], nodes: list[str], tasks_per_node: int, env: dict[str, str], log: Path
    ) -> subprocess.Popen[bytes]:
        with open(log, "ab") as file:
            return subprocess.Popen(
                [*srun(config["cluster"], nodes, tasks_per_node), *argv],
                env=os.environ | env | environment(argv),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    return start
