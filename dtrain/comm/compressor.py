"""Averages of gradients that take fewer bytes than an all-reduce of fp32, with all state by parameter name.

What a step does not send (its error) is added to the next gradient of the same parameter, so nothing is lost, only
late. A step's errors count only once its update is made: a skipped step (overflow, spike), a replayed one and DDP's
rehearsal leave no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.util.dtensor import Chunk, Held, chunks_of

Gradients = dict[str, Tensor]


class Compressor:
    """Replaces gradients by their mean over the ranks of a group. Every rank has one and calls it alike."""

    def __init__(
        self, parameters: Mapping[str, Tensor], group: dist.ProcessGroup, device: torch.device, warmup: int = 0
    ) -> None:
        self.group, self.device, self.warmup = group, device, warmup
        self.num_ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.steps = 0  # of this run, updated or skipped; the first `warmup` of them are sent whole
        self.runner: Any = None  # where it runs beside the backward pass: a thread or a CUDA stream
        self.scale = 1.0  # of the loss, and so of the gradients; errors are kept without it
        trained = {name: chunks_of(p.detach())[0] for name, p in parameters.items() if p.requires_grad}
        self.places = {name: place for name, place in trained.items() if self.compresses(place.shape)}
        self.state: dict[str, Tensor] = {}  # by NAME.KEY; keys and shapes are fixed from here on
        self.pending: dict[str, Tensor] = {}  # the state after this step, if its update is made
        for name, place in self.places.items():
            for key, value in self.new_state(name, place.shape).items():
                self.state[f"{name}.{key}"] = value

    # ---- what a word defines ---------------------------------------------------------------------------------

    def compresses(self, shape: tuple[int, ...]) -> bool:
        """Norms and biases are sent whole: they are few, and sensitive."""
        return len(shape) > 1 and 0 not in shape

    def new_state(self, name: str, shape: tuple[int, ...]) -> dict[str, Tensor]:
        return {"error": torch.zeros(shape, device=self.device)}

    def exchange(self, gradients: Gradients) -> None:
        """Average these gradients in place, and put the state after this step into `pending`."""
        raise NotImplementedError

    # ---- a step ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def average(self, gradients: Gradients) -> None:
        """Replace each gradient by its mean over the ranks, in fp32 also if the caller is in autocast."""
        with torch.autocast(self.device.type, enabled=False):
            self._average(gradients)

    def _average(self, gradients: Gradients) -> None:
        large = {n: g for n, g in gradients.items() if n in self.places and self.steps >= self.warmup}
        small = self.start_whole([g for n, g in gradients.items() if n not in large])
        if large:
            self.exchange(large)
        small()  # it was on its way while the large ones were compressed

    def start_whole(self, gradients: list[Tensor], dtype: torch.dtype | None = None) -> Callable[[], None]:
        """Start an all-reduce of these gradients; the returned function waits for it and copies the means back."""
        if not gradients:
            return lambda: None
        flat = torch.cat([g.reshape(-1) for g in gradients]).div_(self.num_ranks)
        flat = flat if dtype is None else flat.to(dtype)
        work = dist.all_reduce(flat, group=self.group, async_op=True)

        def finish() -> None:
            assert work is not None
            work.wait()
            for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(mean.view(gradient.shape))

        return finish

    def owed(self, name: str, gradient: Tensor) -> Tensor:
        """The gradient and what earlier steps did not send of it, in fp32."""
        return torch.add(gradient.float(), self.state[f"{name}.error"].view(gradient.shape), alpha=self.scale)

    def keep(self, name: str, key: str, value: Tensor) -> None:
        """Note the state after this step; `value` has the loss scale."""
        value = value.reshape(self.state[f"{name}.{key}"].shape)
        self.pending[f"{name}.{key}"] = value if self.scale == 1.0 else value.div(self.scale)

    def end_step(self, updated: bool | Tensor) -> None:
        """Take over the state of a step whose update was made. A Tensor: only the GPU knows whether it was."""
        self.steps += 1
        for key, value in self.pending.items():
            if isinstance(updated, Tensor):
                self.state[key] = torch.where(updated, value, self.state[key])
            elif updated:
                self.state[key] = value
        self.pending = {}

    def discard(self) -> None:
        self.pending = {}

    # ---- checkpoints -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Held]:
        """Errors are saved with a leading dimension for the ranks, of which each rank holds its own row."""
        held: dict[str, Held] = {}
        for name, place in self.places.items():
            if (error := self.state.get(f"{name}.error")) is not None:
                whole, offset = (self.num_ranks, *place.whole_shape), (self.rank, *place.offset)
                held[f"comm.{name}.error"] = [Chunk(error.unsqueeze(0), whole, offset)]
        return held

    def extra_state(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, extra: dict[str, Any]) -> None:
        """After a load has filled the tensors of `state_dict()`, with zeros where the checkpoint has none."""
        self.steps = extra.get("steps", 0)
        self.discard()


class Cast(Compressor):
    """fp16 or bf16 on the way: half the bytes. What rounding loses is not kept."""

    def __init__(self, dtype: torch.dtype, *arguments: Any) -> None:
        self.dtype = dtype
        super().__init__(*arguments)

    def compresses(self, shape: tuple[int, ...]) -> bool:
        return True

    def new_state(self, name: str, shape: tuple[int, ...]) -> dict[str, Tensor]:
        return {}

    def exchange(self, gradients: Gradients) -> None:
        self.start_whole(list(gradients.values()), self.dtype)()
