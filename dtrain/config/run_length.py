"""How long a run is: train.steps, or train.epochs, whose steps the ranks compute once they have read the data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from dtrain.errors import bad


def settle(config: dict[str, Any], overrides: Iterable[str]) -> None:
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
    return max(1, math.ceil(train["epochs"] * num_samples / train["global_batch_size"]))


def last_step(train: Mapping[str, Any], summary: Mapping[str, Any]) -> int | None:
    """Return the step after which this launch is done. summary: of the run, which has the steps of its epochs.

    None: not known before the ranks have read the data.
    """
    total = train["steps"] if train["steps"] is not None else summary.get("total_steps")
    known = [int(steps) for steps in (total, train["stop_after"]) if steps is not None]
    return min(known) if total is not None else None
