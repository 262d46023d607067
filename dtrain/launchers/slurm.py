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
from dtrain.comm import profile
from dtrain.config import CONTROL, SECRET, bad
from dtrain.launchers import batch
from dtrain.launchers.local import Torchrun
from dtrain.launchers.supervisor import failure
from dtrain.rundir import read_json, write_json
from dtrain.words import shell_path

# parameters of sbatch without which a job would not be what the rest of dtrain takes it for
NOT_THEIRS = ("array", "output", "error", "job-name", "open-mode", "wrap", "chdir", "signal", "requeue", "no-requeue",
              "wait", "test-only", "parsable", "quiet", "ignore-pbs", "export-file", "uid", "gid")  # fmt: skip
# sbatch's own words about a bad setting → the setting
REFUSALS = (
    (r"invalid partition|partition.*not available|user's group not permitted", "partition", "sinfo -s lists them"),
    (r"invalid account|account/partition", "account", "sacctmgr show associations user=$USER lists yours"),
    (r"invalid qos", "qos", "sacctmgr show qos lists them"),
    (r"invalid feature|constraint", "constraint", "sinfo -o '%N %f' lists the nodes' features"),
    (r"reservation", "reservation", "scontrol show reservation lists them"),
    (
        r"invalid generic resource|gres",
        "gres",
        "sinfo -o '%N %G' shows what nodes have; cluster.gpus_per_node=0 for none",
    ),
    (r"time limit|invalid time", "time", "sinfo -o '%P %l' shows the partitions' limits"),
    (r"invalid node name|node.*not.*partition", "nodelist exclude", "sinfo -N lists the nodes"),
    (r"node count|node configuration|more processors", "nodes", "sinfo -o '%P %D %c %m %G' shows what there is"),
)
ASKED = ("gpus_per_node", "gres", "mem", "cpus_per_task", "constraint", "nodelist", "exclude")  # of a node
OWN_NAMES = (
    "nodes", "processes", "time", "partition", "account", "qos", "exclusive", "reservation", "mail_type", "mail_user",
    *ASKED,
)  # fmt: skip


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
            "time": minutes(time, grace_s),
            "wckey": None,  # submitit's own default is its name, which a site may refuse
            "stderr_to_stdout": True,
            "use_srun": False,  # the job is our supervisor, which starts srun itself
            "setup": [
                "trap '' USR1 USR2",  # until the supervisor listens: a signal that comes too early is not the end
                *(setup or []),
                f"export PYTHONPATH={shlex.quote(_import_path())}${{PYTHONPATH:+:$PYTHONPATH}}",
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
        for name, value in (sbatch or {}).items():
            if not re.fullmatch(r"[a-z][a-z0-9-]*", str(name)):
                raise bad("cluster.sbatch", name, "must be the long name of a parameter of sbatch", "e.g. {nice: 100}")
            if name in NOT_THEIRS:
                raise bad("cluster.sbatch", name, "is what dtrain itself needs to say", "leave it out")
            own = str(name).replace("-", "_").replace("ntasks_per_node", "processes")
            if own in OWN_NAMES:  # a second word about the same thing would win in the script, and nobody else know
                raise bad("cluster.sbatch", name, "has a setting of its own", f"cluster.{own}={value}")
            if value is not True and (isinstance(value, bool) or not isinstance(value, (str, int, float))):
                rule = "must be text, a number, or true for one that has no value"
                raise bad(f"cluster.sbatch.{name}", value, rule, "leave it out when it is not meant")
            self.additional[str(name)] = value
        _check_commands(python, srun or [])
        _check_secrets([python or "", *(setup or []), *(srun or []), *(f"{v}" for v in (sbatch or {}).values())])

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
        if self.launcher == "torchrun":
            return
        if shutil.which("sbatch") is None:
            raise bad(
                "cluster", config["choices"]["cluster"], "there is no sbatch on this machine",
                "log in where the cluster's commands are; dry_run=true works anywhere; or cluster.launcher=torchrun",
            )  # fmt: skip
        script = self.script(Path(config["run_dir"]), config["name"])
        with _outside_of_jobs():
            asked = subprocess.run(["sbatch", "--test-only"], input=script, capture_output=True, text=True, timeout=60)
        if asked.returncode:
            raise _refused(asked.stderr, self.parameters | self.additional)

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
        command = f"exec {shlex.quote(sys.executable)} -u -m submitit.core._submit {shlex.quote(str(folder))}"
        return _make_sbatch_string(command=command, folder=folder, **self._all_parameters(name)) + "\n"

    def _all_parameters(self, name: str) -> dict[str, Any]:
        return self.parameters | {
            "job_name": name, "array_parallelism": self.array_parallelism, "additional_parameters": self.additional,
        }  # fmt: skip

    def _check_words(self, name: str, folder: Path) -> None:
        """What quotes do not help against: how SLURM reads the #SBATCH lines, where bash sees a comment."""
        said = {f"cluster.{k}": v for k, v in self.parameters.items()}
        said |= {f"cluster.sbatch.{k}": v for k, v in self.additional.items()}
        for key, value in {"name": name, **said}.items():
            if isinstance(value, str) and "\\" in value:
                raise bad(key, value, "SLURM takes a backslash for an escape, also inside of quotes", "leave it out")
        if found := re.search(r"[%\\]", str(folder)):
            rule = f"SLURM replaces what follows a {found[0]} in the name of a log file"
            raise bad("run_dir", folder.parent.parent, rule, f"run_dir=… a folder without {found[0]} in its path")
        for path in (str(folder), _import_path()):
            if CONTROL.search(path):  # of the working folder: the rest was checked with the other settings
                rule = "has a control character, and it would reach a shell script"
                raise bad("run_dir", repr(path), rule, "work in a folder without one in its path")

    def submit(self, run_dirs: Sequence[Path], folder: Path, name: str | None = None) -> list[str]:
        """One job for one run, an array for several that ask for the same; note each id in its launch.json."""
        from submitit import SlurmExecutor
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        name = name or str(configuration.load(run_dirs[0])["name"])
        job_folder = _job_folder(folder)
        self._check_words(name, job_folder)
        job_folder.mkdir(parents=True, mode=0o700)
        # exec: the supervisor takes the shell's place, and so its signals
        executor = SlurmExecutor(job_folder, python=f"exec {shlex.quote(sys.executable)}")
        executor.update_parameters(**self._all_parameters(name))
        try:
            with _outside_of_jobs(), executor.batch():
                jobs = [executor.submit(batch.main, str(run_dir)) for run_dir in run_dirs]
        except (FailedJobError, FailedSubmissionError) as error:
            for run_dir in run_dirs:  # or it would look as if it were about to start
                why = f"SLURM did not take the job: {' '.join(str(error).split())}"
                write_json(run_dir / "failure.json", failure(None, "submission", why, "submit.sbatch"))
            raise _refused(str(error), self.parameters | self.additional) from error
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


def minutes(time: str | int | None, grace_s: int) -> int | None:
    """SLURM's spellings of a time limit: 90, 90:00, 12:00:00, 2-12, 2-12:30, 2-12:30:00."""
    if time is None:
        return None
    parts = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", str(time))
    if not parts:
        raise bad("cluster.time", time, "must be SLURM's: minutes, H:M:S or D-H:M:S", "cluster.time=12:00:00")
    days, first, second, third = (int(p) if p else None for p in parts.groups())
    assert first is not None
    if days is not None:
        seconds = ((days * 24 + first) * 60 + (second or 0)) * 60 + (third or 0)
    elif third is not None:
        seconds = (first * 60 + (second or 0)) * 60 + third
    else:
        seconds = first * 60 + (second or 0)
    if seconds <= grace_s:
        rule = f"must be longer than cluster.grace_s={grace_s} seconds, which are for saving before the end"
        raise bad("cluster.time", time, rule, f"cluster.time={grace_s // 60 + 10}, or a smaller cluster.grace_s")
    return -(-seconds // 60)


def _check_commands(python: str | None, srun: list[str]) -> None:
    try:
        shlex.split(python or "")
    except ValueError as error:
        raise bad("cluster.python", python, f"is no command ({error})", "cluster.python=/path/to/python") from None
    for word in srun:
        if not word.startswith("-"):  # srun would start that word instead of Python
            raise bad("cluster.srun", word, "must be options, each with its value", "e.g. [--cpu-bind=verbose]")


def _check_secrets(texts: list[str]) -> None:
    for text in texts:
        for name in re.findall(r"([A-Za-z_][\w-]*)=", text):
            if SECRET.search(name):
                raise bad(
                    "cluster", f"{name}=…", "looks like a secret, and scripts are there for others to read",
                    "export it in your shell before you launch: the job gets your environment",
                )  # fmt: skip


def _job_folder(folder: Path) -> Path:
    """A new one each time: submitit finds results by job id, and those begin again at 1 on a new cluster."""
    return folder / "submitit" / f"{time.time_ns() // 1_000_000}"


def _import_path() -> str:
    """Where the job finds dtrain and the user's modules: as we do."""
    package = Path(__file__).resolve().parents[2]
    checkout = [] if package.name == "site-packages" else [str(package)]
    return os.pathsep.join(dict.fromkeys([*checkout, os.getcwd()]))


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


def _refused(said: str, parameters: dict[str, Any]) -> ValueError:
    text = " ".join(re.sub(r"(sbatch|allocation): (error|failure): ", "", line) for line in said.split("\n") if line)
    option = re.search(r"invalid --([a-z-]+) specification|option '--([a-z-]+)", text, re.IGNORECASE)
    if option:
        name = option[1] or option[2]
        own = name.replace("-", "_")
        setting, value = (own, parameters.get(own)) if own in OWN_NAMES else (f"sbatch.{name}", parameters.get(name))
        return bad(f"cluster.{setting}", value, f"SLURM refuses it: {text}", f"`man sbatch` says what --{name} takes")
    for pattern, settings, fix in REFUSALS:
        if re.search(pattern, text, re.IGNORECASE):
            setting = next((s for s in settings.split() if parameters.get(s) is not None), settings.split()[0])
            asked = ", ".join(
                f"{name}={parameters[name]}" for name in ASKED if setting == "nodes" and name in parameters
            )
            text += f" (with {asked})" if asked else ""
            return bad(f"cluster.{setting}", parameters.get(setting), f"SLURM refuses it: {text}", fix)
    return ValueError(
        f"cluster: SLURM refuses the job: {text}\n  fix: dry_run=true shows the script; sinfo what there is"
    )
