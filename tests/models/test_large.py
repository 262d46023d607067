"""Models that no machine here can hold, cut as a run would cut them: on the meta device, in a world that is not there.

The real Strategy.setup runs up to where weights would get memory. What a rank then has is compared with arithmetic that
knows only the published sizes.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from dtrain.commands.verify.world import World
from dtrain.config.files import CONF
from tests.world import start_server

FLOAT32 = 4


class Reached(Exception):
    """The strategy has cut the model, and would give it memory now."""


def _cut(strategy: dict[str, Any], model: str, world_size: int, ranks: list[int], out: str) -> int:
    """In a process of its own: what each of these ranks has of every weight, by name, in elements; and any memory."""
    import torch
    import torch.distributed as dist
    from omegaconf import OmegaConf
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from dtrain.checkpoint.initial_weights import Drawn
    from dtrain.config.build import build
    from dtrain.optim.precision import Precision

    def stop(module: torch.nn.Module) -> None:
        raise Reached

    os.environ["LOCAL_WORLD_SIZE"] = "8"  # nodes of 8 GPUs: tensor-parallel ranks must lie in one
    found: dict[str, Any] = {}
    for rank in ranks:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        made = build(strategy)
        made.materialize = stop
        with torch.device("meta"):
            whole = build(OmegaConf.load(CONF / "model" / f"{model}.yaml"))
        try:
            made.setup(
                whole,
                None,
                precision=Precision("float32"),
                device=torch.device("cpu"),
                first=Drawn(0),
                micro_batch_size=1,
            )
        except Reached:
            parts = {n: getattr(p, "to_local", lambda p=p: p)() for n, p in made.module.named_parameters()}
            assert all(part.device.type == "meta" for part in parts.values())
            found[str(rank)] = {
                "place": made.mesh.get_coordinate(),
                "bytes": {n: part.numel() * part.element_size() for n, part in parts.items()},
            }
        dist.destroy_process_group()
    Path(out).write_text(json.dumps(found))
    return 0


def cut(tmp_path: Path, strategy: dict[str, Any], model: str, world_size: int, ranks: list[int]) -> dict[str, Any]:
    start_server()
    with World(1, _cut, strategy, model, world_size, ranks, str(tmp_path / "found.json")) as world:
        assert world.join(100) == [0]
    found: dict[str, Any] = json.loads((tmp_path / "found.json").read_text())
    assert sorted(found) == sorted(map(str, ranks))
    return found


def share(size: int, parts: int, index: int) -> int:
    """How many of `size` rows the part has: ceil(size / parts) each, until there are none left."""
    most = -(-size // parts)
    return max(0, min(most, size - index * most))


# ---- the arithmetic ------------------------------------------------------------------------------------------

BY_OUTPUT = ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")  # matrices whose rows are dealt out
BY_INPUT = ("attention.proj", "mlp.down")  # matrices whose columns are


def layer_shapes(dim: int, kv_dim: int, hidden: int) -> dict[str, tuple[int, ...]]:
    return {
        "norm1": (dim,), "attention.q": (dim, dim), "attention.k": (kv_dim, dim), "attention.v": (kv_dim, dim),
        "attention.proj": (dim, dim), "norm2": (dim,), "mlp.gate": (hidden, dim), "mlp.up": (hidden, dim),
        "mlp.down": (dim, hidden),
    }  # fmt: skip


def expected(
    shapes: dict[str, tuple[int, ...]], dp: int, dp_rank: int, tp: int = 1, tp_rank: int = 0
) -> dict[str, int]:
    """Bytes of each weight on a rank: tensor parallel cuts rows or columns, then the data ranks cut the rows."""
    result = {}
    for name, (rows, *columns) in shapes.items():
        width = columns[0] if columns else 1
        if name.endswith(BY_OUTPUT):
            rows = share(rows, tp, tp_rank)
        elif name.endswith(BY_INPUT):
            width = share(width, tp, tp_rank)
        result[f"{name}.weight"] = share(rows, dp, dp_rank) * width * FLOAT32
    return result


def weights_of(layer: dict[str, tuple[int, ...]], low: int, high: int) -> dict[str, tuple[int, ...]]:
    return {f"layers.{i}.{name}": shape for i in range(low, high) for name, shape in layer.items()}


# ---- the models ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dp", [8, 48])
def test_llama_7b_under_fsdp(dp: int, tmp_path: Path) -> None:
    """8 ranks cut everything evenly; 48 do not, and the last ones have less, or nothing, of some weights."""
    ranks = [0, dp // 2, dp - 1]
    found = cut(tmp_path, {"_target_": "dtrain.strategies.fsdp.FSDP"}, "llama-7b", dp, ranks)
    ends = {"embed": (32000, 4096), "norm": (4096,), "output": (32000, 4096)}
    shapes = weights_of(layer_shapes(4096, 4096, 11008), 0, 32) | ends
    for rank in ranks:
        assert found[str(rank)]["bytes"] == expected(shapes, dp, rank)
    if dp == 8:
        assert all(sum(part["bytes"].values()) == 6_738_415_616 * FLOAT32 // 8 for part in found.values())
    else:
        assert sum(found["0"]["bytes"].values()) > sum(found["47"]["bytes"].values())


# A layer has 855,654,400 weights, embedding and head 1.23 times as many each: the largest stage is smallest, 21 layers,
# when the ends have at most 19 of the 80; then there is one way only.
STAGES = [(0, 19), (19, 40), (40, 61), (61, 80)]


def test_llama_70b_under_3d(tmp_path: Path) -> None:
    """64 ranks: 4 stages × 2 data ranks × 8 tensor-parallel ones; rank = (stage × 2 + data) × 8 + tensor."""
    ranks = [0, 13, 22, 43, 63]
    strategy = {"_target_": "dtrain.strategies.pipeline.Pipeline", "pp": 4, "dp": 2, "tp": 8}
    found = cut(tmp_path, strategy, "llama-70b", 64, ranks)
    layer = layer_shapes(8192, 8 * 128, 28672)
    for rank in ranks:
        stage, data, tensor = rank // 16, rank // 8 % 2, rank % 8
        assert found[str(rank)]["place"] == [stage, data, tensor]
        shapes = weights_of(layer, *STAGES[stage])
        shapes |= {"embed": (128256, 8192)} if stage == 0 else {}
        shapes |= {"norm": (8192,), "output": (128256, 8192)} if stage == 3 else {}
        assert found[str(rank)]["bytes"] == expected(shapes, 2, data, 8, tensor)


def test_loss_parallel_also_cuts_the_vocabulary(tmp_path: Path) -> None:
    strategy = {"_target_": "dtrain.strategies.pipeline.Pipeline", "pp": 4, "dp": 2, "tp": 8}
    options = {"sequence_parallel": True, "loss_parallel": True}
    found = cut(tmp_path, strategy | options, "llama-70b", 64, [5, 63])
    for rank, name in (("5", "embed.weight"), ("63", "output.weight")):
        assert found[rank]["bytes"][name] == 128256 // 8 // 2 * 8192 * FLOAT32
