"""The optimizer's groups, and the rule that scales the learning rate with the batch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dtrain.optim import adamw, scaled_lr, sgd

rates = st.floats(1e-8, 10)
batches = st.integers(1, 1 << 20)
RULES = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}


@given(rates, batches, batches, st.sampled_from(list(RULES)))
def test_at_the_base_batch_every_rule_is_the_rate_itself(lr: float, batch: int, base: int, rule: str) -> None:
    assert scaled_lr(lr, rule, base, base) == pytest.approx(lr)
    assert scaled_lr(lr, "none", batch, base) == lr


@given(rates, batches, batches)
def test_linear_follows_the_batch_and_sqrt_its_root(lr: float, batch: int, base: int) -> None:
    assert scaled_lr(lr, "linear", batch, base) / batch == pytest.approx(lr / base)
    twice = scaled_lr(scaled_lr(lr, "sqrt", batch, base), "sqrt", batch, base)
    assert twice == pytest.approx(scaled_lr(lr, "linear", batch, base))


@given(rates, batches, batches, batches, st.sampled_from(list(RULES)))
def test_scaling_in_two_steps_is_scaling_in_one(lr: float, a: int, b: int, c: int, rule: str) -> None:
    assert scaled_lr(scaled_lr(lr, rule, b, a), rule, c, b) == pytest.approx(scaled_lr(lr, rule, c, a))


def test_an_unknown_rule_is_an_error() -> None:
    with pytest.raises(KeyError):
        scaled_lr(1e-3, "cubic", 1, 1)


def make_model() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    model[2].bias.requires_grad_(False)
    return model


def test_only_matrices_decay_and_frozen_weights_are_left_out() -> None:
    model = make_model()
    optimizer = adamw(model.named_parameters(), lr=1e-2, betas=[0.8, 0.9], eps=1e-6, weight_decay=0.3)
    matrices, rest = optimizer.param_groups
    assert [tuple(p.shape) for p in matrices["params"]] == [(3, 4), (2, 3)]
    assert [tuple(p.shape) for p in rest["params"]] == [(3,), (3,), (3,)]
    assert (matrices["weight_decay"], rest["weight_decay"]) == (0.3, 0.0)
    for group in optimizer.param_groups:
        assert (group["lr"], group["peak_lr"]) == (1e-2, 1e-2)
        assert (group["betas"], group["eps"]) == ((0.8, 0.9), 1e-6)


def test_sgd_has_the_same_groups() -> None:
    optimizer = sgd(make_model().named_parameters(), lr=0.1, momentum=0.8, weight_decay=0.3, global_batch_size=9)
    assert [(len(g["params"]), g["weight_decay"], g["peak_lr"], g["momentum"]) for g in optimizer.param_groups] == [
        (2, 0.3, 0.1, 0.8),
        (3, 0.0, 0.1, 0.8),
    ]


def test_the_peak_follows_the_global_batch() -> None:
    optimizer = adamw(
        make_model().named_parameters(), lr=1e-3, betas=[0.9, 0.95], lr_scaling="linear", base_batch_size=256,
        global_batch_size=1024,
    )  # fmt: skip
    assert [g["peak_lr"] for g in optimizer.param_groups] == [pytest.approx(4e-3)] * 2


def test_without_a_gradient_only_decay_moves_a_matrix() -> None:
    """lr × weight_decay of itself, and nothing else: the decay is AdamW's, apart from the gradient."""
    model = make_model()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = adamw(model.named_parameters(), lr=0.1, betas=[0.9, 0.95], weight_decay=0.5)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in model.named_parameters():
        factor = 1 - 0.1 * 0.5 if p.dim() == 2 else 1.0
        torch.testing.assert_close(p.detach(), before[name] * factor, msg=name)
