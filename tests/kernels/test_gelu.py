"""GELU whose backward pass gives the bias gradient of the layer before it: the same gradients as plain operations."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.backends.distributed import DDPOptimizer
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from dtrain.kernels import gelu
from dtrain.models import layers
from dtrain.strategies.recompute import checkpoint_layers

APPROXIMATE = ["tanh", "none"]


def gradients(module: nn.Module, run: object, x: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    # not evenly spaced: those would cancel in the sums over rows, and leave little but rounding
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x)
    (run(x) * weights).sum().backward()  # type: ignore[operator]
    assert x.grad is not None
    found = [x.grad, *(p.grad for p in module.parameters() if p.grad is not None)]
    module.zero_grad()
    return found


def largest_difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    assert len(ours) == len(theirs)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("approximate", APPROXIMATE)
def test_the_gradients_are_those_of_plain_operations(approximate: str) -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(24, 40), 2 * torch.randn(3, 5, 24)
    plain = gradients(linear, lambda x: F.gelu(linear(x), approximate=approximate)[..., :24], x)
    ours = gradients(linear, lambda x: gelu.linear_gelu(x, linear.weight, linear.bias, approximate)[..., :24], x)
    assert len(ours) == 3
    assert largest_difference(ours, plain) < 1e-6


@pytest.mark.parametrize("again", ["none", "ops", "full"])
@pytest.mark.parametrize("approximate", APPROXIMATE)
def test_in_a_compiled_layer_with_and_without_recomputation(
    approximate: str, again: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: the layer is compiled with its recomputation, and has the fused path in it."""
    torch.manual_seed(0)
    mlp, x = layers.MLP(16, approximate), 2 * torch.randn(2, 7, 16)
    plain = gradients(mlp, mlp, x)
    monkeypatch.setattr(layers, "can_fuse", lambda linear, x: True)
    torch._dynamo.reset()
    layer = copy.deepcopy(mlp)
    layer.fsdp_units = lambda: [layer]  # type: ignore[assignment]
    checkpoint_layers(layer, again, 1)
    layer.compile()
    with torch.profiler.profile() as profile:
        ours = gradients(layer, layer, x)
    assert largest_difference(ours, plain) < 1e-6
    # where all is computed again, plain operations are: torch 2.11 keeps the input of an autograd function there
    assert ("dtrain::gelu_backward" in {event.key for event in profile.key_averages()}) == (again != "full")


def test_a_frozen_bias_and_no_gradients_at_all() -> None:
    """As with adapters beside other layers, and in an evaluation."""
    torch.manual_seed(0)
    linear, x = nn.Linear(8, 12).requires_grad_(False), torch.randn(3, 8, requires_grad=True)
    run = torch.compile(lambda x: gelu.linear_gelu(x, linear.weight, linear.bias, "tanh"), backend="aot_eager")
    (ours,) = torch.autograd.grad(run(x).sum(), x)
    (plain,) = torch.autograd.grad(F.gelu(linear(x), approximate="tanh").sum(), x)
    assert largest_difference([ours], [plain]) < 1e-6
    with torch.no_grad():
        assert not run(x).requires_grad


def test_a_graph_that_ddp_cuts_at_its_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(layers.MLP(256, "tanh") for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + layer(x)
            return x

    torch.manual_seed(0)
    model, x = Layers(), torch.randn(2, 4, 256)
    plain = gradients(model, model, x)
    monkeypatch.setattr(layers, "can_fuse", lambda linear, x: True)
    torch._dynamo.reset()
    optimizers: list[Any] = []
    compile_fn = DDPOptimizer.compile_fn
    monkeypatch.setattr(
        DDPOptimizer, "compile_fn", lambda self, *args: optimizers.append(self) or compile_fn(self, *args)
    )
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        wrapped = DistributedDataParallel(model, bucket_cap_mb=1)
        wrapped.compile(backend="aot_eager")
        assert largest_difference(gradients(model, wrapped, x), plain) < 1e-6
    finally:
        dist.destroy_process_group()
    assert len(optimizers[0].buckets) > 2, "the graph was not cut"


def test_only_a_plain_layer_on_a_gpu_is_fused() -> None:
    class Adapted(nn.Linear):
        pass

    with torch._subclasses.FakeTensorMode():
        x = torch.empty(1, device="cuda")
    assert gelu.can_fuse(nn.Linear(4, 4), x)
    assert not gelu.can_fuse(Adapted(4, 4), x)
    assert not gelu.can_fuse(nn.Linear(4, 4), torch.empty(1))


@pytest.mark.gpu
@pytest.mark.parametrize("approximate", APPROXIMATE)
@pytest.mark.parametrize("shape", [(512, 256), (300, 96), (257, 1000)])
def test_the_kernel_against_float64(approximate: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x, gradient = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    ours, sums = gelu.gelu_backward(gradient, x, approximate)
    exact = torch.ops.aten.gelu_backward(gradient.double(), x.double(), approximate=approximate)
    torch.testing.assert_close(ours, exact.to(torch.bfloat16))
    torch.testing.assert_close(sums.sum(dim=0).double(), exact.sum(dim=0), rtol=1e-5, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("approximate", APPROXIMATE)
def test_a_compiled_layer_on_a_gpu(approximate: str) -> None:
    torch.manual_seed(0)
    mlp, x = layers.MLP(1600, approximate).cuda(), torch.randn(4, 128, 1600, device="cuda")
    plain = gradients(mlp, mlp, x)
    layer = copy.deepcopy(mlp)
    layer.compile()
    with torch.profiler.profile() as profile:
        ours = gradients(layer, layer, x)
    assert largest_difference(ours, plain) < 1e-5
    assert "gelu_gradient" in {event.key for event in profile.key_averages()}
