"""The seam between the loop and a way to parallelise: one optimizer step over a data rank's whole batch.

A strategy gets the whole batch of its data rank, never a micro-batch: a pipeline schedule and DeepSpeed's engine
split it their own way. Most strategies override only `parallelize`, `wrap` and `no_sync`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute

from dtrain import checkpoint, mesh
from dtrain.precision import Precision
from dtrain.shards import Held, chunks_of, is_dtensor


@dataclass
class StepResult:
    loss: float  # mean over the global batch
    grad_norm: float  # over the whole model, before clipping
    updated: bool  # False: loss or gradient was not finite, and weights and optimizer were left alone
    overflow: bool = False  # not updated only because the fp16 loss scale was too large; it is smaller now


class Strategy:
    """One process per data rank and nothing spread: the base that every strategy's maths must equal."""

    # How far the losses of `dtrain verify` may be from one process. None: what its precision allows, as the maths is
    # the same. A strategy with other maths states its own figure, and why.
    tolerance: float | None = None

    def __init__(self, pp: int = 1, dp: int = -1, tp: int = 1) -> None:
        self.axes = {"pp": pp, "dp": dp, "tp": tp}

    def resolve_mesh(self, world_size: int, node_size: int | None = None) -> mesh.MeshSizes:
        return mesh.resolve(world_size, node_size, **self.axes)

    def setup(
        self,
        model: nn.Module,
        make_optimizer: Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer],
        *,
        precision: Precision,
        device: torch.device,
        seed: int,
        micro_batch_size: int,
        max_grad_norm: float | None = None,
        activation_checkpointing: str = "none",
        activation_checkpointing_every: int = 2,
        compile: bool = False,
    ) -> None:
        """Spread a model that was built on the meta device, give it its first weights, make its optimizer."""
        self.precision, self.device, self.compile = precision, device, compile
        self.micro_batch_size, self.max_grad_norm = micro_batch_size, max_grad_norm
        self.node_size = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        self.sizes = self.resolve_mesh(dist.get_world_size(), self.node_size)
        self.mesh = mesh.device_mesh(self.sizes, device.type)
        self.data_rank = self.mesh.get_local_rank("dp")
        self.data_group = self.mesh.get_group("dp")
        checkpoint_layers(model, activation_checkpointing, activation_checkpointing_every)
        self.module = self.parallelize(model)  # the bare module: its parameter names are the canonical ones
        self.materialize(self.module, seed)
        self.model = self.wrap(self.module)
        self.optimizer = make_optimizer(self.module.named_parameters())

    # ---- what most strategies override -----------------------------------------------------------------------

    def parallelize(self, model: nn.Module) -> nn.Module:
        """Cut the model while its weights have no memory yet."""
        return model

    def materialize(self, model: nn.Module, seed: int) -> None:
        """Give the model memory and its first weights."""
        materialize(model, self.device)
        init_weights(model, seed, self.device)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap the model once its weights are there. What comes back is what is called."""
        if self.compile:
            model.compile()
        return model

    def no_sync(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Around one micro-batch: hold gradient communication back unless it is the last one."""
        return contextlib.nullcontext()

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        return self.precision.autocast(self.device.type)

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Around a pass that only prepares something: gradients, random draws and changed buffers are thrown away."""
        buffers = [b.clone() for b in self.module.buffers()]
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            yield
        self.optimizer.zero_grad(set_to_none=True)
        for buffer, before in zip(self.module.buffers(), buffers, strict=True):
            buffer.copy_(before)

    # ---- a step ----------------------------------------------------------------------------------------------

    def set_lr(self, share: float) -> float:
        """Set every group's rate to its share of the peak; give the first one for the log."""
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak_lr"] * share
        return float(self.optimizer.param_groups[0]["lr"])

    def train_step(self, inputs: Tensor, targets: Tensor) -> StepResult:
        if not self.model.training:  # walking all modules takes 0.1 ms
            self.model.train()
        loss = self.forward_backward(inputs, targets)
        return self.update(loss)

    def forward_backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Accumulate gradients over the micro-batches; give the mean loss of this data rank."""
        micro_batches = list(
            zip(inputs.split(self.micro_batch_size), targets.split(self.micro_batch_size), strict=True)
        )
        total = torch.zeros((), device=self.device)
        for i, (x, y) in enumerate(micro_batches):
            with self.no_sync(last=i == len(micro_batches) - 1):
                with self.autocast():
                    loss = self.model(x, y) / len(micro_batches)
                (loss * self.precision.scale).backward()
            total += loss.detach()
        return total

    def update(self, loss: Tensor) -> StepResult:
        """Unscale, clip, and step, unless something is not finite. All ranks see the same numbers and do the same."""
        loss = self.mean_over_data_ranks(loss)
        parameters = [p for p in self.module.parameters() if p.grad is not None]
        if self.precision.scaled:
            torch._foreach_mul_([local(p.grad) for p in parameters if p.grad is not None], 1.0 / self.precision.scale)
        norm = self.clip(parameters)
        norm = norm.to(loss.device)  # offloaded gradients have it on the CPU
        loss_value, norm_value = torch.stack([loss.float(), norm.float()]).tolist()  # the one host sync of a step
        finite = math.isfinite(loss_value) and math.isfinite(norm_value)
        if finite:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        # a loss that is not finite is no matter of the scale, which only gradients see
        overflow = math.isfinite(loss_value) and self.precision.update(finite)
        return StepResult(loss_value, norm_value, updated=finite, overflow=overflow)

    def clip(self, parameters: list[nn.Parameter]) -> Tensor:
        """Clip by one norm over the whole model, and give that norm."""
        return clip_grad_norm(parameters, self.max_grad_norm)

    @torch.no_grad()
    def eval_step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss over the global batch, without gradients."""
        self.model.eval()
        losses = []
        for x, y in zip(inputs.split(self.micro_batch_size), targets.split(self.micro_batch_size), strict=True):
            with self.autocast():
                losses.append(self.model(x, y).float())
        return self.mean_over_data_ranks(torch.stack(losses).mean())

    def mean_over_data_ranks(self, value: Tensor) -> Tensor:
        if self.sizes.dp > 1:
            dist.all_reduce(value, group=self.data_group)  # gloo has no AVG
            value = value / self.sizes.dp
        return value

    # ---- state: canonical names, whatever the layout ---------------------------------------------------------

    def state_dict(self) -> dict[str, Held]:
        """What this rank holds of every tensor to save, by canonical name: `model.NAME`, `optim.NAME.KEY`.

        The values are the live ones: a load fills them in place. All ranks call it.
        """
        init_optimizer_state(self.optimizer)
        state: dict[str, Held] = {f"model.{name}": p.detach() for name, p in self.module.named_parameters()}
        state |= {f"model.{name}": b for name, b in self.module.named_buffers()}
        for name, p in self.module.named_parameters():
            for key, value in self.optimizer.state.get(p, {}).items():
                if isinstance(value, Tensor) and value.shape == p.shape:
                    state[f"optim.{name}.{key}"] = value
        return state

    def extra_state(self) -> dict[str, Any]:
        """The state that is no tensor of a weight's shape: update counts of each weight, the loss scale.

        All ranks call it: no rank need know every weight.
        """
        counts: dict[str, dict[str, float]] = {}
        for name, p in self.module.named_parameters():
            slots = self.optimizer.state.get(p, {}).items()
            counts[name] = {k: float(v) for k, v in slots if not (isinstance(v, Tensor) and v.shape == p.shape)}
        return {"optimizer": merged(counts), "precision": self.precision.state_dict()}

    def load_state_dict(self, state: dict[str, Held], extra: dict[str, Any]) -> None:
        """After a load has filled the values of `state_dict()`: take over the rest."""
        for name, p in self.module.named_parameters():
            slots = self.optimizer.state.get(p, {})
            for key, value in extra["optimizer"].get(name, {}).items():
                if isinstance(slots.get(key), Tensor):
                    slots[key].fill_(value)
                else:
                    slots[key] = value
        self.precision.load_state_dict(extra["precision"])


    def close(self) -> None:
        """At the end of a run: let go of what would outlive the process, as files on a disk."""


# ---- functions that strategies share -------------------------------------------------------------------------


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    return tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def merged(counts: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """What all ranks together know of each weight."""
    everything: dict[str, dict[str, float]] = {}
    for part in checkpoint.gather(counts):
        for name, slots in part.items():
            everything.setdefault(name, {}).update(slots)
    return everything


def materialize(model: nn.Module, device: torch.device) -> None:
    """Give a model from the meta device memory. Weights that were one tensor under two names would come out as two."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    for tied in names.values():
        if len(tied) > 1:
            raise ValueError(
                f"model: {' and '.join(tied)} are one weight under two names, which the meta device unties\n"
                f"  fix: keep {tied[0]} only, and use it in both places of forward()"
            )
    model.to_empty(device=device)


def init_weights(model: nn.Module, seed: int, device: torch.device | None = None) -> None:
    """Give every weight and buffer the value that (seed, name) says, the same under every strategy and world size.

    Each is drawn whole, one at a time, and each rank keeps its shard; so no rank ever holds the whole model. The draws
    of a CPU and of a GPU differ, so `device` does them also for weights that are offloaded.
    """
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        init_weight(model, seed, name, tensor, device or tensor.device)


@torch.no_grad()
def init_weight(model: nn.Module, seed: int, name: str, held: Held, device: torch.device) -> None:
    """Draw one weight whole, and keep what this rank holds of it."""
    chunks = chunks_of(held)
    if not chunks:
        return
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7]))
    whole = torch.empty(chunks[0].whole_shape, dtype=chunks[0].values.dtype, device=device)
    model.init_weights(name, whole, generator)  # type: ignore[operator]
    for chunk in chunks:
        chunk.values.copy_(whole[chunk.box])


def init_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer's lazy state exist, by one step that changes nothing: zero gradients, zero rate."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    missing = {p for p in parameters if p not in optimizer.state}
    if not missing:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    gradients = [p.grad for p in parameters]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for p in parameters:
        p.grad = torch.zeros_like(p) if p in missing else None
    optimizer.step()
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for p in missing:  # that step does not count
        for value in optimizer.state[p].values():
            if isinstance(value, Tensor):
                value.zero_()


def clip_grad_norm(
    parameters: list[nn.Parameter],
    max_norm: float | None,
    counted: list[nn.Parameter] | None = None,
    num_stages: int = 1,
) -> Tensor:
    """Clip by one norm over all gradients, and give that norm, the same bits on every rank.

    torch's own function refuses gradients on different meshes. So each rank sums the squares of what it holds, every
    gradient divided by the ranks that hold the same values, and one sum over all ranks makes the norm, across shards
    and pipeline stages. `counted` are the parameters that make the norm, when a copy must not count twice.
    """
    groups: dict[int, list[Tensor]] = defaultdict(list)
    for p in parameters if counted is None else counted:
        if p.grad is not None:
            groups[_num_shards(p.grad)].append(local(p.grad))
    if num_stages == 1 and set(groups) <= {1}:  # every rank holds everything
        norm = nn.utils.get_total_norm(groups[1])
    else:
        num_ranks = dist.get_world_size() // num_stages
        squares = [nn.utils.get_total_norm(g).square() * (n / num_ranks) for n, g in groups.items()]
        device = squares[0].device if squares else local(parameters[0]).device
        total = torch.stack(squares).sum() if squares else torch.zeros((), device=device)
        dist.all_reduce(total)
        norm = total.sqrt()
    if max_norm is not None:
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        torch._foreach_mul_([local(p.grad) for p in parameters if p.grad is not None], factor)
    return norm


def _num_shards(gradient: Tensor) -> int:
    """Over how many ranks the values are cut; all other ranks of a stage hold copies."""
    if not is_dtensor(gradient):
        return 1
    dtensor: Any = gradient
    assert not any(p.is_partial() for p in dtensor.placements), "a sum that is not finished has no norm"
    return math.prod(
        n for n, p in zip(dtensor.device_mesh.shape, dtensor.placements, strict=True) if not p.is_replicate()
    )


def compile_layers(model: nn.Module) -> None:
    """Compile layer by layer: the messages between layers cannot be part of a graph."""
    for unit in model.fsdp_units():  # type: ignore[operator]
        unit.compile()


def checkpoint_layers(model: nn.Module, mode: str, every: int) -> None:
    """Recompute a layer's activations in the backward pass instead of keeping them: all layers, or every k-th.

    The layer's own forward is replaced, not the layer wrapped, so that parameter names stay canonical.
    """
    if mode == "none":
        return
    for i, unit in enumerate(model.fsdp_units()):  # type: ignore[operator]
        if mode == "full" or i % every == 0:
            unit.forward = functools.partial(recompute, unit.forward, use_reentrant=False)
