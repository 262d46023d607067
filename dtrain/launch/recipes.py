"""Recipes as options that Hydra can compose: the built-in ones, and files of the user, which may be untrusted."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from dtrain.config.files import CODE, RECIPES
from dtrain.config.untrusted import OPTION, TooLarge, check_file, quick_yaml, read, read_text
from dtrain.errors import bad
from dtrain.launch.options import AUTO, STAND_IN, store_option
from dtrain.launch.quoting import unquoted


def built_in() -> dict[str, Path]:
    """Return dtrain's own recipes by name: top-level ones first, then tiny/NAME."""
    paths = [*sorted(RECIPES.glob("*.yaml")), *sorted(RECIPES.glob("*/*.yaml"))]
    return {path.relative_to(RECIPES).with_suffix("").as_posix(): path for path in paths}


def store_recipes(chosen: str = "") -> None:
    """Store this built-in recipe and those it is based on; without one, all: Hydra's --help and errors list them."""
    recipes = built_in()
    needed = [chosen] if chosen in recipes else [*recipes]
    for name in needed:
        based_on = [str(entry).removeprefix("/recipe/") for entry in store_recipe(recipes[name], name)]
        needed += [base for base in based_on if base in recipes and base not in needed]


def store_recipe(path: Path, name: str | None = None) -> list[Any]:
    """Add a recipe to Hydra's store; return its `defaults`. name: of a built-in recipe; other files are untrusted."""
    try:
        with quick_yaml():
            node: Any = OmegaConf.load(path) if name else OmegaConf.create(read(path))
        tree = OmegaConf.to_container(node)
    except (TooLarge, OSError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise bad("recipe", path, why, "a recipe must be a short file of settings") from None
    except UnicodeDecodeError:
        raise bad("recipe", path, "is not a text file", "another file; dtrain recipes ls shows built-in ones") from None
    except Exception as error:  # yaml errors have many types; each means that the file is not valid yaml
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        why = getattr(error, "problem", None) or str(error)
        raise bad("recipe", path, f"is not valid yaml: {why}", f"correct {where}") from error
    if not isinstance(tree, dict) or not all(re.fullmatch(r"[\w.-]+", str(key)) for key in tree):
        fix = "write settings as in `train: {steps: 300}`; dtrain recipes show cpu-tiny is an example"
        raise bad("recipe", path, "must be a yaml mapping of settings", fix)
    cluster = tree.get("cluster")
    code = [f"cluster.{key}" for key in CODE if isinstance(cluster, dict) and cluster.get(key)]
    code += ["script"] if "script" in tree and name is None else []
    # otherwise an untrusted file could name any code and also trust it
    for key in [*(key for key in ("resume", "fork", "trust") if tree.get(key)), *code]:
        raise bad(
            "recipe",
            path,
            f"{key} may be given on the command line only",
            f"remove it from the file and give {key}=… on the command line",
        )
    defaults = tree.get("defaults") or []
    check_defaults(path, defaults)
    if "hydra" in tree:  # Hydra instantiates callbacks and launchers before any check here runs
        raise bad(
            "recipe", path, "hydra's own settings may be given on the command line only", "remove them from the file"
        )
    if name is None:
        check_file(path, {str(key): value for key, value in tree.items()})
    if any(re.search(rf"strategy\W+{AUTO}\b", str(entry)) for entry in defaults):
        store_option("strategy", AUTO, STAND_IN)
    if "script" in tree:  # only dtrain's own recipes have one: the program is beside them
        node.script.path = str(RECIPES / str(tree["script"]["path"]))
    node.pop("search", None)  # for `dtrain search` only; a plain run uses the recipe's other settings
    folder, _, stem = (name or path.stem).rpartition("/")
    group = f"recipe/{folder}" if folder else "recipe"
    ConfigStore.instance().store(group=group, name=stem, node=node, package="_global_")
    return defaults


def check_defaults(path: Path, defaults: Any) -> None:
    """Check that a recipe chooses options by plain names: Hydra would also accept a path to any file."""
    if not isinstance(defaults, list):
        raise bad("recipe", path, "its `defaults` must be a list of groups", "defaults: [override /model: gpt2-124m]")
    for entry in defaults:
        if "hydra" in str(entry):
            raise bad(
                "recipe",
                path,
                "hydra's own settings may be given on the command line only",
                "remove them from the file",
            )
        names = [*entry, *entry.values()] if isinstance(entry, dict) else [entry]
        for name in names:
            plain = re.sub(r"^(override |optional )*/?|@[\w.]*$", "", name) if isinstance(name, str) else ""
            if not OPTION.fullmatch(plain) and name is not None:
                rule = f"its `defaults` choose options by name, and {name!r} is not one"
                raise bad("recipe", path, rule, "defaults: [override /model: gpt2-124m]")


def in_recipe(message: str, argv: list[str]) -> str:
    """Put the file and line in front of a message about a setting that only a recipe file has."""
    typed = {a.partition("=")[0].lstrip("+~"): unquoted(a.partition("=")[2]) for a in argv}
    key, path = re.split(r"[=:]", message, maxsplit=1)[0], Path(typed.get("recipe", "")).expanduser()
    if key in typed or not path.is_file():
        return message
    with contextlib.suppress(OSError, ValueError):
        word = re.compile(rf"(^|[\s/{{,])({re.escape(key)}|{re.escape(key.rpartition('.')[2])})\s*:\s*([^#{{}},]*)")
        found = [
            (n, at[3].strip()) for n, line in enumerate(read_text(path).splitlines(), 1) if (at := word.search(line))
        ]
        if len(found) == 1:
            number, value = found[0]
            return f"{path}:{number}: {as_yaml(message, value)}"
    return message


def as_yaml(message: str, value: str) -> str:
    """Return the message with its fix as a line of a file: `optim.lr=…` becomes `optim: {lr: 0.1}`."""
    what, _, fix = message.partition("\n  fix: ")
    typed = re.match(r"([a-z_]\w*)((?:\.\w+)+)=(\S+)", fix)
    if not what.endswith("there is no such setting") or typed is None:
        return message
    *sections, last = typed[2][1:].split(".")
    inner = f"{last}: {value if typed[3] == '…' and value else typed[3]}"
    for section in reversed([typed[1], *sections]):
        inner = f"{section}: {{{inner}}}"
    return f"{what}\n  fix: {inner}{fix[typed.end() :]}"
