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


def cut(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.detach(), targets)


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def failed(model: Net, dataset: Samples, loss: Callable[..., Tensor] = losses.cross_entropy) -> Exception:
    """Run one step as the loop does; return its error."""
    user_model.attach_loss(model, loss)
    cfg = SimpleNamespace(
        train=SimpleNamespace(micro_batch_size=None),
        loss={"_target_": f"{loss.__module__}.{loss.__name__}"},
        trust=["tests"],
    )
    strategy = SimpleNamespace(module=model, autocast=contextlib.nullcontext, context={})
    run: Any = SimpleNamespace(
        cfg=cfg, strategy=strategy, train_data=Loader(dataset, 6, 0), samples=0, device=torch.device("cpu")
    )
    with pytest.raises((RuntimeError, IndexError, ValueError)) as caught, failed_step.explained(run):
        model(*run.train_data.batch(0)).backward()
    return caught.value


def shown(error: Exception) -> str:
    return str(own_frames(error)[-1]["text"])


def test_an_output_without_a_gradient() -> None:
    error = failed(Detached(), Samples())
    assert str(error).startswith("the output of Detached.forward has no gradient: element 0 of tensors")
    assert shown(error) == "return self.last(x).detach()"


def test_a_loss_without_a_gradient() -> None:
    error = failed(Net(), Samples(), cut)
    assert str(error).startswith(f"the model's output has a gradient, the loss of {__name__}.cut has none: ")
    assert shown(error) == "return nn.functional.cross_entropy(outputs.detach(), targets)"


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


def test_an_error_of_another_kind_stays() -> None:
    def broken(outputs: Tensor, targets: Tensor) -> Tensor:
        raise ValueError("mine")

    assert str(failed(Net(), Samples(), broken)) == "mine"


def test_a_second_look_that_fails_hides_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(failed_step, "of_gradient", lambda *_: 1 / 0)
    with caplog.at_level(logging.ERROR, "dtrain"):
        assert "does not require grad" in str(failed(Detached(), Samples()))
