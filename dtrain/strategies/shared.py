"""Functions that strategies share: first weights, optimizer state, the global norm, recomputation, compilation."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as recompute

from dtrain.agreement import distinct
from dtrain.kernels import cublaslt
from dtrain.models.parts import MLP
from dtrain.shards import Held, is_dtensor

aten, messages = torch.ops.aten, torch.ops._c10d_functional
DEAR = {  # operations whose results activation_checkpointing=ops keeps; attention's kernels are known by their name
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten._scaled_mm.default,
    aten.convolution.default, messages.all_reduce.default, messages.reduce_scatter_tensor.default,
}  # fmt: skip


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    return tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def merged(counts: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """What all ranks together know of each weight."""
    everything: dict[str, dict[str, float]] = {}
    for part in distinct(counts):
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


def set_stream(model: nn.Module, dtype: torch.dtype) -> None:
    """Say of which type the residual stream is, to a model that has one."""
    if isinstance(getattr(model, "stream", None), torch.dtype):
        model.stream = dtype  # type: ignore[assignment]


class Source(Protocol):
    """Where first weights come from."""

    def fill(self, model: nn.Module, name: str, held: Held, device: torch.device) -> None: ...


def init_weights(model: nn.Module, first: Source, device: torch.device | None = None) -> None:
    """Give every weight and buffer its first value."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        first.fill(model, name, tensor, device or tensor.device)


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


def total_norm(
    parameters: list[nn.Parameter], counted: list[nn.Parameter] | None = None, num_stages: int = 1
) -> Tensor:
    """One norm over all gradients, the same bits on every rank.

    torch's own function refuses gradients on different meshes. So each rank sums the squares of what it holds, every
    gradient divided by the ranks that hold the same values, and one sum over all ranks makes the norm, across shards
    and pipeline stages. `counted` are the parameters that make the norm, when a copy must not count twice.
    """
    groups: dict[int, list[Tensor]] = defaultdict(list)
    for p in parameters if counted is None else counted:
        if p.grad is not None:
            groups[_num_shards(p.grad)].append(local(p.grad))
    if num_stages == 1 and set(groups) <= {1}:  # every rank holds everything
        return norm_of(groups[1])
    num_ranks = dist.get_world_size() // num_stages
    squares = [norm_of(g).square() * (n / num_ranks) for n, g in groups.items()]
    device = squares[0].device if squares else local(parameters[0]).device
    total = torch.stack(squares).sum() if squares else torch.zeros((), device=device)
    if counted is not None:  # a copy that does not count adds 0, or NaN: each copy is updated with its own gradient
        is_counted = {id(p) for p in counted}
        copies = [local(p.grad) for p in parameters if id(p) not in is_counted and p.grad is not None]
        total = total + 0.0 * norm_of(copies).square() if copies else total
    dist.all_reduce(total)
    return total.sqrt()


def norm_of(tensors: list[Tensor]) -> Tensor:
    """One norm over plain tensors, in float32: torch's of bfloat16 tensors has three digits."""
    if all(t.dtype == torch.float32 for t in tensors):
        return nn.utils.get_total_norm(tensors)
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32)))


def clip_factor(norm: Tensor, max_norm: float | None) -> Tensor | None:
    """What gradients of this norm are multiplied by, so that it is at most `max_norm`."""
    return None if max_norm is None else torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def scale_gradients(parameters: list[nn.Parameter], factor: Tensor | None) -> None:
    if factor is not None:
        torch._foreach_mul_([local(p.grad) for p in parameters if p.grad is not None], factor)


def _num_shards(gradient: Tensor) -> int:
    """Over how many ranks the values are cut; all other ranks of a stage hold copies."""
    if not is_dtensor(gradient):
        return 1
    dtensor: Any = gradient
    assert not any(p.is_partial() for p in dtensor.placements), "a sum that is not finished has no norm"
    return math.prod(
        n for n, p in zip(dtensor.device_mesh.shape, dtensor.placements, strict=True) if not p.is_replicate()
    )


Compile = Literal["auto", "blocks", "whole", "none"] | bool


def compile_mode(wanted: Compile, usual: str, device: torch.device, model: nn.Module) -> str:
    """blocks, whole or none. `auto` compiles on a GPU, in the strategy's usual way, what says which its blocks are."""
    if wanted == "auto":
        wanted = device.type == "cuda" and hasattr(model, "fsdp_units")
    if wanted is True:
        return usual
    return wanted or "none"


def compile_model(model: nn.Module, mode: str) -> None:
    """Compile a model whose forward pass sends no messages: as one graph, or each block by itself.

    One graph is 1 to 2% faster on an H200: a block's last sum and the next one's norm are one kernel. Block by block
    one graph serves all blocks: gpt2-1.5b compiles in 8 s instead of 71.
    """
    if mode == "whole":
        model.compile(**compile_options())
    elif mode == "blocks":
        compile_layers(model, ends=True)


def compile_options() -> dict[str, Any]:
    """On a GPU: a pass over the graphs that gives each matrix product its fastest kernel."""
    if not torch.cuda.is_available() or not cublaslt.is_used():
        return {}
    from dtrain.kernels.products import fastest_products  # which imports the compiler: seconds

    return {"options": {"post_grad_custom_post_pass": fastest_products()}}


def compile_layers(model: nn.Module, ends: bool = False) -> None:
    """Compile layer by layer: the messages between layers cannot be part of a graph.

    `ends`: also what is before and after them, where no hook sends a message in the middle of it.
    """
    if not hasattr(model, "fsdp_units"):
        raise ValueError(
            f"compile=blocks: {type(model).__name__} does not say what its blocks are\n"
            "  fix: add fsdp_units() to the model (a list of its layers), compile=whole, or compile=none"
        )
    torch._dynamo.config.recompile_limit = 64  # a ResNet has 8 kinds of blocks, in training and in evaluation
    options = compile_options()
    for unit in model.fsdp_units():  # type: ignore[operator]
        unit.compile(**options)
    whole: Any = model
    if ends and hasattr(whole, "embedded"):
        whole.embedded = torch.compile(whole.embedded, **options)
    if ends and isinstance(getattr(whole, "norm", None), nn.Module):
        whole.norm.compile(**options)


def checkpoint_layers(model: nn.Module, mode: str, every: int) -> None:
    """Compute activations again in the backward pass instead of keeping them: those of all layers, of every k-th, or
    in all layers those that cost no matrix product, no attention and no message.

    The layer's own forward is replaced, not the layer wrapped, so that parameter names stay canonical. Before it is
    compiled: torch.compile takes the recomputation into its graph. The other way round, contexts that choose among
    operations would see none in a graph that is compiled already (pytorch issue 161889).
    """
    if mode == "none":
        return
    for i, unit in enumerate(model.fsdp_units()):  # type: ignore[operator]
        if mode != "selective" or i % every == 0:
            unit.forward = ComputedAgain(unit.forward, mode == "ops")
            # torch 2.11 keeps an autograd function's input all the same: of GPT-2's layer 10 d bytes a token, not 2 d
            for part in unit.modules() if mode != "ops" else ():
                if isinstance(part, MLP):
                    part.fuses = False


class ComputedAgain:
    """A forward pass that is computed again in the backward pass; cheap_only: less what `keep_dear` keeps.

    An object of ours: a closure would still mean the first layer after a pipeline has copied the model, and in a
    functools.partial of torch's own function torch.compile finds nothing to compile.
    """

    def __init__(self, forward: Callable[..., Any], cheap_only: bool) -> None:
        contexts = functools.partial(create_selective_checkpoint_contexts, keep_dear)
        self.forward = forward
        self.options: dict[str, Any] = {"context_fn": contexts} if cheap_only else {}

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return recompute(self.forward, *inputs, use_reentrant=False, **self.options, **named)


def keep_dear(context: Any, operation: Any, *inputs: Any, **named: Any) -> CheckpointPolicy:
    """Keep what a matrix product, attention or a sum over ranks gave; compute all else again."""
    dear = operation in DEAR or "scaled_dot_product" in str(operation)
    return CheckpointPolicy.MUST_SAVE if dear else CheckpointPolicy.PREFER_RECOMPUTE


def autocast_inside(
    forward: Callable[..., Any], autocast: Callable[[], AbstractContextManager[Any]]
) -> Callable[..., Any]:
    """A forward pass with its own autocast, for who runs forward and backward passes for us."""

    def wrapped(*inputs: Any, **named: Any) -> Any:
        with autocast():
            return forward(*inputs, **named)

    return wrapped
