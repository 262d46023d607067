"""Launch on SLURM: submitit turns the settings into an sbatch script, whose only argument is the run folder.

The job runs a supervisor on the first node (slurm_job.py). It checks the nodes, starts one rank per GPU with srun, and
requeues the job after an interruption. Without SLURM, `launcher=torchrun` starts the same ranks with one command per
node.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from dtrain import start
from dtrain.checks import profile as profiling
from dtrain.checks import slurm
from dtrain.config import elastic, hardware, run_file
from dtrain.config.build import TRUST, typed_trust
from dtrain.errors import bad
from dtrain.launch import metrics_server, nsys, slurm_job
from dtrain.launch.failures import failure
from dtrain.launch.srun import Srun
from dtrain.launch.torchrun import Torchrun
from dtrain.preflight import network_env
from dtrain.runs.folder import read_json, write_json
from dtrain.util import file_handles, ports
from dtrain.util.format import counted, shell_path

TEST_S = 60  # timeout for SLURM's controller to accept or reject a job


class Slurm:
    def __init__(
        self,
        nodes: int | str = 1,
        gpus_per_node: int = 8,
        processes: int | str | None = None,
        launcher: Literal["submitit", "torchrun"] = "submitit",
        node_rank: int | None = None,
        master_addr: str | None = None,
        master_port: int = 29500,
        partition: str | None = None,
        account: str | None = None,
        qos: str | None = None,
        time: str | int | None = None,
        constraint: str | None = None,
        exclusive: bool = False,
        mem: str | int | None = None,
        cpus_per_task: int | None = None,
        gres: str | None = None,
        nodelist: str | None = None,
        exclude: str | None = None,
        reservation: str | None = None,
        mail_type: str | None = None,
        mail_user: str | None = None,
        sbatch: dict[str, Any] | None = None,
        srun: list[str] | None = None,
        container_image: str | None = None,
        container_mounts: str | None = None,
        python: str | None = None,
        setup: list[str] | None = None,
        array_parallelism: int = 16,
        requeue: bool = True,
        max_idle_starts: int = 3,
        max_restarts: int = 0,
        grace_s: int = 300,
        start_s: int = 600,
        hang_timeout: float | None = None,
        on_hang: Literal["stop", "warn"] = "stop",
        system_metrics_every: float = 5,
        metrics_port: int | None = None,
        metrics_host: str = "127.0.0.1",
        fabric: dict[str, Any] | None = None,
    ) -> None:
        changing = elastic.parse("nodes", nodes) if isinstance(nodes, str) else None
        self.nodes: int = changing.high if changing else int(nodes)
        self.launcher, self.processes = launcher, processes
        self.node_rank, self.master_addr, self.master_port = node_rank, master_addr, master_port
        self.max_restarts, self.grace_s, self.array_parallelism = max_restarts, grace_s, array_parallelism
        if launcher == "torchrun":
            self._check_torchrun()
        by_name = {
            "partition": partition, "account": account, "qos": qos, "constraint": constraint, "mem": mem,
            "cpus_per_task": cpus_per_task, "gres": gres, "nodelist": nodelist, "exclude": exclude,
            "mail_type": mail_type, "mail_user": mail_user, "exclusive": exclusive or None,
        }  # fmt: skip
        self.parameters: dict[str, Any] = {
            **{k: v for k, v in by_name.items() if v is not None},
            "nodes": self.nodes,
            "ntasks_per_node": processes,
            "time": slurm.minutes(time, grace_s),
            "wckey": None,  # submitit defaults to its own name, which a site may reject
            "stderr_to_stdout": True,
            "use_srun": False,  # the job is our supervisor, which runs srun itself
            "setup": [
                "trap '' USR1 USR2",  # ignore signals that arrive before the supervisor's handlers exist
                *(setup or []),
                f"export {start.VARIABLE}={shlex.quote(_import_path())}",
            ],
        }
        if gpus_per_node and gres is None:
            self.parameters["gpus_per_node"] = gpus_per_node
        self.additional: dict[str, Any] = {
            "signal": f"B:USR2@{grace_s}",  # before the time limit, to the supervisor only
            "requeue" if requeue else "no-requeue": True,
        }
        if changing:
            # With ntasks-per-node SLURM 22.05 grants the smallest number of nodes, with mincpus as many as there are.
            # `nodes` replaces submitit's own, which must be a number. no-kill: the allocation survives a lost node.
            cpus = int(self.parameters.pop("ntasks_per_node") or 1) * (self.parameters.pop("cpus_per_task", None) or 1)
            self.additional |= {"nodes": f"{changing.low}-{changing.high}", "mincpus": cpus, "no-kill": True}
        if reservation is not None:
            self.additional["reservation"] = reservation
        slurm.check_extra(sbatch or {})
        self.additional |= {str(name): value for name, value in (sbatch or {}).items()}
        slurm.check_commands(python, srun or [])
        slurm.check_secrets([python or "", *(setup or []), *(srun or []), *(f"{v}" for v in (sbatch or {}).values())])

    def _check_torchrun(self) -> None:
        if self.node_rank is None or not 0 <= self.node_rank < self.nodes:
            fix = f"cluster.node_rank=0 on the first node, … {self.nodes - 1} on the last"
            raise bad("cluster.node_rank", self.node_rank, "each node needs its own rank", fix)
        if not self.master_addr:
            raise bad(
                "cluster.master_addr",
                None,
                "each node needs the address of node 0",
                "cluster.master_addr=ADDRESS of node 0",
            )

    # ---- called by launch/app.py -----------------------------------------------------------------------------

    def check(self, config: dict[str, Any]) -> None:
        """Ask SLURM whether it would accept this job, before anything is written."""
        profiling.check_machine(config)
        if self.launcher == "torchrun":
            file_handles.check("cluster.nodes", self.nodes, hardware.world_size(config))
            nsys.check(config)
            if not self.node_rank:
                metrics_server.check(config["cluster"])
                ports.check("cluster.master_port", self.master_port, "0.0.0.0", "another one, the same on all nodes")
            return
        if shutil.which("sbatch") is None:
            raise bad(
                "cluster", config["choices"]["cluster"], "there is no sbatch on this machine",
                "log in to a machine with SLURM's commands; dry_run=true works anywhere; or cluster.launcher=torchrun",
            )  # fmt: skip
        script = self.script(Path(config["run_dir"]), config["name"])
        test = ["sbatch", "--test-only"]
        try:
            with _outside_of_jobs():
                asked = subprocess.run(test, input=script, capture_output=True, text=True, timeout=TEST_S)
        except subprocess.TimeoutExpired:
            rule = f"`sbatch --test-only` did not answer within {TEST_S} s"
            fix = "scontrol ping: is SLURM's controller up, and not busy? then the same command again"
            raise bad("cluster", config["choices"]["cluster"], rule, fix) from None
        if asked.returncode:
            raise slurm.refused(asked.stderr, self.parameters | self.additional)

    def dry_run(self, run_dir: Path, config: dict[str, Any]) -> None:
        if self.launcher == "torchrun":
            self._torchrun(config).dry_run(run_dir)
            return
        print(f"# {run_dir}/submit.sbatch")
        print(self.script(run_dir, config["name"]))
        print("\n# the supervisor in the job adds to the ranks' environment (your own values take precedence):")
        config = elastic.sized(config, self.nodes)
        for name, value in network_env.environment(config, os.environ).items():
            print(f"# export {name}={network_env.quote(value)}")
        for line in network_env.differences(config, os.environ):
            print(f"# {line}")
        ranks = Srun(config, [f"NODE{i}" for i in range(self.nodes)])
        print("# and starts them with:")
        print(f"# {shlex.join(ranks.command(run_dir))}")

    def launch(self, run_dir: Path) -> int:
        """Submit the job, print how to monitor and cancel it, and return at once."""
        if self.launcher == "torchrun":
            return self._torchrun(run_file.load(run_dir)).launch(run_dir)
        (job_id,) = self.submit([run_dir], run_dir)
        run = shell_path(run_dir)
        with contextlib.suppress(BrokenPipeError):  # `| head`: the job is submitted anyway
            print(
                f"submitted job {job_id} · {counted(self.additional.get('nodes', self.nodes), 'node')} × "
                f"{counted(self.processes, 'rank')}\n"
                f"logs      {run}/logs/rank-0.log (batch.log: the supervisor)\n"
                f"status    dtrain status {run}\n"
                f"watch     dtrain watch {run}\n"
                f"cancel    dtrain cancel {run}      (or scancel {job_id})",
                flush=True,
            )
        return 0

    def salloc(self) -> list[str]:
        """Return the same request as an salloc command: it waits for the nodes, which preflight inspects."""
        names = ("partition", "account", "qos", "constraint", "mem", "cpus_per_task", "gres", "nodelist", "exclude",
                 "exclusive", "nodes", "ntasks_per_node", "gpus_per_node", "time")  # fmt: skip
        asked = {k: v for k, v in self.parameters.items() if k in names and v is not None}
        asked |= {k: v for k, v in self.additional.items() if k not in ("signal", "requeue", "no-requeue")}
        flags = [f"--{k.replace('_', '-')}" + ("" if v is True else f"={v}") for k, v in asked.items()]
        return ["salloc", "--job-name=dtrain-preflight", *flags]

    # ---- submission ------------------------------------------------------------------------------------------

    def script(self, run_dir: Path, name: str) -> str:
        """Return the sbatch script that submitit writes."""
        from submitit.slurm.slurm import _make_sbatch_string

        folder = _job_folder(run_dir)
        self._check_texts(name, folder)
        command = f"{_python()} -u -m submitit.core._submit {shlex.quote(str(folder))}"
        return _make_sbatch_string(command=command, folder=folder, **self._all_parameters(name)) + "\n"

    def _all_parameters(self, name: str) -> dict[str, Any]:
        # in the script, which SLURM keeps across requeues; the run folder is not trusted
        trust = [f"export {TRUST}={shlex.quote(','.join(typed_trust()))}"] if typed_trust() else []
        return self.parameters | {
            "setup": [*self.parameters["setup"], *trust],
            "job_name": name, "array_parallelism": self.array_parallelism, "additional_parameters": self.additional,
        }  # fmt: skip

    def _check_texts(self, name: str, folder: Path) -> None:
        texts = {f"cluster.{k}": v for k, v in self.parameters.items()}
        texts |= {f"cluster.sbatch.{k}": v for k, v in self.additional.items()}
        slurm.check_texts({"name": name, **texts}, folder, _import_path())

    def submit(self, run_dirs: Sequence[Path], folder: Path, name: str | None = None) -> list[str]:
        """Submit one job for one run, or an array for runs with equal requests; write each job id to launch.json."""
        from submitit import SlurmExecutor
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        name = name or str(run_file.load(run_dirs[0])["name"])
        job_folder = _job_folder(folder)
        self._check_texts(name, job_folder)
        job_folder.mkdir(parents=True, mode=0o700)
        executor = SlurmExecutor(job_folder, python=_python())
        executor.update_parameters(**self._all_parameters(name))
        try:
            with _outside_of_jobs(), executor.batch():
                jobs = [executor.submit(slurm_job.main, str(run_dir)) for run_dir in run_dirs]
        except (FailedJobError, FailedSubmissionError) as error:
            for run_dir in run_dirs:  # otherwise the run would show as about to start
                why = f"SLURM did not take the job: {' '.join(str(error).split())}"
                write_json(run_dir / "failure.json", failure(None, "submission", why, "submit.sbatch"))
            raise slurm.refused(str(error), self.parameters | self.additional) from error
        for run_dir, job in zip(run_dirs, jobs, strict=True):
            record = read_json(run_dir / "launch.json")
            record["launches"][-1]["job_id"] = job.job_id
            record["launches"][-1].pop("prepared", None)
            write_json(run_dir / "launch.json", record)
            shutil.copyfile(job.paths.submission_file, run_dir / "submit.sbatch")
            os.chmod(run_dir / "submit.sbatch", 0o600)
        return [job.job_id for job in jobs]

    def _torchrun(self, config: dict[str, Any]) -> Torchrun:
        assert self.node_rank is not None
        place = [
            f"--node-rank={self.node_rank}",
            f"--master-addr={self.master_addr}",
            f"--master-port={self.master_port}",
        ]
        return Torchrun(config, [f"--nnodes={self.nodes}", *place], self.max_restarts, self.grace_s, self.node_rank)


def _job_folder(folder: Path) -> Path:
    """Return a new folder per submission: submitit finds results by job id, and a new cluster counts from 1 again."""
    return folder / "submitit" / f"{time.time_ns() // 1_000_000}"


def _python() -> str:
    """Return the job's command; submitit adds `-u -m` and its module. exec: Python gets the signals, not a shell."""
    return f"exec {shlex.join([sys.executable, '-u', start.START])}"


def _import_path() -> str:
    """Return this process's import path for user modules; the job uses the same."""
    return start.environment()[start.VARIABLE]


@contextmanager
def _outside_of_jobs() -> Iterator[None]:
    """Hide the variables of an enclosing job: otherwise a job submitted from inside a job would inherit them."""
    theirs = {k: v for k, v in os.environ.items() if re.match(r"(SLURM|SLURMD|SUBMITIT|PMI)_(?!CONF$)", k)}
    for name in theirs:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(theirs)
