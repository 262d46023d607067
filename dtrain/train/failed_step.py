"""After a step that failed: compute it once more, to name the line that is wrong."""

from __future__ import annotations

import ast
import contextlib
import inspect
import re
import traceback
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
from dtrain.errors import bad
from dtrain.models import calling, losses
from dtrain.runs import causes
from dtrain.runs.source_lines import at_def, at_return, source
from dtrain.strategies.ddp import DDP
from dtrain.train.process import log
from dtrain.util.collective import Alone
from dtrain.util.format import counted

if TYPE_CHECKING:
    from dtrain.train.run import Run

OF_THE_BATCH = re.compile(r"and targets \[.*\n  fix: give |has NaN or Inf in its (inputs|targets)|returns no targets,")
NO_GRADIENT = re.compile(r"element 0 of tensors does not require grad")
IN_PLACE = re.compile(r"modified by an inplace operation")
ONE_VALUE = re.compile(r"Expected more than 1 value per channel when training")
PRODUCT = re.compile(r"mat1 and mat2 shapes cannot be multiplied \((\d+)x(\d+) and (\d+)x\d+\)")
BATCHED = re.compile(
    r"Expected \dD \(unbatched\) or (\d)D \(batched\) input to \w+, but got input of size: \[([\d, ]+)\]"
)
DICT = re.compile(r"\bdict\b")


@contextlib.contextmanager
def explained(run: Run) -> Iterator[None]:
    """Add to an error what a second look at the step finds."""
    try:
        yield
    except (RuntimeError, IndexError, ValueError, TypeError, KeyError, AttributeError) as error:
        found = None
        try:
            with Alone():  # peers may wait in another collective, or be done
                found = second_look(run, error)
        except Exception:  # then the error speaks for itself
            log.exception("the failed step could not be looked at again")
        if found is None or found is error:
            raise
        raise found from error


def second_look(run: Run, error: Exception) -> Exception | None:
    """Return an error that says more; None: nothing was found."""
    text, data = str(error), run.train_data
    if OF_THE_BATCH.search(text):  # with another fix, the model or the setting may be wrong
        return at_return(error, reader_of(data.dataset))
    has_fix = "\n  fix: " in text
    if not has_fix and (better := of_batch_dimension(run, text)):
        return better
    in_forward = not has_fix and is_of_forward(run, error)
    if in_forward and DICT.search(text) and (better := of_fields(run, error)):
        return better
    in_forward = in_forward and hasattr(run.strategy.module, "watch")  # and loss= is computed outside of it
    # one rank may fail alone, and sharded weights need all ranks
    if not isinstance(data, Loader) or not (dist.get_world_size() == 1 or isinstance(run.strategy, DDP)):
        return of_unpacking(run) if in_forward and "values to unpack" in text else None
    if not in_forward and not any(pattern.search(text) for pattern in (NO_GRADIENT, IN_PLACE)):
        return None
    count = run.cfg.train.micro_batch_size or len(data.sample()[0])
    inputs, targets = (part.to(run.device) for part in data.batch(run.samples))
    inputs, targets = inputs[:count], targets[:count]
    if in_forward:
        return of_own_loss(run, inputs, targets)
    return of_gradient(run, text, inputs) if NO_GRADIENT.search(text) else of_place(run, text, inputs, targets)


def of_batch_dimension(run: Run, text: str) -> Exception | None:
    """Did forward lose the dimension of the batch, or do the data add one?"""
    if not any(pattern.search(text) for pattern in (PRODUCT, ONE_VALUE, BATCHED)):
        return None
    count, name = run.summary["micro_batch_size"], str(run.cfg.choices.get("data"))
    if found := PRODUCT.search(text):
        rows, got, wanted = map(int, found.groups())
        if rows != count and rows * got == count * wanted:
            rule = f"forward got {counted(count, 'sample')}, and gives that layer {counted(rows, 'row')} of {got}"
            fix = "keep the dimension of the batch: x.flatten(1), or x.view(len(x), -1), above that line"
            return RuntimeError(f"{text.splitlines()[0]}: {rule}\n  fix: {fix}")
    elif ONE_VALUE.search(text) and count == 1:
        key = "micro_batch_size" if run.cfg.train.micro_batch_size else "global_batch_size"
        fix = f"train.{key}={2 * run.cfg.train[key]}, or nn.LayerNorm in place of batch norm"
        return bad(f"train.{key}", run.cfg.train[key], f"gives a rank 1 sample at a time: {text}", fix)
    elif found := BATCHED.search(text):
        shape = [int(size) for size in found[2].split(", ")]
        inputs, targets = run.train_data.sample()
        of_many = isinstance(targets, Tensor) and targets.dim() > 1 and isinstance(inputs, Tensor) and inputs.dim() > 2
        is_batch = of_many and inputs.shape[1] == targets.shape[1] == run.cfg.train.global_batch_size
        if len(shape) == int(found[1]) + 1 and is_batch and not isinstance(run.train_data, Loader):
            rule = f"each sample is {list(inputs.shape[1:])} with {inputs.shape[1]} targets, as if it was a batch"
            error = bad("data", name, rule, "give single samples: `yield from zip(inputs, targets)`")
            return at_return(error, reader_of(run.train_data.dataset))
    return None


def outputs_of(run: Run, inputs: Any) -> Tensor | None:
    """What the model returns; None if it returns its loss itself."""
    if not hasattr(run.strategy.module, "watch"):  # see user_model.attach_loss
        return None
    with run.strategy.autocast():
        outputs = calling.scores(run.strategy.module(inputs))
    return outputs if isinstance(outputs, Tensor) else None


def is_of_forward(run: Run, error: Exception) -> bool:
    """Was it raised while the model's forward ran?"""
    code = getattr(inspect.unwrap(type(run.strategy.module).forward), "__code__", None)
    return any(frame.f_code is code for frame, _ in traceback.walk_tb(error.__traceback__))


def of_own_loss(run: Run, inputs: Any, targets: Any) -> Exception | None:
    """Does the model compute its loss itself, and fail because loss= calls it with the inputs alone?"""
    module: Any = run.strategy.module
    name, forward = type(module).__name__, type(module).forward.__get__(module)
    call = calling.call_of(module)
    chosen = run.cfg.choices.get("loss") or run.cfg.loss[TARGET]
    ways = {
        "loss=own": lambda: call(forward, inputs, targets),
        "loss=own, and `batch` as the name of that argument": lambda: forward((inputs, calling.plain(targets))),
    }
    with contextlib.suppress(Exception), torch.no_grad(), run.strategy.autocast():
        call(forward, inputs)
        return None  # it works after all: memory was short, or it fails now and then
    for fix, way in ways.items():
        with contextlib.suppress(Exception), torch.no_grad(), run.strategy.autocast():
            value = calling.loss_in(module, way())
            called = f"{name}.forward({', '.join(call.names)})"
            rule = f"{called} computes the loss itself, of the inputs and the targets, and gets the inputs alone"
            if value.dim():
                rule = f"{called} works with the inputs and the targets, and gets the inputs alone"
                fix = "def forward(self, x), and nothing in it that unpacks or uses the targets"
            return at_def(bad("loss", chosen, rule, fix), type(module).forward)
    return None


def of_fields(run: Run, error: Exception) -> Exception | None:
    """Does forward(x) use a dict as if it was a tensor? A sample's fields come one by one to arguments of their names.

    By its source: a forward that looks into the dict, x["image"], is right, and so may be one that hands it on."""
    module: Any = run.strategy.module
    call, function, inputs = calling.call_of(module), type(module).forward, run.train_data.sample()[0]
    values = getattr(inputs, "values", None)
    if not isinstance(values, dict) or not call.takes_batch or call.names[0] in values or causes.is_users_own(error):
        return None
    name, found = call.names[0], source(function)
    looks = [
        node.value for node in (ast.walk(found[1]) if found else ()) if isinstance(node, (ast.Subscript, ast.keyword))
    ]
    if found is None or any(isinstance(node, ast.Name) and node.id == name for node in looks):
        return None
    fields = ", ".join(values)
    rule = f"{call.name}.forward({name}) gets a dict of {fields}: no field is named {name}"
    fix = f"def forward(self, {fields}); or the data set returns the key {name!r} in place of {next(iter(values))!r}"
    return at_def(bad("model", call.name, rule, fix), function)


def of_unpacking(run: Run) -> Exception | None:
    """Does forward unpack its only argument, x, y = batch? By its source, as no rank can try it alone."""
    module: Any = run.strategy.module
    call, function = calling.call_of(module), type(module).forward
    found = source(function)
    unpacked = [
        node.value.id
        for node in (ast.walk(found[1]) if found else ())
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Name)
    ]
    if len(call.names) != 1 or call.names[0] not in unpacked:
        return None
    rule = f"{call.name}.forward({call.names[0]}) unpacks what it gets, which are the inputs alone"
    fix = "loss=own if forward returns the loss; if not, def forward(self, x), which unpacks nothing"
    return at_def(bad("loss", run.cfg.choices.get("loss") or run.cfg.loss[TARGET], rule, fix), function)


def of_gradient(run: Run, text: str, inputs: Any) -> Exception:
    """Of a compiled model: the others find it while they compute the loss (models/user_model.py)."""
    module = run.strategy.module
    with torch.enable_grad():
        outputs = outputs_of(run, inputs)
    if outputs is None or not outputs.requires_grad:
        return calling.without_gradient(module, "the output" if outputs is not None else "the loss")
    name = run.cfg.loss[TARGET]
    function = locate(name, run.cfg.trust)
    own = getattr(function, "forward", function)
    return losses.without_gradient("loss", name.rpartition(".")[2], "what it returns has no gradient", own)


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
