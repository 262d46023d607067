"""Build an object from a section of the configuration. Only this file turns a name in a yaml file into code."""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.machinery
import linecache
import os
import re
import sys
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dtrain.config.files import GROUPS, PARTIAL, RESERVED, TARGET, option_of, options_of
from dtrain.config.hook_methods import METHODS, STATE
from dtrain.errors import bad

# Passes the trusted modules from the launcher to the ranks. The run folder cannot pass them: it may come from someone
# else. A process inherits the variable, and SLURM keeps it in the job's script, also after a requeue.
TRUST = "DTRAIN_TRUST"
LIBRARIES = ("torch", "torchvision", "timm", "transformers")  # of models, losses and optimizers


PIP_NAMES = {
    "sklearn": "scikit-learn", "skimage": "scikit-image", "PIL": "pillow", "cv2": "opencv-python", "yaml": "pyyaml",
    "open_clip": "open_clip_torch", "bs4": "beautifulsoup4", "tensorflow": "'dtrain[tensorflow]'",
    "datasets": "'dtrain[datasets]'",
}  # fmt: skip


def pip_name(module: str) -> str:
    """What to install for a module."""
    return PIP_NAMES.get(module, module.replace("_", "-"))


def fewest(modules: Iterable[str]) -> list[str]:
    """Leave out the modules that another one contains: for a command to paste."""
    names = list(dict.fromkeys(modules))
    return [name for name in names if not any(name.startswith(f"{other}.") for other in names)]


def typed_trust() -> list[str]:
    """Return the modules that the user trusted on the command line, as passed on by the launcher."""
    return [name for name in os.environ.get(TRUST, "").split(",") if name]


def allowed(target: str, trust: Iterable[str]) -> bool:
    """May this be called? Yes if conf/ names it or the user trusts its module."""
    if target.partition(".")[0] == "dtrain":  # not by trust: config.build with its own `trust` could call anything
        return bound(target) is not None
    return any(target == name or target.startswith(name + ".") for name in trust)


def bound(target: str) -> bool | None:
    """Whether conf/ marks the target as `_partial_` instead of calling it; None: conf/ does not name the target."""
    found = next((option for group in GROUPS if (option := option_of(group, target))), None)
    return None if found is None else bool(found.get(PARTIAL))


def build(section: Any, trust: Iterable[str] = (), partial: bool = False, **extra: Any) -> Any:
    """Build the object that a section describes: call its `_target_` with the other settings as plain values.

    Calls only targets that conf/ names or that modules in `trust` define, and only at the top of the section.
    `_partial_: true` returns functools.partial instead, for callables that need more arguments later; with `partial`
    a target that conf/ does not name is bound in the same way.
    """
    if section is None:
        return None
    if isinstance(section, Mapping) and not isinstance(section, dict):  # a DictConfig
        from omegaconf import OmegaConf

        section = OmegaConf.to_container(section, resolve=True)
    if not isinstance(section, dict) or not isinstance(section.get(TARGET), str):
        raise bad(TARGET, None, "a section must name what to build", "choose an option of conf/")
    settings = plain({k: v for k, v in section.items() if k not in (TARGET, PARTIAL)}, "")
    target = locate(section[TARGET], trust)
    in_conf = bound(section[TARGET])  # conf/ wins: a file cannot turn a `_partial_` target into a call
    if (partial or section.get(PARTIAL)) if in_conf is None else in_conf:
        if is_module(target) and not settings:  # a loss with tensors, such as class weights
            return target
        return functools.partial(target, **settings, **extra)
    if is_module(target):
        raise made_at_import(section[TARGET], target)
    try:
        return target(**settings, **extra)
    except TypeError as error:
        called = (
            rf"^{re.escape(getattr(target, '__qualname__', ''))}(?:\.__init__)?\(\) missing \d+ required .*?: '(\w+)'"
        )
        missing = re.search(called, str(error))
        if missing is None:  # of another call, or another mistake
            raise
        name, argument = section[TARGET], missing[1]
        made = f"def my_function(): return {name.rpartition('.')[2]}({argument}=…)"
        fix = f"a function of yours that builds it, `{made}`, or a value for its setting {argument}"
        raise ValueError(f"{name}: needs a value for {argument}\n  fix: {fix}") from error


def plain(node: Any, key: str) -> Any:
    """Copy plain values. A nested `_target_` or similar key is rejected: it is easy to overlook in a file."""
    if isinstance(node, dict):
        for name in node:
            if RESERVED.fullmatch(str(name)):
                raise reserved(f"{key}.{name}".lstrip("."), node[name])
        return {name: plain(value, f"{key}.{name}".lstrip(".")) for name, value in node.items()}
    return [plain(item, key) for item in node] if isinstance(node, (list, tuple)) else node


def reserved(key: str, value: Any) -> ValueError:
    rule = f"names like {key.rpartition('.')[2]} are allowed only at the top of a group: nested objects are not built"
    return bad(key, value, rule, f"leave out {key}; settings are plain values")


def locate(target: str, trust: Iterable[str] = ()) -> Any:
    trust = tuple(trust)
    module_name, _, attribute = target.rpartition(".")
    if not module_name or not allowed(target, trust):
        raise untrusted(TARGET, target, trust)
    try:
        found = getattr(importlib.import_module(module_name), attribute, None)
    except ModuleNotFoundError as error:
        if error.name and not f"{module_name}.".startswith(f"{error.name}."):  # what that module imports
            places = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<")]
            where = f"{os.path.relpath(places[-1].filename)}:{places[-1].lineno}"
            top = error.name.partition(".")[0]
            rule = f"{where} imports {error.name}, which is not installed or not in this folder"
            fix = f"pip install {pip_name(top)}, or correct the import"
            beside = Path(places[-1].filename).parent
            if (beside / f"{top}.py").is_file() or (beside / top / "__init__.py").is_file():
                package = ".".join(Path(os.path.relpath(beside)).parts)
                rule = f"{where} imports {error.name}, and the ranks look in this folder, not in {package}"
                fix = f"from {package}.{error.name} import …, or start in {os.path.relpath(beside)}"
            raise ValueError(f"{target}: {rule}\n  fix: {fix}") from error
        raise bad(TARGET, target, f"cannot be imported ({error})", "check the spelling, or install it") from error
    if found is None:
        there = vars(sys.modules[module_name])
        own = [name for name, value in there.items() if allowed(f"{getattr(value, '__module__', None)}.{name}", trust)]
        near = difflib.get_close_matches(attribute, own, 1, 0.6)
        fix = f"did you mean {module_name}.{near[0]}?" if near else "check the spelling"
        raise bad(TARGET, target, f"{module_name} has no {attribute}", fix)
    if not callable(found):
        raise made_at_import(target, found)
    if is_module(found):  # an object of torch: nothing that this module only imported
        return found
    # reject names that a trusted module merely imported, e.g. subprocess.Popen
    defined = found.func if isinstance(found, functools.partial) else found
    home = getattr(defined, "__module__", None) or ""
    names = (home, f"{home}.{getattr(defined, '__name__', '')}")
    if not (home.partition(".")[0] == target.partition(".")[0] == "dtrain" or any(allowed(n, trust) for n in names)):
        if allowed(target, trust) and not own_file(home.partition(".")[0]):
            raise imported(TARGET, target, names[1], defined is not found)
        raise untrusted(TARGET, names[1] if own_file(home.partition(".")[0]) else target, trust)
    return found


def is_module(thing: Any) -> bool:
    """Is it an object of torch.nn.Module, and not a class? This file does not import torch."""
    return not isinstance(thing, type) and any(
        kind.__module__ == "torch.nn.modules.module" and kind.__name__ == "Module" for kind in type(thing).__mro__
    )


def made_at_import(target: str, found: Any) -> ValueError:
    """Refuse an object: it is made when its module is imported, before random numbers are seeded, and only once."""
    module, _, name = target.rpartition(".")
    kind = "an array" if hasattr(found, "dtype") else f"an object ({type(found).__name__})"
    rule = f"is {kind} that {module} makes when it is imported, but dtrain calls a class or function to make one"
    file = getattr(sys.modules.get(module), "__file__", None)
    lines = linecache.getlines(file) if file and file.endswith(".py") else []  # of any encoding
    at = next(((i, line) for i, line in enumerate(lines, 1) if re.match(rf"{name}\s*[:=,]", line)), None)
    made = at[1].partition("=")[2].strip() if at else "…"
    made = made if at and re.search(r"[\w)\]]$", made) and made.count("(") == made.count(")") else f"{name}"
    fix = f"def my_{name}(): return {made} at the top level of {module}, and give that name: {module}.my_{name}"
    if hasattr(found, "param_groups"):
        kind, example = type(found).__name__, "(named_parameters, lr=…)"
        known = f"torch.optim.{kind}, the class; or " if type(found).__module__.startswith("torch.optim.") else ""
        fix = f"{known}def my_{name}(named_parameters): return {kind}{example} at the top level of {module}"
    if any(hasattr(type(found), method) for method in METHODS.keys() - STATE):  # a hook, which is never a function
        fix = f"hooks={type(found).__module__}.{type(found).__qualname__}, the class"
    error = bad(TARGET, target, rule, fix)
    if at:
        error.add_note(f'File "{file}", line {at[0]}, in <module>')
    return error


def imported(key: str, target: str, full: str, is_partial: bool = False) -> ValueError:
    """Refuse what a trusted module only imports: trust in it does not reach there. full: where it is defined.

    The fix names that place only if it is a library of models: never code that a file led to.
    """
    module, name = target.rpartition(".")[0], full.rpartition(".")[2]
    for parent in ("torch.optim", "torch.nn", "torch.nn.functional"):  # the names that people know
        if full.startswith(f"{parent}.") and getattr(sys.modules.get(parent), name, None) is not None:
            full = f"{parent}.{name}"
    rule = f"is {'a functools.partial of ' if is_partial else ''}{full}, which {module} only imports"
    own = f"a class or function of {module} that uses it"
    if full.partition(".")[0] not in LIBRARIES:
        return bad(key, target, rule, own)
    typed = f"{full}, with its arguments as settings" if key == TARGET else f"{key}={full}"
    return bad(key, target, rule, f"{typed}; or {own}")


def untrusted(key: str, target: str, trust: Iterable[str]) -> ValueError:
    """Reject a target. The fix names a module only if it is the user's own file, never one that a file suggests."""
    rule = "only dtrain's own code and the modules you trust may be called"
    group = key.partition(".")[0]
    known = "choose an option of conf/"
    if group in GROUPS:
        shown = f"leave out {key}; " if key.endswith(f".{TARGET}") else ""
        known = f"{shown}{group} can be {', '.join(options_of(group))}, or your own class as {group}=MODULE.NAME"
    fix = f"{known}, or trust=[…] with the module's name, if you know that code and want it to run"
    module = target.partition(".")[0]
    if file := own_file(module):
        names = fewest([*trust, module])
        fix = f"'trust=[{','.join(names)}]' if that module is yours ({file})"
    return bad(key, target, rule, fix)


def own_file(module: str) -> Path | None:
    """Locate a top-level module of the user without importing it; None: standard library, installed or missing."""
    import sysconfig

    if not module.isidentifier() or module == "dtrain" or module in sys.stdlib_module_names:
        return None
    spec = importlib.machinery.PathFinder.find_spec(module, [os.getcwd(), *sys.path])
    places = [spec.origin] if spec and spec.origin else list((spec and spec.submodule_search_locations) or [])
    if not places or not Path(places[0]).exists():
        return None
    file = Path(places[0]).resolve()
    installed = {Path(path).resolve() for path in sysconfig.get_paths().values()}
    return None if installed & {*file.parents} or "site-packages" in file.parts else file
