"""Moments in 8 bits: how far a value can be from its code's, and that a code is stable."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dtrain.kernels import BLOCK, fits_bf16, fits_int8, stochastic_rounding
from dtrain.kernels.int8_blocks import first_codes, second_codes, values

CPU = torch.device("cpu")
numbers = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)
blocks = st.lists(st.lists(numbers, min_size=BLOCK, max_size=BLOCK), min_size=1, max_size=4)
noises = st.sampled_from([0, 1, 1000, 32768, 60000, 65535])


def tensor(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float32).view(-1)


def shares(x: Tensor, scales: Tensor) -> Tensor:
    """Of each block's largest magnitude; of a block of zeros 0."""
    return x.double() / scales.double().clamp(min=1e-300).repeat_interleave(BLOCK)


@given(blocks, noises)
@settings(max_examples=50, deadline=None)
def test_a_first_moment_is_one_of_its_two_neighbours(rows: list[list[float]], noise: int) -> None:
    x = tensor(rows)
    codes, scales = first_codes(x, noise)
    assert codes.dtype == torch.int8 and torch.equal(scales, x.abs().view(-1, BLOCK).amax(1))
    root = shares(x, scales).abs().sqrt() * 127
    assert ((codes.abs().double() - root).abs() < 1 + 1e-4).all()
    back = values(codes, scales)
    is_largest = x.abs() == scales.repeat_interleave(BLOCK)
    assert torch.equal(back[is_largest], x[is_largest]), "the largest is exact"
    assert (back * x >= 0).all(), "a sign is never wrong"


@given(blocks, noises)
@settings(max_examples=50, deadline=None)
def test_a_second_moment_is_one_of_its_two_neighbours_and_not_zero(rows: list[list[float]], noise: int) -> None:
    x = tensor(rows).abs()
    codes, scales = second_codes(x, noise)
    assert codes.dtype == torch.uint8 and torch.equal(scales, x.view(-1, BLOCK).amax(1))
    root = shares(x, scales).sqrt().sqrt() * 256
    assert ((codes.double() + 1 - root.clamp(min=1)).abs() < 1 + 1e-3).all()
    back = values(codes, scales)
    is_largest = x == scales.repeat_interleave(BLOCK)
    assert torch.equal(back[is_largest], x[is_largest]), "the largest is exact"
    not_tiny = scales.repeat_interleave(BLOCK) > 1e-25
    assert (back[not_tiny] > 0).all(), "the update divides by its root"


@given(blocks)
@settings(max_examples=50, deadline=None)
def test_half_a_step_at_most_without_noise(rows: list[list[float]]) -> None:
    x = tensor(rows)
    codes, scales = first_codes(x)
    apart = (shares(x, scales) - shares(values(codes, scales), scales)).abs()
    assert (apart <= (shares(x, scales).abs().sqrt() * 127 + 1) / 127**2 + 1e-6).all(), "1/127 of the largest at most"
    codes, scales = second_codes(x.abs())
    root = shares(x.abs(), scales).sqrt().sqrt().clamp(min=1 / 256)
    apart = (shares(x.abs(), scales) - shares(values(codes, scales), scales)).abs()
    assert (apart <= 2 * (root + 1 / 256) ** 3 / 256 + 1e-6).all()


@given(blocks)
@settings(max_examples=50, deadline=None)
def test_what_was_decoded_is_encoded_to_the_same_bits(rows: list[list[float]]) -> None:
    x = tensor(rows)
    for encode, moments in ((first_codes, x), (second_codes, x.abs())):
        codes, scales = encode(moments)
        again, same = encode(values(codes, scales))
        if scales.max() < 1e-25:  # steps below the smallest number of fp32
            continue
        kept = (scales > 1e-25) | (scales == 0)
        assert torch.equal(again.view(-1, BLOCK)[kept], codes.view(-1, BLOCK)[kept]) and torch.equal(same, scales)


def test_every_code_is_stable() -> None:
    """All codes, also with noise: what lies on a code is rounded neither up nor down."""
    noise = torch.arange(256 * BLOCK) * 7919 % 65534 + 1
    for code, dtype, encode in ((127, torch.int8, first_codes), (255, torch.uint8, second_codes)):
        codes = torch.arange(256).sub(128 if dtype == torch.int8 else 0).clamp(min=-127).to(dtype)
        rows = codes.repeat_interleave(BLOCK).view(-1, BLOCK)
        rows[:, 0] = code  # the scale
        for scale in (1.0, 3.7e-12, 2.9e20):
            scales = torch.full((len(rows),), scale)
            found, same = encode(values(rows, scales), noise)
            assert torch.equal(found.view(-1, BLOCK), rows) and torch.equal(same, scales)


@pytest.mark.parametrize("share", [0.9, 0.3, 0.01, 1e-4, 1e-7])
def test_rounding_is_right_in_the_mean(share: float) -> None:
    """Of both moments: the mean of 200,000 roundings of one value, beside the largest of its block."""
    x = torch.full((200_000 // BLOCK * BLOCK,), share)
    x[::BLOCK] = 1.0
    noise = stochastic_rounding.words(len(x), 1, 1, 0, CPU) & 0xFFFF
    for encode in (first_codes, second_codes):
        back = values(*encode(x, noise)).view(-1, BLOCK)[:, 1:]
        assert len(back.unique()) <= 2 and back.mean().item() == pytest.approx(share, rel=0.02 if share > 1e-6 else 0.2)


def test_blocks_of_zeros_stay_zero() -> None:
    zeros = torch.zeros(2 * BLOCK)
    for encode in (first_codes, second_codes):
        codes, scales = encode(zeros, 65535)
        assert not scales.any() and not values(codes, scales).any()


@pytest.mark.parametrize("shape, bf16, int8", [
    ((64, 64), True, True), ((4096,), False, False), ((63, 64), False, False), ((128, 40), True, False),
    ((64, 16, 3, 3), True, False), ((2, 2048), True, True), ((4096, 1), True, False), ((), False, False),
])  # fmt: skip
def test_what_is_small_stays_in_fp32(shape: tuple[int, ...], bf16: bool, int8: bool) -> None:
    assert (fits_bf16(shape), fits_int8(shape)) == (bf16, int8)
