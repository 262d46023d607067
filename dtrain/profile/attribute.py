"""Attribute every instant of the recorded steps to one part, so that the parts add up to the step.

The input is torch.profiler's Chrome trace. On a GPU an instant belongs to the kernel that runs then: compute before
communication before copies, so communication counts only where no compute overlaps it. If the GPU is idle, the instant
belongs to what the CPU does meanwhile. On a CPU the main thread's ops take the kernels' place. Streams and nested ops
overlap, so durations are never summed: the timeline is walked once.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

# The ranges that dtrain.profile.record puts around the phases of a step.
MARK = "dtrain: "
PHASES = {"data": "data", "forward_backward": "forward", "update": "optimizer"}  # method → phase

COMPUTE = ("matrix_products", "attention", "norms_and_elementwise", "softmax_and_loss", "other_compute")
PARTS = (
    *COMPUTE, "optimizer", "exposed_communication", "copies", "data_wait", "between_steps", "host_gaps",
)  # fmt: skip
TOP = 20  # kernels in the table

# The first pattern that matches a kernel's or op's name decides. Compiled (Triton) kernels come first: their names list
# all fused ops, so one that only prepares attention's input also has attention in its name. Attention comes before
# GEMMs, because its kernel names often contain both.
KINDS = (
    ("softmax_and_loss", r"triton_(poi|red|per)_.*(softmax|nll_loss|cross_entropy|logsumexp)"),
    ("norms_and_elementwise", r"triton_(poi|red|per)_"),
    ("communication", r"nccl|^c10d::|^gloo:|^mpi:|all_reduce|reduce_scatter|all_gather|_c10d_functional"),
    ("attention", r"flash|fmha|attention|sdpa|attn"),
    ("matrix_products", r"gemm|nvjet|cutlass|cublas|xmma|splitk|gemv|wgrad|dgrad|fprop|convol|winograd|triton_tem|"
                        r"aten::(addmm|mm|bmm|baddbmm|linear|matmul|addmv|mv|dot|einsum|mkldnn|_scaled_mm)|dnnl"),
    ("softmax_and_loss", r"softmax|nll_loss|cross_entropy|logsumexp|mse_loss|loss_and_gradient"),
    ("copies", r"^(Memcpy|Memset)|aten::(copy_|_to_copy|to|clone|contiguous|cat|stack|_foreach_copy_|fill_|zero_)$|"
               r"split_with_sizes_copy|chunk_cat|copy_in|copy_out|CatArrayBatchedCopy|direct_copy"),
    ("norms_and_elementwise", r"norm|elementwise|vectorized|gelu|silu|dropout|bernoulli|reduce|"
                              r"multi_tensor|embedding|CompiledFxGraph|aten::(_foreach|add|sub|mul|div|sum|mean|pow|sqr|"
                              r"where|exp|tanh|rsqrt|neg|relu|sigmoid|cos|sin|addc|lerp|_fused)"),
)  # fmt: skip
_KINDS = [(kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in KINDS]


def kind_of(name: str) -> str:
    """Return the kind of a kernel or an op, by its name."""
    return next((kind for kind, pattern in _KINDS if pattern.search(name)), "other_compute")


@dataclass(frozen=True)
class Item:
    """Something that takes time. At each instant the highest level counts; among equals, the one that began last."""

    start: float
    end: float
    level: int
    part: str
    phase: str


WORK, SENDING, COPYING, WAITING, HOST, LOOP = 5, 4, 3, 2, 1, 0


class Host:
    """What the main thread did when, from the ranges around the phases and from autograd's backward pass."""

    def __init__(self, events: list[dict[str, Any]]) -> None:
        marks = [e for e in events if e["name"].startswith(MARK) and e.get("cat") == "user_annotation"]
        self.thread = marks[0]["tid"] if marks else None
        self.phases = sorted((start(e), end(e), PHASES[e["name"].removeprefix(MARK)]) for e in marks)
        # autograd's engine: in this thread on a CPU, in its own on a GPU. A gap between two nodes still counts as
        # backward.
        nodes = [(start(e), end(e)) for e in events if e["name"].startswith("autograd::engine::evaluate_function")]
        self.backward = merged(nodes, gap=1000.0)
        self.ends = [e for _, e, phase in self.phases if phase == "optimizer"]

    def phase(self, time: float) -> str:
        """Return data, forward, backward, optimizer, or between_steps for the rest of the loop."""
        i = bisect.bisect_right(self.phases, (time, float("inf"), "")) - 1
        if i < 0 or self.phases[i][1] <= time:
            return "between_steps"
        return "backward" if self.phases[i][2] == "forward" and inside(time, self.backward) else self.phases[i][2]

    def items(self) -> Iterable[Item]:
        """Yield the timeline's lowest levels: what the CPU does while nothing is computed, communicated or copied."""
        for begin, stop, phase in self.phases:
            yield Item(begin, stop, HOST, "data_wait" if phase == "data" else "host_gaps", phase)
            if phase == "forward":
                for low, high in self.backward:
                    if begin < high and low < stop:
                        yield Item(max(begin, low), min(stop, high), HOST, "host_gaps", "backward")


def table(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return a trace's steps as parts and phases, in ms of a mean step and in %, with the longest kernels.

    The trace has one extra step, whose update only marks where the first counted step begins. GPU work that remains
    from it is not counted, but GPU work that remains at the end is.
    """
    events = [e for e in events if e.get("ph") == "X"]
    host = Host(events)
    assert len(host.ends) >= 2, "a trace has the end of at least two steps"
    on_gpu = any(e.get("cat") == "kernel" for e in events)
    work, first, last = _on_gpu(events, host) if on_gpu else _on_cpu(events, host)
    num_steps = len(host.ends) - 1
    items = [Item(first, last, LOOP, "between_steps", "between_steps"), *host.items(), *(item for item, _ in work)]
    parts, phases, counted = dict.fromkeys(PARTS, 0.0), defaultdict[str, float](float), defaultdict[int, float](float)
    for duration, item in walk(items, first, last):
        parts[item.part] += duration
        phases[item.phase] += duration
        counted[id(item)] += duration
    wall = last - first
    kernels: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for item, name in work:
        if first <= item.start < last:  # on a CPU, an op's time excludes nested ops, which have their own line
            nested = not on_gpu and item.level == WORK
            kernels[name].append((item.part, counted[id(item)] if nested else item.end - item.start))

    def share(time: float) -> dict[str, float]:
        return {"ms": time / num_steps / 1000, "percent": 100 * time / wall}

    sending = merged([(max(i.start, first), min(i.end, last)) for i, _ in work if i.part == "exposed_communication"])
    return {
        "device": "cuda" if on_gpu else "cpu",
        "num_steps": num_steps,
        "step_ms": wall / num_steps / 1000,
        "parts": {part: share(time) for part, time in parts.items()},
        "compute": share(sum(parts[kind] for kind in COMPUTE)),
        "communication": share(sum(high - low for low, high in sending if high > low)),
        "phases": {phase: share(phases[phase]) for phase in ("data", "forward", "backward", "optimizer")}
        | {"between_steps": share(phases["between_steps"])},
        "kernels": [
            {"name": name, "part": calls[0][0], "calls": len(calls) / num_steps, **share(sum(t for _, t in calls))}
            for name, calls in sorted(kernels.items(), key=lambda pair: -sum(t for _, t in pair[1]))[:TOP]
        ],
    }


Named = tuple[Item, str]


def _on_gpu(events: list[dict[str, Any]], host: Host) -> tuple[list[Named], float, float]:
    """Return kernels and copies with the phase in which the CPU launched them, and when the first and last step end."""
    launched = {
        e["args"]["correlation"]: start(e)
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    work: list[Named] = []
    first, last = host.ends[0], host.ends[0]
    for e in events:
        if e.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        launch = launched.get(e.get("args", {}).get("correlation"), start(e))
        if launch <= host.ends[0]:
            first = max(first, end(e))
        if launch <= host.ends[-1]:
            last = max(last, end(e))
        kind = kind_of(e["name"]) if e["cat"] == "kernel" else "copies"
        level = {"communication": SENDING, "copies": COPYING}.get(kind, WORK)
        work.append((_item(e, level, kind, host.phase(launch)), e["name"]))
    last = max(last, host.ends[-1])
    # collectives on the CPU, such as gloo's: they count while the GPU is idle
    work += [named for named in _collectives(events, host, WAITING) if not named[1].startswith("nccl")]
    return work, first, last


def _on_cpu(events: list[dict[str, Any]], host: Host) -> tuple[list[Named], float, float]:
    """Return the main thread's ops; the time of autograd and Python around them counts as host gaps."""
    work = []
    for e in events:
        compiled = "CompiledFxGraph" in e["name"]  # its C++ kernels have no events of their own
        is_op = e.get("cat") == "cpu_op" and re.match(r"aten::|fsdp::|mkldnn", e["name"])
        if e["tid"] == host.thread and (is_op or compiled):
            work.append((_item(e, WORK, kind_of(e["name"]), host.phase(start(e))), e["name"]))
    return [*work, *_collectives(events, host, SENDING)], host.ends[0], host.ends[-1]


def _collectives(events: list[dict[str, Any]], host: Host, level: int) -> Iterable[Named]:
    """Yield collectives as the CPU sees them, except the loop's own: its vote only waits for other ranks."""
    for e in events:
        if re.match(r"c10d::|gloo:", e["name"]) and host.phase(start(e)) != "between_steps":
            yield _item(e, level, "communication", host.phase(start(e))), e["name"]


def _item(event: dict[str, Any], level: int, kind: str, phase: str) -> Item:
    part = "exposed_communication" if kind == "communication" else kind
    if phase == "optimizer" and kind not in ("communication", "copies"):
        part = "optimizer"
    if phase == "between_steps" and kind != "copies":  # for example an evaluation
        part = "between_steps"
    return Item(start(event), end(event), level, part, phase)


def start(event: dict[str, Any]) -> float:
    """In microseconds."""
    return float(event["ts"])


def end(event: dict[str, Any]) -> float:
    return float(event["ts"]) + float(event.get("dur", 0))


def walk(items: Iterable[Item], first: float, last: float) -> Iterable[tuple[float, Item]]:
    """Yield the intervals between `first` and `last`, each with the item that counts there; they cover all of it."""
    items = sorted((i for i in items if i.end > first and i.start < last and i.end > i.start), key=lambda i: i.start)
    times = sorted({first, last, *(t for i in items for t in (i.start, i.end) if first < t < last)})
    active: list[tuple[int, float, int, Item]] = []
    position = 0
    for low, high in itertools.pairwise(times):
        while position < len(items) and items[position].start <= low:
            item = items[position]
            heapq.heappush(active, (-item.level, -item.start, -position, item))
            position += 1
        while active and active[0][3].end <= low:
            heapq.heappop(active)
        if active:
            yield high - low, active[0][3]


def merged(intervals: Iterable[tuple[float, float]], gap: float = 0.0) -> list[tuple[float, float]]:
    """Return the union of intervals, sorted; those that overlap or are closer than `gap` are merged."""
    union: list[tuple[float, float]] = []
    for low, high in sorted(intervals):
        if union and low <= union[-1][1] + gap:
            union[-1] = (union[-1][0], max(union[-1][1], high))
        else:
            union.append((low, high))
    return union


def inside(time: float, union: list[tuple[float, float]]) -> bool:
    i = bisect.bisect_right(union, (time, float("inf"))) - 1
    return i >= 0 and time < union[i][1]
