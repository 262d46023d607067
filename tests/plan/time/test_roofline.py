"""Kernels take as long as they were measured to, and never less than the hardware allows."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.config.hardware import load
from dtrain.plan.time.roofline import attention_s, filled, matmul_flops, moved_s, product_s

PROBE = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "probe-h200.json"
SIZES = st.integers(1, 40_000)


def measured(kind: str) -> list[dict[str, Any]]:
    return [row for row in json.loads(PROBE.read_text())["rows"] if row["kind"] == kind]


def test_matrix_products_of_transformer_shapes_are_as_fast_as_on_the_h200() -> None:
    h200, errors = load("h200"), []
    for row in measured("product"):
        tokens, ins, outs = row["tokens"], row["ins"], row["outs"]
        flops = 2 * tokens * ins * outs
        shapes = {"forward": (tokens, ins, outs), "inputs": (tokens, outs, ins), "weights": (ins, tokens, outs)}
        for name, (rows, inner, cols) in shapes.items():
            errors.append(flops / product_s(h200, rows, inner, cols) / 1e12 / row[f"{name}_tflops"] - 1)
    assert len(errors) == 225
    assert statistics.mean(map(abs, errors)) < 0.06
    assert abs(statistics.mean(errors)) < 0.03


def test_the_fastest_kernels_are_as_much_faster_as_on_the_h200() -> None:
    """Of one layer's twelve products, by benchmarks/results/speed-h200.json."""
    h200, h100, a100 = load("h200"), load("h100"), load("a100-80gb")
    for row in json.loads((PROBE.parent / "speed-h200.json").read_text())["products_us"]["rows"]:
        tokens, dim = row["tokens"], row["dim"]
        linears = [(dim, 3 * dim), (dim, dim), (dim, 4 * dim), (4 * dim, dim)]
        sizes = [s for i, o in linears for s in ((tokens, i, o), (tokens, o, i), (i, tokens, o))]
        first, best = (sum(product_s(h200, *s, fastest=f) for s in sizes) * 1e6 for f in (False, True))
        assert first / row["torch"] == pytest.approx(1, abs=0.04)
        assert best / row["best"] == pytest.approx(1, abs=0.05)
    large, small = (32768, 768, 2304), (128, 768, 2304)  # 116 and 0.5 billion operations
    assert product_s(h100, *large, fastest=True) < product_s(h100, *large)
    assert product_s(h100, *small, fastest=True) == product_s(h100, *small)
    assert product_s(h100, *large, size=4, fastest=True) == product_s(h100, *large, size=4)
    assert product_s(a100, *large, fastest=True) == product_s(a100, *large)  # where it was not measured


def test_attention_is_as_fast_as_on_the_h200() -> None:
    h200, errors = load("h200"), []
    for row in measured("attention"):
        sizes = (row["batch"], row["heads"], row["tokens"], row["head_dim"])
        flops = 4 * row["batch"] * row["heads"] * row["tokens"] ** 2 * row["head_dim"] * (0.5 if row["causal"] else 1)
        seconds = sum(attention_s(h200, "cudnn", *sizes, row["causal"]))
        errors.append(3.5 * flops / seconds / 1e12 / row["both_tflops"] - 1)
    assert statistics.mean(map(abs, errors)) < 0.12  # the shortest sequences, 197 and 512 tokens, are off by a third


@given(SIZES, SIZES, SIZES, st.integers(1, 64), st.sampled_from(["a100-80gb", "h100", "v100", "l4"]))
def test_a_product_is_never_faster_than_the_best_rate_or_the_memory(
    rows: int, inner: int, cols: int, count: int, name: str
) -> None:
    gpu = load(name)
    seconds = product_s(gpu, rows, inner, cols, count)
    assert seconds >= 2 * rows * inner * cols * count / matmul_flops(gpu)
    assert seconds >= moved_s(gpu, 2 * count * (rows * inner + inner * cols + rows * cols))


@given(SIZES, st.integers(1, 40_000), SIZES)
def test_a_share_is_a_share(rows: int, inner: int, cols: int) -> None:
    assert 0 < filled("hopper", rows, inner, cols, 1, 132) <= 1


def test_a_wave_that_is_hardly_filled_costs_as_much_as_a_full_one() -> None:
    """108 tiles fill an A100 once. Of an inner dimension as short as this, splits are no way out."""
    full = filled("ampere", 256 * 108, 128, 128, 1, 108)
    assert filled("ampere", 256 * 216, 128, 128, 1, 108) == pytest.approx(full)
    assert filled("ampere", 256 * 115, 128, 128, 1, 108) < 0.85 * full


@given(
    st.integers(64, 20_000), st.sampled_from([64, 128]), st.booleans(), st.sampled_from(["cudnn", "flash2", "flash1"])
)
def test_attention_grows_with_the_square_of_the_sequence_in_the_end(
    tokens: int, head_dim: int, causal: bool, kernel: str
) -> None:
    h100 = load("h100")
    one = sum(attention_s(h100, kernel, 1, 16, tokens, head_dim, causal))
    two = sum(attention_s(h100, kernel, 1, 16, 2 * tokens, head_dim, causal))
    assert one < two < 4 * one + 1e-9
