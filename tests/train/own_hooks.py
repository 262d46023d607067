"""Hooks as users write them, for the ranks of tests/train/test_hooks.py."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
import torch.utils.data
from torch import Tensor
from torch.nn import functional as F


def nll(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.reshape(-1, outputs.shape[-1]).float(), targets.reshape(-1))


class Stops:
    """Asks the run to stop, as a scheduler does, once a step is done: the next one is its last."""

    def __init__(self, at: int = 5) -> None:
        self.at = at

    def after_step(self, run: Any) -> None:
        if run.step == self.at:
            os.kill(os.getpid(), signal.SIGTERM)


class Likelihood:
    """A metric of the outputs: the loss once more, so a test knows what it has to be."""

    def eval_metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"nll": nll(outputs, targets)}


class Everything:
    """Every kind of method, with state. `die_at`: this rank is killed after that step, if DIE is set."""

    def __init__(self, every: int = 2, die_at: int = 0) -> None:
        self.every, self.die_at = every, die_at
        self.seen: list[int] = []
        self.sums = torch.zeros(3, dtype=torch.float64)
        self.begun = False

    def begin(self, run: Any) -> None:
        self.begun = True

    def after_step(self, run: Any) -> dict[str, float]:
        assert self.begun and run.step % self.every == 0 and run.metrics["step"] == run.step
        self.seen.append(run.step)
        self.sums += torch.tensor([run.metrics["loss"], run.metrics["grad_norm"], run.metrics.get("val_loss", -1.0)])
        if run.step == self.die_at and "DIE" in os.environ:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"seen": float(len(self.seen)), "sum_of_losses": float(self.sums[0])}

    def evaluate(self, run: Any) -> dict[str, float]:
        found = [(run.outputs(inputs), targets) for inputs, targets in run.batches()]
        values = [float(nll(outputs, targets)) for outputs, targets in found if outputs is not None]
        return {"own_nll": sum(values) / len(values)} if values else {}

    def after_evaluation(self, run: Any) -> None:
        assert abs(run.metrics["own_nll"] - run.metrics["val_loss"]) < 1e-5
        self.sums[2] += run.metrics["own_nll"]

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "sums": self.sums, "more": {"nan": float("nan"), "half": self.sums.half()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["more"]["half"].dtype == torch.float16 and state["more"]["nan"] != state["more"]["nan"]
        self.seen, self.sums = state["seen"], state["sums"]

    def end(self, run: Any) -> None:
        (run.folder / f"end-{run.rank}.txt").write_text(repr((self.seen, self.sums.tolist())))


class Divides:
    def after_step(self, run: Any) -> None:
        1 / (run.step - 2)


class OnOneRank:
    """Ends the run, as only one of its ranks wants to."""

    def after_step(self, run: Any) -> None:
        if run.rank == run.world_size - 1 and run.step == 3:
            run.stop("enough")


class Apart:
    def state_dict(self) -> dict[str, Any]:
        return {"rank": int(os.environ["RANK"])}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Misspelt:
    def after_stp(self, run: Any) -> None: ...


class Shy:
    def evaluate(self) -> dict[str, float]:
        return {}


class Idle:
    def other(self) -> None: ...


class HalfState:
    def state_dict(self) -> dict[str, Any]:
        return {}


class Trained:
    def train_metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"mse": (outputs - targets).square().mean()}


class TakesTheLoss:
    def evaluate(self, run: Any) -> dict[str, float]:
        return {"val_loss": 0.0}


class ReturnsText:
    def evaluate(self, run: Any) -> dict[str, Any]:
        return {"quality": "good"}


class ReturnsAll:
    def eval_metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"sure": outputs}


class ReturnsTensor:
    def after_step(self, run: Any) -> Tensor:
        return torch.zeros(2)


class OddName:
    def evaluate(self, run: Any) -> dict[str, float]:
        return {"my score!": 1.0}


class KeepsAnObject:
    def state_dict(self) -> dict[str, Any]:
        return {"x": object()}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Never:
    every = 0

    def after_step(self, run: Any) -> None: ...


class Network(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


an_object = Divides()


class OtherName:
    def on_step_end(self, run: Any) -> None: ...


class OneOtherName:
    def after_step(self, run: Any) -> None: ...

    def on_train_end(self, run: Any) -> None: ...


class Dispatches:
    def after_step(self, run: Any) -> None:
        getattr(self, f"on_{'epoch_end'}")(run)

    def on_epoch_end(self, run: Any) -> None: ...


class HasProperty:
    def after_step(self, run: Any) -> None: ...

    @property
    def on_fit_end(self) -> int:
        return 3


class SetsAnother:
    def begin_once(self, run: Any) -> None:
        run.end = 3


class Assigned:
    after_step = lambda self, run: None  # noqa: E731


class AssignedLater:
    def __init__(self) -> None:
        self.after_step = lambda run: None


class Helped:
    def after_step(self, run: Any) -> None:
        self.on_log(run)

    def on_log(self, run: Any) -> None: ...


class Looks:
    every = None  # a word of its own: it has no after_step

    def after_evaluation(self, run: Any) -> None:
        state_dict = run.model.state_dict()
        self.weights = len(state_dict)


class HelpedByAFunction:
    def after_step(self, run: Any) -> None:
        close(self, run)

    def on_fit_end(self, run: Any) -> None: ...


def close(hook: HelpedByAFunction, run: Any) -> None:
    hook.on_fit_end(run)


class Tenth:
    every = 10.0

    def after_step(self, run: Any) -> None:
        self.weights = len(run.model.state_dict())


def a_function(run: Any) -> None: ...


class OnlyTrain(torch.utils.data.Dataset[Tensor]):
    """Data without a validation split."""

    def __init__(self, size: int = 8) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> Tensor:
        return torch.zeros(self.size)
