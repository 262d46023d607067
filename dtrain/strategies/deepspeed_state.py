"""The interface to DeepSpeed: its import, an optimizer for partitioned weights, its flat masters by canonical name."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.checkpoint.store import CheckpointError
from dtrain.config.hardware import fake_cpu_fp16
from dtrain.optim.adafactor import FACTORS, VARIANCE
from dtrain.optim.owners import Piece
from dtrain.strategies.optimizer_state import init_optimizer_state
from dtrain.util.dtensor import Chunk, chunks_of, flat_chunks


def import_deepspeed(device: torch.device) -> Any:
    os.environ["DS_ACCELERATOR"] = device.type  # read once, at the first import
    if device.type == "cuda":  # DeepSpeed uses it as the GPU index, and ranks may share a GPU
        os.environ["LOCAL_RANK"] = str(device.index)
    import deepspeed

    # DeepSpeed calls functions that torch 2.13 has renamed, which would warn at every step
    warnings.filterwarnings("ignore", r".*torch\.distributed\.\w+. is deprecated", FutureWarning)
    # On a CPU it would spend minutes compiling a kernel for shared-memory collectives before the first step.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_init_required=False)  # it uses the existing process group
    return deepspeed


def cpu_accepts_fp16(deepspeed: Any) -> bool:
    """Return DeepSpeed's own answer on a CPU rank; it raises its own error if training starts anyway."""
    accelerator, fake = deepspeed.get_accelerator(), fake_cpu_fp16()
    if fake is not None:
        accelerator.is_fp16_supported = lambda: fake
    return bool(accelerator.is_fp16_supported())


def optimizer_of_shapes(
    make_optimizer: Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer],
    named_parameters: Iterable[tuple[str, nn.Parameter]],
) -> torch.optim.Optimizer:
    """Create the optimizer from stand-ins: it groups weights by shape, which partitioned weights do not show."""
    stand_ins: dict[nn.Parameter, tuple[str, nn.Parameter]] = {}
    for name, p in named_parameters:
        shape = getattr(p, "ds_shape", p.shape)
        stand_in = nn.Parameter(torch.zeros(1, device=p.device).expand(shape), requires_grad=p.requires_grad)
        stand_ins[stand_in] = (name, p)
    optimizer = make_optimizer((name, stand_in) for stand_in, (name, _) in stand_ins.items())
    for group in optimizer.param_groups:
        group["params"] = [stand_ins[stand_in][1] for stand_in in group["params"]]
    return optimizer


def shape_of(p: Any) -> tuple[int, ...]:
    """Return the shape of the whole weight, also of one that zero3 has sharded."""
    return tuple(getattr(p, "ds_shape", p.shape))


def partition(p: Any, data_rank: int) -> list[Chunk]:
    """Return this rank's shard of a zero3 weight: every weight is sharded evenly, with padding at the end."""
    size = p.ds_tensor.numel()
    begin = size * data_rank
    return flat_chunks(p.ds_tensor.detach()[: max(0, min(size, p.ds_numel - begin))], tuple(p.ds_shape), begin)


class Masters:
    """The fp32 masters and the optimizer state, which DeepSpeed keeps as flat tensors."""

    def __init__(
        self, zero: Any, optimizer: torch.optim.Optimizer, module: nn.Module, stage: int, data_rank: int
    ) -> None:
        self.zero, self.optimizer, self.module = zero, optimizer, module
        self.stage, self.data_rank = stage, data_rank

    def walk(self, write: bool = False) -> Iterator[tuple[str, list[Chunk]]]:
        """Yield this rank's part of every master weight and of its optimizer state, one flat group at a time.

        A group on disk is in memory only while it is yielded. Values that the caller writes are copied to the model's
        compute weights at the end. All ranks must iterate over everything.
        """
        if write and self.stage == 3:
            self.zero._partition_all_parameters()
        for i, flat in enumerate(self.flats()):
            swapped = self.stage == 3 and self.zero._swappable_optimizer_subgroup(i)
            if swapped:
                self.zero._optimizer_states_and_gradient_swap_in(i)
            weights = dict(self.trained())
            for key, values in {"": flat, **self.optimizer_state(i, flat)}.items():
                weight, _, slot = key.rpartition(".")  # Adafactor has slots for each weight
                if slot in FACTORS:
                    yield f"optim.{key}", chunks_of(values)
                if weight and slot == VARIANCE:
                    *_, begin = self.place(weights[weight])
                    yield f"optim.{key}", flat_chunks(values, shape_of(weights[weight]), begin)
                if weight or not isinstance(values, Tensor) or values.shape != flat.shape:
                    continue
                for name, p in weights.items():
                    group, at, numel, begin = self.place(p)
                    if group == i:
                        whole = shape_of(p)
                        chunks = flat_chunks(values.detach()[at : at + numel], whole, begin)
                        yield (f"optim.{name}.{key}" if key else f"model.{name}"), chunks
            if write and self.stage == 3:
                self.zero._reassign_or_swap_out_partitioned_parameters(i)
            if swapped:
                self.zero._optimizer_states_and_gradient_swap_out(i)
        if write and self.stage == 3:
            self.zero._post_step(set())  # gathers the weights that are not sharded
        elif write:
            self.zero.update_lp_params()

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]

    def flats(self) -> list[Tensor]:
        if self.stage == 3:
            return list(self.zero.fp32_partitioned_groups_flat)
        return [group["params"][0] for group in self.optimizer.param_groups]

    def place(self, p: Any) -> tuple[int, int, int, int]:
        """Return this rank's part of a weight: flat group, offset, length, and offset in the weight."""
        if self.stage == 3:  # every weight is sharded evenly; the end is padded
            group, at, size = self.zero.grad_position[self.zero.get_param_id(p)]
            begin = size * self.data_rank
            return group, at, max(0, min(size, p.ds_numel - begin)), begin
        mapping = p._hp_mapping  # all weights of a group are concatenated and sharded as one
        if mapping is None:  # other ranks hold all of it
            return -1, 0, 0, 0
        master, weight = mapping.hp_fragment_address, mapping.lp_fragment_address
        return mapping.param_group_index, master.start, master.numel, weight.start

    def optimizer_state(self, i: int, flat: Tensor) -> dict[str, Any]:
        if self.stage == 3:  # zero3 shows its optimizer one group at a time
            group = self.optimizer.param_groups[self.zero.sub_group_to_group_id[i]]
            group["params"] = [flat]
            init_optimizer_state(self.optimizer)
            group["params"] = []
        else:
            init_optimizer_state(self.optimizer)
        return self.optimizer.state[flat]

    def pieces(self) -> dict[Tensor, list[Piece]]:
        """Return what each flat tensor holds of the weights."""
        flats = self.flats()
        found: dict[Tensor, list[Piece]] = {flat: [] for flat in flats}
        for name, p in self.trained():
            group, at, numel, begin = self.place(p)
            if numel:
                flat = flats[group].detach()
                for c in flat_chunks(flat[at : at + numel], shape_of(p), begin):
                    start = int(c.values.storage_offset()) - int(flat.storage_offset())
                    found[flats[group]].append(Piece(name, c.whole_shape, c.offset, c.shape, start))
        return found

    # ---- DeepSpeed counts updates per flat group, we per weight ----------------------------------------------

    def counts(self) -> dict[str, dict[str, float]]:
        counts = {}
        flats = self.flats()
        for name, p in self.trained():
            group, _, numel, _ = self.place(p)
            if numel:
                slots = self.optimizer.state[flats[group]].items()
                counts[name] = {k: float(v) for k, v in slots if not (isinstance(v, Tensor) and v.dim())}
        return counts

    def set_counts(self, counts: dict[str, dict[str, float]]) -> None:
        for i, flat in enumerate(self.flats()):
            of_group = [counts[name] for name, p in self.trained() if self.place(p)[0] == i]
            if any(count != of_group[0] for count in of_group):
                raise CheckpointError(
                    "ZeRO counts updates per parameter group, but these weights have different counts"
                )
            own = {k for k, v in self.optimizer.state[flat].items() if not (isinstance(v, Tensor) and v.dim())}
            if of_group and own - of_group[0].keys():
                raise CheckpointError("the checkpoint has no update counts. Fix: use an older checkpoint")
            for key, value in of_group[0].items() if of_group else ():
                self.optimizer.state[flat][key].fill_(value)
