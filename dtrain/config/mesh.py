"""How many ranks each axis of the mesh has, and how the global batch is divided over them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dtrain.errors import bad


@dataclass(frozen=True)
class MeshSizes:
    """Pipeline stages × data-parallel ranks × context-parallel ranks × tensor-parallel ranks.

    tp is innermost: its ranks share a node. The ranks of cp each have a part of the same samples' sequences.
    """

    pp: int = 1
    dp: int = 1
    tp: int = 1
    cp: int = 1

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def token_ranks(self) -> int:
        """Ranks with different tokens of a batch, over which gradients and losses are averaged: dp × cp."""
        return self.dp * self.cp

    def as_dict(self) -> dict[str, int]:
        """The size of each axis; cp only if sequences are divided."""
        axes = asdict(self)
        return axes if self.cp > 1 else {axis: axes[axis] for axis in ("pp", "dp", "tp")}

    def __str__(self) -> str:
        return " × ".join(f"{axis} {size}" for axis, size in self.as_dict().items())


def resolve(
    world_size: int,
    node_size: int | None = None,
    pp: int = 1,
    dp: int = -1,
    tp: int = 1,
    cp: int = 1,
    batch_size: int | None = None,
    micro: int | None = None,
    most: int | None = None,
) -> MeshSizes:
    """Fill in each -1 and check that the axes multiply to the number of ranks.

    With several -1, tp is filled first, up to one node (its collectives are the most frequent and largest), then pp,
    then dp. So `strategy=tensor` uses tp over all ranks of a node, and with `strategy.tp=2` the rest is data parallel.
    batch_size, micro: the global one and that of a pass, for a fix that changes the number of ranks.
    most: how many ranks a node can have, its GPUs, if that is known.
    """
    node_size = node_size or world_size
    sizes = {"pp": pp, "dp": dp, "tp": tp}
    if cp < 1:
        rule = "must be at least 1: how many ranks divide a sequence is for you to choose"
        raise bad("strategy.cp", cp, rule, "strategy.cp=1, which divides no sequence")
    if cp > 1:
        sizes["cp"] = cp
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
        node = node_size if world_size > node_size else most
        if node and tp > 1 and node % tp:  # no number of nodes helps
            fits = math.gcd(tp, node)
            ranks = math.lcm(fits * abs(pp) * cp, node)  # whole nodes
            nodes = "" if world_size % (fits * abs(pp) * cp) == 0 else f" cluster.nodes={ranks // node}"
            raise ValueError(
                f"{asked}: tensor-parallel ranks must be in one node, so tp must be at most, and divide, "
                f"the {node} ranks of a node\n  fix: strategy.tp={fits}{nodes}{'' if dp == -1 else ' strategy.dp=-1'}"
            )
        raise ValueError(
            f"{asked}: {' × '.join(sizes)} must equal the number of ranks, {world_size}\n"
            f"  fix: {other_sizes(world_size, node_size, fixed, abs(pp * tp), cp, batch_size, dp == -1, micro, most)}"
        )
    if node_size % sizes["tp"]:
        raise ValueError(
            f"{asked}: tp = {sizes['tp']} does not divide the {node_size} ranks of a node, "
            f"and tensor-parallel ranks must be in one node\n"
            f"  fix: strategy.tp={math.gcd(sizes['tp'], node_size)} strategy.dp=-1"
        )
    return MeshSizes(**sizes)


def of_strategy(
    section: Mapping[str, Any],
    world_size: int,
    node_size: int,
    batch_size: int | None = None,
    micro: int | None = None,
    most: int | None = None,
) -> MeshSizes:
    """Return the mesh of a strategy's settings."""
    axes = {axis: section[axis] for axis in ("pp", "dp", "tp", "cp") if axis in section}
    return resolve(world_size, node_size, **axes, batch_size=batch_size, micro=micro, most=most)


def other_sizes(
    world_size: int,
    node_size: int,
    fixed: int,
    model: int,
    cp: int,
    batch_size: int | None = None,
    filled: bool = False,
    micro: int | None = None,
    most: int | None = None,
) -> str:
    """Suggest degrees for these ranks, or ranks for these degrees. model: pp × tp, as far as given.

    filled: strategy.dp is -1 already.
    """
    fill = "strategy.dp=-1" if world_size % (model * cp) == 0 and fixed > model * cp else ""
    if cp > 1 and not fill and world_size % model == 0:
        fits = max(c for c in range(1, cp + 1) if world_size // model % c == 0)
        fill = f"strategy.cp={fits} strategy.dp=-1"
    axes = "pp, tp and cp" if cp > 1 else "pp and tp"
    degrees = fill or f"{'' if filled else 'strategy.dp=-1 with '}{axes} whose product divides {world_size}"
    if world_size == node_size and (most is None or fixed <= most):
        ranks = f"cluster.processes={fixed}"
    else:
        ranks = f"cluster.nodes={fixed // node_size}" if fixed % node_size == 0 else ""
    data_ranks = fixed // (model * cp)
    unit = data_ranks * (micro or 1)  # samples of a pass of all ranks
    is_whole = unit and batch_size and (batch_size % unit == 0 or (batch_size <= unit and batch_size % data_ranks == 0))
    if ranks and batch_size and unit and not is_whole:
        ranks += f" train.global_batch_size={-(-batch_size // unit) * unit}"
    return ", or ".join(fix for fix in ((degrees, ranks) if fill else (ranks, degrees)) if fix)


def batch_sizes(config: Mapping[str, Any], sizes: MeshSizes) -> tuple[int, int, int]:
    """(samples per data rank and step, micro-batch size, accumulation steps): global = micro × accumulation × dp."""
    total, asked = config["train"]["global_batch_size"], config["train"]["micro_batch_size"]
    if total % sizes.dp:
        micro = min(asked or 1, total // sizes.dp or 1)
        fitting = [n for n in (total // (sizes.dp * micro), total // (sizes.dp * micro) + 1) if n]
        if micro < (asked or 1):  # more samples than now would be several micro-batches, of which the last is smaller
            fitting = fitting[:1]
        fix = f"train.global_batch_size={' or '.join(str(n * sizes.dp * micro) for n in fitting)}"
        cluster = config.get("cluster") or {}
        if total < sizes.dp and cluster.get("nodes") == 1 and cluster.get("processes") == sizes.world_size:
            fix = f"cluster.processes={sizes.world_size // sizes.dp * total}, or {fix}"  # so many may not fit here
        raise bad("train.global_batch_size", total, f"must be a multiple of the {sizes.dp} data-parallel ranks", fix)
    per_rank = total // sizes.dp
    if sizes.pp > 1 and not asked:  # 4 micro-batches per stage keep a pipeline busy for 80% of the slots
        wanted = min(4 * sizes.pp, per_rank)
        asked = max(m for m in range(1, per_rank // wanted + 1) if per_rank % m == 0)
    micro = min(asked or per_rank, per_rank)
    if per_rank % micro:
        divisors = [d for d in range(1, micro) if per_rank % d == 0]
        share = f"train.global_batch_size={total} / {sizes.dp} rank{'s' * (sizes.dp != 1)}"
        unit = micro * sizes.dp
        batches = f"train.global_batch_size={total // unit * unit} or {total // unit * unit + unit}"
        smaller = f"train.micro_batch_size={divisors[-1]}"
        raise bad(
            "train.micro_batch_size",
            asked,
            f"must divide the {per_rank} samples of a data rank ({share})",
            f"{smaller}, or {batches}" if 2 * divisors[-1] >= micro else f"{batches}, or {smaller}",
        )
    return per_rank, micro, per_rank // micro


def eval_batch_size(num_samples: int, batch_size: int, micro: int, sizes: MeshSizes, data: str) -> int:
    """Samples per evaluation step: a global batch, or as much of one as a small split has. data: the option's name."""
    unit = micro * sizes.dp * (2 * sizes.pp if sizes.pp > 1 else 1)  # whole micro-batches, enough to fill a pipeline
    if num_samples >= batch_size:
        return batch_size
    if num_samples < unit:
        rule = f"data={data} has only {num_samples} validation samples, and an evaluation step takes {unit}"
        down = num_samples // (unit // micro) * (unit // micro)
        smaller = f"train.global_batch_size={down}, or " if down else ""
        fix = f"{smaller}train.eval_batches=0, or more data to hold out"
        raise bad("train.global_batch_size", batch_size, rule, fix)
    return num_samples // unit * unit
