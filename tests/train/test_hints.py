"""What to do about errors of torch, by their own words: each is raised by torch here, not written down."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from numpy import ones as np_ones
from sklearn.metrics import accuracy_score
from torch import nn
from torch.utils.data import TensorDataset

from dtrain.config.files import TARGET
from dtrain.train.check_data import of_whole_batches
from dtrain.train.hints import hint, near_name


@pytest.mark.parametrize(
    ("fails", "fix"),
    [
        (lambda: nn.Conv2d(1, 4, 3)(torch.ones(8, 28, 28)), "image.unsqueeze(0)"),
        (lambda: nn.Conv2d(3, 4, 3)(torch.ones(8, 28, 28, 3)), "image.permute(2, 0, 1)"),
        (lambda: nn.Conv1d(12, 4, 3)(torch.ones(8, 100, 12)), "x.transpose(1, 2)"),
        (lambda: nn.Conv2d(16, 4, 3)(torch.ones(8, 32, 28, 28)), "expects 16 channels and gets 32"),
        (lambda: nn.Linear(4, 2)(torch.ones(8, 5)), "expects 4 features and gets 5"),
    ],
)
def test_shapes_that_do_not_fit_a_layer(fails: Callable[[], object], fix: str) -> None:
    with pytest.raises(RuntimeError) as error:
        fails()
    assert fix in hint(error.value)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 2)

    def misspelt(self) -> Any:
        return self.lats

    def without_self(self) -> Any:
        return last  # type: ignore[name-defined] # noqa: F821

    def train(self) -> Any:  # type: ignore[override]
        return self


def pandas() -> Any:
    return importlib.import_module("pandas").Series([1, 2], index=[5, 6])[0]


@pytest.mark.parametrize(
    ("fails", "fix"),
    [
        (lambda: nn.Linear(4, 2)(nn.ReLU(torch.ones(4))), "nn.ReLU(…) makes a layer, and does not call it"),
        (lambda: nn.Sequential([nn.Linear(4, 2)]), "nn.Sequential(*layers)"),  # type: ignore[arg-type]
        (lambda: nn.Embedding(8, 4)(torch.arange(16)), "has 8 rows, and gets 15, perhaps a position: shorter"),
        (lambda: nn.Sequential(nn.Embedding(8, 4))(torch.tensor([3, 9])), "0 has 8 rows, and gets 9: more rows"),
        (lambda: nn.Embedding(8, 4)(torch.tensor([3, -1])), "has 8 rows, and gets -1"),
        (lambda: nn.Linear(4, 2)(nn.LSTM(4, 4)(torch.ones(2, 3, 4))), "x, _ = layer(x)"),
        (lambda: nn.Conv2d(1, 2, 3)(torch.ones(1, 1, 8, 8).byte()), "x.float() / 255"),
        (
            lambda: nn.functional.binary_cross_entropy(torch.full((2,), 1.5), torch.ones(2)),
            "binary_cross_entropy_with_logits",
        ),
        (lambda: accuracy_score([0, 1], [[0.2, 0.3], [0.1, 0.4]]), "outputs.argmax(-1)"),
        (lambda: Net().load_state_dict({"module.last.weight": torch.ones(2, 4)}), "k.removeprefix('module.')"),
        (lambda: Net().device, "leave out .to(self.device)"),
        (lambda: nn.Linear(4, 5 / 2), "// in place of /"),  # type: ignore[arg-type]
        (lambda: torch.cat(torch.ones(2), torch.ones(2)), "torch.cat((a, b), dim=-1)"),  # type: ignore[call-overload]
        (lambda: nn.Embedding(4, 4)(torch.ones(2)), "x.long()"),
        (lambda: bool(torch.ones(2) > 0), "torch.where(condition, a, b)"),
        (lambda: Net().eval(), "torch calls that method as train(mode)"),
        (lambda: Path("data/no.csv").read_text(), "Path(__file__).parent / 'data/no.csv'"),
        (lambda: TensorDataset(np_ones(4), np_ones(4)), "torch.from_numpy(…) for each array"),  # type: ignore[arg-type]
        (lambda: TensorDataset([1, 2]), "torch.tensor(…) for each list"),  # type: ignore[arg-type]
        (pandas, ".iloc[i], or .to_numpy()"),
        (lambda: Net().misspelt(), "did you mean self.last?"),
        (lambda: Net().without_self(), "self.last"),
        (lambda: torch.rellu(torch.ones(1)), "did you mean torch.relu?"),  # type: ignore[attr-defined]
        (lambda: np, "import numpy as np, at the top of the file"),  # type: ignore[name-defined] # noqa: F821
    ],
)
def test_mistakes_that_python_and_torch_name_without_a_fix(fails: Callable[[], object], fix: str) -> None:
    with pytest.raises(Exception) as error:
        fails()
    assert fix in (hint(error.value) or near_name(error.value))


def test_a_name_that_is_like_no_other_has_no_hint() -> None:
    with pytest.raises(NameError) as error:
        nothing_like_it  # type: ignore[name-defined] # noqa: B018, F821
    assert near_name(error.value) == ""


@pytest.mark.parametrize(
    ("inputs", "targets", "warned"),
    [
        (torch.ones(1, 8, 4), torch.zeros(1, 8), True),  # a stream of batches of 8
        (torch.ones(1, 9, 4), torch.zeros(1, 9), False),  # a sequence, each place of which has a class
        (torch.ones(1, 8, 4), torch.zeros(1), False),
        (torch.ones(1, 8), torch.zeros(1, 8), False),
        (torch.ones(1, 8, 4).long(), torch.zeros(1, 8), False),
    ],
)
def test_samples_that_look_like_batches_are_warned_of(
    inputs: torch.Tensor, targets: torch.Tensor, warned: bool
) -> None:
    cfg = SimpleNamespace(
        train=SimpleNamespace(global_batch_size=8, micro_batch_size=None), data={TARGET: "net.Stream"}, choices={}
    )
    assert bool([*of_whole_batches(cfg, inputs, targets)]) is warned  # type: ignore[arg-type]
