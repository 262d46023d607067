"""Find silent corruption, such as a flipped bit or a faulty processor, before it is saved.

Three checks, each of which stops all ranks with the rank, its host and the tensor:
- replicas: tensors that several ranks hold are equal (strategies/replicas.py);
- memory at rest: what a rank holds does not change between two updates. On a GPU, AdamW's kernel keeps checksums of
  what it writes, and so watches every step (train/update_sums.py). Otherwise, what only one rank holds is watched in
  one step per interval;
- replay: forward and backward passes that run twice give the same bits.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.strategies.base import Strategy
from dtrain.strategies.checksums import checksums
from dtrain.strategies.replicas import Replicas, listed
from dtrain.train.update_sums import UpdateSums, can_watch, is_ours
from dtrain.util.collective import all_problems
from dtrain.util.dtensor import is_dtensor, local

Sums = dict[str, int]
SUMMED = " Other ranks contributed to these sums, so the fault may also be on one of them."


class CorruptionError(RuntimeError):
    """A rank held or computed other bits than it should; the message names rank, host and tensor."""


class Guard:
    """The checks of one run. Every rank has one and calls it around the same steps."""

    def __init__(self, strategy: Strategy, replicas_every: int, replay_every: int) -> None:
        self.strategy, self.replicas_every, self.replay_every = strategy, replicas_every, replay_every
        self.replicas = Replicas(strategy)
        self.updates = UpdateSums(strategy) if replicas_every and can_watch(strategy) else None
        self.at_rest: Sums | None = None  # checksums after an update, to be compared before the next one
        self.holds_alone: bool | None = None  # whether any rank holds a tensor alone, once that is known
        self.step, self.is_replayed = 0, False

    def before_step(self, step: int) -> None:
        self.step, self.is_replayed = step, every(self.replay_every, step)
        self.strategy.passes = self.passes if self.is_replayed or self.at_rest is not None else None

    def passes(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Run the forward and backward passes of a checked step; the update follows only if nothing differs."""
        if self.is_replayed:
            loss = run_twice(self.strategy, self.step, inputs, targets)
        else:
            loss = self.strategy.forward_backward(inputs, targets)
        if self.at_rest is not None:
            self.compare_at_rest(self.at_rest)
        return loss

    def after_step(self, step: int, is_saved: bool = False) -> None:
        """Compare the replicas, and remember what must not change until the next update, if it is time for that.

        `is_saved`: the replicas were compared before the save.
        """
        if self.updates and self.updates.is_started:  # after an earlier step: the GPU has computed it by now
            self.read_updates(step)
        if every(self.replicas_every, step) and not is_saved:
            if self.updates:
                self.updates.start()
                if dist.get_world_size() > 1:  # at once: it names the rank that differs from its replicas
                    self.read_updates(step)
            self.replicas.check(step)
        # a step that may be a CUDA graph is not checked: it would run without the graph, and so take longer. A user's
        # model may change weights in its forward pass (a moving average, Embedding(max_norm=…)).
        can_be = self.strategy.recorded is None and self.strategy.in_step() and is_ours(self.strategy.module)
        is_next = every(self.replicas_every, step + 1) and can_be
        self.at_rest = self.sums_at_rest() if is_next and self.holds_alone is not False else None

    def before_save(self, step: int) -> None:
        """A flipped bit is never saved. The replicas are compared when the tensors to save are known."""
        if self.updates:
            self.updates.start()
            self.read_updates(step)

    def read_updates(self, step: int) -> None:
        assert self.updates is not None
        agree(
            self.updates.read(),
            [],
            f"step {step}: {{who}} held {{what}}, which changed in memory between two updates, or its optimizer state "
            "did. The run stops, and this state is not saved. Fix: resume this run from its last checkpoint, which was "
            "compared and is good, and test the memory and GPUs of {hosts}.",
        )

    def sums_at_rest(self) -> Sums | None:
        held = self.replicas.held_alone() | masters(self.strategy)
        if self.updates and (watched := self.updates.covers()):  # then only frozen weights remain
            held = {name: tensor for name, tensor in held.items() if name.startswith("model.") and name not in watched}
        sums = sums_of(held, self.strategy.device)
        if self.holds_alone is None:
            self.holds_alone = bool(all_problems("yes" if sums else ""))
        return sums if self.holds_alone else None

    def compare_at_rest(self, before: Sums) -> None:
        now = self.sums_at_rest() or {}
        agree(
            differing(before, {**before, **now}),
            [],
            f"step {self.step}: {{who}} held {{what}}, which changed in memory between two updates. The run stops "
            "before this update. Fix: resume it from its last checkpoint, and test the memory and GPUs of {hosts}.",
        )


def every(interval: int, step: int) -> bool:
    return bool(interval) and step % interval == 0


def masters(strategy: Strategy) -> dict[str, Tensor]:
    """Return DeepSpeed's fp32 masters and optimizer state of this rank, unless they are on a disk."""
    held: Any = getattr(strategy, "masters", None)
    if held is None or "nvme" in (strategy.settings["offload"], strategy.settings["offload_params"]):  # type: ignore[attr-defined]
        return {}
    chunks = {name: chunks for name, chunks in held.walk()}
    return {f"{name} (master {i})": c.values for name, some in chunks.items() for i, c in enumerate(some)}


def sums_of(tensors: dict[str, Tensor], device: torch.device) -> Sums:
    values = checksums([local(tensor) for tensor in tensors.values()], device).tolist() if tensors else []
    return dict(zip(tensors, values, strict=True))


def differing(first: Sums, again: Sums) -> list[str]:
    return [name for name, value in first.items() if again.get(name) != value]


# ---- replay --------------------------------------------------------------------------------------------------


def run_twice(strategy: Strategy, step: int, inputs: Tensor, targets: Tensor) -> Tensor:
    """Run the passes of a step twice, from the same random state and buffers; raise if loss or gradients differ.

    Training continues with the second pass, whose bits are those of the first.
    """
    module, device = strategy.module, strategy.device
    own_state = [*module.buffers(), *([] if is_ours(module) else map(local, module.parameters()))]
    state, kept = random_state(device), [tensor.detach().clone() for tensor in own_state]
    own: list[Sums] = []
    summed: list[Sums] = []
    for is_second in (False, True):
        if is_second:
            strategy.optimizer.zero_grad(set_to_none=True)
            set_random_state(device, state)
            with torch.no_grad():
                for tensor, before in zip(own_state, kept, strict=True):
                    tensor.copy_(before)
        with gradients_before_reduction(strategy) as gradients:
            loss = strategy.forward_backward(inputs, targets)
        own.append(sums_of({"loss": loss}, device) | gradients)
        reduced = {f"gradient of {name}": p.grad for name, p in module.named_parameters() if p.grad is not None}
        summed.append(sums_of(reduced, device) | sums_of(dict(module.named_buffers()), device))
    agree(
        differing(*own),
        differing(*summed),
        f"step {step}: {{who}} computed {{what}} twice, with different bits. The run stops before this update. "
        "Fix: resume it from its last checkpoint, and test the memory, processors and GPUs of {hosts}.",
    )
    return loss


@contextlib.contextmanager
def gradients_before_reduction(strategy: Strategy) -> Iterator[Sums]:
    """Collect checksums of the gradients that this rank computes alone, before ddp averages them: they name the rank.

    Sharded weights have none: fsdp and tensor parallel reduce gradients inside of the backward pass.
    """
    found: Sums = {}
    handles = []

    def note(name: str, gradient: Tensor) -> None:  # one after the other for the micro-batches
        found[name] = found.get(name, 0) + int(checksums([gradient], gradient.device))

    if strategy.sizes.token_ranks > 1:
        for name, p in strategy.module.named_parameters():
            if p.requires_grad and not is_dtensor(p):
                handles.append(p.register_hook(lambda gradient, name=f"gradient of {name}": note(name, gradient)))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def random_state(device: torch.device) -> tuple[Any, ...]:
    on_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), on_gpu, np.random.get_state(), random.getstate()


def set_random_state(device: torch.device, state: tuple[Any, ...]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)
    np.random.set_state(state[2])
    random.setstate(state[3])


# ---- the message ---------------------------------------------------------------------------------------------


def agree(own: list[str], summed: list[str], text: str) -> None:
    """Raise CorruptionError on all ranks if one of them found differences; one small all-reduce if none did.

    `own`: what a rank computed alone, and so names it. `summed`: what also depends on other ranks, and is only used if
    nothing else differs.
    """
    report = {"rank": dist.get_rank(), "host": socket.gethostname(), "own": own, "summed": summed}
    reports = [json.loads(found) for found in all_problems(json.dumps(report) if own or summed else "")]
    if not reports:
        return
    kind = "own" if any(report["own"] for report in reports) else "summed"
    reports = [report for report in reports if report[kind]]
    what = max((report[kind] for report in reports), key=len)
    more = f" and {len(what) - 1} other tensor{'s' if len(what) > 2 else ''}" if len(what) > 1 else ""
    raise CorruptionError(
        text.format(
            who=listed(f"rank {report['rank']} ({report['host']})" for report in reports),
            what=what[0] + more,
            hosts=listed(sorted({report["host"] for report in reports})),
        )
        + (SUMMED if kind == "summed" else "")
    )
