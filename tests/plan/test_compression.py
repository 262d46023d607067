"""What compression sends, by the shapes of the gradients: the models' own shapes, and the formula by hand."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from dtrain.config.hardware import load
from dtrain.plan.compression import WITH_ERRORS, gradient_shapes, sent_bytes, share_sent, state_bytes
from dtrain.plan.layout import layout_of
from dtrain.plan.model_shape import shape_of
from dtrain.plan.time.data_parallel import Passes, Unit, data_items
from dtrain.plan.time.stack import stack_of
from tests.commands.plan.capacity import applied, question
from tests.plan.test_model_shape import MODELS, module_of, settings_of


@pytest.mark.parametrize("name", MODELS)
def test_shapes_are_the_models_own(name: str) -> None:
    settings = settings_of(name)
    shape = shape_of({"model": settings})
    assert shape is not None
    found: Counter[tuple[int, ...]] = Counter()
    for p in module_of(settings).parameters():
        if p.dim() > 1 and p.numel() > p.shape[-1]:  # a ViT's class token is a vector
            found[len(p), p.numel() // len(p)] += 1
        else:
            found[1,] += p.numel()
    assert gradient_shapes(shape) == found


def test_bytes_by_hand() -> None:
    shapes = Counter({(100, 64): 2, (10,): 1})
    vectors = 1.5 * 40  # 4 ranks: 2 × 3/4 of fp32
    assert sent_bytes("none", shapes, 4) == 1.5 * 4 * 12_810
    assert sent_bytes("bf16", shapes, 4) == 1.5 * 2 * 12_810
    assert sent_bytes("int8", shapes, 4) == 2 * 2 * 3 * 7 * 260 + vectors  # 6,400 values in 4 × 7 blocks of 256
    assert sent_bytes("onebit", shapes, 4) == 2 * 2 * 3 * 7 * 36 + vectors
    assert sent_bytes("topk", shapes, 4, ratio=0.1) == 2 * 3 * 8 * 640 + vectors
    assert sent_bytes("powersgd", shapes, 4, rank=2) == 2 * 1.5 * 4 * 2 * 164 + vectors
    assert sent_bytes("powersgd", shapes, 4, rank=50) == sent_bytes("none", shapes, 4), "factors larger than the matrix"


NODES = ("model=gpt2-1.5b", "hardware=h100-ndr", "cluster.nodes=4", "train.global_batch_size=128")


@pytest.mark.parametrize("overrides", ["strategy=ddp", "strategy=fsdp strategy.sharding=hybrid"])
def test_fewer_bytes_take_less_time_and_errors_take_memory(overrides: str) -> None:
    asked, hardware = question(*NODES), load("h100-ndr")
    words = ("none", "bf16", "int8", "topk", "onebit", *(["powersgd"] if overrides == "strategy=ddp" else []))
    seconds, held = {}, {}
    for word in words:
        layout = layout_of(applied([*overrides.split(), f"strategy.compress={word}"], asked.config))
        shape = shape_of(asked.config)
        assert shape is not None and layout.compress == word
        passes = Passes(Unit(3e7, 0.0, 0.0), 48, 8e7)  # no computation that would hide it
        items = data_items(layout, hardware, stack_of(layout), passes, 1.5e9, share_sent(shape, layout))
        seconds[word] = sum(i.value for i in items if i.name in ("gradients", "gradients of the replicas"))
        held[word] = state_bytes(shape, layout)
    assert seconds["none"] > seconds["bf16"] > seconds["int8"] > seconds["onebit"]
    assert math.isclose(seconds["bf16"] / seconds["none"], 0.5, rel_tol=0.05)
    assert {word for word in words if held[word]} == set(words) & set(WITH_ERRORS)
