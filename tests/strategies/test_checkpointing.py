"""Activation checkpointing: the same losses and gradients to the bit, less memory, and compiled where asked for."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from dtrain.models.gpt2 import GPT2
from dtrain.models.llama import Llama
from dtrain.strategies.recompute import checkpoint_layers, save_expensive
from tests.world import losses, make_run, metrics, train

MODES = ["full", "ops", "selective"]


def model_of(kind: str, dropout: float) -> torch.nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "num_layers": 3,
        "dim": 32,
        "num_heads": 4,
        "seq_len": 16,
        "vocab_size": 64,
        "dropout": dropout,
    }
    return GPT2(**sizes) if kind == "gpt2" else Llama(**sizes, num_kv_heads=2, hidden_dim=96)


def one_pass(model: torch.nn.Module, bf16: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of one batch, the random draws of dropout being the same every time."""
    torch.manual_seed(1)
    tokens = torch.randint(64, (2, 16))
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss = model(tokens, tokens.roll(-1, 1))
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("mode", MODES)
def test_losses_and_gradients_are_the_same_bits(mode: str, kind: str, bf16: bool) -> None:
    plain, again = model_of(kind, 0.2), model_of(kind, 0.2)
    checkpoint_layers(again, mode, 2)
    (loss, expected), (ours, gradients) = one_pass(plain, bf16), one_pass(again, bf16)
    assert torch.equal(loss, ours)
    assert expected.keys() == gradients.keys()
    assert all(torch.equal(expected[name], gradients[name]) for name in expected)


class Count(TorchDispatchMode):
    """How often each operation is really done."""

    def __init__(self) -> None:
        super().__init__()
        self.done: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.done[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_ops_computes_again_what_is_no_product_and_no_attention() -> None:
    def done(mode: str) -> Counter[str]:
        model = model_of("gpt2", 0.0)
        checkpoint_layers(model, mode, 2)
        with Count() as count:
            one_pass(model)
        return count.done

    plain, ops, full = done("none"), done("ops"), done("full")
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    for name in ("addmm", "mm", attention):
        assert ops[name] == plain[name]
    assert (full["addmm"], full[attention]) == (
        2 * plain["addmm"] - 3,
        2 * plain[attention],
    )  # the last one is not read
    assert ops["gelu"] == full["gelu"] == 2 * plain["gelu"]


@pytest.mark.parametrize("mode", MODES)
def test_one_compiled_graph_has_the_recomputation_in_it(mode: str) -> None:
    plain, again = model_of("gpt2", 0.0), model_of("gpt2", 0.0)
    checkpoint_layers(again, mode, 2)
    torch._dynamo.reset()
    counters.clear()
    for unit in again.fsdp_units():  # type: ignore[operator]
        unit.compile(backend="aot_eager_decomp_partition")  # as inductor cuts forward from backward, less its kernels
    (loss, expected), (ours, gradients) = one_pass(plain), one_pass(again)
    assert counters["stats"]["unique_graphs"] == (2 if mode == "selective" else 1), "one graph for all equal layers"
    assert not counters["graph_break"]
    torch.testing.assert_close(ours, loss)
    torch.testing.assert_close(gradients, expected)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_run_is_the_same_with_ops(strategy: str, tmp_path: Path) -> None:
    def trained(mode: str) -> Path:
        words = [f"strategy={strategy}", "cluster.processes=2", "train.steps=4", "model.dropout=0.1"]
        run = make_run(tmp_path / mode, *words, f"activation_checkpointing={mode}")
        assert train(run, 2) == [0, 0]
        return run

    plain, ops = trained("none"), trained("ops")
    norms = [[row["grad_norm"] for row in metrics(run) if "grad_norm" in row] for run in (plain, ops)]
    assert losses(plain) == losses(ops) and norms[0] == norms[1]


def test_what_splits_the_backward_pass_takes_no_ops(tmp_path: Path) -> None:
    words = ["strategy=pipeline", "strategy.schedule=zbv", "cluster.processes=2", "model.num_layers=4"]
    with pytest.raises(ValueError, match="splits the backward pass in two, but the saved operations"):
        make_run(tmp_path / "run", *words, "train.micro_batch_size=1", "activation_checkpointing=ops")


def test_attention_is_saved_by_its_name() -> None:
    from torch._higher_order_ops.flex_attention import flex_attention
    from torch.utils.checkpoint import CheckpointPolicy

    kept = [torch.ops.aten._scaled_dot_product_flash_attention.default, flex_attention, torch.ops.aten.mm.default]
    assert [save_expensive(None, operation) for operation in kept] == [CheckpointPolicy.MUST_SAVE] * 3
    assert save_expensive(None, torch.ops.aten.add.Tensor) == CheckpointPolicy.PREFER_RECOMPUTE
