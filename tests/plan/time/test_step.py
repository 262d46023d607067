"""A step's time: what must hold for every layout, and what was published and measured."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.config.hardware import Hardware, load
from dtrain.plan.layout import Layout
from dtrain.plan.ledger import Item, by_part, total
from dtrain.plan.model_shape import Transformer
from dtrain.plan.time.data_parallel import exposed
from dtrain.plan.time.stack import STACKS, stack_of
from dtrain.plan.time.step import knows_enough, longer, step_time, tensor_messages
from tests.world import spawn

GPT = Transformer(24, 2048, 16, 16, 8192, 2048, 50304)


NODE = load("h100-ndr")


def seconds(layout: Layout, shape: Transformer = GPT, on: Hardware = NODE) -> dict[str, float]:
    return by_part(step_time(shape, layout, on))


def test_the_parts_are_named_and_none_is_negative() -> None:
    layout = Layout("3d", 4, 2, 8, 2, 8, "fsdp", sequence_parallel=True)
    items = step_time(GPT, layout, NODE)
    assert {item.part for item in items} == {"compute", "communication", "bubble", "optimizer"}
    assert all(item.value >= 0 for item in items)
    assert all(item.arithmetic for item in items)  # what --explain shows


def test_a_parameter_server_sends_once_a_step_or_for_each_micro_batch() -> None:
    """As much as ddp's ring, but beside no backward pass, and a GPU's tensors go through the host."""
    ddp, sync, loose = (Layout(n, 1, 1, 8, 2, 4, data) for n, data in (("ddp", "ddp"), ("ps", "sync"), ("ps", "async")))
    assert seconds(sync)["communication"] > seconds(ddp)["communication"]
    assert seconds(sync, on=load("h100-ndr", pcie_gb_s=50))["communication"] > seconds(sync)["communication"]
    assert seconds(loose)["communication"] == pytest.approx(4 * seconds(sync)["communication"])
    # 8 ranks × 4 micro-batches update a share of an eighth each time; under sync once
    assert seconds(loose)["optimizer"] == pytest.approx(32 * seconds(sync)["optimizer"])


def test_one_gpu_says_nothing_to_others() -> None:
    assert set(seconds(Layout("ddp", micro_batch_size=4))) == {"total", "compute", "optimizer"}


@given(
    st.sampled_from(["ddp", "fsdp", "zero1", "zero2", "zero3", "grad_op"]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["none", "ops", "selective", "full"]),
    st.sampled_from(["none", "blocks", "whole"]),
)
@settings(deadline=None)
def test_more_work_takes_longer(data: str, dp: int, batch: int, checkpointing: str, compile: str) -> None:
    layout = Layout("x", 1, 1, dp, batch, 2, data, activation_checkpointing=checkpointing, compile=compile)
    one = seconds(layout)["total"]
    assert seconds(replace(layout, micro_batches=3))["total"] > one
    assert seconds(replace(layout, micro_batch_size=2 * batch))["total"] > one
    assert seconds(layout, replace(GPT, num_layers=25))["total"] > one
    if checkpointing != "full" and not (checkpointing == "ops" and compile == "none"):  # the host's work may be more
        assert seconds(replace(layout, activation_checkpointing="full"))["total"] > one


def test_a_large_pass_on_one_gpu_goes_at_a_believable_rate() -> None:
    layout = Layout("ddp", micro_batch_size=16, compile="whole")
    flops = 16 * 2048 * (6 * 24 * 12 * 2048**2 + 6 * 50304 * 2048)
    assert 0.3 < flops / seconds(layout)["total"] / 989e12 < 0.7


def test_the_bubble_is_that_of_the_schedule() -> None:
    one = Layout("pipeline", 1, 4, 1, 8, 16, "fsdp", schedule="1f1b")
    parts = seconds(one)
    assert parts["bubble"] == pytest.approx(3 / 16 * parts["compute"], rel=0.15)
    two = seconds(replace(one, schedule="interleaved_1f1b", stages_per_rank=2))
    assert two["bubble"] == pytest.approx(parts["bubble"] / 2, rel=0.2)
    assert seconds(replace(one, schedule="zbv", stages_per_rank=2))["bubble"] < two["bubble"]


def test_tensor_ranks_share_the_work_and_talk() -> None:
    alone, shared = (seconds(Layout("tensor", tp, 1, 1, 8)) for tp in (1, 8))
    assert alone["compute"] / 8 < shared["compute"] < alone["compute"]
    assert "communication" not in alone and shared["communication"] > 0


def test_slower_networks_never_help() -> None:
    slow = load("gcp-a2")
    fast = load("selene")
    for data in ("ddp", "fsdp", "zero3"):
        layout = Layout(data, 1, 1, 64, 2, 1, data)
        assert seconds(layout, on=slow)["communication"] > seconds(layout, on=fast)["communication"]


def test_calibration_scales_what_is_computed() -> None:
    layout = Layout("ddp", micro_batch_size=16, compile="whole")
    slower = load("h100-ndr", calibration=1.5)
    assert seconds(layout, on=slower)["compute"] == pytest.approx(1.5 * seconds(layout)["compute"], rel=0.02)


def test_adapters_leave_out_the_gradients_of_weights() -> None:
    layout = Layout("ddp", micro_batch_size=8)
    whole, adapted = (total(step_time(shape, layout, NODE)) for shape in (GPT, replace(GPT, lora_rank=16)))
    assert 0.5 * whole < adapted < 0.9 * whole


def test_the_host_is_the_limit_of_small_batches() -> None:
    def waiting(batch: int, **more: Any) -> float:
        items = step_time(GPT, Layout("fsdp", micro_batch_size=batch, data="fsdp", **more), NODE)
        return sum(i.value for i in items if i.name == "launch-bound time") / total(items)

    assert waiting(1) > 0.5 > 0.1 > waiting(32)
    assert waiting(1, cuda_graph=True, micro_batches=8) == 0 < waiting(1, cuda_graph=True, micro_batches=9)


def test_what_hides_and_what_does_not() -> None:
    assert exposed(NODE, 1.0, 0.0) == 1.0
    assert exposed(NODE, 1.0, 10.0) == pytest.approx(24 / 132)
    assert exposed(NODE, 10.0, 1.0) == pytest.approx(9 + 24 / 132)
    assert longer(1.0, 0.0) == 1.0 and 1.1 < longer(1.0, 1.0) < 1.25


def test_rarer_and_smaller_exchanges_cost_less_and_a_ring_hides_nothing() -> None:
    ddp = Layout("ddp", dp=16, micro_batch_size=4)
    rare, rarer = (seconds(replace(ddp, strategy="diloco", every=every))["communication"] for every in (1, 20))
    assert rare == pytest.approx(20 * rarer)
    small = seconds(replace(ddp, strategy="diloco", every=20, exchange="int8"))["communication"]
    assert 0.25 < small / rarer < 0.35, "a quarter of the bytes, and the same latency"
    averaged = seconds(replace(ddp, strategy="local_sgd", every=20))["communication"]
    assert 2.5 < averaged / rarer < 3, "moments, too"
    assert seconds(replace(ddp, strategy="ring"))["communication"] > seconds(ddp)["communication"]
    assert seconds(replace(ddp, strategy="ring"))["communication"] == pytest.approx(rare, rel=0.05)


def test_items_add_up() -> None:
    items = [Item("a", "x", 1.0, "{} s", (1,)), Item("b", "y", 2.0), Item("a", "z", 3.0)]
    assert by_part(items) == {"total": 6.0, "a": 4.0, "b": 2.0}
    assert items[0].arithmetic == "1 s" and items[1].arithmetic == ""


def test_our_stacks_follow_the_configuration() -> None:
    assert stack_of(Layout("ddp", compile="whole")).kernels == "compiled"
    assert stack_of(Layout("fsdp", data="fsdp", compile="blocks")).head == "eager"
    assert stack_of(Layout("zero3", data="zero3")).hooks > stack_of(Layout("fsdp", data="fsdp")).hooks
    fast, usual = (stack_of(Layout("ddp", compile="whole", fast_products=on)) for on in (True, False))
    assert fast.fast_products and not usual.fast_products and fast.casts < usual.casts
    assert not stack_of(Layout("ddp", compile="whole", fast_products=True, precision="fp8")).fast_products
    assert len(STACKS) == len({stack.name for stack in STACKS.values()})


@pytest.mark.parametrize("figure", ["num_sms", "stream_gb_s", "matmul_tflops", "network_max_gb_s", "gpus_per_node"])
def test_what_is_not_known_is_not_guessed(figure: str) -> None:
    layout = Layout("fsdp", 1, 1, 16, 2, 1, "fsdp")
    assert knows_enough(NODE, layout)
    assert not knows_enough(load("h100-ndr", **{"network_busbw_gb_s": None, figure: None}), layout)


@given(st.integers(1, 64), st.sampled_from(["ddp", "fsdp", "zero1", "zero2", "zero3"]), st.sampled_from([1, 8, 32]))
@settings(deadline=None)
def test_a_larger_model_is_never_faster(factor: int, data: str, dp: int) -> None:
    layout = Layout(data, 1, 1, dp, 1, 1, data)
    small, large = (replace(GPT, dim=64 * f, hidden_dim=256 * f) for f in (factor, factor + 1))
    assert seconds(layout, small)["total"] <= seconds(layout, large)["total"] * 1.02  # tiles may suit one better


def test_a_pipeline_of_few_micro_batches_mostly_waits() -> None:
    for schedule, cuts in (("1f1b", 1), ("interleaved_1f1b", 2), ("zbv", 2)):
        one = seconds(Layout("pipeline", 1, 4, 1, 8, 1, "fsdp", schedule=schedule, stages_per_rank=cuts))
        assert one["bubble"] >= 1.8 * one["compute"], schedule


# ---- what tensor ranks say, counted --------------------------------------------------------------------------


def says_what_was_predicted(kind: str, sequence_parallel: bool) -> None:
    """Messages of two blocks, from models with one and with three: how many, of what kind, of how many bytes."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.utils._python_dispatch import TorchDispatchMode

    from dtrain.models.gpt2 import GPT2
    from dtrain.models.llama import Llama
    from dtrain.strategies.tensor import parallelize_layers

    names = {
        "all_reduce": "all_reduce",
        "all_gather_into_tensor": "all_gather",
        "reduce_scatter_tensor": "reduce_scatter",
    }

    class Count(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.found: Counter[tuple[str, int]] = Counter()

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = names.get(str(function).split(".")[1], str(function).split(".")[1])
            if "c10d" in str(function) and name in ("all_reduce", *names.values()):
                size = args[0].numel() * args[0].element_size() * (2 if name == "all_gather" else 1)
                self.found[name, size] += 1
            return function(*args, **(kwargs or {}))

    found = []
    for layers in (1, 3):
        sizes: dict[str, Any] = {"num_layers": layers, "dim": 64, "num_heads": 4, "vocab_size": 256, "seq_len": 32}
        model = GPT2(**sizes) if kind == "gpt2" else Llama(**sizes, num_kv_heads=4, hidden_dim=128)
        parallelize_layers(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))["tp"], sequence_parallel, False)
        tokens = torch.randint(0, 256, (2, 32))
        with Count() as count:
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(tokens, tokens)
            loss.backward()
        found.append(count.found)
    messages: Counter[tuple[str, int]] = Counter()
    gated = kind == "llama"
    shape = Transformer(2, 64, 4, 4, 128 if gated else 256, 32, 256, gated=gated, fused_qkv=not gated)
    layout = Layout("tensor", tp=2, micro_batch_size=2, sequence_parallel=sequence_parallel)
    for name, times, size in tensor_messages(shape, layout, stack_of(layout)):
        messages[name, int(size)] += round(2 * times)
    assert found[1] - found[0] == messages


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_ranks_send_what_is_predicted(kind: str, sequence_parallel: bool) -> None:
    spawn(2, says_what_was_predicted, kind, sequence_parallel)


def test_computing_again_costs_the_host_less_under_megatrons_function_than_under_torchs() -> None:
    """Where the host is the limit: beside its kernels, a block that is computed again takes calls around them."""
    layout = Layout("ddp", micro_batch_size=1, micro_batches=2, activation_checkpointing="full")
    small = Transformer(24, 256, 16, 16, 1024, 128, 50304)
    assert NODE.launch_us

    def calls(name: str) -> float:
        stack = STACKS[name]
        there, bare = (total(step_time(small, layout, NODE, x)) for x in (stack, replace(stack, again=0.0)))
        return (there - bare) * 1e6 / NODE.launch_us / (layout.micro_batches * small.num_layers)

    assert calls("megatron-2021") == pytest.approx(11.5, rel=0.05)
    assert calls("eager") == pytest.approx(50, rel=0.05)


def test_a_block_computes_all_but_its_last_product_again() -> None:
    """What the planner leaves out under `full` (work.last_product): nothing in the backward pass reads its result."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from dtrain.commands.verify import compare
    from dtrain.strategies.recompute import checkpoint_layers
    from dtrain.train import build as models

    products: Counter[tuple[int, ...]] = Counter()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.addmm.default:  # with a bias: none of the backward pass's own
                products[tuple(args[2].shape)] += 1
            return func(*args, **(kwargs or {}))

    cfg = compare.compose(["model=gpt2-tiny"])
    model, layers, d = models.make(cfg), cfg.model.num_layers, cfg.model.dim
    model.to_empty(device="cpu")
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.02)
    checkpoint_layers(model, "full", 1)
    tokens = torch.randint(cfg.model.vocab_size, (1, 16))
    with Counting():
        model(tokens, tokens).backward()
    assert products == {(d, 3 * d): 2 * layers, (d, d): 2 * layers, (d, 4 * d): 2 * layers, (4 * d, d): layers}
