"""Adapters beside frozen layers: what they compute, where they go, how they are merged, what tells their base."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dtrain.checkpoint.initial_weights import Drawn
from dtrain.models import lora
from dtrain.models.bert import Bert
from dtrain.models.gpt2 import GPT2
from dtrain.models.llama import Llama
from dtrain.models.vit import ViT
from dtrain.strategies.lora_base import First, check
from dtrain.strategies.materialize import init_weights
from dtrain.util.dtensor import flat_chunks

SIZES: dict[str, Any] = {"num_layers": 2, "dim": 16, "num_heads": 4, "vocab_size": 50, "seq_len": 12}


def gpt2() -> GPT2:
    return GPT2(**SIZES, vocab_multiple=16)


def llama(**changes: Any) -> Llama:
    return Llama(**SIZES, num_kv_heads=2, hidden_dim=24, vocab_multiple=16, **changes)


def adapted(model: nn.Module, rank: int = 2, alpha: float = 3.0, targets: list[str] | None = None) -> nn.Module:
    """With adapters that have been trained: B is not 0 any more."""
    lora.apply(model, rank, alpha, targets or [])
    init_weights(model, Drawn(0))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("lora_b"):
                p.normal_(generator=torch.Generator().manual_seed(len(name)))
    return model


def tokens() -> torch.Tensor:
    return torch.randint(50, (3, 12), generator=torch.Generator().manual_seed(0))


@given(
    rank=st.integers(1, 5), alpha=st.floats(0.1, 64), sizes=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    batch=st.lists(st.integers(1, 3), max_size=3), bias=st.booleans(),
)  # fmt: skip
@settings(max_examples=50, deadline=None)
def test_a_layer_adds_its_product(
    rank: int, alpha: float, sizes: tuple[int, int], batch: list[int], bias: bool
) -> None:
    layer = nn.Linear(*sizes, bias=bias)
    plain = copy.deepcopy(layer)
    lora.attach(layer, rank, alpha)
    for p in layer.parameters():
        nn.init.normal_(p)
    plain.load_state_dict({k: v for k, v in layer.state_dict().items() if not k.startswith("lora")})
    x = torch.randn(*batch, sizes[0])
    expected = plain(x) + alpha / rank * (x @ layer.lora_a.T @ layer.lora_b.T)  # type: ignore[operator]
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4 * alpha)


@pytest.mark.parametrize("make", [gpt2, llama])
def test_a_model_begins_as_its_base_and_only_adapters_are_trained(make: Any) -> None:
    base, model = make(), make()
    lora.apply(model, rank=3, alpha=6.0, targets=[])
    init_weights(base, Drawn(7))
    init_weights(model, Drawn(7))
    assert torch.equal(model(tokens()), base(tokens())), "B is 0"
    model(tokens(), tokens()).backward()
    gradients = {name for name, p in model.named_parameters() if p.grad is not None}
    assert gradients == {name for name, _ in model.named_parameters() if lora.is_adapter(name)}
    assert {n for n, _ in model.named_parameters() if not lora.is_adapter(n)} == dict(base.named_parameters()).keys()
    assert model.num_parameters == base.num_parameters, "as published"
    assert model.num_trained == sum(p.numel() for p in model.parameters() if p.grad is not None)
    assert 0.6 < model.flops_per_sample() / base.flops_per_sample() < 0.7


def test_targets_are_ends_of_names() -> None:
    def chosen(targets: list[str]) -> set[str]:
        return set(lora.choose(llama(), targets))

    every = chosen([])
    assert len(every) == 2 * 7 and all(name.startswith("layers.") for name in every)
    assert chosen(["q", "v"]) == {f"layers.{i}.attention.{x}" for i in range(2) for x in "qv"}
    assert chosen(["layers.1.mlp.up"]) == {"layers.1.mlp.up"}
    assert chosen(["attention.k", "layers.0.attention.k"]) == {f"layers.{i}.attention.k" for i in range(2)}
    # the head's weight is used, but the layer is not called: an adapter there would never be asked
    for unknown in ("o_proj", "p", "output"):
        with pytest.raises(
            ValueError, match=r"lora.targets.*\n  fix: choose from q, k, v, proj, gate, up, down;"
        ) as error:
            chosen(["q", unknown])
        assert repr(unknown) in str(error.value)
    with pytest.raises(ValueError, match="no linear layer"):
        lora.apply(nn.Sequential(nn.Conv2d(1, 1, 1)), 1, 1.0, [])


def test_a_copy_draws_its_own_weights() -> None:
    """A pipeline stage is a copy of the model, cut."""
    model = llama()
    lora.apply(model, 2, 1.0, [])
    stage: Any = copy.deepcopy(model).pipeline_split(1, 2)
    init_weights(model, Drawn(3))
    init_weights(stage, Drawn(3))
    weights = dict(model.named_parameters())
    assert all(torch.equal(p, weights[name]) for name, p in stage.named_parameters())
    assert stage.init_weights.args[0].__self__ is stage


@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.parametrize("targets", [[], ["proj", "up"]])
def test_merged_weights_compute_what_the_adapters_do(make: Any, targets: list[str]) -> None:
    model = adapted(make(), targets=targets)
    state = dict(model.named_parameters())
    base = ((name, p.detach()) for name, p in state.items() if name in lora.base_of(model))
    plain = make()
    plain.load_state_dict(dict(lora.merged(base, {n: p.detach() for n, p in state.items()}, 1.5)))
    begun = make()
    begun.load_state_dict({n: p for n, p in state.items() if not lora.is_adapter(n)})
    assert (plain(tokens()) - begun(tokens())).abs().max() > 0.01, "the adapters do something"
    torch.testing.assert_close(plain(tokens()), model(tokens()), rtol=1e-5, atol=1e-5)


def test_only_frozen_linear_weights_are_held_in_16_bits() -> None:
    model = llama()
    lora.hold(model, torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.float32}, "no adapters: all of it is trained"
    lora.apply(model, 2, 1.0, ["q"])
    lora.hold(model, torch.bfloat16)
    wide = {name for name, p in model.named_parameters() if p.dtype == torch.float32}
    assert all("norm" in name or "embed" in name or lora.is_adapter(name) for name in wide)
    assert len(wide) == 1 + 5 + 4 and model.output is not None and model.output.weight.dtype == torch.bfloat16


# ---- the base ------------------------------------------------------------------------------------------------


def fingerprint(cuts: list[int], dtype: torch.dtype, seed: int = 0) -> str | None:
    """Of a base whose weights are held as flat runs by as many ranks as there are cuts, and one more."""
    model = gpt2()
    lora.apply(model, 2, 1.0, [])
    first = First(Drawn(seed), model)
    for name, shape in first.base.items():
        flat = torch.empty(shape, dtype=dtype).flatten()
        ends = sorted({0, flat.numel(), *(cut % flat.numel() for cut in cuts)})
        for a, b in pairwise(ends):
            first.fill(model, name, flat_chunks(flat[a:b], shape, a), torch.device("cpu"))
    return first.fingerprint()


@given(cuts=st.lists(st.integers(0, 10_000), max_size=4), dtype=st.sampled_from([torch.float32, torch.float16]))
@settings(max_examples=15, deadline=None)
def test_a_base_has_one_fingerprint_however_it_is_held(cuts: list[int], dtype: torch.dtype) -> None:
    assert fingerprint(cuts, dtype) == fingerprint([], torch.float32)


def test_another_base_has_another_fingerprint() -> None:
    ours, theirs = fingerprint([], torch.float32), fingerprint([], torch.float32, seed=1)
    assert ours and theirs and ours != theirs
    check(ours, ours)
    with pytest.raises(ValueError, match=r"not those that this run's adapters were trained on.*\n  fix: "):
        check(ours, theirs)
    assert First(Drawn(0), gpt2()).fingerprint() is None, "without adapters there is no base"


def test_a_head_for_a_task_is_trained_beside_the_adapters() -> None:
    """It is drawn anew: frozen, it would stay random. What else is frozen stays so."""
    bert = Bert(**SIZES, task="classify", num_classes=3)
    vit = ViT(num_layers=2, dim=16, num_heads=4, patch_size=2, image_size=8, channels=1, num_classes=3)
    for model, heads in ((bert, {"pooler", "classifier"}), (vit, {"head"})):
        lora.apply(model, rank=2, alpha=4.0, targets=[])
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        assert {name.split(".")[0] for name in trained if not lora.is_adapter(name)} == heads
        assert any(map(lora.is_adapter, trained)) and model.num_trained < model.num_parameters


def test_torchs_own_encoder_layer_asks_its_adapters_in_evaluation_too() -> None:
    """It has a faster way through in evaluation, which reads the weights alone."""
    model: Any = nn.ModuleDict({"layer": nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)})
    model.fsdp_units = lambda: [model["layer"]]
    model.init_weights = lambda *_: None
    try:
        lora.apply(model, rank=2, alpha=4.0, targets=[])
        for name, p in model.named_parameters():
            if lora.is_adapter(name):
                nn.init.normal_(p)
        x = torch.randn(3, 5, 16)
        with torch.no_grad():
            assert torch.allclose(model["layer"].train()(x), model["layer"].eval()(x), atol=1e-5)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
