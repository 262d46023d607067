"""The methods that a hook may have. The launcher checks a class by its source, the ranks by what they imported."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping

from dtrain.errors import bad

# method → its arguments, without self
METHODS = {
    "begin": ("run",),
    "train_metrics": ("outputs", "targets"),
    "after_step": ("run",),
    "eval_metrics": ("outputs", "targets"),
    "evaluate": ("run",),
    "after_evaluation": ("run",),
    "state_dict": (),
    "load_state_dict": ("state",),
    "end": ("run",),
}
STATE = {"state_dict", "load_state_dict"}  # which other objects have, too
# What other programs call a method.
ELSEWHERE = {
    "begin": "on_train_begin on_train_start on_fit_start on_init_end before_train before_fit before_run",
    "after_step": "on_step_end on_step on_train_batch_end on_batch_end on_batch on_log after_train_iter after_iter "
    "after_batch after_train_step step __call__",
    "after_evaluation": "on_evaluate on_validation_end on_validation_epoch_end on_epoch_end on_train_epoch_end "
    "on_epoch after_val after_val_epoch after_epoch after_train_epoch",
    "end": "on_train_end on_fit_end on_end after_train after_fit after_run close",
    "eval_metrics": "metric metrics compute_metrics compute on_validation_batch_end forward",
}
LIKELY = 0.8  # similarity from which a method with another name is a misspelt one

Arity = tuple[float, float]  # fewest and most positional arguments, without self


def check_methods(
    target: str,
    found: Mapping[str, Arity | None],
    is_complete: bool = True,
    where: Callable[[str], str] = lambda method: "",
) -> None:
    """Reject a class that is no hook, or whose methods would never be called, or cannot be.

    found: its methods; None: the number of arguments is not known. is_complete: it inherits no others. where: gives
    "file:line: " of a method, and for "" of the class.
    """
    name = target.rpartition(".")[2]
    known = [method for method in found if method in METHODS]
    for method in found:
        near = difflib.get_close_matches(method, METHODS, 1, LIKELY)
        if near and method not in METHODS and not method.startswith("_") and near[0] not in found:
            rule = f"{where(method)}{name}.{method} is not a method that dtrain calls"
            raise bad("hooks", target, rule, f"did you mean {near[0]}? If it is for {name} itself: _{method}")
    if not known and is_complete:
        rule = f"{where('')}{name} has no method that dtrain calls"
        fix = f"give it one or more of {', '.join(METHODS)}"
        if theirs := next((method for method in found if meant(method)), ""):
            fix = f"def {sketch(meant(theirs))}, in place of {theirs}"
        raise bad("hooks", target, rule, fix)
    for method in known:
        arity, needed = found[method], len(METHODS[method])
        if arity is not None and not arity[0] <= needed <= arity[1]:
            call = f"{method}({', '.join(METHODS[method])})"
            rule = f"{where(method)}{name}.{method} cannot be called as {call}"
            raise bad("hooks", target, rule, f"def {sketch(method)}")
    if ("state_dict" in known) != ("load_state_dict" in known) and is_complete:
        has, lacks = ("state_dict", "load_state_dict")[:: 1 if "state_dict" in known else -1]
        rule = f"{where(has)}{name} has {has}, but not {lacks}"
        raise bad("hooks", target, rule, f"add {lacks}: def {sketch(lacks)}")


def meant(method: str) -> str:
    """Our name of a method that another program calls; "" if none is known."""
    return next((ours for ours, theirs in ELSEWHERE.items() if method in theirs.split()), "")


def sketch(method: str) -> str:
    return f"{method}({', '.join(('self', *METHODS[method]))})"
