"""Moments pass between fp32, bf16 and int8 when a checkpoint is loaded, whatever part of them a rank holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dtrain.checkpoint import moments, shards, store
from dtrain.kernels import SCALES, int8_blocks
from dtrain.optim.adamw import AdamW
from dtrain.util.dtensor import Chunk, Held, flat_chunks

KINDS = ("fp32", "bf16", "int8")
SHAPE = (64, 96)


def state_of(kind: str, steps: int = 2, seed: int = 0) -> dict[str, Tensor]:
    """The state of a matrix and a bias after some updates, by the names of a checkpoint."""
    generator = torch.Generator().manual_seed(seed)
    named = {name: nn.Parameter(torch.zeros(shape)) for name, shape in (("w", SHAPE), ("b", (7,)))}
    optimizer = AdamW(named.values(), lr=0.0)
    optimizer.moments = kind  # type: ignore[assignment]
    for _ in range(steps):
        for p in named.values():
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
    return {
        f"optim.{name}.{key}": value for name, p in named.items() for key, value in optimizer.state[p].items()
        if key != "step"
    }  # fmt: skip


def exact(state: dict[str, Tensor], key: str) -> Tensor:
    value, scales = state[f"optim.w.{key}"], state.get(f"optim.w.{SCALES[key]}")
    return value.float() if scales is None else int8_blocks.values(value, scales).view(SHAPE)


def saved(folder: Path, state: dict[str, Tensor]) -> Path:
    return store.save(folder, 1, state, {"extra": {}}, keep=1)


@pytest.mark.parametrize("source", KINDS)
@pytest.mark.parametrize("target", KINDS)
def test_any_dtype_loads_into_any_other(source: str, target: str, tmp_path: Path) -> None:
    first, second = state_of(source), state_of(target, seed=1)
    path = saved(tmp_path, first)
    store.load(path, store.read_manifest(path), second)
    for key in SCALES:
        a, b = exact(first, key), exact(second, key)
        block = a.view(-1, 32).abs().amax(1).repeat_interleave(32).view(SHAPE)
        apart = ((a - b).abs() / block).max()
        assert apart == 0 if target in (source, "fp32") else 0 < apart < 0.01
    for name in first if source == target else ("optim.b.exp_avg", "optim.b.exp_avg_sq"):
        assert torch.equal(first[name], second[name])


def test_int8_returns_from_fp32_with_the_same_bits(tmp_path: Path) -> None:
    first, wide, second = state_of("int8"), state_of("fp32", seed=1), state_of("int8", seed=2)
    for i, (source, target) in enumerate(((first, wide), (wide, second))):
        path = saved(tmp_path / str(i), source)
        store.load(path, store.read_manifest(path), target)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_it_is_smaller(tmp_path: Path) -> None:
    size = {kind: sum(t.nbytes for t in state_of(kind).values()) for kind in KINDS}
    assert size["fp32"] > 1.9 * size["bf16"] > 1.9 * 1.7 * size["int8"]


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_any_part_is_decoded(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """As under ZeRO, which cuts a flattened weight anywhere, also within a block."""
    state = state_of("int8")
    path = saved(tmp_path_factory.mktemp("part"), state)
    begin = data.draw(st.integers(0, SHAPE[0] * SHAPE[1] - 1))
    end = data.draw(st.integers(begin + 1, SHAPE[0] * SHAPE[1]))
    held: dict[str, Held] = {f"optim.b.{key}": state[f"optim.b.{key}"] for key in SCALES}
    runs = {key: torch.full((end - begin,), float("nan")) for key in SCALES}
    held |= {f"optim.w.{key}": flat_chunks(run, SHAPE, begin) for key, run in runs.items()}
    store.load(path, store.read_manifest(path), held)
    for key, run in runs.items():
        assert torch.equal(run, exact(state, key).view(-1)[begin:end])


@pytest.mark.parametrize("box", [((0, 0), (64, 96)), ((5, 32), (20, 64)), ((63, 64), (1, 32))])
def test_any_shard_is_encoded(box: Any, tmp_path: Path) -> None:
    (row, column), (rows, columns) = box
    state, codes = state_of("fp32"), state_of("int8", seed=1)
    path = saved(tmp_path, state)
    held: dict[str, Held] = {f"optim.b.{key}": codes[f"optim.b.{key}"] for key in SCALES}
    for key, scale in SCALES.items():
        part = codes[f"optim.w.{key}"][row : row + rows, column : column + columns]
        scales = codes[f"optim.w.{scale}"][row : row + rows, column // 32 : (column + columns) // 32]
        held[f"optim.w.{key}"] = [Chunk(part, SHAPE, box[0])]
        held[f"optim.w.{scale}"] = [Chunk(scales, (64, 3), (row, column // 32))]
    store.load(path, store.read_manifest(path), held)
    for key in SCALES:
        a, b = (exact(s, key)[row : row + rows, column : column + columns] for s in (state, codes))
        assert ((a - b).abs() <= 0.01 * exact(state, key).abs().max()).all()


def test_verify_reads_values(tmp_path: Path) -> None:
    state = state_of("int8")
    path = saved(tmp_path, state)
    with shards.Reader(path, store.read_manifest(path)) as reader:
        assert torch.equal(moments.whole(reader, "optim.w.exp_avg"), exact(state, "exp_avg"))
        assert torch.equal(moments.whole(reader, "optim.b.exp_avg"), state["optim.b.exp_avg"])


def test_scales_without_their_codes_are_another_model(tmp_path: Path) -> None:
    state = state_of("int8")
    path = saved(tmp_path, state)
    without = {name: tensor for name, tensor in state.items() if not name.startswith("optim.w.exp_avg_sq")}
    with pytest.raises(ValueError, match="is not in the model"):
        store.load(path, store.read_manifest(path), without)
