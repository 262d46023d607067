"""Rounding by chance, and the kernel that steps all parameters at once; the kernel itself on a GPU."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dtrain.kernels import stochastic_rounding
from dtrain.kernels.stochastic_rounding import Place, place_of
from dtrain.optim.adamw import AdamW, Moments

CPU = torch.device("cpu")
SHAPES = [(64, 100), (3,), (17, 33), (2048,), (3 * 4096,), (5, 5, 5), (0, 4), (1,)]
MATRICES = [(64, 96), (129, 32), (40, 160), (7,)]  # what int8 can hold, the last one excepted


def words(*names: int) -> list[Tensor]:
    return [torch.tensor([n]) for n in names]


@pytest.mark.parametrize("counter, key, answer", [
    ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, 0xFFFFFFFFFFFFFFFF, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), 0x299F31D0A4093822,
     (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
])  # fmt: skip
def test_philox_gives_its_authors_known_answers(counter: Any, key: int, answer: Any) -> None:
    assert tuple(int(w) for w in stochastic_rounding.philox(key, tuple(words(*counter)))) == answer  # type: ignore[arg-type]


def test_a_part_gets_the_random_words_of_its_place() -> None:
    """A shard of rows, or of columns of a matrix, rounds as the whole tensor does there."""
    whole = stochastic_rounding.words(1000, seed=7, step=3, tensor=2, device=CPU)
    rows = place_of((10, 100), (4, 0), (3, 100))
    assert torch.equal(stochastic_rounding.words(300, 7, 3, 2, CPU, rows), whole[400:700])
    assert torch.equal(stochastic_rounding.words(100, 7, 3, 2, CPU, rows, begin=100), whole[500:600]), "in pieces"
    for columns in (slice(0, 40), slice(40, 60), slice(60, 100)):
        box = place_of((10, 100), (4, columns.start), (3, columns.stop - columns.start))
        mine = whole.view(10, 100)[4:7, columns].reshape(-1)
        assert torch.equal(stochastic_rounding.words(len(mine), 7, 3, 2, CPU, box), mine)
        assert torch.equal(stochastic_rounding.words(8, 7, 3, 2, CPU, box, begin=24), mine[24:32])
    for other in ({"seed": 8}, {"step": 4}, {"tensor": 1}):
        changed = stochastic_rounding.words(1000, **{"seed": 7, "step": 3, "tensor": 2} | other, device=CPU)
        assert (changed == whole).sum() < 2
    assert int(whole.min()) >= 0 and int(whole.max()) < 2**32 and len(whole.unique()) > 990


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_rounding_by_chance_is_right_in_the_mean(sign: float) -> None:
    """0.3 of the way from 1 to its upper neighbour is that neighbour in 30 of 100 cases."""
    x = torch.full((200_000,), sign * (1 + 0.3 * 2**-7))
    noise = stochastic_rounding.words(len(x), 1, 1, 0, CPU) & 0xFFFF
    rounded = stochastic_rounding.rounded(x, noise).float()
    assert set(rounded.abs().unique().tolist()) == {1.0, 1 + 2**-7}
    assert (rounded.abs() > 1).float().mean().item() == pytest.approx(0.3, abs=0.01)


def test_what_bfloat16_can_hold_is_left_alone_and_nan_stays_nan() -> None:
    values = torch.tensor([0.0, 1.0, -2.5, 3e38, float("inf"), float("-inf")]).bfloat16()
    most = torch.full((len(values),), 0xFFFF)
    assert torch.equal(stochastic_rounding.rounded(values.float(), most), values)
    nan = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    assert stochastic_rounding.rounded(nan, most[:2]).isnan().all()


# ---- on a GPU ------------------------------------------------------------------------------------------------


def pair(kinds: list[torch.dtype], device: str, moments: Moments | None = None) -> tuple[AdamW, list[nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    parameters = [
        nn.Parameter(torch.randn(shape, generator=generator).to(device, kinds[i % len(kinds)]))
        for i, shape in enumerate(MATRICES if moments else SHAPES)
    ]
    groups = [{"params": parameters[::2], "weight_decay": 0.1}, {"params": parameters[1::2], "weight_decay": 0.0}]
    optimizer = AdamW(groups, lr=1e-2, betas=(0.9, 0.999), fused=device == "cuda")
    optimizer.moments = moments
    return optimizer, parameters


def give(parameters: list[nn.Parameter], step: int, apart: bool) -> None:
    """The gradients of a step; apart: as views of one buffer, at places that no wide load can begin at."""
    generator = torch.Generator().manual_seed(step)
    buffer = torch.empty(1 + sum(p.numel() for p in parameters), dtype=parameters[0].dtype, device=parameters[0].device)
    at = 1
    for p in parameters:
        gradient = (0.1 * torch.randn(p.shape, generator=generator)).to(p)
        if apart and p.dtype == buffer.dtype:
            gradient = buffer[at : at + p.numel()].view(p.shape).copy_(gradient)
            at += p.numel()
        p.grad = gradient


@pytest.mark.gpu
@pytest.mark.parametrize("apart", [False, True])
def test_the_kernel_is_torchs_adamw_in_float64(apart: bool) -> None:
    ours, parameters = pair([torch.float32], "cuda")
    theirs, wide = pair([torch.float64], "cuda")
    exact = torch.optim.AdamW(theirs.param_groups, lr=1e-2, betas=(0.9, 0.999))
    for step in range(20):
        rate = 1e-2 * (1 + step % 3)
        for group in [*ours.param_groups, *exact.param_groups]:
            group["lr"] = rate
        give(parameters, step, apart)
        for p, w in zip(parameters, wide, strict=True):
            assert p.grad is not None
            w.grad = p.grad.double() * 0.25
        finite = torch.tensor(step != 7, device="cuda")
        ours.step_if(finite, torch.tensor(0.25, device="cuda"))
        if step != 7:
            exact.step()
    for p, w in zip(parameters, wide, strict=True):
        torch.testing.assert_close(p.double(), w, rtol=1e-5, atol=1e-6)
        mine, other = ours.state[p], exact.state[w]
        assert mine["step"].item() == other["step"].item() == 19 and mine["step"].is_cuda
        torch.testing.assert_close(mine["exp_avg"].double(), other["exp_avg"], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(mine["exp_avg_sq"].double(), other["exp_avg_sq"], rtol=1e-5, atol=1e-9)


@pytest.mark.gpu
def test_a_step_that_is_not_finite_changes_nothing() -> None:
    optimizer, parameters = pair([torch.float32, torch.bfloat16], "cuda")
    give(parameters, 0, False)
    optimizer.step()
    before = [t.clone() for p in parameters for t in (p.detach(), *optimizer.state[p].values())]
    give(parameters, 1, False)
    optimizer.step_if(torch.tensor(False, device="cuda"), torch.tensor(float("nan"), device="cuda"))
    after = [t for p in parameters for t in (p.detach(), *optimizer.state[p].values())]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("moments", [None, "fp32", "bf16", "int8"])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_the_kernel_rounds_as_plain_operations_do(kind: torch.dtype, moments: Moments | None) -> None:
    """The random words are the same to the bit; a sum of float32 may differ in its last, and then so may a result."""
    ours, parameters = pair([kind], "cuda", moments)
    theirs, others = pair([kind], "cpu", moments)
    ours.seed = theirs.seed = 2**40 + 12345
    for step in range(3):
        give(parameters, step, apart=step == 1)
        for p, q in zip(parameters, others, strict=True):
            assert p.grad is not None
            q.grad = p.grad.cpu()
        ours.step()
        theirs.step()
    for p, q in zip(parameters, others, strict=True):
        for key, mine, other in [("", p, q), *((k, t, theirs.state[q][k]) for k, t in ours.state[p].items())]:
            assert mine.dtype == other.dtype, key
            if mine.dtype == torch.float32:
                # a last bit in float32 may decide how a moment is rounded to int8
                apart = ~torch.isclose(mine.cpu(), other, rtol=1e-5, atol=1e-6)
                assert apart.sum() <= (mine.numel() // 1000 if moments == "int8" else 0)
            elif mine.numel():
                assert (mine.cpu() == other).float().mean().item() > 0.998, key
    assert ours.is_on_device()


@pytest.mark.gpu
def test_the_launch_shape_does_not_change_what_is_rounded() -> None:
    from dtrain.kernels.adamw import Batch

    results = []
    for block, warps in ((2048, 8), (1024, 4)):
        optimizer, parameters = pair([torch.bfloat16], "cuda")
        give(parameters, 0, False)
        plan = optimizer._plan()
        steps = plan.steps
        tensors = [list(row) for row in zip(*(s.tensors for s in steps), strict=True)]
        batch = Batch(tensors, [s.group for s in steps], [s.number for s in steps], [Place()] * len(steps), block)
        one = torch.ones((), device="cuda")
        settings = [(1e-2, 0.1, 0.9, 0.999, 1e-8)] * 2
        batch.step(plan.gradients, settings, one, one, 3, warps)
        results.append(parameters)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


KINDS: dict[str, tuple[list[torch.dtype], Moments | None]] = {
    "fp32": ([torch.float32], None),
    "bf16, stochastic rounding": ([torch.bfloat16], None),
    "bf16 and fp32": ([torch.float32, torch.bfloat16], None),
    "fp32 with bf16 moments": ([torch.float32], "bf16"),
    "fp32 with int8 moments": ([torch.float32], "int8"),
    "bf16 with int8 moments": ([torch.bfloat16], "int8"),
}


def watched(kinds: list[torch.dtype], moments: Moments | None) -> tuple[AdamW, list[nn.Parameter]]:
    """After its first update, which creates the state."""
    optimizer, parameters = pair(kinds, "cuda", moments)
    optimizer.watched = True
    give(parameters, 0, False)
    optimizer.step()
    return optimizer, parameters


def flip(tensor: Tensor, draw: random.Random) -> None:
    """A random bit of it, unseen by torch's version counter, as a fault of the memory would be."""
    bytes_ = tensor.detach().data.view(-1).view(torch.uint8)
    bytes_[draw.randrange(len(bytes_))] ^= 1 << draw.randrange(8)


def changed(optimizer: AdamW) -> list[int]:
    return [id(p) for comparison in optimizer.compare() for p in comparison.changed()]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_bit_that_changes_in_memory_is_found_at_any_later_time(kind: str) -> None:
    optimizer, parameters = watched(*KINDS[kind])
    draw = random.Random(kind)
    held = [p for p in parameters if p.numel()]
    one = torch.ones((), device="cuda")
    assert len(optimizer.watched_parameters()) == len(parameters) and not changed(optimizer)
    for trial in range(100):
        p = draw.choice(held)
        held_of_p = [p, *optimizer.state[p].values()]
        flip(held_of_p[trial % len(held_of_p)], draw)
        assert changed(optimizer) == [id(p)], "before the next update, as at a save"
        for step in range(draw.randrange(3)):  # the flipped bit spreads, and its trace stays
            give(parameters, step, draw.random() < 0.5)
            optimizer.step_if(one if draw.random() < 0.7 else one - 1, one)
        assert changed(optimizer) == [id(p)]
        with torch.no_grad():
            p.mul_(1.0)  # written by torch: what is known of it is out of date
        give(parameters, 0, False)
        optimizer.step_if(one, one)
        # the flipped bit may have been an exponent's, so that NaN is written from now on: a value like any other
        assert len(optimizer.watched_parameters()) == len(parameters) and not changed(optimizer)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_watching_changes_no_bit_and_accuses_nobody(kind: str) -> None:
    results = []
    for is_watched in (False, True):
        optimizer, parameters = watched(*KINDS[kind])
        optimizer.watched, optimizer.seed = is_watched, 2**40 + 12345
        for step in range(50):
            give(parameters, step, apart=step % 3 == 1)
            factor = torch.tensor(
                float("nan") if step == 7 else 0.25, device="cuda"
            )  # 7 is skipped; others are clipped
            optimizer.step_if(torch.tensor(step != 7, device="cuda"), factor)
            assert not changed(optimizer)
            if step == 20:  # as a loaded checkpoint writes
                for p in parameters:
                    for tensor in (p.detach(), *optimizer.state[p].values()):
                        tensor.copy_(tensor * 0.5)
                assert not changed(optimizer) and not optimizer.watched_parameters()
        results.append([t.clone() for p in parameters for t in (p.detach(), *optimizer.state[p].values())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_gradients_are_let_go_of_after_a_step() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for finite in (True, False):
            weight = nn.Parameter(torch.ones(8, dtype=dtype))
            optimizer = AdamW([weight], lr=0.1)
            weight.grad = torch.ones_like(weight)
            held = weakref.ref(weight.grad)
            optimizer.step_if(torch.tensor(finite), torch.tensor(1.0))
            optimizer.zero_grad(set_to_none=True)
            gc.collect()
            assert held() is None
