"""A configuration's layout: what the launcher would make of it, with every degree and batch filled in."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.config.files import options_of
from dtrain.plan.layout import Layout, data_of, layout_of
from dtrain.plan.sections import strategy_section
from tests.commands.plan.capacity import applied, question

NODES = ("model=llama-7b", "hardware=h100", "cluster.nodes=4", "train.global_batch_size=128")


@pytest.mark.parametrize("name", options_of("strategy"))
def test_every_strategy_has_a_layout_over_all_gpus(name: str) -> None:
    config = applied([f"strategy={name}"], question(*NODES).config)
    layout = layout_of(config)
    assert layout.strategy == name
    assert layout.world_size == 32
    assert layout.global_batch_size == 128


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["strategy=fsdp"], {"data": "fsdp", "dp": 32, "micro_batch_size": 4, "micro_batches": 1}),
        (["strategy=fsdp", "strategy.sharding=hybrid"], {"data": "fsdp", "replica_size": 8}),
        (["strategy=fsdp", "strategy.sharding=grad_op"], {"data": "grad_op", "replica_size": None}),
        (["strategy=zero2", "strategy.offload=cpu"], {"data": "zero2", "offload": "cpu", "bucket_mb": 100}),
        (["strategy=fairscale"], {"data": "sharded_ddp"}),
        (["strategy=ps"], {"data": "sync", "dp": 32, "fused_update": False}),
        (["strategy=tensor", "strategy.tp=4", "train.micro_batch_size=2"], {"tp": 4, "dp": 8, "micro_batches": 8}),
        (["strategy=tensor", "strategy.sequence_parallel=true"], {"tp": 8, "sequence_parallel": True}),
        (["strategy=3d", "strategy.tp=8", "strategy.pp=2"], {"dp": 2, "stages_per_rank": 1, "micro_batch_size": 8}),
        (["strategy=3d", "strategy.schedule=interleaved_1f1b", "strategy.stages_per_rank=4"], {"stages_per_rank": 4}),
        (["strategy=pipeline", "strategy.pp=2", "strategy.schedule=zbv"], {"stages_per_rank": 2, "dp": 16}),
        (["strategy=ddp", "strategy.dp=32", "activation_checkpointing=full"], {"activation_checkpointing": "full"}),
        (["strategy=ddp"], {"compile": "whole", "stream": "bfloat16", "fused_loss": True, "fused_update": True}),
        (["strategy=ddp", "compile=blocks", "fused_loss=false"], {"compile": "blocks", "fused_loss": False}),
        (["strategy=fsdp"], {"compile": "blocks", "data": "fsdp"}),
        (["strategy=ddp", "activation_checkpointing=ops"], {"compile": "blocks"}),
        (["strategy=fsdp", "compile=whole"], {"compile": "blocks"}),
        (["strategy=zero3"], {"compile": "none", "fused_update": False}),
        (["strategy=pipeline", "strategy.schedule=zbv"], {"compile": "none"}),
        (["strategy=ddp", "compile=false"], {"compile": "none"}),
        (["strategy=fsdp", "strategy.offload=cpu"], {"fused_update": False}),
        (["strategy=fsdp"], {"fast_products": True}),
        (["strategy=ddp", "compile=none"], {"fast_products": False}),
        (["strategy=ddp", "deterministic=true"], {"fast_products": False}),
        (["strategy=3d", "strategy.tp=2"], {"fast_products": False}),
        (["strategy=ddp"], {"cuda_graph": False}),  # of many ranks
    ],
)  # fmt: skip
def test_what_is_typed_is_in_the_layout(words: list[str], expected: dict[str, Any]) -> None:
    layout = layout_of(applied(words, question(*NODES).config))
    assert {key: getattr(layout, key) for key in expected} == expected


def test_what_follows_from_a_gpu_does_not_from_a_cpu() -> None:
    there, here = (layout_of(question("model=gpt2-tiny", f"hardware={name}").config) for name in ("h200", "cpu"))
    assert (there.compile, there.fused_loss, there.fused_update, there.fast_products) == ("whole", True, True, True)
    assert (here.compile, here.fused_loss, here.fused_update, here.fast_products) == ("none", False, False, False)


@pytest.mark.parametrize(
    "words, expected",
    [
        ("strategy=ddp", True), ("strategy=fsdp", True), ("strategy=zero2", True), ("precision=bf16-pure", True),
        ("strategy=ddp cuda_graphs=none", False), ("strategy=ddp compile=none", False), ("precision=fp16", False),
        ("strategy=fsdp strategy.offload=cpu", False), ("strategy=tensor", False), ("optim=sgd", False),
        ("strategy=local_sgd", False), ("strategy=ring", False),
        ("model=bert-tiny data=mlm", False), ("strategy=ddp hardware=cpu", False),
    ],
)  # fmt: skip
def test_which_steps_are_cuda_graph(words: str, expected: bool) -> None:
    asked = question("model=gpt2-tiny", "hardware=h200", "cluster.processes=1", "cluster.nodes=1", *words.split())
    assert layout_of(asked.config).cuda_graph is expected


@pytest.mark.parametrize("name", ["bf16", "bf16-pure", "fp8", "fp16", "fp32"])
def test_a_precision_is_known_by_what_it_says(name: str) -> None:
    layout = layout_of(question(*NODES, f"precision={name}").config)
    assert (layout.precision, layout.stream) == (name, "bfloat16" if name[0] == "b" or name == "fp8" else "float32")


@pytest.mark.parametrize("name", ["fsdp", "zero1", "zero2", "zero3"])
def test_one_rank_has_nothing_to_cut(name: str) -> None:
    words = ("model=gpt2-124m", "hardware=h200", "cluster.processes=1")
    alone = layout_of(applied([f"strategy={name}"], question(*words).config))
    assert (alone.strategy, alone.data, alone.compile, alone.fused_update) == (name, "ddp", "whole", True)
    away = layout_of(applied([f"strategy={name}", "strategy.offload=cpu"], question(*words).config))
    assert away.data == name and away.compile != "whole" and not away.fused_update


def test_a_batch_that_ranks_cannot_share_is_told_as_the_launcher_does() -> None:
    config = applied(["strategy=ddp", "train.global_batch_size=33"], question(*NODES).config)
    with pytest.raises(ValueError, match=r"train.global_batch_size=33.*\n  fix: train.global_batch_size=32 or 64"):
        layout_of(config)


def test_sequence_parallel_of_one_rank_is_nothing() -> None:
    words = ["strategy=3d", "strategy.tp=1", "strategy.pp=4", "strategy.sequence_parallel=true"]
    assert not layout_of(applied(words, question(*NODES).config)).sequence_parallel


@given(tp=st.sampled_from([1, 2, 4, 8]), pp=st.sampled_from([1, 2, 4, 8]), batch=st.integers(1, 64))
def test_degrees_and_batches_multiply(tp: int, pp: int, batch: int) -> None:
    config = question(*NODES).config
    dp = 32 // (tp * pp) if tp * pp <= 32 else 0
    if not dp:
        return
    words = [f"train.global_batch_size={batch * dp}", "strategy=3d", f"strategy.tp={tp}", f"strategy.pp={pp}"]
    layout = layout_of(applied(words, config))
    assert (layout.tp, layout.pp, layout.dp) == (tp, pp, dp)
    assert layout.micro_batch_size * layout.micro_batches * dp == batch * dp


def test_how_data_ranks_share_follows_the_section() -> None:
    sections = {name: data_of(strategy_section(name)) for name in options_of("strategy")}
    assert {sections[name] for name in ("ddp", "local_sgd", "ring", "diloco", "horovod")} == {"ddp"}
    assert [sections[f"zero{stage}"] for stage in (1, 2, 3)] == ["zero1", "zero2", "zero3"]
    assert sections["fsdp"] == sections["3d"] == sections["tensor"] == sections["pipeline"] == "fsdp"
    assert data_of({**strategy_section("3d"), "data": "ddp"}) == "ddp"


def test_hybrid_over_one_node_is_what_full_is() -> None:
    layout = layout_of(
        applied(["strategy=fsdp", "strategy.sharding=hybrid"], question("model=llama-7b", "hardware=h100").config)
    )
    assert layout.replica_size is None
    assert isinstance(layout, Layout)
