"""What attention over parts of sequences holds, against what torch allocates for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from dtrain import kernels
from dtrain.comm.context import additive_mask
from dtrain.kernels import block_attention
from dtrain.plan.layout import Layout
from dtrain.plan.ledger import total
from dtrain.plan.memory.context import context_items, mask_items, score_items
from dtrain.plan.memory.peak import memory
from dtrain.plan.model_shape import Transformer

HEADS, HEAD_DIM, LENGTH, SAMPLES = 4, 16, 256, 2  # LENGTH: of one rank's part
SHAPE = Transformer(
    num_layers=2, dim=HEADS * HEAD_DIM, num_heads=HEADS, num_kv_heads=2, hidden_dim=256, vocab_size=512,
    seq_len=2 * LENGTH, packed=True,
)  # fmt: skip
RING = Layout("fsdp", data="fsdp", cp=2, micro_batch_size=SAMPLES)


def peak(work: Callable[[], object]) -> int:
    """Bytes that torch holds at most beside what exists before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


@pytest.mark.parametrize("rows", [8, LENGTH])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_scores_take_what_is_planned(precision: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SCORE_ELEMENTS", SAMPLES * HEADS * LENGTH * rows)
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    q, d_out, out = (torch.randn(SAMPLES, HEADS, LENGTH, HEAD_DIM, dtype=dtype) for _ in range(3))
    k, v = (torch.randn(SAMPLES, 2, LENGTH, HEAD_DIM, dtype=dtype) for _ in "kv")
    documents = torch.zeros(SAMPLES, LENGTH, dtype=torch.int64)
    lse = torch.zeros(SAMPLES, HEADS, LENGTH)
    measured = peak(lambda: block_attention.gradients(d_out, q, k, v, out, lse, False, (documents, documents)))
    results = 4 * (q.numel() + k.numel() + v.numel())  # the gradients, which are not a part of it
    planned = total(score_items(SHAPE, replace(RING, precision=precision), SAMPLES * LENGTH))
    assert planned == pytest.approx(measured - results, rel=0.35)


def test_scores_do_not_grow_with_the_square_of_the_length() -> None:
    long = replace(SHAPE, seq_len=2**20)
    scores = total(score_items(long, RING, SAMPLES * 2**19))
    assert scores - total(score_items(replace(long, seq_len=2**19), RING, SAMPLES * 2**18)) < scores / 2
    assert scores < 2 * 4 * kernels.SCORE_ELEMENTS + SAMPLES * 2**19 * 3 * 4 * SHAPE.kv_dim + 1
    assert not score_items(replace(SHAPE, packed=False), RING, LENGTH), "in 16 bits a kernel computes them"
    assert score_items(replace(SHAPE, packed=False), replace(RING, precision="fp32"), LENGTH)
    assert total(context_items(SHAPE, RING, LENGTH)) > total(context_items(replace(SHAPE, packed=False), RING, LENGTH))


def test_ulysses_holds_one_mask_for_all_layers() -> None:
    layout = replace(RING, cp_kind="ulysses", precision="fp32")
    inputs = torch.zeros(SAMPLES, SHAPE.seq_len, 2, dtype=torch.int64)
    assert total(mask_items(SHAPE, layout, 1)) == additive_mask(inputs).nbytes
    assert not mask_items(SHAPE, replace(layout, precision="bf16"), 1), "a kernel computes it without a mask"
    deep = replace(SHAPE, num_layers=20)
    masks = [[i for i in memory(shape, layout) if i.name == "mask of documents"] for shape in (SHAPE, deep)]
    assert masks[0] == masks[1] and len(masks[0]) == 1
    assert not mask_items(SHAPE, RING, 1) and not mask_items(replace(SHAPE, packed=False), layout, 1)
