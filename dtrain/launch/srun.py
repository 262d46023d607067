"""srun starts the ranks in a SLURM allocation, and a supervisor on its first node monitors them."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import IO, Any

from dtrain.config.redaction import hide
from dtrain.launch import nsys
from dtrain.launch.failures import tail
from dtrain.launch.members import Members
from dtrain.launch.supervisor import Supervisor, hang_settings, rank_module
from dtrain.preflight import network_env
from dtrain.preflight.start import python_command
from dtrain.runs import causes
from dtrain.runs.protocol import BAD_CONFIG, ELASTIC, FAILED, STACK_SIGNAL, free_port
from dtrain.start import environment

OUR_CODES = [str(code) for code in (BAD_CONFIG, FAILED)]
TAIL = 2**21  # bytes from the end of a rank's log: NCCL's startup output is smaller; earlier starts come before it


class Srun(Supervisor):
    """The ranks of one job step: one task per rank, on the healthy nodes."""

    log_name = "srun.log"
    shows_output = False  # the screen of a job is a log
    killed_node = ""  # set if all ranks of this node were killed at once
    failed_node = ""  # set if SLURM reports that this node failed

    def __init__(self, config: dict[str, Any], nodes: list[str], members: Members | None = None) -> None:
        self.config, self.nodes, self.cluster, self.members = config, nodes, config["cluster"], members
        self.start_s = self.cluster["start_s"]
        num_ranks, cluster = len(nodes) * self.cluster["processes"], self.cluster
        super().__init__(num_ranks, cluster["max_restarts"], cluster["grace_s"], *hang_settings(cluster))
        self.is_one_host = len(nodes) == 1

    def command(self, run_dir: Path) -> list[str]:
        rank = [*python_command(self.config, rank_module(self.config)), str(run_dir)]
        # in an elastic run, the ranks of the other nodes report a lost peer before the supervisor ends them
        kill = [] if self.members else ["--kill-on-bad-exit=1"]
        return [
            *srun(self.cluster, self.nodes, self.cluster["processes"]), *kill, *self.cluster["srun"],
            *nsys.around(self.config, run_dir, "rank-%q{SLURM_PROCID}", rank),
        ]  # fmt: skip

    def environment(self) -> dict[str, str]:
        wanted = network_env.environment(self.config, os.environ) | environment(python_command(self.config, ""))
        # these override a MASTER_ADDR that the user set; the port is free on this node, usually the first
        wanted |= {"MASTER_ADDR": address_of(self.nodes[0]), "MASTER_PORT": str(free_port())}
        return wanted | ({ELASTIC: "1"} if self.members else {})

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

        output = tail(run_dir / "logs" / "rank-0.log", TAIL)
        if found := nccl_log.mismatch(self.config, output):
            say(f"warning: {found}")

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """Send TERM, so that srun ends the step; killing srun would leave the tasks on other nodes running."""
        process.terminate()
        try:
            process.wait(10 if self.members else 30)  # it waits for tasks of a lost node
        except subprocess.TimeoutExpired:
            super().kill(process)

    def place(self) -> dict[str, Any]:
        ranks = {"ranks": self.num_ranks} if self.members else {}
        restart = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        return {"job_id": job_id(), "restart": restart, "nodes": self.nodes, **ranks}

    def start(self, run_dir: Path, log: IO[bytes]) -> Any:
        if self.members:
            self.members.hosts = self.nodes
        return super().start(run_dir, log)

    def lost(self, run_dir: Path) -> dict[int, str]:
        """The nodes that are gone, or of which a rank was killed; a user's error is none of these."""
        each, kind, rank = self.cluster["processes"], self.failure["type"], self.failure.get("rank")
        gone = dict.fromkeys((self.failed_node, self.killed_node), "was lost")
        if kind == "SIGKILL" and rank is not None:
            gone[self.nodes[rank // each]] = causes.one_line(self.failure)
        elif self.failure.get("lost_peer"):
            gone |= dict.fromkeys(silent_nodes(run_dir, self.nodes, each), "was lost")
        elif kind == "hang" and self.standstill and not self.failure_is_known():
            gone |= {self.nodes[rank // each]: "does not answer" for rank in self.standstill.ranks}
        return {i: f"{node}: {gone[node]}" for i, node in enumerate(self.nodes) if node in gone}

    def choose(self, size: int, gone: set[int]) -> bool:
        """Take nodes of the allocation, the present ones first; False: it has too few, and a requeue gets new ones."""
        left = [node for i, node in enumerate(self.nodes) if i not in gone]
        spare = [node for node in healthy_nodes() if node not in self.nodes] if len(left) < size else []
        nodes = [*left, *spare][:size]
        if len(nodes) < size:
            return False
        if size < len(left):  # give back what `dtrain scale` no longer wants; a requeue asks for the whole range again
            with tempfile.TemporaryDirectory() as folder:  # scontrol writes two scripts into its working folder
                scontrol("scontrol", "update", f"JobId={job_id()}", f"NodeList={','.join(nodes)}", cwd=folder)
        self.nodes, self.num_ranks = nodes, size * self.cluster["processes"]
        self.world_size, self.is_one_host = self.num_ranks, size == 1
        say(f"continuing on {', '.join(nodes)}")
        return True

    def killed_ranks(self, output: str) -> list[tuple[int, str]]:
        found = re.search(r"srun: error: Node failure on (\S+)", output)
        self.failed_node = found[1] if found else ""
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


def healthy_nodes() -> list[str]:
    """The nodes of this job that SLURM can use now. It removes a lost one, but only after some time."""
    found = re.search(r"\bNodeList=(\S+)", scontrol("scontrol", "show", "job", job_id()))
    names = scontrol("scontrol", "show", "hostnames", found[1]).split() if found else []
    states = scontrol("sinfo", "--noheader", "--Node", f"--nodes={','.join(names)}", "--format=%N %T").split("\n")
    known = dict(line.split() for line in states if len(line.split()) == 2)
    return [name for name in names if re.fullmatch(r"idle|mixed|allocated", known.get(name, ""))]


def srun(cluster: dict[str, Any], nodes: list[str], tasks_per_node: int) -> list[str]:
    """Build srun for these nodes of the job. --overlap: a hanging step must not block the next one."""
    names = ("cpus_per_task", "container_image", "container_mounts")
    given = [f"--{name.replace('_', '-')}={cluster[name]}" for name in names if cluster[name]]
    return [
        "srun", "--export=ALL", "--overlap", f"--nodes={len(nodes)}", f"--nodelist={','.join(nodes)}",
        f"--ntasks={len(nodes) * tasks_per_node}", f"--ntasks-per-node={tasks_per_node}", "--distribution=block",
        "--label", *given,
    ]  # fmt: skip


def scontrol(*command: str, timeout: float = 60, cwd: str | None = None) -> str:
    """Return the output of a SLURM command, or "" if it fails: the job must survive an unavailable controller."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=True, cwd=cwd).stdout
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", None) or str(error)
        say(f"{shlex.join(command)}: {output.strip()}")
        return ""


def say(text: str) -> None:
    """Write to batch.log; on a full disk drop the line, because logging must not crash the supervisor."""
    with contextlib.suppress(OSError):
        os.write(1, f"{hide(text)}\n".encode())


def job_id() -> str:
    """Job id for SLURM commands. An array's last task has the array's own plain id, which would address all tasks."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array else os.environ["SLURM_JOB_ID"]


def address_of(node: str) -> str:
    """Return a node's address as SLURM knows it: its name may not resolve."""
    found = re.search(r"NodeAddr=(\S+)", scontrol("scontrol", "show", "node", node))
    return found[1] if found else node
