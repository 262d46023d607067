"""Compose what to write in place of an object of the script: a class and its settings, or a function."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import json
import linecache
import sys
from collections.abc import Mapping
from typing import Any

from dtrain.config.build import is_module
from dtrain.config.files import SEVERAL
from dtrain.errors import bad, foreign_option
from dtrain.launch.python_kinds import holds_objects, is_array, is_bunch, is_code, is_object, is_with_settings

CALLED_WITH = {"schedule": ["step", "steps"], "loss": ["outputs", "targets"]}  # what dtrain calls such a function with
EXAMPLE = 'functools.partial(Net, dim=32), or (Net, {"dim": 32})'


def name_here(thing: Any) -> str:
    """Return what the script may call a class or function: its name there, or its module's name for it."""
    if isinstance(thing, str):
        return json.dumps(thing)
    if not is_code(thing):
        return f"<{type(thing).__name__}>"
    name, module = getattr(thing, "__name__", ""), str(thing.__module__)
    if getattr(sys.modules["__main__"], name, None) is thing or module == "__main__":
        return name
    public = [module.rsplit(".", n)[0] for n in range(module.count("."), -1, -1)]  # torch.optim, not torch.optim.adam
    return next((f"{m}.{name}" for m in public if getattr(sys.modules.get(m), name, None) is thing), name)


def without_names(group: str, thing: Any, *values: Any) -> ValueError:
    """Explain (Net, 3): a class and values of its arguments without their names, or one class in a list."""
    values = tuple(values[0]) if len(values) == 1 and isinstance(values[0], (tuple, list)) else values
    name = name_here(thing)
    if not values:
        return bad(group, f"[{name}]", "takes one class or function", f"{group}={name}")
    try:
        parameters = [*inspect.signature(thing).parameters.values()]
    except (TypeError, ValueError):  # a builtin
        parameters = []
    names = [p.name for p in parameters if p.kind is not p.VAR_POSITIONAL and p.kind is not p.VAR_KEYWORD]
    names = names[1:] if group == "optim" else names  # the parameters
    names += ["name"] * (len(values) - len(names))
    settings = ", ".join(f'"{key}": {value!r}' for key, value in zip(names, values, strict=False))
    rule = "needs the names of its arguments"
    return bad(group, f"({name}, {', '.join(map(repr, values))})", rule, f"{group}=({name}, {{{settings}}})")


def in_place_of_lambda(group: str, thing: Any) -> str:
    """Return a class with its settings, or a `def`, that does what a lambda does."""
    code, known = thing.__code__, thing.__globals__
    taken, body = str(inspect.signature(thing)), "…"
    with contextlib.suppress(SyntaxError):
        nodes = ast.walk(ast.parse("".join(linecache.getlines(code.co_filename, known))))
        found = [node for node in nodes if isinstance(node, ast.Lambda) and node.lineno == code.co_firstlineno]
        if len(found) == 1 and not code.co_freevars:
            made, body = found[0].body, ast.unparse(found[0].body)
            if (
                isinstance(made, ast.Call)
                and not made.args
                and taken == "()"
                and is_code(known.get(ast.unparse(made.func)))
            ):
                with contextlib.suppress(ValueError):  # a value that is no literal
                    settings = {str(one.arg): ast.literal_eval(one.value) for one in made.keywords if one.arg}
                    if len(settings) == len(made.keywords) and not holds_objects(settings):
                        return f"{group}={with_settings(ast.unparse(made.func), settings)}"
    name = next((name for name, one in known.items() if one is thing), f"my_{group}")
    return f"def {name}{taken}: return {body} at the top level of the file, and {group}={name}"


def not_called(group: str) -> str:
    """Return the fix for schedule=warm(0, 12): the function itself, by its name if the script has one such function."""
    found = []
    for name, thing in vars(sys.modules["__main__"]).items():
        if inspect.isfunction(thing) and [*inspect.signature(thing).parameters][:2] == CALLED_WITH[group]:
            found.append(name)
    if len(found) == 1:
        return f"give the function, without calling it: {group}={found[0]}"
    signature = f"def my_{group}({', '.join(CALLED_WITH[group])})"
    return f"give the function, without calling it: {group}=my_{group}, for {signature}"


def of_this_process(group: str, thing: Any) -> ValueError:
    rule = "is an object of this process, but each rank must build its own"
    return bad(group, f"<{type(thing).__name__}>", rule, as_function(group, thing))


def class_and_settings(value: Any) -> str:
    """Return what to give for one of several things; for an object, its class and what it was built with."""
    if isinstance(value, functools.partial):
        value = value.func, value.keywords
    if is_with_settings(value):
        return with_settings(name_here(value[0]), value[1])
    if not is_object(value):
        return name_here(value)
    name = name_here(type(value))
    try:
        parameters = inspect.signature(type(value)).parameters.values()
    except (TypeError, ValueError):  # a builtin
        return name
    settings = []
    attributes = vars(value) if hasattr(type(value), "__dict__") else {}  # not its properties, which may raise
    for one in parameters:
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            continue
        kept = attributes.get(one.name, attributes.get(f"_{one.name}", one))  # most classes keep it under its name
        is_plain = kept is not one and not holds_objects(kept)
        is_other = holds_objects(one.default) or (is_plain and kept != one.default)  # an array has no plain !=
        if one.default is one.empty or (is_plain and is_other):
            settings.append(f"{json.dumps(one.name)}: {literal(kept) if is_plain else '…'}")
    return f"({name}, {{{', '.join(settings)}}})" if settings else name


def with_settings(name: str, settings: Mapping[str, Any]) -> str:
    inner = ", ".join(f"{json.dumps(key)}: {literal(value)}" for key, value in settings.items())
    return f"({name}, {{{inner}}})" if settings else name


def literal(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def as_function(group: str, thing: Any) -> str:
    """Return what to write in place of an object of this process."""
    kind = type(thing).__name__
    if group == "model" and type(thing).__module__.partition(".")[0] == "transformers":
        how = f"return {kind}({type(getattr(thing, 'config', None)).__name__}(…))"
        return f"def my_model(): {how} at the top level of the file, and model=my_model; or model='hf:FOLDER'"
    if group not in ("model", "data"):
        if ours := same_option(group, kind):  # EarlyStopping(), DDPStrategy()
            return ours
        if type(thing).__module__ == "builtins":
            return f"give the class and its settings: {EXAMPLE}"
        name = name_here(type(thing))
        if group == "schedule" and type(thing).__module__.startswith("torch.optim."):  # it would refuse the class
            ours = (foreign_option(group, kind) or "schedule=cosine").partition("=")[2]
            own = "`def my_schedule(step, steps)`, the share of the peak rate"
            return f'schedule="{ours}"; or {own}, and schedule=my_schedule'
        if group == "loss" and is_module(thing) and list(thing.buffers()):  # class weights are no setting
            how = f"return {name}(…)(outputs, targets)"
            return f"def my_loss(outputs, targets): {how} at the top level of the file, and loss=my_loss"
        if group in SEVERAL:
            return f"give the class: {group}={class_and_settings(thing)}"
        defaults = getattr(thing, "defaults", None) if group == "optim" else None
        rate = defaults.get("lr") if isinstance(defaults, Mapping) else None
        example = '"setting": 1' if not isinstance(rate, float) else f'"lr": {rate}'
        return f"give the class: {group}={name}; with settings: {group}=({name}, {{{example}}})"
    made = made_by(thing)
    written = f"def my_{group}(): return {made} at the top level of the file, and {group}=my_{group}"
    taken, name = arguments_of(type(thing)), name_here(type(thing))
    if group != "model" or taken is None:
        return written
    first = {key: "…" if default is inspect.Parameter.empty else default for key, default in [*taken.items()][:1]}
    classes = f"{group}={with_settings(name, {} if holds_objects(first) else first)}".replace('"…"', "…")
    if inspect.Parameter.empty in taken.values():
        return f"{written}; or the class: {classes}"
    return f"{group}={name}" + (f", or with arguments {classes}" if "{" in classes else "") + f"; or {written}"


def arguments_of(kind: type) -> dict[str, Any] | None:
    """Return the arguments of a class, and their defaults; None: not known, or any number of them."""
    try:
        parameters = inspect.signature(kind).parameters.values()
    except (TypeError, ValueError):  # a builtin
        return None
    if not kind.__qualname__.isidentifier() or any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        return None
    return {one.name: one.default for one in parameters}


def same_option(group: str, name: str) -> str:
    """Return the argument of fit for the option that another program's class of this name is; "" if there is none."""
    ours = foreign_option(group, name) if group not in ("model", "data", "loss", "optim") else None
    option = ours.partition("=")[2] if ours else ""
    return f'{group}="{option}"' if option and " " not in option else ""


def made_by(thing: Any) -> str:
    """Return an expression for data, in place of that object."""
    if isinstance(thing, Mapping) and not is_bunch(thing):
        return "{" + ", ".join(f'"{key}": {part_by(part)}' for key, part in thing.items()) + "}"
    parts = thing if isinstance(thing, (tuple, list)) else ()
    of_arrays = all(map(is_array, parts))
    if is_array(thing) or is_bunch(thing) or (len(parts) == 2 and of_arrays and len(parts[0]) == len(parts[1])):
        return "inputs, targets"
    if len(parts) == 2 and not (isinstance(thing, list) and isinstance(parts[0], Mapping)):  # not two samples
        return "train, val"
    if len(parts) == 4 and of_arrays:  # as train_test_split gives them
        return made_by({"train": parts[:2], "val": parts[2:]})
    return f"{getattr(thing, '__name__', type(thing).__name__)}(…)"


def part_by(part: Any) -> str:
    """Return an expression for one split of the data."""
    return "(inputs, targets)" if is_array(part) or isinstance(part, (tuple, list)) else made_by(part)
