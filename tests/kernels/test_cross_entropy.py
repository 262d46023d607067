from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from dtrain import kernels
from dtrain.kernels import CHUNK_ELEMENTS, chunk_rows, cross_entropy, cublaslt
from dtrain.kernels.cross_entropy import IGNORED, linear_cross_entropy
from tests.world import losses, make_run, spawn, train


def case(rows: int, vocabulary: int, dim: int = 16, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, rows, dim, generator=generator, requires_grad=True)
    weight = torch.randn(vocabulary, dim, generator=generator, requires_grad=True)
    bias = torch.randn(vocabulary, generator=generator, requires_grad=True)
    targets = torch.randint(0, vocabulary, (1, rows), generator=generator)
    targets[0, 1::3] = IGNORED
    return x, weight, bias, targets


def plain(x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> Tensor:
    return F.cross_entropy(F.linear(x, weight, bias).flatten(0, 1), targets.flatten())


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 700), st.integers(2, 300), st.booleans(), st.sampled_from([2**12, 2**28]))
def test_equals_the_plain_form_with_its_gradients(rows: int, vocabulary: int, biased: bool, chunk: int) -> None:
    x, weight, bias, targets = case(rows, vocabulary)
    used = bias if biased else None
    leaves = [x, weight, *([bias] if biased else [])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "CHUNK_ELEMENTS", chunk)
        loss = linear_cross_entropy(x, weight, targets, used)
    wanted = plain(x, weight, targets, used)
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=1e-6)
    ours, theirs = (torch.autograd.grad(3.0 * value, leaves) for value in (loss, wanted))
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-6)


@given(st.integers(1, 10**6), st.integers(1, 300_000))
def test_chunks_are_whole_tiles_that_fit(rows: int, vocabulary: int) -> None:
    size = chunk_rows(rows, vocabulary)
    assert size % 128 == 0
    most = max(1, CHUNK_ELEMENTS // vocabulary)  # rows that fit
    least = max(1, -(-rows // max(128, most // 128 * 128)))
    even = rows % size == 0
    assert -(-rows // size) <= (least * 4 // 3 if even else least), "no chunk more than it takes to be equal"
    assert size * vocabulary <= CHUNK_ELEMENTS + 127 * vocabulary, "no more than a tile over"


def test_one_chunk_of_logits_is_alive_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the planner counts. The next one made before the last one is let go was 0.8 GiB of gpt2's peak."""
    made: list[weakref.ref[Tensor]] = []
    make = cross_entropy.logits_of

    def counted(*args: Any) -> Tensor:
        assert all(chunk() is None for chunk in made), "the last chunk is still held"
        logits = make(*args)
        made.append(weakref.ref(logits))
        return logits

    monkeypatch.setattr(cross_entropy, "logits_of", counted)
    monkeypatch.setattr(kernels, "CHUNK_ELEMENTS", 2**12)
    x, weight, _, targets = case(700, 50)
    linear_cross_entropy(x, weight, targets).backward()
    assert len(made) > 3


def test_frozen_weights_get_no_gradient_and_evaluation_none_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, _, targets = case(200, 50)
    linear_cross_entropy(x, weight.detach(), targets).backward()
    assert x.grad is not None

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a product for a gradient that nobody wants")

    for product in ("product", "add_product"):
        monkeypatch.setattr(cross_entropy, product, never)
    with torch.no_grad():
        torch.testing.assert_close(linear_cross_entropy(x, weight, targets), plain(x, weight, targets, None))


@pytest.mark.parametrize("target", [-1, 50, 999])
def test_a_target_that_is_no_token_is_not_learnt_as_another(target: int) -> None:
    x, weight, _, targets = case(200, 50)
    targets[0, 3] = target
    assert linear_cross_entropy(x, weight, targets).isnan()


def test_under_autocast_it_is_the_product_of_16_bits_and_a_loss_of_32() -> None:
    x, weight, _, targets = case(300, 100)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(x, weight, targets)
        wanted = F.cross_entropy(F.linear(x, weight).flatten(0, 1).float(), targets.flatten())
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=1e-6)
    rounded = [t.detach().bfloat16().double().requires_grad_() for t in (x, weight)]
    exact = torch.autograd.grad(plain(rounded[0], rounded[1], targets, None), rounded)
    for mine, true in zip(torch.autograd.grad(loss, [x, weight]), exact, strict=True):
        assert mine.dtype == torch.float32
        assert (mine - true).norm() / true.norm() < 6e-3, "roundings to 16 bits, of the logits, too"
        assert abs(mine.norm() / true.norm() - 1) < 5e-4, "and no common factor, such as 1/n in 16 bits"


def test_a_gradient_of_16_bits_is_rounded_once() -> None:
    """As under fsdp, whose weights are 16 bits wide: float32 sum times float32 factor, and that to 16 bits."""
    total, factor = torch.randn(64, 32) * 100, torch.tensor(1 / 3)
    scaled = cross_entropy.times(total, factor, torch.bfloat16)
    assert scaled.dtype == torch.bfloat16 and torch.equal(scaled, (total * factor).bfloat16())
    assert torch.equal(cross_entropy.times(total.bfloat16(), factor, torch.float32), total.bfloat16().float() * factor)


def test_may_be_asked_for_its_gradients_twice() -> None:
    x, weight, _, targets = case(100, 40)
    loss = linear_cross_entropy(x, weight, targets)
    first = torch.autograd.grad(loss, x, retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(loss, x)[0], first)


def cut_by_the_vocabulary() -> None:
    """Three ranks hold uneven parts of the matrix; the loss and all gradients are those of one."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x, weight, bias, targets = case(150, 65)
    parts: list[Any] = [
        distribute_tensor(t.detach(), mesh, [place]).requires_grad_()
        for t, place in ((x, Replicate()), (weight, Shard(0)), (bias, Shard(0)))
    ]
    loss = linear_cross_entropy(parts[0], parts[1], targets, parts[2])
    wanted = plain(x, weight, targets, bias)
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=1e-6)
    theirs = torch.autograd.grad(wanted, [x, weight, bias])
    loss.backward()
    for part, reference in zip(parts, theirs, strict=True):
        torch.testing.assert_close(part.grad.full_tensor(), reference, rtol=1e-4, atol=1e-6)


def test_a_vocabulary_over_three_ranks() -> None:
    spawn(3, cut_by_the_vocabulary)


LAYOUTS = {
    "one process": (1, []),
    "fsdp": (2, ["strategy=fsdp"]),
    "zero2": (2, ["strategy=zero2"]),
    "zero3": (2, ["strategy=zero3"]),
    "the last pipeline stage": (2, ["strategy=pipeline", "train.micro_batch_size=1"]),
    "a pipeline that splits its backward pass": (
        2, ["strategy=pipeline", "strategy.schedule=zbv", "train.micro_batch_size=1"],
    ),
    "logits cut over tensor ranks": (2, ["strategy=tensor", "strategy.tp=2", "strategy.loss_parallel=true"]),
    "and the sequence": (
        2, ["strategy=tensor", "strategy.tp=2", "strategy.loss_parallel=true", "strategy.sequence_parallel=true"],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    run = make_run(tmp_path_factory.mktemp("plain"), "fused_loss=false")
    assert train(run, 1) == [0]
    return losses(run)


@pytest.mark.parametrize("name", LAYOUTS)
def test_training_is_the_same_with_it(name: str, reference: dict[int, float], tmp_path: Path) -> None:
    size, words = LAYOUTS[name]
    run = make_run(tmp_path, "fused_loss=true", *words)
    assert train(run, size) == [0] * size
    assert max(abs(losses(run)[s] - reference[s]) for s in reference) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("vocabulary, dtype", [(50304, torch.bfloat16), (1000, torch.float16), (128256, torch.float32)])
def test_on_a_gpu_one_kernel_does_it(
    vocabulary: int, dtype: torch.dtype, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three chunks: the last is shorter, and products are large and frequent enough that their kernels are chosen."""
    if chunks > 1:
        monkeypatch.setattr(kernels, "CHUNK_ELEMENTS", 1100 * vocabulary)
        monkeypatch.setattr(cublaslt, "LARGE", 1.0)
        monkeypatch.setattr(cublaslt, "MEETINGS", 1)
    assert -(-3000 // chunk_rows(3000, vocabulary)) == chunks
    torch.manual_seed(0)
    x = torch.randn(3000, 256, device="cuda", dtype=dtype, requires_grad=True)
    weight = (0.05 * torch.randn(vocabulary, 256, device="cuda", dtype=dtype)).requires_grad_()
    targets = torch.randint(0, vocabulary, (3000,), device="cuda")
    targets[::7] = IGNORED
    loss = linear_cross_entropy(x, weight, targets)
    wanted = F.cross_entropy(F.linear(x, weight).float(), targets)
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=1e-6)
    doubles = [t.detach().double().requires_grad_() for t in (x, weight)]
    best = torch.autograd.grad(F.cross_entropy(F.linear(*doubles), targets), doubles)
    ours, theirs = (torch.autograd.grad(value, [x, weight]) for value in (loss, wanted))
    for mine, usual, true in zip(ours, theirs, best, strict=True):
        error, allowed = ((g.double() - true).norm() / true.norm() for g in (mine, usual))
        assert error <= 1.2 * allowed + 1e-6, "no worse than torch's own"
