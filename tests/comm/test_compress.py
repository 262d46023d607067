"""Compressed averages: what is sent and what is still owed add up to the gradients, on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

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


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_sent_and_owed_add_up(size: int) -> None:
    spawn(size, adds_up, WORDS)
