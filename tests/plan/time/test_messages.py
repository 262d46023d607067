"""The calls of a step as the planner lists them, against those that real runs make."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dtrain.commands.verify import compare, world
from dtrain.config.build import TRUST
from dtrain.config.run_file import load
from dtrain.plan.layout import layout_of
from dtrain.plan.model_shape import shape_of
from dtrain.plan.time.messages import Message, messages
from tests.world import SMALL, World, make_run, start_server

STEP = 3  # of those that are counted: DDP has rebuilt its buckets, a pipeline has its shapes
KINDS = {
    "allreduce_": "all_reduce", "all_reduce": "all_reduce", "_allgather_base_": "all_gather",
    "all_gather_into_tensor": "all_gather", "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter", "send": "send_recv", "broadcast_": "broadcast",
}  # fmt: skip
Call = tuple[str, int, int]  # kind, bytes, ranks of the group


def train_and_count(run_dir: Path) -> int:
    """A rank that trains, and writes the calls of one step: as torch's dispatcher sees them, and as gloo does.

    The dispatcher does not see calls inside DTensor's own operations; gloo's recorder does not see sends, and has a
    reduce-scatter as the all-reduce that gloo makes of it. Together they know all.
    """
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import _dump_fr_trace_json
    from torch.utils._python_dispatch import TorchDispatchMode

    from dtrain.strategies.base import Strategy
    from dtrain.strategies.ddp import DDP

    def size(x: Any) -> int:
        if isinstance(x, torch.Tensor):
            return x.numel() * x.element_size()
        return sum(map(size, x)) if isinstance(x, (list, tuple)) else 0

    def ranks(args: Any) -> int:
        for arg in args:
            if isinstance(arg, torch.ScriptObject):
                try:
                    return dist.ProcessGroup.unbox(arg).size()
                except Exception:
                    continue
        name = next(arg for arg in reversed(args) if isinstance(arg, str))
        return dist.distributed_c10d._resolve_process_group(name).size()

    class Calls(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.found: list[Call] = []

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            space, name, *_ = str(function).split(".")
            if "c10d" in space and name in KINDS:
                gathered = ranks(args) if name == "all_gather_into_tensor" else 1
                num_bytes = size(args[1]) if name == "_reduce_scatter_base_" else size(args[0]) * gathered
                self.found.append((KINDS[name], num_bytes, ranks(args)))
            return function(*args, **(kwargs or {}))

    def recorded() -> list[Any]:
        return json.loads(_dump_fr_trace_json()).get("entries", [])

    steps = 0

    def counted(plain: Any) -> Any:
        def train_step(self: Any, *batch: Any) -> Any:
            nonlocal steps
            steps += type(self).train_step is train_step
            if steps != STEP or type(self).train_step is not train_step:
                return plain(self, *batch)
            before = len(recorded())
            with Calls() as calls:
                result = plain(self, *batch)
            entries = [(e["profiling_name"], e["input_sizes"], e["input_dtypes"]) for e in recorded()[before:]]
            content = json.dumps({"calls": calls.found, "recorded": entries})
            (run_dir / f"calls-{dist.get_rank()}.json").write_text(content)
            return result

        return train_step

    for kind in (Strategy, DDP):
        kind.train_step = counted(kind.__dict__["train_step"])  # type: ignore[method-assign]
    return world.train_rank(run_dir)


def group_size(message: Message, layout: Any) -> int:
    shards = layout.replica_size or layout.dp
    shards = 1 if layout.strategy != "fsdp" and layout.data == "ddp" else shards
    sizes = {"world": layout.world_size, "data": layout.dp, "tensor": layout.tp, "pipeline": layout.pp}
    return (sizes | {"shard": shards, "replicate": layout.dp // shards})[message.group]


def check(tmp_path: Path, size: int, *words: str) -> None:
    asked = ["model.dim=128", "train.steps=4", f"cluster.processes={size}", *words]
    run = make_run(tmp_path / "run", *asked)
    start_server()
    codes = World(size, train_and_count, run, env={TRUST: "", "TORCH_FR_BUFFER_SIZE": "20000"}).join()
    assert codes == [0] * size
    config = load(run) | {"choices": compare.resolve(compare.compose([*SMALL, *asked]))["choices"]}
    layout, model = layout_of(config), shape_of(config)
    assert model is not None
    for rank in range(size):
        listed: Counter[Call] = Counter()
        for m in messages(model, layout, rank // (size // layout.pp)):
            listed[m.kind, m.num_bytes, group_size(m, layout)] += m.count
        content = json.loads((run / f"calls-{rank}.json").read_text())
        seen = Counter(tuple(call) for call in content["calls"])
        assert not seen - listed, (rank, seen - listed, listed - seen)
        for call in listed:
            assert call[0] not in ("send_recv", "reduce_scatter") or seen[call] == listed[call], (rank, call)
        sizes = {"Float": 4, "BFloat16": 2}
        by_gloo: Counter[tuple[str, int]] = Counter()
        for name, shapes, dtypes in content["recorded"]:
            elements = sum(math.prod(shape) for shape in shapes)
            by_gloo[name.removeprefix("gloo:"), elements * sizes[dtypes[0]]] += 1
        expected: Counter[tuple[str, int]] = Counter()
        for (kind, num_bytes, ranks), count in listed.items():
            if kind == "all_gather":
                expected[kind, num_bytes // ranks] += count
            elif kind != "send_recv":
                expected["all_reduce", num_bytes] += count
        assert by_gloo == expected, (rank, by_gloo - expected, expected - by_gloo)


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (2, ["strategy=ddp", "strategy.bucket_mb=1", "train.micro_batch_size=2"]),
        (2, ["strategy=fsdp", "train.micro_batch_size=2", "precision=bf16"]),
        (2, ["strategy=tensor", "strategy.sequence_parallel=true"]),
        (2, ["strategy=pipeline"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else str(value),
)
def test_real_runs_call_what_is_listed(size: int, words: list[str], tmp_path: Path) -> None:
    check(tmp_path, size, *words)


LLAMA = ["model=llama-tiny", "model.num_kv_heads=2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "words"),
    [
        (2, ["strategy=ddp", "strategy.bucket_mb=1", *LLAMA, "model.dim=256"]),
        (3, ["strategy=fsdp", "train.global_batch_size=6", *LLAMA]),
        (2, ["strategy=fsdp", "strategy.sharding=grad_op", "train.micro_batch_size=2"]),
        (4, ["strategy=fsdp", "strategy.sharding=hybrid", "strategy.replica_size=2", "train.micro_batch_size=1"]),
        (2, ["strategy=tensor", "strategy.loss_parallel=true", *LLAMA]),
        (4, ["strategy=tensor", "strategy.tp=2", "strategy.loss_parallel=true", "train.micro_batch_size=2"]),
        (4, ["strategy=tensor", "strategy.tp=2", "strategy.sequence_parallel=true", "train.micro_batch_size=2"]),
        (4, ["strategy=tensor", "strategy.tp=2", "strategy.data=ddp", "train.micro_batch_size=2"]),
        (4, ["strategy=pipeline", "strategy.pp=4", "strategy.schedule=gpipe"]),
        (2, ["strategy=pipeline", "strategy.schedule=interleaved_1f1b"]),
        (2, ["strategy=pipeline", "strategy.schedule=zbv", *LLAMA]),
        (4, ["strategy=pipeline", "strategy.pp=2"]),
        (4, ["strategy=pipeline", "strategy.pp=2", "strategy.data=ddp"]),
        (4, ["strategy=3d", "strategy.pp=2", "strategy.tp=2", "strategy.sequence_parallel=true"]),
        (2, ["strategy=ddp", "lora.rank=4"]),
        (2, ["strategy=fsdp", "lora.rank=4", "precision=bf16"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_more_layouts(size: int, words: list[str], tmp_path: Path) -> None:
    check(tmp_path, size, *words)
