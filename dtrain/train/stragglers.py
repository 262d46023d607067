"""Watch for a slow rank while the run goes on. Each rank measures itself; rank 0 compares, names and records.

The measurements travel with the vote on stopping (process.py), which is made anyway: no further collective.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch.distributed as dist

from dtrain.checkpoint.background import Saver
from dtrain.runs.folder import read_json, write_json
from dtrain.runs.protocol import POSITION_FILE
from dtrain.train.process import Vote, log
from dtrain.train.rank_times import FIELDS, RankTimes
from dtrain.train.run import Run
from dtrain.train.straggler_judge import Judge, Verdict, exposed_comm_s

WINDOW_STEPS = 5  # fewest steps of a window
SKIPPED_STEPS = 3  # the first ones compile and allocate
RECORD_S = 60.0  # between two records of all ranks' times in metrics.jsonl


class StragglerWatch:
    """One rank alone has nobody to wait for it: then all methods do nothing."""

    def __init__(self, run: Run, saver: Saver) -> None:
        self.run, self.saver, self.world_size = run, saver, dist.get_world_size()
        self.rank = dist.get_rank()
        self.times = RankTimes(run.device.type == "cuda") if self.world_size > 1 else None
        self.first_step, self.skip = run.step, SKIPPED_STEPS
        self.sent: deque[tuple[int, int]] = deque(maxlen=16)  # first and last step of the windows that travel
        ranks_per_stage = self.world_size // run.mesh.pp  # the pipeline axis is outermost
        stages = [rank // ranks_per_stage for rank in range(self.world_size)]
        self.judge = Judge(stages, run.device.type == "cuda") if run.recorder and self.times else None
        self.recorded_at = time.perf_counter()

    def start_step(self) -> None:
        if self.times:
            self.times.start_step()

    def end_step(self, data_s: float, waited_s: float) -> None:
        if self.times:
            self.times.end_step(data_s, waited_s)
            self.times.saving |= self.saver.is_writing
            if self.skip:
                self.skip -= 1
                self.times.take()
                self.first_step = self.run.step + 1

    def restart(self) -> None:
        """After a rollback: the next window begins at the step that the run went back to."""
        if self.times:
            self.times.take()
            self.first_step = self.run.step

    def values(self) -> list[float]:
        """What travels with the next vote: nothing, or a place for each rank's times, of which this rank fills its own.

        All ranks must decide alike, so only the number of steps decides."""
        if not self.times or self.times.steps < WINDOW_STEPS:
            return []
        self.sent.append((self.first_step, self.run.step))
        self.first_step = self.run.step
        values = [0.0] * (self.world_size * len(FIELDS))
        values[self.rank * len(FIELDS) : (self.rank + 1) * len(FIELDS)] = self.times.take()
        return values

    def read(self, vote: Vote | None) -> None:
        """After the vote: rank 0 judges the window, if one came with it."""
        if self.judge is None or vote is None or len(vote[0]) <= 2:
            return
        times = vote[0][2:].double().numpy().reshape(self.world_size, len(FIELDS))
        self.run.exposed_comm_s = exposed_comm_s(times, self.judge.on_gpu)
        for verdict in self.judge.add(*self.sent.popleft(), times):
            self._announce(verdict)
        if time.perf_counter() - self.recorded_at >= RECORD_S:
            self._record()

    def _announce(self, verdict: Verdict) -> None:
        text = verdict.text(self._host(verdict.rank))
        log.warning(text)
        assert self.run.recorder
        self.run.recorder.write(
            step=self.run.step, slow_rank=verdict.rank, slowdown=round(verdict.slowdown, 3), slow_since=verdict.since,
            slow_until=verdict.until, slow_cause=verdict.cause, slow_text=text,
        )  # fmt: skip
        self._record()
        self._summarize()
        write_json(self.run.folder / "summary.json", self.run.summary)  # `dtrain status` reads it

    def _record(self) -> None:
        assert self.judge and self.run.recorder
        self.recorded_at = time.perf_counter()
        ranks = self.judge.medians()
        of_ranks = {f"rank_{key}": [rank[key] for rank in ranks] for key in ("data_s", "own_s", "wait_s")}
        self.run.recorder.write(step=self.run.step, **of_ranks)

    def finish(self) -> None:
        if self.times:
            self.times.end()
        if self.judge:
            self._summarize()

    def _summarize(self) -> None:
        """Put the times of all ranks, and who was slow, into the summary."""
        assert self.judge
        slow: list[dict[str, Any]] = []
        for verdict in self.judge.verdicts:
            host = self._host(verdict.rank)
            slow.append({**vars(verdict), "host": host, "text": verdict.text(host)})
        self.run.summary |= {"ranks": self.judge.medians(), "slow_ranks": slow}
        self.run.summary["exposed_comm_s"] = self.judge.exposed_comm_s()

    def _host(self, rank: int) -> str:
        return str(read_json(self.run.folder / POSITION_FILE.format(rank)).get("host", "?"))
