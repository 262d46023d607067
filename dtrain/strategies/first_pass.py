"""After the first backward pass, once: every weight has a gradient, and no weight has been made by forward()."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Collection, Iterator

import torch
from torch import nn

from dtrain.errors import bad
from dtrain.runs.source_lines import at_attribute

log = logging.getLogger("dtrain")
MOST_SHOWN = 5  # names in a message


def check(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    needs_all: bool,
    updates_all: bool = True,
    reduced: Collection[nn.Parameter] | None = None,
) -> str:
    """Reject weights that training would leave as they are; if no collective waits for them, return a warning.

    updates_all: the optimizer of this rank has all weights, so another one was made by forward(). reduced: the weights
    whose gradients this rank gets; None: all.
    """
    name = name_of(model)
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if updates_all and known & {id(p) for p in trained.values()}:  # otherwise the optimizer has copies
        new = [n for n, p in trained.items() if id(p) not in known]
        if new:
            rule = f"{listed(new)} did not exist before forward() ran, so the optimizer does not know {them(new)}"
            raise at_attribute(bad("model", name, rule, f"create {them(new)} in {name}.__init__"), model, new[0])
    unused = [n for n, p in trained.items() if p.grad is None and (reduced is None or p in reduced)]
    if needs_all and 0 < len(unused) < len(trained):
        fix = f"use {them(unused)} in every step, remove {them(unused)}, or requires_grad_(False) in __init__"
        refused = bad("model", name, f"{said_of(unused)}, and strategy=ddp on several ranks waits for all", fix)
        raise at_attribute(refused, model, unused[0])
    return warned(model, unused)


@contextlib.contextmanager
def watched(model: nn.Module, found: list[str]) -> Iterator[None]:
    """Within the context a backward pass runs, under an engine that takes the gradients; then `found` has a warning."""
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    reached: set[str] = set()

    def note(name: str, gradient: torch.Tensor) -> None:
        reached.add(name)

    hooks = [p.register_hook(functools.partial(note, name)) for name, p in trained.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    found.append(warned(model, [name for name in trained if name not in reached]))


def warned(model: nn.Module, unused: list[str]) -> str:
    """Return a warning of weights that got no gradient, and log it; "" if there are none, or only such."""
    if not unused or len(unused) == sum(p.requires_grad for p in model.parameters()):
        return ""
    text = f"model={name_of(model)}: {said_of(unused)}"
    log.warning(text)
    return text


def said_of(unused: list[str]) -> str:
    return f"{listed(unused)} got no gradient in the first step: forward() or the loss does not use {them(unused)}"


def name_of(model: nn.Module) -> str:
    """Return the name of the user's class: FSDP puts a class of its own, FSDPNet, in its place."""
    kind = type(model)
    return (kind.__bases__[1] if kind.__bases__[0].__name__ == "FSDPModule" else kind).__name__


def listed(names: list[str]) -> str:
    more = f" and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else ""
    return ", ".join(names[:MOST_SHOWN]) + more


def them(names: list[str]) -> str:
    return "it" if len(names) == 1 else "them"
