"""Precision: which type the matrix products use, and the loss scale that float16 needs."""

from __future__ import annotations

import contextlib
from typing import Any, Literal

import torch

MIN_SCALE = 2.0**-14  # below this an overflow is no matter of scale: the loss itself is broken


class Precision:
    """fp32, bf16 or fp16 products over float32 parameters.

    `stream` is the type of the residual stream, what flows from block to block.

    The loss scale is plain arithmetic on one number. Whether a step overflowed is read from the global gradient
    norm, the same on all ranks under every strategy; so no strategy needs a scaler of its own.
    """

    def __init__(
        self,
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        stream: Literal["float32", "bfloat16", "float16"] = "float32",
        init_scale: float = 65536.0,
        growth_interval: int = 2000,
    ) -> None:
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.stream: torch.dtype = getattr(torch, stream)  # of what flows from block to block
        self.scaled = dtype == "float16"
        self.scale = init_scale if self.scaled else 1.0
        self.growth_interval = growth_interval
        self.good_steps = 0

    def autocast(self, device_type: str) -> contextlib.AbstractContextManager[Any]:
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(device_type, self.dtype)

    def update(self, finite: bool) -> bool:
        """Adapt the scale after a step. True if a non-finite step was only an overflow that a smaller scale cures."""
        if not self.scaled:
            return False
        if finite:
            self.good_steps += 1
            if self.good_steps % self.growth_interval == 0:
                self.scale *= 2.0
            return False
        self.good_steps = 0
        self.scale /= 2.0
        return self.scale >= MIN_SCALE

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        if self.scaled and state.get("scale", 1.0) != 1.0:  # a run that was not fp16 before keeps its fresh scale
            self.scale, self.good_steps = state["scale"], int(state["good_steps"])
