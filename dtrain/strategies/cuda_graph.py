"""Capture a whole step as one CUDA graph, then replay it.

A step of gpt2-124m is 950 kernels. With small batches the step is launch-bound: on an H200 a batch of 4 took 27 ms, of
which the GPU worked for 10. A replay runs the same kernels at the same addresses, so it gives the same bits, and takes
those 10 ms. A step that is not launch-bound gains nothing (a batch of 32: 59.2 and 59.7 ms), and the graph's memory is
better left to the allocator. So the first steps are timed, and decide.

A captured step must not wait for the GPU or depend on new decisions in Python. So only our own models are captured.
Before each replay, learning rates are sent (`AdamW.sender`), the batch is copied into the captured batch's memory, and
torch sends the random seed. The graph keeps its memory, so an evaluation between two steps uses other memory.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dtrain.kernels import cublaslt

log = logging.getLogger("dtrain")
NUMBER = 8  # the step to capture: by then all is compiled, each GEMM has its kernel, the allocator its blocks
STEPS_WATCHED = 3  # steps before it, all of which must be launch-bound
_broken: list[torch.cuda.CUDAGraph] = []  # torch 2.11 keeps querying a graph whose capture failed: it must not be freed


class RecordedStep:
    """`step(inputs, targets)` runs a step, including the optimizer's update, and returns its metrics."""

    def __init__(self, step: Callable[[Tensor, Tensor], Tensor], optimizer: Any, device: torch.device) -> None:
        self.step, self.optimizer, self.device = step, optimizer, device
        self.forget()

    def forget(self) -> None:
        """Drop the graph before weights or state move to other memory; capture again."""
        self.graph: torch.cuda.CUDAGraph | None = None
        self.batch: tuple[Tensor, ...] = ()
        self.metrics = torch.empty(0)
        self.number = self.steps_late = 0
        self.began = self.launched = 0.0
        self.ended: torch.cuda.Event | None = None

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Return the step's metrics, or None if the step must run without a graph."""
        if self.graph is None:
            self.began = time.perf_counter()
            self.number += 1
            if self.number != NUMBER or self.steps_late < STEPS_WATCHED or not self.record(inputs, targets):
                return None
        assert self.graph is not None
        pairs = list(zip((inputs, targets), self.batch, strict=True))
        if any(now.shape != then.shape or now.dtype != then.dtype for now, then in pairs):
            return None
        for now, then in pairs:
            then.copy_(now, non_blocking=True)
        self.send()
        self.graph.replay()
        return self.metrics

    def watch(self, ended: torch.cuda.Event) -> None:
        """Call after an eager step. If the step before it has already ended, the GPU is waiting for Python.

        It may also wait for data, an evaluation or a save: then launching takes less than half of the time between
        steps.
        """
        before, self.launched = self.launched, time.perf_counter()
        is_late = self.ended is not None and self.ended.query()
        is_late = is_late and self.launched - self.began > 0.5 * (self.launched - before)
        self.steps_late = self.steps_late + 1 if is_late else 0
        self.ended = ended

    def record(self, inputs: Tensor, targets: Tensor) -> bool:
        """Capture the step; return whether that succeeded. Capture runs no kernels, so the weights do not change."""
        free = torch.cuda.mem_get_info(self.device)[0] + torch.cuda.memory_reserved(self.device)
        held, peak = torch.cuda.memory_allocated(self.device), torch.cuda.max_memory_allocated(self.device)
        if 2 * peak - held > 0.9 * free:  # work between steps, such as an evaluation, may need as much as a step
            log.info("cuda_graphs: the GPU does not have twice the memory of a step, so the step is not captured")
            return False
        if not self.optimizer.is_on_device():
            return False
        self.batch = (inputs.clone(), targets.clone())
        index = self.device.index or 0
        generator = torch.cuda.default_generators[index]
        drawn = generator.clone_state()
        graph, pool, stream = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle(), torch.cuda.Stream(self.device)
        cublaslt.reserve(self.device, stream)
        try:
            # torch.cuda.graph does not leave the stream if capture fails, so we do. Other threads continue meanwhile:
            # the loader's allocates pinned memory.
            with (
                torch.cuda.stream(stream),
                torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
            ):
                self.metrics = self.step(*self.batch)
        except Exception as error:
            # torch 2.11 leaves its allocator and generator in capture mode (pytorch pull request 180395)
            graph.reset()
            with contextlib.suppress(RuntimeError):  # if torch has ended them after all
                torch._C._cuda_endAllocateToPool(index, pool)
                torch._C._cuda_releasePool(index, pool)
            generator.graphsafe_set_state(drawn)
            _broken.append(graph)
            self.batch = ()
            log.warning("cuda_graphs: the step could not be captured, and runs as before (%s)", cause(error))
            return False
        torch.cuda.current_stream(self.device).wait_stream(stream)
        self.graph, self.send = graph, self.optimizer.sender()
        log.info("cuda_graphs: the step is CPU-bound; replaying it as a CUDA graph from now on")
        return True


def cause(error: BaseException) -> str:
    """Return the first line of the root error: later errors only say that another one occurred."""
    while isinstance(error.__context__, Exception):
        error = error.__context__
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
