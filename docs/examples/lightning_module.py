"""A LightningModule by an adapter of ten lines: its training_step computes the loss of a batch."""

import lightning
import torch
from torch import nn

import dtrain


class Classifier(lightning.LightningModule):  # as it is
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Adapter(nn.Module):
    def __init__(self):
        super().__init__()
        self.module = Classifier()
        self.module.log = lambda *args, **options: None  # dtrain logs the loss

    def forward(self, batch):
        returned = self.module.training_step(batch, 0)
        return returned["loss"] if isinstance(returned, dict) else returned


def my_data():
    return torch.randn(256, 8), torch.randint(0, 3, (256,))


if __name__ == "__main__":
    dtrain.fit(model=Adapter, data=my_data, optim={"lr": 1e-2}, strategy="fsdp", processes=2, epochs=1)
