"""Look a class or function up in the source of its module, without importing it: names, arguments, methods.

Importing a user's module in the launcher would import torch, and would run code before anything was checked.
"""

from __future__ import annotations

import ast
import difflib
import sys
from collections.abc import Callable
from pathlib import Path

from dtrain.config.build import own_file, pip_name
from dtrain.config.files import GROUPS, options_of
from dtrain.config.source_files import (
    MOST_JUMPS,
    Definition,
    absolute,
    exports,
    names_in,
    names_under_main,
    parse,
    spec_of,
    statements,
)
from dtrain.config.source_hints import (
    check_shadowed,
    choice,
    defined_here,
    in_torch,
    likely,
    members,
    missing,
    module_not_class,
)
from dtrain.errors import bad, foreign_option
from dtrain.util.format import short_path

MODULE_BASES = ("nn.Module", "torch.nn.Module", "Module")
# base classes without methods of their own that matter here: a model's forward, an optimizer's step, …
PLAIN_BASES = (*MODULE_BASES, "object", "torch.optim.Optimizer", "optim.Optimizer", "Optimizer")


def find(target: str, key: str, permit: Callable[[str], object] = bool, jumps: int = 0) -> Definition | None:
    """Return the definition of `module.Name`, also if the module only imports it.

    None: it may exist, but only running the module would tell. ValueError: it does not exist.
    permit: raises if a name that the module imports may not be used.
    """
    module, _, name = target.rpartition(".")
    if jumps == 0:
        check_shadowed(target, key)
    spec = spec_of(module)
    if jumps == 0 and (meant := in_torch(module, name)):
        rule = (
            "torch has no " + name if module == "torch" else f"there is no module {module}: files import it from torch"
        )
        ours = foreign_option(key, name) if key == "loss" else None  # it takes the outputs of every model of ours
        raise bad(key, target, rule, f"did you mean {ours or f'{key}={meant}'}?")
    if spec is None or (not spec.origin and not spec.submodule_search_locations):
        raise no_module(target, module, key)
    if not spec.origin or not spec.origin.endswith(".py"):
        if jumps == 0 and not spec.origin and spec_of(target) is not None:  # a folder without __init__.py
            raise module_not_class(target, key)
        if jumps == 0 and module.partition(".")[0] in sys.stdlib_module_names and (there := defined_here(name, key)):
            raise bad(key, target, f"{module} is a module of Python's own", f"did you mean {key}={there[0]}?")
        return None
    tree = parse(spec.origin, key, target)
    maybe = False
    others: dict[str, str] = {}  # what the module imports by name: where it is from
    classes: list[str] = []
    found: Definition | None = None
    starred: list[str] = []  # the modules of which the module imports all names
    for node in statements(tree.body):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            classes += [node.name]
            found = node if node.name == name else found
        elif isinstance(node, ast.ImportFrom):
            home = absolute(node, spec)
            others |= {alias.asname or alias.name: f"{home}.{alias.name}" for alias in node.names}
            if any(alias.name == "*" for alias in node.names):
                names = exports(home)
                maybe = maybe or names is None or name in names
                starred += [home] if name in (names or ()) else []
                others |= {one: f"{home}.{one}" for one in names or () if one != name}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            places = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(place, ast.Name) and place.id == name for place in places):
                if isinstance(node.value, ast.Constant):
                    where = f"{short_path(Path(spec.origin))}:{node.lineno}"
                    rule = f"{where} makes it {ast.unparse(node.value)}, not a class or function"
                    raise bad(key, target, rule, choice(key, module, name, likely(key, Path(spec.origin)) or classes))
                maybe = True
    late = names_under_main(spec.origin).get(name)
    if late and not any(isinstance(node, ast.Name) and node.id == "globals" for node in ast.walk(tree)):
        where = f"{short_path(Path(spec.origin))}:{late}"
        rule = f'{where} sets it under `if __name__ == "__main__":`, which the ranks do not run'
        raise bad(key, target, rule, f"move {name} above that block")
    if found is not None:
        return found
    if name in others and jumps < MOST_JUMPS:
        permit(others[name])
        return find(others[name], key, permit, jumps + 1) if spec_of(others[name].rpartition(".")[0]) else None
    if jumps < MOST_JUMPS and (source := next((m for m in starred if source_of(f"{m}.{name}", jumps + 1)), None)):
        permit(f"{source}.{name}")
        return find(f"{source}.{name}", key, permit, jumps + 1)
    if maybe or "__getattr__" in classes:
        return None
    classes += [
        name for name, home in others.items() if name != "*" and not name.startswith("_") and is_own(home, module)
    ]
    missing(key, target, module, name, spec.origin, classes)


def is_own(target: str, module: str) -> bool:
    """Whether the user wrote what a module imports: torch's layers are no hint."""
    top = target.partition(".")[0]
    return top == module.partition(".")[0] or own_file(top) is not None


# libraries of which people name a model, data, a loss or an optimizer
INSTALLED_ALONE = (
    "torchvision", "timm", "transformers", "datasets", "torchaudio", "lightning", "pytorch_lightning", "monai",
    "diffusers", "segmentation_models_pytorch", "open_clip", "sentence_transformers", "peft", "bitsandbytes",
    "accelerate", "torchmetrics", "torch_geometric", "efficientnet_pytorch", "vit_pytorch", "kornia", "sklearn",
    "torch_optimizer", "pytorch_optimizer", "lion_pytorch", "prodigyopt", "schedulefree", "apex", "xformers",
)  # fmt: skip


def no_module(target: str, module: str, key: str) -> ValueError:
    """There is no such module: name the part that is missing, and what is in this folder instead."""
    parts, name = module.split("."), target.rpartition(".")[2]
    known = next((n for n in range(len(parts), 0, -1) if spec_of(".".join(parts[:n]))), 0)
    part = ".".join(parts[: known + 1])
    if known and source_of(part) is not None:
        return bad(key, target, f"{part} is a class or function, not a module", f"{key}={part}")
    if known and own_file(parts[0]) and (there := members(".".join(parts[:known]), key)):
        meant = next((one for one in there if one.rpartition(".")[2].lower() == name.lower()), there[0])
        return bad(key, target, f"there is no module {part}", f"did you mean {key}={meant}?")
    if known:
        return bad(key, target, f"there is no module {part}", f"{'.'.join(parts[:known])} exists: check what is in it")
    here = sorted(p.stem for p in Path.cwd().glob("*.py")) + sorted(
        p.parent.name for p in Path.cwd().glob("*/__init__.py")
    )
    near = difflib.get_close_matches(part, here, 1, 0.6)
    rule = f"there is no module {part} in this folder, nor is one installed"
    if part not in INSTALLED_ALONE and (there := defined_here(name, key)):
        nearest = difflib.get_close_matches(target, there, 1, 0)[0]  # of several files with such a class
        return bad(key, target, rule, f"did you mean {key}={nearest}?")
    library = difflib.get_close_matches(part, [] if near else INSTALLED_ALONE, 1, 0.8)
    if library and spec_of(library[0]) is None:
        meant = "" if library[0] == part else f"did you mean {key}={'.'.join([library[0], *parts[1:], name])}? Then "
        ours = next((one for one in options_of(key) if one == name.lower()), "") if key in GROUPS else ""
        return bad(
            key, target, rule, f"{meant}pip install {pip_name(library[0])}{f', or {key}={ours}' if ours else ''}"
        )
    near = near or library
    if near:
        return bad(key, target, rule, f"did you mean {key}={'.'.join([near[0], *parts[1:], name])}?")
    return bad(key, target, rule, f"run the command in the folder of {part}.py, or PYTHONPATH=that folder")


def class_source(target: str) -> ast.ClassDef | None:
    """Return the ast of a class; None: not found, or not decidable without importing its module."""
    found = source_of(target)
    return found if isinstance(found, ast.ClassDef) else None


def source_of(target: str, jumps: int = 0) -> Definition | None:
    """Return the ast of a class or function; None: not found, or not decidable without importing its module."""
    if "." not in target:
        return None
    try:
        return find(target, "_target_", jumps=jumps)
    except ValueError:
        return None


def place(target: str, node: ast.stmt | ast.expr) -> str:
    """file:line of a part of a class or function."""
    module, _, name = target.rpartition(".")
    spec = spec_of(module)
    file = Path(spec.origin) if spec and spec.origin else None
    here = file is not None and name in names_in(file)  # and not imported from another file
    return f"{short_path(file)}:{node.lineno}" if file and here else f"line {node.lineno}"


def inherited(target: str, method: str, jumps: int = 0) -> ast.FunctionDef | bool:
    """Return a method of a class or of its base classes; False: there is none. True: only importing would tell."""
    found = class_source(target)
    if found is None or found.decorator_list or found.keywords or jumps > MOST_JUMPS:
        return True
    for node in found.body:
        if isinstance(node, ast.FunctionDef) and node.name == method:
            return node
        if not isinstance(node, (ast.FunctionDef, ast.Expr, ast.AnnAssign, ast.Pass)):  # forward = other, or an if
            return True
    if any(isinstance(n, ast.Attribute) and n.attr == method for n in ast.walk(found)):  # self.forward = …
        return True
    if any(getattr(n, "name", "") == "__getattr__" for n in found.body):  # passed on to another object
        return True
    module = target.rpartition(".")[0]
    for base in map(ast.unparse, found.bases):
        if base in PLAIN_BASES and not is_users(module, base):
            continue
        of_base = inherited(f"{module}.{base}", method, jumps + 1) if base.isidentifier() else True
        if of_base is not False:
            return of_base
    return False


def is_users(module: str, name: str) -> bool:
    """Is a name of torch another one in this module? As with `class Module`, or `from my_pkg.base import Module`."""
    spec, first = spec_of(module), name.partition(".")[0]
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return False
    for node in statements(parse(spec.origin, "_target_", module).body):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return True
        names = [a.asname or a.name for a in node.names] if isinstance(node, ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom) and first in names:
            return node.level > 0 or (node.module or "").partition(".")[0] != "torch"
    return False


def has_method(target: str, method: str) -> bool | None:
    """Does a class define a method? None: not decidable without importing its module."""
    found = class_source(target)
    if found is None:
        return None
    if any(isinstance(n, ast.FunctionDef) and n.name == method for n in found.body):
        return True
    plain = all(ast.unparse(base) in MODULE_BASES for base in found.bases)
    return False if plain else None
