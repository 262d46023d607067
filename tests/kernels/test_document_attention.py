"""Attention within documents by blocks, beside a mask of all pairs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dtrain.kernels import document_attention
from dtrain.kernels.document_attention import BLOCK, block_mask
from dtrain.models.layers import attend, same_document


def documents(samples: int, length: int, cuts: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    starts = torch.zeros(samples, length, dtype=torch.int64)
    starts[:, 0] = 1
    for row in starts:
        row[torch.randperm(length, generator=generator)[:cuts]] = 1
    return starts.cumsum(dim=1)


@given(length=st.integers(1, 700), cuts=st.integers(0, 30), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=40)
def test_the_blocks_are_those_with_a_pair_and_whole_ones_have_all_pairs(length: int, cuts: int, seed: int) -> None:
    document = documents(2, length, min(cuts, length), seed)
    blocks = -(-length // BLOCK)
    pairs = torch.zeros(2, blocks * BLOCK, blocks * BLOCK, dtype=torch.bool)
    pairs[:, :length, :length] = same_document(document)[:, 0]
    pairs = pairs.unflatten(2, (blocks, BLOCK)).unflatten(1, (blocks, BLOCK)).transpose(2, 3).flatten(3)
    mask = block_mask(document)
    partly = listed(mask.kv_num_blocks, mask.kv_indices)
    whole = listed(mask.full_kv_num_blocks, mask.full_kv_indices)
    assert torch.equal(partly | whole, pairs.any(dim=3)) and not (partly & whole).any()
    assert pairs.all(dim=3)[whole].all()


def listed(counts: Tensor, places: Tensor) -> Tensor:
    """Where a list [samples, 1, queries, keys] has a block, of which only the first ones count."""
    taken = torch.arange(places.shape[-1]) < counts[..., None]
    found = torch.zeros(places.shape, dtype=torch.bool)
    return found.scatter(-1, places.long(), taken)[:, 0]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_attention_is_that_of_a_mask() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 300, 16) for heads in (4, 2, 2))
    document = documents(2, 300, 5, 0)
    out = document_attention.attention(q, k, v, document).transpose(1, 2).flatten(2)
    torch.testing.assert_close(out, attend(q, k, v, document))


@pytest.mark.gpu
@pytest.mark.parametrize("whole", [True, False])
def test_gradients_are_those_of_a_mask_on_a_gpu(whole: bool) -> None:
    """Within a compiled function, and in eager code; the mask is what attention with dropout falls back to."""
    torch.manual_seed(0)
    values = [torch.randn(2, heads, 700, 64, device="cuda") for heads in (8, 2, 2)]
    document = documents(2, 700, 6, 1).cuda()
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        q, k, v = (x.to(dtype).requires_grad_() for x in values)
        function = torch.compile(attend, dynamic=False) if whole and dtype == torch.bfloat16 else attend
        assert document_attention.supports(q) == (dtype == torch.bfloat16)
        out = function(q, k, v, document)
        found.append([out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))])
    for mine, other in zip(*found, strict=True):
        error = (mine.float() - other.float()).norm() / other.float().norm()
        assert error < 0.02
