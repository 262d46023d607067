"""Check, from its source, that a user's data class can be data at all; the rest shows when rank 0 builds it."""

from __future__ import annotations

import ast
from typing import Any

from dtrain.config.source import class_source, has_method, is_users, place
from dtrain.errors import bad
from dtrain.runs.best import check_split

METHODS = ("dataset", "__getitem__", "__iter__")


def check(config: dict[str, Any]) -> None:
    """Reject a model, and a class that has none of the methods that data need."""
    target = config["data"]["_target_"]
    if target.startswith("dtrain.") or (found := class_source(target)) is None:
        return
    bases = [ast.unparse(base) for base in found.bases]
    fix = "give it __getitem__(index) and __len__() like a torch Dataset, or __iter__() (docs/your-own.md)"
    if any(base in ("nn.Module", "torch.nn.Module") for base in bases):
        raise bad("data", target, "is a model, not data", f"model={target}")
    if not bases and not any(has_method(target, method) for method in METHODS):
        raise bad("data", target, f"has none of {', '.join(METHODS)}", fix)
    if lacks_validation(target, found):
        check_split(config, target)
    dataset = next((n for n in found.body if isinstance(n, ast.FunctionDef) and n.name == "dataset"), None)
    if dataset is not None and not dataset.decorator_list and not dataset.args.vararg:
        names = [a.arg for a in (*dataset.args.posonlyargs, *dataset.args.args)]
        if len(names) < 2:
            rule = f"{place(target, dataset)}: dataset({', '.join(names)}) is called with the split"
            raise bad("data", target, rule, "def dataset(self, split)")
    has_items = has_method(target, "__getitem__") and not has_method(target, "dataset")
    if not bases and has_items and not any(has_method(target, m) for m in ("__len__", "__iter__")):
        raise bad("data", target, "has __getitem__ but no __len__", "add __len__(self), the number of samples")


def lacks_validation(target: str, found: ast.ClassDef) -> bool:
    """Is it surely one data set, for training? One with an argument for the split, or a base of its own, may be two."""
    bases = {ast.unparse(base).partition("[")[0] for base in found.bases}
    start = next((n for n in found.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
    names = {a.arg for a in (*start.args.posonlyargs, *start.args.args, *start.args.kwonlyargs)} if start else set()
    return (
        all(base.rpartition(".")[2] in ("Dataset", "IterableDataset") for base in bases)
        and not any(is_users(target.rpartition(".")[0], base) for base in bases)
        and not has_method(target, "dataset")
        and not (names & {"split", "train"} or (start and start.args.kwarg))
    )
