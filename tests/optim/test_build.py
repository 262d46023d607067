"""Optimizers: their groups, a user's own class, and the rule that scales the learning rate with the batch."""

import contextlib
import functools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dtrain.optim.adamw import AdamW
from dtrain.optim.build import adamw, check, factory, lion, of_class, rmsprop, scaled_lr, sgd
from dtrain.strategies.optimizer_state import init_optimizer_state

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


def test_on_a_cpu_the_step_is_torchs_own_to_the_bit() -> None:
    models = [make_model(), make_model()]
    models[1].load_state_dict(models[0].state_dict())
    ours = adamw(models[0].named_parameters(), lr=1e-2, betas=[0.8, 0.9])
    theirs = torch.optim.AdamW(
        adamw(models[1].named_parameters(), lr=1e-2, betas=[0.8, 0.9]).param_groups, betas=(0.8, 0.9)
    )
    for step in range(5):
        for model in models:
            generator = torch.Generator().manual_seed(step)
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator)
        ours.step_if(torch.tensor(True), torch.tensor(0.5))
        for p in models[1].parameters():
            assert p.grad is not None
            p.grad *= 0.5
        theirs.step()
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        assert torch.equal(p, q)
        if q in theirs.state:
            assert ours.state[p].keys() == theirs.state[q].keys()
            assert all(torch.equal(ours.state[p][key], theirs.state[q][key]) for key in theirs.state[q])


def test_a_step_that_is_not_finite_is_left_out() -> None:
    model = make_model()
    optimizer = adamw(model.named_parameters(), lr=1e-2, betas=[0.9, 0.95])
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.full_like(p, float("nan"))
    optimizer.step_if(torch.tensor(False), torch.tensor(float("nan")))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(state["step"] == 0 for state in optimizer.state.values())


def test_bfloat16_parameters_follow_updates_that_are_smaller_than_their_last_bit() -> None:
    """200 updates of 1/5 of what separates 1 from its lower neighbour: lost if each is rounded to the nearest."""
    p = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    optimizer = AdamW([p], lr=2**-8 / 5, betas=(0.9, 0.999), weight_decay=0.0)
    for _ in range(200):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert {optimizer.state[p][key].dtype for key in ("exp_avg", "exp_avg_sq")} == {torch.bfloat16}
    assert p.detach().float().mean().item() == pytest.approx(1 - 200 * 2**-8 / 5, abs=2e-3)
    assert optimizer.state[p]["exp_avg_sq"].float().mean().item() == pytest.approx(1 - 0.999**200, rel=0.02)
    plain = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    nearest = torch.optim.AdamW([plain], lr=2**-8 / 5, weight_decay=0.0)
    for _ in range(200):
        plain.grad = torch.ones_like(plain)
        nearest.step()
    assert torch.equal(plain.detach(), torch.ones_like(plain))  # so this test can fail


def test_the_rounding_of_copies_is_one_and_of_seeds_is_not() -> None:
    results = []
    for seed in (1, 1, 2):
        p = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
        optimizer = AdamW([p], lr=1e-3)
        optimizer.seed = seed
        p.grad = torch.ones_like(p)
        optimizer.step()
        results.append(p.detach())
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])


def test_state_that_was_replaced_is_the_one_that_is_stepped() -> None:
    """Looking parameters and state up anew at each step would be slow; so it must be noticed when they change."""
    p, q = (nn.Parameter(torch.ones(64, dtype=torch.bfloat16)) for _ in range(2))
    optimizer = AdamW([p, q], lr=1e-2)
    for gradients in ((1.0, None), (1.0, 2.0), (1.0, 2.0)):
        for parameter, value in zip((p, q), gradients, strict=True):
            parameter.grad = None if value is None else torch.full_like(parameter, value)
        optimizer.step()
    assert [int(optimizer.state[x]["step"]) for x in (p, q)] == [3, 2]
    optimizer.load_state_dict(optimizer.state_dict())  # other tensors with the same values
    optimizer.step()
    assert [int(optimizer.state[x]["step"]) for x in (p, q)] == [4, 3]
    optimizer.state.clear()
    optimizer.step()
    assert [int(optimizer.state[x]["step"]) for x in (p, q)] == [1, 1]
    p.data = torch.zeros_like(p)
    optimizer.step()
    assert p.detach().float().abs().max() < 0.1 and p.detach().float().abs().min() > 0


def test_lion_follows_its_formula() -> None:
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(3, 4))
    expected, momentum = p.detach().clone(), torch.zeros(3, 4)
    optimizer = lion([("weight", p)], lr=0.1, betas=[0.9, 0.99], weight_decay=0.5)
    for _ in range(3):
        p.grad = torch.randn(3, 4)
        update = torch.sign(0.9 * momentum + 0.1 * p.grad)
        expected = expected * (1 - 0.1 * 0.5) - 0.1 * update
        momentum = 0.99 * momentum + 0.01 * p.grad
        optimizer.step()
    assert torch.allclose(p, expected, atol=1e-6) and torch.allclose(optimizer.state[p]["exp_avg"], momentum, atol=1e-6)


class PerRow(torch.optim.SGD):
    """One statistic for each row, as row-wise Adagrad has: halves of rows do not show it, halves of columns do."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data -= group["lr"] * p.grad / p.grad.norm(dim=1, keepdim=True)


class Keeps(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        self.state[self.param_groups[0]["params"][0]]["history"] = []


class Counting(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1


@pytest.mark.parametrize(
    ("make", "splits_weights", "reason"),
    [
        (functools.partial(adamw, lr=1e-2, betas=[0.9, 0.95]), True, None),
        (functools.partial(sgd, lr=1e-2), True, None),
        (functools.partial(lion, lr=1e-2, betas=[0.9, 0.99]), True, None),
        (functools.partial(rmsprop, lr=1e-2), True, None),
        (functools.partial(of_class, torch.optim.NAdam), True, None),
        (functools.partial(of_class, functools.partial(torch.optim.Muon, lr=1e-2)), False, None),
        (functools.partial(of_class, functools.partial(torch.optim.Muon, lr=1e-2)), True, "updates whole matrices"),
        (functools.partial(of_class, PerRow), True, "updates whole matrices"),
        (functools.partial(of_class, functools.partial(torch.optim.Adafactor, lr=1e-2)), False, "neither one number"),
        (functools.partial(of_class, Keeps), False, "fix: keep history out of self.state"),
        (functools.partial(of_class, Counting), False, "changes its own settings"),
    ],
)
def test_what_a_checkpoint_or_a_strategy_cannot_hold_is_refused(
    make: Any, splits_weights: bool, reason: str | None
) -> None:
    with pytest.raises(ValueError, match=reason) if reason else contextlib.nullcontext():
        check(make, splits_weights)


def test_a_class_of_torch_gets_groups_and_its_own_default_rate() -> None:
    make = factory({"_target_": "torch.optim.Adagrad", "weight_decay": 0.2}, ["torch.optim"], 64)
    optimizer = make(make_model().named_parameters())
    assert isinstance(optimizer, torch.optim.Adagrad)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.2, 0.0], "of matrices only"
    assert all(g["peak_lr"] == g["lr"] == 1e-2 for g in optimizer.param_groups)


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a closure"):
        factory({"_target_": "torch.optim.LBFGS"}, ["torch.optim"], 64)


class Styles(torch.optim.Optimizer):
    """Creates its state in one of the ways that people use; `k` starts at 1."""

    def __init__(self, params: Any, style: str) -> None:
        super().__init__(params, {"lr": 0.1, "style": style})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p not in self.state:
                    new = {"k": torch.ones(()), "m": torch.zeros_like(p)}
                    if group["style"] == "set":
                        for key, value in new.items():
                            self.state[p][key] = value
                    elif group["style"] == "replace":
                        self.state[p] = new
                    else:
                        self.state[p].update(new)
                self.state[p]["k"] += 1


@pytest.mark.parametrize("style", ["set", "replace", "update"])
def test_state_that_is_created_early_has_its_first_values(style: str) -> None:
    p = nn.Parameter(torch.ones(2))
    optimizer = Styles([p], style)
    init_optimizer_state(optimizer)
    assert optimizer.state[p]["k"] == (1 if style == "set" else 0), "zero where the way of creation hides the value"
    assert type(optimizer.state[p]) is dict and not optimizer.state[p]["m"].any() and p.grad is None


def by_name(named: Any) -> torch.optim.Optimizer:
    weights = dict(named)
    groups = [
        {"params": [weights["0.weight"]], "lr": 0.2},
        {"params": [p for n, p in weights.items() if "0.w" not in n]},
    ]
    return torch.optim.SGD(groups, lr=torch.tensor(0.1), momentum=0.9)


@pytest.mark.parametrize("splits_weights", [False, True])
def test_a_function_may_choose_weights_by_name_and_its_rates_are_the_peaks(splits_weights: bool) -> None:
    make = factory({"_target_": f"{__name__}.by_name"}, [__name__], 64)
    model = make_model()
    model[2].bias.requires_grad_(True)
    optimizer = make(model.named_parameters())
    assert [group["peak_lr"] for group in optimizer.param_groups] == pytest.approx([0.2, 0.1])
    check(make, splits_weights, [name for name, _ in model.named_parameters()])


def by_shape(named: Any) -> torch.optim.Optimizer:
    weights = dict(named)
    assert len(weights["0.weight"].view(-1, 3)) > 0
    return torch.optim.SGD(weights.values(), lr=0.1)


def by_dimensions(named: Any) -> torch.optim.Optimizer:  # of a convolution
    weights = [p for _, p in named]
    return torch.optim.SGD([{"params": [p for p in weights if p.dim() == dim]} for dim in (4, 1)], lr=0.1)


@pytest.mark.parametrize("function", [by_shape, by_dimensions])
def test_a_function_that_takes_certain_shapes_is_not_tried_on_another(
    function: Any, caplog: pytest.LogCaptureFixture
) -> None:
    make = factory({"_target_": f"{__name__}.{function.__name__}"}, [__name__], 64)
    with caplog.at_level("INFO", "dtrain"):
        check(make, False, ["0.weight"])
    assert "the optimizer takes certain shapes only" in caplog.text


def of_another_model(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(make_model().parameters(), lr=0.1)


def with_a_closure(named: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS([p for _, p in named])


def the_class(named: Any) -> Any:
    return torch.optim.Adam


def of_the_model(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (of_the_model, r"fix: def of_the_model\(named_parameters\)"),
        (of_another_model, "not those of the model"),
        (with_a_closure, "closure"),
        (the_class, "returned the class Adam"),
    ],
)
def test_what_a_function_gives_is_checked(function: Any, words: str) -> None:
    make = factory({"_target_": f"{__name__}.{function.__name__}"}, [__name__], 64)
    with pytest.raises(ValueError, match=words):
        make(make_model().named_parameters())
