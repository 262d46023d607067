"""Operations that torch does with more passes over memory than necessary."""

from __future__ import annotations

import math
from collections.abc import Sequence

# Logits per chunk of the fused head and loss (cross_entropy.py): 1 GiB in 16 bits. With half of it, the GEMM for x's
# gradient has too few tiles for an H200: 5.5 ms instead of 3.9 for gpt2-1.5b at batch 16.
CHUNK_ELEMENTS = 2**29
# Operations from which a GEMM gets the fastest kernel available (cublaslt.py): 30 µs on an H200. Below that, a call
# from Python takes longer than the GEMM.
LARGE_PRODUCT = 2e10
# Scores of attention in memory at a time, where no kernel avoids storing them (block_attention.py): 256 MiB in fp32.
SCORE_ELEMENTS = 2**26


def chunk_rows(rows: int, vocabulary: int) -> int:
    """Return the rows per chunk of at most CHUNK_ELEMENTS logits, in whole tiles of 128. The planner uses it, too.

    All chunks have one size if up to a third more chunks allow it: GEMMs are tuned per size (cublaslt.py).
    """
    chunks = max(1, -(-rows * vocabulary // CHUNK_ELEMENTS))
    chunks = next((n for n in range(chunks, chunks * 4 // 3 + 1) if rows % (128 * n) == 0), chunks)
    return max(1, -(-rows // chunks // 128)) * 128


def score_rows(heads: int, keys: int) -> int:
    """Return for how many queries at a time attention computes scores. The planner uses it. heads: of all samples."""
    return max(1, SCORE_ELEMENTS // (heads * keys))


# for gelu.py and its kernel: gelu(x) = x sigmoid(SCALE x + CUBIC x³)
SCALE = math.sqrt(8 / math.pi)
CUBIC = 0.044715 * SCALE
STRIP = 256  # rows that are summed into one row of the kernel's output

# ---- AdamW's moments in bf16 or int8 (int8_blocks.py, adamw.py); the planner and the checks use this, too ----------

BLOCK = 32  # values of a row that share a scale in int8; divides the rows of all our models over 8 tensor ranks
SMALLEST = 4096  # values of a matrix; the moments of smaller ones, of norms and of biases stay in fp32
INT8_BYTES = 1 + 4 / BLOCK  # of a moment, with its share of the scale
SCALES = {"exp_avg": "exp_avg_scale", "exp_avg_sq": "exp_avg_sq_scale"}  # of int8 moments, in the optimizer's state


def fits_bf16(shape: Sequence[int]) -> bool:
    """Return whether a parameter's moments are held in bf16 if that is asked for."""
    return len(shape) >= 2 and math.prod(shape) >= SMALLEST


def fits_int8(shape: Sequence[int]) -> bool:
    """Return whether they are held in int8: its rows must be whole blocks."""
    return len(shape) == 2 and fits_bf16(shape) and shape[1] % BLOCK == 0
