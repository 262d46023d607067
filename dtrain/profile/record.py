"""In a rank: record the chosen steps by temporarily wrapping the methods that are a step's phases.

The loop does not know about it. If nothing is recorded, nothing is wrapped, so steps have no overhead.
"""

from __future__ import annotations

import gzip
import itertools
import json
import logging
import pickle
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from dtrain.profile import attribute, comm, memory
from dtrain.runs.folder import write_json

log = logging.getLogger("dtrain")
FOLDER = "profiles"  # in the run folder
MAX_ENTRIES = 200_000  # allocations and frees that torch keeps: a step of a large model has about 10,000


class Profile:
    """conf/profile: what to record of which steps on which ranks."""

    def __init__(
        self,
        kind: Literal["none", "torch", "memory"] = "none",
        ranks: list[int] | None = None,
        start: int = 10,
        num_steps: int = 3,
    ) -> None:
        self.kind, self.ranks, self.start, self.num_steps = kind, [0] if ranks is None else ranks, start, num_steps

    def begin(self, run_dir: Path, rank: int, device: Any, nsys: bool = False) -> Recorder:
        """Before anything is built: return the recorder for the later steps. A memory history begins here."""
        if self.kind == "memory":
            return Memory(self, run_dir, rank, device)
        if rank in self.ranks and self.kind == "torch":
            return Trace(self, run_dir, rank, device)
        if rank in self.ranks and nsys and device.type == "cuda":
            return Nsys(self, run_dir, rank, device)
        return Recorder(self, run_dir, rank, device)


class Recorder:
    """Records nothing: for ranks that are not chosen, and the base class of the other recorders."""

    report: Callable[..., None] | None = None  # on rank 0: puts metrics into metrics.jsonl and summary.json

    def __init__(self, profile: Profile, run_dir: Path, rank: int, device: Any) -> None:
        self.profile, self.folder, self.rank, self.device = profile, run_dir / FOLDER, rank, device
        self.wrapped: list[tuple[Any, str]] = []
        self.step = 0  # in this launch, from 1

    def attach(self, strategy: Any, loader: Any, first_step: int, num_left: int) -> None:
        """Before the loop: wrap its phases for recording. num_left: steps that remain."""

    def watch(self, strategy: Any, loader: Any, first_step: int, num_left: int) -> None:
        """Wrap the methods of this strategy and this loader that are the phases of a step."""
        self.first_step = first_step + self.profile.start
        if num_left < self.profile.start + self.profile.num_steps - 1:
            log.warning(
                "profile.start=%d: only %d steps are left, so there will be no profile. Fix: a smaller profile.start",
                self.profile.start, num_left,
            )  # fmt: skip
            return
        self.folder.mkdir(exist_ok=True)
        strategy.is_profiled = True  # a captured step has no phases
        self.wrapped.append((strategy, "is_profiled"))
        self.put_around(loader, "batch", "data", before=self.on_start)
        self.put_around(strategy, "forward_backward", "forward_backward")
        self.put_around(strategy, "update", "update", after=self.on_end)

    def put_around(
        self, owner: Any, name: str, label: str, before: Callable[[], None] | None = None, after: Any = None
    ) -> None:
        method = getattr(owner, name)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            if before:
                before()
            with self.range(attribute.MARK + label):
                result = method(*args, **kwargs)
            if after:
                after()
            return result

        setattr(owner, name, recorded)  # on this object only; the class is unchanged
        self.wrapped.append((owner, name))

    def range(self, label: str) -> Any:
        import torch

        return torch.profiler.record_function(label)

    def on_start(self) -> None:
        self.step += 1
        self.before_step()

    def on_end(self) -> None:
        if self.step == self.profile.start + self.profile.num_steps - 1:
            for owner, name in self.wrapped:
                delattr(owner, name)
            try:
                self.finish()
            except Exception:  # for example a full disk: a failed profile must not end a run of days
                log.exception("profile: could not be written; training continues")

    def before_step(self) -> None:
        """Called just before a step's data is read."""

    def finish(self) -> None:
        """Called after the last chosen step."""

    def note(self, kind: str, values: dict[str, Any]) -> None:
        """Write one table to the run folder, where `dtrain profile` finds it."""
        steps = [self.first_step, self.first_step + self.profile.num_steps - 1]
        write_json(
            self.folder / f"{kind}-rank-{self.rank}.json", {"kind": kind, "rank": self.rank, "steps": steps} | values
        )
        log.info("profile: a table of rank %d is in %s", self.rank, self.folder)


class Trace(Recorder):
    """torch.profiler: a Chrome trace, and the table of where the time of the steps goes."""

    def attach(self, strategy: Any, loader: Any, first_step: int, num_left: int) -> None:
        import torch.distributed as dist
        from torch.profiler import ProfilerActivity, profile, schedule

        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.device.type == "cuda" else [])]
        # one step to warm up the profiler, and one whose end is where the table's first step begins
        when = schedule(wait=0, warmup=1, active=self.profile.num_steps + 1, repeat=1)
        several = dist.is_initialized() and dist.get_world_size() > 1  # shapes tell the bytes of collectives
        self.profiler = profile(activities=kinds, schedule=when, on_trace_ready=self.write, record_shapes=several)
        self.times: list[float] = []
        self.watch(strategy, loader, first_step, num_left)

    def before_step(self) -> None:
        self.times.append(time.perf_counter())
        if self.step == self.profile.start - 2:
            self.profiler.start()
        elif self.step > self.profile.start - 2:
            self.profiler.step()

    def finish(self) -> None:
        self.profiler.step()  # the last one of its schedule, after which it calls `write`
        self.profiler.stop()
        del self.profiler  # it holds every event

    def write(self, profiler: Any) -> None:
        path = self.folder / f"trace-rank-{self.rank}.json.gz"
        profiler.export_chrome_trace(str(path))
        with gzip.open(path, "rt", errors="replace") as file:
            trace = json.load(file)
        table = attribute.table(trace["traceEvents"])
        # Step time without the profiler: the steps before it began, except the first, which compiles.
        plain = [after - before for before, after in itertools.pairwise(self.times[1 : self.profile.start - 2])]
        usual = {"step_ms_without_profiler": 1000 * statistics.median(plain) if plain else None}
        self.note("torch", table | usual | {"trace": path.name})
        ends = attribute.Host([e for e in trace["traceEvents"] if e.get("ph") == "X"]).ends
        found = comm.calls(trace, ends[0], ends[-1])
        if found["calls"]:
            self.note("communication", found | {"num_steps": len(ends) - 1})
        whole, exposed = table["communication"]["ms"], table["parts"]["exposed_communication"]["ms"]
        if self.report and whole:
            last = self.first_step + self.profile.num_steps - 1
            self.report(step=last, profiled_comm_s=whole / 1000, profiled_exposed_comm_s=exposed / 1000)


class Memory(Recorder):
    """torch's history of GPU memory from the first weight on; written after the chosen steps and on out-of-memory."""

    def __init__(self, profile: Profile, run_dir: Path, rank: int, device: Any) -> None:
        super().__init__(profile, run_dir, rank, device)
        self.first_step = profile.start  # until `attach` gives the real one
        if device.type != "cuda":
            raise memory.no_gpu()
        import torch

        self.folder.mkdir(exist_ok=True)
        torch.cuda.memory._record_memory_history(max_entries=MAX_ENTRIES, stacks="python")
        torch._C._cuda_attach_out_of_memory_observer(self.on_out_of_memory)  # type: ignore[attr-defined]

    def attach(self, strategy: Any, loader: Any, first_step: int, num_left: int) -> None:
        if self.rank in self.profile.ranks:
            self.watch(strategy, loader, first_step, num_left)

    def finish(self) -> None:
        import torch

        self.write("snapshot")
        torch.cuda.memory._record_memory_history(enabled=None)

    def on_out_of_memory(self, device: int, asked: int, total: int, free: int) -> None:
        """Called by the allocator on any rank that runs out of memory; a failure here must not hide that error."""
        try:
            self.write("out-of-memory", asked)
        except Exception as error:
            log.error("profile: no snapshot of the memory that ran out (%s)", error)

    def write(self, name: str, asked: int | None = None) -> None:
        import torch

        snapshot = torch.cuda.memory._snapshot()
        path = self.folder / f"{name}-rank-{self.rank}.pickle"
        with open(path, "wb") as file:  # torch's own format, for pytorch.org/memory_viz; our code does not read it
            pickle.dump(snapshot, file)
        table = memory.table(snapshot, self.device.index or 0) | {"snapshot": path.name, "asked_bytes": asked}
        self.note("memory" if asked is None else "out-of-memory", table | ({} if asked is None else {"steps": None}))


class Nsys(Recorder):
    """nsys=true: tell Nsight Systems, which started this process, where the chosen steps begin and end."""

    def attach(self, strategy: Any, loader: Any, first_step: int, num_left: int) -> None:
        self.watch(strategy, loader, first_step, num_left)

    def range(self, label: str) -> Any:
        import torch

        return torch.cuda.nvtx.range(label)

    def before_step(self) -> None:
        import torch

        if self.step == self.profile.start:
            torch.cuda.synchronize()
            torch.cuda.profiler.start()

    def finish(self) -> None:
        import torch

        torch.cuda.synchronize()  # otherwise kernels of the last step would run after the end
        torch.cuda.profiler.stop()
