"""Saves while the training goes on: it waits only until what a rank writes lies in host memory.

A save in the background has two parts. The first is the loop's: copy this rank's share of the state into buffers of
the host. The copies are queued on the GPU behind the last update and before the next step, so that what is saved is one
step's state, and the host does not wait for them. The second is a thread's: hash, write, agree with the other ranks'
threads over a process group of their own, and only then `latest` moves (checkpoint.py, the same code as without it).
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

from dtrain import checkpoint
from dtrain.agreement import Group, failpoint, gather, world_size
from dtrain.checkpoint import Files
from dtrain.host_memory import free_bytes
from dtrain.shards import Held
from dtrain.writers import Writers

log = logging.getLogger("dtrain")
ALIGNMENT = 64  # of a tensor in its buffer: a float32 may not begin at an odd byte
FAILED_S = 300  # a run that fails gives a save that is under way so long to end


class Saver:
    """Saves checkpoints of one run, one at a time. All ranks have one and call the same methods in the same order.

    As a context, it lets a save that is under way come to its end when the run fails.
    """

    def __init__(self, folder: Path, keep: int, background: bool = True) -> None:
        self.folder, self.keep, self.background = folder, keep, background
        self.group: Group = dist.new_group(backend="gloo") if background and world_size() > 1 else None
        self.writers = Writers()  # which parts this rank writes: decided once, as long as the layout stays
        self.buffers = Buffers()
        self.is_prepared = False  # all ranks have been asked for the memory
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None
        self.newest: Path | None = None
        self.reports: list[dict[str, Any]] = []
        self.stalls: list[float] = []
        self.totals = {"saves": 0, "save_stall_s": 0.0, "save_s": 0.0, "save_gib": 0.0}

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.thread and error is not None:
            self.thread.join(FAILED_S)
        if not (self.thread and self.thread.is_alive()):
            self.buffers.free()

    @property
    def failed(self) -> bool:
        """A save in the background failed, on this rank and on all others: the next save or wait raises its error."""
        return self.error is not None

    def prepare(self, tensors: Mapping[str, Held]) -> None:
        """Make room for the first save while the first steps run: many GiB take seconds to fault in and to pin."""
        files = checkpoint.share_out(tensors, self.writers)
        if self.background and self.has_room(files):
            sizes, gpu = sizes_of(files), gpu_of(files)  # not the tensors, which the thread would hold on to

            def reserve() -> None:
                try:
                    self.buffers.reserve(sizes, gpu)
                except Exception as error:  # the save tries again, and fails with it
                    log.warning("no memory was made ready for the first checkpoint: %s", error)

            self.thread = threading.Thread(target=reserve, name="saver", daemon=True)
            self.thread.start()

    def save(
        self,
        step: int,
        tensors: Mapping[str, Held],
        meta: dict[str, Any],
        asked: float | None = None,
        last: bool = False,
    ) -> None:
        """Save the state as it is now. When this returns it may change; after the last save it is also on disk.

        `asked`: when the loop began to wait, by time.perf_counter(); gathering the state is a part of it.

        The last one is written directly: there is nothing to go on with meanwhile, and a run that saves only at its
        end needs no buffers.
        """
        called = time.perf_counter() if asked is None else asked
        self.wait()
        begin = time.perf_counter()
        files = checkpoint.share_out(tensors, self.writers)
        if last or not self.background or not self.has_room(files):
            report = self._write(begin, step, files, meta)
            self.reports.append(report | {"save_stall_s": time.perf_counter() - called})
            return
        copies = self.buffers.stage(files)
        failpoint("save.stage")
        stall = time.perf_counter() - called
        arguments = (stall, begin, step, copies, copy.deepcopy(meta))
        self.thread = threading.Thread(target=self._write_copies, args=arguments, name="saver", daemon=True)
        self.thread.start()

    def wait(self) -> Path | None:
        """Wait until the save under way is on disk, or raise what it failed with; give the newest checkpoint."""
        if self.thread:
            self.thread.join()
            self.thread = None
        if self.error is not None:
            raise self.error
        return self.newest

    def finished(self) -> list[dict[str, Any]]:
        """The figures of the saves that have ended since this was last asked."""
        if self.thread and self.thread.is_alive():
            return []
        ended, self.reports = self.reports, []
        for report in ended:
            self.totals["saves"] += 1
            for key in ("save_stall_s", "save_s", "save_gib"):
                self.totals[key] += report[key]
            self.stalls.append(report["save_stall_s"])
            self.totals["save_stall_median_s"] = statistics.median(self.stalls)
        return ended

    def has_room(self, files: Files) -> bool:
        """Before the first copies: do all ranks' hosts have the memory? If not, the loop waits for every save."""
        if self.is_prepared:
            return True
        self.is_prepared = True
        needed = sum(c.nbytes for chunks in files.values() for c in chunks.values())
        needed *= int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))
        free = free_bytes()
        problem = ""
        if free is not None and needed > 0.9 * free:
            problem = f"{needed / 2**30:.1f} GiB are needed for the copies, {free / 2**30:.1f} GiB are free"
        problems = [p for p in gather(problem) if p]
        if problems:
            log.warning("checkpoint.background: the host's memory is too small (%s); the loop waits", problems[0])
            self.background = False
        return not problems

    def _write_copies(self, stall: float, begin: float, step: int, copies: Copies, meta: dict[str, Any]) -> None:
        """The thread of a save."""
        try:
            run_behind()
            # what the loop felt: its own time, and the GPU's, which computes nothing while it copies
            stall += copies.wait()
            failpoint("save.copied")
            report = self._write(begin, step, copies.files, meta, self.group)
            self.reports.append(report | {"save_stall_s": stall})
        except BaseException as error:  # whatever it is, the loop raises it
            self.error = error

    def _write(
        self, begin: float, step: int, files: Files, meta: dict[str, Any], group: Group = None
    ) -> dict[str, Any]:
        path, num_bytes = checkpoint.commit(self.folder, step, files, self.writers.index, meta, group)
        seconds, gib = time.perf_counter() - begin, num_bytes / 2**30
        checkpoint.prune(self.folder, path, self.keep, group)
        self.newest = path
        return {"save_step": step, "save_s": seconds, "save_gib": gib, "save_gib_per_s": gib / seconds}


@dataclasses.dataclass
class Copies:
    """What a rank writes, as copies in host memory that are still under way."""

    files: Files
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None

    def wait(self) -> float:
        """Until they are there; the seconds that the GPU copied."""
        if self.events is None:
            return 0.0
        begin, end = self.events
        end.synchronize()
        return begin.elapsed_time(end) / 1000


class Buffers:
    """Host memory for the copies of a rank's share, one buffer a file, kept from save to save.

    Pinned, as a GPU copies into such memory at its full rate and while the host goes on; that takes seconds for many
    GiB, once.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.pinned: set[str] = set()

    def stage(self, files: Files) -> Copies:
        """Queue the copies behind what the current stream has to do; what comes after them there may change all."""
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
        """See that each file has a buffer, all at once: faulting pages in and pinning them is work of the kernel."""
        missing = [f for f, size in sizes.items() if f not in self.tensors or len(self.tensors[f]) < size]
        if not missing:
            return
        for file in missing:
            self._unpin(file)
            self.tensors.pop(file, None)
        made = {file: empty(sizes[file]) for file in missing}
        codes = []
        if gpu is not None:

            def pin(buffer: Tensor) -> int:
                # in a new thread the GPU would be the first one, and get a context of this process
                torch.cuda.set_device(gpu)
                run_behind()
                # pages first, by writing to them: CUDA would fault them in while it keeps others from launching
                return register(buffer.zero_())

            with ThreadPoolExecutor(len(missing)) as pool:
                codes = list(pool.map(pin, made.values()))
            self.pinned.update(file for file, code in zip(missing, codes, strict=True) if code == 0)
        self.tensors |= made  # all of them, or none: what is there is never pinned later
        if any(codes):
            log.warning("CUDA does not pin the memory for checkpoints (error %d): saves stall longer", max(codes))

    def free(self) -> None:
        for file in list(self.tensors):
            self._unpin(file)
        self.tensors.clear()

    def _unpin(self, file: str) -> None:
        if file in self.pinned:
            torch.cuda.cudart().cudaHostUnregister(self.tensors[file].data_ptr())
            self.pinned.remove(file)


def sizes_of(files: Files) -> dict[str, int]:
    """Bytes of each file's buffer."""
    return {file: sum(_aligned(c.nbytes) for c in chunks.values()) for file, chunks in files.items()}


def gpu_of(files: Files) -> torch.device | None:
    """Where what is saved lies, if on a GPU."""
    devices = (c.values.device for chunks in files.values() for c in chunks.values())
    return next((device for device in devices if device.type == "cuda"), None)


def run_behind() -> None:
    """Leave this thread the cores that training does not use, where threads have a priority each."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 5)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def empty(size: int) -> Tensor:
    """Bytes straight from the kernel, in huge pages where it has them: those are faulted in and pinned far faster.

    torch's own pinned memory comes in powers of two, up to twice of what is needed.
    """
    memory = mmap.mmap(-1, max(size, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # not for what is forked, the loader's processes: the kernel would copy pinned pages for each of them
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        if hasattr(mmap, advice):
            with contextlib.suppress(OSError):  # a kernel without it
                memory.madvise(getattr(mmap, advice))
    return torch.frombuffer(memory, dtype=torch.uint8)


def register(buffer: Tensor) -> int:
    """Pin a buffer; 0, or CUDA's number of what went wrong."""
    return int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), 1))
