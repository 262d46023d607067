"""Compose the messages about a class or function that is not found: what was probably meant, what there is instead."""

from __future__ import annotations

import ast
import contextlib
import difflib
import sys
from collections.abc import Iterable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NoReturn

from dtrain.config.build import own_file
from dtrain.config.hook_methods import METHODS
from dtrain.config.source_files import Definition, definitions, exports, names_in, spec_of
from dtrain.errors import bad
from dtrain.util.format import short_path

MOST_SHOWN = 8  # names of a module in a message
MOST_FILES = 50  # of this folder that are searched for a class
SHORTEST = 3  # letters of a name that another one may begin with
# How people import the modules of torch that an option can name: `nn` is a name in their file, and no module.
SHORT = {
    "nn": "torch.nn", "F": "torch.nn.functional", "functional": "torch.nn.functional", "optim": "torch.optim",
    "torch": "torch.nn", "lr_scheduler": "torch.optim.lr_scheduler",
}  # fmt: skip


def missing(key: str, target: str, module: str, name: str, file: str, names: list[str]) -> NoReturn:
    if spec_of(target) is not None:
        raise module_not_class(target, key)
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


def module_not_class(target: str, key: str) -> ValueError:
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
