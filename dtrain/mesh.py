"""The mesh: how many ranks each axis has, and torch's DeviceMesh of that shape."""

from __future__ import annotations

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


def resolve(world_size: int, pp: int = 1, dp: int = -1, tp: int = 1) -> MeshSizes:
    """Fill in the one -1 and check that the axes multiply to the number of ranks."""
    sizes = {"pp": pp, "dp": dp, "tp": tp}
    asked = ", ".join(f"strategy.{axis}={size}" for axis, size in sizes.items())
    fill = [axis for axis, size in sizes.items() if size == -1]
    wrong = [axis for axis, size in sizes.items() if size < 1 and size != -1]
    if wrong or len(fill) > 1:
        axis = (wrong or [axis for axis in fill if axis != "dp"])[0]
        raise ValueError(f"{asked}: each must be at least 1, and at most one may be -1 (fill)\n"
                         f"  fix: strategy.{axis}={-1 if axis == 'dp' and not fill else 1}")  # fmt: skip
    fixed = 1
    for size in sizes.values():
        fixed *= max(size, 1)
    if fill and world_size % fixed == 0:
        sizes[fill[0]] = world_size // fixed
    mesh = MeshSizes(**sizes) if world_size % fixed == 0 else None
    if mesh is None or mesh.world_size != world_size:
        raise ValueError(
            f"{asked}: pp × dp × tp must be the number of ranks, and there are {world_size}\n"
            f"  fix: strategy.dp=-1 with pp × tp dividing {world_size}, or cluster.processes={fixed}"
        )
    return mesh


def device_mesh(sizes: MeshSizes, device_type: str) -> DeviceMesh:
    from torch.distributed.device_mesh import init_device_mesh  # here: launchers import this file, without torch

    return init_device_mesh(device_type, (sizes.pp, sizes.dp, sizes.tp), mesh_dim_names=("pp", "dp", "tp"))
