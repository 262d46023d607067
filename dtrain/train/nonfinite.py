"""After a loss or gradient that is not finite: where does it come from, and what helps? A good step costs nothing."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dtrain.data import prefetch
from dtrain.data.fields import Fields
from dtrain.data.loader import Loader
from dtrain.data.stream_loader import StreamLoader
from dtrain.strategies.ddp import DDP
from dtrain.strategies.first_pass import name_of
from dtrain.train.pending import FinishedStep
from dtrain.train.process import log

if TYPE_CHECKING:
    from dtrain.train.run import Run

LONGEST_S = 20.0  # of the search for the layer, which begins no further micro-batch after that


class NonFiniteError(RuntimeError):
    """Loss or gradient became NaN or Inf, and train.nonfinite is `stop`, or no step at all could update the weights.

    change: settings with which a resume may get further; the last screen puts them into a command.
    """

    def __init__(self, message: str, change: dict[str, Any]) -> None:
        super().__init__(message)
        self.change = change


def problem(run: Run, finished: FinishedStep) -> str:
    """What is wrong with a step that was not finite, if the run must end for it; otherwise ""."""
    settings, norm = run.cfg.train, f"gradient norm {finished.grad_norm}"
    if settings.nonfinite == "stop" and not finished.overflow:
        return f"step {finished.step}: loss {finished.loss}, {norm}: not finite, weights unchanged"
    if finished.step == settings.steps and not has_trained(run, finished):
        return (
            f"all {finished.step} steps were skipped, so nothing was trained: loss {finished.loss}, {norm} at the end"
        )
    return ""


def has_trained(run: Run, finished: FinishedStep) -> bool:
    """Has any step updated the weights? num_skipped is of this launch: one that resumes has fewer than steps."""
    return run.num_skipped < finished.step


def error(run: Run, finished: FinishedStep) -> NonFiniteError | None:
    """If the run must end: what is wrong, where it comes from as far as a second look finds it, and what to do."""
    if not (what := problem(run, finished)):
        return None
    notes: list[str] = []
    place = in_fp32 = ""
    begin = finished.samples - run.cfg.train.global_batch_size
    try:
        if found := first_sample(run.train_data, begin):
            return NonFiniteError(f"{what}. {found}\n  fix: repair it, or leave it out of the data", {})
        place, in_fp32 = first_place(run, begin, math.isfinite(finished.loss), notes)
    except Exception:  # data and model are not the question then
        log.exception("the step could not be looked at again")
    if finished.overflow and not place and run.strategy.precision.scale >= 1:
        return None  # a run of a few steps, over before fp16's loss scale has settled
    fix, change = advice(run, finished, place, in_fp32)
    raised = NonFiniteError(f"{what}{f'. {place}' if place else ''}\n  fix: {fix}", change)
    for note in notes:
        raised.add_note(note)
    return raised


def advice(run: Run, finished: FinishedStep, place: str, in_fp32: str) -> tuple[str, dict[str, Any]]:
    """What to do, and the settings to resume with: it depends on the precision, and on whether any step has trained."""
    precision, lr, of_loss = run.strategy.precision, run.cfg.optim.get("lr"), not math.isfinite(finished.loss)
    is_16_bit = precision.dtype == torch.float16
    lower = f"a smaller optim.lr (now {lr:g})" if lr else "a smaller learning rate"
    to_bf16 = {"precision": "bf16"}
    if not has_trained(run, finished):
        if in_fp32 == "finite":
            return "precision=bf16: without 16 bits it is finite, and fp16 has no numbers above 65504", to_bf16
        if finished.overflow and not place:  # the scale was still falling when the steps were over
            rule = f"gradients overflow the loss scale, which has fallen to {precision.scale:g}"
            return f"{rule}: more train.steps, precision.init_scale={precision.scale:g}, or precision=bf16", to_bf16
        where = "there" if place else "in data, initial weights, model and loss"
        none = "no step has updated the weights, so it is not the learning rate"
        what = f"look {where} for log, sqrt, a division or a norm of 0, or a number that is not finite"
        more = "" if place or holds_all(run) else ". With strategy=ddp dtrain names the layer"
        return f"{none}: {what}{more}", {}
    if is_16_bit:
        why = "fp16 has no numbers above 65504" if of_loss else "gradients overflow at every loss scale"
        return f"precision=bf16 ({why}), {lower}, or train.nonfinite=skip", to_bf16
    warmup = " or a longer schedule.warmup_steps" if "warmup_steps" in run.cfg.schedule else ""
    return f"{lower}{warmup}, or train.nonfinite=skip", {"optim.lr": smaller(lr)} if lr else {}


def smaller(lr: float) -> float:
    """A tenth, in one digit; of a rate that no optimizer trains with, a usual one."""
    return float(f"{lr / 10:.1g}") if lr <= 1 else 1e-3


# ---- the data ----------------------------------------------------------------------------------------------------


def first_sample(data: Loader | StreamLoader, begin: int) -> str:
    """Name the first sample of a global batch whose inputs or targets are not finite; "" if all are."""
    for request, inputs, targets in batches(data, begin, data.rank_batch_size if isinstance(data, Loader) else 0):
        for part, what in ((inputs, "inputs"), (targets, "targets")):
            for tensor in tensors(part):
                if tensor.is_floating_point() and len(tensor) == len(request.indices):
                    broken = (~torch.isfinite(tensor)).reshape(len(tensor), -1).any(dim=1).nonzero()
                    if len(broken):
                        return (
                            f"Sample {request.indices[int(broken[0])]} of the train split has NaN or Inf in its {what}"
                        )
    return ""


def batches(data: Loader | StreamLoader, begin: int, count: int) -> Iterator[tuple[prefetch.Request, Any, Any]]:
    """Read a global batch again, of all ranks: each finds the same. A stream is not read again for this."""
    if isinstance(data, Loader):
        for start in range(begin, begin + data.global_batch_size, count):
            request = data._samples(start, count)
            yield request, *prefetch.read(data.dataset, request)


def tensors(part: Any) -> Iterator[Tensor]:
    yield from [part] if isinstance(part, Tensor) else [tensor for _, tensor in part.leaves()]


# ---- the model ---------------------------------------------------------------------------------------------------


def first_place(run: Run, begin: int, is_loss_finite: bool, notes: list[str]) -> tuple[str, str]:
    """Compute the step again: the first layer or gradient that is not finite; under fp16, is it `finite` in fp32?

    Only where a rank has the whole model: one rank may come here without the others. notes: gets tracebacks.
    """
    data, strategy, until = run.train_data, run.strategy, time.monotonic() + LONGEST_S
    if not holds_all(run) or not isinstance(data, Loader):
        return "", ""
    module, look = strategy.module, of_gradients if is_loss_finite else of_layers
    for _, inputs, targets in batches(data, begin, run.cfg.train.micro_batch_size or data.rank_batch_size):
        batch = inputs.to(run.device), targets.to(run.device)
        in_fp32 = ""
        with torch.compiler.set_stance("force_eager"), strategy.kept_buffers():  # the run may continue, and save them
            with strategy.autocast():
                place = look(module, batch, strategy.context, notes)
            if place and strategy.precision.dtype == torch.float16:
                in_fp32 = "" if look(module, batch, strategy.context, []) else "finite"
        if place:
            return place, in_fp32
        if time.monotonic() > until:
            break
    return "", ""


def holds_all(run: Run) -> bool:
    """Can this rank alone compute the model?"""
    return dist.get_world_size() == 1 or (isinstance(run.strategy, DDP) and not run.strategy.context)


def of_layers(module: nn.Module, batch: tuple[Any, Any], context: Mapping[str, Any], notes: list[str]) -> str:
    """Name the first layer, in the order of the forward pass, with NaN or Inf in its output."""
    found: list[str] = []

    def watch(name: str, layer: nn.Module) -> Any:
        def after(_: nn.Module, inputs: Any, named: Any, output: Any) -> None:
            if found or is_finite(output):
                return
            title, outer = f"{name} ({name_of(layer)})", module.get_submodule(name.rpartition(".")[0])
            weights = (f"{name}.{key}".strip(".") for key, p in layer.named_parameters() if not is_finite(p))
            if own := next(weights, None):
                found.append(f"The weight {own} is not finite")
            elif name and is_finite((inputs, named)):
                found.append(f"The first NaN or Inf is in the output of the layer {title}, whose inputs are finite")
            elif name:
                inside = f"look before it in {name_of(outer)}"
                found.append(f"The first NaN or Inf is in the inputs of the layer {title}: {inside}")
            else:
                found.append(f"The outputs of all layers are finite: it is in {name_of(layer)}.forward or the loss")

        return layer.register_forward_hook(after, with_kwargs=True)

    handles = [watch(name, layer) for name, layer in module.named_modules()]
    try:
        with torch.no_grad():
            module(*batch, **context)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else ""


def of_gradients(module: nn.Module, batch: tuple[Any, Any], context: Mapping[str, Any], notes: list[str]) -> str:
    """Name the operation whose backward pass gives NaN: torch's anomaly detection warns with its traceback."""
    weights = [p for p in module.parameters() if p.requires_grad]
    with warnings.catch_warnings(record=True) as caught, torch.autograd.set_detect_anomaly(True):
        warnings.simplefilter("always")
        try:
            torch.autograd.grad(module(*batch, **context), weights, allow_unused=True)  # no rank waits for another one
        except RuntimeError as error:
            if "returned nan values" not in str(error):
                raise
            notes += [str(one.message) for one in caught if "Traceback of forward call" in str(one.message)]
            return f"The loss is finite, but the gradient is NaN: {str(error).split(chr(39))[1]} in the backward pass"
    return ""


def is_finite(values: Any) -> bool:
    found = [v for v in tree_leaves(values) if isinstance(v, Tensor)]
    found += [t for v in tree_leaves(values) if isinstance(v, Fields) for _, t in v.leaves()]
    return all(bool(torch.isfinite(t).all()) for t in found if t.is_floating_point())
