"""Parameter groups by name: decay, layer-wise rates, multipliers; also where a rank knows a part of the names."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from dtrain.config.ranges import check_ranges
from dtrain.optim import groups as module
from dtrain.optim.build import adamw, lion, muon, rmsprop, sgd
from dtrain.optim.groups import Rules, grouped, hidden_matrices

SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (8, 4), "layers.0.norm.weight": (4,), "layers.0.up.weight": (4, 4), "layers.0.up.bias": (4,),
    "layers.1.up.weight": (4, 4), "layers.2.up.weight": (4, 4), "norm.weight": (4,), "head.weight": (8, 4),
}  # fmt: skip
FACTORS = {
    "embed.weight": 0.5**4, "layers.0.norm.weight": 0.5**3, "layers.0.up.weight": 0.5**3, "layers.0.up.bias": 0.5**3,
    "layers.1.up.weight": 0.5**2, "layers.2.up.weight": 0.5, "norm.weight": 1.0, "head.weight": 1.0,
}  # fmt: skip


def named(names: Any = SHAPES) -> list[tuple[str, nn.Parameter]]:
    return [(name, nn.Parameter(torch.zeros(SHAPES[name]))) for name in names]


def settings_of(optimizer: torch.optim.Optimizer, weights: list[tuple[str, nn.Parameter]]) -> dict[str, Any]:
    found = {id(p): (g["peak_lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    return {name: found[id(p)] for name, p in weights}


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(adamw, betas=[0.9, 0.95]),
        functools.partial(lion, betas=[0.9, 0.99]),
        functools.partial(muon, adamw_betas=[0.9, 0.95], adamw_weight_decay=0.1),
        rmsprop,
        sgd,
    ],
)
def test_each_optimizer_takes_all_rules(make: Any) -> None:
    weights = named()
    rules = {"no_decay": ["embed.*", "*.bias"], "layer_decay": 0.5, "lr_multipliers": ["layers.1.*:3", "layers.*:2"]}
    found = settings_of(make(weights, lr=0.1, weight_decay=0.1, **rules), weights)
    for name, factor in FACTORS.items():
        by = 3 if name.startswith("layers.1.") else 2 if name.startswith("layers") else 1
        rate, decay = found[name]
        assert rate == pytest.approx(0.1 * factor * by), name
        decays = not name.startswith("embed") and not name.endswith("bias")
        assert decay == (0.1 if decays else 0.0), name


def test_without_rules_nothing_is_different() -> None:
    weights = named()
    matrices, rest = grouped(weights, 0.1, 1e-3)[0]
    assert [p.dim() for p in matrices["params"]] == [2] * 5 and [p.dim() for p in rest["params"]] == [1] * 3
    assert (matrices["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    assert matrices["peak_lr"] == rest["peak_lr"] == 1e-3


def test_a_stage_knows_the_layers_of_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stages of a pipeline with a tied embedding, once after another layer, as interleaved stages have it."""
    stages = [["embed.weight", "layers.0.up.weight", "layers.0.up.bias"],
              ["layers.1.up.weight", "embed.weight", "layers.2.up.weight", "norm.weight", "head.weight"]]  # fmt: skip
    told: list[Any] = [[names, names[: [n.startswith("layers") for n in names].index(True)]] for names in stages]
    monkeypatch.setattr(module, "distinct", lambda _: told)
    for names in stages:
        assert Rules(layer_decay=0.5).lr_factors(names) == {name: FACTORS[name] for name in names}
        assert Rules(lr_multipliers=["head.*:0.5"]).lr_factors(names)["embed.weight"] == 1.0, "no error on any stage"


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (Rules(no_decay=["*.biass"]), r"matches the name of no .*\n  fix: optim.no_decay=\[layers.0.up.bias\]"),
        (Rules(lr_multipliers=["embeds:0.1"]), r"fix: optim.lr_multipliers=\[embed.weight:0.1\]"),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused(rules: Rules, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grouped(named(), 0.1, 1e-3, rules)


def test_what_needs_layers_is_refused_without_them() -> None:
    flat = named(["embed.weight", "norm.weight"])
    with pytest.raises(ValueError, match="numbered layer"):
        grouped(flat, 0.1, 1e-3, Rules(layer_decay=0.5))
    with pytest.raises(ValueError, match=r"fix: optim.matrices=\[embed.weight\]"):
        hidden_matrices(flat, None)
    with pytest.raises(ValueError, match=r"optim.matrices=\*.up: matches"):
        hidden_matrices(named(), ["*.up"])


@pytest.mark.parametrize("text", ["embed", "embed:", ":2", "embed:-1", "embed:nan"])
def test_the_launcher_refuses_a_multiplier_without_a_factor(text: str) -> None:
    with pytest.raises(ValueError, match=r"optim\.lr_multipliers"):
        check_ranges({"optim.lr_multipliers": [text]})
    check_ranges({"optim.lr_multipliers": ["embed.*:0.5"], "optim.layer_decay": 0.9})
