"""Newton–Schulz: replace the singular values of a matrix by values near 1, with matmuls only.

Each iteration applies X ← aX + b(XXᵀ)X + c(XXᵀ)²X, whose coefficients raise small singular values as fast as possible;
after five iterations all of them lie between about 0.7 and 1.2 (Jordan et al., 2024).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

A, B, C = 3.4445, -4.7750, 2.0315
EPS = 1e-7


def orthogonalize(x: Tensor, steps: int) -> Tensor:
    """Orthogonalize a matrix, or a stack of them. The operations on one matrix are those of torch.optim.Muon."""
    is_tall = x.size(-2) > x.size(-1)
    x = x.mT if is_tall else x  # XXᵀ has the smaller side
    multiply_add = torch.addmm if x.dim() == 2 else torch.baddbmm
    norm = x.norm() if x.dim() == 2 else torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    x = x / norm.clamp(min=EPS)  # so no singular value is above 1
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = multiply_add(gram, gram, gram, beta=B, alpha=C)
        x = multiply_add(x, polynomial, x, beta=A)
    return x.mT if is_tall else x


def orthogonalize_all(matrices: Sequence[Tensor], steps: int) -> list[Tensor]:
    """Orthogonalize many matrices. On a GPU those of one shape are one stack: a small matmul does not fill it."""
    if not matrices or not matrices[0].is_cuda:
        return [orthogonalize(matrix, steps) for matrix in matrices]
    results: list[Tensor] = list(matrices)
    alike: dict[torch.Size, list[int]] = defaultdict(list)
    for i, matrix in enumerate(matrices):
        alike[matrix.shape].append(i)
    for indices in alike.values():
        stack = orthogonalize(torch.stack([matrices[i] for i in indices]), steps)
        for i, matrix in zip(indices, stack.unbind(), strict=True):
            results[i] = matrix
    return results
