"""One run through twenty interruptions of every kind at random times: it ends as if nothing had happened.

Only with --all: 20 to 30 minutes. SOAK_SEED repeats the order and the times of an earlier one.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import pytest

from tests import slurm, slurm_runs
from tests.launch.test_local import assert_no_orphans, ranks_of
from tests.launch.test_slurm import BLOWS, supervisors_of
from tests.slurm import Cluster
from tests.slurm_runs import NODES_2, attempts, exact, job_id, said, submit, until
from tests.world import make_run, metrics, summary, train

cluster, here = slurm.cluster, slurm_runs.here

STEPS = ["train.steps=600", "checkpoint.every=10"]
KINDS = (
    ["outside-requeue"] * 4
    + ["preemption"] * 3
    + [name for name in BLOWS if "-to-" in name]  # 7 signals
    + ["time-limit"]
    + ["loss-of-the-first-node"] * 2
    + ["loss-of-another-node"] * 2
    + ["a-node-starts-anew"]
)
# slow enough that no run ends before its twentieth blow; without the file it hurries to the end
MODEL = """
import os, time
from dtrain.models.gpt2 import GPT2

class Slow(GPT2):
    def forward(self, inputs, targets=None):
        if os.path.exists("slow"):
            time.sleep(0.3)
        return super().forward(inputs, targets)
"""


@dataclass
class Blow:
    kind: str
    when: str
    step: int  # that it had made
    saved: int  # the newest checkpoint that was acknowledged before
    at: float = field(default_factory=time.monotonic)
    resumed: int = -1  # at this step
    started: float | None = None  # seconds from the blow to the next start of the supervisor
    trained: float | None = None  # and to the next step, where the next blow let it come to that

    def row(self) -> str:
        trained = f"{self.trained:5.0f}" if self.trained is not None else "    –"
        lost = max(0, self.step - self.resumed)
        return (
            f"{self.kind:24} {self.when:14} {self.step:5} {self.saved:6} {self.resumed:8} {lost:5} "
            f"{self.started or 0:6.0f} {trained}"
        )


def last_step(run: Path) -> int:
    return max((m["step"] for m in metrics(run)), default=0)


def saved_step(run: Path) -> int:
    latest = run / "checkpoints" / "latest"
    return int(latest.read_text().split("-")[1]) if latest.exists() else 0


def trains(run: Path) -> bool:
    """Whether the newest start has made a step."""
    path = run / "metrics.jsonl"
    start = attempts(run, "start")[-1]
    return path.exists() and path.stat().st_mtime > start["time"] and last_step(run) > start["step"]


def stopped(cluster: Cluster, run: Path) -> bool:
    """Whether the newest start has ended, or is being ended. Not for good: then the test is over."""
    job = cluster.job(job_id(run))
    assert job["JobState"] not in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"), said(run)
    ended = [end for end in attempts(run, "end") if end["time"] > attempts(run, "start")[-1]["time"]]
    return bool(ended) or job["JobState"] != "RUNNING"


def nodes_of(run: Path) -> list[str]:
    nodes: list[str] = attempts(run, "start")[-1]["nodes"]
    return nodes


def strike(cluster: Cluster, run: Path, kind: str) -> str | None:
    """Do it; the node that is to be started again once the run is back."""
    job, nodes = job_id(run), nodes_of(run)
    if kind == "time-limit":  # of 2 minutes from its start, whenever that was: SLURM tells the job 30 s before
        minutes = int(time.time() - attempts(run, "start")[-1]["time"]) // 60 + 1
        assert cluster.run("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}").returncode == 0
    elif kind == "a-node-starts-anew":
        cluster.kill_node(nodes[-1])
        cluster.start_node(nodes[-1])
    elif kind.startswith("loss"):
        lost = nodes[0] if "first" in kind else nodes[-1]
        cluster.kill_node(lost)
        return lost
    else:
        if kind.endswith("to-the-ranks"):  # before there are any, SLURM has nobody to tell
            until(lambda: len(ranks_of(run)) > 2, "ranks")
        BLOWS[kind](cluster, job)
    return None


def old_ranks(run: Path, restart: int) -> list[int]:
    """Ranks of an earlier start that are still there."""
    found = []
    for pid in ranks_of(run):
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        counts = [int(v.partition(b"=")[2]) for v in variables if v.startswith(b"SLURM_RESTART_COUNT=")]
        if variables != [b""] and (counts or [0])[0] < restart:
            found.append(pid)
    return found


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_twenty_blows_leave_no_trace(here: Path, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> None:
    seed = int(os.environ.get("SOAK_SEED") or random.SystemRandom().randrange(10**6))
    chance = random.Random(seed)
    print(f"SOAK_SEED={seed}")
    kinds = chance.sample(KINDS, len(KINDS))
    undisturbed = make_run(tmp_path_factory.mktemp("undisturbed"), *STEPS, "cluster.processes=4")
    assert train(undisturbed, 4) == [0, 0, 0, 0]

    Path("slow_model.py").write_text(MODEL)
    Path("slow").touch()
    job = [*NODES_2, "cluster.processes=2", "cluster.partition=low", "cluster.grace_s=30", "cluster.start_s=60"]
    model = ["model._target_=slow_model.Slow", "trust=[slow_model]"]
    run = submit(*job, *STEPS, *model, "cluster.max_idle_starts=20")
    began = time.monotonic()
    until(lambda: attempts(run, "start"), "the first start")

    blows: list[Blow] = []
    unasked = 0  # a lost node that comes back is told by SLURM what it missed, and that can be the end of a new start
    try:
        while len(blows) < len(kinds):
            kind, starts = kinds[len(blows)], len(attempts(run, "start"))
            if chance.random() < 0.5:  # while it starts: Python, torch, the process group, the checkpoint
                wait = chance.uniform(0, 10)
                when = f"start + {wait:.1f} s"
            else:
                until(lambda: trains(run) or stopped(cluster, run), f"a step after {len(blows)} blows", 180)
                if blows and trains(run):
                    blows[-1].trained = time.monotonic() - blows[-1].at
                wait = chance.uniform(0, 6)
                when = f"step + {wait:.1f} s"
            time.sleep(wait)
            if len(attempts(run, "start")) > starts or stopped(cluster, run):
                unasked += 1
                until(lambda: not stopped(cluster, run), "a start", 300)
                continue
            blow = Blow(kind, when, last_step(run), saved_step(run))
            lost_node = strike(cluster, run, kind)
            until(lambda least=starts: len(attempts(run, "start")) > least, f"a start after {kind}", 300)
            blow.started = time.monotonic() - blow.at
            blow.resumed = attempts(run, "start")[-1]["step"]
            blows.append(blow)
            print(blow.row(), flush=True)  # for who waits
            assert blow.resumed >= blow.saved, f"{kind} lost a checkpoint: {blow}"
            until(lambda: not old_ranks(run, attempts(run, "start")[-1]["restart"]), "the old ranks' end", 30)
            if lost_node:
                cluster.start_node(lost_node)
            if kind == "time-limit":
                cluster.run("scontrol", "update", f"JobId={job_id(run)}", "TimeLimit=UNLIMITED")
        Path("slow").unlink()
        state = cluster.wait(job_id(run), timeout=300)
    except BaseException:
        print(said(run))
        raise

    starts, ends = attempts(run, "start"), attempts(run, "end")
    seconds = time.monotonic() - began
    print(f"{'blow':24} {'when':14}  step  saved  resumed  lost  start  train", *(b.row() for b in blows), sep="\n")
    print(f"{seconds:.0f} s, {len(starts)} starts ({unasked} unasked), {len(ends)} noted ends, {Counter(kinds)}")
    steps = [start["step"] for start in starts]
    print(f"starts in a row from one checkpoint: at most {max(len(list(same)) for _, same in groupby(steps))}")
    assert state == "COMPLETED", said(run)
    assert summary(run)["status"] == "done" and not (run / "failure.json").exists()
    assert exact(run) == exact(undisturbed) and len(exact(run)) == 600
    assert summary(run)["weights_sha256"] == summary(undisturbed)["weights_sha256"]
    # the story: every start is there, in order, each at or after the checkpoint before it; the ends, where it had one
    assert [s["restart"] for s in starts] == list(range(len(starts)))
    assert int(cluster.job(job_id(run))["Restarts"]) == len(starts) - 1
    assert steps == sorted(steps)
    assert [end["code"] for end in ends[:-1]] == [75] * (len(ends) - 1) and ends[-1]["code"] == 0
    assert_no_orphans(run)
    assert not supervisors_of(run)
