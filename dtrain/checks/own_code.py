"""Check, from its source, that a model is a module, that an optimizer needs no closure, and that a loss exists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dtrain.checks.loss import method_of
from dtrain.config.source import choice, class_source, find, likely, spec_of
from dtrain.errors import bad


def check(config: dict[str, Any]) -> None:
    model, optimizer, loss = (config[group]["_target_"] for group in ("model", "optim", "loss"))
    found = None if model.startswith("dtrain.") else class_source(model)
    if found is not None and not found.bases and not found.decorator_list:
        module, _, name = model.rpartition(".")
        spec = spec_of(module)
        names = likely("model", Path(spec.origin)) if spec and spec.origin else []
        fix = choice("model", module, name, names) if names else f"class {name}(nn.Module)"
        raise bad("model", model, "is not a torch.nn.Module", fix)
    step = None if optimizer.startswith("dtrain.") else method_of(optimizer, "step")
    required = step.args.args[: len(step.args.args) - len(step.args.defaults)] if step else []
    if "closure" in [argument.arg for argument in required]:
        rule = "needs a closure that computes the loss again, which no strategy gives"
        raise bad("optim", optimizer, rule, "optim=adamw, or another optimizer whose step() needs no arguments")
    if not loss.startswith("dtrain."):
        find(loss, "loss")
