"""GELU whose backward pass gives the bias gradient of the layer before it: the same gradients as plain operations."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dtrain.kernels import gelu
from dtrain.models import parts
from dtrain.strategies.shared import checkpoint_layers, keep_rows_in_registers

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
    mlp, x = parts.MLP(16, approximate), 2 * torch.randn(2, 7, 16)
    plain = gradients(mlp, mlp, x)
    monkeypatch.setattr(parts, "can_fuse", lambda linear, x: True)
    torch._dynamo.reset()
    layer = copy.deepcopy(mlp)
    layer.fsdp_units = lambda: [layer]  # type: ignore[assignment]
    checkpoint_layers(layer, again, 1)
    keep_rows_in_registers()
    layer.compile()
    with torch.profiler.profile() as profile:
        ours = gradients(layer, layer, x)
    assert largest_difference(ours, plain) < 1e-6
    assert "dtrain::gelu_backward" in {event.key for event in profile.key_averages()}


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
    mlp, x = parts.MLP(1600, approximate).cuda(), torch.randn(4, 128, 1600, device="cuda")
    plain = gradients(mlp, mlp, x)
    layer = copy.deepcopy(mlp)
    layer.compile()
    assert largest_difference(gradients(layer, layer, x), plain) < 1e-5
