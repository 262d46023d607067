"""What the methods of a hook get as `run`: read access to a run, its model's outputs, and a way to end it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.config.run_file import Settings
from dtrain.util import collective
from dtrain.util.dtensor import whole

HIDDEN = ("_", "begin_evaluation", "forward", "stopped_because")  # of HookRun, for dtrain itself
OTHERWISE = {
    "net": "model", "module": "model", "network": "model", "global_step": "step", "iteration": "step", "cfg": "config",
    "max_steps": "last_step", "run_dir": "folder", "path": "folder", "local_rank": "rank", "train_loss": "loss",
    "learning_rate": "lr", "should_stop": "stop", "val_loader": "batches", "optimizer": "lr", "scheduler": "lr",
}  # fmt: skip
See = Callable[[Tensor, Tensor], None]
Forward = Callable[[Tensor, Tensor, See], None]  # passes the outputs of each micro-batch on, with its targets


class HookRun:
    """A run as a hook sees it. `step` and `metrics` change; what a hook changes in the model changes the training.

    model: the user's own module, not wrapped. Under fsdp, tensor and zero3 a rank holds parts of its weights; under
    pipeline it holds only the layers of its stages, so call `outputs` instead of the model.
    """

    def __init__(
        self,
        folder: Path,
        config: Settings,
        model: nn.Module,
        device: torch.device,
        last_step: int,
        forward: Forward,
        batches: Callable[[], Iterator[tuple[Tensor, Tensor]]],
        begin_evaluation: Callable[[], object],
    ) -> None:
        self.folder, self.config, self.model, self.device, self.last_step = folder, config, model, device, last_step
        self.rank, self.world_size = collective.rank(), collective.world_size()
        self.step = 0  # steps done
        self.metrics: dict[str, Any] = {}  # the newest of each, by the names of metrics.jsonl
        self.stopped_because = ""
        self.forward, self._batches, self.begin_evaluation = forward, batches, begin_evaluation

    def stop(self, reason: str) -> None:
        """End the run after this step, with a checkpoint and the status `done`. One rank that calls it is enough."""
        self.stopped_because = str(reason) or "stopped by a hook"

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's share of the validation batches of an evaluation, on its device."""
        return self._batches()

    def outputs(self, inputs: Tensor) -> Tensor | None:
        """The model's outputs in evaluation mode. All ranks must call it.

        None on the ranks of a pipeline that do not hold its last stage.
        """
        found: list[Tensor] = []
        places = torch.arange(len(inputs), device=self.device)
        with torch.no_grad():
            self.forward(inputs, places, lambda outputs, _: found.append(whole(outputs)))
        return torch.cat(found) if found else None


def meant(run: HookRun, error: Exception, frames: list[dict[str, Any]]) -> str:
    """Return what a hook that asks a run for a name it lacks may use; "" for another error."""
    there = sorted(name for name in {*vars(run), *vars(HookRun)} if not name.startswith(HIDDEN))
    if isinstance(error, AttributeError) and isinstance(error.obj, HookRun):
        name, has = error.name or "", f"run has {', '.join(there)}"
    elif isinstance(error, KeyError) and frames and "metrics[" in frames[-1]["text"]:
        name, has = str(error.args[0]), f"run.metrics has {', '.join(run.metrics) or 'nothing yet'}"
        has += f"; {name} after an evaluation: after_evaluation(run)" if name.startswith("val_") else ""
        there = []
    else:
        return ""
    near = difflib.get_close_matches(name, [*there, *run.metrics], 1, 0.7)
    found = OTHERWISE.get(name, near[0] if near else "")
    if found in run.metrics and found not in there:
        found = f'metrics["{found}"]'
    elif found not in there:
        return has
    return f"run.{found}; {has}"
