"""AdamW as one GPU kernel, with weights in bf16 and moments in bf16 or int8; torch's own step elsewhere."""

from __future__ import annotations

import functools
import importlib.util
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dtrain.errors import bad
from dtrain.kernels import BLOCK, SCALES, fits_bf16, fits_int8, int8_blocks, stochastic_rounding
from dtrain.kernels.stochastic_rounding import Place, place_of, rounded
from dtrain.util import late_dynamo
from dtrain.util.dtensor import chunks_of, is_dtensor, local

Moments = Literal["fp32", "bf16", "int8"]
KINDS = (torch.float32, torch.bfloat16)  # dtypes that the kernel supports; moments may also be int8
MAX_PLANS = 16  # cached plans; DeepSpeed may step its weights in several parts
PIECE = 2**16  # elements that plain ops update at a time, which then fit into a cache; a multiple of BLOCK


class AdamW(torch.optim.AdamW):
    """torch's AdamW, with its formula; on a GPU one kernel, with stochastic rounding of what is in bf16 or int8.

    On a CPU, fp32 parameters with fp32 moments use torch's own step, bit for bit. `seed` seeds the rounding: every
    random number depends on the seed, the step, the parameter's number and the element's index, so replicas stay
    identical, and all layouts round alike.
    """

    seed = 0
    moments: Moments | None = None  # how those of large matrices are held; None: all of them as the parameters are
    numbers: Mapping[Tensor, int] = {}  # of parameters, the same under every layout; the default is their index
    watched = False  # whether its kernel keeps checksums of parameters and state (train/update_sums.py)
    _plans: dict[tuple[int, ...], Plan] | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        stochastic = self.moments in ("bf16", "int8") or any(
            p.dtype == torch.bfloat16 for group in self.param_groups for p in group["params"]
        )
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
        """Build a plan: each parameter with a gradient and its state, which is created if it is missing."""
        number = {id(p): self.numbers.get(p, i) for i, p in enumerate(parameters)}
        if self.moments is not None:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None and not self.state[p]:
                        self._create_state(p, bool(group["fused"]))
        steps = []
        for i, group in enumerate(self.param_groups):
            lists: list[list[Tensor]] = [[] for _ in range(6)]
            self._init_group(group, *lists)
            steps += [Step(p, self.state[p], i, number[id(p)]) for p in lists[0]]
        other = any(group["amsgrad"] or group["maximize"] for group in self.param_groups)
        fits = has_kernel() and not other and all(step.fits for step in steps)
        return Plan(parameters, has, self.state, len(self.state), steps, fits)

    def _create_state(self, p: Tensor, fused: bool) -> None:
        """As torch does, but with large parameters' moments in the dtype that was asked for."""
        slots = self.state[p]
        slots["step"] = torch.zeros((), dtype=torch.float32, device=p.device if fused else "cpu")
        if self.moments == "int8" and fits_int8(p.shape):
            for (key, scale), dtype in zip(SCALES.items(), (torch.int8, torch.uint8), strict=True):
                slots[key] = torch.zeros_like(p, dtype=dtype, memory_format=torch.contiguous_format)
                slots[scale] = zero_scales(p)
            return
        dtype = torch.bfloat16 if self.moments == "bf16" and fits_bf16(p.shape) else torch.float32
        for key in SCALES:
            slots[key] = torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)

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
            s.count += 1
            s.update(gradient, self.param_groups[s.group], self.seed)
        plan.gradients = []


def zero_scales(p: Tensor) -> Tensor:
    """Return the scales of a parameter's int8 moments, all 0: one for each block, sharded like the parameter."""
    values = local(p)
    if values.shape[1] % BLOCK:
        rule = (
            f"a rank has {values.shape[1]} of the {p.shape[1]} columns of a matrix, and {BLOCK} of them share a scale"
        )
        raise bad("optim.state", "int8", rule, "a smaller strategy.tp, or optim.state=bf16")
    scales = torch.zeros(values.shape[0], values.shape[1] // BLOCK, device=values.device)
    if not is_dtensor(p):
        return scales
    from torch.distributed.tensor import DTensor

    shape = torch.Size((p.shape[0], p.shape[1] // BLOCK))
    of_p: Any = p
    mesh, places = of_p.device_mesh, of_p.placements
    return DTensor.from_local(scales, mesh, places, run_check=False, shape=shape, stride=(shape[1], 1))


class Step:
    """One parameter to step: this rank's shard of it and of its moments."""

    def __init__(self, parameter: Tensor, slots: dict[str, Tensor], group: int, number: int) -> None:
        """`number`: of the parameter, for the draws of the rounding."""
        self.parameter, self.slots, self.group, self.number = parameter, slots, group, number
        self.keys = [key for pair in SCALES.items() for key in pair if key in slots]
        self.moments, self.count = [slots[key] for key in self.keys], slots["step"]
        held = dict(zip(self.keys, map(local, self.moments), strict=True))
        self.values, (self.first, self.second) = local(parameter), (held[key] for key in SCALES)
        self.scales = [held[key] for key in SCALES.values() if key in held]

    def is_current(self) -> bool:
        same = all(self.slots.get(key) is held for key, held in zip(self.keys, self.moments, strict=True))
        return same and self.slots.get("step") is self.count and local(self.parameter) is self.values

    @property
    def fits(self) -> bool:
        """Return whether the kernel can step it: on a GPU, of a supported dtype, and dense in memory."""
        p = self.values
        dense = p.is_contiguous() or (p.dim() == 4 and p.is_contiguous(memory_format=torch.channels_last))
        alike = p.stride() == self.first.stride() == self.second.stride()
        known = p.dtype in KINDS and (self.first.dtype in KINDS or bool(self.scales))
        return p.is_cuda and dense and alike and known and self.count.is_cuda

    @property
    def tensors(self) -> list[Tensor]:
        """Return all that the kernel updates; it has as many rows in its table."""
        return [self.values, self.first, self.second, self.count, *self.scales]

    @property
    def place(self) -> Place:
        """Return where this shard lies in the whole parameter."""
        if not is_dtensor(self.parameter):
            return Place()
        chunk = chunks_of(self.parameter.detach())[0]
        return place_of(chunk.whole_shape, chunk.offset, chunk.shape)

    @property
    def is_rounded(self) -> bool:
        return torch.bfloat16 in (self.values.dtype, self.first.dtype) or bool(self.scales)

    def matching(self, gradient: Tensor) -> Tensor:
        """Return the gradient with the parameter's memory order."""
        if gradient.stride() == self.values.stride():
            return gradient
        return torch.empty_like(self.values, dtype=gradient.dtype).copy_(gradient)

    def update(self, gradient: Tensor, group: dict[str, Any], seed: int) -> None:
        """Update with plain ops, a piece at a time."""
        lr, eps, (beta1, beta2), count = group["lr"], group["eps"], group["betas"], int(self.count)
        held = (self.values, self.first, self.second)
        p_all, m_all, v_all = (t.reshape(-1) for t in held)  # copies of what is not contiguous
        g_all, place = gradient.reshape(-1), self.place
        for begin in range(0, len(g_all), PIECE):
            part, blocks = slice(begin, begin + PIECE), slice(begin // BLOCK, (begin + PIECE) // BLOCK)
            p_at, m_at, v_at, g = p_all[part], m_all[part], v_all[part], g_all[part].float()
            m_scale, v_scale = [scales.view(-1)[blocks] for scales in self.scales] or (None, None)
            m = beta1 * load(m_at, m_scale) + (1 - beta1) * g
            v = beta2 * load(v_at, v_scale) + (1 - beta2) * (g * g)
            root = v.sqrt() * (1 - beta2**count) ** -0.5 + eps
            p = p_at.float() * (1 - lr * group["weight_decay"]) - lr / (1 - beta1**count) * (m / root)
            noise = None
            if self.is_rounded:
                noise = stochastic_rounding.words(len(g), seed, count, self.number, g.device, place, begin)
            # the high bits of each 16 matter most, and no two of the three share them
            store(p_at, p, noise, 0)
            store(m_at, m, noise, 8, m_scale)
            store(v_at, v, noise, 16, v_scale)
        for t, flat in zip(held, (p_all, m_all, v_all), strict=True):
            if not t.is_contiguous():
                t.copy_(flat.view(t.shape))


def load(held: Tensor, scales: Tensor | None) -> Tensor:
    """Return the fp32 values of what is held in any dtype."""
    return held.float() if scales is None else int8_blocks.values(held, scales)


def store(held: Tensor, x: Tensor, words: Tensor | None, shift: int, scales: Tensor | None = None) -> None:
    """Round values to what is held, by 16 bits of each random word."""
    noise = 0 if words is None else words >> shift & 0xFFFF
    if scales is not None:
        encode = int8_blocks.first_codes if held.dtype == torch.int8 else int8_blocks.second_codes
        x, new = encode(x, noise)
        scales.copy_(new)
    elif held.dtype == torch.bfloat16:
        assert isinstance(noise, Tensor)
        x = rounded(x, noise)
    held.copy_(x)


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
        return self.state is state and self.num_states == len(state) and all(s.is_current() for s in self.steps)

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
            tensors = [list(row) for row in zip(*(s.tensors for s in steps), strict=True)]
            batch, before = known.get(kind, (None, []))
            if before != chosen or not batch.holds(tensors):
                groups, numbers = [s.group for s in steps], [s.number for s in steps]
                batch = Batch(tensors, groups, numbers, [s.place for s in steps])
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
