"""Optimizers, made from named parameters, and the rule that scales the learning rate with the batch."""

from __future__ import annotations

import functools
import importlib.util
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dtrain.kernels import rounding
from dtrain.shards import chunks_of, is_dtensor

KINDS = (torch.float32, torch.bfloat16)  # of tensors that the kernel knows
MAX_BATCHES = 64  # that are remembered; DeepSpeed may step its weights in many, one after another


class AdamW(torch.optim.AdamW):
    """torch's AdamW with its state and its formula; on a GPU one kernel, and bfloat16 parameters rounded by chance.

    On a CPU, float32 parameters take torch's own step, to the bit. `seed` is that of the rounding: with it, the step,
    the parameter and the place in it every random number is settled, so copies of a model stay copies.
    """

    seed = 0
    _batches: dict[Any, Any] | None = None  # by where the parameters lie: what one launch of the kernel steps

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        by_chance = any(p.dtype == torch.bfloat16 for group in self.param_groups for p in group["params"])
        if closure is None and (by_chance or has_kernel()):
            steps = self._steps()
            if self._fits(steps):
                return self._launch(steps, None, None)
            if by_chance:
                return self._step_by_chance(steps)
        return super().step(closure)

    @torch.no_grad()
    def step_if(self, finite: Tensor, factor: Tensor | None = None) -> None:
        """Step with all gradients times `factor`, unless `finite` is false. On a GPU the host asks for neither."""
        steps = self._steps()
        if self._fits(steps):
            self._launch(steps, finite, factor)
        elif bool(finite):
            if factor is not None:
                torch._foreach_mul_([step.gradient for step in steps], factor)
            self.step()

    def _steps(self) -> list[Step]:
        """What is to be stepped: every parameter with a gradient, its state made if there is none."""
        numbers = {p: i for i, p in enumerate(p for group in self.param_groups for p in group["params"])}
        found = []
        for i, group in enumerate(self.param_groups):
            lists: list[list[Tensor]] = [[] for _ in range(6)]
            self._init_group(group, *lists)
            parameters, gradients, first, second, _, steps = lists
            for p, g, m, v, step in zip(parameters, gradients, first, second, steps, strict=True):
                found.append(Step(p, local(p), local(g), local(m), local(v), step, i, numbers[p]))
        return found

    def _fits(self, steps: list[Step]) -> bool:
        """Whether the kernel can do it."""
        other = any(group["amsgrad"] or group["maximize"] for group in self.param_groups)
        return has_kernel() and not other and all(step.fits for step in steps)

    def _launch(self, steps: list[Step], finite: Tensor | None, factor: Tensor | None) -> None:
        from dtrain.kernels.adamw import Batch

        if not steps:
            return
        if self._batches is None or len(self._batches) > MAX_BATCHES:
            self._batches = {}
        one = torch.ones((), device=steps[0].values.device)
        finite, factor = (one if t is None else t.to(one) for t in (finite, factor))
        settings = [(g["lr"], g["weight_decay"], *g["betas"], g["eps"]) for g in self.param_groups]
        kinds = defaultdict(list)  # usually one
        for step in steps:
            kinds[step.values.dtype, step.gradient.dtype, step.first.dtype].append(step)
        for kind, alike in kinds.items():
            tensors = [[getattr(s, name) for s in alike] for name in ("values", "first", "second", "count")]
            key = (kind, *(p.data_ptr() for p in tensors[0]))
            batch = self._batches.get(key)
            if batch is None or not batch.holds(tensors):
                groups, numbers = [s.group for s in alike], [s.number for s in alike]
                batch = self._batches[key] = Batch(tensors, groups, numbers, [s.offset for s in alike])
            batch.step([s.matching() for s in alike], settings, finite, factor, self.seed)

    def _step_by_chance(self, steps: list[Step]) -> None:
        """The kernel's step with plain operations."""
        for s in steps:
            group = self.param_groups[s.group]
            lr, eps, (beta1, beta2) = group["lr"], group["eps"], group["betas"]
            s.count += 1
            count = int(s.count)
            g, m, v = s.gradient.float(), s.first.float(), s.second.float()
            m = beta1 * m + (1 - beta1) * g
            v = beta2 * v + (1 - beta2) * (g * g)
            root = v.sqrt() * (1 - beta2**count) ** -0.5 + eps
            p = s.values.float() * (1 - lr * group["weight_decay"]) - lr / (1 - beta1**count) * (m / root)
            if s.values.dtype == s.first.dtype == torch.bfloat16:
                noise = rounding.words(p.numel(), self.seed, count, s.number, s.offset, p.device).view(p.shape)
                p, m, v = (rounding.by_chance(t, noise >> at & 0xFFFF) for t, at in ((p, 0), (m, 8), (v, 16)))
            s.values.copy_(p)
            s.first.copy_(m)
            s.second.copy_(v)


@dataclass(slots=True)
class Step:
    """One parameter to be stepped: this rank's part of it, of its gradient and of its moments."""

    parameter: Tensor
    values: Tensor
    gradient: Tensor
    first: Tensor
    second: Tensor
    count: Tensor  # of its steps so far
    group: int
    number: int  # among all parameters

    @property
    def fits(self) -> bool:
        """Whether the kernel can step it: on a GPU, of a type that it knows, and without gaps in memory."""
        p = self.values
        dense = p.is_contiguous() or (p.dim() == 4 and p.is_contiguous(memory_format=torch.channels_last))
        return p.is_cuda and dense and p.dtype in KINDS and self.first.dtype in KINDS and self.count.is_cuda

    @property
    def offset(self) -> int:
        """At which element of the whole parameter this part begins; rows are what is cut."""
        if not is_dtensor(self.parameter):
            return 0
        strides = torch.empty(self.parameter.shape, device="meta").stride()
        return sum(o * n for o, n in zip(chunks_of(self.parameter.detach())[0].offset, strides, strict=True))

    def matching(self) -> Tensor:
        """The gradient, its elements in the order of the parameter's."""
        if self.gradient.stride() == self.values.stride():
            return self.gradient
        return torch.empty_like(self.values, dtype=self.gradient.dtype).copy_(self.gradient)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    if type(tensor) in (Tensor, nn.Parameter):  # to look for an attribute in vain takes 0.5 µs, times thousands
        return tensor
    return tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


@functools.cache
def has_kernel() -> bool:
    """Triton comes with torch where there is a GPU."""
    return torch.cuda.is_available() and importlib.util.find_spec("triton") is not None


def adamw(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    lr: float,
    betas: list[float],
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    lr_scaling: Literal["none", "linear", "sqrt"] = "none",
    base_batch_size: int = 256,
    global_batch_size: int = 256,
) -> AdamW:
    """AdamW with decay on matrices only; one fused kernel over all parameters where there is a GPU."""
    peak = scaled_lr(lr, lr_scaling, global_batch_size, base_batch_size)
    groups, fused = grouped(named_parameters, weight_decay, peak)
    return AdamW(groups, lr=peak, betas=(betas[0], betas[1]), eps=eps, fused=fused)


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
