"""Attention to one block of keys after the other is attention to all of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dtrain import kernels
from dtrain.kernels import block_attention

BATCH, HEADS, DIM, HALF = 2, 4, 16, 3
OWN, OTHERS = 2 * HALF, 5  # keys of this rank, one for each query; keys of another, which the second half of them sees
ALL, ROWS = slice(None), slice(HALF, None)
DOCUMENTS = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 0, 0]])
OTHER_DOCUMENTS = torch.tensor([[1, 1, 3, 3, 3], [0, 0, 0, 1, 1]])  # a query of the first sample sees none of them
BLOCKS = [(ALL, slice(OWN), True, DOCUMENTS), (ROWS, slice(OWN, None), False, OTHER_DOCUMENTS)]


def inputs(dtype: torch.dtype, kv_heads: int) -> list[Tensor]:
    """q, k, v and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(HEADS, OWN), (kv_heads, OWN + OTHERS), (kv_heads, OWN + OTHERS), (HEADS, OWN)]
    return [torch.randn(BATCH, heads, length, DIM, generator=generator).to(dtype) for heads, length in shapes]


def in_float64(tensors: list[Tensor], is_packed: bool) -> list[Tensor]:
    """The output of plain attention, and the gradients of q, k and v."""
    q, k, v, d_out = (t.double() for t in tensors)
    for t in (q, k, v):
        t.requires_grad_()
    sees = torch.ones(OWN, OWN + OTHERS, dtype=torch.bool).tril()
    sees[ROWS, OWN:] = True
    mask = sees.expand(BATCH, -1, -1)
    if is_packed:
        mask = mask & (DOCUMENTS[:, :, None] == torch.cat([DOCUMENTS, OTHER_DOCUMENTS], dim=1)[:, None, :])
    out = nn.functional.scaled_dot_product_attention(q, k, v, mask[:, None], enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), d_out)]


@torch.no_grad()
def in_blocks(tensors: list[Tensor], is_packed: bool, device: str = "cpu") -> list[Tensor]:
    """The same, block by block, as BlockByBlock in comm/context.py merges them."""
    q, k, v, d_out = (t.to(device) for t in tensors)
    out = lse = torch.empty(0)
    results: list[Any] = []
    for rows, columns, is_causal, keys in BLOCKS:
        documents = (DOCUMENTS[:, rows].to(device), keys.to(device)) if is_packed else None
        part = block_attention.attention(q[:, :, rows], k[:, :, columns], v[:, :, columns], is_causal, documents)
        if is_causal:
            out, lse = part
        else:
            out[:, :, rows], lse[:, :, rows] = block_attention.merge(out[:, :, rows], lse[:, :, rows], *part)
    dq, dk, dv = (torch.zeros(t.shape, device=device) for t in (q, k, v))
    for rows, columns, is_causal, keys in BLOCKS:
        documents = (DOCUMENTS[:, rows].to(device), keys.to(device)) if is_packed else None
        parts = block_attention.gradients(
            d_out[:, :, rows], q[:, :, rows], k[:, :, columns], v[:, :, columns], out[:, :, rows], lse[:, :, rows],
            is_causal, documents,
        )  # fmt: skip
        for total, at, part in zip((dq, dk, dv), (rows, columns, columns), parts, strict=True):
            assert part.dtype == torch.float32
            total[:, :, at] += part
    results = [out, dq, dk, dv]
    return [t.cpu().double() for t in results]


def compare(tensors: list[Tensor], is_packed: bool, tolerance: float, device: str = "cpu") -> None:
    for name, ours, expected in zip(
        ("out", "dq", "dk", "dv"), in_blocks(tensors, is_packed, device), in_float64(tensors, is_packed), strict=True
    ):
        torch.testing.assert_close(
            ours, expected, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("way", ["kernel", "plain", "documents"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_merged_blocks_are_attention_to_all_keys(
    kv_heads: int, way: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "plain":
        monkeypatch.setattr(block_attention, "has_kernel", lambda *_: False)
    compare(inputs(dtype, kv_heads), way == "documents", 1e-6 if dtype == torch.float32 else 4e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("way", ["kernel", "plain", "documents"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_so_they_are_on_a_gpu(kv_heads: int, way: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second block has half of the queries: the log-sum-exp of these is no contiguous tensor."""
    if way == "plain":
        monkeypatch.setattr(block_attention, "has_kernel", lambda *_: False)
    compare(inputs(dtype, kv_heads), way == "documents", 1e-5 if dtype == torch.float32 else 4e-2, "cuda")


def test_the_kernel_gets_a_contiguous_log_sum_exp(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA kernel of the backward pass reads it by its address alone."""
    name = "_scaled_dot_product_flash_attention_for_cpu"
    given: list[Tensor] = []

    def backward(*arguments: Any) -> Any:
        given.append(arguments[5])
        return getattr(torch.ops.aten, f"{name}_backward")(*arguments)

    aten = SimpleNamespace(**{name: getattr(torch.ops.aten, name), f"{name}_backward": backward})
    monkeypatch.setattr(block_attention, "aten", aten)
    compare(inputs(torch.float32, 4), False, 1e-6)
    assert [lse.shape for lse in given] == [(BATCH, HEADS, OWN), (BATCH, HEADS, HALF)]
    assert all(lse.is_contiguous() for lse in given)


class Largest(TorchDispatchMode):
    """Elements of the largest result of an operation."""

    elements = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple) else (result,):
            self.elements = max(self.elements, tensor.numel() if isinstance(tensor, Tensor) else 0)
        return result


def test_scores_are_computed_for_some_queries_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, rows, longer = inputs(torch.float32, 2), 2, 12
    monkeypatch.setattr(kernels, "SCORE_ELEMENTS", rows * BATCH * HEADS * OWN)
    compare(tensors, True, 1e-6)
    q, k, v = (t[:, :, :OWN].repeat(1, 1, longer, 1) for t in tensors[:3])
    documents = DOCUMENTS.repeat(1, longer)
    monkeypatch.setattr(kernels, "SCORE_ELEMENTS", rows * BATCH * HEADS * q.shape[2])
    with Largest() as largest, torch.no_grad():
        out, lse = block_attention.attention(q, k, v, True, (documents, documents))
        block_attention.gradients(out, q, k, v, out, lse, True, (documents, documents))
    assert largest.elements <= max(q.numel(), kernels.SCORE_ELEMENTS) < BATCH * HEADS * q.shape[2] ** 2 / 4
