"""Optimizers, made from named parameters, and the rule that scales the learning rate with the batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import nn


def adamw(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    lr: float,
    betas: list[float],
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    lr_scaling: Literal["none", "linear", "sqrt"] = "none",
    base_batch_size: int = 256,
    global_batch_size: int = 256,
) -> torch.optim.AdamW:
    """AdamW with decay on matrices only; one fused kernel over all parameters where there is a GPU."""
    peak = scaled_lr(lr, lr_scaling, global_batch_size, base_batch_size)
    groups, fused = grouped(named_parameters, weight_decay, peak)
    return torch.optim.AdamW(groups, lr=peak, betas=(betas[0], betas[1]), eps=eps, fused=fused)


def sgd(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    lr: float,
    momentum: float = 0.9,
    nesterov: bool = False,
    weight_decay: float = 1e-4,
    lr_scaling: Literal["none", "linear", "sqrt"] = "none",
    base_batch_size: int = 256,
    global_batch_size: int = 256,
) -> torch.optim.SGD:
    """SGD with momentum, as convolutional nets are often trained; decay on matrices and kernels only."""
    peak = scaled_lr(lr, lr_scaling, global_batch_size, base_batch_size)
    groups, fused = grouped(named_parameters, weight_decay, peak)
    return torch.optim.SGD(groups, lr=peak, momentum=momentum, nesterov=nesterov, fused=fused)


def grouped(
    named_parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float, peak: float
) -> tuple[list[dict[str, Any]], bool]:
    """The trained parameters in groups with and without decay, and whether a fused kernel can take them.

    Each group keeps its peak rate under "peak_lr"; the loop sets "lr" from it before every step.
    """
    trained = [p for _, p in named_parameters if p.requires_grad]
    # a kernel over many parameters wants them of one kind: plain tensors, or DTensors of one mesh
    groups: dict[tuple[bool, Any], list[nn.Parameter]] = {}
    for p in trained:
        groups.setdefault((p.dim() >= 2, getattr(p, "device_mesh", None)), []).append(p)
    options = [
        {"params": parameters, "weight_decay": weight_decay if is_matrix else 0.0, "peak_lr": peak}
        for (is_matrix, _), parameters in sorted(groups.items(), key=lambda item: not item[0][0])
    ]
    return options, all(p.device.type == "cuda" for p in trained)


def scaled_lr(lr: float, rule: str, global_batch_size: int, base_batch_size: int) -> float:
    """lr × (batch / base)^power: power 1 keeps the step per sample (Goyal et al., 2017), ½ the noise scale of Adam."""
    power = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}[rule]
    return lr * (global_batch_size / base_batch_size) ** power
