"""Fully sharded data parallel (FSDP2): weights, gradients and optimizer state sharded over the data ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from dtrain.comm import compress as compression
from dtrain.errors import bad
from dtrain.runs.source_lines import at_attribute
from dtrain.strategies.base import Strategy
from dtrain.strategies.compile import compile_layers
from dtrain.strategies.materialize import init_weights, materialize


class FSDP(Strategy):
    compiles = "blocks"

    def __init__(
        self,
        dp: int = -1,
        sharding: Literal["full", "grad_op", "hybrid"] = "full",
        replica_size: int | None = None,
        offload: Literal["none", "cpu"] = "none",
        forward_prefetch: int = 0,
        backward_prefetch: int = 1,
        compress: Literal["none", "fp16", "bf16", "int8", "powersgd", "topk", "onebit"] = "none",
        compress_ratio: float = 0.01,
        compress_warmup: int = 0,
        cp: int = 1,
        cp_kind: Literal["ring", "allgather", "ulysses"] = "ring",
    ) -> None:
        super().__init__(dp=dp, cp=cp, cp_kind=cp_kind)
        self.compress, self.compress_ratio, self.compress_warmup = compress, compress_ratio, compress_warmup
        self.tolerance = compression.TOLERANCES.get(compress, self.tolerance)
        self.sharding, self.replica_size, self.offload = sharding, replica_size, offload
        self.forward_prefetch, self.backward_prefetch = forward_prefetch, backward_prefetch

    def for_world(self, world_size: int) -> Strategy:
        sharded = type(self) is not FSDP or world_size > 1 or self.offload != "none"
        return self if sharded else Strategy()

    def parallelize(self, model: nn.Module) -> nn.Module:
        if self.compile != "none":
            compile_layers(model, ends=True)
        replica_size = (self.replica_size or self.node_size) if self.sharding == "hybrid" else self.sizes.token_ranks
        mesh = data_mesh(self.mesh, replica_size)
        self.replicas = mesh.get_group("replicate") if mesh.ndim > 1 else None
        units = shard_layers(
            model,
            mesh,
            self.precision.dtype,
            reshard_after_forward=self.sharding != "grad_op",
            # direct GPU access needs pinned pages; without a GPU, pinning has no use
            offload=CPUOffloadPolicy(pin_memory=self.device.type == "cuda") if self.offload == "cpu" else None,
        )
        for i, unit in enumerate(units):
            unit.set_modules_to_forward_prefetch(units[i + 1 : i + 1 + self.forward_prefetch])
            unit.set_modules_to_backward_prefetch(units[max(0, i - self.backward_prefetch) : i][::-1])
        return model

    def materialize(self, model: nn.Module) -> None:
        materialize(model, torch.device("cpu") if self.offload == "cpu" else self.device)
        init_weights(model, self.first, self.device)

    def wrap(self, model: nn.Module) -> nn.Module:
        if self.compress != "none" and self.replicas is not None:
            self.compressor = compression.make(
                self.compress, dict(model.named_parameters()), self.replicas, self.device,
                ratio=self.compress_ratio, warmup=self.compress_warmup,
            )  # fmt: skip
            compression.register_fsdp_hooks(model, self.compressor)
        return model

    @contextlib.contextmanager
    def no_sync(self, last: bool) -> Iterator[None]:
        assert isinstance(self.model, FSDPModule)
        if self.sharding == "grad_op":  # full weights stay in memory, so full gradients may, too
            self.model.set_requires_gradient_sync(last)
        else:  # reduce-scatter in every pass: full fp32 gradients would be larger than all shards
            self.model.set_requires_all_reduce(last)  # only hybrid's replicas defer their all-reduce
        yield

    def eval_step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = super().eval_step(inputs, targets)
        free_layers(self.module)
        return loss

    def free_gathered(self) -> None:
        free_layers(self.module)

    def eval_outputs(self, inputs: Tensor, targets: Tensor, see: Callable[[Tensor, Tensor], None]) -> None:
        super().eval_outputs(inputs, targets, see)
        free_layers(self.module)


# ---- shared with the strategies that add tensor or pipeline parallel to it -----------------------------------


def data_mesh(mesh: DeviceMesh, replica_size: int) -> DeviceMesh:
    """Return the data-parallel axis, split into groups of neighbouring ranks that together hold one copy of the model.

    One group: everything is sharded over all data ranks. Groups of one: every rank holds a full copy, as under ddp.
    """
    size = mesh["dp"].size()
    if replica_size == size:
        return mesh["dp"]
    names, axes = ("replicate", "shard"), mesh.mesh_dim_names
    assert axes is not None
    # by index: torch 2.11 refuses every existing name (pytorch issue 176443)
    return mesh._unflatten(axes.index("dp"), (size // replica_size, replica_size), names)[names]


def shard_layers(
    model: nn.Module,
    mesh: DeviceMesh,
    dtype: torch.dtype,
    reshard_after_forward: bool = True,
    offload: OffloadPolicy | None = None,
) -> list[FSDPModule]:
    """Shard each layer, and then the rest, over the data ranks; return the layers."""
    if not hasattr(model, "fsdp_units"):
        raise ValueError(
            f"strategy=fsdp: {type(model).__name__} does not define what to gather at a time\n"
            "  fix: add fsdp_units() to the model (a list of its layers), or strategy=ddp"
        )
    scalars = [name for name, p in model.named_parameters() if p.dim() == 0]
    if scalars:
        rule = f"{scalars[0]} is a single number, without a dimension, which fsdp cannot divide"
        fix = "give it one, nn.Parameter(torch.ones(1)); or strategy=ddp"
        raise at_attribute(bad("model", type(model).__name__, rule, fix), model, scalars[0])
    if dtype == torch.float32:
        policy = MixedPrecisionPolicy()
    else:
        # All-gathers use 16 bits, half the traffic; gradients are reduced in fp32. Activations are left to autocast, as
        # under ddp: matmuls and the residual stream in 16 bits, norms in fp32.
        policy = MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "offload_policy": offload or OffloadPolicy()}
    layers: list[Any] = model.fsdp_units()  # type: ignore[operator]
    units = [unit for unit in layers if not shares_weights(model, unit)]
    for unit in (u for u in units if u is not model):  # a model without layers is one unit, sharded below
        fully_shard(unit, reshard_after_forward=reshard_after_forward, **options)
    # The rest is used last in one pass and first in the next, so it is neither freed between them nor gathered twice.
    fully_shard(model, reshard_after_forward=False, **options)
    return units


def shares_weights(model: nn.Module, unit: nn.Module) -> bool:
    """Return whether a layer has a weight, or a module, that is also outside: it is gathered with the rest."""
    outside, waiting = {unit}, [model] * (model is not unit)
    while waiting:
        module = waiting.pop()
        outside.add(module)
        waiting += [child for child in module.children() if child not in outside]
    elsewhere = {p for module in outside - {unit} for p in module._parameters.values()}
    return any(p in elsewhere for p in unit.parameters())


def free_layers(model: nn.Module) -> None:
    """Free all-gathered layers: nothing else does after an evaluation, and a save would take them for the weights."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
