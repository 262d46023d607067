"""More peers of overhead.py: the training of handwritten.py with accelerate, and with Lightning's Trainer, on CPUs.

    torchrun --standalone --nproc-per-node=2 benchmarks/with_tools.py accelerate --steps 100

The same model, data, optimizer, learning rates, clipping and line a step; the tool has the loop or the parts of a step
that it takes over from its users.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.handwritten import SEQ_LEN, batches, lr_at, make_model, make_optimizer, parse

CPU = torch.device("cpu")


class Batches:
    """This rank's batches, one a step. Whoever asks for one is between two steps: there overhead.py holds the loop."""

    def __init__(self, options: Any, rank: int, world_size: int, before_step: Callable[[], None] | None) -> None:
        self.options, self.before_step = options, before_step or (lambda: None)
        self.batch = batches(options.batch, rank, world_size, CPU)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for step in range(self.options.steps):
            self.before_step()
            yield self.batch(step)


class Said:
    """The line of a step, with the mean loss of all ranks."""

    def __init__(self, options: Any) -> None:
        self.options, self.step, self.began = options, 0, time.perf_counter()

    def __call__(self, loss: Tensor, lr: float) -> None:
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        value, self.step = mean.item() / dist.get_world_size(), self.step + 1
        speed = self.options.batch * SEQ_LEN / (time.perf_counter() - self.began)
        self.began = time.perf_counter()
        if dist.get_rank() == 0:
            print(f"step {self.step} loss {value:.4f} lr {lr:.2e} {speed:.0f} tok/s", flush=True)


def with_accelerate(options: Any, before_step: Callable[[], None] | None) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = make_model(CPU)
    model, optimizer = accelerator.prepare(model, make_optimizer(model, CPU))
    say = Said(options)
    feed = Batches(options, accelerator.process_index, accelerator.num_processes, before_step)
    for step, (inputs, targets) in enumerate(feed):
        lr = lr_at(step, options.steps)
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss = model(inputs, targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        say(loss, lr)
    accelerator.wait_for_everyone()


def with_lightning(options: Any, before_step: Callable[[], None] | None) -> None:
    import lightning as pl
    from lightning.pytorch.strategies import DDPStrategy

    say = Said(options)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model(CPU)

        def configure_optimizers(self) -> Any:
            return make_optimizer(self.net, CPU)

        def train_dataloader(self) -> Any:
            return Batches(options, self.global_rank, self.trainer.world_size, before_step)

        def on_train_batch_start(self, batch: Any, index: int) -> None:
            self.lr = lr_at(index, options.steps)
            for group in self.optimizers().param_groups:
                group["lr"] = self.lr

        def training_step(self, batch: Any, index: int) -> Any:
            return self.net(*batch)

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            say(outputs["loss"], self.lr)

    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=DDPStrategy(gradient_as_bucket_view=True), gradient_clip_val=1.0,
        max_steps=options.steps, max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(Module())


TOOLS = {"accelerate": with_accelerate, "lightning": with_lightning}


def main(tool: str, argv: list[str], before_step: Callable[[], None] | None = None) -> None:
    TOOLS[tool](parse(argv), before_step)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
