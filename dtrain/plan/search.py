"""All layouts of a model on a cluster that the launcher would accept, predicted and ranked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dtrain.plan.predict import Prediction, predict


def search(config: Mapping[str, Any], typed: tuple[str, ...] = ()) -> list[Prediction]:
    """Best first; those that do not fit after those that do. typed: the settings that stay as they are composed."""
    found = predict(config)
    return [] if found is None else [found]


def words(prediction: Prediction, config: Mapping[str, Any]) -> list[str]:
    """The overrides to type for that layout."""
    layout = prediction.layout
    return [f"strategy={layout.strategy}", f"train.micro_batch_size={layout.micro_batch_size}"]
