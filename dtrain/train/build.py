"""A run's model and first weights, from its configuration: for training, sampling, evaluation and export alike."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dtrain import config
from dtrain.agreement import from_rank_0
from dtrain.models import lora, parts, plain
from dtrain.rundir import latest_checkpoint
from dtrain.weights import Drawn, Loaded, log, source_of


def make(cfg: Any, trust: Iterable[str] = ()) -> nn.Module:
    """The model on the meta device, without memory; with its loss, and with adapters if it has any."""
    build = functools.partial(config.build, cfg.model, trust)
    model = plain.construct(build, cfg.train.seed)
    plain.complete(model, config.build(cfg.get("loss"), trust), build, cfg.train.seed)  # old runs have no such section
    for module in model.modules():
        if isinstance(module, parts.Head):
            module.fused = {"auto": None}.get(cfg.get("fused_loss", "auto"), cfg.get("fused_loss"))
    with torch.device("meta"):
        if cfg.get("lora", {}).get("rank"):
            lora.apply(model, **cfg.lora)
    return model


def first_weights(cfg: Any) -> Drawn:
    """Where the weights of a run that begins or goes on come from. All its ranks call it."""
    frozen = cfg.get("lora", {}).get("rank")  # the weights beside adapters, which no checkpoint has
    run_dir = Path(cfg.run_dir)
    if not frozen and from_rank_0(lambda: latest_checkpoint(run_dir) is not None, f"reading {run_dir}"):
        return Drawn(cfg.train.seed)  # a resume overwrites them all, and init_from may be gone
    return original_weights(cfg, cfg.trust)


def original_weights(cfg: Any, trust: Iterable[str]) -> Drawn:
    """Where a run's weights came from when it began: drawn, or read from init_from."""
    if not cfg.get("init_from"):
        return Drawn(cfg.train.seed)
    source = source_of(Path(cfg.init_from).expanduser(), cfg.model)
    first = Loaded(cfg.train.seed, source, make(cfg, trust))
    new = f"; new, and drawn: {', '.join(first.drawn)}" if first.drawn else ""
    log.info("%d weights from %s%s", len(first.names), cfg.init_from, new)
    return first
