"""AdamW as one GPU kernel, with stochastic rounding of bf16 weights; torch's own step elsewhere."""

from __future__ import annotations

import functools
import importlib.util
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.kernels import stochastic_rounding
from dtrain.util import late_dynamo
from dtrain.util.dtensor import chunks_of, is_dtensor, local

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
        return late_dynamo.step_of(torch.optim.AdamW)(self, closure)

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
