"""Optimizers, created from named parameters, and the rule that scales the learning rate with the batch."""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dtrain.config.build import build, locate
from dtrain.config.files import TARGET
from dtrain.errors import bad
from dtrain.kernels import stochastic_rounding
from dtrain.optim.lion import Lion
from dtrain.util.dtensor import chunks_of, is_dtensor, local

MakeOptimizer = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]

KINDS = (torch.float32, torch.bfloat16)  # dtypes that the kernel supports
MAX_PLANS = 16  # cached plans; DeepSpeed may step its weights in several parts


class AdamW(torch.optim.AdamW):
    """torch's AdamW, with its state and formula; on a GPU one kernel, with stochastic rounding of bf16 parameters.

    On a CPU, fp32 parameters use torch's own step, bit for bit. `seed` seeds the rounding: every random number depends
    on the seed, the step, the parameter and the element's index, so replicas stay identical.
    """

    seed = 0
    watched = False  # whether its kernel keeps checksums of parameters and state (train/update_sums.py)
    _plans: dict[tuple[int, ...], Plan] | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        stochastic = any(p.dtype == torch.bfloat16 for group in self.param_groups for p in group["params"])
        if closure is None and (stochastic or has_kernel()):
            plan = self._plan()
            if plan.fits:
                return self._launch(plan, None, None)
            if stochastic:
                return self._step_stochastic(plan)
            plan.gradients = []
        return super().step(closure)

    @torch.no_grad()
    def step_if(self, finite: Tensor, factor: Tensor | None = None) -> None:
        """Step with all gradients times `factor`, unless `finite` is false. On a GPU there is no host sync."""
        plan = self._plan()
        if plan.fits:
            self._launch(plan, finite, factor)
            return
        gradients, plan.gradients = plan.gradients, []
        if bool(finite):
            if factor is not None:
                torch._foreach_mul_(gradients, factor)
            self.step()

    def _plan(self) -> Plan:
        """Return what to step, with this step's gradients. It is cached: rebuilding takes 10 µs per parameter."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters]
        has = [g is not None for g in gradients]
        if self._plans is None or len(self._plans) > MAX_PLANS:
            self._plans = {}
        key = tuple(map(id, parameters))
        plan = self._plans.get(key)
        if plan is None or plan.has != has or not plan.is_current(self.state):
            plan = self._plans[key] = self._new_plan(parameters, has)
        plan.gradients = [local(g) for g in gradients if g is not None]
        return plan

    def _new_plan(self, parameters: list[nn.Parameter], has: list[bool]) -> Plan:
        """Build a plan: each parameter with a gradient and its state, which is created as torch does if missing."""
        number = {id(p): i for i, p in enumerate(parameters)}
        steps = []
        for i, group in enumerate(self.param_groups):
            lists: list[list[Tensor]] = [[] for _ in range(6)]
            self._init_group(group, *lists)
            steps += [Step(p, self.state[p], i, number[id(p)]) for p in lists[0]]
        other = any(group["amsgrad"] or group["maximize"] for group in self.param_groups)
        fits = has_kernel() and not other and all(step.fits for step in steps)
        return Plan(parameters, has, self.state, len(self.state), steps, fits)

    def _launch(self, plan: Plan, finite: Tensor | None, factor: Tensor | None) -> None:
        if not plan.steps:
            return
        one = torch.ones((), device=plan.steps[0].values.device)
        finite, factor = (one if t is None else t.to(one) for t in (finite, factor))
        for batch, chosen in plan.batches():
            gradients = [plan.steps[i].matching(plan.gradients[i]) for i in chosen]
            batch.watched = self.watched
            batch.step(gradients, self._settings(), finite, factor, self.seed)
        plan.gradients = []  # kept until the next step, gradients would be in memory twice

    def _settings(self) -> list[tuple[float, ...]]:
        return [(g["lr"], g["weight_decay"], *g["betas"], g["eps"]) for g in self.param_groups]

    def sender(self) -> Callable[[], None]:
        """Return the function that sends the current settings to the step just captured (strategies/cuda_graph.py)."""
        launches = [(b, b.places, b.fresh) for plan in (self._plans or {}).values() for b, *_ in plan.launches]

        def send() -> None:
            for batch, places, fresh in launches:
                batch.send(places, self._settings(), self.seed)
                assert batch.fresh is fresh, "the captured graph reads another table"

        return send

    def compare(self) -> list[Comparison]:
        """Start to compare parameters and state with the checksums of what the kernel wrote, without a host sync."""
        return [Comparison(parameters, batch, batch.differences()) for parameters, batch in self._watched()]

    def watched_parameters(self) -> list[Tensor]:
        return [p for parameters, _ in self._watched() for p in parameters]

    def forget_sums(self) -> None:
        """Compute the checksums anew at the next update: something else has written parameters or state.

        torch counts what it writes to a plain tensor, and the kernel sees that; it does not for shards of a DTensor.
        """
        for plan in (self._plans or {}).values():
            for batch, *_ in plan.launches:
                batch.versions = []

    def _watched(self) -> list[tuple[list[Tensor], Any]]:
        """Return the launches that have checksums."""
        launches = [(plan.steps, *launch) for plan in (self._plans or {}).values() for launch in plan.launches]
        return [
            ([steps[i].parameter for i in chosen], batch)
            for steps, batch, _, chosen in launches
            if batch.watched and batch.has_sums()
        ]

    def is_on_device(self) -> bool:
        """Return whether its last steps were kernel launches without a host sync."""
        plans = list((self._plans or {}).values())
        return bool(plans) and all(plan.fits for plan in plans)

    def _step_stochastic(self, plan: Plan) -> None:
        """The kernel's step, written with plain ops."""
        for s, gradient in zip(plan.steps, plan.gradients, strict=True):
            group = self.param_groups[s.group]
            lr, eps, (beta1, beta2) = group["lr"], group["eps"], group["betas"]
            s.count += 1
            count = int(s.count)
            g, m, v = gradient.float(), s.first.float(), s.second.float()
            m = beta1 * m + (1 - beta1) * g
            v = beta2 * v + (1 - beta2) * (g * g)
            root = v.sqrt() * (1 - beta2**count) ** -0.5 + eps
            p = s.values.float() * (1 - lr * group["weight_decay"]) - lr / (1 - beta1**count) * (m / root)
            if s.values.dtype == s.first.dtype == torch.bfloat16:
                noise = stochastic_rounding.words(p.numel(), self.seed, count, s.number, s.offset, p.device).view(
                    p.shape
                )
                p, m, v = (stochastic_rounding.rounded(t, noise >> at & 0xFFFF) for t, at in ((p, 0), (m, 8), (v, 16)))
            s.values.copy_(p)
            s.first.copy_(m)
            s.second.copy_(v)
        plan.gradients = []


class Step:
    """One parameter to step: this rank's shard of it and of its moments."""

    def __init__(self, parameter: Tensor, slots: dict[str, Tensor], group: int, number: int) -> None:
        """`number`: its index among all parameters."""
        self.parameter, self.slots, self.group, self.number = parameter, slots, group, number
        self.moments, self.count = (slots["exp_avg"], slots["exp_avg_sq"]), slots["step"]
        self.values, self.first, self.second = local(parameter), *map(local, self.moments)

    @property
    def fits(self) -> bool:
        """Return whether the kernel can step it: on a GPU, of a supported dtype, and dense in memory."""
        p = self.values
        dense = p.is_contiguous() or (p.dim() == 4 and p.is_contiguous(memory_format=torch.channels_last))
        alike = p.stride() == self.first.stride() == self.second.stride()
        return p.is_cuda and dense and alike and p.dtype in KINDS and self.first.dtype in KINDS and self.count.is_cuda

    @property
    def offset(self) -> int:
        """Return at which element of the whole parameter this shard begins; sharding is by rows."""
        if not is_dtensor(self.parameter):
            return 0
        strides = torch.empty(self.parameter.shape, device="meta").stride()
        return sum(o * n for o, n in zip(chunks_of(self.parameter.detach())[0].offset, strides, strict=True))

    def matching(self, gradient: Tensor) -> Tensor:
        """Return the gradient with the parameter's memory order."""
        if gradient.stride() == self.values.stride():
            return gradient
        return torch.empty_like(self.values, dtype=gradient.dtype).copy_(gradient)


@dataclass
class Plan:
    """What a step works on, valid while parameters and state are the same objects in the same memory."""

    parameters: list[nn.Parameter]  # all of the optimizer's; held, so that their ids are not reused
    has: list[bool]  # which have a gradient
    state: Any
    num_states: int
    steps: list[Step]
    fits: bool
    gradients: list[Tensor] = field(default_factory=list)
    launches: list[tuple[Any, tuple[Any, ...], list[int]]] = field(default_factory=list)

    def is_current(self, state: Any) -> bool:
        return self.state is state and self.num_states == len(state) and all(
            s.slots.get("exp_avg") is s.moments[0] and s.slots.get("exp_avg_sq") is s.moments[1]
            and s.slots.get("step") is s.count
            and local(s.parameter) is s.values
            for s in self.steps
        )  # fmt: skip

    def batches(self) -> Iterator[tuple[Any, list[int]]]:
        """Yield what the kernel steps in one launch, grouped by dtypes: usually everything."""
        from dtrain.kernels.adamw import Batch

        kinds = defaultdict(list)
        for i, (step, gradient) in enumerate(zip(self.steps, self.gradients, strict=True)):
            kinds[step.values.dtype, gradient.dtype, step.first.dtype].append(i)
        known = {kind: (batch, chosen) for batch, kind, chosen in self.launches}
        self.launches = []
        for kind, chosen in kinds.items():
            steps = [self.steps[i] for i in chosen]
            tensors = [[getattr(s, name) for s in steps] for name in ("values", "first", "second", "count")]
            batch, before = known.get(kind, (None, []))
            if before != chosen or not batch.holds(tensors):
                groups, numbers = [s.group for s in steps], [s.number for s in steps]
                batch = Batch(tensors, groups, numbers, [s.offset for s in steps])
            self.launches.append((batch, kind, chosen))
            yield batch, chosen


@dataclass
class Comparison:
    """What a launch steps, and how much its checksums differ, still on the GPU."""

    parameters: list[Tensor]
    batch: Any
    differences: Tensor

    def changed(self) -> list[Tensor]:
        """Return the parameters of which a bit changed in memory, or one of their moments or update count."""
        return [self.parameters[i] for i in self.batch.changed(self.differences)]


@functools.cache
def has_kernel() -> bool:
    """Triton comes with torch on machines with a GPU."""
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
    """AdamW with weight decay on matrices only; one fused kernel over all parameters on a GPU."""
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
    """SGD with momentum, common for convolutional nets; weight decay on matrices and kernels only."""
    peak = scaled_lr(lr, lr_scaling, global_batch_size, base_batch_size)
    groups, fused = grouped(named_parameters, weight_decay, peak)
    return torch.optim.SGD(groups, lr=peak, momentum=momentum, nesterov=nesterov, fused=fused)


def lion(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    lr: float,
    betas: list[float],
    weight_decay: float = 1.0,
    lr_scaling: Literal["none", "linear", "sqrt"] = "none",
    base_batch_size: int = 256,
    global_batch_size: int = 256,
) -> Lion:
    """Lion with weight decay on matrices only."""
    peak = scaled_lr(lr, lr_scaling, global_batch_size, base_batch_size)
    groups, _ = grouped(named_parameters, weight_decay, peak)
    return Lion(groups, lr=peak, betas=(betas[0], betas[1]))


def rmsprop(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    lr: float,
    alpha: float = 0.99,
    eps: float = 1e-8,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    lr_scaling: Literal["none", "linear", "sqrt"] = "none",
    base_batch_size: int = 256,
    global_batch_size: int = 256,
) -> torch.optim.RMSprop:
    """torch's RMSprop with weight decay on matrices only."""
    peak = scaled_lr(lr, lr_scaling, global_batch_size, base_batch_size)
    groups, _ = grouped(named_parameters, weight_decay, peak)
    return torch.optim.RMSprop(groups, lr=peak, alpha=alpha, eps=eps, momentum=momentum)


# ---- any other optimizer -------------------------------------------------------------------------------------


def factory(section: Any, trust: Iterable[str], global_batch_size: int) -> MakeOptimizer:
    """Return the function that makes the configured optimizer from named parameters.

    conf/optim has such functions. Any torch.optim.Optimizer class can be named, too; its other arguments are settings.
    """
    trust = tuple(trust)
    target = locate(section[TARGET], trust)
    if not (isinstance(target, type) and issubclass(target, torch.optim.Optimizer)):
        takes_batch = "global_batch_size" in inspect.signature(target).parameters
        return build(section, trust, partial=True, **({"global_batch_size": global_batch_size} if takes_batch else {}))
    step = inspect.signature(target.step).parameters
    if "closure" in step and step["closure"].default is inspect.Parameter.empty:
        rule = "needs a closure that computes the loss again, which no strategy gives"
        raise bad("optim", section[TARGET], rule, "an optimizer whose step() needs no arguments")
    if issubclass(target, (torch.optim.Rprop, torch.optim.ASGD)):
        rule = "its state starts from the learning rate, which the schedule changes at every step"
        raise bad("optim", section[TARGET], rule, "optim=rmsprop, or optim=sgd")
    return functools.partial(of_class, build(section, trust, partial=True))


def of_class(
    make: Callable[..., torch.optim.Optimizer], named_parameters: Iterable[tuple[str, nn.Parameter]]
) -> torch.optim.Optimizer:
    """Make an optimizer of a user's class, with its own default rate; weight decay, if it has any, of matrices only."""
    groups, _ = grouped(named_parameters, 0.0, 0.0)
    matrices = [all(p.dim() >= 2 for p in group["params"]) for group in groups]
    optimizer = make([{"params": group["params"]} for group in groups])
    for group, is_matrix in zip(optimizer.param_groups, matrices, strict=True):
        group["peak_lr"] = group["lr"]
        if "weight_decay" in group and not is_matrix:
            group["weight_decay"] = 0.0
    return optimizer


def check(make: MakeOptimizer, splits_weights: bool) -> None:
    """Try three updates of a small matrix; refuse an optimizer that a checkpoint or this strategy cannot hold.

    `splits_weights`: ranks hold parts of matrices, so updates of two halves must be the halves of the update.
    """
    whole, optimizer = updated(make, parts=1)
    name = type(optimizer).__name__
    for slots in optimizer.state.values():
        for key, value in slots.items():
            if not isinstance(value, (Tensor, int, float)) or (
                isinstance(value, Tensor) and value.numel() > 1 and value.shape != whole.shape
            ):
                rule = f"its state {key} is neither one number nor shaped like the weight, and is not saved"
                raise bad("optim", name, rule, "optim=adamw, lion, rmsprop or sgd")
    if splits_weights and not all(torch.allclose(whole, updated(make, 2, dim)[0], 1e-5, 1e-7) for dim in (0, 1)):
        rule = "updates whole matrices, and under this strategy a rank holds only a part of each"
        fix = "strategy=ddp or pipeline, or an optimizer that updates each element by itself"
        raise bad("optim", name, rule, fix)


def updated(make: MakeOptimizer, parts: int, dim: int = 0) -> tuple[Tensor, torch.optim.Optimizer]:
    """Return a matrix after three updates of its parts, and their optimizer."""
    generator = torch.Generator().manual_seed(0)
    values, *gradients = torch.randn(4, 4, 4, generator=generator)
    parameters = [nn.Parameter(chunk.clone()) for chunk in values.chunk(parts, dim)]
    optimizer = make((str(i), p) for i, p in enumerate(parameters))
    settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    for gradient in gradients:
        for p, chunk in zip(parameters, gradient.chunk(parts, dim), strict=True):
            p.grad = chunk.clone()
        optimizer.step()
    if settings != [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]:
        rule = "changes its own settings at each step, and these are not saved"
        raise bad("optim", type(optimizer).__name__, rule, "an optimizer that keeps its state per weight")
    return torch.cat([p.detach() for p in parameters], dim), optimizer


def grouped(
    named_parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float, peak: float
) -> tuple[list[dict[str, Any]], bool]:
    """Group the trained parameters by weight decay; also return whether a fused kernel supports them.

    Each group keeps its peak rate under "peak_lr"; the loop sets "lr" from it before every step.
    """
    trained = [p for _, p in named_parameters if p.requires_grad]
    # a fused kernel needs parameters of one kind: plain tensors, or DTensors of one mesh
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
