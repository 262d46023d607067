"""What a search was asked for: its options, the settings that vary, and those that do not. Typed options win."""

from __future__ import annotations

import difflib
import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from dtrain.commands.search.asha import Asha, rung_steps
from dtrain.commands.search.pbt import Pbt, boundary_steps
from dtrain.commands.search.space import distribution, draw, generator, overrides_of
from dtrain.config.files import CODE, GROUPS, RECIPES, known_settings
from dtrain.config.hydra_errors import explain
from dtrain.config.untrusted import read
from dtrain.errors import bad
from dtrain.launch.compose import compose
from dtrain.runs.metrics import is_name, larger_is_better

COMMON = {
    "algorithm": "optuna", "parallel": "1", "metric": "val_loss", "direction": "", "seed": "0", "dir": "", "detach": "",
}  # fmt: skip
OF_ALGORITHM = {  # "": depends on train.steps
    "optuna": {"trials": "20", "sampler": "tpe"},
    "asha": {"trials": "20", "factor": "3", "min_steps": ""},
    "bohb": {"trials": "20", "factor": "3", "min_steps": ""},
    "pbt": {"population": "4", "every": "", "quantile": "0.25", "factors": "0.8,1.2", "resample": "0.25"},
}
SAME = {"trials": "population", "population": "trials"}  # how many runs, by algorithm
AT_LEAST = {"trials": 1, "parallel": 1, "seed": 0, "factor": 2, "min_steps": 1, "population": 2, "every": 1}
METRICS = (
    "val_loss", "val_accuracy", "val_top5", "val_perplexity", "train_loss", "tokens_per_s", "mfu", "peak_mem_gib",
    "wall_s",
)  # fmt: skip
DRAWN = 4  # points that are composed to check the settings
MOST_EVEN = 20  # a range over more than this factor is proposed on a log scale
# What PBT may change in the middle of a run: the weights, the optimizer's state and the order of the data stay valid.
LARGE_IS_GOOD = ("val_accuracy", "val_top5", "tokens_per_s", "mfu")  # for these, direction=maximize is the default
CHANGEABLE = re.compile(r"(optim|schedule)\.[a-z]\w*|train\.max_grad_norm|model\.dropout")


@dataclass(frozen=True)
class Request:
    options: dict[str, str]  # the keys of COMMON and of the algorithm
    space: list[Override]
    fixed: list[str]

    @property
    def sign(self) -> int:
        return 1 if self.options["direction"] == "minimize" else -1


def read_request(argv: Sequence[str]) -> Request:
    recipe = next((a.partition("=")[2] for a in argv if a.startswith("recipe=")), None)
    section: Any = {}
    if recipe:
        path = Path(recipe).expanduser() if recipe.endswith((".yaml", ".yml")) else RECIPES / f"{recipe}.yaml"
        if path.is_file():
            section = recipe_section(path)
            check_space(path, section)
    asked = {k: str(v) for k, v in section.items() if k != "space"}
    overrides = [str(word) for word in section.get("space", [])]
    known = {key for options in (COMMON, *OF_ALGORITHM.values()) for key in options}
    typed = {}
    for word in argv:
        key, equals, value = word.partition("=")
        if word == "--dry-run" or word.lstrip("+").lower() == "dry_run=true":
            raise no_preview(argv, known)
        if word.startswith("-") or not equals:
            raise ValueError(f"{word}: is not understood as key=value\n  fix: dtrain search --help")
        if key in known:
            typed[key] = value
        else:
            check_word(key, value, known)
            overrides.append(word)
    options = check_options(asked, typed, has_own_metrics(overrides))
    # typed overrides win over the recipe's
    parsed = {o.key_or_group: o for o in parse(overrides)}
    space = [o for o in parsed.values() if o.is_sweep_override()]
    if not space:
        raise bad("search", "", "nothing varies", "e.g. 'optim.lr=tag(log,interval(1e-4,1e-2))'")
    for override in space:
        try:
            distribution(override)
        except ValueError as error:
            if "  fix: " in str(error):
                raise
            key = override.key_or_group
            why = f"is not a search space ({str(error).strip().rstrip('.')})"
            raise bad(
                key, override.get_value_string(), why, f"{key}=interval(LOW,HIGH), range(FROM,TO) or a,b"
            ) from error
    return Request(options, space, [str(o.input_line) for o in parsed.values() if not o.is_sweep_override()])


def no_preview(argv: Sequence[str], options: set[str]) -> ValueError:
    """Refuse dry_run=true: no trial would train, and a search chooses trials from the results of others."""
    words = [word for word in argv if word.partition("=")[0] not in (*options, "--dry-run", "dry_run", "+dry_run")]
    fixed = [word for word in words if not parse([word])[0].is_sweep_override()]
    command = shlex.join(["dtrain", "launch", *fixed, "dry_run=true"])
    rule = "a search chooses its runs from the results of others, so there are none to show"
    return bad("dry_run", "true", rule, f"leave it out; {command}   (shows one run)")


def check_word(key: str, value: str, options: set[str]) -> None:
    """Refuse a misspelt option of the search, and a range in another program's notation."""
    near = difflib.get_close_matches(key, options, 1, 0.75)
    if near and key not in known_settings():
        raise ValueError(f"{key}: there is no such option\n  fix: did you mean {near[0]}={value or '…'}?")
    low, dots, high = value.partition("..")
    try:
        span = float(high) / float(low) if dots and float(low) > 0 else 1.0
    except ValueError:  # text with dots: a path, or a name
        return
    if dots:
        interval = f"interval({low},{high})"
        fix = f"'{key}={f'tag(log,{interval})' if span > MOST_EVEN else interval}'"
        raise bad(key, value, "is not how a search is told a range", fix)


def has_own_metrics(overrides: Sequence[str]) -> bool:
    """May these runs have metrics of the user's own? From hooks, or from a model or a loss with eval_metrics."""
    words = dict(word.lstrip("+").split("=", 1) for word in overrides if "=" in word)
    own = any("." in words.get(key, "") or f"{key}._target_" in words for key in ("model", "loss"))
    return own or words.get("hooks", "none") != "none" or any(word.startswith("hooks.") for word in words)


def check_options(asked: dict[str, str], typed: dict[str, str], may_be_own: bool = False) -> dict[str, str]:
    """Return all options of the algorithm. asked: by a recipe, whose options of another algorithm do not count.

    may_be_own: the metric may be one of the user's own.
    """
    algorithm = typed.get("algorithm", asked.get("algorithm", COMMON["algorithm"]))
    if algorithm not in OF_ALGORITHM:
        raise bad("algorithm", algorithm, f"must be one of {', '.join(OF_ALGORITHM)}", "algorithm=asha")
    defaults = COMMON | OF_ALGORITHM[algorithm]
    if algorithm != asked.get("algorithm", COMMON["algorithm"]):
        asked = {k: v for k, v in asked.items() if k in defaults or not any(k in o for o in OF_ALGORITHM.values())}
    for key, value in (asked | typed).items():
        if key not in defaults:
            rule = f"is not an option of algorithm={algorithm}" if key in typed else "there is no such setting"
            fix = f"use one of {', '.join(defaults)}, space"
            if key in SAME and SAME[key] in defaults:
                fix = f"{SAME[key]}={value}"
            raise bad(key if key in typed else f"search.{key}", value, rule, fix)
    options = defaults | asked | typed
    for key in AT_LEAST.keys() & options.keys():
        value, least = options[key], AT_LEAST[key]
        if value != defaults[key] and (not value.isdecimal() or int(value) < least):
            raise bad(key, value, f"must be a whole number, at least {least}", f"{key}={defaults[key] or least}")
    metric = options["metric"]
    if metric not in METRICS:
        near = difflib.get_close_matches(metric, METRICS, 1, 0.8)
        if not may_be_own or not is_name(metric) or near:
            hint = f"did you mean {near[0]}? " if near else ""
            more = ", or one of your own: hooks=… (docs/your-own.md#hooks)"
            raise bad("metric", metric, "is not in a run's summary", f"{hint}metric can be {', '.join(METRICS)}{more}")
        if not options["direction"] and larger_is_better(metric) is None:
            raise bad(
                "metric", metric, "its name does not tell which values are good", "direction=minimize or maximize"
            )
    is_large_good = metric in LARGE_IS_GOOD if metric in METRICS else larger_is_better(metric)
    options["direction"] = options["direction"] or ("maximize" if is_large_good else "minimize")
    for key, allowed in (("direction", ("minimize", "maximize")), ("sampler", ("tpe", "random"))):
        if key in options and options[key] not in allowed:
            meant = [name for name in allowed if name.startswith(options[key].lower()[:3])] or [defaults[key]]
            fix = f"{key}={meant[0] or ('maximize' if is_large_good else 'minimize')}"
            raise bad(key, options[key], f"must be {' or '.join(allowed)}", fix)
    for key, rule, is_good in (
        ("quantile", "more than 0 and at most 0.5", lambda share: 0 < share <= 0.5),
        ("resample", "between 0 and 1", lambda share: 0 <= share <= 1),
    ):
        if key in options and not is_good(number(key, options[key])):
            raise bad(key, options[key], f"must be {rule}", f"{key}={defaults[key]}")
    if "factors" in options and not all(0 < f < math.inf and f != 1 for f in factors(options)):
        raise bad("factors", options["factors"], "must be positive numbers other than 1", "factors=0.8,1.2")
    return options


def number(key: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise bad(key, text, "must be a number", f"{key}=0.25") from None


def factors(options: dict[str, str]) -> tuple[float, ...]:
    return tuple(number("factors", text) for text in options["factors"].strip("[]").split(","))


def check_settings(request: Request) -> None:
    """Compose a few points of the search, so that a mistake is met before the first trial.

    One point that can be composed is enough: others may be refused as trials.
    """
    if any(word.startswith("script=") for word in request.fixed):
        return
    space = {str(o.key_or_group): distribution(o) for o in request.space}
    mistake: ValueError | None = None
    for number in range(DRAWN):
        try:
            compose([*request.fixed, *overrides_of(draw(space, generator(request.options["seed"], "check", number)))])
        except ValueError as error:
            mistake = mistake or error
        else:
            return
    assert mistake is not None
    raise mistake


def algorithm(request: Request) -> Asha | Pbt:
    """Build ASHA, BOHB or PBT, after checking the request against the settings of the runs."""
    options, space = request.options, {str(o.key_or_group): distribution(o) for o in request.space}
    name = options["algorithm"]
    for word in request.fixed:
        if word.startswith(("run_dir=", "resume=", "resume_allow=", "train.stop_after=")):
            key, _, value = word.partition("=")
            raise bad(key, value, f"is set by algorithm={name} for each run", "leave it out")
    for override in request.space:
        key, value = str(override.key_or_group), override.get_value_string()
        if key in ("train.steps", "train.stop_after"):
            rule = f"algorithm={name} pauses trials by steps, so all of them need the same number"
            raise bad(key, value, rule, f"{key}=N, or algorithm=optuna")
        if name == "pbt" and not CHANGEABLE.fullmatch(key):
            rule = "algorithm=pbt changes settings in the middle of a run, and this one cannot change there"
            fix = "vary optim.*, schedule.*, train.max_grad_norm or model.dropout; or algorithm=asha"
            raise bad(key, value, rule, fix)
        choices = getattr(space[key], "choices", ())
        low = getattr(space[key], "low", None)
        if name == "pbt" and (any(isinstance(c, bool) for c in choices) or (0 in choices and key == "optim.momentum")):
            rule = "decides which state the optimizer has, and algorithm=pbt keeps that state"
            raise bad(key, value, rule, f"{key}=… for all runs, or algorithm=asha")
        if name == "pbt" and key == "optim.momentum" and low == 0:
            rule = "at 0 the optimizer has no momentum, and algorithm=pbt keeps its state"
            raise bad(key, value, rule, f"{key}=interval(0.1,0.99)")
    config = compose([*request.fixed, *overrides_of(draw(space, generator(options["seed"])))])
    steps = config["train"]["steps"]
    if steps is None:
        rule = (
            f"algorithm={name} pauses trials by steps, and those of an epoch are not known before a run reads its data"
        )
        raise bad("train.epochs", config["train"]["epochs"], rule, "train.steps=N, or algorithm=optuna")
    if options["metric"].startswith("val_") and not config["train"]["eval_batches"]:
        rule = "the runs do not evaluate (train.eval_batches=0)"
        raise bad("metric", options["metric"], rule, "train.eval_batches=8, or metric=train_loss")
    seed, sign = int(options["seed"]), request.sign
    if name == "pbt":
        every = int(options["every"] or max(1, steps // 10))
        if every >= steps:
            raise bad("every", every, f"must be less than train.steps={steps}", f"every={max(1, steps // 10)}")
        quantile, resample = float(options["quantile"]), float(options["resample"])
        boundaries, population = boundary_steps(every, steps), int(options["population"])
        return Pbt(space, boundaries, population, quantile, factors(options), resample, sign, seed)
    factor = int(options["factor"])
    min_steps = int(options["min_steps"] or max(1, steps // factor**2))
    if min_steps >= steps:
        rule = f"must be less than train.steps={steps}, which is the last rung"
        raise bad("min_steps", min_steps, rule, f"min_steps={max(1, steps // factor**2)}")
    rungs = rung_steps(min_steps, steps, factor)
    return Asha(space, rungs, factor, int(options["trials"]), sign, seed, is_bohb=name == "bohb")


def recipe_section(path: Path) -> Any:
    try:
        tree = read(path)
    except Exception as error:  # yaml errors have many types; each means that the file is not a recipe
        raise bad("recipe", path, f"cannot be read: {error}", "correct the file") from error
    return (tree.get("search") or {}) if isinstance(tree, dict) else {}


def check_space(path: Path, section: Any) -> None:
    """Check an untrusted recipe's space, which becomes overrides of the trials: it may set only what a recipe may."""
    space = section.get("space", []) if isinstance(section, dict) else None
    if not isinstance(space, list):
        raise bad("recipe", path, "its `search` must be a section with a list `space`", "dtrain recipes show search-lr")
    for override in parse([str(word) for word in space]):
        key, line = str(override.key_or_group), str(override.input_line)
        if not override.is_sweep_override():
            raise bad("search.space", line, "must vary", "put a fixed setting into the recipe itself")
        code = any(key == f"cluster.{name}" or key.startswith(f"cluster.{name}.") for name in CODE)
        typed = key.startswith(("hydra", "trust", "resume", "recipe", "run_dir"))
        own = key in GROUPS and "." in line.partition("=")[2]  # my_pkg.Net: typing a name would trust it
        if code or typed or own or not re.fullmatch(r"[a-z]\w*(\.[a-zA-Z]\w*)*", key) or "${" in line:
            raise bad(
                "search.space",
                line,
                "code and trust may be given on the command line only",
                f"give it there: '{key}=…'",
            )


def parse(overrides: list[str]) -> list[Override]:
    try:
        return OverridesParser.create().parse_overrides(overrides)
    except HydraException as error:
        raise ValueError(explain(error)) from error
