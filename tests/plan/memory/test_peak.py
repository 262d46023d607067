"""Memory against the ZeRO paper's table, against what one H200 measured, against torch's schedules; its properties."""

from __future__ import annotations

import csv
import dataclasses
import importlib
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.commands.verify import compare
from dtrain.launch.resolve import resolve
from dtrain.plan.layout import Layout, layout_of
from dtrain.plan.ledger import by_part, total
from dtrain.plan.memory import phases
from dtrain.plan.memory.activations import GIB
from dtrain.plan.memory.peak import memory, reserve
from dtrain.plan.memory.pipeline import in_flight, rank_stages
from dtrain.plan.memory.states import (
    HeldParameters,
    gradient_bytes,
    held_by,
    held_whole,
    optimizer_bytes,
    resident_gradients,
    weight_bytes,
)
from dtrain.plan.model_shape import Shape, Transformer, resnet, shape_of
from dtrain.plan.parameters import has_tied_copy, parts, stages
from dtrain.train.build import make

PLANNER = Path(__file__).parents[3] / "benchmarks" / "planner"


def table() -> list[dict[str, str]]:
    lines = (PLANNER / "data" / "zero_table1.csv").read_text().splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def test_the_table_has_all_its_cells() -> None:
    assert len(table()) == 54


def of_the_paper(parameters: int, stage: int, dp: int) -> float:
    """What the planner's own functions give for ZeRO's stages 1 to 3, and for plain data parallel as stage 0.

    The paper's 16 bytes are 2 of weights, 2 of gradients and 12 of state. DeepSpeed as dtrain sets it up differs in one
    thing, gradients of 4 bytes, which are halved here. ddp has 4 of weights, 4 of gradients and 8 of state instead.
    """
    name = f"zero{stage}" if stage else "ddp"
    layout, held = Layout(name, data=name, dp=dp), HeldParameters(parameters, parameters, 0, 0, 0, 0, 0, 0)
    gradients = gradient_bytes(held, layout) * (2 / 4 if stage else 1)
    return weight_bytes(held, layout) + gradients + optimizer_bytes(held, layout)


@pytest.mark.parametrize("cell", table(), ids=lambda cell: f"{cell['parameters_b']}b-{cell['dp']}-{cell['stage']}")
def test_model_states_are_those_of_the_zero_paper(cell: dict[str, str]) -> None:
    """Rounded, or cut off, at the last digit that is printed: the paper does both."""
    computed = of_the_paper(round(float(cell["parameters_b"]) * 1e9), int(cell["stage"]), int(cell["dp"])) / 1e9
    digits = len(cell["gb"].partition(".")[2])
    shift = 10**digits
    allowed = {math.floor(computed * shift) / shift, math.floor(computed * shift + 0.5) / shift}
    assert float(cell["gb"]) in allowed


# ---- what was measured ---------------------------------------------------------------------------------------


def measured() -> list[Any]:
    sys.path.insert(0, str(PLANNER))
    try:
        compare = importlib.import_module("compare")
    finally:
        sys.path.pop(0)
    return [
        pytest.param(row, error, compare.layout_for(row), id=f"{i}-{compare.name_of(row)}")
        for i, (row, error, _) in enumerate(compare.errors(compare.RESULTS / "planner-h200.json"))
    ]


@pytest.mark.parametrize(("row", "error", "layout"), measured())
def test_the_peak_is_within_8_percent_of_measured_and_never_said_to_fit_where_it_does_not(
    row: dict[str, Any], error: float, layout: Layout
) -> None:
    assert abs(error) < 0.08
    predicted = (1 + error) * row["peak_gib"] * GIB
    outside = row.get("outside_gib", 0.69)
    assert predicted + reserve(layout, predicted) > (row["peak_gib"] + outside) * GIB


# ---- pipelines -----------------------------------------------------------------------------------------------


def most_waiting(actions: list[Any]) -> int:
    """The most forward passes whose backward pass has not been, in a rank's order of work."""
    waiting = most = 0
    for action in actions:
        kind = action.computation_type.value if action is not None else ""
        waiting += (kind == "F") - (kind in ("B", "W"))  # a backward pass in two halves keeps all until the second
        most = max(most, waiting)
    return most


@pytest.mark.parametrize(("pp", "local", "passes"), [(2, 2, 4), (4, 2, 8), (4, 3, 12), (4, 2, 4), (8, 2, 16)])
def test_interleaved_ranks_keep_as_many_passes_as_torchs_schedule(pp: int, local: int, passes: int) -> None:
    from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B as Schedule

    rounds = max(1, passes // pp)
    sizes: Any = SimpleNamespace(
        n_local_stages=local, microbatches_per_round=passes // rounds, pp_group_size=pp, _n_microbatches=passes
    )
    layout = Layout("pipeline", pp=pp, schedule="interleaved_1f1b", stages_per_rank=local, micro_batches=passes)
    for rank in range(pp):
        assert in_flight(layout, rank) == most_waiting(Schedule._calculate_single_rank_operations(sizes, rank))


@pytest.mark.parametrize(("pp", "passes"), [(2, 4), (4, 8), (4, 16), (8, 16), (4, 4)])
def test_zbv_ranks_keep_no_more_passes_than_said(pp: int, passes: int) -> None:
    from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble as Schedule

    sizes: Any = SimpleNamespace(pp_group_size=pp, _n_microbatches=passes, n_local_stages=2, num_stages=2 * pp)
    layout = Layout("pipeline", pp=pp, schedule="zbv", stages_per_rank=2, micro_batches=passes)
    found = [most_waiting(Schedule._calculate_single_rank_operations(sizes, rank)) for rank in range(pp)]
    assert all(count <= in_flight(layout, rank) for rank, count in enumerate(found))
    assert max(found) >= in_flight(layout, 0) - 1


def test_1f1b_keeps_fewer_passes_on_later_ranks_and_gpipe_keeps_all() -> None:
    layout = Layout("pipeline", pp=4, micro_batches=16)
    assert [in_flight(layout, rank) for rank in range(4)] == [4, 3, 2, 1]
    assert in_flight(dataclasses.replace(layout, schedule="gpipe"), 3) == 16


# ---- properties ----------------------------------------------------------------------------------------------


@st.composite
def transformers(draw: st.DrawFn) -> Transformer:
    heads = 8 * draw(st.integers(1, 8))
    kv = draw(st.sampled_from([heads, heads // 2 if heads % 16 == 0 else heads, 8]))
    dim = heads * 16 * draw(st.integers(1, 8))
    gated = draw(st.booleans())
    return Transformer(
        num_layers=draw(st.integers(8, 48)), dim=dim, num_heads=heads, num_kv_heads=kv,
        hidden_dim=dim * draw(st.integers(2, 5)), seq_len=128 * draw(st.integers(1, 32)),
        vocab_size=128 * draw(st.integers(1, 1000)), gated=gated, biased=not gated, rotary=gated, fused_qkv=not gated,
        tied=draw(st.booleans()),
    )  # fmt: skip


sizes = st.sampled_from([1, 2, 4, 8])
plain = st.sampled_from(["ddp", "fsdp", "zero1", "zero2", "zero3"])
modes = st.sampled_from(["none", "ops", "selective", "full"])
precisions = st.sampled_from(["bf16", "bf16-pure", "fp8", "fp16", "fp32"])
graphs = st.sampled_from(["none", "blocks"])


def peak(shape: Shape, layout: Layout, **changed: Any) -> float:
    if "strategy" in changed:
        changed["data"] = changed["strategy"]
    return total(memory(shape, dataclasses.replace(layout, **changed)))


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    name = draw(plain)
    return Layout(
        strategy=name, data=name, dp=draw(sizes), micro_batch_size=draw(sizes), micro_batches=draw(st.integers(1, 4)),
        activation_checkpointing=draw(modes), precision=(precision := draw(precisions)), fused_loss=draw(st.booleans()),
        stream=draw(st.sampled_from(["float32", "bfloat16"])) if precision.startswith("bf16") else "float32",
        compile=draw(st.sampled_from(["none", "blocks", "whole"])) if name == "ddp" else draw(graphs),
        bucket_mb=100 if name.startswith("zero") else 25,
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(transformers(), layouts(), sizes)
def test_more_gpus_never_need_more_memory_each(shape: Transformer, layout: Layout, more: int) -> None:
    """From two ranks on. The second brings what one alone does not have: ddp's buckets, zero3's gathered weights."""
    dp = max(layout.dp, 2)
    assert peak(shape, layout, dp=dp * more) <= peak(shape, layout, dp=dp)


@settings(max_examples=60, deadline=None)
@given(transformers(), layouts(), sizes)
def test_more_gpus_never_need_more_memory_each_under_fsdp(shape: Transformer, layout: Layout, more: int) -> None:
    assert peak(shape, layout, strategy="fsdp", dp=layout.dp * more) <= peak(shape, layout, strategy="fsdp")


@settings(max_examples=60, deadline=None)
@given(st.integers(10**6, 10**12), st.integers(2, 1024))
def test_each_stage_of_zero_needs_no_more_than_the_one_before(parameters: int, dp: int) -> None:
    states = [of_the_paper(parameters, stage, dp) for stage in range(4)]
    assert states == sorted(states, reverse=True)


@settings(max_examples=60, deadline=None)
@given(transformers(), st.integers(2, 64))
def test_a_server_has_the_optimizer_state_of_its_weights_and_a_copy_of_them_if_it_updates_at_any_time(
    shape: Transformer, dp: int
) -> None:
    ddp, sync, loose = (Layout("ps", data=data, dp=dp, precision="fp32") for data in ("ddp", "sync", "async"))
    mine = held_by(shape, sync, stages(shape, 1))
    owned = max(mine.trained / dp, mine.largest)
    assert optimizer_bytes(mine, sync) == 8 * owned and optimizer_bytes(mine, loose) == 12 * owned
    assert optimizer_bytes(mine, ddp) == 8 * mine.trained
    assert gradient_bytes(mine, sync) == gradient_bytes(mine, ddp) and weight_bytes(mine, sync) == 4 * mine.parameters


@settings(max_examples=60, deadline=None)
@given(transformers(), st.integers(2, 1024), precisions)
def test_zero3_holds_less_than_zero2_than_zero1_than_ddp(shape: Transformer, dp: int, precision: str) -> None:
    """Weights, gradients and optimizer state, from two ranks on. On one rank ZeRO's masters are only more."""
    held = []
    for name in ("ddp", "zero1", "zero2", "zero3"):
        layout = Layout(name, data=name, dp=dp, precision=precision)
        mine = held_by(shape, layout, stages(shape, 1))
        state = weight_bytes(mine, layout) + optimizer_bytes(mine, layout)
        held.append(state + max(gradient_bytes(mine, layout), resident_gradients(mine, layout)[0]))
    assert held == sorted(held, reverse=True)


@settings(max_examples=60, deadline=None)
@given(transformers(), layouts())
def test_checkpointing_saves_memory(shape: Transformer, layout: Layout) -> None:
    names = ("full", "selective", "ops", "none")
    full, some, ops, none = (peak(shape, layout, activation_checkpointing=mode) for mode in names)
    # what is computed again is there beside the layer's gradients: 2.3% more, in all, of small batches of wide layers
    again = peak(shape, layout, activation_checkpointing="full") * 0.05
    assert full <= some + again and some <= none + again
    assert ops <= none + again


@settings(max_examples=60, deadline=None)
@given(transformers(), layouts(), st.integers(1, 8))
def test_a_larger_batch_never_needs_less(shape: Transformer, layout: Layout, more: int) -> None:
    layout = dataclasses.replace(layout, fused_loss=False)  # of two equal chunks of logits each is smaller than of one
    larger = layout.micro_batch_size + more
    slack = 1.001  # a tensor that the allocator happens not to round up
    assert peak(shape, layout) <= peak(shape, layout, micro_batch_size=larger) * slack


@settings(max_examples=60, deadline=None)
@given(transformers(), sizes, modes, st.booleans(), st.booleans())
def test_tensor_ranks_share(shape: Transformer, batch: int, mode: str, sequence: bool, loss: bool) -> None:
    def on(tp: int, **changed: Any) -> float:
        layout = Layout("tensor", tp=tp, data="fsdp", micro_batch_size=batch, activation_checkpointing=mode)
        return peak(shape, layout, **changed)

    assert on(2) <= on(1) * 1.001 and on(8) <= on(2) * 1.001
    assert on(8, sequence_parallel=sequence, loss_parallel=loss) <= on(8) * 1.001


@settings(max_examples=40, deadline=None)
@given(transformers(), sizes, modes)
def test_a_pipeline_rank_holds_less_than_the_whole(shape: Transformer, batch: int, mode: str) -> None:
    whole = peak(shape, Layout("fsdp", data="fsdp", micro_batch_size=batch, activation_checkpointing=mode))
    states = {"parameters", "optimizer"}
    for pp in (2, 4, 8):
        layout = Layout("pipeline", pp=pp, data="fsdp", micro_batch_size=batch, micro_batches=pp)
        parts = by_part(memory(shape, layout))
        assert sum(parts[part] for part in states) < whole


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zbv"])
def test_gpipe_needs_the_most(name: str) -> None:
    shape = Transformer(32, 4096, 32, 32, 11008, 4096, 32000, gated=True, biased=False, rotary=True, tied=False)
    layout = Layout("pipeline", pp=4, data="fsdp", micro_batches=32, stages_per_rank=2)
    assert peak(shape, layout, schedule=name) < peak(
        shape, dataclasses.replace(layout, stages_per_rank=1), schedule="gpipe"
    )


@settings(max_examples=40, deadline=None)
@given(transformers(), sizes, st.sampled_from(["bf16", "fp32"]))
def test_fsdp_holds_the_first_block_and_the_ends_gathered_at_its_end(
    shape: Transformer, dp: int, precision: str
) -> None:
    e = 2 if precision == "bf16" else 4
    for data in ("fsdp", "grad_op"):
        layout = Layout("fsdp", dp=dp, data=data, precision=precision)
        held = held_whole(shape, layout)
        buffers = by_part(phases.first_items(shape, layout, held, shape.seq_len))["buffers"]
        assert buffers == e * (held.ends + held.block) + (e + 4) * held.block


@settings(max_examples=40, deadline=None)
@given(transformers(), st.integers(2, 8), st.sampled_from(["fsdp", "ddp"]))
def test_tensor_ranks_keep_no_gradients_twice_over_several_passes(shape: Transformer, passes: int, data: str) -> None:
    one = Layout("tensor", tp=2, dp=4, data=data)
    several = dataclasses.replace(one, micro_batches=passes)
    held = held_whole(shape, one)
    for moment in (phases.first_items, phases.ends_items):
        more = total(moment(shape, several, held, shape.seq_len)) - total(moment(shape, one, held, shape.seq_len))
        assert 0 <= more <= 4 * held.ends + 1e-6 * held.parameters


@settings(max_examples=40, deadline=None)
@given(transformers(), st.sampled_from([1, 4]), st.sampled_from(["1f1b", "zbv"]), st.booleans())
def test_a_tied_table_s_gradient_is_received_by_both_of_its_ranks(
    shape: Transformer, dp: int, schedule: str, tied: bool
) -> None:
    shape = dataclasses.replace(shape, tied=tied, num_layers=16)
    layout = Layout("pipeline", pp=4, dp=dp, data="fsdp", schedule=schedule, micro_batches=4)
    layout = dataclasses.replace(layout, stages_per_rank=2 if schedule == "zbv" else 1)
    received = []
    for rank in range(4):
        items = phases.update_items(layout, held_by(shape, layout, rank_stages(shape, layout, rank)[0]))
        received.append(sum(item.value for item in items if "received" in item.name))
    one = 4 * parts(shape).embed / dp if tied and schedule == "1f1b" else 0  # zbv has both on the first rank
    assert received == [one, 0, 0, one] and has_tied_copy(shape) == tied


def test_adapters_need_little_beside_the_frozen_model() -> None:
    shape = Transformer(32, 4096, 32, 8, 14336, 2048, 128256, gated=True, biased=False, rotary=True, tied=False)
    thin = dataclasses.replace(shape, lora_rank=16)
    parts = by_part(memory(thin, Layout("ddp", micro_batch_size=1)))
    assert parts["parameters"] < 17.5 * GIB and parts["optimizer"] < 0.4 * GIB
    assert parts["total"] < by_part(memory(shape, Layout("ddp", micro_batch_size=1)))["total"] / 3


@pytest.mark.parametrize("mode", ["none", "ops", "selective", "full"])
def test_convolutions_too_take_less_when_they_are_computed_again(mode: str) -> None:
    shape = resnet({"blocks": [3, 4, 6, 3], "bottleneck": True}, {}, {})
    whole, less = (peak(shape, Layout("ddp", micro_batch_size=64, activation_checkpointing=m)) for m in ("none", mode))
    assert less <= whole


def test_rows_that_are_set_aside_say_why_and_are_not_judged() -> None:
    rows = json.loads((PLANNER.parent / "results" / "planner-h200.json").read_text())["rows"]
    assert all(row["aside"] for row in rows if "aside" in row)
    assert not any("aside" in param.values[0] for param in measured())


def test_every_item_shows_its_arithmetic() -> None:
    shape = Transformer(12, 768, 12, 12, 3072, 1024, 50304)
    for name in ("ddp", "fsdp", "zero1", "zero2", "zero3"):
        for item in memory(shape, Layout(name, data=name, dp=8, micro_batch_size=8, activation_checkpointing="full")):
            assert item.arithmetic and item.value >= 0


@pytest.mark.parametrize("model", ["gpt2-tiny", "llama-tiny", "resnet18", "vit-tiny", "bert-tiny"])
def test_adafactors_state_is_what_torch_allocates(model: str) -> None:
    cfg = compare.compose([f"model={model}", "optim=adafactor", "cluster.processes=1"])
    config = resolve(cfg)
    shape = shape_of(config)
    assert shape is not None
    allocated = 0
    for p in make(cfg).parameters():
        allocated += p.numel() // p.shape[-1] + p.numel() // p.shape[-2] if p.dim() > 1 else p.numel()
    layout = layout_of(config)
    assert layout.moments == 0
    assert abs(optimizer_bytes(held_whole(shape, layout), layout) / (4 * allocated) - 1) < 0.02
