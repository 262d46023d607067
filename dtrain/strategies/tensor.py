"""Tensor parallel: each layer's matrices sharded over ranks that compute it together; data parallel over the rest."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from torch.nn import functional as F

from dtrain.models.lora import LoRALinear, once_cast
from dtrain.strategies.base import Strategy
from dtrain.strategies.compile import compile_layers
from dtrain.strategies.fsdp import data_mesh, free_layers, shard_layers
from dtrain.util.dtensor import is_dtensor


class TensorParallel(Strategy):
    compiles = "blocks"

    def __init__(
        self,
        tp: int = -1,
        dp: int = -1,
        data: Literal["fsdp", "ddp"] = "fsdp",
        sequence_parallel: bool = False,
        loss_parallel: bool = False,
        cp: int = 1,
        cp_kind: Literal["ring", "allgather", "ulysses"] = "ring",
    ) -> None:
        super().__init__(dp=dp, tp=tp, cp=cp, cp_kind=cp_kind)
        self.data, self.sequence_parallel, self.loss_parallel = data, sequence_parallel, loss_parallel

    def parallelize(self, model: nn.Module) -> nn.Module:
        parallelize_layers(model, self.mesh["tp"], self.sequence_parallel, self.loss_parallel)
        if self.compile != "none":
            compile_layers(model)
        if self.sizes.token_ranks > 1:
            replica_size = self.sizes.token_ranks if self.data == "fsdp" else 1
            shard_layers(model, data_mesh(self.mesh, replica_size), self.precision.dtype)
        return model

    def wrap(self, model: nn.Module) -> nn.Module:
        return model

    @contextlib.contextmanager
    def no_sync(self, last: bool) -> Iterator[None]:
        if isinstance(self.model, FSDPModule):  # reduce-scatter in every pass, all-reduce only in the last
            self.model.set_requires_all_reduce(last)
        yield

    def forward_backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with loss_parallel() if self.loss_parallel else contextlib.nullcontext():
            loss = super().forward_backward(inputs, targets)
        finish_sums(self.module)
        return loss

    def eval_step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with loss_parallel() if self.loss_parallel else contextlib.nullcontext():
            loss = super().eval_step(inputs, targets)
        free_layers(self.module)
        return loss

    def free_gathered(self) -> None:
        free_layers(self.module)

    def eval_outputs(self, inputs: Tensor, targets: Tensor, see: Callable[[Tensor, Tensor], None]) -> None:
        super().eval_outputs(inputs, targets, see)
        free_layers(self.module)


def parallelize_layers(model: nn.Module, mesh: DeviceMesh, sequence_parallel: bool, loss_parallel: bool) -> None:
    """Shard the model's matrices as its tp_plan says."""
    if mesh.size() == 1:
        return
    if not hasattr(model, "tp_plan"):
        raise ValueError(
            f"strategy.tp={mesh.size()}: {type(model).__name__} does not define how to shard its layers\n"
            "  fix: add tp_plan() to the model, or strategy=fsdp, zero3 or ddp"
        )
    plan: Any = model.tp_plan(sequence_parallel, loss_parallel)  # type: ignore[operator]
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    parallelize_module(model, mesh, plan, src_data_rank=None)
    for name, p in model.named_parameters():
        p.requires_grad_(name not in frozen)  # some parallel styles set requires_grad on frozen weights
    for module in model.modules():
        if isinstance(module, LoRALinear) and is_dtensor(module.weight):
            cut_adapter(module, mesh)


def cut_adapter(linear: LoRALinear, mesh: DeviceMesh) -> None:
    """Shard an adapter like its layer, so that it needs no collective of its own in the forward pass.

    Column-wise: every rank has all of A, and the rows of B for its outputs. Row-wise: the columns of A for its inputs,
    and all of B, whose partial outputs are all-reduced with the layer's own. Each rank has only a partial gradient of a
    replicated factor; these are all-reduced at the end of the step (finish_sums, or fsdp).
    """
    by_columns = linear.weight.placements[0].is_shard(0)  # type: ignore[attr-defined]
    places = {"lora_a": Replicate() if by_columns else Shard(1), "lora_b": Shard(0) if by_columns else Replicate()}
    for name, place in places.items():
        whole = torch.empty(getattr(linear, name).shape, dtype=torch.float32, device="meta")
        cut = distribute_tensor(whole, mesh, [place], src_data_rank=None)
        linear.register_parameter(name, nn.Parameter(cut))
    linear.__class__ = CutLoRALinear


class CutLoRALinear(LoRALinear):
    """LoRALinear over tensor-parallel ranks, with the adapter's matmuls on local shards.

    With plain DTensor ops, the gradient of the inputs through A would need its own all-reduce.
    """

    def forward(self, x: Any) -> Any:
        x = once_cast(x)
        y: Any = F.linear(x, self.weight, self.bias)
        weight, a, b = (cast(Any, p) for p in (self.weight, self.lora_a, self.lora_b))
        # placements of the output, and of the gradients of x, A and B
        places: list[Any] = (
            [Shard(y.ndim - 1), Partial(), Partial(), Shard(0)]
            if weight.placements[0].is_shard(0)
            else [Partial(), Shard(x.ndim - 1), Shard(1), Partial()]
        )
        out, of_x, of_a, of_b = places
        inner = F.linear(x.to_local(grad_placements=[of_x]), a.to_local(grad_placements=[of_a])) * self.scale
        added = F.linear(inner, b.to_local(grad_placements=[of_b]))
        shape = {"shape": y.shape, "stride": y.stride()}
        return y + DTensor.from_local(added, y.device_mesh, [out], run_check=False, **shape)


def finish_sums(model: nn.Module) -> None:
    """All-reduce, in one collective, the partial gradients of weights that all tensor-parallel ranks hold.

    Under sequence parallel each rank's norm sees a part of the sequence, and DTensor leaves its gradients Partial. fsdp
    reduces them by itself.
    """
    cut: list[Any] = [p for p in model.parameters() if is_dtensor(p) and p.grad is not None]
    partial = [p for p in cut if any(placement.is_partial() for placement in p.grad.placements)]
    for p in cut:  # the gradient of a vocabulary-sharded, lookup-only embedding is full on every rank
        if p.grad.to_local().shape != p.to_local().shape:
            p.grad = p.grad.redistribute(placements=p.placements)
    if not partial:
        return
    gradients = [p.grad.to_local() for p in partial]
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat, group=partial[0].device_mesh.get_group())
    for p, part in zip(partial, flat.split([g.numel() for g in gradients]), strict=True):
        p.grad = DTensor.from_local(part.view(p.grad.to_local().shape), p.device_mesh, p.placements, run_check=False)
