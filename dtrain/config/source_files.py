"""Find and parse the file of a module, without importing it: its statements, and the names that it sets."""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import TypeGuard

import dtrain
from dtrain.errors import bad
from dtrain.util.format import short_path

Definition = ast.ClassDef | ast.FunctionDef
MOST_JUMPS = 8  # imports from file to file that are followed
IS_MAIN = ("__name__ == '__main__'", "'__main__' == __name__")


def spec_of(module: str) -> ModuleSpec | None:
    """Find a module without importing its parents: `torch.optim` alone would take the launcher 2 s."""
    path: list[str] | None = [os.getcwd(), *sys.path]
    spec: ModuleSpec | None = None
    name = ""
    for part in module.split("."):
        name = f"{name}.{part}".lstrip(".")
        # dtrain is the package that runs: another checkout of it may come first in the path
        spec = dtrain.__spec__ if name == "dtrain" else PathFinder.find_spec(name, path)
        if spec is None and name == part:  # an editable install may have a finder of its own
            spec = top_spec(name)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or [])
    return spec


def top_spec(name: str) -> ModuleSpec | None:
    """Ask all of Python's finders. For a name with a dot this would import its parents, which may be the user's."""
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None


def parse(path: str, key: str, target: str) -> ast.Module:
    """Parse a source file; a user's own file may be invalid."""
    try:
        return parsed(path, Path(path).read_text(encoding="utf-8"))
    except SyntaxError as error:
        where = f"{short_path(Path(path))}:{error.lineno}"
        line = f": {error.text.strip()}" if error.text else ""
        if isinstance(error, IndentationError) and error.lineno and error.text:
            line = indentation(Path(path).read_text(encoding="utf-8").splitlines(), error.lineno)
        fix = f"correct {where}" + " or the line before it" * isinstance(error, IndentationError)
        raise bad(key, target, f"{where} is not valid Python: {error.msg}{line}", fix) from error
    except (UnicodeDecodeError, ValueError) as error:
        raise bad(key, target, f"{short_path(Path(path))} is not valid Python: {error}", "correct the file") from error


def indentation(lines: list[str], number: int) -> str:
    """The line that a parser stumbles over, and the one before it, which may be the wrong one, with their indents."""
    before = next((n for n in range(number - 1, 0, -1) if lines[n - 1].strip()), number)
    texts = {n: lines[n - 1].expandtabs() for n in (before, number)}
    return ": " + "; ".join(f"line {n} has {len(t) - len(t.lstrip())} spaces, {t.strip()}" for n, t in texts.items())


@functools.cache
def parsed(path: str, text: str) -> ast.Module:
    """Parse each file once: every point of a sweep needs it."""
    return ast.parse(text, path)


def is_main(node: ast.stmt) -> TypeGuard[ast.If]:
    """Is it the block that runs only where Python starts the file?"""
    return isinstance(node, ast.If) and ast.unparse(node.test) in IS_MAIN


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements at a module's top level, with those inside `if`, `try` and `with`."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            for field in ("body", "orelse", "finalbody"):
                yield from statements(getattr(node, field, []))
            for handler in getattr(node, "handlers", []):
                yield from statements(handler.body)


def names_under_main(path: str) -> dict[str, int]:
    """Return the names that a file sets only under `if __name__ == "__main__":`, which the ranks do not run."""
    try:
        body = ast.parse(Path(path).read_text(encoding="utf-8")).body
    except (OSError, ValueError, SyntaxError):
        return {}
    blocks = [node for node in body if is_main(node)]
    outside = {name for node in body if node not in blocks for name in set_by([node])}
    outside |= {name for block in blocks for name in set_by(block.orelse)}
    everything = [*ast.walk(ast.Module(body, []))]
    if any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in everything):
        return {}
    outside |= {name for node in everything if isinstance(node, ast.Global) for name in node.names}
    inside = {name: line for block in reversed(blocks) for name, line in set_by(block.body).items()}
    return {name: line for name, line in inside.items() if name not in outside}


def set_by(body: Sequence[ast.stmt]) -> dict[str, int]:
    """Return the names that statements set, and the first line of each; not those inside functions and classes."""
    found: dict[str, int] = {}
    todo: list[ast.AST] = [*body]
    for node in todo:
        names: list[str] = []
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names = [node.name]
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.asname or alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names = [node.id]
        elif isinstance(node, ast.ExceptHandler) and node.name:
            names = [node.name]
        found |= {name: getattr(node, "lineno", 0) for name in names if name not in found}
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            todo += ast.iter_child_nodes(node)
    return found


def exports(module: str, jumps: int = 0) -> set[str] | None:
    """The names that `from module import *` may bring; None: only running the module would tell."""
    spec = spec_of(module)
    if jumps == MOST_JUMPS or spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return None
    names: set[str] = set()
    try:
        tree = parsed(spec.origin, Path(spec.origin).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None
    for node in statements(tree.body):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names if alias.name != "*"}
            if any(alias.name == "*" for alias in node.names):
                more = exports(absolute(node, spec), jumps + 1) if isinstance(node, ast.ImportFrom) else None
                if more is None:
                    return None
                names |= more
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.For, ast.Expr)):
            names |= {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    return None if "__getattr__" in names or "globals" in names else names


def absolute(node: ast.ImportFrom, spec: ModuleSpec) -> str:
    """The module that `from … import` names, with relative dots resolved."""
    if not node.level:
        return node.module or ""
    parts = spec.name.split(".")
    inside = parts if spec.submodule_search_locations else parts[:-1]
    inside = inside[: len(inside) - (node.level - 1)]
    return ".".join([*inside, *([node.module] if node.module else [])])


def names_in(file: Path) -> list[str]:
    return [node.name for node in definitions(file)]


def definitions(file: Path) -> list[Definition]:
    """The classes and functions that a file defines; none if it is not valid Python."""
    try:
        tree = parsed(str(file), file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return []
    return [node for node in statements(tree.body) if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
