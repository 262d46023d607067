"""A failed step is computed once more, and its error then names the line, or the targets, that are wrong."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtrain.data.fields import Fields
from dtrain.data.loader import Loader
from dtrain.models import losses, user_model
from dtrain.runs.causes import own_frames
from dtrain.train import failed_step

CLASSES = 3


class Samples:
    def __init__(self, low: int = 0, floats: bool = False) -> None:
        self.y = torch.arange(6) % CLASSES + low
        self.floats = floats

    def __len__(self) -> int:
        return len(self.y)

    def batch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        targets = self.y[indices]
        return torch.ones(len(indices), 4), targets.float() if self.floats else targets


class Alone(Samples):
    def batch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        return torch.ones(len(indices), 4), torch.zeros(len(indices), 0)


class ByName(Samples):
    def batch(self, indices: np.ndarray) -> Any:
        values = torch.ones(len(indices), 4)
        return Fields({"wave": values, "length": values}), self.y[indices]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x)


class Detached(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(x).detach()


class InPlace(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.exp(self.last(x))
        y += 1
        return y


class OwnLoss(Net):
    def forward(self, x: Tensor, y: Any = None) -> Tensor:
        return nn.functional.cross_entropy(self.last(x), y)


class OwnLossOfPair(Net):
    def forward(self, pair: Any) -> Tensor:
        x, y = pair
        return nn.functional.cross_entropy(self.last(x), y)


class Unpacks(Net):
    def forward(self, batch: Any) -> Tensor:
        x, _ = batch
        return self.last(x)


class Returns(Net):
    """Gives what a loss of the user cannot take."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.last(x))


class Looks(Net):
    def forward(self, x: Any) -> Tensor:
        return self.last(x["wave"] + x["length"] + x)


class Fails(Net):
    def forward(self, x: Any) -> Tensor:
        return self.last(x + None)


def cut(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.detach(), targets)


class FailsOnce(Net):
    """Its second argument is optional, and memory is short once."""

    memory = 0

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        self.memory += 1
        if self.memory == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self.last(x)


def mine(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets)


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def failed(
    model: Net, dataset: Samples, loss: Callable[..., Tensor] = losses.cross_entropy, is_compiled: bool = False
) -> Exception:
    """Run one step as the loop does; return its error."""
    user_model.attach_loss(model, loss)
    if is_compiled:
        model.compile(backend="eager")
    cfg = SimpleNamespace(
        train=SimpleNamespace(micro_batch_size=None),
        loss={"_target_": f"{loss.__module__}.{loss.__name__}"},
        trust=["tests"],
        choices={"loss": loss.__name__},
    )
    strategy = SimpleNamespace(module=model, autocast=contextlib.nullcontext, context={})
    run: Any = SimpleNamespace(
        cfg=cfg, strategy=strategy, train_data=Loader(dataset, 6, 0), samples=0, device=torch.device("cpu")
    )
    with pytest.raises((RuntimeError, TypeError, ValueError)) as caught, failed_step.explained(run):
        model(*run.train_data.batch(0)).backward()
    return caught.value


def shown(error: Exception) -> str:
    return str(own_frames(error)[-1]["text"])


@pytest.mark.parametrize("is_compiled", [False, True])
def test_an_output_without_a_gradient(is_compiled: bool) -> None:
    error = failed(Detached(), Samples(), is_compiled=is_compiled)
    assert str(error).startswith("model=Detached: the output of Detached.forward has no gradient, so nothing")
    assert "fix: leave out .detach() in line" in str(error)
    assert shown(error) == "return self.last(x).detach()"


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_loss_without_a_gradient(is_compiled: bool) -> None:
    error = failed(Net(), Samples(), cut, is_compiled)
    assert str(error).startswith("loss=cut: what it returns has no gradient, so nothing would be trained\n  fix: leave")
    assert shown(error) == "return nn.functional.cross_entropy(outputs.detach(), targets)"


@pytest.mark.parametrize(
    ("model", "fix"),
    [
        (OwnLoss, "loss=own"),
        (OwnLossOfPair, "loss=own, and `batch` as the name of that argument"),
        (Unpacks, "def forward(self, x), and nothing in it that unpacks or uses the targets"),
    ],
)
def test_a_model_that_takes_the_targets_under_a_loss(model: type[Net], fix: str) -> None:
    error = failed(model(), Samples())
    assert str(error).startswith(f"loss=cross_entropy: {model.__name__}.forward(")
    assert str(error).endswith(f"gets the inputs alone\n  fix: {fix}") and shown(error).startswith("def forward(self, ")


def test_a_model_that_unpacks_its_batch_where_no_rank_can_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    error = failed(OwnLossOfPair(), Samples())
    assert "OwnLossOfPair.forward(pair) unpacks what it gets" in str(error) and "fix: loss=own if" in str(error)
    assert isinstance(failed(Fails(), Samples()), TypeError)


def test_an_error_that_the_targets_do_not_heal_stays() -> None:
    assert isinstance(failed(Fails(), Samples()), TypeError)
    assert isinstance(failed(FailsOnce(), Samples()), torch.OutOfMemoryError)


def test_class_numbers_that_do_not_start_at_0() -> None:
    error = failed(Net(), Samples(1))
    assert "targets are 1 to 3, but the model gives 3 scores, for the classes 0 to 2" in str(error)
    assert shown(error) == "return torch.ones(len(indices), 4), targets.float() if self.floats else targets"
    error = failed(Net(), Samples(-1))
    assert "targets are -1 to 1" in str(error) and "fix: give -100 where there is no class" in str(error)
    assert shown(error).startswith("return torch.ones")


def test_an_operation_in_place() -> None:
    error = failed(InPlace(), Samples())
    assert "modified by an inplace operation" in str(error) and "Hint" not in str(error)
    assert shown(error) == "y = torch.exp(self.last(x))"


def test_a_batch_that_does_not_fit_the_loss() -> None:
    """The line is that of the batch if it must change; but not if the model or the loss may be what is wrong."""
    assert shown(failed(Net(), Samples(floats=True))).startswith("return torch.ones")
    assert not shown(failed(Net(), Samples(5))).startswith("return torch.ones"), "too few outputs, or wrong targets"
    error = failed(Net(), Samples(), losses.mse)
    assert "fix: loss=cross_entropy" in str(error) and not shown(error).startswith("return")


@pytest.mark.parametrize(
    ("wrap", "rule"),
    [
        (lambda y: None, "the model's forward returned nothing (None)"),
        (lambda y: (y, y.sum()), "the loss works with outputs[0] alone"),
        (lambda y: {"logits": y}, "the loss works with outputs['logits'] alone"),
    ],
)
def test_a_forward_that_gives_no_tensor_to_a_loss_of_the_user(wrap: Callable[[Tensor], Any], rule: str) -> None:
    error = failed(Returns(wrap), Samples(), mine)
    assert rule in str(error) and "\n  fix: return" in str(error)
    assert shown(error) == "return self.wrap(self.last(x))"


def test_data_without_targets_under_a_loss_of_the_user() -> None:
    error = failed(Net(), Alone(), mine)
    assert "returns no targets, which loss=mine needs\n  fix: return (inputs, targets)" in str(error)
    assert shown(error).startswith("return torch.ones(len(indices), 4), torch.zeros")


def test_fields_that_no_argument_of_forward_has() -> None:
    error = failed(Net(), ByName())
    assert "Net.forward(x) gets a dict of wave, length: no field is named x" in str(error)
    assert "fix: def forward(self, wave, length)" in str(error)
    assert isinstance(failed(Looks(), ByName()), TypeError), "it takes the dict on purpose"


def test_an_error_of_another_kind_stays() -> None:
    def broken(outputs: Tensor, targets: Tensor) -> Tensor:
        raise ValueError("mine")

    assert str(failed(Net(), Samples(), broken)) == "mine"


def test_a_second_look_that_fails_hides_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(failed_step, "of_place", lambda *_: 1 / 0)
    with caplog.at_level(logging.ERROR, "dtrain"):
        assert "modified by an inplace operation" in str(failed(InPlace(), Samples()))


class Gathers(Net):
    """Fails after a collective, as one rank may do alone."""

    passed = 0

    def forward(self, x: Tensor) -> Tensor:
        dist.all_reduce(torch.ones(1))
        self.passed += 1
        return self.last(x).view(7, 9)


def test_a_second_look_enters_no_collective_in_which_peers_do_not_wait() -> None:
    model, passed = Gathers(), []
    assert "shape '[7, 9]' is invalid" in str(failed(model, Samples())) and model.passed == 1

    def gathering(outputs: Tensor, targets: Tensor) -> Tensor:
        dist.all_reduce(torch.ones(1))
        passed.append(1)
        return outputs.view(7, 9)

    assert "shape '[7, 9]' is invalid" in str(failed(Net(), Samples(), gathering)) and passed == [1]
