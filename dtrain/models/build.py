"""A run's model and first weights, from its configuration: for training, sampling, evaluation and export alike."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from dtrain import config
from dtrain.models import lora, plain
from dtrain.weights import Drawn


def make(cfg: Any, trust: Iterable[str] = ()) -> nn.Module:
    """The model on the meta device, without memory; with its loss, and with adapters if it has any."""
    build = functools.partial(config.build, cfg.model, trust)
    model = plain.construct(build, cfg.train.seed)
    plain.complete(model, config.build(cfg.get("loss"), trust), build, cfg.train.seed)  # old runs have no such section
    with torch.device("meta"):
        if cfg.get("lora", {}).get("rank"):
            lora.apply(model, **cfg.lora)
    return model


def first_weights(cfg: Any) -> Drawn:
    """Where the first weights come from."""
    return Drawn(cfg.train.seed)
