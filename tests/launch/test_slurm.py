"""The SLURM launcher as a user meets it: jobs on a real scheduler, from submission to end, disturbed and not."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from dtrain.cli import main
from dtrain.config.run_file import load, save
from dtrain.launch import slurm_job, srun
from dtrain.launch.app import wait_for_node_0
from dtrain.launch.attempts import idle_starts
from dtrain.launch.script_rank import newest_save
from dtrain.runs import memory
from dtrain.runs.folder import note_attempt
from dtrain.runs.protocol import CANCELLED_FILE, free_port
from tests import slurm, slurm_runs
from tests.launch.test_local import assert_no_orphans, ranks_of
from tests.long_tests import is_long
from tests.patience import patience
from tests.slurm import Cluster
from tests.slurm_runs import NODES_1, NODES_2, attempts, exact, failure, job_id, said, submit, until, until_step
from tests.world import ROOT, make_run, metrics, summary, train

cluster, here = slurm.cluster, slurm_runs.here
pytestmark = pytest.mark.timeout(600)  # sixteen processes import torch at once; on a busy machine that is minutes

STRATEGIES = {"ddp": [], "fsdp": [], "ps": [], "zero2": [], "3d": ["strategy.tp=2", "strategy.pp=2"]}
SHORT = "train.stop_after=8"
# a rank that gets nowhere, and dies of a signal as a Python does that is still starting
SLEEP = "cluster.python=\"sh -c 'sleep 600'\""
# a model with something to do in its 6th pass; ddp begins with one that does not count
MODEL = """
import os, signal, subprocess, time
from dtrain.models.gpt2 import GPT2

class Odd(GPT2):
    calls = 0

    def forward(self, inputs, targets=None):
        self.calls += 1
        rank, task = int(os.environ["RANK"]), os.environ.get("SLURM_ARRAY_TASK_ID")
        time.sleep({pause})
        if self.calls == 6:
            {then}
        return super().forward(inputs, targets)
"""


def odd(then: str = "pass", pause: float = 0) -> list[str]:
    """Settings for a model that does this."""
    Path("odd.py").write_text(MODEL.format(then=then, pause=pause))
    return ["model._target_=odd.Odd", "trust=[odd]"]


# ---- begun here, looked at in the end: they train, and SLURM takes its time, while the other tests run ---------


@dataclass
class Begun:
    strategies: dict[str, Path]
    interrupted: Path
    nowhere: Path
    blows: list[Future[None]]


@pytest.fixture(scope="module")
def begun(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Begun]:
    """A 2-node × 2-rank job of each strategy that is tested, one that is interrupted, and one that gets nowhere."""
    test = f"launch/test_slurm.py::{test_two_nodes_of_two_ranks_compute_what_four_local_ranks_do.__name__}"
    names = [name for name in STRATEGIES if request.config.getoption("--all") or not is_long(f"{test}[{name}]")]
    folder = tmp_path_factory.mktemp("begun")
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor() as pool:
        slurm_runs.at_home(cluster, folder, patch)
        interrupted = submit(*NODES_2, *odd(pause=0.4), run="interrupted")
        blows = [pool.submit(strike, cluster, interrupted, QUICK)]  # now: it lasts only some seconds
        nowhere = submit(*NODES_2, SLEEP, "cluster.max_idle_starts=2", run="nowhere")
        four = [*NODES_2, "cluster.processes=2", SHORT]
        strategies = {name: submit(*four, f"strategy={name}", *STRATEGIES[name], run=name) for name in names}
        patch.undo()
        blows.append(pool.submit(get_nowhere, cluster, nowhere))
        yield Begun(strategies, interrupted, nowhere, blows)
    slurm_runs.end_jobs(cluster, folder)


def test_jobs_are_queued(begun: Begun, cluster: Cluster) -> None:
    jobs = [cluster.job(job_id(run)) for run in begun.strategies.values()]
    assert [(job["JobName"], job["NumTasks"]) for job in jobs] == [
        (f"gpt2-tiny-{name}", "4") for name in begun.strategies
    ]


# ---- submission ----------------------------------------------------------------------------------------------


def test_a_launch_returns_and_says_how_to_watch_and_cancel(here: Path, cluster: Cluster) -> None:
    command = [sys.executable, str(ROOT / "launch.py"), *NODES_2, SLEEP, "run_dir=run"]
    began = time.monotonic()
    result = subprocess.run(command, capture_output=True, text=True, timeout=patience(60))
    print(f"submitted in {time.monotonic() - began:.1f} s")
    assert result.returncode == 0, result
    job = job_id(here / "run")
    for words in (
        f"submitted job {job}",
        "2 nodes × 1 rank\n",
        "run/logs/rank-0.log",
        "dtrain watch",
        "dtrain cancel",
    ):
        assert words in result.stdout, result.stdout
    assert cluster.job(job)["JobState"] in ("PENDING", "RUNNING"), "it has ended before the launcher returned"


def test_dry_run_prints_the_exact_script(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [*NODES_2, "cluster.processes=2", "cluster.time=1-2:30", 'name="a b c"', "+cluster.sbatch.hold=true"]
    assert main(["launch", *command, "run_dir=run", "dry_run=true"]) == 0
    printed = capsys.readouterr().out
    assert not list(here.iterdir())
    submitted = (submit(*command) / "submit.sbatch").read_text()
    assert "#SBATCH --hold" in submitted and "#SBATCH --time=1590" in submitted
    assert without_numbers(submitted) in without_numbers(printed)
    assert re.search(r"srun .*--ntasks=4 .*--kill-on-bad-exit=1 .* -m dtrain.train.rank .*/run", printed)


def without_numbers(script: str) -> str:
    """submitit's folder has the time of its making for a name."""
    return re.sub(r"submitit/\d+", "submitit/N", script)


REFUSED = {
    "cluster.partition=lwo": ("cluster.partition=lwo", "sinfo -s"),
    "cluster.nodes=8": ("cluster.nodes=8", "sinfo"),
    "cluster.gpus_per_node=4": ("cluster.nodes=2", "(with gpus_per_node=4)", "sinfo"),
    "cluster.mem=999T": ("cluster.nodes=2", "(with mem=999T)", "sinfo"),
    "cluster.nodelist=node9": ("cluster.nodelist=node9", "sinfo -N"),
    "cluster.exclude=node9": ("cluster.exclude=node9", "sinfo -N"),
    "cluster.constraint=h100": ("cluster.constraint=h100", "sinfo -o '%N %f'"),
    "cluster.gres=tpu:1": ("cluster.gres=tpu:1", "sinfo -o '%N %G'"),
    "cluster.time=tomorrow": ("cluster.time=tomorrow", "cluster.time=12:00:00"),
    "cluster.time=3": ("cluster.time=3", "cluster.grace_s=300"),
    "cluster.mem=lots": ("cluster.mem=lots", "man sbatch"),
    "cluster.reservation=mine": ("cluster.reservation=mine", "scontrol show reservation"),
    "cluster.mail_type=SOMETIMES": ("cluster.mail_type=SOMETIMES", "man sbatch"),
    "+cluster.sbatch.nonsense=1": ("cluster.sbatch.nonsense=1", "unrecognized option", "man sbatch"),
    "+cluster.sbatch.begin=never": ("cluster.sbatch.begin=never", "Invalid --begin", "man sbatch"),
    "+cluster.sbatch.job-name=x": ("cluster.sbatch=job-name", "leave it out"),
    "+cluster.sbatch.nodes=3": ("cluster.sbatch=nodes", "a setting of its own", "cluster.nodes=3"),
    "+cluster.sbatch.ntasks-per-node=3": ("cluster.sbatch=ntasks-per-node", "cluster.processes=3"),
    "+cluster.sbatch.Nice=1": ("cluster.sbatch=Nice", "long name"),
}


@pytest.mark.parametrize("setting", REFUSED)
def test_what_slurm_would_refuse_is_refused_before_anything_is_written(
    setting: str, here: Path, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    before = cluster.run("squeue", "-h", "-t", "all", "-o", "%i").stdout
    assert main(["launch", *NODES_2, setting, "run_dir=run"]) == 2
    message = capsys.readouterr().err
    for words in (*REFUSED[setting], "fix: "):
        assert words in message, message
    assert not list(here.iterdir())
    after = cluster.run("squeue", "-h", "-t", "all", "-o", "%i").stdout
    assert set(after.split()) <= set(before.split()), "a job was queued"


# ---- interrupted ---------------------------------------------------------------------------------------------


def requeue(cluster: Cluster, job: str) -> None:
    assert cluster.run("scontrol", "requeue", job).returncode == 0


def preempt(cluster: Cluster, job: str) -> None:
    """A job of a better partition takes all three nodes."""
    better = cluster.sbatch("-p", "high", "-N3", "--exclusive", "-o", "/dev/null", script="true")
    assert cluster.wait(better) == "COMPLETED"


def send(*how: str) -> Callable[[Cluster, str], object]:
    return lambda cluster, job: cluster.run("scancel", *how, job)


BLOWS: dict[str, Callable[[Cluster, str], object]] = {
    "outside-requeue": requeue,
    "USR2-to-the-supervisor": send("--batch", "--signal=USR2"),
    "TERM-to-the-supervisor": send("--batch", "--signal=TERM"),
    "USR1-to-the-supervisor": send("--batch", "--signal=USR1"),
    "USR1-to-the-ranks": send("--signal=USR1"),
    "USR2-to-the-ranks": send("--signal=USR2"),
    "TERM-to-the-ranks": send("--signal=TERM"),
    "TERM-to-all": send("--full", "--signal=TERM"),
    "preemption": preempt,
}
QUICK = ["outside-requeue"]  # and USR2 to a supervisor in the sweep below; the others with --all


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The losses of the run that the interrupted ones must have."""
    run = make_run(tmp_path_factory.mktemp("undisturbed"), "cluster.processes=2")
    assert train(run, 2) == [0, 0]
    return exact(run)


def strike(cluster: Cluster, run: Path, blows: list[str]) -> None:
    """Each blow after a few more steps."""
    for number, blow in enumerate(blows):
        until_step(run, 3 + 5 * number)
        BLOWS[blow](cluster, job_id(run))
        until(lambda starts=number + 2: len(attempts(run, "start")) == starts, f"a new start after {blow}")


def assert_undisturbed(cluster: Cluster, run: Path, times: int, undisturbed: dict[int, str]) -> None:
    assert cluster.wait(job_id(run), timeout=300, restarts=times) == "COMPLETED", said(run)
    assert exact(run) == undisturbed and summary(run)["status"] == "done"
    # nothing was computed twice: each start began where the one before had saved, and that had made steps
    starts, ends = attempts(run, "start"), attempts(run, "end")
    assert [end["code"] for end in ends] == [75] * times + [0], said(run)
    assert [start["step"] for start in starts[1:]] == [end["step"] for end in ends[:-1]]
    assert [start["restart"] for start in starts] == list(range(times + 1))
    steps = [m["step"] for m in metrics(run) if "loss" in m]
    assert steps == sorted(set(steps))
    assert not (run / "failure.json").exists()
    assert_no_orphans(run)


@pytest.mark.slow
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("blow", [name for name in BLOWS if name not in QUICK])
def test_however_it_is_interrupted_it_goes_on(blow: str, cluster: Cluster, undisturbed: dict[int, str]) -> None:
    run = submit(*NODES_2, *odd(pause=0.2), "cluster.partition=low")
    strike(cluster, run, [blow])
    assert_undisturbed(cluster, run, 1, undisturbed)


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_a_time_limit_is_a_pause() -> None:
    """SLURM counts in minutes: the signal comes 40 s before the end of two."""
    run = submit(*NODES_2, *odd(pause=0.2), "train.steps=100000", "cluster.time=2", "cluster.grace_s=40")
    until(lambda: len(attempts(run, "start")) == 2, "the start after the time limit", 240)
    [end] = attempts(run, "end")
    assert end["code"] == 75 and end["step"] == attempts(run, "start")[1]["step"] > 0
    until_step(run, end["step"] + 1)


def both_ranks_are_there(run: Path, start: int = 1) -> bool:
    """Of this start: two processes beside srun, which is two itself."""
    return len(attempts(run, "start")) == start and len(ranks_of(run)) >= 4


def get_nowhere(cluster: Cluster, run: Path) -> None:
    for start, blow in ((1, "USR1-to-the-ranks"), (2, "outside-requeue")):
        until(lambda start=start: both_ranks_are_there(run, start), f"the ranks of start {start}")
        BLOWS[blow](cluster, job_id(run))


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_a_save_that_slurm_does_not_wait_for_is_no_failure(cluster: Cluster) -> None:
    """Ranks in a long step are killed by SLURM before it is over; the run goes on from what it had."""
    run = submit(*NODES_2, *odd("'SLURM_RESTART_COUNT' in os.environ or time.sleep(60)"), "checkpoint.every=2")
    until_step(run, 4)
    until(lambda: (run / "checkpoints" / "latest").read_text() == "step-00000004\n", "a checkpoint")
    requeue(cluster, job_id(run))
    for pid in ranks_of(run):  # as SLURM does KillWait later, and then with the supervisor: we are a little earlier
        if b"srun" not in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]:
            os.kill(pid, signal.SIGKILL)
    until(lambda: attempts(run, "end"), "the end of the first start")
    assert attempts(run, "end")[0]["code"] == 75 and "before it could save" in attempts(run, "end")[0]["why"], said(run)
    until(lambda: not (run / "failure.json").exists(), "a run that has not failed", 10)
    assert cluster.wait(job_id(run), timeout=120, restarts=1) == "COMPLETED", said(run)
    assert [start["step"] for start in attempts(run, "start")] == [0, 4] and summary(run)["status"] == "done"
    assert_no_orphans(run)


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_a_requeue_waits_for_the_controller(undisturbed: dict[int, str]) -> None:
    with slurm.temporary(slurm.available(), nodes=2) as cluster, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(cluster.conf))
        run = submit(*NODES_2, *odd(pause=0.2))
        until_step(run, 3)
        cluster.stop_controller()
        [supervisor] = supervisors_of(run)
        os.kill(supervisor, signal.SIGUSR1)
        until(lambda: attempts(run, "end"), "the save")
        time.sleep(10)
        cluster.start_controller()
        assert_undisturbed(cluster, run, 1, undisturbed)


def supervisors_of(run: Path) -> list[int]:
    """The processes that run submitit with this run's pickle."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes()
        except OSError:
            continue
        if b"submitit.core._submit" in words and str(run).encode() in words:
            found.append(int(path.parent.name))
    return found


# ---- failed, cancelled ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, rank, how, code, words",
    [
        (NODES_2, 1, "os.kill(os.getpid(), signal.SIGKILL)", 3, "killed by SIGKILL"),
        # the one that holds the store, through which the others find each other
        pytest.param(NODES_2, 0, "os.kill(os.getpid(), signal.SIGKILL)", 3, "by SIGKILL", marks=pytest.mark.slow),
        pytest.param(NODES_2, 1, "raise RuntimeError('it exploded')", 3, "it exploded", marks=pytest.mark.slow),
        # what a lost node makes gloo say, but raised by data code of the user
        (NODES_2, 1, "raise ConnectionResetError(104, 'Connection reset by peer')", 3, "Connection reset by peer"),
        (NODES_1, 0, "raise ValueError('data.path=x: is not whole\\n  fix: copy it again')", 2, "fix: copy it again"),
    ],
)
@pytest.mark.usefixtures("here")
def test_a_failure_names_the_rank_and_is_not_queued_again(
    settings: list[str], rank: int, how: str, code: int, words: str, cluster: Cluster
) -> None:
    run = submit(*settings, *odd(f"if rank == {rank}: {how}"))
    assert cluster.wait(job_id(run), timeout=120) == "FAILED", said(run)
    assert failure(run)["rank"] == rank and words in failure(run)["message"], failure(run)
    assert failure(run)["exit_code"] == code and summary(run)["status"] == "failed"
    job = cluster.job(job_id(run))
    assert job["ExitCode"] == f"{code}:0" and job["Restarts"] == "0"
    assert [end["code"] for end in attempts(run, "end")] == [code]
    assert_no_orphans(run)


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_a_job_that_fails_for_good_leaves_nothing_in_memory(cluster: Cluster) -> None:
    saves = ["checkpoint.peer=true", "checkpoint.every=2", "checkpoint.peer_every=1", "checkpoint.background=false"]
    had = "from pathlib import Path; Path('had').write_text(str(len(list(Path('/dev/shm').glob('dtrain-*/*/step-*')))))"
    run = submit(*NODES_2, *saves, *odd(f"{had}; raise RuntimeError('it exploded')"))
    assert cluster.wait(job_id(run), timeout=120) == "FAILED", said(run)
    assert int(Path("had").read_text()) > 0 and not memory.folder(run).exists(), said(run)
    assert "could not be removed" not in said(run)


@pytest.mark.usefixtures("here")
def test_a_cancelled_run_stays_cancelled(cluster: Cluster) -> None:
    runs = {how: submit(*NODES_2, SLEEP, run=how.replace(" ", "")) for how in ("scancel", "cancel", "cancel --save")}
    late = submit(*NODES_2, "cluster.nodes=1", SLEEP, run="late")
    for run in runs.values():
        until(lambda run=run: both_ranks_are_there(run), f"the ranks of {run}")
    cluster.run("scancel", job_id(runs["scancel"]))
    for how in ("cancel", "cancel --save"):
        assert main([*how.split(), str(runs[how])]) == 0
        assert (runs[how] / CANCELLED_FILE).exists()
    until(lambda: attempts(late, "start"), "a job that is running")
    (late / CANCELLED_FILE).touch()  # as if it were being interrupted while somebody cancels it
    requeue(cluster, job_id(late))
    assert cluster.wait(job_id(late), restarts=1) == "FAILED"  # and by now another would have been requeued, too
    for run in runs.values():
        assert cluster.job(job_id(run))["JobState"] in ("CANCELLED", "FAILED")
        assert cluster.job(job_id(run))["Restarts"] == "0"
    for run in (*runs.values(), late):
        assert len(attempts(run, "start")) == 1
        assert_no_orphans(run)


# ---- sweeps --------------------------------------------------------------------------------------------------


def test_a_sweep_is_one_array_and_goes_on_where_it_was(
    here: Path, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of four points one fails, and the last, whose job id is that of the whole array, is interrupted."""
    interrupt = "['scancel', '--batch', '--signal=USR2', os.environ['SLURM_ARRAY_JOB_ID'] + '_3']"
    model = odd(
        "assert task != '2', 'a bad point'\n"
        f"            if task == '3' and 'SLURM_RESTART_COUNT' not in os.environ:\n"
        f"                subprocess.run({interrupt})\n"
        "                time.sleep(3)  # or the run would be over before its supervisor has acted"
    )
    command = ["-m", *NODES_1, SHORT, *model, "strategy=ddp,fsdp", "optim.lr=1e-3,3e-3"]
    began = time.monotonic()
    result = subprocess.run([sys.executable, str(ROOT / "launch.py"), *command], capture_output=True, text=True)
    print(f"4 points submitted in {time.monotonic() - began:.1f} s")
    assert result.returncode == 0 and "submitted 4 jobs" in result.stdout, result
    [sweep] = here.glob("multirun/*/*")
    points = sorted(path.parent for path in sweep.glob("*/launch.json"))
    array = job_id(points[0]).split("_")[0]
    assert [job_id(p) for p in points] == [f"{array}_{i}" for i in range(4)]
    until(lambda: table(sweep, capsys) == ["done", "done", "failed", "done"], "the sweep's end", 240)
    assert [len(attempts(p, "start")) for p in points] == [1, 1, 1, 2], "all of the array was requeued"
    assert "a bad point" in failure(points[2])["message"] and cluster.job(job_id(points[2]))["ExitCode"] == "3:0"

    assert main(["launch", *command]) == 0  # the same words: only what is missing
    assert "submitted 1 job" in capsys.readouterr().out
    until(lambda: table(sweep, capsys) == ["done"] * 4, "the sweep's end", 120)
    assert [job_id(p).split("_")[0] == array for p in points] == [True, True, False, True]
    assert len({tuple(exact(p).items()) for p in points}) == 2, "two learning rates; one rank is one rank"

    before = {p: (p / "launch.json").read_text() for p in points}
    assert main(["launch", *command]) == 0
    assert "submitted" not in capsys.readouterr().out
    assert {p: (p / "launch.json").read_text() for p in points} == before


def table(sweep: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The statuses as `dtrain runs SWEEP` prints them."""
    capsys.readouterr()
    assert main(["runs", str(sweep)]) == 0
    return re.findall(r"^\d .*? (done|failed|queued|running|preempted|died|cancelled)\b", capsys.readouterr().out, re.M)


# ---- nodes that are started by hand --------------------------------------------------------------------------


@contextmanager
def by_hand(*settings: str) -> Iterator[list[subprocess.Popen[str]]]:
    """`cluster.launcher=torchrun` on two nodes; there is no SLURM command in PATH."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = ["cluster.launcher=torchrun", "cluster.master_addr=127.0.0.1", f"cluster.master_port={port}"]
    nodes = [
        subprocess.Popen(
            [sys.executable, str(ROOT / "launch.py"), *settings, *place, f"cluster.node_rank={node}"],
            env=os.environ | {"PATH": "/nowhere", "OMP_NUM_THREADS": "1"},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        for node in (0, 1)
    ]
    try:
        yield nodes
    finally:
        for node in nodes:
            node.kill()  # its torchrun dies with it
            node.wait()


def test_ctrl_c_on_one_of_two_nodes_ends_both_after_what_four_local_ranks_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    with by_hand(*NODES_2, "cluster.processes=2", "train.steps=100000", "run_dir=run") as nodes:
        until_step(run, 4)
        nodes[0].send_signal(signal.SIGINT)
        outputs = [node.communicate(timeout=patience(60))[0] for node in nodes]
    assert [node.returncode for node in nodes] == [75, 75], outputs
    last = metrics(run)[-1]["step"]
    assert summary(run)["status"] == "preempted" and summary(run)["steps"] == last and summary(run)["world_size"] == 4
    assert (run / "checkpoints" / "latest").read_text() == f"step-{last:08d}\n"
    assert_no_orphans(run)
    local = make_run(tmp_path / "local", "cluster.processes=4", "train.steps=100000", f"train.stop_after={last}")
    assert train(local, 4) == [0, 0, 0, 0]
    assert exact(run) == exact(local)
    assert summary(run)["weights_sha256"] == summary(local)["weights_sha256"]


def test_a_node_that_means_something_else_is_refused(tmp_path: Path) -> None:
    place = ["cluster.launcher=torchrun", "cluster.node_rank=0", "cluster.master_addr=127.0.0.1"]
    run = make_run(tmp_path / "run", *NODES_2, *place)
    config = dict(load(run))
    save(run, config | {"cluster": config["cluster"] | {"node_rank": None}})  # as node 0 writes it
    other = config | {"cluster": config["cluster"] | {"node_rank": 1}}
    wait_for_node_0(run, other, patience_s=0)
    with pytest.raises(
        ValueError, match=r"(?s)cluster.node_rank=1: node 0 wrote another configuration.*fix: run the same"
    ):
        wait_for_node_0(run, other | {"train": other["train"] | {"steps": 21}}, patience_s=0.6)
    with pytest.raises(ValueError, match="node 0 wrote nothing"):
        wait_for_node_0(tmp_path / "elsewhere", other, patience_s=0)


@pytest.mark.parametrize(
    "settings, words",
    [
        ([], "cluster.node_rank=null"),
        (["cluster.node_rank=2"], "cluster.node_rank=2"),
        (["cluster.node_rank=0"], "cluster.master_addr=null"),
    ],
)
def test_a_node_says_which_one_it_is(
    settings: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["launch", *NODES_2, "cluster.launcher=torchrun", *settings, "run_dir=run"]) == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# ---- what srun says ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said, found",
    [
        ("srun: error: node2: task 3: Killed\nsrun: error: node1: task 0: Terminated", [(3, "SIGKILL")]),
        ("srun: error: n1: tasks 4-7: Segmentation fault (core dumped)", [(4, "SIGSEGV")]),
        ("srun: error: node1: task 0: User defined signal 1\nsrun: error: n: task 1: Killed", [(0, "SIGUSR1")]),
        ("srun: error: node1: task 0: Exited with exit code 3", []),
        ("srun: error: node1: task 2: Exited with exit code 1\nsrun: error: n: task 0: Killed", [(2, "exit code 1")]),
        ("srun: error: node1: task 2: Exited with exit code 138", [(2, "SIGUSR1")]),  # a shell around Python
        ("", []),
    ],
)
def test_the_first_rank_that_was_killed(said: str, found: list[tuple[int, str]]) -> None:
    assert srun.killed_ranks(said) == found


@pytest.mark.parametrize(
    "said, ranks, found",
    [
        ("srun: error: node2: tasks 2-3: Killed\nsrun: error: node1: tasks 0-1: Killed", 2, "node2"),
        ("srun: error: node2: task 3: Killed\nsrun: error: node1: tasks 0-1: Killed", 2, ""),  # out of memory?
        ("srun: error: node2: tasks 2-3: Out Of Memory", 2, ""),
        ("srun: error: node2: tasks 4-6: Killed", 4, ""),
        ("srun: error: node2: task 1: Killed", 1, ""),  # a node or a rank: nobody can tell
        ("", 2, ""),
    ],
)
def test_a_node_whose_ranks_were_killed_at_once(said: str, ranks: int, found: str) -> None:
    assert srun.killed_node(said, ranks) == found


def test_a_job_forgets_the_ranks_of_the_shell_that_submitted_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SLURM hands the whole environment on, and the user may have been inside another job."""
    ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    for name in ranks:
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("SLURM_JOB_ID", "3")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-2]")
    monkeypatch.setattr(slurm_job, "scontrol", lambda *words: "node1\nnode2\n")
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    assert slurm_job.Job(tmp_path).nodes == ["node1", "node2"]
    assert not [name for name in ranks if name in os.environ]


def test_a_node_is_lost_if_none_of_its_ranks_left_a_note(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for rank in (0, 3):
        (tmp_path / "logs" / f"failure-{rank}.json").write_text("{}")
    assert srun.silent_nodes(tmp_path, ["a", "b", "c"], 2) == ["c"]
    assert srun.silent_nodes(tmp_path, ["a", "b"], 2) == []


def test_a_restart_inside_of_a_job_is_no_idle_start(tmp_path: Path) -> None:
    for attempt in (0, 1, 2):
        note_attempt(tmp_path, "start", job_id="7", attempt=attempt)
    assert idle_starts(tmp_path) == 1
    note_attempt(tmp_path, "start", job_id="7")
    assert idle_starts(tmp_path) == 2


def test_a_start_after_a_program_has_saved_is_not_idle(tmp_path: Path) -> None:
    """A program that uses dtrain.script saves into RUN/checkpoints what it likes."""
    folder = tmp_path / "checkpoints" / "last"
    for has_saved, idle in ((False, 1), (False, 2), (True, 1), (False, 2)):
        if has_saved:
            folder.mkdir(parents=True)
            (folder / "model.pt").touch()
        note_attempt(tmp_path, "start", job_id="7", saved=newest_save(tmp_path))
        assert idle_starts(tmp_path) == idle


def test_the_port_of_rank_0_is_not_one_for_outgoing_connections() -> None:
    """Seconds pass before rank 0 listens there, and another process must not be given it meanwhile."""
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = [free_port() for _ in range(20)]
    assert not [port for port in ports if first <= port <= last] and len(set(ports)) > 10
    with socket.socket() as server:
        server.bind(("", ports[0]))


# ---- what was begun ------------------------------------------------------------------------------------------


def test_an_interrupted_run_goes_on_by_itself(begun: Begun, cluster: Cluster, undisturbed: dict[int, str]) -> None:
    begun.blows[0].result()
    assert_undisturbed(cluster, begun.interrupted, len(QUICK), undisturbed)


def test_a_run_that_gets_nowhere_is_given_up(begun: Begun, cluster: Cluster) -> None:
    """Signals that come while Python is starting are nobody's fault, at first."""
    begun.blows[1].result()
    run = begun.nowhere
    assert cluster.wait(job_id(run), timeout=120, restarts=2) == "FAILED"
    assert failure(run)["type"] == "no progress" and "3 starts in a row from step 0" in failure(run)["message"]
    assert "checkpoint.every" in failure(run)["message"] and summary(run)["status"] == "failed"
    assert "SIGUSR1 arrived before the ranks could handle it" in attempts(run, "end")[0]["why"]
    assert [end["code"] for end in attempts(run, "end")] == [75, 75, 3]
    assert_no_orphans(run)


@pytest.mark.parametrize("name", STRATEGIES)
def test_two_nodes_of_two_ranks_compute_what_four_local_ranks_do(
    name: str, begun: Begun, cluster: Cluster, tmp_path: Path
) -> None:
    local = make_run(tmp_path / "local", "cluster.processes=4", SHORT, f"strategy={name}", *STRATEGIES[name])
    assert train(local, 4) == [0, 0, 0, 0]
    run = begun.strategies[name]
    assert cluster.wait(job_id(run), timeout=300) == "COMPLETED", said(run)
    assert exact(run) == exact(local) and sorted(exact(run)) == list(range(1, 9))
    assert summary(run)["status"] == "done" and summary(run)["world_size"] == 4
    assert summary(run)["weights_sha256"] == summary(local)["weights_sha256"]
    [start], [end] = attempts(run, "start"), attempts(run, "end")
    assert len(start["nodes"]) == 2 and start["job_id"] == job_id(run) and end["code"] == 0
    assert_no_orphans(run)


@pytest.mark.slow
def test_servers_on_two_nodes_that_nobody_waits_for(cluster: Cluster, here: Path) -> None:
    """Which rank computes what is not the same as on one machine; that everything is computed once is."""
    mode = ["strategy=ps", "strategy.mode=async", "strategy.slow_rank=3", "train.micro_batch_size=1"]
    run = submit(*NODES_2, "cluster.processes=2", SHORT, *mode)
    assert cluster.wait(job_id(run), timeout=300) == "COMPLETED", said(run)
    found = summary(run)
    assert found["status"] == "done" and sum(found["ps"]["pieces"]) == found["ps"]["updates"] == 8 * 8
    assert found["ps"]["pieces"][3] == min(found["ps"]["pieces"]) and sorted(exact(run)) == list(range(1, 9))
    assert_no_orphans(run)
