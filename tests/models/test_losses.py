"""Losses for models that only give outputs, and which of them the launcher refuses."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from dtrain.commands.verify.compare import compose
from dtrain.config.build import build
from dtrain.config.files import CONF, options_of
from dtrain.launch.resolve import resolve
from dtrain.models import losses, user_model


@settings(deadline=None)  # the first call is slow on a busy machine
@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    classes=st.integers(5, 7),
    second=st.booleans(),
    seed=st.integers(0, 99),
    smoothing=st.sampled_from([0.0, 0.1]),
)
def test_cross_entropy_is_torchs_wherever_the_classes_lie_and_leaves_out_what_does_not_count(
    shape: list[int], classes: int, second: bool, seed: int, smoothing: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(*shape, classes, generator=generator)
    targets = torch.randint(classes, shape, generator=generator)
    targets.view(-1)[1::3] = -100
    given = scores.movedim(-1, 1) if second else scores
    rows, flat = scores.reshape(-1, classes), targets.reshape(-1)
    loss = losses.cross_entropy(given, targets, training=True, label_smoothing=smoothing)
    assert torch.equal(loss, F.cross_entropy(rows, flat, label_smoothing=smoothing))
    counted = flat != -100
    found = losses.cross_entropy(given, targets, training=False, label_smoothing=smoothing)
    right = (rows.argmax(-1) == flat)[counted].float().mean()
    assert torch.equal(found[:2], torch.stack([F.cross_entropy(rows, flat), right]))
    assert found[2].isnan() if classes <= 5 else found[1] <= found[2] <= 1, "top 5 of 5 classes says nothing"


def test_mse_takes_each_output_with_its_own_target() -> None:
    outputs, targets = torch.tensor([[1.0], [3.0]]), torch.tensor([1.0, 2.0])
    assert losses.mse(outputs, targets) == 0.5
    assert losses.mse(outputs, targets[:, None]) == 0.5
    assert losses.mse(outputs.bfloat16(), torch.tensor([1, 2])) == 0.5, "in float32, of whole numbers, too"
    with pytest.raises(ValueError, match=r"outputs are \[2, 1\] of torch\.float32 and targets \[3\].*\n  fix: "):
        losses.mse(outputs, torch.zeros(3))


WHOLE = torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("loss", "outputs", "targets", "fix"),
    [
        (losses.cross_entropy, (4, 3), torch.zeros(4), "give the targets as class numbers"),
        (losses.cross_entropy, (4, 3), torch.zeros(4, 3), "loss=torch.nn.CrossEntropyLoss"),
        (losses.cross_entropy, (4,), WHOLE, "as many outputs for each sample"),
        (losses.cross_entropy, (4, 10), torch.zeros(4, 3), "targets of one class number"),
        (losses.cross_entropy, (4, 3), WHOLE[:, None], r"give the targets without .*\.squeeze"),
        (F.cross_entropy, (4, 3), WHOLE[:, None], r"give the targets without .*\.squeeze"),
        (nn.CrossEntropyLoss(), (4, 6, 3), WHOLE[:, None].expand(4, 6), "loss=cross_entropy, which"),
        (nn.BCEWithLogitsLoss(), (4,), WHOLE, r"give the targets .*\.float"),
        (nn.BCEWithLogitsLoss(), (4, 1), WHOLE, r"outputs\.squeeze\(-1\) .*; and the targets .*\.float\(\)"),
        (losses.cross_entropy, (4, 6, 3), WHOLE, r"one set of scores for each sample: x\[:, -1\]"),
    ],
)
def test_what_does_not_fit_is_told_with_both_shapes_and_dtypes(
    loss: Any, outputs: tuple[int, ...], targets: torch.Tensor, fix: str
) -> None:
    name = getattr(loss, "__name__", type(loss).__name__)
    told = rf"loss={name}: outputs are \[4.* of torch\.float32 and targets \[4.* of torch\..*\n  fix: {fix}"
    with pytest.raises(ValueError, match=told):
        losses.call(loss, name, torch.zeros(outputs), targets)


class Line(nn.Module):
    def __init__(self, sizes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(2, sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


@pytest.mark.parametrize("backend", [None, "eager"])
@pytest.mark.parametrize(
    ("loss", "sizes", "targets", "fix"),
    [
        (nn.MSELoss(), 3, WHOLE, "loss=cross_entropy, if"),
        (nn.MSELoss(), 1, torch.zeros(4), r"outputs\.squeeze"),
        (F.smooth_l1_loss, 1, torch.zeros(4), r"outputs\.squeeze"),
    ],
)
def test_torch_would_only_warn_and_broadcast(
    loss: Any, sizes: int, targets: torch.Tensor, fix: str, backend: str | None
) -> None:
    """Also under compile, whose default on a GPU is to compile the whole model, with its loss."""
    model = Line(sizes)
    user_model.attach_loss(model, loss)
    if backend:
        model.compile(backend=backend)
    with pytest.raises(ValueError, match=rf"outputs are \[4, {sizes}\] of .* and targets \[4\] of .*\n  fix: {fix}"):
        model(torch.zeros(4, 2), targets)


@pytest.mark.parametrize(
    ("targets", "fix"),
    [
        ([-1, 0, 2], "give -100 where there is no class"),
        ([-100, 1, 3], "give class numbers that start at 0"),
        ([0, 1, 7], "as many outputs as the data have classes, which are 8 or more: this batch has class 7"),
    ],
)
@pytest.mark.parametrize("loss", [losses.cross_entropy, nn.CrossEntropyLoss(), F.nll_loss])
def test_class_numbers_out_of_range(loss: Any, targets: list[int], fix: str) -> None:
    low = min(target for target in targets if target != -100)
    told = rf"targets are {low} to {max(targets)}, but the model gives 3 scores, .* 0 to 2 .*\n  fix: {fix}"
    with pytest.raises(ValueError, match=told):
        losses.call(loss, getattr(loss, "__name__", type(loss).__name__), torch.zeros(3, 3), torch.tensor(targets))


@pytest.mark.parametrize(
    ("outputs", "targets", "fix"),
    [
        ((10, 3), (4,), r"4 samples in the first dimension of the outputs \(nn.LSTM, nn.GRU: batch_first=True\)"),
        ((10, 4, 3), (4,), r"4 samples in the first dimension of the outputs: \.transpose\(0, 1\)"),
        ((40, 3), (4, 10), r"outputs of shape \[4, 10, 3\]: without \.view\(-1, …\)"),
    ],
)
def test_outputs_of_another_number_of_samples(outputs: tuple[int, ...], targets: tuple[int, ...], fix: str) -> None:
    with pytest.raises(ValueError, match=rf"\n  fix: {fix}"):
        losses.call(losses.cross_entropy, "cross_entropy", torch.ones(outputs), torch.zeros(targets).long())


@pytest.mark.parametrize(
    ("dtype", "fix"), [(torch.int64, r"\.squeeze\(-1\)$"), (torch.float, r"\.squeeze\(-1\)\.long\(\)$")]
)
def test_cross_entropy_says_how_to_drop_a_last_dimension(dtype: torch.dtype, fix: str) -> None:
    with pytest.raises(ValueError, match=fix):
        losses.cross_entropy(torch.zeros(4, 3), torch.zeros(4, 1, dtype=dtype))


@pytest.mark.parametrize("option", options_of("loss"))
def test_every_option_is_a_loss(option: str) -> None:
    from omegaconf import OmegaConf

    loss = losses.ready(build(OmegaConf.load(CONF / "loss" / f"{option}.yaml")))
    if option == "own":
        assert loss is None
    else:
        assert loss is not None
        classes = torch.tensor([1, 0]) if option == "cross_entropy" else torch.ones(2, 6)
        assert loss(torch.zeros(2, 6), classes).shape == ()


def test_a_class_is_made_with_its_settings_and_a_function_is_given_them() -> None:
    weighted = build(
        {"_target_": "torch.nn.modules.loss.HuberLoss", "_partial_": True, "delta": 2.0}, trust=["torch.nn"]
    )
    made = losses.ready(weighted)
    assert isinstance(made, torch.nn.HuberLoss) and made.delta == 2.0
    l1 = losses.ready(build({"_target_": "torch.nn.functional.l1_loss", "_partial_": True}, trust=["torch.nn"]))
    assert l1 is not None and l1(torch.ones(2), torch.zeros(2)) == 1.0
    assert losses.ready(None) is None, "runs of earlier versions have no such section"


# ---- before the launch ---------------------------------------------------------------------------------------

MODULE = """
from torch import nn
class Silent(nn.Module):
    def forward(self, x): ...
class Loud(nn.Module):
    def forward(self, x, targets=None): ...
class Any_(nn.Module):
    def forward(self, *inputs): ...
class Elsewhere(Silent): ...
def make(): ...
"""
GPT2 = ["num_layers", "dim", "num_heads", "vocab_size", "seq_len", "vocab_multiple", "dropout"]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "silent_xyz.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    return "silent_xyz"


def resolved(*words: str) -> dict[str, Any]:
    return resolve(compose([*words, "run_dir=new"]))


def own(name: str) -> list[str]:
    data = ["data.seq_len=8", "data.vocab_size=9"]
    sizes = ["~model." + key for key in GPT2]
    return [f"model._target_=silent_xyz.{name}", "trust=[silent_xyz]", "data=synthetic", *sizes, *data]


def test_a_model_without_a_loss_is_refused_before_the_launch_if_it_can_be_told(module: str) -> None:
    with pytest.raises(
        ValueError, match=r"loss=own: .*: Silent\.forward\(x\) takes no targets.*\n  fix: loss=cross_ent"
    ):
        resolved(*own("Silent"))
    for fine in ("Loud", "Any_", "Elsewhere", "make"):
        resolved(*own(fine))
    config = resolved(*own("Silent"), "loss=cross_entropy", "loss.label_smoothing=0.1")
    assert config["loss"] == {
        "_target_": "dtrain.models.losses.cross_entropy",
        "_partial_": True,
        "label_smoothing": 0.1,
    }


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["loss.label_smoothing=1"], "loss.label_smoothing=1: must be at least 0 and less than 1"),
        (["strategy=pipeline"], "loss=cross_entropy: the last pipeline stage must compute the loss itself"),
        (["strategy=tensor", "strategy.loss_parallel=true"], "strategy.loss_parallel=true: shards the outputs"),
        (["loss.gamma=1"], "gamma"),
    ],
)
def test_a_loss_that_cannot_be_is_refused(module: str, words: list[str], told: str) -> None:
    with pytest.raises(Exception, match=told):
        resolved("loss=cross_entropy", *words)


def test_a_loss_suits_tensor_parallel_and_a_pipeline_of_one(module: str) -> None:
    resolved("loss=cross_entropy", "strategy=tensor")
    resolved("loss=cross_entropy", "strategy=pipeline", "strategy.pp=1")


def swapped(targets: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, targets)


def test_a_loss_with_its_arguments_swapped() -> None:
    outputs, targets = torch.zeros(4, 3), torch.tensor([0, 1, 2, 0])
    with pytest.raises(
        ValueError, match=r"loss=m.swapped: .*\n  fix: swap its arguments: def swapped\(outputs, targets\)"
    ):
        losses.call_own(swapped, "m.swapped", outputs, targets)
    with pytest.raises(NotImplementedError):  # neither order works
        losses.call_own(swapped, "m.swapped", outputs, targets + 7)
    assert losses.call_own(lambda y, x: (x - y).square().mean(), "mean", outputs, outputs) == 0


class Fails:
    """A loss that takes its arguments in either order, and fails once."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if outputs.isnan().any():
            raise ValueError("the outputs have NaN")
        if error := self.error:
            self.error = None
            raise error
        return (outputs - targets).square().mean()


@pytest.mark.parametrize(
    ("error", "value"),
    [(torch.OutOfMemoryError("CUDA out of memory"), 0.0), (None, math.nan), (RuntimeError("busy"), 0.0)],
)
def test_a_loss_that_fails_for_another_reason_is_not_swapped(error: Exception | None, value: float) -> None:
    with pytest.raises(type(error or ValueError()), match="NaN" if error is None else str(error)):
        losses.call_own(Fails(error), "mse", torch.full((4,), value), torch.zeros(4))
