"""The mesh: how many ranks each axis has, and torch's DeviceMesh of that shape."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class MeshSizes:
    """Pipeline stages × data-parallel ranks × tensor-parallel ranks; tensor innermost, so that it shares a node."""

    pp: int = 1
    dp: int = 1
    tp: int = 1

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.tp

    def as_dict(self) -> dict[str, int]:
        return asdict(self)

    def __str__(self) -> str:
        return " × ".join(f"{axis} {size}" for axis, size in asdict(self).items())


def resolve(world_size: int, node_size: int | None = None, pp: int = 1, dp: int = -1, tp: int = 1) -> MeshSizes:
    """Fill in each -1 and check that the axes multiply to the number of ranks.

    Of several -1 tp is filled first, up to a node (its messages are the most and the largest), then pp, then dp. So
    `strategy=tensor` is tensor parallel over all ranks of a node, and with `strategy.tp=2` the rest is data parallel.
    """
    node_size = node_size or world_size
    sizes = {"pp": pp, "dp": dp, "tp": tp}
    asked = ", ".join(f"strategy.{axis}={size}" for axis, size in sizes.items())
    for axis, size in sizes.items():
        if size < 1 and size != -1:
            raise ValueError(f"{asked}: each must be at least 1, or -1 (fill)\n  fix: strategy.{axis}=-1")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    fill = [axis for axis in ("tp", "pp", "dp") if sizes[axis] == -1]
    rest = world_size // fixed
    for axis in fill:
        last = axis == fill[-1]
        sizes[axis] = math.gcd(rest, node_size) if axis == "tp" and not last else rest
        rest //= sizes[axis] or 1
    if math.prod(sizes.values()) != world_size:
        raise ValueError(
            f"{asked}: pp × dp × tp must be the number of ranks, and there are {world_size}\n"
            f"  fix: {other_sizes(world_size, node_size, fixed, abs(pp * tp))}"
        )
    if node_size % sizes["tp"]:
        raise ValueError(
            f"{asked}: tp = {sizes['tp']} does not divide the {node_size} ranks of a node, and tensor ranks must share "
            f"one\n  fix: strategy.tp={math.gcd(sizes['tp'], node_size)} strategy.dp=-1"
        )
    return MeshSizes(**sizes)


def other_sizes(world_size: int, node_size: int, fixed: int, model: int) -> str:
    """What to type instead: degrees for these ranks, or ranks for these degrees. model: pp × tp, as far as given."""
    fill = "strategy.dp=-1" if world_size % model == 0 and fixed > model else ""
    degrees = fill or f"strategy.dp=-1 with pp and tp whose product divides {world_size}"
    if world_size == node_size:
        ranks = f"cluster.processes={fixed}"
    else:
        ranks = f"cluster.nodes={fixed // node_size}" if fixed % node_size == 0 else ""
    return ", or ".join(fix for fix in ((degrees, ranks) if fill else (ranks, degrees)) if fix)


def device_mesh(sizes: MeshSizes, device_type: str) -> DeviceMesh:
    from torch.distributed.device_mesh import init_device_mesh  # here: launchers import this file, without torch

    return init_device_mesh(device_type, (sizes.pp, sizes.dp, sizes.tp), mesh_dim_names=("pp", "dp", "tp"))
