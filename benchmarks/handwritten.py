"""The peer of overhead.py: the same training as `python launch.py`, as a good engineer writes it in one file.

    torchrun --standalone --nproc-per-node=2 benchmarks/handwritten.py --steps 100
    torchrun --standalone benchmarks/handwritten.py --model gpt2-124m --compile --bf16      (the peer of startup.py)

Only the model class comes from dtrain, so that both sides compute the same thing. No checkpoint, no resume,
no validation, no clean stop: what those cost is what overhead.py measures.
"""

from __future__ import annotations

import argparse
import math
import os
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dtrain.models.gpt2 import GPT2

SEED, SEQ_LEN, PEAK_LR, WARMUP_STEPS, MIN_RATIO = 0, 128, 1e-3, 20, 0.1
TINY = {"num_layers": 4, "dim": 128, "num_heads": 4, "vocab_size": 256, "vocab_multiple": 64, "seq_len": SEQ_LEN}
MODELS: dict[str, dict[str, int]] = {
    "gpt2-tiny": TINY,
    "gpt2-124m": {"num_layers": 12, "dim": 768, "num_heads": 12, "vocab_size": 50257, "seq_len": 1024},
    "gpt2-1.5b": {"num_layers": 48, "dim": 1600, "num_heads": 25, "vocab_size": 50257, "seq_len": 1024},
}
SKIPPED = {
    "site-packages",
    "dist-packages",
    "__pycache__",
    "test",
    "tests",
    "lib2to3",
    "idlelib",
    "turtledemo",
}


def read_corpus() -> np.ndarray:
    """The source of Python's standard library as bytes, a zero between files; the last 5% are held out."""
    paths = []
    for folder, folders, files in os.walk(sysconfig.get_paths()["stdlib"]):
        folders[:] = [name for name in folders if name not in SKIPPED]
        paths += [Path(folder, name) for name in files if name.endswith(".py")]
    corpus = np.frombuffer(b"\0".join(path.read_bytes() for path in sorted(paths)), dtype=np.uint8)
    return corpus[: int(len(corpus) * 0.95)]


def lr_at(step: int, steps: int) -> float:
    if step < WARMUP_STEPS:
        return PEAK_LR * (step + 1) / (WARMUP_STEPS + 1)
    progress = min(1.0, (step - WARMUP_STEPS) / max(1, steps - 1 - WARMUP_STEPS))
    return PEAK_LR * (MIN_RATIO + (1 - MIN_RATIO) * 0.5 * (1 + math.cos(math.pi * progress)))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="gpt2-tiny under DDP, written by hand")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=32, help="samples of a step over all ranks")
    parser.add_argument("--model", choices=list(MODELS), default="gpt2-tiny")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--bf16", action="store_true", help="autocast")
    return parser.parse_args(argv)


def batches(
    size: int, rank: int, world_size: int, device: torch.device, seq_len: int = SEQ_LEN
) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Gives this rank's part of a step's batch of `size` samples."""
    corpus = read_corpus()
    num_samples = (len(corpus) - 1) // seq_len
    order = np.random.default_rng(SEED).permutation(num_samples)
    rank_batch = size // world_size

    def batch(step: int) -> tuple[Tensor, Tensor]:
        start = step * size + rank * rank_batch
        chosen = order[np.arange(start, start + rank_batch) % num_samples]
        where = chosen[:, None] * seq_len + np.arange(seq_len + 1)
        windows = torch.from_numpy(corpus[where].astype(np.int64))
        return windows[:, :-1].contiguous().to(device), windows[:, 1:].contiguous().to(device)

    return batch


def make_model(device: torch.device, sizes: dict[str, int] = TINY) -> nn.Module:
    torch.manual_seed(SEED)
    with device:
        model = GPT2(**sizes)
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            into_residual = name.endswith(("proj.weight", "down.weight"))
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * sizes["num_layers"]) if into_residual else 0.02)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
    return model


def make_optimizer(model: nn.Module, device: torch.device) -> torch.optim.AdamW:
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=PEAK_LR, betas=(0.9, 0.95), fused=device.type == "cuda")


def main(argv: list[str] | None = None, before_step: Callable[[], None] | None = None, around_step: Any = None) -> None:
    """Train. `before_step` is where overhead.py holds the loop, `around_step` gives it another step."""
    options = parse(argv)
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = torch.device("cuda", local_rank % num_gpus) if num_gpus else torch.device("cpu")
    if num_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if num_gpus >= local_size else "gloo")  # NCCL refuses two ranks on one GPU
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sizes = MODELS[options.model]
    batch = batches(options.batch, rank, world_size, device, sizes["seq_len"])
    model = make_model(device, sizes)
    ddp: Any = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if options.compile:
        ddp = torch.compile(ddp)
    optimizer = make_optimizer(model, device)

    def train_step(inputs: Tensor, targets: Tensor) -> tuple[float, Tensor]:
        with torch.autocast(device.type, torch.bfloat16, enabled=options.bf16):
            loss = ddp(inputs, targets)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        mean = loss.detach()
        dist.all_reduce(mean)
        return mean.item() / world_size, norm

    if around_step:
        train_step = around_step(train_step)
    for step in range(options.steps):
        if before_step:
            before_step()
        began = time.perf_counter()
        inputs, targets = batch(step)
        lr = lr_at(step, options.steps)
        for group in optimizer.param_groups:
            group["lr"] = lr
        value, norm = train_step(inputs, targets)
        if rank == 0:
            speed = options.batch * sizes["seq_len"] / (time.perf_counter() - began)
            print(f"step {step + 1} loss {value:.4f} lr {lr:.2e} norm {norm:.2f} {speed:.0f} tok/s", flush=True)

    dist.barrier()  # gloo may abort a rank whose peer has gone first
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
