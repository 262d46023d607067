"""Check, from their source, that a model, an optimizer and a schedule can be called as the training loop calls them."""

from __future__ import annotations

import ast
import difflib
from pathlib import Path
from typing import Any

from dtrain.config.source import class_source, find, inherited, place, source_of
from dtrain.config.source_files import spec_of
from dtrain.config.source_hints import choice, likely
from dtrain.errors import bad, foreign_option


def check(config: dict[str, Any]) -> None:
    model, optimizer, loss = (config[group]["_target_"] for group in ("model", "optim", "loss"))
    found = None if model.startswith("dtrain.") else class_source(model)
    if found is not None and not found.decorator_list and all(ast.unparse(base) == "object" for base in found.bases):
        module, _, name = model.rpartition(".")
        spec = spec_of(module)
        names = likely("model", Path(spec.origin)) if spec and spec.origin else []
        if name in names or not names:
            rule = f"{place(model, found)}: the class {name} is not a torch.nn.Module"
            raise bad("model", model, rule, f"class {name}(nn.Module), with super().__init__() in its __init__")
        raise bad("model", model, "is not a torch.nn.Module", choice("model", module, name, names))
    if found is not None:
        check_forward(model, found)
    if not optimizer.startswith("dtrain."):
        check_optimizer(config["optim"])
    if not loss.startswith("dtrain."):
        find(loss, "loss")
    check_schedule(config["schedule"])


def check_forward(model: str, found: ast.ClassDef) -> None:
    forward, name = inherited(model, "forward"), model.rpartition(".")[2]
    if forward is False:
        rule = f"{place(model, found)}: the class {name} has no forward"
        methods = {node.name: node for node in found.body if isinstance(node, ast.FunctionDef)}
        if near := difflib.get_close_matches("forward", methods, 1, 0.75):
            where = place(model, methods[near[0]])
            raise bad("model", model, f"{rule}, but {near[0]} in {where}", f"def forward in place of def {near[0]}")
        raise bad("model", model, rule, f"def forward(self, inputs) in {name}, which returns the outputs")
    if isinstance(forward, ast.FunctionDef) and not forward.decorator_list:
        args = forward.args
        if len(args.posonlyargs) + len(args.args) < 2 and not (args.vararg or args.kwarg or args.kwonlyargs):
            rule = f"{place(model, forward)}: {name}.forward takes no inputs"
            raise bad("model", model, rule, "def forward(self, inputs)")


def required_of(function: ast.FunctionDef) -> list[str]:
    args = function.args
    names = [a.arg for a in (*args.posonlyargs, *args.args)]
    return names[: len(names) - len(args.defaults)]


def kind_of_class(target: str, found: ast.ClassDef) -> tuple[str, str] | None:
    """Return what a class is by its base class, and what to type for it; None: not decidable."""
    bases = {found.name, *(ast.unparse(base).rpartition(".")[2] for base in found.bases)}
    if target.startswith("torch.optim.lr_scheduler.") or bases & {"LRScheduler", "_LRScheduler"}:
        return "a schedule of the learning rate", foreign_option("schedule", found.name) or "schedule=cosine"
    if target.startswith("torch.optim."):
        return "an optimizer", f"optim={target}"
    for kind, group, names in (
        ("an optimizer", "optim", {"Optimizer"}),
        ("a loss", "loss", {"_Loss", "_WeightedLoss"}),
        ("a model", "model", {"Module"}),
        ("a data set", "data", {"Dataset", "IterableDataset"}),
    ):
        if bases & names:
            return kind, f"{group}={target}"
    return None


def check_kind(group: str, target: str, found: ast.ClassDef, wanted: str) -> None:
    kind = kind_of_class(target, found)
    if kind and not kind[1].startswith(f"{group}=") and not (group == "loss" and kind[1].startswith("model=")):
        raise bad(group, target, f"is {kind[0]}, not {wanted}", kind[1])


def check_optimizer(section: dict[str, Any]) -> None:
    target = section["_target_"]
    source = source_of(target)
    if isinstance(source, ast.FunctionDef):
        if not source.decorator_list and (
            more := [n for n in required_of(source)[1:] if n not in (*section, "global_batch_size")]
        ):
            taken = ", ".join(a.arg for a in (*source.args.posonlyargs, *source.args.args))
            given = f"{place(target, source)}: {source.name}({taken})"
            rule = f"{given} is called with the model's parameters, and {more[0]} has no value"
            raise bad("optim", target, rule, f"optim.{more[0]}=…, or a default in the signature: {more[0]}=…")
        if not (source.args.args or source.args.posonlyargs or source.args.vararg or source.decorator_list):
            rule = f"{place(target, source)}: {source.name}() is called with the model's parameters"
            raise bad("optim", target, rule, f"def {source.name}(named_parameters, lr=1e-3)")
        return
    if source is None:
        return
    check_kind("optim", target, source, "an optimizer")
    step, init = inherited(target, "step"), inherited(target, "__init__")
    if step is False:
        rule = f"{place(target, source)}: the class {source.name} has no step(), so it is no optimizer"
        raise bad("optim", target, rule, f"class {source.name}(torch.optim.Optimizer) with def step(self)")
    if isinstance(init, ast.FunctionDef) and not init.args.vararg and not init.decorator_list:
        names = [a.arg for a in (*init.args.posonlyargs, *init.args.args)]
        if len(names) < 2 or (len(init.args.defaults) == len(names) - 1 and names[1] in ("lr", "learning_rate")):
            given = f"{source.name}.__init__({', '.join(names)})"
            rule = f"{place(target, init)}: {given} is called with the model's parameters first"
            raise bad("optim", target, rule, "def __init__(self, params, lr=1e-3)")
        if more := [n for n in required_of(init)[2:] if n not in section]:
            rule = f"{place(target, init)}: {source.name}.__init__({', '.join(names)}) has no value for {more[0]}"
            raise bad("optim", target, rule, f"optim.{more[0]}=…, or a default in the signature: {more[0]}=…")
    if isinstance(step, ast.FunctionDef) and (more := required_of(step)[1:]):
        if step.decorator_list and more[0] != "closure":  # torch.no_grad() keeps the arguments, others may not
            return
        rule = f"needs {more[0]}, and step() is called without arguments"
        if more[0] == "closure":
            rule = "needs a closure that computes the loss again, which no strategy gives"
        else:
            rule = f"{place(target, step)}: {source.name}.step {rule}"
        raise bad("optim", target, rule, "optim=adamw, or another optimizer whose step() needs no arguments")


def check_schedule(section: dict[str, Any]) -> None:
    """Reject a schedule that cannot be called as schedule(step, steps=…), with its settings."""
    target = section["_target_"]
    if target.startswith("dtrain."):
        return
    function = source_of(target)
    sketch = "a function that returns the share of the peak rate, from 0 to 1"
    if isinstance(function, ast.ClassDef):
        check_kind("schedule", target, function, "a schedule")
        name = function.name
        ours = foreign_option("schedule", name) or "schedule=cosine"
        fix = f"{ours}, or `def {name.lower()}(step, steps)`, {sketch}"
        raise bad("schedule", target, "is a class, and a schedule is a function of the step", fix)
    if function is None or function.decorator_list:
        return
    args = function.args
    names = [a.arg for a in (*args.posonlyargs, *args.args)]
    where = f"{place(target, function)}: {function.name}({', '.join(names)})"
    keyword = {a.arg for a in args.kwonlyargs}
    takes_steps = args.kwarg or "steps" in keyword or "steps" in [a.arg for a in args.args][1:]
    if not takes_steps or not (names or args.vararg):
        rule = f"{where} is called as {function.name}(step, steps=…): the step from 0, and the steps of the run"
        raise bad("schedule", target, rule, f"def {function.name}(step, steps), {sketch}")
    if more := [name for name in required_of(function)[1:] if name != "steps" and name not in section]:
        rule = f"{where} is called with step and steps, and {more[0]} has no value"
        raise bad("schedule", target, rule, f"schedule.{more[0]}=…, or a default in the signature: {more[0]}=…")
