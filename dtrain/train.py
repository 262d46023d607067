"""The training loop, from the top to the bottom. Each rank runs `main(run_dir)`; run_dir/config.yaml says everything.

A run is a pure function of (config, step): which samples a step sees follows from how many were consumed, every
random draw from (seed, step, data rank), the learning rate from the step. So a run that resumes equals one that was
never interrupted.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dtrain import checkpoint, config, metrics, saving, worker
from dtrain.config import Settings, build
from dtrain.contract import BAD_CONFIG, DONE, FAILED, PREEMPTED
from dtrain.data.loader import Loader
from dtrain.models import build as models
from dtrain.plan.trust import predicted
from dtrain.rundir import newest_figures, write_json
from dtrain.schema import check_run
from dtrain.strategies.base import StepResult
from dtrain.strategies.replicas import Replicas
from dtrain.validate import batch_sizes, eval_batch_size
from dtrain.worker import log


class NonFiniteError(RuntimeError):
    """Loss or gradient became NaN or Inf, and train.nonfinite is `stop`."""


def train(run_dir: Path, cfg: Settings, device: torch.device, saver: saving.Saver) -> str:
    """Train until the last step, or until asked to stop. Gives the status: done or preempted."""
    began = time.perf_counter()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    recorder = build(cfg.profile, cfg.trust).begin(run_dir, rank, device, cfg.nsys)
    stop = worker.StopRequest(run_dir)
    batch_size, seed, trust = cfg.train.global_batch_size, cfg.train.seed, cfg.trust

    # ---- build: data, model, strategy ------------------------------------------------------------------------
    data = build(cfg.data, trust)
    train_set = data.dataset("train")
    val_set = data.dataset("val") if cfg.train.eval_batches else None
    data_identity = worker.check_same_start(run_dir, train_set, val_set)
    model = models.make(cfg, trust)  # no memory yet: the strategy decides which part of each weight this rank holds
    precision = build(cfg.precision, trust)
    schedule = build(cfg.schedule, trust, steps=cfg.train.steps)
    strategy = build(cfg.strategy, trust)
    sizes = strategy.resolve_mesh(world_size, int(os.environ["LOCAL_WORLD_SIZE"]))
    _, micro_batch_size, accumulation = batch_sizes(cfg, sizes)
    val_batch_size = eval_batch_size(len(val_set), batch_size, micro_batch_size, sizes) if val_set is not None else 0
    strategy.setup(
        model,
        build(cfg.optim, trust, global_batch_size=batch_size),
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
    reading = {"pin_memory": device.type == "cuda", "workers": cfg.train.loader_workers}
    place = (seed, strategy.data_rank, sizes.dp)
    train_data = Loader(train_set, batch_size, *place, **reading)
    val_data, num_val_batches = None, 0
    if val_set is not None:
        val_data = Loader(val_set, val_batch_size, *place, **reading, shuffle=False)
        num_val_batches = min(cfg.train.eval_batches, len(val_set) // val_batch_size)

    # ---- load: the newest good checkpoint of this run, whatever layout it was saved under ---------------------
    step = samples = 0
    checkpoints = run_dir / "checkpoints"
    saved = None
    found = checkpoint.newest_good(checkpoints, log.warning, needed=strategy.needed_to_resume())
    if found is not None:
        saved, manifest = found
        if manifest["data"] != data_identity and "data" not in cfg.resume_allow:
            raise ValueError(
                f"data: it is not what this run was trained on so far ({manifest['data']} then, {data_identity} now)\n"
                "  fix: bring the old data back, or allow it: 'resume_allow=[data]'"
            )
        state = strategy.state_dict()
        checkpoint.load(saved, manifest, state)
        strategy.load_state_dict(state, manifest["extra"])
        step, samples = manifest["step"], manifest["samples"]
        log.info("resumed from %s", saved)

    # ---- say what will run -----------------------------------------------------------------------------------
    last_step = min(cfg.train.steps, cfg.train.stop_after or cfg.train.steps)
    rate = metrics.Rate(model, train_data, batch_size, device, precision.dtype, world_size)
    summary = {
        "status": "running", "model": cfg.choices.model, "strategy": cfg.choices.strategy,
        "precision": cfg.choices.precision, "parameters": model.num_parameters,
        "trained_parameters": getattr(model, "num_trained", model.num_parameters), "mesh": sizes.as_dict(),
        "world_size": world_size, "global_batch_size": batch_size, "micro_batch_size": micro_batch_size,
        "accumulation": accumulation, "tokens_per_step": rate.tokens_per_step, "unit": rate.unit,
        "device": metrics.device_name(device), "compile": strategy.compile,
        "start_step": step, "total_steps": cfg.train.steps, "steps": step, "train_loss": None, "val_loss": None,
        "val_accuracy": None, "predicted": predicted(run_dir),
    }  # fmt: skip
    record = metrics.Recorder(run_dir, step, build(cfg.logger, trust)) if rank == 0 else None
    if record:
        if step == last_step:  # it was saved, and ended before it could write its summary
            summary |= newest_figures(run_dir)
        write_json(run_dir / "summary.json", summary)
        record.logger.start(cfg.name, str(run_dir), cfg)
        if strategy.compile != "none" and step < last_step:  # gpt2-1.5b: 8 s by blocks, 71 s whole
            log.info("compiling the model: the first step takes longer")

    recorder.attach(strategy, train_data, step, last_step - step)  # around the steps to record, if any

    # ---- the loop --------------------------------------------------------------------------------------------
    log_every, eval_every, save_every = cfg.train.log_every, cfg.train.eval_every, cfg.checkpoint.every
    if device.type == "cuda" and save_every and step - step % save_every + save_every < last_step:
        saver.prepare(strategy.state_dict())  # memory for its copies, while the first step compiles
    replicas = Replicas(strategy)
    stopping = False
    num_skipped = 0
    step_times: list[float] = []
    start = 0.0  # of the step that is settled next
    running: list[Any] = []  # steps whose figures have not been read: on a GPU they are, while the next one computes

    def settle(result: StepResult, step_s: float, step: int, samples: int, lr: float, data_s: float) -> None:
        """Look at a step that has ended: was it finite, is it logged?"""
        nonlocal num_skipped
        if not result.updated:
            num_skipped += 1
            what = f"step {step}: loss {result.loss}, gradient norm {result.grad_norm}: not finite, weights left alone"
            log.warning(what)
            if cfg.train.nonfinite == "stop" and not result.overflow:
                fix = "a smaller optim.lr, a longer schedule.warmup_steps, precision=bf16, or train.nonfinite=skip"
                raise NonFiniteError(f"{what}. Fix: {fix}")
        step_times.append(step_s)
        summary.update(steps=step, train_loss=result.loss if math.isfinite(result.loss) else None)
        if record and (step % log_every == 0 or step == last_step):
            record.write(
                step=step, loss=result.loss, lr=lr, grad_norm=result.grad_norm, tokens=samples * rate.tokens_per_sample,
                tokens_per_s=rate.tokens_per_s(step_s), step_s=step_s, data_s=data_s, mfu=rate.mfu(step_s),
                mem_gib=metrics.memory_gib(device),
            )  # fmt: skip

    while step < last_step and not stopping:
        before = time.perf_counter()
        if not running:  # else it began when the figures of the one before it came
            start = before
        inputs, targets = train_data.batch(samples)
        inputs, targets = inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        data_s = time.perf_counter() - before

        vote = stop.start_vote()
        lr = strategy.set_lr(schedule(step))
        worker.seed_everything(seed, step, strategy.random_rank)
        # forward and backward over the micro-batches, gradients averaged over the data ranks and clipped by one
        # global norm, then the optimizer's update; all of it but the update when something is not finite
        result = strategy.train_step(inputs, targets)
        step, samples = step + 1, samples + batch_size
        stopping = stop.read_vote(vote)

        # settle the step before this one, which has ended by now, or this one where something needs it
        is_last = step == last_step or stopping
        eval_due = not stopping and (is_last or _every(eval_every, step))
        save_due = is_last or _every(save_every, step)
        running.append((result, step, samples, lr, data_s))
        num_ended = len(running) if not result.late or eval_due or save_due else len(running) - 1
        ended: list[Any] = [(result.read(), *rest) for result, *rest in running[:num_ended]]
        running = running[num_ended:]
        if ended:
            now = time.perf_counter()
            for figures, *rest in ended:  # two that ended in one wait share its time
                settle(figures, (now - start) / len(ended), *rest)
            start = now

        # once in a while: evaluate
        if val_data and eval_due:
            batches = []
            for i in range(num_val_batches):
                inputs, targets = (t.to(device, non_blocking=True) for t in val_data.batch(i * val_batch_size))
                batches.append(strategy.eval_step(inputs, targets))
            figures = metrics.figures(model, torch.stack(batches).mean(dim=0).reshape(-1).tolist())
            summary |= figures
            if record:
                record.write(step=step, **figures)

        # once in a while: save
        if save_due:
            asked = time.perf_counter()
            meta = {
                "samples": samples, "data": data_identity, "mesh": sizes.as_dict(), "world_size": world_size,
                "choices": dict(cfg.choices), "config_sha256": config.fingerprint(run_dir),
                "extra": strategy.extra_state(),
            }  # fmt: skip
            state = strategy.state_dict()
            replicas.check(step, state)  # what differs between its holders never reaches a checkpoint
            saver.save(step, state, meta, asked, last=step == last_step or stopping)
        elif _every(cfg.train.check_replicas_every, step):
            replicas.check(step)
        if saver.failed:  # the next vote tells all ranks, and the save after it raises the error
            stop.requested = True  # not |=, which would undo a signal that comes between its reading and its writing
        if record:
            for of_a_save in saver.finished():
                record.write(step=step, **of_a_save)

    saved = saver.wait() or saved
    strategy.close()

    # ---- the summary -----------------------------------------------------------------------------------------
    summary["status"] = "preempted" if stopping and step < last_step else "done"
    summary["peak_mem_gib"] = max(checkpoint.gather(metrics.memory_gib(device)))
    if record:
        if step_times:
            step_s = statistics.median(step_times[1:] or step_times)  # the first one warms up and compiles
            summary |= {"tokens_per_s": rate.tokens_per_s(step_s), "mfu": rate.mfu(step_s)}
        summary |= {
            "skipped_steps": num_skipped, "one_launch": strategy.is_one_launch, **saver.totals,
            "weights_sha256": checkpoint.weights_sha256(saved) if saved else None,
            "wall_s": time.perf_counter() - began,
        }  # fmt: skip
        write_json(run_dir / "summary.json", summary)
        record.logger.finish(summary)
    return str(summary["status"])


def _every(interval: int, step: int) -> bool:
    return bool(interval) and step % interval == 0


def main(run_dir: Path) -> int:
    """One rank, from the process group to the exit code."""
    try:
        cfg = Settings(config.completed(config.load(run_dir)) | {"trust": config.typed_trust()})
        check_run(cfg, cfg.trust, config.GROUPS)
        device = worker.join_process_group(cfg.deterministic)
        with saving.Saver(run_dir / "checkpoints", cfg.checkpoint.keep, cfg.checkpoint.background) as saver:
            status = train(run_dir, cfg, device, saver)
        dist.barrier()  # rank 0 may still write the summary; leaving early would look like a failure to its peers
        dist.destroy_process_group()
        return PREEMPTED if status == "preempted" else DONE
    except BaseException as error:
        error = worker.explained(error)
        # our own messages about settings have a fix; a ValueError from deeper down is a failure like any other
        exit_code = BAD_CONFIG if isinstance(error, ValueError) and "\n  fix: " in str(error) else FAILED
        worker.report_failure(run_dir, int(os.environ["RANK"]), error, exit_code)
        return exit_code
