"""A SLURM cluster: the settings become an sbatch script, through submitit, which carries the run folder and no more.

The job is a supervisor on the first node (batch.py) that checks the nodes, starts one rank a GPU with srun, and queues
itself again when it was interrupted. Without SLURM, `launcher=torchrun` starts the same ranks from a command per node.
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

from dtrain import config as configuration
from dtrain import file_handles, start
from dtrain.comm import profile
from dtrain.config import TRUST, bad, typed_trust
from dtrain.launchers import batch, nsys, requests
from dtrain.launchers.local import Torchrun
from dtrain.launchers.supervisor import failure
from dtrain.profile import rules as profiling
from dtrain.rundir import read_json, write_json
from dtrain.words import shell_path

TEST_S = 60  # for SLURM's controller to say whether it would take a job


class Slurm:
    def __init__(
        self,
        nodes: int = 1,
        gpus_per_node: int = 8,
        processes: int | None = None,
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
        fabric: dict[str, Any] | None = None,
    ) -> None:
        self.nodes, self.launcher = nodes, launcher
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
            "nodes": nodes,
            "ntasks_per_node": processes,
            "time": requests.minutes(time, grace_s),
            "wckey": None,  # submitit's own default is its name, which a site may refuse
            "stderr_to_stdout": True,
            "use_srun": False,  # the job is our supervisor, which starts srun itself
            "setup": [
                "trap '' USR1 USR2",  # until the supervisor listens: a signal that comes too early is not the end
                *(setup or []),
                f"export {start.VARIABLE}={shlex.quote(_import_path())}",
            ],
        }
        if gpus_per_node and gres is None:
            self.parameters["gpus_per_node"] = gpus_per_node
        self.additional: dict[str, Any] = {
            "signal": f"B:USR2@{grace_s}",  # to the supervisor alone, before the time limit
            "requeue" if requeue else "no-requeue": True,
        }
        if reservation is not None:
            self.additional["reservation"] = reservation
        requests.check_extra(sbatch or {})
        self.additional |= {str(name): value for name, value in (sbatch or {}).items()}
        requests.check_commands(python, srun or [])
        requests.check_secrets(
            [python or "", *(setup or []), *(srun or []), *(f"{v}" for v in (sbatch or {}).values())]
        )

    def _check_torchrun(self) -> None:
        if self.node_rank is None or not 0 <= self.node_rank < self.nodes:
            fix = f"cluster.node_rank=0 on the first node, … {self.nodes - 1} on the last"
            raise bad("cluster.node_rank", self.node_rank, "each node says which one it is", fix)
        if not self.master_addr:
            raise bad(
                "cluster.master_addr", None, "each node must know node 0", "cluster.master_addr=ADDRESS of node 0"
            )

    # ---- what the launcher calls -----------------------------------------------------------------------------

    def check(self, config: dict[str, Any]) -> None:
        """Ask SLURM itself, before anything is written, whether it would take this job."""
        profiling.check_machine(config)
        if self.launcher == "torchrun":
            file_handles.check("cluster.nodes", self.nodes, configuration.world_size(config))
            nsys.check(config)
            return
        if shutil.which("sbatch") is None:
            raise bad(
                "cluster", config["choices"]["cluster"], "there is no sbatch on this machine",
                "log in where the cluster's commands are; dry_run=true works anywhere; or cluster.launcher=torchrun",
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
            raise requests.refused(asked.stderr, self.parameters | self.additional)

    def dry_run(self, run_dir: Path, config: dict[str, Any]) -> None:
        if self.launcher == "torchrun":
            self._torchrun(config).dry_run(run_dir)
            return
        print(f"# {run_dir}/submit.sbatch")
        print(self.script(run_dir, config["name"]))
        print("\n# the supervisor in the job adds to the ranks' environment (yours wins where it says something else):")
        for name, value in profile.environment(config, os.environ).items():
            print(f"# export {name}={profile.quote(value)}")
        for line in profile.differences(config, os.environ):
            print(f"# {line}")
        ranks = batch.Srun(config, [f"NODE{i}" for i in range(self.nodes)], "ADDRESS-OF-NODE0", "A-FREE-PORT")
        print("# and starts them with:")
        print(f"# {shlex.join(ranks.command(run_dir))}")

    def launch(self, run_dir: Path) -> int:
        """Submit, say how to watch and cancel it, and return at once."""
        if self.launcher == "torchrun":
            return self._torchrun(configuration.load(run_dir)).launch(run_dir)
        (job_id,) = self.submit([run_dir], run_dir)
        run = shell_path(run_dir)
        with contextlib.suppress(BrokenPipeError):  # … | head: it is submitted all the same
            print(
                f"submitted job {job_id} · {self.nodes} nodes × {self.parameters['ntasks_per_node']} ranks\n"
                f"logs      {run}/logs/rank-0.log (batch.log: the supervisor)\n"
                f"status    dtrain status {run}\n"
                f"watch     dtrain logs -f {run}\n"
                f"cancel    dtrain cancel {run}      (or scancel {job_id})",
                flush=True,
            )
        return 0

    def salloc(self) -> list[str]:
        """The same request for a command that waits for it: nodes to look at, not to train on."""
        names = ("partition", "account", "qos", "constraint", "mem", "cpus_per_task", "gres", "nodelist", "exclude",
                 "exclusive", "nodes", "ntasks_per_node", "gpus_per_node", "time")  # fmt: skip
        asked = {k: v for k, v in self.parameters.items() if k in names and v is not None}
        asked |= {k: v for k, v in self.additional.items() if k not in ("signal", "requeue", "no-requeue")}
        flags = [f"--{k.replace('_', '-')}" + ("" if v is True else f"={v}") for k, v in asked.items()]
        return ["salloc", "--job-name=dtrain-preflight", *flags]

    # ---- submission ------------------------------------------------------------------------------------------

    def script(self, run_dir: Path, name: str) -> str:
        """The sbatch script, as submitit writes it."""
        from submitit.slurm.slurm import _make_sbatch_string

        folder = _job_folder(run_dir)
        self._check_words(name, folder)
        command = f"{_python()} -u -m submitit.core._submit {shlex.quote(str(folder))}"
        return _make_sbatch_string(command=command, folder=folder, **self._all_parameters(name)) + "\n"

    def _all_parameters(self, name: str) -> dict[str, Any]:
        # in the script, which SLURM keeps, also for a job that is queued again; the run folder is not believed
        trust = [f"export {TRUST}={shlex.quote(','.join(typed_trust()))}"] if typed_trust() else []
        return self.parameters | {
            "setup": [*self.parameters["setup"], *trust],
            "job_name": name, "array_parallelism": self.array_parallelism, "additional_parameters": self.additional,
        }  # fmt: skip

    def _check_words(self, name: str, folder: Path) -> None:
        said = {f"cluster.{k}": v for k, v in self.parameters.items()}
        said |= {f"cluster.sbatch.{k}": v for k, v in self.additional.items()}
        requests.check_words({"name": name, **said}, folder, _import_path())

    def submit(self, run_dirs: Sequence[Path], folder: Path, name: str | None = None) -> list[str]:
        """One job for one run, an array for several that ask for the same; note each id in its launch.json."""
        from submitit import SlurmExecutor
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        name = name or str(configuration.load(run_dirs[0])["name"])
        job_folder = _job_folder(folder)
        self._check_words(name, job_folder)
        job_folder.mkdir(parents=True, mode=0o700)
        executor = SlurmExecutor(job_folder, python=_python())
        executor.update_parameters(**self._all_parameters(name))
        try:
            with _outside_of_jobs(), executor.batch():
                jobs = [executor.submit(batch.main, str(run_dir)) for run_dir in run_dirs]
        except (FailedJobError, FailedSubmissionError) as error:
            for run_dir in run_dirs:  # or it would look as if it were about to start
                why = f"SLURM did not take the job: {' '.join(str(error).split())}"
                write_json(run_dir / "failure.json", failure(None, "submission", why, "submit.sbatch"))
            raise requests.refused(str(error), self.parameters | self.additional) from error
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
    """A new one each time: submitit finds results by job id, and those begin again at 1 on a new cluster."""
    return folder / "submitit" / f"{time.time_ns() // 1_000_000}"


def _python() -> str:
    """What the job is; submitit adds `-u -m` and its module. exec: it takes the shell's place, and so its signals."""
    return f"exec {shlex.join([sys.executable, '-u', start.START])}"


def _import_path() -> str:
    """Where the job finds the user's modules: as we do."""
    return start.environment()[start.VARIABLE]


@contextmanager
def _outside_of_jobs() -> Iterator[None]:
    """Without the variables of an enclosing job: submitted from inside one, they would reach the new job."""
    theirs = {k: v for k, v in os.environ.items() if re.match(r"(SLURM|SLURMD|SUBMITIT|PMI)_(?!CONF$)", k)}
    for name in theirs:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(theirs)
