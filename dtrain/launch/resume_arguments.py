"""Turn `resume=RUN` and `fork=RUN` into overrides: the config.yaml of that run is stored as a recipe."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from dtrain.checks.loggers import ADDRESSES
from dtrain.config.build import allowed, fewest, own_file
from dtrain.config.files import CODE, GROUPS, LOGGER, SEVERAL, TARGET, is_script, options_of, sections
from dtrain.config.meant_option import OWN as DOTTED
from dtrain.config.run_file import completed, read_run
from dtrain.config.untrusted import OPTION
from dtrain.errors import bad
from dtrain.launch.options import store_option
from dtrain.launch.quoting import check_path, quote, unquoted
from dtrain.launch.user_code import trust_of
from dtrain.runs.folder import latest_checkpoint
from dtrain.util.format import argument, as_dict, short_path


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
    argv = with_own_settings(argv, run_dir, overridden, f"resume={word}")
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
    argv = with_own_settings(argv, at.run_dir, overridden, f"fork={word}")
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


def with_own_settings(argv: list[str], run_dir: Path, overridden: list[str], typed: str) -> list[str]:
    """Let a class of the user that the run has take every setting of its constructor, not only those typed first.

    The class must be typed again, or trusted: the folder may come from someone else.
    """
    config = read_config(run_dir)
    own = {
        name: str(section[TARGET])
        for group in GROUPS
        if group in config and group not in overridden
        for name, section in sections(config, group).items()
        if isinstance(section, dict) and not str(section.get(TARGET, "dtrain.")).startswith("dtrain.")
    }
    trust = trust_of(argv)
    unnamed = {name: target for name, target in own.items() if not allowed(target, trust)}
    tops = fewest([target.partition(".")[0] for target in unnamed.values()])
    files = [own_file(top) for top in tops if top != "torch"]
    if unnamed and all(files) and not any(word.startswith("trust=[]") for word in argv):
        again = [f"{name}={target}" for name, target in unnamed.items()]
        modules = fewest([*trust, *(t.rpartition(".")[0] if t.startswith("torch.") else t.partition(".")[0]
                                    for t in unnamed.values())])  # fmt: skip
        fix = f"'trust=[{','.join(modules)}]'"
        if not any("." in name or as_dict(config.get("choices")).get(name) != own[name] for name in unnamed):
            fix = f"{' '.join(again)}, or {fix}"
        where = f"   (if that is your code: {', '.join(map(str, files))})" if files else ""
        rule = (
            f"the run has {', '.join(unnamed.values())}, and code is never taken from a run folder: it may not be yours"
        )
        raise ValueError(f"{typed}: {rule}\n  fix: {fix}{where}")
    for name in own:
        argv = [re.sub(rf"^{re.escape(name)}\.", r"++\g<0>", word) for word in argv]
    return argv


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
        name = config.pop("name", None)
        if isinstance(name, str) and name != f"{choices.get('model')}-{choices.get('strategy')}":  # typed
            config["name"] = f"{name.removesuffix('-fork')}-fork"  # the old name still means the old run
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
