"""Check what a model class of the user has made: an nn.Module that knows all of its weights, and their shapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from dtrain.errors import bad
from dtrain.runs.source_lines import at_attribute, at_return


def check(model: Any, function: Any = None) -> None:
    """Reject what is no module, lazy weights, and weights that PyTorch does not see as they are in a plain list.

    function: of the user, which made it.
    """
    if not isinstance(model, nn.Module):
        fix = "a class with `class Net(nn.Module)`, or a function that returns an object of one"
        if isinstance(model, type):
            name = model.__name__
            fix = f"`return {name}()`, or model={model.__module__}.{name}"
            raise at_return(bad("model", name, f"it returned the class {name}", fix), function)
        rule = "what it gives is not a torch.nn.Module"
        raise at_return(bad("model", type(model).__name__, rule, fix), function)
    for name, weight in model.named_parameters():
        if isinstance(weight, nn.parameter.UninitializedParameter):
            rule = f"{name} is lazy: it has no shape before forward() runs, and dtrain must know what to divide"
            fix = "a module with all its sizes: nn.Linear(in_features, out_features), not nn.LazyLinear"
            raise at_attribute(bad("model", type(model).__name__, rule, fix), model, name.rpartition(".")[0])
    known = {id(module) for module in model.modules()}
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers", "_modules") or not isinstance(value, (list, tuple, dict)):
                continue
            for item in inside(value):
                hidden = isinstance(item, nn.Parameter) or (
                    isinstance(item, nn.Module) and id(item) not in known and any(True for _ in item.parameters())
                )
                if hidden and not (isinstance(item, nn.Parameter) and any(item is p for p in model.parameters())):
                    place = f"{prefix}.{name}" if prefix else name
                    kind = "Module" if isinstance(item, nn.Module) else "Parameter"
                    by_name = isinstance(value, dict) and all(isinstance(key, str) for key in value)
                    wanted = f"nn.{kind}{'Dict' if by_name else 'List'}(…)"
                    if isinstance(value, dict) and not by_name:
                        wanted += f", or nn.{kind}Dict(…) with text as keys"
                    rule = f"{place} is a plain {type(value).__name__} of {kind.lower()}s, which are not trained"
                    refused = bad("model", type(model).__name__, rule, f"self.{name} = {wanted}")
                    raise at_attribute(refused, model, place)


def inside(value: Any) -> Iterator[Any]:
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, (list, tuple, dict)):
            yield from inside(item)
        else:
            yield item
