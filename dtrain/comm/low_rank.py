"""powersgd: a gradient matrix as a product of two narrow ones (Vogels et al., 2019, arXiv:1905.13727).

One step of power iteration, warm-started: P = M Q is summed over the ranks and made orthonormal, then Q = Mᵀ P is
averaged, and P Qᵀ approximates the mean of M. Q of this step starts the next one, so it is part of the state, the same
on all ranks.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.comm.compressor import Compressor, Gradients
from dtrain.util.dtensor import Held


class PowerSGD(Compressor):
    def __init__(self, matrix_rank: int, *arguments: Any) -> None:
        self.matrix_rank = matrix_rank
        super().__init__(*arguments)

    def compresses(self, shape: tuple[int, ...]) -> bool:
        """Only if the two factors are smaller than the matrix."""
        rows, columns = shape[0], torch.Size(shape[1:]).numel()
        return super().compresses(shape) and self.matrix_rank * (rows + columns) < rows * columns

    def new_state(self, name: str, shape: tuple[int, ...]) -> dict[str, Tensor]:
        return super().new_state(name, shape) | {"q": self.first_q(name, torch.Size(shape[1:]).numel())}

    def first_q(self, name: str, columns: int) -> Tensor:
        """The same random matrix on all ranks, and in every run."""
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        return torch.randn(columns, self.matrix_rank, generator=generator).to(self.device)

    def exchange(self, gradients: Gradients) -> None:
        matrices = {name: self.owed(name, g).reshape(len(g), -1) for name, g in gradients.items()}
        left = self.all_reduce([m @ self.state[f"{name}.q"] for name, m in matrices.items()])
        left = [torch.linalg.qr(p).Q for p in left]
        own = [m.T @ p for m, p in zip(matrices.values(), left, strict=True)]
        for (name, m), p, q in zip(matrices.items(), left, own, strict=True):
            # by this rank's own Q: with the mean, the ranks' errors would drift apart and cancel only in their sum
            self.keep(name, "error", m.addmm_(p, q.T, alpha=-1))
        right = self.all_reduce(own)
        for (name, gradient), p, q in zip(gradients.items(), left, right, strict=True):
            mean = q / self.num_ranks
            self.pending[f"{name}.q"] = mean
            gradient.copy_((p @ mean.T).view(gradient.shape))

    def all_reduce(self, matrices: list[Tensor]) -> list[Tensor]:
        """Sum the ranks' matrices, all of them in one message."""
        flat = torch.cat([m.reshape(-1) for m in matrices])
        dist.all_reduce(flat, group=self.group)
        parts = flat.split([m.numel() for m in matrices])
        return [part.view(m.shape) for part, m in zip(parts, matrices, strict=True)]

    def state_dict(self) -> dict[str, Held]:
        return super().state_dict() | {f"comm.{name}.q": self.state[f"{name}.q"] for name in self.places}

    def extra_state(self) -> dict[str, Any]:
        return super().extra_state() | {"rank": self.matrix_rank}

    def load_state_dict(self, extra: dict[str, Any]) -> None:
        super().load_state_dict(extra)
        if extra.get("rank") != self.matrix_rank:  # the checkpoint has no such Q
            for name in self.places:
                q = self.state[f"{name}.q"]
                q.copy_(self.first_q(name, len(q)))
