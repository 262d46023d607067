"""After the first backward pass, once: every weight has a gradient, and no weight has been made by forward()."""

from __future__ import annotations

import logging

import torch
from torch import nn

from dtrain.errors import bad
from dtrain.runs.source_lines import at_attribute

log = logging.getLogger("dtrain")
MOST_SHOWN = 5  # names in a message


def check(model: nn.Module, optimizer: torch.optim.Optimizer, needs_all: bool, updates_all: bool = True) -> None:
    """Reject weights that training would leave as they are; if no collective waits for them, only log their names.

    updates_all: the optimizer of this rank has all weights, so another one was made by forward().
    """
    name = model.__class__.__name__
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if updates_all and known & {id(p) for p in trained.values()}:  # otherwise the optimizer has copies
        new = [n for n, p in trained.items() if id(p) not in known]
        if new:
            rule = f"{listed(new)} did not exist before forward() ran, so the optimizer does not know {them(new)}"
            raise at_attribute(bad("model", name, rule, f"create {them(new)} in {name}.__init__"), model, new[0])
    unused = [n for n, p in trained.items() if p.grad is None]
    if not unused or len(unused) == len(trained):
        return
    rule = f"{listed(unused)} got no gradient in the first step: forward() or the loss does not use {them(unused)}"
    if needs_all:
        fix = f"use {them(unused)} in every step, remove {them(unused)}, or requires_grad_(False) in __init__"
        refused = bad("model", name, f"{rule}, and strategy=ddp on several ranks waits for all", fix)
        raise at_attribute(refused, model, unused[0])
    log.warning("model=%s: %s", name, rule)


def listed(names: list[str]) -> str:
    more = f" and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else ""
    return ", ".join(names[:MOST_SHOWN]) + more


def them(names: list[str]) -> str:
    return "it" if len(names) == 1 else "them"
