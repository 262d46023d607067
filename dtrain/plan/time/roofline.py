"""Time of one kernel on one GPU: matmuls by shape, attention, and memory-bound kernels.

A roofline: a kernel is bound by compute or by memory, whichever takes longer. Matmuls lose more if their shape does not
fill the GPU: a matmul is divided into tiles, each SM takes one tile at a time, and the last wave of tiles may leave
most SMs idle.
"""

from __future__ import annotations

import functools
import math

from dtrain.config.hardware import Hardware
from dtrain.kernels import LARGE_PRODUCT

# Tiles that cuBLAS chooses from, with the share of the best rate that each reaches: a smaller tile reads its inputs
# more often. Hopper's sizes are those in the kernel names on the H200; with them the rates of 225 matmuls of
# transformer shapes are predicted with a mean error of 5% (benchmarks/results/probe-h200.json). Before Hopper there
# were only powers of two.
SMALL = ((128, 128, 0.95), (128, 64, 0.8), (64, 128, 0.8), (64, 64, 0.65))
TILES = {
    "ampere": ((256, 128, 1.0), (128, 256, 1.0), *SMALL),
    "hopper": (
        (256, 192, 1.0), (192, 256, 1.0), (320, 128, 1.0), (128, 320, 1.0), (256, 128, 1.0), (128, 256, 1.0),
        (192, 192, 1.0), (192, 128, 0.97), (128, 192, 0.97), (160, 128, 0.97), (128, 160, 0.97), *SMALL,
    ),
}  # fmt: skip
# A tile fills its pipeline before the loop over the inner dimension, and writes its result after it: as long as this
# many more columns of the loop. Same measurement: matmuls with an inner dimension of 768 reach 87% of the others' rate.
RAMP = 128
# Time of the fastest of eight kernels relative to torch's, for the matmuls of one layer on the H200: 0.925 (32,768
# tokens × 768) and 0.947 (16,384 × 1,600); `products_us` of benchmarks/results/speed-h200.json. Older cards: not
# measured.
FASTEST = {"hopper": 0.936}
SPLITS = (1, 2, 3, 4, 6, 8)  # split-K factors, if there are too few tiles for all SMs

# The share of the 16-bit peak that attention's matmuls reach, by GPU generation; exponentials come on top.
# cudnn: measured on the H200 with torch 2.11 (11 shapes). flash2 and flash1: from arXiv 2307.08691 for a causal forward
# and backward pass of 16k tokens with heads of 128 (189 and about 95 TFLOP/s on an A100, 335 and about 160 on an H100),
# less the exponentials.
# Volta has none of them; torch's kernel there is assumed to be as fast as flash1, which is not measured.
ATTENTION = {
    "cudnn": {"volta": 0.345, "ampere": 0.75, "hopper": 0.89},
    "flash2": {"volta": 0.345, "ampere": 0.75, "hopper": 0.44},
    "flash1": {"volta": 0.345, "ampere": 0.345, "hopper": 0.185},
}
# Each score costs one exponential beside its 4 · head_dim multiplications: as long as the tensor cores take for this
# many columns of a head, peak / (4 · SMs · 16 special function units · clock), at a clock of 1.75 GHz. 67 on an H100,
# where 66 fits the measured shapes best.
EXPONENTIAL = 1e12 / (4 * 16 * 1.75e9)
# Tokens at which half the rate is reached: because of the triangle's edge, and the first and last tile of a row.
# Measured on the H200 between 512 and 16,384 tokens; without a mask half as many.
RAMP_TOKENS = 800
# The forward pass's rate, and the backward pass's, relative to both together: 10 shapes on the H200.
FORWARD, BACKWARD = 1.15, 0.95


def generation(hardware: Hardware) -> str:
    """Return the GPU generation, a key of the tables above: since Hopper, cards fetch and multiply asynchronously."""
    assert hardware.peak_bf16_tflops is not None
    if "V100" in (hardware.gpu or ""):
        return "volta"
    return "hopper" if hardware.peak_bf16_tflops > 500 else "ampere"


@functools.lru_cache(maxsize=65536)
def filled(kind: str, rows: int, inner: int, cols: int, count: int, num_sms: int) -> float:
    """Share of the best rate that a matmul of this shape reaches, with the best tile and split."""
    best = 0.0
    for height, width, rate in TILES["hopper" if kind == "hopper" else "ampere"]:
        tiles = count * math.ceil(rows / height) * math.ceil(cols / width)
        used = rate * count * rows * cols / (tiles * height * width)  # share of the edge tiles that is used
        if used <= best:
            continue
        for parts in SPLITS:
            waves = parts * tiles / num_sms
            best = max(best, used * waves / math.ceil(waves) * inner / (inner + parts * RAMP))
            if waves > 8:  # nothing more to gain
                break
    return best


def product_s(
    hardware: Hardware, rows: int, inner: int, cols: int, count: int = 1, size: int = 2, fastest: bool = False
) -> float:
    """Seconds of `count` matmuls [rows × inner] · [inner × cols] of elements of `size` bytes, in one kernel.

    `fastest`: large 16-bit matmuls use the fastest available kernel; otherwise the library's first choice.
    """
    assert hardware.num_sms and hardware.kernel_us
    rate = matmul_flops(hardware, size) * filled(generation(hardware), rows, inner, cols, count, hardware.num_sms)
    flops = 2.0 * count * rows * inner * cols
    if fastest and size == 2 and flops >= LARGE_PRODUCT:
        rate /= FASTEST.get(generation(hardware), 1.0)
    moved = float(size) * count * (rows * inner + inner * cols + rows * cols)
    return max(flops / rate, moved_s(hardware, moved)) + hardware.kernel_us * 1e-6


def moved_s(hardware: Hardware, num_bytes: float) -> float:
    """Seconds to read and write this many bytes of GPU memory, in memory-bound kernels."""
    assert hardware.stream_gb_s
    return num_bytes / (hardware.stream_gb_s * 1e9)


def attention_s(
    hardware: Hardware, kernel: str, batch: int, heads: int, tokens: int, head_dim: int, causal: bool
) -> tuple[float, float]:
    """Seconds of (forward, backward) of attention that never writes its scores.

    Two matmuls forward and five backward, because the scores are recomputed; half of each with a causal mask.
    """
    assert hardware.peak_bf16_tflops and hardware.kernel_us and hardware.num_sms
    kind = generation(hardware)
    exponential = EXPONENTIAL * hardware.peak_bf16_tflops / hardware.num_sms
    share = 1 / (1 / ATTENTION[kernel][kind] + exponential / head_dim)
    ramp = RAMP_TOKENS if causal else RAMP_TOKENS / 2
    rate = hardware.peak_bf16_tflops * 1e12 * share * tokens / (tokens + ramp)
    product = 2.0 * batch * heads * tokens**2 * head_dim * (0.5 if causal else 1.0)
    start = hardware.kernel_us * 1e-6
    return 2 * product / (FORWARD * rate) + start, 5 * product / (BACKWARD * rate) + 2 * start


def matmul_flops(hardware: Hardware, size: int = 2) -> float:
    """The best rate of matmuls in FLOP/s: 16-bit as measured; 32-bit without TF32."""
    tflops = hardware.matmul_tflops if size == 2 else hardware.peak_fp32_tflops
    assert tflops
    return tflops * 1e12
