"""Add the line of the user's class or function that an error is about: causes.py shows it as the error's place.

An error about what a method returned is raised after the method has ended, so its traceback has no line of it.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from dtrain.runs.causes import is_users_file
from dtrain.util.format import counted, short_path

E = TypeVar("E", bound=BaseException)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def at_return(error: E, function: Any) -> E:
    """Add the line of a function's only `return`, of its last statement if it has none, else of its `def`.

    Of a class: that of `class`.
    """
    found = source(function)
    if found is None:
        return error
    file, tree = found
    if not isinstance(tree, Function):
        return placed(error, file, tree.lineno, tree.name)
    returns = [node for node in own_nodes(tree) if isinstance(node, ast.Return)]
    node = returns[0] if len(returns) == 1 else tree if returns else tree.body[-1]
    return placed(error, file, node.lineno, tree.name)


def at_class(error: E, kind: type) -> E:
    """Add the line of a class."""
    found = source(kind)
    return error if found is None else placed(error, found[0], found[1].lineno, kind.__name__)


def at_def(error: E, function: Any) -> E:
    """Add the line of a function's `def`."""
    found = source(function)
    return error if found is None else placed(error, found[0], found[1].lineno, found[1].name)


def at_attribute(error: E, module: Any, path: str) -> E:
    """Add the line of `self.NAME = …` that made a.b.c: that of c, or else of b, or else of a."""
    place = None
    for name in path.split("."):
        place = assignment(type(module), name) or place
        module = getattr(module, name, None)
    return error if place is None else placed(error, *place)


def is_users(thing: Any) -> bool:
    """Whether a class or function is defined in a file of the user."""
    return source(thing) is not None


def has_changed(target: str, thing: Any, path: Path, differences: Sequence[str]) -> str:
    """Say that the user's class or function makes other weights than a checkpoint has; "" if it is not the user's."""
    found = source(thing)
    if found is None:
        return ""
    kind = "class" if isinstance(found[1], ast.ClassDef) else "function"
    where = f"{short_path(Path(found[0]))}:{found[1].lineno}"
    since = f"the {kind} at {where} has changed since {short_path(path)}"
    return f"model={target}: {since}: {differences[0]}; {counted(len(differences), 'difference')} in all"


def assignment(kind: type, name: str) -> tuple[str, int, str] | None:
    """(file, line, method) where a class or a base class of it assigns an attribute."""
    for base in kind.__mro__:
        found = source(base)
        methods = [node for node in (found[1].body if found else ()) if isinstance(node, ast.FunctionDef)]
        for method in methods:
            for node in ast.walk(method):
                if not isinstance(node, (ast.Assign, ast.AnnAssign)):
                    continue
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if found and any(is_own(target, name) for target in targets):
                    return found[0], node.lineno, method.name
    return None


def is_own(place: Any, name: str) -> bool:
    of_self = isinstance(place, ast.Attribute) and isinstance(place.value, ast.Name) and place.value.id == "self"
    return of_self and place.attr == name


def source(thing: Any) -> tuple[str, ast.ClassDef | Function] | None:
    """The file and the syntax tree, with the file's line numbers; None unless a file of the user defines it."""
    try:
        thing = inspect.unwrap(thing)  # under @torch.no_grad()
        file = inspect.getsourcefile(thing)
        if file is None or not is_users_file(file):
            return None
        lines, first = inspect.getsourcelines(thing)
        tree = ast.parse(textwrap.dedent("".join(lines))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):  # typed into an interpreter, built in, or a lambda
        return None
    if not isinstance(tree, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) or tree.name != thing.__name__:
        return None  # a lambda, also in a decorator
    ast.increment_lineno(tree, first - 1)
    return file, tree


def returned(function: Any) -> tuple[str, ast.expr] | None:
    """The file and the expression that a function of the user returns at its end; of a name, the last one it is set to.

    None if that is not known: there is another `return`, or what is set depends on a condition.
    """
    found = source(function)
    if found is None or not isinstance(found[1], Function) or not isinstance(end := found[1].body[-1], ast.Return):
        return None
    body, value = found[1].body, end.value
    if sum(isinstance(node, ast.Return) for node in own_nodes(found[1])) > 1:
        return None
    if isinstance(value, ast.Name):
        sets = [n for n in own_nodes(found[1]) if isinstance(n, ast.Name) and n.id == value.id]
        made = [n for n in body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == value.id]
        last = max((n.lineno for n in sets if isinstance(n.ctx, ast.Store)), default=0)
        value = made[-1].value if made and made[-1].lineno == last else None
    return (found[0], value) if value is not None else None


CUTS = ("detach", "data", "item", "numpy", "tolist", "tensor", "as_tensor", "no_grad", "inference_mode", "float", "int")
COUNTS = ("argmax", "argmin", "argsort", "topk", "long", "bool", "round", "sign", "eq")


def gradient_cuts(function: Any) -> tuple[list[str], list[str], int]:
    """What cuts the gradient in a function of the user: as `.item()`; what only counts, as `.argmax()`; the line of the
    first of them, 0 if there is none."""
    found = source(function)
    names: dict[str, str] = {}
    line = 0
    for node in ast.walk(found[1]) if found else ():
        name, text = "", ""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            name, text = (
                node.func.attr,
                f"{'torch' * of_torch}.{node.func.attr}({'…' * (node.func.attr.endswith('tensor'))})",
            )
            name = "" if name in ("float", "int", "data") else name  # x.float() keeps the gradient
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            name, text = node.func.id, f"{node.func.id}(…)"
        elif isinstance(node, ast.Attribute) and node.attr == "data":
            name, text = "data", ".data"
        elif isinstance(node, ast.Compare):
            name, text = "eq", "comparisons"
        if name in (*CUTS, *COUNTS):
            names[text] = name
            line = line or getattr(node, "lineno", 0)
    cuts = [text for text, name in names.items() if name in CUTS]
    return cuts, [text for text, name in names.items() if name in COUNTS], line


def own_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function, without those of functions and classes inside it."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            yield node
            yield from own_nodes(node)


def placed(error: E, file: str, line: int, function: str) -> E:
    error.add_note(f'File "{file}", line {line}, in {function}')
    return error
