"""Build everything that the training loop needs from a run's configuration, and load the newest good checkpoint."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dtrain.checkpoint import ownership
from dtrain.checkpoint.background import Saver
from dtrain.config import run_length
from dtrain.config.build import build, locate
from dtrain.config.files import TARGET
from dtrain.config.mesh import batch_sizes, eval_batch_size
from dtrain.config.run_file import Settings, allows
from dtrain.data.adapt import open_data
from dtrain.data.check import class_names, dataset_of, name_of
from dtrain.data.loader import Loader
from dtrain.data.stream_loader import StreamLoader
from dtrain.models.check_model import check_reads, check_trains, of_squashed, of_sum
from dtrain.optim import build as optimizers
from dtrain.optim.schedule import checked
from dtrain.runs.best import check_split
from dtrain.runs.folder import newest_metrics, predicted, read_json, write_json
from dtrain.runs.recorder import Recorder
from dtrain.strategies.base import Strategy
from dtrain.train import build as models
from dtrain.train import metrics, process
from dtrain.train.best import Best, rule_of
from dtrain.train.check_data import check_batch, held_out, of_few_samples, of_whole_batches, samples_of
from dtrain.train.fresh_state import FreshState
from dtrain.train.hook_run import HookRun
from dtrain.train.hooks import Hooks
from dtrain.train.process import log
from dtrain.train.restore import FORKED, continue_stream, load_newest
from dtrain.train.run import Run, Validation
from dtrain.train.spikes import Spikes
from dtrain.train.startup import StartTimes, begin_compile_cache
from dtrain.util.collective import from_rank_0


def set_up(folder: Path, cfg: Settings, device: torch.device, saver: Saver, times: StartTimes) -> Run:
    """Build data, model and strategy, load the checkpoint, and write the first summary."""
    began = time.perf_counter()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    profiler = build(cfg.profile, cfg.trust).begin(folder, rank, device, cfg.nsys)
    batch_size, seed, trust = cfg.train.global_batch_size, cfg.train.seed, cfg.trust

    # ---- data, model, strategy -------------------------------------------------------------------------------
    data = open_data(cfg.data, trust)
    train_set = dataset_of(data, "train", cfg.data)
    val_set = held_out(dataset_of(data, "val", cfg.data), cfg) if cfg.train.eval_batches else None
    data_identity = process.check_same_start(folder, train_set, val_set)
    epochs, per_epoch = cfg.train.get("epochs"), samples_of(train_set)
    cfg.train["steps"] = run_length.steps_of(cfg.train, per_epoch, name_of(train_set))
    warnings = [*of_few_samples(cfg, per_epoch, world_size)]
    times.done("data")
    model = models.make(cfg, trust)  # on the meta device: the strategy decides which shard each rank holds
    models.set_num_targets(model, train_set, val_set)
    check_trains(model)
    warnings += of_squashed(model, cfg.loss[TARGET])
    warnings += of_sum(locate(cfg.loss[TARGET], trust), cfg.loss)
    precision = build(cfg.precision, trust)
    schedule = build(cfg.schedule, trust, partial=True, steps=cfg.train.steps)
    if not cfg.schedule[TARGET].startswith("dtrain."):
        schedule, small = checked(schedule, cfg.schedule[TARGET], cfg.train.steps)
        warnings += small
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
    classes = class_names(data, cfg.model.get("num_classes", 0))
    if cfg.ema.decay:
        strategy.average_weights(cfg.ema.decay, cfg.ema.evaluate)
    times.done("model")
    if not cfg.optim[TARGET].startswith("dtrain."):
        names = [name for name, p in strategy.module.named_parameters() if p.requires_grad]
        optimizers.check(make_optimizer, strategy.splits_weights(), names)
    reading = {"pin_memory": device.type == "cuda", "workers": cfg.train.loader_workers}
    of_rank = (seed, strategy.data_rank, strategy.data_ranks)
    train_data: Loader | StreamLoader
    if getattr(train_set, "is_stream", False):
        train_data = StreamLoader(train_set, batch_size, *of_rank, reading["pin_memory"])
    else:
        train_data = Loader(train_set, batch_size, *of_rank, **reading)
    sample = train_data.sample()
    if getattr(train_set, "is_stream", False):
        warnings += of_whole_batches(cfg, *sample)
    begin_compile_cache(cfg, strategy, sample)
    if type(model).__module__.startswith("dtrain.") and not cfg.data[TARGET].startswith("dtrain."):
        check_reads(model, *sample, cfg.choices)
    check_batch(model, strategy, *sample, train_set, cfg.loss[TARGET])
    validation, evaluated = None, {"of": 0} if cfg.train.eval_batches else {}  # no such split; not asked for
    if val_set is not None:
        size = eval_batch_size(len(val_set), batch_size, micro_batch_size, mesh, str(cfg.choices.get("data")))
        val_data = Loader(val_set, size, *of_rank, **reading, shuffle=False)
        validation = Validation(val_data, size, min(cfg.train.eval_batches, len(val_set) // size))
        evaluated = {"batches": validation.num_batches, "samples": validation.num_batches * size, "of": len(val_set)}

    batches = partial(validation.batches, device) if validation else lambda: iter(())
    of_run = (folder, cfg, strategy.module, device, min(cfg.train.steps, cfg.train.stop_after or cfg.train.steps))
    view = HookRun(*of_run, strategy.eval_outputs, batches, strategy.begin_evaluation)
    hooks = Hooks(cfg.get("hooks", {}), trust, view)  # an old run has no such section
    times.done("loader")

    if validation is None:
        check_split(cfg, str(cfg.choices.get("data")))
        warnings += hooks.of_no_validation()

    # ---- the newest good checkpoint of this run, whatever layout it was saved under ----------------------------
    fresh = FreshState(cfg.train.spike == "rollback")
    found = load_newest(saver, cfg, strategy, data_identity, fresh)
    loaded_from, step, samples, saved = found or (None, 0, 0, {})
    if epochs is not None:
        check_epochs(folder, cfg, step)
    continue_stream(train_data, saved)
    hooks.load(saved.get("hooks", {}), may_continue=allows(cfg.resume_allow, "hooks") or bool(saved.get(FORKED)))
    times.done("checkpoint")

    # ---- what will run -----------------------------------------------------------------------------------------
    last_step = step if hooks.ended else view.last_step
    rate = metrics.Rate(model, train_data, batch_size, device, precision.dtype, world_size)
    summary = {
        "status": "running", "model": cfg.choices.model, "strategy": cfg.choices.strategy,
        "effective_strategy": cfg.choices.strategy if strategy is chosen else "ddp",
        "precision": cfg.choices.precision, "parameters": model.num_parameters,
        "trained_parameters": getattr(model, "num_trained", model.num_parameters), "mesh": mesh.as_dict(),
        "world_size": world_size, "global_batch_size": batch_size, "micro_batch_size": micro_batch_size,
        "accumulation": accumulation, "tokens_per_step": rate.tokens_per_step, "unit": rate.unit,
        "device": metrics.device_name(device), "compile": strategy.compile,
        **({} if epochs is None else {"epochs": epochs, "samples_per_epoch": per_epoch}),
        "start_step": step, **({"start_lr": strategy.set_lr(schedule(step))} if 0 < step < last_step else {}),
        "total_steps": cfg.train.steps, "steps": step, "train_loss": None, "val_loss": None,
        "val_accuracy": None, "evaluated": evaluated, "predicted": predicted(folder),
        "versions": metrics.versions(device),
        **({"ended_by": hooks.ended} if hooks.ended else {}), **({"warnings": warnings} if warnings else {}),
    }  # fmt: skip
    if origin := ownership.forked_from(folder / "checkpoints"):
        summary["forked_from"] = origin
    recorder = Recorder(folder, step) if rank == 0 else None
    if recorder:
        for line in warnings:
            log.warning("%s", line)
        if step == last_step:  # the run saved its last step but ended before writing its summary
            summary |= newest_metrics(folder)
        write_json(folder / "summary.json", summary)
        if strategy.compile != "none" and step < last_step:  # gpt2-1.5b: 8 s by blocks, 71 s whole
            log.info("compiling the model: the first step takes longer")
    if recorder:
        profiler.report = partial(report, recorder, summary)
    profiler.attach(strategy, train_data, step, last_step - step)  # wraps the steps to profile, if any
    every = cfg.checkpoint.peer_every or cfg.checkpoint.every
    if device.type == "cuda" and cfg.checkpoint.save and every and step - step % every + every < last_step:
        saver.prepare(strategy.state_dict())  # allocates memory for the copies while the first step compiles
    spikes = Spikes(cfg.train.spike, strategy, saved.get("spikes", {}))
    run = Run(
        folder, cfg, device, model, strategy, schedule, mesh, train_data, validation, data_identity, rate, recorder,
        summary, last_step, step, samples, spikes, hooks, loaded_from, began,
        Best(folder / "checkpoints", rule_of(cfg.checkpoint)), fresh, classes, times,
    )  # fmt: skip
    hooks.begin(run)
    times.done("prepare")
    return run


def check_epochs(folder: Path, cfg: Settings, step: int) -> None:
    """What the launcher checks of train.steps: do they go beyond the checkpoint, and how long is the warm-up?"""
    before = from_rank_0(lambda: read_json(folder / "summary.json"), "reading the summary")
    is_saved = before.get("status") not in ("done", "preempted") and before.get("epochs") == cfg.train.epochs
    run_length.check_reaches(cfg, cfg.train.steps, step, is_saved)
    if dist.get_rank() == 0:
        for line in run_length.of_warmup(cfg, cfg.train.steps):
            log.warning(line)


def report(recorder: Recorder, summary: dict[str, Any], step: int, **values: Any) -> None:
    """Record what a profile of some steps found."""
    summary.update(values)
    recorder.write(step=step, **values)
