"""Context parallel: each rank computes a part of every sequence, and the results are those of one process."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtrain.comm.context import Kind, Sequences
from dtrain.kernels import block_attention
from dtrain.models.layers import IGNORED
from dtrain.runs.folder import latest_checkpoint
from tests.models.test_packed import MODELS, pack
from tests.world import losses, make_run, spawn, summary, train

KINDS: tuple[Kind, ...] = ("ring", "allgather", "ulysses")
LENGTH = 32


# ---- attention to one block of keys after the other ------------------------------------------------------------


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("has_kernel", [True, False])
def test_merged_blocks_are_attention_to_all_keys(
    kv_heads: int, is_masked: bool, has_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_kernel:
        monkeypatch.setattr(block_attention, "has_kernel", lambda *_: False)
    torch.manual_seed(0)
    q = torch.randn(2, 4, 6, 8, requires_grad=True)
    k, v = (torch.randn(2, kv_heads, 11, 8, requires_grad=True) for _ in "kv")
    seen = torch.rand(2, 1, 6, 5) > 0.5 if is_masked else torch.ones(2, 1, 6, 5, dtype=torch.bool)
    seen[0, 0, 2] = not is_masked  # a query that sees no key of the second block
    causal = torch.ones(6, 6, dtype=torch.bool).tril().expand(2, 1, 6, 6)
    mask = torch.cat([causal, seen], dim=-1)
    whole = nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    d_out = torch.randn_like(whole)
    whole.backward(d_out)

    with torch.no_grad():
        blocks = [(slice(6), True, None), (slice(6, 11), False, seen if is_masked else None)]
        parts = [block_attention.attention(q, k[:, :, at], v[:, :, at], *how) for at, *how in blocks]
        out, total = block_attention.merge(*parts[0], *parts[1])
        torch.testing.assert_close(out, whole.detach(), rtol=0, atol=1e-6)
        found = [block_attention.gradients(d_out, q, k[:, :, at], v[:, :, at], out, total, *how) for at, *how in blocks]
    for gradient, p in zip(
        (found[0][0] + found[1][0], *(torch.cat(g, dim=2) for g in list(zip(*found, strict=True))[1:])),
        (q, k, v),
        strict=True,
    ):
        assert p.grad is not None
        torch.testing.assert_close(gradient, p.grad, rtol=0, atol=1e-6)


# ---- whole models ------------------------------------------------------------------------------------------------


def test_losses_and_gradients_are_those_of_one_process(tmp_path: Path) -> None:
    """2 and 4 ranks, each kind, both models, with and without documents, and with targets that lie unevenly."""
    spawn(4, compare_with_whole_sequences)


def compare_with_whole_sequences() -> None:
    groups: dict[int, dist.ProcessGroup | None] = {2: dist.new_subgroups(2)[0], 4: dist.group.WORLD}
    tokens, y = torch.randint(0, 50, (2, 2, LENGTH), generator=torch.Generator().manual_seed(0))
    y[0, 3:] = IGNORED  # so there are parts without a target
    y[1, 20:] = IGNORED
    for model, inputs in product(MODELS.values(), (tokens, pack(tokens, [3, 9, 1, 12, 7]))):
        of_one, outputs = results(model, model(inputs, y)), model(inputs).detach()
        for (size, group), kind in product(groups.items(), KINDS):
            if kind == "ulysses" and size == 4 and model is MODELS["llama"]:
                continue  # it has two heads of keys
            assert group is not None
            where = f"{type(model).__name__} {tuple(inputs.shape)} cp={size} {kind}"
            sequences = Sequences(group, kind)
            targets = sequences.tokens(y)
            share = (targets != IGNORED).sum() / (y != IGNORED).sum()
            loss = model(inputs, targets, cache=sequences)
            found = results(model, torch.where(share > 0, loss, 0.0) * share)
            whole = torch.cat([tensor.flatten() for tensor in found.values()])
            dist.all_reduce(whole, group=group)
            for name, part in zip(found, whole.split([t.numel() for t in found.values()]), strict=True):
                expected = of_one[name].flatten()
                assert (part - expected).norm() < 1e-5 * max(1.0, float(expected.norm())), (where, name)
            if model is MODELS["llama"] and size == 2:
                with torch.no_grad():
                    all_outputs = sequences.whole(model(inputs, cache=sequences))
                torch.testing.assert_close(all_outputs, outputs, rtol=0, atol=1e-5, msg=where)


def results(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """The loss and each parameter's gradient."""
    model.zero_grad()
    loss.backward()
    return {"loss": loss.detach().clone()} | {
        n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }


# ---- runs: `dtrain verify` has more ------------------------------------------------------------------------------

OPTIONS = ["train.steps=8", "train.micro_batch_size=2", "train.eval_batches=1", "schedule.warmup_steps=2"]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = make_run(tmp_path_factory.mktemp("one"), *OPTIONS, "cluster.processes=1")
    assert train(run, 1) == [0]
    return run


RING = ["strategy=fsdp", "strategy.cp=2", "cluster.processes=2"]
MOVES = [
    (RING, ["strategy=ddp", "cluster.processes=1"]),
    (["strategy=ddp", "cluster.processes=1"], [*RING, "strategy.cp_kind=ulysses"]),
    (RING, ["strategy=3d", "cluster.processes=4"]),
    (["strategy=zero3", "cluster.processes=2"], ["strategy=fsdp", "strategy.cp=2", "cluster.processes=4"]),
]


@pytest.mark.parametrize(("source", "target"), MOVES, ids=["ring-ddp", "ddp-ulysses", "ring-3d", "zero3-ring"])
def test_a_checkpoint_moves_to_and_from_other_layouts(
    source: list[str], target: list[str], reference: Path, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", *OPTIONS, *source, "train.stop_after=4")
    assert set(train(run, size_of(source))) == {0}
    assert latest_checkpoint(run)
    make_run(run, *OPTIONS, *target)
    assert set(train(run, size_of(target))) == {0}
    ours, expected = losses(run), losses(reference)
    assert len(ours) == 8 and max(abs(ours[s] - expected[s]) for s in expected) < 1e-5
    assert abs(summary(run)["val_loss"] - summary(reference)["val_loss"]) < 1e-5


def size_of(options: list[str]) -> int:
    return int(next(o for o in options if o.startswith("cluster.processes="))[-1])
