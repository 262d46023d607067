"""A prediction: its arithmetic, the row that scripts read, and what is said where something is not known."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.config.files import section
from dtrain.config.hardware import Hardware
from dtrain.plan.layout import Layout
from dtrain.plan.ledger import Item
from dtrain.plan.model_shape import Transformer
from dtrain.plan.parameters import num_parameters, parts, trained_parameters
from dtrain.plan.predict import (
    GIB,
    Prediction,
    Task,
    assumed_network,
    hardware_of,
    host_bytes,
    predict,
    predict_layout,
    task_of,
    usual_network,
    why_not,
)
from tests.commands.plan.capacity import applied, question

NODE = ("model=gpt2-1.5b", "hardware=a100-80gb", "train.global_batch_size=64", "strategy=fsdp")
SHAPE = Transformer(
    num_layers=2, dim=64, num_heads=2, num_kv_heads=2, hidden_dim=256, seq_len=16, vocab_size=128, task="next"
)  # fmt: skip


def made(
    memory: float = 30.0, step_s: float | None = 0.5, hardware: dict[str, Any] | None = None, **layout: Any
) -> Prediction:
    """A prediction of so many GiB and seconds, on 4 GPUs of 40 GiB with 100 TFLOP/s."""
    figures = {"gpu": "X", "gpu_memory_gib": 40.0, "usable_memory_gib": 39.0, "peak_bf16_tflops": 100.0}
    task = Task(SHAPE, Hardware(**(figures | (hardware or {}))), 8, 16, 1e12, 800.0)
    items = [Item("parameters", "weights", memory * GIB / 3), Item("activations", "blocks", memory * GIB * 2 / 3)]
    time = None if step_s is None else [Item("compute", "all", step_s * 0.75), Item("communication", "x", step_s / 4)]
    shape = Layout(**({"strategy": "fsdp", "dp": 4, "micro_batch_size": 2, "data": "fsdp"} | layout))
    return Prediction(shape, items, time, task, GIB)


def test_speed_length_and_money_follow_from_the_step_time() -> None:
    prediction = made(hardware={"price_per_gpu_hour": 2.0})
    assert prediction.step_s == 0.5
    assert prediction.tokens_per_s == 8 * 16 / 0.5
    assert prediction.mfu == pytest.approx(8e12 / 0.5 / (4 * 100e12))
    assert prediction.run_s == pytest.approx(100 * 0.5)  # 800 samples, 8 a step
    assert prediction.gpu_hours == pytest.approx(4 * 50 / 3600)
    assert prediction.cost == pytest.approx(4 * 50 / 3600 * 2.0)


def test_without_a_price_or_a_time_there_is_none() -> None:
    assert made().cost is None
    untimed = made(step_s=None)
    assert (untimed.step_s, untimed.tokens_per_s, untimed.mfu, untimed.run_s, untimed.gpu_hours) == (None,) * 5
    assert untimed.row()["step_s"] is None


@given(st.floats(0.1, 200), st.floats(0, 5))
def test_it_fits_when_memory_and_reserve_are_within_what_is_usable(memory: float, reserve: float) -> None:
    prediction = replace(made(memory), reserve=reserve * GIB)
    assert prediction.fits is (prediction.memory_bytes + reserve * GIB <= 39.0 * GIB)


def test_not_all_that_is_sold_is_usable_where_nobody_says_how_much() -> None:
    limit = made(hardware={"usable_memory_gib": None}).task.limit
    assert limit is not None and 38 * GIB < limit < 40 * GIB
    assert made(hardware={"gpu_memory_gib": None, "usable_memory_gib": None}).fits is None


def test_what_is_offloaded_must_fit_into_the_host() -> None:
    size = num_parameters(SHAPE)
    layout = Layout("fsdp", dp=4, data="fsdp", offload="cpu")
    assert host_bytes(SHAPE, layout) == 16 * size / 4
    assert host_bytes(SHAPE, replace(layout, offload="none")) == 0
    assert host_bytes(SHAPE, replace(layout, strategy="zero3", data="zero3", offload_params="cpu")) == 18 * size / 4
    hybrid = replace(layout, dp=16, replica_size=4)  # so many ranks hold one copy
    assert host_bytes(SHAPE, hybrid) == host_bytes(SHAPE, layout)
    thin = replace(SHAPE, lora_rank=2)
    adapters, blocks = trained_parameters(thin), parts(SHAPE).block * SHAPE.num_layers
    expected = 4 * (size - blocks) + 2 * blocks + 16 * adapters  # frozen blocks in 16 bits
    assert host_bytes(thin, layout) == expected / 4
    small, large = 4 * 16 * size / 4 / GIB * 0.9, 4 * 16 * size / 4 / GIB * 2
    assert made(1.0, offload="cpu", hardware={"host_memory_gib": small}).fits is False
    assert made(1.0, offload="cpu", hardware={"host_memory_gib": large}).fits is True
    assert made(1.0, hardware={"host_memory_gib": small}).fits is True
    assert made(1.0, offload="cpu").fits is None  # nobody knows the node's memory
    assert made(1e3, offload="cpu").fits is False


def test_the_row_has_the_names_that_scripts_rely_on() -> None:
    row = json.loads(json.dumps(made(hardware={"price_per_gpu_hour": 1.0}).row()))
    names = (
        "strategy tp pp dp micro_batch_size activation_checkpointing fits memory_gib step_s tokens_per_s mfu gpu_hours"
    )
    assert {*names.split(), "cost"} <= set(row)
    assert row["memory_gib"]["total"] == pytest.approx(30.0)
    assert row["memory_gib"]["parameters"] + row["memory_gib"]["activations"] == pytest.approx(30.0)
    parts = {"compute": 0.375, "communication": 0.125, "bubble": 0.0, "optimizer": 0.0, "data": 0.0}
    assert row["step_s"] == pytest.approx({"total": 0.5, **parts})


def test_predict_is_the_prediction_of_the_very_layout() -> None:
    config = question(*NODE).config
    prediction, task = predict(config), task_of(config)
    assert prediction is not None and task is not None and why_not(config) == ""
    assert prediction.layout.dp == 8 and prediction.layout.micro_batch_size == 8
    assert predict_layout(prediction.layout, task, timed=False).memory == prediction.memory
    assert prediction.fits and prediction.step_s
    assert prediction.mfu is not None and 0.05 < prediction.mfu < 0.8


def test_what_cannot_be_known_is_said() -> None:
    config = question(*NODE).config
    own = {**config, "model": {"_target_": "my.Net"}, "choices": {**config["choices"], "model": "my.Net"}}
    assert predict(own) is None and "my.Net" in why_not(own)
    unknown = applied([], config)
    unknown["hardware"] = {"_target_": "dtrain.config.hardware.Hardware"}
    unknown["choices"]["hardware"] = "unknown"
    assert predict(unknown) is None and "hardware=unknown" in why_not(unknown)


def test_no_time_is_told_from_too_few_figures() -> None:
    layout = Layout("fsdp", dp=8, data="fsdp", micro_batch_size=8)
    for name in ("num_sms", "stream_gb_s", "matmul_tflops"):
        config = question(*NODE).config
        config["hardware"][name] = None
        task = task_of(config)
        assert task is not None and predict_layout(layout, task).time is None and predict_layout(layout, task).fits


def test_tokens_are_counted_where_each_has_a_target() -> None:
    text, picture = task_of(question(*NODE).config), task_of(question("model=vit-b16", "hardware=h100").config)
    assert text is not None and picture is not None
    assert (text.tokens_per_sample, text.unit) == (1024, "tokens")
    assert (picture.tokens_per_sample, picture.unit) == (1, "samples")
    longer = task_of(question(*NODE).config, tokens=1e9)
    assert longer is not None and longer.samples == pytest.approx(1e9 / 1024)


def test_nodes_without_a_network_get_the_usual_one_of_their_gpus() -> None:
    one, two = question(*NODE).config, question(*NODE, "cluster.nodes=2").config
    assert assumed_network(one) == {}
    assert usual_network(two) == "selene"
    hardware = hardware_of(two)
    assert hardware is not None and hardware.network_max_gb_s and hardware.network_latency_us
    known = question("model=llama-7b", "cluster=aws-efa", "cluster.nodes=2").config
    assert assumed_network(known) == {}


def test_the_assumed_network_is_that_of_all_gpus_in_use() -> None:
    config = question("model=llama-1b", "hardware=l4", "cluster.nodes=2", "cluster.processes=8").config
    usual, hardware = section("hardware", "gcp-a2"), hardware_of(config)
    assert hardware is not None and hardware.network_max_gb_s == usual["network_max_gb_s"]
    config["cluster"]["processes"] = 1
    hardware = hardware_of(config)
    assert hardware is not None and hardware.network_max_gb_s == usual["network_max_gb_s"] / 8


@pytest.mark.parametrize(
    ("gpu", "name"), [("L4", "gcp-a2"), ("NVIDIA L40S", None), ("NVIDIA A100-SXM4-80GB", "selene")]
)
def test_a_gpu_is_known_by_its_whole_name(gpu: str, name: str | None) -> None:
    assert usual_network({"hardware": {"gpu": gpu}}) == name


def test_fewer_gpus_of_a_node_have_fewer_of_its_adapters() -> None:
    words = ("model=llama-7b", "cluster=infiniband", "cluster.nodes=2")
    whole, half = hardware_of(question(*words).config), hardware_of(question(*words, "cluster.gpus_per_node=4").config)
    assert whole is not None and half is not None
    assert (whole.gpus_per_node, half.gpus_per_node) == (8, 4)
    assert whole.network_max_gb_s and half.network_max_gb_s == whole.network_max_gb_s / 2
    assert half.network_rail_gb_s == whole.network_rail_gb_s
