"""How long a run is: train.steps, or train.epochs, whose steps the ranks compute once they have read the data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Any

from dtrain.config.files import section
from dtrain.errors import bad


def keep_one_length(config: dict[str, Any], overrides: Iterable[str]) -> None:
    """Keep one of the two settings and set the other to null: what was typed wins over a recipe or a resumed run."""
    train = config.get("train")
    if not isinstance(train, dict):
        return  # a user's own program, or a mistake that the schema reports
    steps, epochs = train.get("steps"), train.get("epochs")
    typed = {word.partition("=")[0].lstrip("+") for word in overrides}
    if epochs is None:
        if steps is None and "steps" in train:
            raise bad("train.steps", None, "a run needs a length", "train.steps=300, or train.epochs=3")
    elif "train.steps" in typed and steps is not None:
        if "train.epochs" in typed:
            rule = f"train.steps={steps} is given, too, and each of them says how long the run is"
            raise bad("train.epochs", epochs, rule, f"leave out train.steps={steps}, or train.epochs={epochs}")
        train["epochs"] = None
    else:
        train["steps"] = None


def steps_of(train: Mapping[str, Any], num_samples: int | None, data: str) -> int:
    """Return the steps of the whole run: as many as take each sample `epochs` times; the last batch may reach further.

    num_samples: of one epoch; None: the data cannot say.
    """
    if train.get("epochs") is None:
        return int(train["steps"])
    if num_samples is None:
        rule = f"data={data} is a stream that does not say how many samples an epoch has"
        raise bad("train.epochs", train["epochs"], rule, "train.steps=1000, or give the data set __len__()")
    passes = Fraction(str(train["epochs"]))  # as typed: 1.1 * 100 / 10 is 11.000000000000002 in floating point
    return max(1, math.ceil(passes * num_samples / train["global_batch_size"]))


def check_reaches(config: Mapping[str, Any], total: int, step: int, is_saved: bool) -> None:
    """Reject epochs that end before the loaded checkpoint. is_saved: it may be the last of a run of these epochs."""
    epochs = config["train"].get("epochs")
    if epochs is None or not step or total > step or (is_saved and total == step):
        return
    rule = f"is {total} steps, counted from step 0 of the first run, and the checkpoint has {step}"
    fix = f"train.epochs={math.ceil(2 * step / total * float(epochs))}"
    raise bad("train.epochs", epochs, rule, fix + (" 'resume_allow=[train.epochs]'" if config.get("resume") else ""))


def last_step(train: Mapping[str, Any], summary: Mapping[str, Any]) -> int | None:
    """Return the step after which this launch is done. summary: of the run, which has the steps of its epochs.

    None: not known before the ranks have read the data.
    """
    same = summary.get("epochs") == train.get("epochs")
    total = summary.get("total_steps") if train["steps"] is None and same else train["steps"]
    known = [int(steps) for steps in (total, train["stop_after"]) if steps is not None]
    return min(known) if total is not None else None


def of_warmup(config: Mapping[str, Any], steps: int) -> Iterator[str]:
    """Warn of a warm-up that is longer than the run, and that somebody chose, or a recipe.

    A first try of a few steps keeps the default without a word.
    """
    warmup, chosen = config["schedule"].get("warmup_steps"), str(config["choices"].get("schedule"))
    if not isinstance(warmup, int) or warmup <= steps or not is_own_value(chosen, warmup):
        return
    epochs = config["train"].get("epochs")
    length = f"train.steps={steps}" if epochs is None else f"{steps} steps of train.epochs={epochs}"
    yield (
        f"schedule.warmup_steps={warmup} is longer than the run, {length}: the learning rate only reaches "
        f"{100 * steps / (warmup + 1):.2g}% of its peak; fix: schedule.warmup_steps={steps // 10}"
    )


def is_own_value(option: str, warmup: int) -> bool:
    try:
        return bool(section("schedule", option).get("warmup_steps") != warmup)
    except OSError:  # an option of the user's own
        return True
