"""The valid range of each setting: checked for a new configuration and when a run's file is read."""

from __future__ import annotations

import math
from typing import Any

from dtrain.config import elastic
from dtrain.config.files import SECRET, default_of, default_options, options_of
from dtrain.config.needed import data_of
from dtrain.errors import bad

AT_LEAST = {
    "train.steps": 1, "train.global_batch_size": 1, "train.micro_batch_size": 1, "train.log_every": 1,
    "ema.decay": 0, "train.eval_every": 0, "train.eval_batches": 0, "train.stop_after": 1, "train.seed": 0,
    "train.loader_workers": 0, "guard.replicas_every": 0, "guard.replay_every": 0, "lora.rank": 0,
    "checkpoint.every": 0, "checkpoint.keep": 1, "checkpoint.incremental": 0, "checkpoint.peer_every": 0,
    "activation_checkpointing_every": 1,
    "model.num_layers": 1, "model.dim": 1, "model.num_heads": 1, "model.num_kv_heads": 1, "model.vocab_size": 1,
    "model.vocab_multiple": 1, "model.hidden_dim": 1, "model.rope_factor": 1, "model.rope_original_len": 1,
    "model.seq_len": 1, "model.dropout": 0, "data.seq_len": 1, "data.num_samples": 1,
    "data.seed": 0, "model.image_size": 1, "model.channels": 1, "model.num_classes": 1, "model.patch_size": 1,
    "model.width": 1,
    "optim.weight_decay": 0, "optim.momentum": 0, "optim.base_batch_size": 1, "optim.ns_steps": 1,
    "optim.adamw_weight_decay": 0,
    "schedule.warmup_steps": 0, "schedule.min_ratio": 0, "schedule.every": 1, "optim.alpha": 0,
    "cluster.nodes": 1, "cluster.processes": 1, "cluster.max_restarts": 0, "cluster.grace_s": 0,
    "cluster.gpus_per_node": 0, "cluster.max_idle_starts": 1, "cluster.array_parallelism": 1, "cluster.start_s": 1,
    "cluster.system_metrics_every": 0, "cluster.metrics_port": 1,
    "cluster.hang_timeout": 5, "cluster.cpus_per_task": 1, "cluster.master_port": 1, "cluster.node_rank": 0,
    "cluster.cpus": 1, "cluster.ttl_s": 0,
    "precision.init_scale": 1, "precision.growth_interval": 1, "strategy.bucket_mb": 1, "strategy.replica_size": 1,
    "strategy.forward_prefetch": 0, "strategy.backward_prefetch": 0, "strategy.stages_per_rank": 2,
    "profile.start": 3, "profile.num_steps": 1, "strategy.every": 1, "strategy.gather_mb": 1, "strategy.whole_below": 0,
    "strategy.staleness": 0, "strategy.slow_rank": 0, "strategy.slow_factor": 1, "strategy.trace": 0,
    "strategy.compress_rank": 1, "strategy.compress_warmup": 0, "strategy.fragments": 1, "strategy.outer_momentum": 0,
}  # fmt: skip
MORE_THAN = {
    "model.rope_theta": 0, "model.norm_eps": 0, "lora.alpha": 0, "optim.lr": 0, "optim.eps": 0, "schedule.decay": 0,
    "optim.adamw_lr": 0, "optim.adamw_eps": 0, "optim.layer_decay": 0,
    "schedule.power": 0, "schedule.factor": 0,
    "train.epochs": 0,
    "train.max_grad_norm": 0, "data.val_fraction": 0, "strategy.compress_ratio": 0, "strategy.outer_lr": 0,
}  # fmt: skip
LESS_THAN = {
    "ema.decay": 1,
    "optim.momentum": 1,
    "optim.alpha": 1,
    "model.dropout": 1,
    "data.val_fraction": 1,
    "strategy.outer_momentum": 1,
}
AT_MOST = {
    "cluster.metrics_port": 65535,
    "optim.layer_decay": 1,
    "optim.ns_steps": 99,
    "schedule.min_ratio": 1,
    "schedule.decay": 1,
    "schedule.factor": 1,
    "strategy.compress_ratio": 1,
    "model.num_layers": 10_000,
}  # building a layer takes about 1 ms


def check_ranges(flat: dict[str, Any]) -> None:
    for key, value in flat.items():
        if value == "???" or (key == "data.path" and not value):
            group = key.partition(".")[0]
            option = flat.get(f"choices.{group}")
            more = f"   (dtrain explain {group}={option})" if option else ""
            model, usual = str(flat.get("choices.model")), default_options()["data"]
            own = data_of(model) if model in options_of("model") else usual  # digits for convnet
            other = own if own != usual else "synthetic"
            trial = f"; to try it without files: data={other}" if key == "data.path" else ""
            raise bad(key, "", "is required, and has no value", f"{key}=…{more}{trial}")
        if SECRET.search(key) and value:
            raise bad(
                key,
                "…",
                "looks like a secret, and a configuration is written to disk in several places",
                "give it in an environment variable",
            )
        if key == "optim.lr_multipliers":
            check_multipliers(key, value or [])
        if key in ("optim.betas", "optim.adamw_betas") and (
            len(value) != 2 or not all(0 <= beta < 1 for beta in value)
        ):
            raise bad(key, value, "must be two numbers, each at least 0 and less than 1", f"'{key}=[0.9,0.95]'")
        if key == "name" and (not value.strip() or "/" in value):
            raise bad(
                key,
                value,
                "is part of the run folder's name: it must not be empty or contain a slash",
                f"{key}={value.replace('/', '-').strip(' .-') or 'my-run'}",
            )
        if isinstance(value, str) and key in ("cluster.processes", "cluster.nodes"):
            elastic.parse(key.removeprefix("cluster."), value)
        if not isinstance(value, (int, float)):
            continue
        if isinstance(value, int) and abs(value) >= 2**63:
            raise bad(key, value, "must fit in 64 bits", f"{key}=1")
        if isinstance(value, float) and not math.isfinite(value):
            raise bad(key, value, "must be a finite number", f"{key}={example(key, '1')}")
        if key in AT_LEAST and value < AT_LEAST[key]:
            raise bad(key, value, f"must be at least {AT_LEAST[key]}", f"{key}={example(key, AT_LEAST[key])}")
        if key in AT_MOST and value > AT_MOST[key]:
            raise bad(key, value, f"must be at most {AT_MOST[key]}", f"{key}={AT_MOST[key]}")
        if key in MORE_THAN and not value > MORE_THAN[key]:
            off = f", or {key}=null   (no clipping)" if key == "train.max_grad_norm" else ""
            raise bad(key, value, f"must be more than {MORE_THAN[key]}", f"{key}={example(key, 0.1)}{off}")
        if key in LESS_THAN and not value < LESS_THAN[key]:
            raise bad(
                key, value, f"must be less than {LESS_THAN[key]}", f"{key}={0.999 if key == 'ema.decay' else 0.1}"
            )


def example(key: str, otherwise: object) -> object:
    """Return the default of a setting if it is a number in range: the limit itself may break another rule."""
    value = default_of(key)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return otherwise
    fits = AT_LEAST.get(key, value) <= value <= AT_MOST.get(key, value) and value > MORE_THAN.get(key, -math.inf)
    return value if fits else otherwise


def check_multipliers(key: str, multipliers: Any) -> None:
    for text in multipliers if isinstance(multipliers, list) else ():
        pattern, _, factor = str(text).rpartition(":")
        try:
            usable = bool(pattern) and 0 < float(factor) < math.inf
        except ValueError:
            usable = False
        if not usable:
            raise bad(
                key, text, "must be a name pattern, a colon and a positive number", f"'{key}=[{text or '*'}:0.1]'"
            )
