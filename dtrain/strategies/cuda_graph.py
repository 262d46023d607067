"""A whole step as one launch: recorded once as a CUDA graph, then replayed.

A step of gpt2-124m is 950 kernels. Python must keep ahead of the GPU to launch them, which it cannot where batches are
small: on an H200 a batch of 4 took 27 ms, of which the GPU worked for 10. A replay is the same kernels at the same
addresses, so the same bits, and takes those 10. Where Python does keep ahead nothing is gained (a batch of 32: 59.2 and
59.7 ms), and the memory of a recording is better left to the allocator: so the first steps are watched, and decide.

What a graph cannot have, a step must not do: wait for the GPU, or depend on what Python decides anew. So only our own
models are recorded. Learning rates are sent before each replay (`AdamW.sender`), batches are copied to where the
recorded one lay, and torch itself sends the random seed. Such a graph keeps its memory: an evaluation between two steps
takes other memory.
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
NUMBER = 8  # of the step that is recorded: all is compiled, each product has its kernel, the allocator its blocks
STEPS_WATCHED = 3  # just before it: in all of these Python must have been the slower one
_broken: list[torch.cuda.CUDAGraph] = []  # torch 2.11 goes on asking a recording that broke: it must not be freed


class RecordedStep:
    """`step(inputs, targets)` gives the figures of a step, which ends with the optimizer's update."""

    def __init__(self, step: Callable[[Tensor, Tensor], Tensor], optimizer: Any, device: torch.device) -> None:
        self.step, self.optimizer, self.device = step, optimizer, device
        self.forget()

    def forget(self) -> None:
        """Before weights or state lie elsewhere: record anew."""
        self.graph: torch.cuda.CUDAGraph | None = None
        self.batch: tuple[Tensor, ...] = ()
        self.figures = torch.empty(0)
        self.number = self.steps_late = 0
        self.began = self.launched = 0.0
        self.ended: torch.cuda.Event | None = None

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """The figures of the step; None: it is to be made the usual way."""
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
        return self.figures

    def watch(self, ended: torch.cuda.Event) -> None:
        """A step was launched kernel by kernel. If the one before it has ended by now, the GPU waits for Python.

        Or for data, an evaluation, a save: then launching is not most of what lies between two steps' ends.
        """
        before, self.launched = self.launched, time.perf_counter()
        is_late = self.ended is not None and self.ended.query()
        is_late = is_late and self.launched - self.began > 0.5 * (self.launched - before)
        self.steps_late = self.steps_late + 1 if is_late else 0
        self.ended = ended

    def record(self, inputs: Tensor, targets: Tensor) -> bool:
        """Whether the step could be recorded. Nothing runs while it is, so the weights are as before."""
        free = torch.cuda.mem_get_info(self.device)[0] + torch.cuda.memory_reserved(self.device)
        held, peak = torch.cuda.memory_allocated(self.device), torch.cuda.max_memory_allocated(self.device)
        if 2 * peak - held > 0.9 * free:  # what is between steps, as an evaluation, may need as much as a step
            log.info("cuda_graphs: the GPU has not twice the memory of a step, so kernels are launched one by one")
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
            # The stream is left also when the recording breaks, which torch.cuda.graph does not do. Other threads go
            # on meanwhile: the loader's asks for pinned memory.
            with (
                torch.cuda.stream(stream),
                torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
            ):
                self.figures = self.step(*self.batch)
        except Exception as error:
            # torch 2.11 leaves its allocator and its generator recording (pytorch pull request 180395)
            graph.reset()
            with contextlib.suppress(RuntimeError):  # where it has ended them after all
                torch._C._cuda_endAllocateToPool(index, pool)
                torch._C._cuda_releasePool(index, pool)
            generator.graphsafe_set_state(drawn)
            _broken.append(graph)
            self.batch = ()
            log.warning("cuda_graphs: a step could not be recorded, and is launched as before (%s)", cause(error))
            return False
        torch.cuda.current_stream(self.device).wait_stream(stream)
        self.graph, self.send = graph, self.optimizer.sender()
        log.info("cuda_graphs: the GPU waited for Python, so a step is one launch from now on")
        return True


def cause(error: BaseException) -> str:
    """The first line of what went wrong first: the last error says only that there was another."""
    while isinstance(error.__context__, Exception):
        error = error.__context__
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
