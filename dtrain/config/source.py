"""Look a class or function up in the source of its module, without importing it: names, arguments, methods.

Importing a user's module in the launcher would import torch, and would run code before anything was checked.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import functools
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import NoReturn, TypeGuard

import dtrain
from dtrain.config.build import own_file, pip_name
from dtrain.config.files import GROUPS, options_of
from dtrain.config.hook_methods import METHODS
from dtrain.errors import bad, foreign_option
from dtrain.util.format import short_path

Definition = ast.ClassDef | ast.FunctionDef
MOST_SHOWN = 8  # names of a module in a message
MOST_FILES = 50  # of this folder that are searched for a class
SHORTEST = 3  # letters of a name that another one may begin with
MOST_JUMPS = 8  # imports from file to file that are followed
IS_MAIN = ("__name__ == '__main__'", "'__main__' == __name__")
MODULE_BASES = ("nn.Module", "torch.nn.Module", "Module")
# base classes without methods of their own that matter here: a model's forward, an optimizer's step, …
PLAIN_BASES = (*MODULE_BASES, "object", "torch.optim.Optimizer", "optim.Optimizer", "Optimizer")
# How people import the modules of torch that an option can name: `nn` is a name in their file, and no module.
SHORT = {
    "nn": "torch.nn", "F": "torch.nn.functional", "functional": "torch.nn.functional", "optim": "torch.optim",
    "torch": "torch.nn", "lr_scheduler": "torch.optim.lr_scheduler",
}  # fmt: skip


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
            raise is_module(target, key)
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


def is_own(target: str, module: str) -> bool:
    """Whether the user wrote what a module imports: torch's layers are no hint."""
    top = target.partition(".")[0]
    return top == module.partition(".")[0] or own_file(top) is not None


def absolute(node: ast.ImportFrom, spec: ModuleSpec) -> str:
    """The module that `from … import` names, with relative dots resolved."""
    if not node.level:
        return node.module or ""
    parts = spec.name.split(".")
    inside = parts if spec.submodule_search_locations else parts[:-1]
    inside = inside[: len(inside) - (node.level - 1)]
    return ".".join([*inside, *([node.module] if node.module else [])])


def missing(key: str, target: str, module: str, name: str, file: str, names: list[str]) -> NoReturn:
    if spec_of(target) is not None:
        raise is_module(target, key)
    is_users = own_file(module.partition(".")[0]) is not None
    where = short_path(Path(file)) if is_users else module
    if there := defined_here(name, key):
        raise bad(key, target, f"{where} has no {name}", f"did you mean {key}={there[0]}?")
    if not is_users:  # of torch, say: its helpers are not what was meant
        names = [n for n in names if spec_of(f"{module}.{n}") is None and n[:1] != "_"]
        names = [n for n in names if n[0].isupper()] if key in ("optim", "model") else names
    near = nearest_name(name, names)
    fitting = likely(key, Path(file)) if is_users else []
    if key == "schedule" and not near and not fitting:
        fix = f"`def {name}(step, steps)` in {where}, without schedule.warmup_steps; or schedule=cosine"
        raise bad(key, target, f"{where} has no {name}", fix)
    if is_users and not (near or fitting or names):  # an empty __init__.py
        there = members(module, key)
        raise bad(key, target, f"{where} has no {name}", f"{key}={there[0]}" if there else f"define {name} there")
    fix = choice(key, module, name, [near] if near else (fitting or names))
    raise bad(key, target, f"{where} has no {name}", fix)


def choice(key: str, module: str, name: str, names: list[str]) -> str:
    """A fix that names what the module has: the nearest name, or its classes and functions."""
    if near := nearest_name(name, names):
        return f"did you mean {key}={module}.{near}?"
    if len(names) == 1:
        return f"{key}={module}.{names[0]}, the only one there"
    names = [n for n in names if not n.startswith("_")]
    more = f" and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else ""
    return f"{module} has {', '.join(names[:MOST_SHOWN])}{more}" if names else f"define {name} there"


def nearest_name(name: str, names: Iterable[str]) -> str | None:
    """Return the name that was probably meant; upper and lower case count last: Adamw is AdamW, not Adam."""
    by_lower = {one.lower(): one for one in names}
    name = name.lower()
    near = difflib.get_close_matches(name, by_lower, 1, 0.6)
    if not near and len(name) >= SHORTEST:  # Accuracy is Acc
        near = [one for one in by_lower if len(one) >= SHORTEST and (name.startswith(one) or one.startswith(name))]
    return by_lower[near[0]] if len(near) == 1 else None


def in_torch(module: str, name: str) -> str | None:
    """Return the full path of what is named as in a file that imports torch's modules: nn.CrossEntropyLoss."""
    home, _, rest = module.partition(".")
    if home not in SHORT or rest or (home != "torch" and spec_of(home) is not None):
        return None
    homes = [SHORT[home]] if home != "torch" else ["torch.nn", "torch.optim", "torch.nn.functional"]
    if home == "torch" and spec_of(f"torch.{name}") is not None:
        return None
    for candidate in homes:
        names = {n for n in exports(candidate) or () if spec_of(f"{candidate}.{n}") is None}
        found = name if name in names else None if home == "torch" else nearest_name(name, names)
        if found:
            return f"{candidate}.{found}"
    return None


def check_shadowed(target: str, key: str) -> None:
    """Reject a file of this folder that is never imported, because another module has its name: code.py, types.py."""
    top = target.partition(".")[0]
    mine = next((p for p in (Path(f"{top}.py"), Path(top, "__init__.py")) if p.is_file()), None)
    if mine is None or top == "dtrain":
        return
    # not the folders of earlier launches of this process, for example of a notebook
    spec = PathFinder.find_spec(
        top, [folder for folder in sys.path if folder.endswith(("site-packages", "dist-packages"))]
    )
    if top in sys.stdlib_module_names:
        whose = "a module of Python's own"
    elif spec is not None and spec.origin and not Path(spec.origin).samefile(mine):  # this folder is a rank's last
        home = Path(spec.origin).parents[Path(spec.origin).name == "__init__.py"]
        path = Path(*target.split(".")[:-1])
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file() and (home / file).is_file():  # the user's own package, installed with a plain pip install
                if file.read_bytes() == (home / file).read_bytes():
                    return
                rule = f"{short_path(home / file)} is imported, and differs from {file} here"
                raise bad(key, target, rule, "pip install -e . in the folder of its pyproject.toml, once")
        whose = f"an installed package ({short_path(Path(spec.origin))})"
    else:
        return
    old, new = (mine, mine.with_name(f"my_{top}.py")) if mine.name != "__init__.py" else (mine.parent, f"my_{top}")
    fix = f"mv {old} {new}, then {key}=my_{target}"
    raise bad(key, target, f"{top} is also the name of {whose}, so {old} is never imported", fix)


def is_module(target: str, key: str) -> ValueError:
    """The name of a module in place of a class: list what is in it."""
    names = members(target, key)
    short = {name.rpartition(".")[2]: name for name in names}
    if not names:
        fix = f"{key}={target}.NAME, once {target} defines a class" if key != "schedule" else f"{key}={target}.NAME"
    else:
        near = nearest_name(target.rpartition(".")[2], short)
        first = short[near] if near else names[0]
        others = [name for name in names if name != first][:MOST_SHOWN]
        fix = f"{key}={first}" + (f"; there is also {', '.join(others)}" if others else "")
    return bad(key, target, "is a module, not a class or function", fix)


def members(module: str, key: str) -> list[str]:
    """The classes or functions of a module, or of a package's modules, that look like what this group needs."""
    spec = spec_of(module)
    files = [Path(spec.origin)] if spec and spec.origin and spec.origin.endswith(".py") else []
    folders = list(spec.submodule_search_locations or []) if spec else []
    of_package = [path for folder in folders for path in sorted(Path(folder).glob("*.py"))][:MOST_FILES]
    homes = {path: module for path in files} | {
        path: f"{module}.{path.stem}" for path in of_package if path.name != "__init__.py"
    }
    fitting = [f"{home}.{name}" for path, home in homes.items() for name in likely(key, path)]
    kinds = (ast.ClassDef, ast.FunctionDef) if key in ("loss", "schedule") else (ast.ClassDef,)
    every = [f"{home}.{node.name}" for path, home in homes.items() for node in definitions(path)
             if isinstance(node, kinds) and node.name[0] != "_"]  # fmt: skip
    return list(dict.fromkeys(fitting or every))


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


def check_spelling(key: str, value: str) -> None:
    """Reject `net.py`, `./net.py:Net`, `net` and `Net` where `net.Net` is meant."""
    check_importable(key, value)
    if not re.fullmatch(r"[\w./:-]+", value) or (not re.search(r"[/:]|\.py$", value) and not value.isidentifier()):
        return
    rule = "your own class or function is named as in Python, MODULE.NAME"
    path, _, name = value.removeprefix("./").replace("::", ":").partition(":")
    path = path.removesuffix(".py").removesuffix("/").replace(".", "/")
    file = next((p for p in (Path(f"{path}.py"), Path(path, "__init__.py")) if p.is_file()), None)
    if file is None and not name and "/" in path:  # net/Net
        path, _, name = path.rpartition("/")
        path = path.removesuffix("/py")  # net.py/Net
        file = next((p for p in (Path(f"{path}.py"), Path(path, "__init__.py")) if p.is_file()), None)
    if file is None and value.isidentifier():  # only the class is named
        files = files_with(value)
        file, name = (files[0], value) if files else (file, "")
        path = str(file.with_suffix("")) if file else path
    if file is None and re.search(r"\.py(:|$)", value):
        raise bad(key, value, f"there is no file {path}.py here", f"{key}=MODULE.NAME, as in Python: the file's class")
    if file is not None:
        module = path.replace("/", ".")
        if name:
            raise bad(key, value, rule, f"{key}={module}.{nearest_name(name, names_in(file)) or name}")
        there = members(module, key)
        others = f"; there is also {', '.join(there[1:MOST_SHOWN])}" if there[1:] else ""
        raise bad(key, value, rule, f"{key}={there[0]}{others}" if there else f"{key}={module}.NAME")


def check_importable(key: str, value: str) -> None:
    """Reject a class of a file whose name Python cannot import: wave-net.py, 3d_net.py."""
    found = re.fullmatch(r"(?:\./)?([\w-]+)(?:\.py)?[.:/]{0,2}(\w*)", value)
    file = Path(f"{found[1]}.py") if found else Path()
    if found is None or found[1].isidentifier():
        return
    stem = re.sub(r"\W", "_", found[1])
    stem = stem if stem.isidentifier() else f"my_{stem}"
    name = found[2] if found[2] not in ("", "py") else next(iter(likely(key, file)), "NAME")
    if Path(f"{stem}.py").is_file() and not file.is_file():
        raise bad(key, value, f"there is no file {file} here", f"did you mean {key}={stem}.{name}?")
    if file.is_file():
        rule = f"Python cannot import {file}: the name of a module has only letters, digits and _, and no digit first"
        raise bad(key, value, rule, f"mv {file} {stem}.py, then {key}={stem}.{name}")


def files_with(name: str) -> list[Path]:
    """The files of this folder, and of folders in it, that define a class or function and can be imported."""
    paths = [*sorted(Path().glob("*.py")), *sorted(Path().glob("*/*.py"))][:MOST_FILES]
    others = {"dtrain", *sys.stdlib_module_names}
    return [
        path
        for path in paths
        if all(part.isidentifier() and part not in others for part in path.with_suffix("").parts)
        and name in names_in(path)
    ]


def defined_here(name: str, key: str) -> list[str]:
    """What to type for a class or function that the files of this folder define."""
    found = []
    for file in files_with(name):
        module = file.parent if file.stem == "__init__" else file.with_suffix("")
        target = ".".join((*module.parts, name))
        with contextlib.suppress(ValueError):  # an installed package has this name
            check_shadowed(target, key)
            found.append(target)
    return found


def likely(key: str, file: Path) -> list[str]:
    """The classes of a file that look like what this group needs; for a loss or schedule, the functions."""
    methods = {
        "model": ("forward",), "data": ("dataset", "__iter__", "__getitem__"), "cluster": ("launch",),
        "optim": ("step",), "strategy": ("parallelize", "wrap", "update", "train_step"),
    }  # fmt: skip
    nodes = definitions(file)
    classes = [n for n in nodes if isinstance(n, ast.ClassDef)]
    if key == "hooks":  # each has only some of the methods
        return [n.name for n in classes if any(getattr(m, "name", "") in METHODS for m in n.body)]
    for method in methods.get(key, ()):  # a file may have a data set beside the class that gives it
        if found := [n.name for n in classes if any(getattr(m, "name", "") == method for m in n.body)]:
            return found
    if key in methods:
        return []
    functions = [n for n in nodes if isinstance(n, ast.FunctionDef) and n.args.args]
    if key == "schedule":
        return [n.name for n in functions if n.args.args[0].arg == "step"]
    return [n.name for n in functions if n.args.args[0].arg != "step"] if key == "loss" else []


def data_beside(target: str) -> str:
    """What to type for the data that the file of a class also defines; "" if nothing there is known to be data."""
    module = target.rpartition(".")[0]
    spec = spec_of(module) if own_file(module.partition(".")[0]) else None
    nodes = definitions(Path(spec.origin)) if spec and spec.origin else []
    kinds = [node.name for node in nodes if isinstance(node, ast.ClassDef) and is_data(node)]
    made = (*kinds, "DataLoader", "TensorDataset", "load_dataset")

    def gives_data(node: Definition) -> bool:
        values = [part.value for part in ast.walk(node) if isinstance(part, ast.Return)]
        if isinstance(node, ast.ClassDef) or len(values) != 1:
            return False
        if isinstance(made_here := values[0], ast.Dict):
            parts = zip(made_here.keys, made_here.values, strict=True)
            train = [part for key, part in parts if isinstance(key, ast.Constant) and key.value == "train"]
            return bool(train) and not isinstance(train[0], (ast.Dict, ast.Constant))  # and no settings
        return isinstance(made_here, ast.Call) and ast.unparse(made_here.func).rpartition(".")[2] in made

    ready = [node for node in nodes if not needs_arguments(node)]
    found = [node.name for node in ready if gives_data(node)] + [node.name for node in ready if node.name in kinds]
    return f"{module}.{found[0]}" if found else ""


def is_data(node: ast.ClassDef) -> bool:
    """Does a class say that it is a data set, or gives data sets?"""
    bases = any(ast.unparse(base).endswith("Dataset") for base in node.bases)
    return bases or any(getattr(one, "name", "") == "dataset" for one in node.body)


def needs_arguments(node: Definition) -> bool:
    """Does a function, or the constructor of a class, take more than split= or train=, which dtrain gives?"""
    function: ast.stmt | None = node
    if isinstance(node, ast.ClassDef):
        function = next((n for n in node.body if getattr(n, "name", "") == "__init__"), None)
    if not isinstance(function, ast.FunctionDef):
        return False
    args = function.args
    names = [one.arg for one in (*args.posonlyargs, *args.args)]
    required = names[: len(names) - len(args.defaults)][function is not node :]
    keyword = [one.arg for one, default in zip(args.kwonlyargs, args.kw_defaults, strict=True) if default is None]
    return any(name not in ("split", "train") for name in (*required, *keyword))


def names_in(file: Path) -> list[str]:
    return [node.name for node in definitions(file)]


def definitions(file: Path) -> list[Definition]:
    """The classes and functions that a file defines; none if it is not valid Python."""
    try:
        tree = parsed(str(file), file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return []
    return [node for node in statements(tree.body) if isinstance(node, (ast.ClassDef, ast.FunctionDef))]


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
