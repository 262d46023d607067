"""Plain modules: what they lack is filled in, and under every strategy they do what one process does."""

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dtrain.checkpoint.initial_weights import Drawn
from dtrain.commands.verify.compare import compare, compose
from dtrain.config.run_file import load, save
from dtrain.inference.sample import load_model
from dtrain.launch.arguments import prepare_arguments
from dtrain.launch.resolve import resolve
from dtrain.models import losses as losses_
from dtrain.models import user_model
from dtrain.models.check_model import of_squashed, of_sum
from dtrain.runs.folder import read_json
from dtrain.strategies.materialize import init_weights, materialize
from dtrain.train import build
from dtrain.train.metrics import evaluated
from tests.models import own_models as mine
from tests.world import losses, metrics, summary, train


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(dim, dim), nn.Tanh(), nn.Linear(dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


class Net(nn.Module):
    """With what people write: names of ours that mean something else, a buffer that is not saved, values of tensors."""

    def __init__(self, dim: int = 8, depth: int = 2, frozen: float | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(4, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.last = nn.Linear(dim, 6)
        self.norm = nn.BatchNorm1d(dim)
        self.register_buffer("shift", torch.randn(dim), persistent=False)
        if frozen is not None:
            self.scale = torch.tensor(frozen)  # no buffer
            self.rate = torch.linspace(0, frozen, 3)[1].item()  # a value
        self.init_weights()

    def init_weights(self) -> None:
        nn.init.ones_(self.last.bias)

    def num_parameters(self) -> int:
        raise AssertionError("not ours")

    def own_names(self) -> list[str]:
        return ["first"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.own_names() == ["first"]
        x = self.norm(self.first(x) + self.shift)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def made(loss: Any = losses_.cross_entropy, seed: int = 3, **settings: Any) -> Any:
    def make() -> nn.Module:
        return Net(**settings)

    model = user_model.construct(make, seed)
    user_model.complete(model, loss, make, seed)
    return model


def filled(model: nn.Module) -> Any:
    materialize(model, torch.device("cpu"))
    init_weights(model, Drawn(0))
    return model


# ---- first weights -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"frozen": 0.5}])
def test_first_weights_are_the_constructors_under_the_seed_and_no_other_draw_changes(settings: dict[str, Any]) -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    model = made(**settings)
    assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))
    filled(model)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]
    assert torch.equal(torch.get_rng_state(), before[0])
    with torch.random.fork_rng():
        torch.manual_seed(3)
        expected = Net(**settings)
    state = dict([*expected.named_parameters(), *expected.named_buffers()])
    assert {name: t.tolist() for name, t in [*model.named_parameters(), *model.named_buffers()]} == {
        name: t.tolist() for name, t in state.items()
    }
    assert not model.init_weights.values, "let go as they are taken"
    assert getattr(model, "scale", 0.5) == 0.5 and getattr(model, "rate", 0.25) == 0.25
    assert model.state_dict().keys() == state.keys(), "also the buffer that the module itself would not save"


def test_a_constructor_that_fails_everywhere_is_told_as_it_is() -> None:
    with pytest.raises(TypeError, match="dimm"):
        made(dimm=3)


def test_a_weight_under_two_names_stays_one_also_by_way_of_the_cpu() -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight = model[0].weight
        assert model[0].bias.sum().item() != 7.0  # a value
        return model

    model = user_model.construct(make, 0)
    materialize(model, torch.device("cpu"))
    assert model[1].weight is model[0].weight and not model[0].weight.is_meta  # type: ignore[index]
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "0.bias", "1.bias"]


def test_a_tensor_in_two_modules_is_filled_under_both_names() -> None:
    model = mine.Shares()
    user_model.complete(model, None, mine.Shares, 0)
    first: Any = model.init_weights
    for name, values in user_model.buffers_of(model).items():
        first(name, values, torch.Generator())
    assert {"blocks.0.mask", "blocks.1.mask"} <= user_model.buffers_of(model).keys()
    assert user_model.own_names(mine.Shares())["transient"] == ["scale"]
    assert user_model.own_names(mine.Shares())["tied"] == {
        "head.weight": "embed.weight",
        **{f"blocks.1.norm.{name}": f"blocks.0.norm.{name}" for name in nn.BatchNorm1d(8).state_dict()},
    }


def test_what_a_model_says_itself_stays() -> None:
    class Says(nn.Linear):
        num_parameters = 7

        def init_weights(self, name: str, weight: torch.Tensor, generator: torch.Generator) -> None:
            weight.fill_(2.0)

        def fsdp_units(self) -> list[nn.Module]:
            return []

        def flops_per_sample(self) -> float:
            return 1.0

        def forward(self, x: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(x).mean()

    model: Any = user_model.construct(lambda: Says(2, 2), 0)
    user_model.complete(model, None, lambda: Says(2, 2), 0)
    assert set(vars(model)) - {"forward", "batch_call", "_own_names"} == set(vars(Says(2, 2)))
    assert filled(model).weight.tolist() == [[2.0, 2.0], [2.0, 2.0]]


# ---- the loss ------------------------------------------------------------------------------------------------


def test_outputs_or_their_loss_and_metrics_in_evaluation() -> None:
    model = filled(made())
    x, y = torch.randn(8, 4), torch.tensor([0, 1, 2, 3, 4, 5, 0, 1])
    assert torch.equal(model(x), Net.forward(model, x))
    assert torch.equal(model(x, y), nn.functional.cross_entropy(Net.forward(model, x), y))
    model.eval()
    assert model.eval_metrics == ("accuracy", "top5") and model(x, y).shape == (3,)
    assert list(dict(model.named_parameters())) == list(dict(Net().named_parameters())), "names stay"


@pytest.mark.parametrize("name", ["eval_metrics", "figures"])  # the second is the former name
def test_a_loss_of_ones_own_names_its_metrics(name: str) -> None:
    def loss(outputs: torch.Tensor, targets: torch.Tensor, training: bool) -> torch.Tensor:
        value = nn.functional.mse_loss(outputs, targets)
        return value if training else torch.stack([value, value.sqrt()])

    setattr(loss, name, ("rmse",))
    model = filled(made(loss))
    x, y = torch.randn(8, 4), torch.randn(8, 6)
    assert model(x, y).shape == () and model.eval()(x, y).shape == (2,)
    assert list(evaluated(model, [4.0, 2.0])) == ["val_loss", "val_rmse"]


def test_a_copy_has_its_own_weights_in_its_forward_pass() -> None:
    model = filled(made())
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.last.weight.zero_()
        other.last.bias.zero_()
    x = torch.randn(8, 4)
    assert not other(x).any() and model(x).any()
    assert set(other.fsdp_units()) == set(other.blocks)


def test_a_module_is_a_loss_if_it_has_nothing_to_train() -> None:
    model = filled(made(loss=nn.CrossEntropyLoss(weight=torch.arange(6.0))))
    x, y = torch.randn(8, 4), torch.tensor([0, 1, 2, 3, 4, 5, 0, 1])
    assert torch.equal(model(x, y), nn.functional.cross_entropy(model(x), y, weight=torch.arange(6.0)))
    with pytest.raises(ValueError, match=r"loss=Linear: has weights.*\n  fix: "):
        made(loss=nn.Linear(2, 2))


def test_a_loss_that_is_no_mean_is_told() -> None:
    model = filled(made(loss=lambda outputs, targets: outputs.sum(-1)))
    with pytest.raises(ValueError, match=r"returned a tensor of shape \[8\], not a scalar\n  fix: return the mean"):
        model(torch.randn(8, 4), torch.zeros(8))


def test_a_model_that_gives_no_loss_is_told() -> None:
    with pytest.raises(ValueError, match=r"loss=own: Net\.forward\(x.*takes no targets.*\n  fix: loss=cross_entropy"):
        made(loss=losses_.own)


class OneElement(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, targets: Any = None) -> torch.Tensor:
        return self.layer(x).mean(0)


def test_a_loss_of_one_element_is_a_number() -> None:
    model: Any = OneElement()
    user_model.complete(model, losses_.own, OneElement, 0)
    assert model(torch.ones(2, 4), torch.zeros(2)).shape == () and model.eval()(torch.ones(2, 4)).shape == (1,)


class Beside(nn.Module):
    """A tensor that makes torch.utils.checkpoint compute a gradient, and a dict that contains itself."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        setattr(self, name, torch.ones(1, requires_grad=True))
        self.known: dict[str, Any] = {}
        self.known["all"] = [self.known]


class Slope(Beside):
    """A loss of the derivative at points that the model keeps."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (slope,) = torch.autograd.grad(self.layer(x * self.points).sum(), self.points, create_graph=True)
        return slope


class Steeper(Slope):
    pass


def test_a_tensor_that_wants_a_gradient_is_told_unless_it_is_a_dummy_or_differentiated_by() -> None:
    assert isinstance(user_model.construct(lambda: Steeper("points"), 0), Steeper)
    assert isinstance(user_model.construct(lambda: Beside("dummy_tensor"), 0), Beside)
    with pytest.raises(ValueError, match="model=Beside: scale is a tensor with requires_grad, but no Parameter"):
        user_model.construct(lambda: Beside("scale"), 0)


# ---- 16 bits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.LayerNorm(8), (4, 8)),
        (lambda: nn.RMSNorm(8), (4, 8)),
        (lambda: nn.GroupNorm(2, 8), (4, 8, 3)),
        (lambda: nn.BatchNorm1d(8), (4, 8)),
        (lambda: nn.InstanceNorm2d(8), (4, 8, 3, 3)),  # without weights
    ],
)
def test_a_norm_with_16_bit_weights_computes_in_32(make: Any, shape: tuple[int, ...]) -> None:
    held, expected = nn.Sequential(make()), make()
    user_model.complete(held, losses_.mse, make, 0)
    x = torch.randn(shape)
    assert torch.equal(held(x), expected(x)), "with 32-bit weights as it is"
    held[0].weight = None if expected.weight is None else nn.Parameter(torch.full_like(expected.weight, 0.5).bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        y = held(x)
        loss = held(x, y.detach() + 1)
    assert y.dtype == torch.float32 and torch.allclose(y, (1 if expected.weight is None else 0.5) * expected(x))
    if expected.weight is not None:
        loss.backward()
        assert held[0].weight.grad.dtype == torch.bfloat16
    if isinstance(expected, nn.BatchNorm1d):
        assert torch.allclose(held[0].running_mean, 0.1 * x.mean(0) * (1 + 0.9 + 0.81)), "of three passes"


# ---- layers --------------------------------------------------------------------------------------------------


def units_of(model: nn.Module) -> list[nn.Module]:
    return user_model.repeated_blocks(model)


def test_layers_are_the_largest_kind_of_module_that_is_repeated() -> None:
    net = Net()
    assert units_of(net) == list(net.blocks), "and not the linear layers in them"
    mlp = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU())
    assert units_of(mlp) == [mlp[0], mlp[2]]
    two = nn.ModuleDict({name: nn.ModuleList([Block(4), Block(4)]) for name in ("encoder", "decoder")})
    assert units_of(two) == [*two["encoder"], *two["decoder"]], "of all lists, which nobody calls"
    nested = nn.ModuleList([nn.Sequential(Block(4), Block(4)), nn.Sequential(Block(4), Block(4))])
    assert units_of(nested) == list(nested), "the outer ones"
    for single in (nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.ReLU())):
        assert units_of(single) == [single]


def test_six_operations_a_parameter() -> None:
    model = made(dim=8, depth=2)
    count = sum(p.numel() for p in Net().parameters())
    assert model.num_parameters == count and model.flops_per_sample() == 6 * count


# ---- on ranks ------------------------------------------------------------------------------------------------

WORDS = [
    "model=plain_xyz.Net", "data=plain_xyz.Points", "train.steps=6", "train.global_batch_size=8", "train.eval_every=0",
    "train.eval_batches=2", "schedule.warmup_steps=2", "optim.lr=1e-2", "checkpoint.every=0",
]  # fmt: skip
MODULE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, dim: int = 8, whole: bool = False):
        super().__init__()
        self.first, self.last = nn.Linear(4, dim), nn.Linear(dim, 6)
        layers = [nn.Linear(dim, dim), nn.Tanh(), nn.Linear(dim, dim)]
        self.blocks = layers[0] if whole else nn.Sequential(*layers)
        self.register_buffer("shift", torch.randn(dim), persistent=False)
        self.scale = torch.tensor(0.5)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x, mask=None):
        inner = self.blocks(x @ torch.ones(4, len(self.shift)) + self.shift)
        return self.last(self.norm(self.first(x)) + self.scale * inner)

class Samples:
    def __init__(self, seed):
        self.x = torch.randn(64, 4, generator=torch.Generator().manual_seed(seed))
        self.y = (self.x[:, 0] > 0).long() + 2 * (self.x[:, 1] > 0)
    def __len__(self):
        return 64
    def batch(self, indices):
        return self.x[indices], self.y[indices]

class Points:
    def dataset(self, split):
        return Samples(int(split == "val"))

class Norm(Net):
    def __init__(self, dim: int = 8):
        super().__init__(dim)
        self.norm = nn.BatchNorm1d(dim)

class Mute(Net):
    def forward(self, x):
        return super().forward(x)
def mute():
    return Mute()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("plain")
    (path / "plain_xyz.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path)
        yield path


def run(run_dir: Path, size: int, *words: str, code: int = 0) -> Path:
    words = (*WORDS, "loss=cross_entropy", f"cluster.processes={size}", f"run_dir={run_dir}", *words)
    config = resolve(compose(prepare_arguments(list(words))))
    (run_dir / "logs").mkdir(parents=True)
    save(run_dir, config)
    assert train(run_dir, size) == [code] * size
    return run_dir


@pytest.fixture(scope="module")
def one(folder: Path) -> Path:
    return run(folder / "one", 1)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2", "zero3"])
def test_a_plain_module_follows_one_process_under_every_strategy(strategy: str, folder: Path, one: Path) -> None:
    cut = run(folder / strategy, 2, f"strategy={strategy}", "train.micro_batch_size=2")
    apart = compare(cut, one)
    assert apart.loss <= 1e-5 and apart.grad_norm <= 1e-5 and apart.weight <= 1e-5
    assert losses(one)[6] < losses(one)[1]
    assert summary(cut)["val_accuracy"] == summary(one)["val_accuracy"] and summary(cut)["parameters"] == 254
    model, _ = load_model(cut, ["plain_xyz"])
    assert torch.equal(model.shift, filled(build.make(load(one), ["plain_xyz"])).shift), "a buffer goes through"


def test_a_model_without_layers_is_one_and_is_recomputed_whole(folder: Path) -> None:
    whole = run(folder / "whole", 1, "model.whole=true")
    words = ("model.whole=true", "activation_checkpointing=full", "train.micro_batch_size=2")
    cut = run(folder / "cut", 2, "strategy=fsdp", *words)
    assert compare(cut, whole).loss <= 1e-5


def test_half_of_the_bits_suit_torchs_norms(folder: Path, one: Path) -> None:
    half = run(folder / "half", 2, "strategy=fsdp", "precision=bf16", "train.stop_after=3")
    assert all(abs(loss - losses(one)[step]) < 0.05 for step, loss in losses(half).items()) and len(losses(half)) == 3


def test_tensor_and_pipeline_are_refused_without_a_plan_and_a_rank_tells_what_only_it_can(folder: Path) -> None:
    for strategy in ("tensor", "pipeline"):
        with pytest.raises(ValueError, match=r"strategy\.[tp]p=2: Net has no|the last pipeline stage"):
            run(folder / strategy, 2, f"strategy={strategy}")
    silent = run(folder / "silent", 1, "model=plain_xyz.mute", "loss=own", code=2)
    assert "Mute.forward(x) takes no targets" in read_json(silent / "logs" / "failure-0.json")["message"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_batch_norm_of_torch_goes_on_where_it_was(strategy: str, folder: Path) -> None:
    """Its statistics differ between ranks, and a checkpoint has one of each: all go on with the first one's."""
    words = ("model=plain_xyz.Norm", f"strategy={strategy}", "checkpoint.every=3", "train.eval_every=1")
    left_alone = run(folder / f"norm-{strategy}", 2, *words)
    stopped = run(folder / f"stopped-{strategy}", 2, *words, "train.stop_after=3")
    config = load(stopped)
    config["train"]["stop_after"] = None
    save(stopped, config)
    assert train(stopped, 2) == [0, 0]
    figures = [[m.get("val_loss") for m in metrics(r) if "val_loss" in m] for r in (left_alone, stopped)]
    assert figures[0] == figures[1] and losses(left_alone) == losses(stopped)


@pytest.mark.parametrize(
    ("function", "warned"),
    [(mine.sum_by_name, True), (mine.sum_of_squares, False), (mine.divided, False), (mine.sometimes, False)],
)
def test_a_loss_that_is_a_sum_is_warned_of(function: Any, warned: bool) -> None:
    assert bool([*of_sum(function, {"_target_": "net.loss"})]) is warned


@pytest.mark.parametrize(
    ("model", "warned"),
    [(mine.Ends, False), (lambda: nn.Sequential(nn.Linear(4, 3)), True), (mine.Logarithm, False), (mine.Scores, True)],
)
def test_scores_without_a_logarithm_are_warned_of_under_nll_loss(model: Any, warned: bool) -> None:
    assert bool([*of_squashed(model(), "torch.nn.functional.nll_loss")]) is warned


@pytest.mark.parametrize(
    ("model", "warned"),
    [
        (mine.Function, True),
        (mine.Method, True),
        (mine.Layer, True),
        (mine.InBlock, True),
        (lambda: nn.Sequential(nn.Linear(4, 3), nn.Softmax(-1)), True),
        (mine.Logarithm, False),
        (mine.Attention, False),
        (mine.Evaluates, False),
    ],
)
def test_a_softmax_that_the_loss_computes_too_is_warned_of(model: Any, warned: bool) -> None:
    said = [*of_squashed(model(), "torch.nn.CrossEntropyLoss")]
    assert bool(said) is warned, said
    assert not [*of_squashed(model(), "dtrain.models.losses.mse")]
