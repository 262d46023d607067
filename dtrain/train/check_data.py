"""Check the data of a run, and its first batch, before the first step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from dtrain.config.files import TARGET
from dtrain.config.run_file import Settings
from dtrain.data.check import reader_of, without_targets
from dtrain.data.fields import Fields, has_targets
from dtrain.data.samples import in_memory
from dtrain.errors import bad
from dtrain.models.calling import shifts_labels
from dtrain.strategies.base import Strategy


def of_few_samples(cfg: Settings, num_samples: int | None, world_size: int) -> Iterator[str]:
    """Warn of data that are less than one batch: each step then reads a sample several times."""
    size, group = cfg.train.global_batch_size, world_size if cfg.train.micro_batch_size is None else 0
    if num_samples is None or not 0 < num_samples < size:
        return
    has = f"{num_samples} sample{'s' * (num_samples != 1)}"
    fitting = num_samples // group * group if group else 0
    fix = f"train.global_batch_size={fitting}, or more samples" if fitting else "more samples, or a smaller batch"
    yield (
        f"data={cfg.choices.get('data')} has {has}, fewer than a batch of train.global_batch_size={size}: each step "
        f"repeats samples, and is {size / num_samples:.3g} epochs; fix: {fix}"
    )


def of_whole_batches(cfg: Settings, inputs: Any, targets: Any) -> Iterator[str]:
    """Warn where a sample looks like a batch: each input has its own target, and there are as many as in a batch."""
    count = cfg.train.global_batch_size
    are_tensors = isinstance(inputs, torch.Tensor) and isinstance(targets, torch.Tensor)
    if cfg.data[TARGET].startswith("dtrain.") or not are_tensors or not inputs.is_floating_point():
        return
    if inputs.dim() > 2 and targets.dim() == 2 and inputs.shape[1] == targets.shape[1] == count > 1:
        yield (
            f"data={cfg.choices.get('data')}: each sample is {count} inputs with a target each, as if it was a batch, "
            f"and a step reads train.global_batch_size={cfg.train.global_batch_size} of them; a stream gives "
            "single samples by `yield from zip(inputs, targets)`"
        )


def samples_of(dataset: Any) -> int | None:
    """Return the samples of an epoch; None: a stream that does not say."""
    return dataset.length if getattr(dataset, "is_stream", False) else len(dataset)


def held_out(dataset: Any, cfg: Settings) -> Any:
    """Return the validation split; of a stream, the samples of one evaluation, kept in memory."""
    if getattr(dataset, "is_stream", False):
        return in_memory(dataset, cfg.train.eval_batches * cfg.train.global_batch_size)
    return dataset


def check_batch(
    model: nn.Module, strategy: Strategy, inputs: Any, targets: Any, dataset: Any = None, loss: str = ""
) -> None:
    """Reject a batch that the model, the loss or the strategy does not take, before the first step."""
    call = getattr(model, "batch_call", None)
    is_known = loss.partition(".")[0] in ("dtrain", "torch")  # one of the user may do without targets
    if is_known and hasattr(model, "watch") and not has_targets(targets):
        raise without_targets(dataset, inputs, f"loss={loss.rpartition('.')[2]}")
    if isinstance(inputs, Fields):
        has = f"gives batches with {', '.join(name for name, _ in inputs.leaves())}"
        if call is None:
            rule, fix = f"{has}, but dtrain's models take one tensor", "return (inputs, targets) from the data set"
            raise bad("data", "…", rule, fix)
        if strategy.sizes.pp > 1 or strategy.sizes.tp > 1:
            rule = f"{has}, but pipeline and tensor parallelism divide one tensor"
            raise bad("data", "…", rule, "strategy=fsdp, or return (inputs, targets)")
        # a Hugging Face model compares each place with the next label, so the first label never counts
        shifts = shifts_labels(model) and isinstance(targets, torch.Tensor) and targets.dim() == 2
        if shifts and hasattr(model, "watch"):  # another loss was chosen, which would learn to copy the input
            raise bad("loss", "…", "only the model's own loss compares each place with the next label", "loss=own")
        strategy.first_target = int(shifts)
    elif call is not None and shifts_labels(model) and inputs.shape == targets.shape and torch.equal(inputs, targets):
        rule = "the targets equal the inputs, but those of a pair (inputs, targets) must be the next tokens"
        raise bad("data", "…", rule, 'return {"input_ids": …, "labels": …}, whose labels the model shifts itself')
    if call is not None:
        with_targets = not hasattr(model, "watch")
        if with_targets and call.target in call.required and not has_targets(targets):
            raise without_targets(dataset, inputs, f"{call.name}.forward({', '.join(call.names)})")
        call.check(inputs, with_targets, reader_of(dataset))
    strategy.own_targets(targets)  # an error if sequences cannot be divided
