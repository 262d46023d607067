"""The user's own classes as options (`model=my_pkg.net.Net`), and the modules that a command line trusts."""

from __future__ import annotations

import re

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from dtrain.config.files import CONF, GROUPS, SEVERAL, options_of, setting_prefix
from dtrain.config.meant_option import OWN as DOTTED
from dtrain.config.needed import with_needed
from dtrain.config.source import find
from dtrain.errors import bad
from dtrain.launch.options import named, store_option


def offer_own(argv: list[str]) -> list[str]:
    """Accept `model=my_pkg.net.Net` as an option: the user's own code, with its constructor's arguments as settings.

    Typing the name also trusts its module; a recipe or a run folder cannot do that.
    """
    for group in GROUPS:  # those of an earlier launch in this process: a sweep's schedule=glob(*) would match them
        stored = ConfigStore.instance().repo.get(group, {})
        for name in [name for name in stored if DOTTED.fullmatch(name.removesuffix(".yaml"))]:
            del stored[name]
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
    listed = re.findall(r"[^\W\d][\w.]*", given.get("trust", ""))  # [a,b], or ['a','b'] of dtrain.fit
    names = [name for group in GROUPS for name in named(given.get(group, "")) if DOTTED.fullmatch(name)]
    modules = [name.rpartition(".")[0] for name in names if not name.startswith("dtrain.")]
    return [word for word in dict.fromkeys([*listed, *modules]) if word]
