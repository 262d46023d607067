"""After a step that failed: compute it once more, to name the line that is wrong."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.config.build import locate
from dtrain.config.files import TARGET
from dtrain.data.check import reader_of
from dtrain.data.loader import Loader
from dtrain.models import calling
from dtrain.runs.source_lines import at_return
from dtrain.strategies.ddp import DDP
from dtrain.train.process import log

if TYPE_CHECKING:
    from dtrain.train.setup import Run

OF_THE_BATCH = re.compile(r"and targets \[.*\n  fix: give |has NaN or Inf in its (inputs|targets)")
NO_GRADIENT = re.compile(r"element 0 of tensors does not require grad")
IN_PLACE = re.compile(r"modified by an inplace operation")
CUTS = "look for .detach(), .item(), torch.no_grad() or torch.tensor(…) there"


@contextlib.contextmanager
def explained(run: Run) -> Iterator[None]:
    """Add to an error what a second look at the step finds."""
    try:
        yield
    except (RuntimeError, IndexError, ValueError) as error:
        found = None
        try:
            found = second_look(run, error)
        except Exception:  # then the error speaks for itself
            log.exception("the failed step could not be looked at again")
        if found is None or found is error:
            raise
        raise found from error


def second_look(run: Run, error: Exception) -> Exception | None:
    text = str(error)
    data = run.train_data
    if OF_THE_BATCH.search(text):  # with another fix, the model or the setting may be wrong
        return at_return(error, reader_of(data.dataset))
    # one rank may fail alone, and sharded weights need all ranks
    if not isinstance(data, Loader) or not (dist.get_world_size() == 1 or isinstance(run.strategy, DDP)):
        return None
    if not any(pattern.search(text) for pattern in (NO_GRADIENT, IN_PLACE)):
        return None
    count = run.cfg.train.micro_batch_size or len(data.sample()[0])
    inputs, targets = (part.to(run.device) for part in data.batch(run.samples))
    inputs, targets = inputs[:count], targets[:count]
    return of_gradient(run, text, inputs) if NO_GRADIENT.search(text) else of_place(run, text, inputs, targets)


def outputs_of(run: Run, inputs: Any) -> Tensor | None:
    """What the model returns; None if it returns its loss itself."""
    if not hasattr(run.strategy.module, "watch"):  # see user_model.attach_loss
        return None
    with run.strategy.autocast():
        outputs = calling.scores(run.strategy.module(inputs))
    return outputs if isinstance(outputs, Tensor) else None


def of_gradient(run: Run, text: str, inputs: Any) -> Exception:
    module = run.strategy.module
    name = type(module).__name__
    with torch.enable_grad():
        outputs = outputs_of(run, inputs)
    if outputs is None or not outputs.requires_grad:
        what = "the output" if outputs is not None else "the loss"
        rule = f"{what} of {name}.forward has no gradient: {text}"
        return at_return(RuntimeError(f"{rule}\n  fix: {CUTS}"), type(module).forward)
    function = locate(run.cfg.loss[TARGET], run.cfg.trust)
    rule = f"the model's output has a gradient, the loss of {run.cfg.loss[TARGET]} has none: {text}"
    return at_return(RuntimeError(f"{rule}\n  fix: {CUTS}"), getattr(function, "forward", function))


def of_place(run: Run, text: str, inputs: Any, targets: Any) -> Exception:
    """Find the operation whose backward pass failed: torch's anomaly detection warns with its traceback."""
    better = RuntimeError(text.partition(" Hint:")[0])
    weights = [p for p in run.strategy.module.parameters() if p.requires_grad]
    with warnings.catch_warnings(record=True) as caught, torch.autograd.set_detect_anomaly(True, check_nan=False):
        warnings.simplefilter("always")
        with contextlib.suppress(RuntimeError), run.strategy.autocast():
            loss = run.strategy.module(inputs, targets, **run.strategy.context)
            torch.autograd.grad(loss, weights, allow_unused=True)  # not backward(): no rank waits for another one
    for warning in caught:
        if "Traceback of forward call" in str(warning.message):
            better.add_note(str(warning.message))
    return better
