"""Rewrite the command line for Hydra: `--dry-run`, `recipe=FILE`, `resume=RUN`, `fork=RUN`, an earlier sweep."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shlex
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from dtrain.checks.loggers import ADDRESSES
from dtrain.config.files import (
    CODE,
    CONF,
    LOGGER,
    RECIPES,
    SECRET,
    SEVERAL,
    is_script,
    known_settings,
    options_of,
    read_yaml,
    setting_prefix,
)
from dtrain.config.hydra_errors import GROUPS, is_foreign, unknown_setting
from dtrain.config.hydra_errors import OWN as DOTTED
from dtrain.config.needed import with_needed
from dtrain.config.redaction import check_arguments
from dtrain.config.run_file import completed, read_run
from dtrain.config.source import check_spelling, find
from dtrain.config.untrusted import OPTION, TooLarge, check_file, quick_yaml, read, read_text
from dtrain.errors import bad
from dtrain.runs.folder import latest_checkpoint
from dtrain.util.format import argument, as_dict, short_path

AUTO = "auto"  # strategy=auto: the planner chooses (dtrain/launch/auto.py)
# Placeholder that Hydra composes until the planner has chosen. It has all degrees, so that strategy.tp=2 is valid.
STAND_IN = {"_target_": "dtrain.strategies.pipeline.Pipeline", "pp": -1, "dp": -1, "tp": -1, "cp": 1, "cp_kind": "ring"}

# A value that Hydra does not read as text.
NOT_TEXT = re.compile(r"[+-]?(\d[\d_]*\.?\d*|\.\d+)(e[+-]?\d+)?|true|false|nan|[+-]?inf", re.IGNORECASE)


def prepare_arguments(argv: list[str]) -> list[str]:
    """Turn `--dry-run`, `recipe=FILE`, `resume=RUN` and `fork=RUN` into overrides; leave the rest as typed."""
    check_arguments(argv)
    argv = with_trust(argv)
    argv = ["dry_run=true" if a == "--dry-run" else a for a in argv]
    argv.sort(key=lambda a: a not in ("-m", "--multirun"))  # Hydra accepts -m only before or after all overrides
    ours = "|".join([*GROUPS, "recipe", "resume", "fork", "run_dir"])
    argv = [re.sub(rf"^\++({ours})=", r"\1=", a) for a in argv]  # +strategy=fsdp
    empty = r"^cluster\.(sbatch|fabric\.env|env|resources|node_selector|pod)\b"  # mappings that are empty by default
    argv = [re.sub(empty, r"++\g<0>", a) for a in argv]
    argv = [re.sub(r"^([\w.+]+=)~(?=/|$)", lambda m: m[1] + str(Path.home()), a) for a in argv]  # no shell does it here
    argv = [re.sub(r"^(\++)?logger\.(project|mode)=", r"\1logger.wandb.\2=", a) for a in argv]  # their former names
    lists = tuple(f"{group}=[" for group in SEVERAL)
    argv = [re.sub(r"\s", "", a) if a.startswith(lists) else a for a in argv]  # logger=[csv, mlflow]
    argv = ["checkpoint.save=false" if a == "checkpoint=none" else a for a in argv]
    argv = [part for a in argv for part in folder_model(a)]
    argv = script_overrides(argv)
    argv = [a for a in argv if a != "recipe=null"]  # the default; Hydra rejects it as an override
    for word, following in itertools.pairwise([*argv, ""]):
        name, _, value = word.lstrip("-").partition("=")
        if word.startswith("-") and name in known_settings():
            value = value or ("" if following.startswith("-") or "=" in following else following)  # --strategy fsdp
            raise ValueError(f"{word}: settings have no dashes\n  fix: {name}={value or '…'}")
        name = name.replace("-", "_")
        if word.startswith("--") and is_foreign(name):  # --batch-size=32, --epochs 3
            raise ValueError(unknown_setting(name, value).replace(name, word.partition("=")[0], 1))
    given = {a.split("=", 1)[0]: a.split("=", 1)[1] for a in argv if "=" in a and not a.startswith("-")}
    for key, value in given.items():
        if SECRET.search(key):
            raise bad(
                key,
                "…",
                "looks like a secret, and a configuration is written to disk in several places",
                "give it in an environment variable",
            )
        several = key in SEVERAL and re.fullmatch(r"\[[\w.-]+(,[\w.-]+)*\]", value)
        if key in GROUPS and re.search(r"^(null)?$|\[|\.\.|\.ya?ml$", value) and not several:
            raise no_option(key, value)
        if key in GROUPS and value not in options_of(key):
            check_spelling(key, value)
            if plain := next((part for part in named(value) if NOT_TEXT.fullmatch(part)), None):
                raise no_such_option(key, plain)  # Hydra's message does not name the group
    argv = offer_own(argv)
    # an option stored by an earlier launch in this process must not leak into this one: strategy=glob(*) would match it
    ConfigStore.instance().repo.get("strategy", {}).pop(f"{AUTO}.yaml", None)
    if re.search(rf"\b{AUTO}\b", given.get("strategy", "")):
        store_option("strategy", AUTO, STAND_IN)
    if "run_dir" in given and {"-m", "--multirun"} & set(argv):
        fix = f"hydra.sweep.dir={given['run_dir']}"
        raise bad("run_dir", given["run_dir"], "a sweep makes a folder for each job, in hydra.sweep.dir", fix)
    if any(a.startswith("-") and a not in ("-m", "--multirun") for a in argv):  # --help lists them
        store_recipes()
    elif "recipe" in given:
        store_recipes(given["recipe"])
    is_file = re.search(r"[/\\]|\.ya?ml$", given.get("recipe", "")) and given["recipe"] not in built_in()
    if is_file and not ({"-m", "--multirun"} & set(argv) and re.search(r"[,(]", given["recipe"])):  # a sweep: tiny/a,b
        path = Path(given["recipe"]).expanduser()
        if path.is_dir():
            raise bad("recipe", given["recipe"], "is a folder, not a file", "dtrain recipes ls shows the built-in ones")
        if not path.is_file():
            raise bad("recipe", given["recipe"], "there is no such file", "dtrain recipes ls shows the built-in ones")
        store_recipe(path)
        argv = [f"recipe={path.stem}" if a == f"recipe={given['recipe']}" else a for a in argv]
    if given.get("resume", "null") != "null":
        others = [*(["recipe="] if "recipe" in given else []), *(a for a in argv if a in ("-m", "--multirun"))]
        if others:
            rule = "a run resumes with its own configuration, one run at a time"
            raise bad("resume", given["resume"], rule, f"leave out {' and '.join(others)}")
        argv = resumed(argv, given)
    elif given.get("fork", "null") != "null":
        argv = forked(argv, given)
    if {"-m", "--multirun"} & set(argv) and "hydra.sweep.dir" not in given:
        from dtrain.launch import sweeps

        if folder := sweeps.earlier(argv):
            check_path("hydra.sweep.dir", folder)
            argv = [*argv, f"hydra.sweep.dir={quote(folder)}"]
            print(
                f"resuming {folder}, which was started with the same overrides (for a new one: hydra.sweep.dir=FOLDER)"
            )
    if {"-m", "--multirun"} & set(argv):  # overrides that all points share do not belong into folder names
        typed = {k.lstrip("+"): v for k, _, v in (a.partition("=") for a in argv if "=" in a and not a.startswith("-"))}
        fixed = [k for k, v in typed.items() if re.fullmatch(r"[^,(]*|\[[^(]*\]", v) and not k.startswith("hydra.")]
        fixed = list(dict.fromkeys([*fixed, "trust"]))
        argv = [*argv, f"hydra.job.config.override_dirname.exclude_keys=[{','.join(fixed)}]"]
    return argv


def no_option(group: str, value: str) -> ValueError:
    """Explain what cannot be the name of an option: nothing, null, a list, a path, a file."""
    options = sorted({*options_of(group), *([AUTO] if group == "strategy" else [])})
    can, stem = f"{group} can be {', '.join(options)}", Path(value).stem
    names = [name for name in named(value) if name] if "[" in value else []
    if value in ("", "null") or ("[" in value and not names):
        rule = "cannot be null" if value == "null" else "has no value"
        return bad(group, value, rule, f"leave out {group}=; {can}")
    if names:
        fix = f"{group}={names[0]}, or -m {group}={','.join(names)}; {can}"
        return bad(group, value, "is more than one value", fix)
    if "/" in value:
        return bad(group, value, "is a path, not the name of an option", can)
    near = f"{group}={stem}; " if stem in options else ""
    return bad(group, value, "names an option without .yaml", f"{near}{can}")


def no_such_option(group: str, value: str) -> ValueError:
    """Explain a number, true or false in the place of an option: precision=16 is fp16 or bf16."""
    options = sorted({*options_of(group), *([AUTO] if group == "strategy" else [])})
    near = [option for option in options if value in re.findall(r"\d+", option)]
    near = [option for option in near if option.partition("-")[0] not in near or "-" not in option]  # not bf16-pure
    near = sorted(near, key=lambda option: not option.startswith("fp"))  # elsewhere 16 is fp16
    fix = f"{group}={' or '.join(near)}; " if near else ""
    return bad(group, value, "there is no such option", f"{fix}{group} can be {', '.join(options)}")


def resumed(argv: list[str], given: dict[str, str]) -> list[str]:
    """Turn `resume=RUN` into the settings of that run, and its folder."""
    from dtrain.runs.find import find_checkpoint

    word = unquoted(given["resume"])
    if given.get("fork", "null") != "null":
        rule = "either continues a run (resume=) or starts a new one from a checkpoint (fork=)"
        raise bad("resume", word, rule, "leave out one of them")
    at = find_checkpoint(word, setting="resume")
    run_dir = at.run_dir
    check_path("resume", run_dir)
    other = unquoted(given.get("run_dir", ""))
    if other and Path(other).expanduser().absolute() != run_dir:
        rule = f"a run resumes in its own folder, {short_path(run_dir)}; a new folder needs a new run"
        raise bad(
            "run_dir", other, rule, f"{argument('fork', word)} {argument('run_dir', other)}, or leave out run_dir="
        )
    argv, overridden = without_same_classes(argv, given, run_dir)
    store_as_run(run_dir, overridden)
    check_program(run_dir, argv)
    argv = [a for a in argv if not a.startswith(("resume=", "run_dir="))]
    return [*argv, "recipe=as-run", f"resume={quote(str(at))}", f"run_dir={quote(run_dir)}"]


def forked(argv: list[str], given: dict[str, str]) -> list[str]:
    """Turn `fork=RUN` into the settings of that run and the checkpoint to begin with; the folder is a new one."""
    from dtrain.runs.find import find_checkpoint

    word = unquoted(given["fork"])
    if "recipe" in given:
        raise bad("fork", word, "a fork has the settings of the run that it begins with", "leave out recipe=")
    if {"-m", "--multirun"} & set(argv) and "," in word:
        raise bad("fork", word, "the points of a sweep begin with one checkpoint", f"fork={word.partition(',')[0]}")
    at = find_checkpoint(word, setting="fork")
    check_path("fork", at.run_dir)
    if at.step is None:
        newest = latest_checkpoint(at.run_dir)
        if newest is None:
            raise bad("fork", word, "the run has no checkpoint", "another run; dtrain runs lists them")
        at = at._replace(step=int(newest.name[5:]))
    argv, overridden = without_same_classes(argv, given, at.run_dir)
    store_as_run(at.run_dir, overridden, as_fork=True)
    argv = [a for a in argv if not a.startswith("fork=")]
    return [*argv, "recipe=as-run", f"fork={quote(str(at))}"]


def without_same_classes(argv: list[str], given: dict[str, str], run_dir: Path) -> tuple[list[str], list[str]]:
    """Leave out the typed classes that a run has, too, so that it keeps their arguments; and name the other groups."""
    config = read_config(run_dir)
    of_run = {group: as_dict(config.get("choices")).get(group) for group in given if group in GROUPS}
    same = [
        group
        for group, name in of_run.items()
        if given[group] == name == as_dict(config.get(group)).get("_target_") and DOTTED.fullmatch(given[group])
    ]
    argv = [word for word in argv if word not in {f"{group}={given[group]}" for group in same}]
    return argv, [group for group in of_run if group not in same]


def folder_model(word: str) -> list[str]:
    """Turn `model=hf:FOLDER` into the option and its setting."""
    found = re.fullmatch(r"model=hf:(.+)", word)
    if found is None:
        return [word]
    folder = Path(unquoted(found[1])).expanduser().absolute()
    if not (folder / "config.json").is_file():
        rule = "has no config.json" if folder.is_dir() else "is not a folder here, and dtrain downloads nothing"
        fix = "the folder that save_pretrained() or `dtrain export RUN OUT --format hf` wrote"
        raise bad("model", f"hf:{found[1]}", rule, fix)
    return ["model=hf", f"model.path={quote(folder)}"]


def script_overrides(argv: list[str]) -> list[str]:
    """Turn `script=FILE` and `script_args=…` into the settings that they stand for, and name the run after the program.

    Arguments stay texts, as typed: Hydra would read 1e-3 as a number, and True as a boolean.
    """
    is_sweep = bool({"-m", "--multirun"} & set(argv))
    given = dict(a.split("=", 1) for a in argv if "=" in a and not a.startswith("-"))
    overrides = []
    for word in argv:
        name, _, value = word.partition("=")
        name = name.lstrip("+")
        if name in ("script", "script.path"):
            if not value or value == "null":
                raise bad("script", value, "must name a program", "script=train.py")
            typed = [part.strip("'\"") for part in (value.split(",") if is_sweep else [value])]
            paths = [Path(part).expanduser().absolute() for part in typed]
            overrides.append(f"script.path={','.join(map(quote, paths))}")
            is_named = "name" in given or "resume" in given or len(paths) > 1
            overrides += [] if is_named else [f"name={quote(paths[0].stem)}"]
        elif name in ("script_args", "script.args"):
            overrides.append(f"script.args={','.join(map(quoted_list, points(value, is_sweep)))}")
        else:
            overrides.append(word)
    return overrides


def points(value: str, is_sweep: bool) -> list[list[str]]:
    """Read the arguments of a program: [--lr,1e-3] or `--lr 1e-3`; in a sweep, several of either, with commas."""
    if re.fullmatch(r"(\[[^\[\]]*\],?)+", value):
        lists = re.findall(r"\[([^\[\]]*)\]", value)
        return [[item.strip().strip("'\"") for item in text.split(",") if item.strip()] for text in lists]
    try:
        return [shlex.split(text) for text in (value.split(",") if is_sweep else [value])]
    except ValueError as error:
        raise bad(
            "script_args", value, f"cannot be split into arguments ({error})", "script_args=[--lr,1e-3]"
        ) from None


def quoted_list(items: list[str]) -> str:
    return f"[{','.join(map(quote, items))}]"


def check_program(run_dir: Path, argv: list[str]) -> None:
    """Reject a resume that would start a program which only the run folder names: it may come from someone else."""
    stored, typed = as_dict(read_config(run_dir).get("script")), dict(a.split("=", 1) for a in argv if "=" in a)
    needed = (
        ["path", "python"] if typed.get("script.path", "").rstrip("'").endswith(".py") else ["path", "python", "args"]
    )
    for name in needed:
        if stored.get(name) and f"script.{name}" not in typed:
            word = {"path": "script", "args": "script_args"}.get(name, f"script.{name}")
            value = json.dumps(stored[name]).replace(" ", "") if name == "args" else stored[name]
            rule = (
                f"the run was started with {word}={value}, which is never read from a run folder: it may not be yours"
            )
            raise bad("resume", run_dir, rule, f"check it; if it is yours, give it again: {word}={value}")


def check_groups(argv: list[str]) -> None:
    """Reject the groups that only dtrain's training loop has."""
    groups = [next(iter(entry)) for entry in read_yaml(CONF / "script.yaml")["defaults"] if isinstance(entry, dict)]
    for word in argv:
        group = word.lstrip("+~").partition("=")[0].partition(".")[0]
        if (group in GROUPS and group not in groups) or group in ("train", "checkpoint", "guard", "lora"):
            rule = "is a setting of dtrain's own training loop, and script= runs your program instead"
            raise ValueError(f"{word}: {rule}\n  fix: leave it out, or give it to the program: script_args=[…]")


def main_config(argv: list[str]) -> str:
    """Return which file of conf/ these arguments are composed with: that of programs, or that of the training loop."""
    recipe = dict(a.split("=", 1) for a in argv if "=" in a).get("recipe", "")
    stored = ConfigStore.instance().repo.get("recipe", {})
    for folder in recipe.split("/")[:-1]:
        stored = stored.get(folder, {})
    chosen = stored.get(f"{recipe.rpartition('/')[2]}.yaml")
    has_section = chosen is not None and "script" in chosen.node
    if not has_section and not any(re.match(r"\+*script\.", a) for a in argv):
        return "config"
    check_groups(argv)
    return "script"


def check_path(key: str, path: Path) -> None:
    """Reject a folder that was found, not typed, if Hydra would interpolate a part of its name."""
    if "${" in str(path):
        raise bad(key, path, "Hydra would interpolate ${ in the folder's name", "rename the folder")


def offer_own(argv: list[str]) -> list[str]:
    """Accept `model=my_pkg.net.Net` as an option: the user's own code, with its constructor's arguments as settings.

    Typing the name also trusts its module; a recipe or a run folder cannot do that.
    """
    given = dict(a.split("=", 1) for a in argv if "=" in a)
    own = {g: [name for name in named(given.get(g, "")) if DOTTED.fullmatch(name)] for g in GROUPS}
    own = {group: names for group, names in own.items() if names}
    if not own:
        return argv
    for group in SEVERAL:
        sections = [name.rpartition(".")[2] for name in own.get(group, ())]
        if given.get(group, "").startswith("[") and len(set(sections)) < len(sections):
            double = next(name for name in sections if sections.count(name) > 1)
            rule = f"two of them are named {double}, and both would have the settings {group}.{double}.…"
            raise bad(group, given[group], rule, f"rename one of the classes, or leave one {double} out")
    for group, target in ((group, name) for group, names in own.items() for name in names):
        if not target.startswith("dtrain."):
            try:
                find(target, group)  # before anything refers to a setting of it
            except ValueError as error:
                raise with_needed(error, argv) from error
        bound = any("_partial_" in OmegaConf.load(CONF / group / f"{option}.yaml") for option in options_of(group))
        package = setting_prefix(group, target.rpartition(".")[2])  # logger=my_pkg.Mine: logger.Mine.SETTING
        needed = {"nodes": 1, "processes": None} if group == "cluster" else {}  # by dtrain, whatever the class takes
        store_option(group, target, {"_target_": target, **needed} | ({"_partial_": True} if bound else {}), package)
    # the section starts empty, so each of its settings is an addition
    argv = [re.sub(rf"^({'|'.join(own)})\.", r"++\g<0>", a) for a in argv]
    if re.fullmatch(r"\[.*\]", given.get("trust", "[]")) is None:  # not a list: rejected later with a message
        return argv
    trusted = trust_of(argv)
    return [*(a for a in argv if not a.startswith("trust=")), *([f"trust=[{','.join(trusted)}]"] if trusted else [])]


def named(value: str) -> list[str]:
    """Return the options in a value: one, those of a sweep (a,b), or several loggers or hooks ([a,b])."""
    return value.strip("[]").split(",")


def with_trust(argv: list[str]) -> list[str]:
    """Accept `--trust MODULE …`, as other programs spell it, for trust=[MODULE,…]."""
    listed: list[str] = []
    kept: list[str] = []
    words = iter(argv)
    reading = False
    for word in words:
        if word == "--trust" or word.startswith("--trust="):
            reading = word == "--trust"
            listed += [] if reading else word.partition("=")[2].split(",")
        elif reading and re.fullmatch(r"[^\W\d][\w.]*", word):
            listed.append(word)
        else:
            reading = False
            kept.append(word)
    if not listed:
        return argv if kept == argv else [*kept, "--trust"]  # without a module: refused like other unknown options
    return [*(a for a in kept if not a.startswith("trust=[")), f"trust=[{','.join([*trusted(kept), *listed])}]"]


def trusted(argv: list[str]) -> list[str]:
    found = [a.removeprefix("trust=").strip("[]").split(",") for a in argv if a.startswith("trust=[")]
    return [name.strip() for names in found for name in names if name.strip()]


def trust_of(argv: list[str]) -> list[str]:
    """Return the modules that these arguments trust: those in trust=[…] and those of dotted names typed as options."""
    given = dict(a.split("=", 1) for a in argv if "=" in a)
    listed = [word.strip() for word in given.get("trust", "[]").strip("[]").split(",")]
    names = [name for group in GROUPS for name in named(given.get(group, "")) if DOTTED.fullmatch(name)]
    modules = [name.rpartition(".")[0] for name in names if not name.startswith("dtrain.")]
    return [word for word in dict.fromkeys([*listed, *modules]) if word]


def store_option(group: str, name: str, section: dict[str, Any], package: str | None = None) -> None:
    ConfigStore.instance().store(group=group, name=name, node=OmegaConf.create(section), package=package)


def quote(path: Path | str) -> str:
    """Return a path as a quoted Hydra value, so that spaces, commas and equals signs are literal.

    In Hydra a backslash is an escape only before a quote.
    """
    return "'" + re.sub(r"(\\*)('|\Z)", lambda m: m[1] * 2 + m[2].replace("'", "\\'"), str(path)) + "'"


def unquoted(value: str) -> str:
    """Return a Hydra value without its quotes: the printed commands quote a folder like 0-optim.lr=0.1."""
    if len(value) < 2 or value[0] not in "'\"" or value[-1] != value[0]:
        return value
    return re.sub(rf"(\\+)({value[0]}|\Z)", lambda m: m[1][: len(m[1]) // 2] + m[2], value[1:-1])


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


def in_recipe(message: str, argv: list[str]) -> str:
    """Put the file and line in front of a message about a setting that only a recipe file has."""
    typed = {a.partition("=")[0].lstrip("+~"): unquoted(a.partition("=")[2]) for a in argv}
    key, path = re.split(r"[=:]", message, maxsplit=1)[0], Path(typed.get("recipe", "")).expanduser()
    if key in typed or not path.is_file():
        return message
    with contextlib.suppress(OSError, ValueError):
        word = re.compile(rf"(^|[\s/{{,]){re.escape(key.rpartition('.')[2])}\s*:")
        lines = [n for n, line in enumerate(read_text(path).splitlines(), 1) if word.search(line)]
        return f"{path}:{lines[0]}: {message}" if len(lines) == 1 else message
    return message


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


def store_as_run(run_dir: Path, overridden: list[str], as_fork: bool = False) -> None:
    """Store a run's config.yaml as a recipe: every value as it was, except the groups given on the command line.

    A resume therefore does not depend on the current content of conf/ or of a recipe.
    """
    config = completed(read_config(run_dir))
    choices = config.pop("choices", None) or {}
    if not isinstance(choices, dict):
        raise bad(
            "resume", run_dir, "its config.yaml is not that of a run", "choose another run; dtrain runs lists them"
        )
    for key in ("hydra", "defaults"):  # never written by dtrain; an untrusted one would name code to call
        config.pop(key, None)
    # trust must be typed again: the run folder may come from someone else
    for key in ("run_dir", "resume", "resume_allow", "dry_run", "force", "trust", *overridden):
        config.pop(key, None)
    if as_fork:
        config.pop("fork", None)
        config.pop("tags", None)
        if config.get("name") == f"{choices.get('model')}-{choices.get('strategy')}":  # not typed
            config.pop("name")
    as_dict(config.get("train")).pop("stop_after", None)  # applied only to the launch that stopped
    for name in ("path", "python"):  # must be typed again, like all code; see check_program
        as_dict(config.get("script")).pop(name, None)
    if isinstance(config.get("cluster"), dict):
        for name in CODE:  # must also be typed again, or come from conf/
            config["cluster"].pop(name, None)
    for section in as_dict(config.get(LOGGER)).values():  # a tracker's server gets credentials: see checks/loggers.py
        for name in ADDRESSES:
            as_dict(section).update({name: None} if name in as_dict(section) else {})
    # the sections of loggers and hooks are complete: none is chosen, and the section is merged into nothing
    chosen = {g: choices[g] for g in GROUPS if g in choices and g not in (*overridden, *SEVERAL)}
    for group, option in chosen.items():
        if not isinstance(option, str) or not OPTION.fullmatch(option):  # Hydra would accept a path to any file
            rule = f"its config.yaml has choices.{group}={option!r}, which is not an option"
            raise bad("resume", run_dir, rule, f"give one: {group}={' or '.join(options_of(group)[:3])}, …")
        if option not in options_of(group) and isinstance(config.get(group), dict):  # the user's own, or removed since
            store_option(group, option, config[group])
    defaults = [{f"override /{g}": option} for g, option in chosen.items()]
    node = OmegaConf.create({"defaults": [*defaults, "_self_"], **config})
    ConfigStore.instance().store(group="recipe", name="as-run", node=node, package="_global_")


def read_config(run_dir: Path) -> dict[str, Any]:
    try:
        config = read_run(run_dir, "resume")
    except OSError as error:
        rule = f"its config.yaml cannot be read ({error.strerror})"
        raise bad("resume", run_dir, rule, "choose another run; dtrain runs lists them") from error
    if not isinstance(config.get("script" if is_script(config) else "train"), dict):
        raise bad(
            "resume", run_dir, "its config.yaml is not that of a run", "choose another run; dtrain runs lists them"
        )
    return config
