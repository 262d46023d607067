"""Bugs in which samples a rank reads, and in what is drawn for each."""

from __future__ import annotations

import torch.distributed as dist

from dtrain.commands.verify.mutations.registry import mutation, replace


@mutation
def same_data() -> None:
    from dtrain.data.loader import Loader

    replace(Loader, "request", lambda usual: lambda self, position: self._samples(position, self.rank_batch_size))


@mutation
def order_by_rank() -> None:
    from dtrain.data import loader

    replace(loader, "permutation", lambda usual: lambda seed, epoch, size: usual(seed + dist.get_rank(), epoch, size))


@mutation
def epochs_alike() -> None:
    from dtrain.data import loader

    replace(loader, "permutation", lambda usual: lambda seed, epoch, size: usual(seed, 0, size))


@mutation
def draws_alike_in_batch() -> None:
    from dtrain.data import loader

    replace(loader, "sample_keys", lambda usual: lambda seed, epoch, indices: usual(seed, epoch, 0 * indices))


@mutation
def draws_alike_each_epoch() -> None:
    from dtrain.data import loader

    replace(loader, "sample_keys", lambda usual: lambda seed, epoch, indices: usual(seed, 0, indices))
