"""Lightning's Trainer with strategy="ddp"."""

import os

import lightning as L
import torch
from task import Model, Tokens, arguments
from torch.utils.data import DataLoader

import dtrain.check


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch, index):
        loss = self.model(**batch)
        self.losses.append(loss.detach())
        return loss

    def on_before_optimizer_step(self, optimizer) -> None:
        dtrain.check.step(sum(self.losses) / len(self.losses), self.model)
        self.losses = []

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


options = arguments()
L.seed_everything(0, verbose=False)
trainer = L.Trainer(
    accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy="ddp", max_steps=options.steps,
    accumulate_grad_batches=options.accumulate, logger=False, enable_checkpointing=False, enable_progress_bar=False,
)  # fmt: skip
trainer.fit(Module(), DataLoader(Tokens(options.uneven), options.batch // options.accumulate, shuffle=options.shuffle))
