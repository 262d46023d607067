"""The training loop, from the top to the bottom. Each rank runs `main(run_dir)`; run_dir/config.yaml says everything.

A run is a pure function of (config, step): which samples a step sees follows from how many were consumed, every
random draw from (seed, step, data rank), the learning rate from the step. So a run that resumes equals one that was
never interrupted.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf

from dtrain import checkpoint, config, metrics, worker
from dtrain.config import build
from dtrain.contract import BAD_CONFIG, DONE, FAILED, PREEMPTED, die_with_parent, write_json
from dtrain.data.loader import Loader
from dtrain.validate import batch_sizes
from dtrain.worker import log


class NonFiniteError(RuntimeError):
    """Loss or gradient became NaN or Inf, and train.nonfinite is `stop`."""


def train(run_dir: Path, cfg: DictConfig, device: torch.device) -> str:
    """Train until the last step, or until asked to stop. Gives the status: done or preempted."""
    began = time.perf_counter()
    stop = worker.StopRequest(run_dir)
    is_main = dist.get_rank() == 0
    batch_size, seed, trust = cfg.train.global_batch_size, cfg.train.seed, cfg.trust

    # ---- build: data, model, strategy ----------------------------------------------------------------------
    data = build(cfg.data, trust)
    with torch.device("meta"):  # no memory yet: the strategy decides which part of each weight this rank holds
        model = build(cfg.model, trust)
    precision = build(cfg.precision, trust)
    schedule = build(cfg.schedule, trust, steps=cfg.train.steps)
    strategy = build(cfg.strategy, trust)
    sizes = strategy.resolve_mesh(dist.get_world_size())
    per_rank, micro_batch_size, accumulation = batch_sizes(cfg, sizes)
    strategy.setup(
        model,
        build(cfg.optim, trust, global_batch_size=batch_size),
        precision=precision,
        device=device,
        seed=seed,
        micro_batch_size=micro_batch_size,
        max_grad_norm=cfg.train.max_grad_norm,
        activation_checkpointing=cfg.activation_checkpointing,
        activation_checkpointing_every=cfg.activation_checkpointing_every,
        compile=cfg.compile,
    )

    def loader(split: str) -> Loader:
        dataset = data.dataset(split)
        if split == "val" and len(dataset) < batch_size:
            raise ValueError(f"train.global_batch_size={batch_size}: the validation split has only {len(dataset)} samples\n"
                             "  fix: a larger data.val_fraction, a smaller batch, or train.eval_batches=0")  # fmt: skip
        pin = device.type == "cuda"
        return Loader(dataset, batch_size, seed, strategy.data_rank, sizes.dp, shuffle=split == "train", pin_memory=pin)

    train_data = loader("train")
    val_data = loader("val") if cfg.train.eval_batches else None
    num_val_batches = min(cfg.train.eval_batches, len(val_data.dataset) // batch_size) if val_data else 0

    # ---- load: the newest good checkpoint of this run, whatever layout it was saved under -------------------
    step = samples = 0
    checkpoints = run_dir / "checkpoints"
    found = checkpoint.newest_good(checkpoints, say=log.warning)
    if found is not None:
        path, manifest = found
        state = strategy.state_dict()
        checkpoint.load(path, manifest, state)
        strategy.load_state_dict(state, manifest["extra"])
        step, samples = manifest["step"], manifest["samples"]
        log.info("resumed from %s", path)

    def save() -> Path:
        meta = {
            "samples": samples, "mesh": sizes.as_dict(), "world_size": dist.get_world_size(), "choices": dict(cfg.choices),
            "config_sha256": config.fingerprint(run_dir), "extra": strategy.extra_state(),
        }  # fmt: skip
        return checkpoint.save(checkpoints, step, strategy.state_dict(), meta, cfg.checkpoint.keep)

    last_step = min(cfg.train.steps, cfg.train.stop_after or cfg.train.steps)
    tokens_per_sample = train_data.batch(0)[1][0].numel()
    tokens_per_step = batch_size * tokens_per_sample
    peak = metrics.peak_flops(device, precision.dtype)
    summary: dict[str, Any] = {
        "status": "running", "model": cfg.choices.model, "strategy": cfg.choices.strategy, "precision": cfg.choices.precision,
        "parameters": model.num_parameters, "mesh": sizes.as_dict(), "world_size": dist.get_world_size(),
        "global_batch_size": batch_size, "micro_batch_size": micro_batch_size, "accumulation": accumulation,
        "tokens_per_step": tokens_per_step, "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "start_step": step, "total_steps": cfg.train.steps, "steps": step, "train_loss": None, "val_loss": None,
        "val_accuracy": None, "predicted": None,
    }  # fmt: skip
    if is_main:
        write_json(run_dir / "summary.json", summary)
        record = metrics.Metrics(run_dir, step)
        logger = build(cfg.logger, trust)
        logger.start(cfg.name, str(run_dir), OmegaConf.to_container(cfg), resumed=found is not None)

    # ---- the loop ------------------------------------------------------------------------------------------
    stopping, skipped, saved = False, 0, checkpoints / f"step-{step:08d}" if found else None
    step_times: list[float] = []
    while step < last_step and not stopping:
        start = time.perf_counter()
        inputs, targets = (t.to(device, non_blocking=True) for t in train_data.batch(samples))
        data_s = time.perf_counter() - start

        vote = stop.start_vote()
        lr = strategy.set_lr(schedule(step))
        worker.seed_everything(seed, step, strategy.data_rank)
        result = strategy.train_step(inputs, targets)
        step, samples = step + 1, samples + batch_size
        stopping = stop.read_vote(vote)

        if not result.updated:  # weights and optimizer are as they were before this step
            skipped += 1
            what = f"step {step}: loss {result.loss}, gradient norm {result.grad_norm}: not finite, weights left as they were"
            log.warning(what)
            if cfg.train.nonfinite == "stop" and not result.overflow:
                raise NonFiniteError(f"{what}. Fix: a smaller optim.lr, a longer warm-up, precision=bf16, or train.nonfinite=skip")

        step_s = time.perf_counter() - start
        step_times.append(step_s)
        summary |= {"steps": step, "train_loss": result.loss if math.isfinite(result.loss) else None}

        # once in a while: log
        if is_main and (step % cfg.train.log_every == 0 or step == last_step):
            mfu = model.flops_per_sample() * batch_size / step_s / (peak * dist.get_world_size()) if peak else None
            values = {
                "step": step, "loss": result.loss, "lr": lr, "grad_norm": result.grad_norm, "tokens": samples * tokens_per_sample,
                "tokens_per_s": tokens_per_step / step_s, "step_s": step_s, "data_s": data_s, "mfu": mfu,
                "mem_gib": metrics.memory_gib(device),
            }  # fmt: skip
            record.write(**values)
            logger.log(values)

        # once in a while: evaluate
        due = step == last_step or (cfg.train.eval_every and step % cfg.train.eval_every == 0)
        if val_data is not None and due and not stopping:
            losses = []
            for i in range(num_val_batches):
                inputs, targets = (t.to(device, non_blocking=True) for t in val_data.batch(i * batch_size))
                losses.append(strategy.eval_step(inputs, targets))
            summary["val_loss"] = torch.stack(losses).mean().item()
            if is_main:
                record.write(step=step, val_loss=summary["val_loss"])
                logger.log({"step": step, "val_loss": summary["val_loss"]})

        # once in a while: save
        if step == last_step or stopping or (cfg.checkpoint.every and step % cfg.checkpoint.every == 0):
            saved = save()

    # ---- the summary ---------------------------------------------------------------------------------------
    status = "preempted" if stopping and step < last_step else "done"
    memory = max(checkpoint.gather(metrics.memory_gib(device)))
    if is_main:
        step_s = statistics.median(step_times[1:] or step_times or [math.inf])  # the first step warms caches and compiles
        mfu = model.flops_per_sample() * batch_size / step_s / (peak * dist.get_world_size()) if peak else None
        summary |= {
            "status": status, "tokens_per_s": tokens_per_step / step_s, "mfu": mfu, "peak_mem_gib": memory,
            "wall_s": time.perf_counter() - began, "skipped_steps": skipped,
            "weights_sha256": checkpoint.weights_sha256(saved) if saved else None,
        }  # fmt: skip
        write_json(run_dir / "summary.json", summary)
        logger.finish(summary)
    return status


def main(run_dir: Path) -> int:
    """One rank, from the process group to the exit code."""
    rank = int(os.environ["RANK"])
    try:
        cfg = config.load(run_dir)
        device = worker.join_process_group()
        status = train(run_dir, cfg, device)
        dist.barrier()  # rank 0 may still write the summary; leaving early would look like a failure to its peers
        dist.destroy_process_group()
        return PREEMPTED if status == "preempted" else DONE
    except BaseException as error:
        exit_code = BAD_CONFIG if isinstance(error, ValueError) else FAILED
        worker.report_failure(run_dir, rank, error, exit_code)
        return exit_code


if __name__ == "__main__":
    die_with_parent()
    worker.redirect_output(Path(sys.argv[1]), int(os.environ["RANK"]))
    code = main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(code)  # a failed rank must not wait for peers in the destructor of its process group
