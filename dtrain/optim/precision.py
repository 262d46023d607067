"""Precision: the dtypes of matmuls, residual stream and parameters, and the loss scale that fp16 needs."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import nn

from dtrain.errors import bad

log = logging.getLogger("dtrain")
FLOAT8_MULTIPLE = 16  # both dimensions of a matrix must be multiples of it for float8 GEMMs
MIN_SCALE = 2.0**-14  # below this an overflow is not due to the scale: the loss itself is broken


class Precision:
    """One option of conf/precision; docs/performance.md has the table.

    `stream` is the dtype of the residual stream; `parameters` that of the weights, their gradients and the optimizer's
    moments; `float8` is how the linear layers of the blocks are scaled.

    The loss scale is plain arithmetic on one number. A step overflowed if the global gradient norm, the same on all
    ranks under every strategy, is not finite; so no strategy needs its own scaler.
    """

    def __init__(
        self,
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        stream: Literal["float32", "bfloat16", "float16"] = "float32",
        parameters: Literal["float32", "bfloat16"] = "float32",
        float8: Literal["none", "tensorwise", "rowwise"] = "none",
        init_scale: float = 65536.0,
        growth_interval: int = 2000,
    ) -> None:
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.stream: torch.dtype = getattr(torch, stream)
        self.parameters: torch.dtype = getattr(torch, parameters)
        self.float8 = float8
        self.scaled = dtype == "float16"
        self.scale = init_scale if self.scaled else 1.0
        self.growth_interval = growth_interval
        self.good_steps = 0

    def autocast(self, device_type: str) -> contextlib.AbstractContextManager[Any]:
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(device_type, self.dtype)

    def apply(self, model: nn.Module, device: torch.device, compiled: bool = True) -> None:
        """Convert a meta-device model to the dtypes of its weights and matmuls."""
        if self.parameters != torch.float32:
            for p in model.parameters():
                p.data = p.data.to(self.parameters)
        if self.float8 != "none":
            check_float8(device)
            if not compiled:
                log.warning("precision=fp8 is slower than bf16 unless its scaling is compiled: compile=auto")
            to_float8(model, self.float8)

    def update(self, finite: bool) -> bool:
        """Adapt the scale after a step. Return True if a non-finite step was an overflow that a smaller scale cures."""
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
        if self.scaled and state.get("scale", 1.0) != 1.0:  # a run that was not fp16 before keeps its initial scale
            self.scale, self.good_steps = state["scale"], int(state.get("good_steps", 0))


def check_float8(device: torch.device) -> None:
    """Check what only a rank can know: its GPU."""
    if importlib.util.find_spec("torchao") is None:
        raise bad("precision", "fp8", "torchao is not installed", "pip install 'dtrain[fp8]', or precision=bf16")
    if device.type != "cuda":
        raise bad("precision", "fp8", "needs a GPU, and there is none here", "precision=bf16")
    if torch.cuda.get_device_capability(device) < (8, 9):
        name = torch.cuda.get_device_name(device)
        raise bad("precision", "fp8", f"{name} has no float8 matmuls (Ada, Hopper and later do)", "precision=bf16")


def to_float8(model: nn.Module, scaling: str, emulate: bool = False) -> None:
    """Let torchao replace the linear layers of the model's blocks. Weights keep their names and values.

    `emulate` rounds to float8 and multiplies in fp32, which any device can do.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(scaling)
    if emulate:
        config = dataclasses.replace(config, emulate=True)
    units: list[nn.Module] = model.fsdp_units() if hasattr(model, "fsdp_units") else [model]  # type: ignore[operator]
    before = {id(m) for unit in units for m in unit.modules() if suits_float8(m)}
    if not before:
        rule = f"{type(model).__name__} has no linear layer in its blocks whose sides are multiples of 16"
        raise bad("precision", "fp8", rule, "precision=bf16")
    for unit in units:
        convert_to_float8_training(unit, module_filter_fn=lambda module, name: id(module) in before, config=config)


def suits_float8(module: nn.Module) -> bool:
    """Return whether a module is a plain linear layer (not an adapter's) with dimensions that float8 GEMMs support."""
    return (
        type(module) is nn.Linear
        and module.in_features % FLOAT8_MULTIPLE == 0
        and module.out_features % FLOAT8_MULTIPLE == 0
    )


def autocast_inside(
    forward: Callable[..., Any], autocast: Callable[[], AbstractContextManager[Any]]
) -> Callable[..., Any]:
    """Return a forward pass with its own autocast, for engines that run forward and backward passes for us."""

    def wrapped(*inputs: Any, **named: Any) -> Any:
        with autocast():
            return forward(*inputs, **named)

    return wrapped
