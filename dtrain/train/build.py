"""A run's model and first weights, from its configuration: for training, sampling, evaluation and export alike."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

from dtrain.checkpoint.initial_weights import Drawn, Loaded, log, source_of
from dtrain.config.build import build, locate
from dtrain.config.files import TARGET
from dtrain.models import layers, lora, user_model
from dtrain.runs.folder import latest_checkpoint
from dtrain.util.collective import from_rank_0
from dtrain.util.meta_device import on_meta


def plain(cfg: Any, trust: Iterable[str] = ()) -> nn.Module:
    """The model as its class or function makes it, for use without dtrain; what dtrain makes is on the meta device."""
    build_model = functools.partial(build, cfg.model, trust)
    is_ours = cfg.model[TARGET].startswith("dtrain.")
    return (user_model.construct if is_ours else user_model.on_cpu)(build_model, cfg.train.seed)


def make(cfg: Any, trust: Iterable[str] = ()) -> nn.Module:
    """The model on the meta device, without memory; with its loss, and with adapters if it has any."""
    build_model = functools.partial(build, cfg.model, trust)
    model = user_model.construct(build_model, cfg.train.seed, locate(cfg.model[TARGET], trust))
    loss = build(cfg.get("loss"), trust)  # old runs have no such section
    user_model.complete(model, loss, build_model, cfg.train.seed)
    for module in model.modules():
        if isinstance(module, layers.Head):
            module.fused = {"auto": None}.get(cfg.get("fused_loss", "auto"), cfg.get("fused_loss"))
    with on_meta():
        if cfg.get("lora", {}).get("rank"):
            lora.apply(model, **cfg.lora)
    return model


def set_num_targets(model: Any, *datasets: Any) -> None:
    """Tell a model that asks for it how many targets each sample has, if all have the same number."""
    if hasattr(model, "num_targets"):
        counts = {getattr(dataset, "num_targets", None) for dataset in datasets if dataset is not None}
        model.num_targets = counts.pop() if len(counts) == 1 else None


def first_weights(cfg: Any) -> Drawn:
    """Return the source of the weights for a new or resumed run. All ranks must call it."""
    frozen = cfg.get("lora", {}).get("rank")  # frozen base weights are not in any checkpoint
    run_dir = Path(cfg.run_dir)
    if not frozen and from_rank_0(lambda: latest_checkpoint(run_dir) is not None, f"reading {run_dir}"):
        return Drawn(cfg.train.seed)  # resuming overwrites all weights, and the init_from files may be gone
    return original_weights(cfg, cfg.trust)


def original_weights(cfg: Any, trust: Iterable[str]) -> Drawn:
    """Return the source of a run's initial weights: random initialization, or init_from."""
    if not cfg.get("init_from"):
        return Drawn(cfg.train.seed)
    source = source_of(Path(cfg.init_from).expanduser(), cfg.model)
    first = Loaded(cfg.train.seed, source, make(cfg, trust))
    new = f"; randomly initialized: {', '.join(first.drawn)}" if first.drawn else ""
    log.info("%d weights from %s%s", len(first.names), cfg.init_from, new)
    return first
