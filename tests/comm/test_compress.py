"""Compressed averages: what is sent and what is still owed add up to the gradients, on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dtrain.checkpoint import store
from dtrain.comm import quantize
from dtrain.comm.compress import make
from dtrain.comm.compressor import Compressor
from dtrain.util.dtensor import Chunk
from tests.world import spawn

SHAPES = {"a": (40, 30), "b": (64, 8, 3), "norm": (17,)}
WORDS = ("fp16", "bf16", "int8", "powersgd", "topk", "onebit")


def gradients_of(step: int, rank: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def build(word: str, **settings: float) -> Compressor:
    parameters = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    group = dist.group.WORLD
    assert group is not None
    return make(word, parameters, group, torch.device("cpu"), **settings)


def mean_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    total = tensor.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def still_owed(compressor: Compressor, name: str) -> torch.Tensor:
    """The mean of the ranks' errors, and the owners' pieces, as a checkpoint holds them."""
    owed = torch.zeros(SHAPES[name])
    for key, held in compressor.state_dict().items():
        if key == f"comm.{name}.error":
            assert isinstance(held, list)
            assert held[0].whole_shape == (dist.get_world_size(), *SHAPES[name])
            assert held[0].offset[0] == dist.get_rank()
            owed += held[0].values[0] / dist.get_world_size()
        elif key == f"comm.{name}.owner_error":
            for chunk in held:
                assert isinstance(chunk, Chunk)
                owed[chunk.box] += chunk.values
    dist.all_reduce(owed)
    return owed


def any_parts() -> None:
    """int8 and onebit send a bucket in parts: the same bits, however many."""
    for word in ("int8", "onebit"):
        found = []
        for least in (1, 2**17):
            quantize.LEAST_PART = least
            compressor = build(word)
            gradients = gradients_of(0, dist.get_rank())
            assert len(quantize.split({k: v for k, v in gradients.items() if k != "norm"})) == (2 if least == 1 else 1)
            compressor.average(gradients)
            compressor.end_step(True)
            found.append(gradients | compressor.state)
        assert found[0].keys() == found[1].keys()
        assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_parts_change_no_bit() -> None:
    spawn(2, any_parts)


def adds_up(words: tuple[str, ...]) -> None:
    rank = dist.get_rank()
    for word in words:
        compressor = build(word, rank=2, ratio=0.1)
        sent = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        total = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        for step in range(5):
            for name, gradient in gradients_of(step, rank).items():
                total[name] += mean_over_ranks(gradient)
            # a step that is skipped, a replay and a rehearsal leave no trace
            compressor.average(gradients_of(99, rank))
            compressor.end_step(False)
            compressor.average(gradients_of(98, rank))
            compressor.discard()
            compressor.scale = 2.0**step  # the loss scale changes
            gradients = {name: g * compressor.scale for name, g in gradients_of(step, rank).items()}
            compressor.average(gradients)
            compressor.end_step(torch.tensor(True) if step % 2 else True)
            for name, gradient in gradients.items():
                of_rank_0 = gradient.clone()
                dist.broadcast(of_rank_0, 0)
                assert torch.equal(gradient, of_rank_0), "every rank has the same mean"
                sent[name] += gradient / compressor.scale
        tolerance = {"fp16": 5e-3, "bf16": 5e-2}.get(word, 1e-5)
        for name in SHAPES:
            torch.testing.assert_close(sent[name] + still_owed(compressor, name), total[name], atol=tolerance, rtol=0)
        if word not in ("fp16", "bf16"):
            assert not torch.allclose(sent["a"], total["a"], atol=1e-4), f"{word} sent everything"
            torch.testing.assert_close(sent["norm"], total["norm"])


def stays_finite(words: tuple[str, ...]) -> None:
    """A gradient that is not finite on one rank is not finite on any, and is gone after the skipped step."""
    for word in words:
        compressor = build(word)
        gradients = gradients_of(0, dist.get_rank())
        if dist.get_rank() == 1:
            gradients["a"][3, 5] = torch.inf
        compressor.average(gradients)
        assert not gradients["a"].isfinite().all(), word
        compressor.end_step(updated=False)
        gradients = gradients_of(1, dist.get_rank())
        compressor.average(gradients)
        assert gradients["a"].isfinite().all(), word


def save(folder: Path, words: tuple[str, ...]) -> None:
    for word in words:
        compressor = build(word)
        for step in range(3):
            compressor.average(gradients_of(step, dist.get_rank()))
            compressor.end_step(updated=True)
        owed = {name: still_owed(compressor, name) for name in SHAPES}
        store.save(folder / word, 3, compressor.state_dict(), {"extra": compressor.extra_state()}, 1)
        if dist.get_rank() == 0:
            torch.save(owed, folder / f"{word}.pt")


def load(folder: Path, words: tuple[str, ...]) -> None:
    for word in words:
        compressor = build(word)
        path = folder / word / "step-00000003"
        manifest = store.read_manifest(path)
        store.load(path, manifest, compressor.state_dict())
        compressor.load_state_dict(manifest["extra"])
        assert compressor.steps == 3
        for name, owed in torch.load(folder / f"{word}.pt").items():
            torch.testing.assert_close(still_owed(compressor, name), owed, atol=1e-6, rtol=0)
            assert owed.any() == (f"{name}.error" in compressor.state)
    # of another kind, or of none: nothing is owed, and a run without compression does not look at it
    for word, other in (("powersgd", "fp16"), ("topk", "int8")):
        compressor = build(word)
        manifest = store.read_manifest(folder / other / "step-00000003")
        store.load(folder / other / "step-00000003", manifest, compressor.state_dict())
        compressor.load_state_dict(manifest["extra"])
        assert still_owed(compressor, "a").any() == (other == "int8"), "errors are the same for all"
        assert word != "powersgd" or torch.equal(compressor.state["a.q"], build(word).state["a.q"])
        store.load(folder / other / "step-00000003", manifest, {})


def test_what_is_owed_moves_to_another_number_of_ranks(tmp_path: Path) -> None:
    spawn(2, stays_finite, WORDS)
    spawn(2, save, tmp_path, WORDS)
    spawn(3, load, tmp_path, WORDS)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_sent_and_owed_add_up(size: int) -> None:
    spawn(size, adds_up, WORDS)
