"""Build everything that the training loop needs from a run's configuration, and load the newest good checkpoint."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dtrain.checkpoint import store
from dtrain.checkpoint.background import Saver
from dtrain.config import run_file
from dtrain.config.build import build
from dtrain.config.mesh import MeshSizes, batch_sizes, eval_batch_size
from dtrain.config.run_file import Settings
from dtrain.data.loader import Loader
from dtrain.optim import build as optimizers
from dtrain.runs.folder import newest_metrics, predicted, write_json
from dtrain.runs.recorder import Recorder
from dtrain.strategies.base import Strategy
from dtrain.train import build as models
from dtrain.train import metrics, process
from dtrain.train.pending import FinishedStep
from dtrain.train.process import log
from dtrain.train.spikes import SpikeError, Spikes


@dataclass
class Validation:
    """The held-out split, and how much of it an evaluation reads."""

    data: Loader
    batch_size: int
    num_batches: int


@dataclass
class Run:
    """One rank's run. `step` and `samples` are its position; `spikes`, `summary` and the last fields change, too."""

    folder: Path
    cfg: Settings
    device: torch.device
    model: nn.Module
    strategy: Strategy
    schedule: Callable[[int], float]
    mesh: MeshSizes
    train_data: Loader
    validation: Validation | None
    data_identity: str
    rate: metrics.Rate
    recorder: Recorder | None  # on rank 0
    summary: dict[str, Any]
    last_step: int
    step: int
    samples: int
    spikes: Spikes
    loaded_from: Path | None
    began: float
    num_skipped: int = 0
    step_times: list[float] = field(default_factory=list)
    recent: list[FinishedStep] = field(default_factory=list)  # the newest two, for train/rescue.py
    exposed_comm_s: float | None = None  # of a step, mean of the newest window (stragglers.py)

    def step_metrics(self, finished: FinishedStep) -> dict[str, Any]:
        """A step's line in metrics.jsonl."""
        rate, step_s = self.rate, finished.step_s
        exposed = {} if self.exposed_comm_s is None else {"exposed_comm_s": round(self.exposed_comm_s, 6)}
        return {
            "step": finished.step, "loss": finished.loss, "lr": finished.lr, "grad_norm": finished.grad_norm,
            "tokens": finished.samples * rate.tokens_per_sample, "tokens_per_s": rate.tokens_per_s(step_s),
            "step_s": step_s, "data_s": finished.data_s, "mfu": rate.mfu(step_s),
            "mem_gib": metrics.memory_gib(self.device), **exposed,
        }  # fmt: skip

    def checkpoint_meta(self) -> dict[str, Any]:
        """What a checkpoint says about the run, besides the strategy's state."""
        return {
            "samples": self.samples, "data": self.data_identity, "mesh": self.mesh.as_dict(),
            "world_size": dist.get_world_size(), "choices": dict(self.cfg.choices),
            "config_sha256": run_file.fingerprint(self.folder), "spikes": self.spikes.state(),
        }  # fmt: skip


def set_up(folder: Path, cfg: Settings, device: torch.device, saver: Saver) -> Run:
    """Build data, model and strategy, load the checkpoint, and write the first summary."""
    began = time.perf_counter()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    profiler = build(cfg.profile, cfg.trust).begin(folder, rank, device, cfg.nsys)
    batch_size, seed, trust = cfg.train.global_batch_size, cfg.train.seed, cfg.trust

    # ---- data, model, strategy -------------------------------------------------------------------------------
    data = build(cfg.data, trust)
    train_set = data.dataset("train")
    val_set = data.dataset("val") if cfg.train.eval_batches else None
    data_identity = process.check_same_start(folder, train_set, val_set)
    model = models.make(cfg, trust)  # on the meta device: the strategy decides which shard each rank holds
    precision = build(cfg.precision, trust)
    schedule = build(cfg.schedule, trust, partial=True, steps=cfg.train.steps)
    chosen: Strategy = build(cfg.strategy, trust)
    strategy = chosen.for_world(world_size)
    if strategy is not chosen:
        log.info("strategy=%s on one rank has nothing to shard: it runs as ddp", cfg.choices.strategy)
    strategy.folder = folder
    mesh = strategy.resolve_mesh(world_size, int(os.environ["LOCAL_WORLD_SIZE"]))
    _, micro_batch_size, accumulation = batch_sizes(cfg, mesh)
    make_optimizer = optimizers.factory(cfg.optim, trust, batch_size)
    strategy.setup(
        model,
        make_optimizer,
        precision=precision,
        device=device,
        first=models.first_weights(cfg),
        micro_batch_size=micro_batch_size,
        max_grad_norm=cfg.train.max_grad_norm,
        activation_checkpointing=cfg.activation_checkpointing,
        activation_checkpointing_every=cfg.activation_checkpointing_every,
        compile=cfg.compile,
        cuda_graphs=cfg.cuda_graphs,
        masked=getattr(train_set, "masked", False),
    )
    optimizers.check(make_optimizer, strategy.splits_weights())
    reading = {"pin_memory": device.type == "cuda", "workers": cfg.train.loader_workers}
    place = (seed, strategy.data_rank, strategy.data_ranks)
    train_data = Loader(train_set, batch_size, *place, **reading)
    validation = None
    if val_set is not None:
        size = eval_batch_size(len(val_set), batch_size, micro_batch_size, mesh)
        val_data = Loader(val_set, size, *place, **reading, shuffle=False)
        validation = Validation(val_data, size, min(cfg.train.eval_batches, len(val_set) // size))

    # ---- the newest good checkpoint of this run, whatever layout it was saved under ----------------------------
    found = load_newest(saver, cfg, strategy, data_identity)
    loaded_from, step, samples, spikes = found or (None, 0, 0, {})

    # ---- what will run -----------------------------------------------------------------------------------------
    last_step = min(cfg.train.steps, cfg.train.stop_after or cfg.train.steps)
    rate = metrics.Rate(model, train_data, batch_size, device, precision.dtype, world_size)
    summary = {
        "status": "running", "model": cfg.choices.model, "strategy": cfg.choices.strategy,
        "effective_strategy": cfg.choices.strategy if strategy is chosen else "ddp",
        "precision": cfg.choices.precision, "parameters": model.num_parameters,
        "trained_parameters": getattr(model, "num_trained", model.num_parameters), "mesh": mesh.as_dict(),
        "world_size": world_size, "global_batch_size": batch_size, "micro_batch_size": micro_batch_size,
        "accumulation": accumulation, "tokens_per_step": rate.tokens_per_step, "unit": rate.unit,
        "device": metrics.device_name(device), "compile": strategy.compile,
        "start_step": step, "total_steps": cfg.train.steps, "steps": step, "train_loss": None, "val_loss": None,
        "val_accuracy": None, "predicted": predicted(folder), "versions": metrics.versions(device),
    }  # fmt: skip
    recorder = Recorder(folder, step) if rank == 0 else None
    if recorder:
        if step == last_step:  # the run saved its last step but ended before writing its summary
            summary |= newest_metrics(folder)
        write_json(folder / "summary.json", summary)
        if strategy.compile != "none" and step < last_step:  # gpt2-1.5b: 8 s by blocks, 71 s whole
            log.info("compiling the model: the first step takes longer")
    if recorder:
        profiler.report = partial(report, recorder, summary)
    profiler.attach(strategy, train_data, step, last_step - step)  # wraps the steps to profile, if any
    every = cfg.checkpoint.peer_every or cfg.checkpoint.every
    if device.type == "cuda" and every and step - step % every + every < last_step:
        saver.prepare(strategy.state_dict())  # allocates memory for the copies while the first step compiles
    return Run(
        folder, cfg, device, model, strategy, schedule, mesh, train_data, validation, data_identity, rate, recorder,
        summary, last_step, step, samples, Spikes(cfg.train.spike, strategy, spikes), loaded_from, began,
    )  # fmt: skip


def report(recorder: Recorder, summary: dict[str, Any], step: int, **values: Any) -> None:
    """Record what a profile of some steps found."""
    summary.update(values)
    recorder.write(step=step, **values)


def load_newest(
    saver: Saver, cfg: Settings, strategy: Strategy, data_identity: str
) -> tuple[Path, int, int, dict[str, Any]] | None:
    """Load the newest good checkpoint of a run; return its path, step, samples and what it knows of spikes."""
    found = saver.newest_good(strategy.needed_to_resume())
    if found is None:
        return None
    path, manifest = found
    if manifest["data"] != data_identity and "data" not in cfg.resume_allow:
        raise ValueError(
            f"data: differs from what this run has trained on ({manifest['data']} then, {data_identity} now)\n"
            "  fix: restore the old data, or allow the new: 'resume_allow=[data]'"
        )
    state = strategy.state_dict()
    store.load(path, manifest, state)
    strategy.load_state_dict(state, manifest["extra"])
    log.info("resumed from %s", path)
    return path, manifest["step"], manifest["samples"], manifest.meta.get("spikes", {})


def roll_back(run: Run, saver: Saver) -> None:
    """After a spike: load the newest checkpoint, and pass over the samples of the spike from now on."""
    spike = run.spikes.rollback_from
    assert spike is not None
    saver.wait()
    known = run.spikes.passed_over
    found = load_newest(saver, run.cfg, run.strategy, run.data_identity)
    if found is None:
        fix = "a smaller checkpoint.every, or train.spike=skip"
        raise SpikeError(f"step {spike.step}: a spike, and there is no checkpoint to go back to. Fix: {fix}")
    run.loaded_from, run.step, run.samples, saved = found
    run.spikes.restore(saved | {"passed_over": known})
    run.spikes.pass_over(spike, run.cfg.train.global_batch_size)
    run.spikes.rollback_from = None
    if run.recorder:
        run.recorder.rewind(run.step)
