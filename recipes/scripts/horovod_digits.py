"""Horovod and torch on 1,437 handwritten digits: each process computes a part of every batch.

python launch.py recipe=horovod-digits starts it on two processes. It knows three things of dtrain, all optional: where
to save, when to stop, and how to log. The HOROVOD_* variables, which dtrain sets, are all that Horovod needs.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import horovod.torch as hvd
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dtrain
from dtrain import script


def digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The digits inside dtrain's package, (training, held out): every fifth is held out."""
    with np.load(Path(dtrain.__file__).with_name("data") / "digits.npz", allow_pickle=False) as file:
        pictures = torch.from_numpy(file["pictures"]).float().unsqueeze(1) / 16
        labels = torch.from_numpy(file["labels"]).long()
    held_out = torch.arange(len(labels)) % 5 == 0
    return (pictures[~held_out], labels[~held_out]), (pictures[held_out], labels[held_out])


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=60, help="of all processes together")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--least-accuracy", type=float, default=0.0, help="of the held-out digits; less is an error")
    options = parser.parse_args()

    hvd.init()
    torch.manual_seed(0)
    net = network()
    optimizer = torch.optim.Adam(net.parameters(), options.lr)
    path, done = script.checkpoint_dir() / "model.pt", 0
    if hvd.rank() == 0 and path.exists():
        saved = torch.load(path, weights_only=True)
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["epoch"]
    done = hvd.broadcast_object(done, root_rank=0)
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters())

    (pictures, labels), held_out = digits()
    for epoch in range(done + 1, options.epochs + 1):
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
        losses = []
        for batch in order.split(options.batch_size)[: len(labels) // options.batch_size]:
            mine = batch[hvd.rank() :: hvd.size()]
            loss = F.cross_entropy(net(pictures[mine]), labels[mine])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        mean = hvd.allreduce(torch.stack(losses).mean())
        if hvd.rank() == 0:
            written = path.with_suffix(".new")
            torch.save({"epoch": epoch, "net": net.state_dict(), "optimizer": optimizer.state_dict()}, written)
            os.replace(written, path)  # a kill leaves the old file or the new one, never a part
        script.log(epoch, loss=mean)
        if script.stop_requested():
            script.exit_stopped()

    net.eval()
    with torch.no_grad():
        accuracy = (net(held_out[0]).argmax(1) == held_out[1]).float().mean().item()
    if hvd.rank() == 0:
        print(f"held out: accuracy {accuracy:.4f}", flush=True)
        script.log(options.epochs, val_accuracy=accuracy)
    if accuracy < options.least_accuracy:
        raise SystemExit(f"the accuracy is {accuracy:.4f}, less than {options.least_accuracy}")


if __name__ == "__main__":
    main()
