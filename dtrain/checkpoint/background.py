"""Save while training continues: training blocks only while its shard is copied to host memory.

A background save has two parts. First, the loop copies this rank's share of the state into host buffers. The copies are
queued on the GPU after the last update and before the next step, so the saved state is that of one step, and the CPU
does not wait for them. Second, a thread hashes, writes, and synchronizes with the other ranks' threads over their own
process group; only then `latest` moves (store.py, the same code as without a thread).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import mmap
import os
import statistics
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.checkpoint import resume_point, store
from dtrain.checkpoint.incremental import Links
from dtrain.checkpoint.manifest import Manifest
from dtrain.checkpoint.peer import PeerCopies
from dtrain.checkpoint.rank_files import Files, share_out
from dtrain.checkpoint.writers import Writers
from dtrain.errors import CheckpointError
from dtrain.runs.folder import checkpoints
from dtrain.util.collective import Group, all_problems, failpoint, from_rank_0, world_size
from dtrain.util.dtensor import Held
from dtrain.util.host_memory import free_bytes

log = logging.getLogger("dtrain")
ALIGNMENT = 64  # of a tensor in its buffer: an fp32 tensor must not begin at an odd byte
FAILED_S = 300  # how long a failing run waits for a running save to end


class Saver:
    """Saves checkpoints of one run, one at a time. All ranks have one and call the same methods in the same order.

    As a context manager, it lets a running save end when the run fails.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        background: bool = True,
        incremental: int = 0,
        peer: PeerCopies | None = None,
        best: tuple[str, str] | None = None,
    ) -> None:
        """best: a metric, and min or max: its best checkpoint is not pruned."""
        self.folder, self.keep, self.background, self.peer, self.best = folder, keep, background, peer, best
        self.links = Links(incremental) if incremental else None
        self.group: Group = dist.new_group(backend="gloo") if background and world_size() > 1 else None
        self.writers = Writers()  # which parts this rank writes: decided once per layout
        self.buffers = Buffers()
        self.only_in_memory = False  # the state that the run resumed from is not on disk yet
        self.is_prepared = False  # all ranks have been asked for the memory
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None
        self.newest: Path | None = None
        self.reports: list[dict[str, Any]] = []
        self.stalls: list[float] = []
        self.totals = {"saves": 0, "save_stall_s": 0.0, "save_s": 0.0, "save_gib": 0.0}
        if self.links:
            self.totals["save_linked_gib"] = 0.0

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.thread and error is not None:
            self.thread.join(FAILED_S)
        if not (self.thread and self.thread.is_alive()):
            self.buffers.free()

    @property
    def is_writing(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    @property
    def failed(self) -> bool:
        """A background save failed, on this rank and on all others: the next save or wait raises its error."""
        return self.error is not None

    def newest_good(self, needed: tuple[str, ...] = ()) -> tuple[Path, Manifest] | None:
        """Return the newest good checkpoint of the run folder and of the hosts' memory, or None."""
        if asked := resume_point.go_back(self.folder, log.warning, needed):
            if self.peer:
                self.peer.remove()  # of steps after that one
            return asked
        if self.peer is None:
            return resume_point.newest_good(self.folder, log.warning, needed=needed)
        steps = from_rank_0(lambda: [int(p.name[5:]) for p in checkpoints(self.folder)], f"listing {self.folder}")
        found = self.peer.newest(max(steps, default=0), needed)
        if found is None:
            on_disk, error = None, None
            try:
                on_disk = resume_point.newest_good(self.folder, log.warning, needed=needed)
            except CheckpointError as raised:  # on all ranks
                error = raised
            # the newest on disk may turn out to be damaged
            found = self.peer.newest(on_disk[1]["step"] + 1 if on_disk else 0, needed) if steps else None
            if found is None:
                if error:
                    raise error
                return on_disk
            steps = []
        self.only_in_memory = found[1]["step"] not in steps
        return found

    def prepare(self, tensors: Mapping[str, Held]) -> None:
        """Allocate the first save's buffers while the first steps run: many GiB take seconds to fault in and to pin."""
        files = share_out(tensors, self.writers, self.links)
        if self.background and self.has_room(files):
            sizes, gpu = sizes_of(files), gpu_of(files)  # not the tensors, which the thread would keep alive

            def reserve() -> None:
                try:
                    self.buffers.reserve(sizes, gpu)
                except Exception as error:  # the save tries again, and raises the error if it persists
                    log.warning("could not allocate the checkpoint buffers in advance: %s", error)

            self.thread = threading.Thread(target=reserve, name="saver", daemon=True)
            self.thread.start()

    def save(
        self,
        step: int,
        tensors: Mapping[str, Held],
        meta: dict[str, Any],
        asked: float | None = None,
        last: bool = False,
        on_disk: bool = True,
    ) -> None:
        """Save the current state. After this returns, the state may change; after the last save it is also on disk.

        `asked`: when the loop began to wait, by time.perf_counter(); gathering the state counts as waiting. `on_disk`:
        False for a copy in memory only (checkpoint.peer).

        The last save is written directly: no training continues meanwhile, and a run that saves only at its end needs
        no buffers.
        """
        called = time.perf_counter() if asked is None else asked
        self.wait()
        begin = time.perf_counter()
        files = share_out(tensors, self.writers, self.links)
        if last or not self.background or not self.has_room(files):
            report = self._write(begin, step, files, meta, on_disk, None if last else self.peer)
            self.reports.append(report | {"save_stall_s": time.perf_counter() - called})
            return
        copies = self.buffers.stage(files)
        failpoint("save.stage")
        stall = time.perf_counter() - called
        arguments = (stall, begin, step, copies, copy.deepcopy(meta), on_disk)
        self.thread = threading.Thread(target=self._write_copies, args=arguments, name="saver", daemon=True)
        self.thread.start()

    def wait(self) -> Path | None:
        """Wait until the running save is on disk, or raise its error; return the newest checkpoint."""
        if self.thread:
            self.thread.join()
            self.thread = None
        if self.error is not None:
            raise self.error
        return self.newest

    def finished(self) -> list[dict[str, Any]]:
        """Return the metrics of the saves that have ended since the last call."""
        if self.thread and self.thread.is_alive():
            return []
        ended, self.reports = self.reports, []
        for report in ended:
            self.totals["saves"] += "save_step" in report
            for key in self.totals.keys() & report.keys():
                self.totals[key] += report[key]
            self.stalls.append(report["save_stall_s"])
            self.totals["save_stall_median_s"] = statistics.median(self.stalls)
        return ended

    def has_room(self, files: Files) -> bool:
        """Before the first copies: check that all ranks' hosts have the memory. If not, every save blocks the loop."""
        if self.is_prepared:
            return True
        self.is_prepared = True
        needed = sum(c.nbytes for chunks in files.values() for c in chunks.values())
        needed *= int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))
        free = free_bytes()
        problem = ""
        if free is not None and needed > 0.9 * free:
            problem = f"{needed / 2**30:.1f} GiB are needed for the copies, {free / 2**30:.1f} GiB are free"
        problems = all_problems(problem)
        if problems:
            log.warning(
                "checkpoint.background: not enough host memory (%s); training waits during each save", problems[0]
            )
            self.background = False
        return not problems

    def _write_copies(
        self, stall: float, begin: float, step: int, copies: Copies, meta: dict[str, Any], on_disk: bool
    ) -> None:
        """Body of a save's thread."""
        try:
            lower_priority()
            # how long training stalls: the loop's own time, plus the GPU's copy time, in which it computes nothing
            stall += copies.wait()
            failpoint("save.copied")
            report = self._write(begin, step, copies.files, meta, on_disk, self.peer, self.group)
            self.reports.append(report | {"save_stall_s": stall})
        except BaseException as error:  # any error: the loop raises it
            self.error = error

    def _write(
        self,
        begin: float,
        step: int,
        files: Files,
        meta: dict[str, Any],
        on_disk: bool,
        peer: PeerCopies | None,
        group: Group = None,
    ) -> dict[str, Any]:
        """Write to the memory of the hosts, then to the disk; return the metrics."""
        report: dict[str, Any] = {}
        if peer and peer.save(step, files, self.writers.index, meta, group):
            report = {"peer_step": step, "peer_s": time.perf_counter() - begin}
        if not on_disk:
            return report
        saved = store.commit(self.folder, step, files, self.writers.index, meta, group, self.links)
        seconds, gib = time.perf_counter() - begin, saved.written_bytes / 2**30
        store.prune(self.folder, saved, self.keep, files, group, self.links, self.best)
        self.newest = saved.path
        report |= {"save_step": step, "save_s": seconds, "save_gib": gib, "save_gib_per_s": gib / seconds}
        return report | ({"save_linked_gib": saved.linked_bytes / 2**30} if self.links else {})


@dataclasses.dataclass
class Copies:
    """What a rank writes, as host-memory copies that may still be in flight."""

    files: Files
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None

    def wait(self) -> float:
        """Wait for the copies; return the seconds that the GPU spent on them."""
        if self.events is None:
            return 0.0
        begin, end = self.events
        end.synchronize()
        return begin.elapsed_time(end) / 1000


class Buffers:
    """Host memory for the copies of a rank's share, one buffer per file, kept from save to save.

    It is pinned, so that a GPU copies into it at full rate and asynchronously. Pinning many GiB takes seconds, once.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.pinned: set[str] = set()

    def stage(self, files: Files) -> Copies:
        """Queue the copies on the current stream. Work queued after them may overwrite the state."""
        gpu = gpu_of(files)
        self.reserve(sizes_of(files), gpu)
        cuda = gpu is not None
        events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) if cuda else None
        if events:
            events[0].record()
        copies: Files = {}
        for file, chunks in files.items():
            copies[file], end = {}, 0
            for names, chunk in chunks.items():
                begin, end = end, end + chunk.nbytes
                values = self.tensors[file][begin:end].view(chunk.values.dtype).view(chunk.shape)
                values.copy_(chunk.values.detach(), non_blocking=True)
                copies[file][names] = dataclasses.replace(chunk, values=values)
                end = _aligned(end)
        if events:
            events[1].record()
        return Copies(copies, events)

    def reserve(self, sizes: dict[str, int], gpu: torch.device | None) -> None:
        """Allocate each file's buffer, all in parallel: the kernel faults in and pins the pages."""
        missing = [f for f, size in sizes.items() if not self._fits(f, size)]
        for file in {*missing, *(self.tensors.keys() - sizes.keys())}:
            self._unpin(file)
            self.tensors.pop(file, None)
        if not missing:
            return
        made = {file: empty(sizes[file]) for file in missing}
        codes = []
        if gpu is not None:

            def pin(buffer: Tensor) -> int:
                # a new thread would use GPU 0 and create a context on it
                torch.cuda.set_device(gpu)
                lower_priority()
                # fault the pages in first: CUDA would do it while it blocks kernel launches
                return register(buffer.zero_())

            with ThreadPoolExecutor(len(missing)) as pool:
                codes = list(pool.map(pin, made.values()))
            self.pinned.update(file for file, code in zip(missing, codes, strict=True) if code == 0)
        self.tensors |= made  # all or none: an existing buffer is never pinned later
        if any(codes):
            log.warning(
                "CUDA could not pin the checkpoint buffers (error %d): saves block training for longer", max(codes)
            )

    def _fits(self, file: str, size: int) -> bool:
        """An incremental save may move a tensor to another file: a buffer that became far too large is given back."""
        return file in self.tensors and size <= len(self.tensors[file]) <= max(2 * size, mmap.PAGESIZE)

    def free(self) -> None:
        for file in list(self.tensors):
            self._unpin(file)
        self.tensors.clear()

    def _unpin(self, file: str) -> None:
        if file in self.pinned:
            torch.cuda.cudart().cudaHostUnregister(self.tensors[file].data_ptr())
            self.pinned.remove(file)


def sizes_of(files: Files) -> dict[str, int]:
    """Return the bytes of each file's buffer."""
    return {file: sum(_aligned(c.nbytes) for c in chunks.values()) for file, chunks in files.items()}


def gpu_of(files: Files) -> torch.device | None:
    """Return the GPU that holds the state, or None."""
    devices = (c.values.device for chunks in files.values() for c in chunks.values())
    return next((device for device in devices if device.type == "cuda"), None)


def lower_priority() -> None:
    """Lower this thread's priority below training's. On Linux, each thread has its own priority."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 5)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def empty(size: int) -> Tensor:
    """Allocate bytes directly from the kernel, in huge pages if available: these fault in and pin far faster.

    torch's own pinned memory is rounded up to a power of two, up to twice the size needed.
    """
    memory = mmap.mmap(-1, max(size, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # not inherited by the loader's forked processes: the kernel would copy pinned pages for each
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        if hasattr(mmap, advice):
            with contextlib.suppress(OSError):  # an older kernel
                memory.madvise(getattr(mmap, advice))
    return torch.frombuffer(memory, dtype=torch.uint8)


def register(buffer: Tensor) -> int:
    """Pin a buffer; return 0 or CUDA's error code."""
    return int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), 1))
