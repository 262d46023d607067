"""AdamW for all parameters in one kernel, with clipping, skipping of non-finite steps, and stochastic rounding.

A small kernel before it counts the steps and computes what all elements of a tensor share.

It is memory-bound: with everything in fp32, 16 bytes are read and 12 written per parameter. torch's own fused kernel
moves as much, and needs the clip factor multiplied into the gradients first: 8 bytes more. Its `found_inf` would also
avoid a host sync, but it writes the gradients back.

The kernel finds its tensors by their addresses, in tables with one row per kind. The table of parameters and state is
sent once; that of gradients, whose addresses change, before every step. A program processes BLOCK elements of one
tensor.

Moments may be in int8 (int8_blocks.py): a program processes whole blocks, each with its two scales.

A watched batch has a checksum of each block of parameters and state. The kernel has all their bits in registers, so it
adds to the checksum what it changes: the sum of the bits that it stores, less that of the bits that it loaded. A bit
that changes in memory between two updates is in no such difference. From then on, the checksum is not that of the
memory, and `Batch.differences` shows it at any later time.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

from dtrain.kernels.checksum import hashed
from dtrain.kernels.int8_codes import QUANT, decoded, first_codes, largest, second_codes
from dtrain.kernels.stochastic_rounding import Place

BLOCK, WARPS = 1024, 4
KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.int8: tl.int8, torch.uint8: tl.uint8}
# rows of the table: addresses of parameter, first and second moment, step and both scales (0: none); elements, group,
# number, place of the draws
P_ROW, M_ROW, V_ROW, STEP_ROW, MS_ROW, VS_ROW, SIZE_ROW, GROUP_ROW, NUMBER_ROW, QUAD_ROW, WIDTH_ROW, SKIP_ROW = map(
    tl.constexpr, range(12)
)
ADDRESSES = 6
SCALE_WORDS = tl.constexpr(1 << 16)  # where the multipliers of scales begin, in a checksum
SETTINGS = tl.constexpr(5)  # per group: lr, weight_decay, beta1, beta2, eps
SCALARS = tl.constexpr(16)  # per tensor: ten are used


@triton.jit
def bits(x):  # type: ignore[no-untyped-def]
    """Return the bits of fp32, bf16 or 8-bit codes as integers."""
    if x.dtype == tl.bfloat16:
        return x.to(tl.uint16, bitcast=True).to(tl.uint32)
    elif x.dtype == tl.int8:
        return x.to(tl.uint8, bitcast=True).to(tl.uint32)
    elif x.dtype == tl.uint8:
        return x.to(tl.uint32)
    else:
        return x.to(tl.uint32, bitcast=True)


@triton.jit
def word(p, m, v):  # type: ignore[no-untyped-def]
    """Return 32 bits of which one changes if any bit of an element or its moments does: all three, rotated."""
    m, v = bits(m), bits(v)
    return bits(p) ^ ((m << 11) | (m >> 21)) ^ ((v << 22) | (v >> 10))


@triton.jit
def scale_word(m, v):  # type: ignore[no-untyped-def]
    """The same for the two scales of a block."""
    v = bits(v)
    return bits(m) ^ ((v << 11) | (v >> 21))


@triton.jit
def multipliers(first, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the factor of each word in a checksum. They are odd, so no bit is lost, and different in a block."""
    return (hashed(tl.arange(0, BLOCK) + first) | 1).to(tl.int64)


@triton.jit
def prepare(  # type: ignore[no-untyped-def]
    table, fresh, finite, factor, scalars, steps, count, WATCHED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """For each tensor: count the step if it is finite, and compute in fp64 what all its elements share."""
    tensor = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = tensor < count
    go = tl.load(finite)
    address = tl.load(table + STEP_ROW * count + tensor, mask=here, other=0).to(tl.pointer_type(tl.float32))
    before = tl.load(address, mask=here, other=0.0)
    step = before + go
    tl.store(address, step, mask=here)
    if WATCHED:
        known = tl.load(steps + tensor, mask=here, other=0)
        tl.store(steps + tensor, known + bits(step).to(tl.int64) - bits(before).to(tl.int64), mask=here)
    own = fresh + 2 * count + 1 + SETTINGS * tl.load(table + GROUP_ROW * count + tensor, mask=here, other=0)
    lr = tl.load(own, mask=here, other=0).to(tl.float64, bitcast=True)
    decay = tl.load(own + 1, mask=here, other=0).to(tl.float64, bitcast=True)
    beta1 = tl.load(own + 2, mask=here, other=0).to(tl.float64, bitcast=True)
    beta2 = tl.load(own + 3, mask=here, other=0).to(tl.float64, bitcast=True)
    eps = tl.load(own + 4, mask=here, other=0).to(tl.float64, bitcast=True)
    # a skipped step may be the first: 1 - beta^0 would be 0
    power = tl.maximum(step, 1.0).to(tl.float64)
    out = scalars + tensor * SCALARS
    tl.store(out, (1.0 - lr * decay).to(tl.float32), mask=here)
    tl.store(out + 1, (lr / (1.0 - tl.exp(power * tl.log(beta1)))).to(tl.float32), mask=here)
    tl.store(out + 2, (1.0 / tl.sqrt(1.0 - tl.exp(power * tl.log(beta2)))).to(tl.float32), mask=here)
    tl.store(out + 3, eps.to(tl.float32), mask=here)
    tl.store(out + 4, beta1.to(tl.float32), mask=here)
    tl.store(out + 5, (1.0 - beta1).to(tl.float32), mask=here)
    tl.store(out + 6, beta2.to(tl.float32), mask=here)
    tl.store(out + 7, (1.0 - beta2).to(tl.float32), mask=here)
    tl.store(out + 8, tl.load(factor), mask=here)
    tl.store(out + 9, go, mask=here)


@triton.jit
def noisy(x, noise):  # type: ignore[no-untyped-def]
    """Stochastic rounding of fp32 to bf16: add 16 random bits below the last kept bit, and truncate."""
    cut = (x.to(tl.uint32, bitcast=True) + noise) >> 16
    return tl.where(x == x, cut.to(tl.uint16).to(tl.bfloat16, bitcast=True), x.to(tl.bfloat16))


@triton.jit
def rounded(x, noise, KIND: tl.constexpr, NOISE: tl.constexpr):  # type: ignore[no-untyped-def]
    if NOISE and tl.bfloat16 == KIND:
        return noisy(x, noise)
    else:
        return x.to(KIND)


@triton.jit
def places(table, tensor, offsets, KIND: tl.constexpr, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the addresses of a tensor's elements."""
    at = tl.load(table + tensor).to(tl.pointer_type(KIND)) + offsets
    if WHOLE:
        at = tl.multiple_of(at, 16)  # bytes, so that loads are 16 bytes wide
    return at


@triton.jit
def take(  # type: ignore[no-untyped-def]
    table, fresh, scalars, sum_at, count, tensor, begin, first, P: tl.constexpr, G: tl.constexpr, M: tl.constexpr,
    V: tl.constexpr, NOISE: tl.constexpr, WATCHED: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Process a block of a tensor, or from its element `first` on. WHOLE: it is full and begins at 16 bytes."""
    scalars += tensor * SCALARS
    offsets = begin + tl.arange(0, BLOCK)
    if WHOLE:
        mask = None  # a computed mask would split each load into one load per element
    else:
        mask = offsets < tl.load(table + SIZE_ROW * count + tensor)
    p_at = places(table + P_ROW * count, tensor, offsets, P, WHOLE)
    g_at = places(fresh, tensor, offsets, G, WHOLE)
    m_at = places(table + M_ROW * count, tensor, offsets, M, WHOLE)
    v_at = places(table + V_ROW * count, tensor, offsets, V, WHOLE)
    p_old, m_old, v_old = tl.load(p_at, mask=mask), tl.load(m_at, mask=mask), tl.load(v_at, mask=mask)
    g = tl.load(g_at, mask=mask).to(tl.float32) * tl.load(scalars + 8)
    if tl.int8 == M:
        blocks = begin // QUANT + tl.arange(0, BLOCK // QUANT)
        if WHOLE:
            block_mask = None
        else:
            block_mask = blocks * QUANT < tl.load(table + SIZE_ROW * count + tensor)
        ms_at = places(table + MS_ROW * count, tensor, blocks, tl.float32, False)
        vs_at = places(table + VS_ROW * count, tensor, blocks, tl.float32, False)
        ms_old, vs_old = tl.load(ms_at, mask=block_mask), tl.load(vs_at, mask=block_mask)
        m, v = decoded(m_old, ms_old, BLOCK), decoded(v_old, vs_old, BLOCK)
    else:
        m, v = m_old.to(tl.float32), v_old.to(tl.float32)
    m = tl.load(scalars + 4) * m + tl.load(scalars + 5) * g
    v = tl.load(scalars + 6) * v + tl.load(scalars + 7) * (g * g)
    root = tl.sqrt_rn(v) * tl.load(scalars + 2) + tl.load(scalars + 3)
    p = p_old.to(tl.float32) * tl.load(scalars) - tl.load(scalars + 1) * tl.div_rn(m, root)
    noise = tl.zeros((BLOCK,), tl.uint32)
    if NOISE:
        step = tl.load(tl.load(table + STEP_ROW * count + tensor).to(tl.pointer_type(tl.float32))).to(tl.uint32)
        quads = begin // 4 + tl.arange(0, BLOCK // 4)
        row, skip = tl.load(table + WIDTH_ROW * count + tensor), tl.load(table + SKIP_ROW * count + tensor)
        if skip != 0:
            quads += quads // row * skip
        quads += tl.load(table + QUAD_ROW * count + tensor)
        none = (quads * 0).to(tl.uint32)
        number = tl.load(table + NUMBER_ROW * count + tensor).to(tl.uint32)
        a, b, c, d = tl.philox(tl.load(fresh + 2 * count), quads.to(tl.uint32), none + number, none + step, none)
        noise = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))  # in element order: a b c d a b …
    # Moments are rounded stochastically, too: a beta near 1 changes them by less than their last bit. The high bits of
    # each 16 matter most, and no two of the three share them.
    p_new = rounded(p, noise & 0xFFFF, P, NOISE)
    if tl.int8 == M:
        ms_new, vs_new = largest(tl.abs(m), BLOCK), largest(v, BLOCK)
        m_new = first_codes(m, ms_new, noise >> 8 & 0xFFFF, BLOCK)
        v_new = second_codes(v, vs_new, noise >> 16, BLOCK)
        tl.store(ms_at, ms_new, mask=block_mask)
        tl.store(vs_at, vs_new, mask=block_mask)
    else:
        m_new, v_new = rounded(m, noise >> 8 & 0xFFFF, M, NOISE), rounded(v, noise >> 16, V, NOISE)
    tl.store(p_at, p_new, mask=mask)
    tl.store(m_at, m_new, mask=mask)
    tl.store(v_at, v_new, mask=mask)
    if WATCHED:
        more = word(p_new, m_new, v_new).to(tl.int64) - word(p_old, m_old, v_old).to(tl.int64)
        if not WHOLE:
            more = tl.where(mask, more, 0)
        total = tl.sum(more * multipliers(first, BLOCK))
        if tl.int8 == M:
            more = scale_word(ms_new, vs_new).to(tl.int64) - scale_word(ms_old, vs_old).to(tl.int64)
            if not WHOLE:
                more = tl.where(block_mask, more, 0)
            total += tl.sum(more * multipliers(SCALE_WORDS + first // QUANT, BLOCK // QUANT))
        tl.atomic_add(sum_at, total, sem="relaxed")


@triton.jit
def adamw(  # type: ignore[no-untyped-def]
    table, fresh, scalars, sums, owners, begins, count, P: tl.constexpr, G: tl.constexpr, M: tl.constexpr,
    V: tl.constexpr, NOISE: tl.constexpr, WATCHED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program processes one block of the tensor that owns it, or nothing if the step is skipped."""
    block = tl.program_id(0)
    tensor = tl.load(owners + block).to(tl.int64)
    begin = (block - tl.load(begins + tensor)).to(tl.int64) * BLOCK
    if tl.load(scalars + tensor * SCALARS + 9) != 0.0:
        if begin + BLOCK <= tl.load(fresh + count + tensor):
            take(table, fresh, scalars, sums + block, count, tensor, begin, 0, P, G, M, V, NOISE, WATCHED, True, BLOCK)
        else:  # in quarters: this is rare, and a full block would take registers from the other branch
            for quarter in range(4):
                first = quarter * (BLOCK // 4)
                take(
                    table, fresh, scalars, sums + block, count, tensor, begin + first, first, P, G, M, V, NOISE,
                    WATCHED, False, BLOCK // 4,
                )  # fmt: skip


@triton.jit
def sum_up(  # type: ignore[no-untyped-def]
    table, owners, begins, known, steps, out, steps_out, count, P: tl.constexpr, M: tl.constexpr, V: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the checksum of one block, less the known one; and the bits of the tensor's step, less the known ones."""
    block = tl.program_id(0)
    tensor = tl.load(owners + block).to(tl.int64)
    begin = (block - tl.load(begins + tensor)).to(tl.int64) * BLOCK
    offsets = begin + tl.arange(0, BLOCK)
    mask = offsets < tl.load(table + SIZE_ROW * count + tensor)
    p = tl.load(places(table + P_ROW * count, tensor, offsets, P, False), mask=mask, other=0.0)
    m = tl.load(places(table + M_ROW * count, tensor, offsets, M, False), mask=mask, other=0)
    v = tl.load(places(table + V_ROW * count, tensor, offsets, V, False), mask=mask, other=0)
    total = tl.sum(word(p, m, v).to(tl.int64) * multipliers(0, BLOCK))
    if tl.int8 == M:
        blocks = begin // QUANT + tl.arange(0, BLOCK // QUANT)
        mask = blocks * QUANT < tl.load(table + SIZE_ROW * count + tensor)
        m = tl.load(places(table + MS_ROW * count, tensor, blocks, tl.float32, False), mask=mask, other=0.0)
        v = tl.load(places(table + VS_ROW * count, tensor, blocks, tl.float32, False), mask=mask, other=0.0)
        total += tl.sum(scale_word(m, v).to(tl.int64) * multipliers(SCALE_WORDS, BLOCK // QUANT))
    tl.store(out + block, total - tl.load(known + block))
    if begin == 0:
        step = tl.load(tl.load(table + STEP_ROW * count + tensor).to(tl.pointer_type(tl.float32)))
        tl.store(steps_out + tensor, bits(step).to(tl.int64) - tl.load(steps + tensor))


class Batch:
    """Parameters of one set of dtypes with their state, on one GPU: what one launch steps."""

    def __init__(
        self,
        tensors: Sequence[Sequence[Tensor]],
        groups: Sequence[int],
        numbers: Sequence[int],
        shards: Sequence[Place],
        block: int = BLOCK,
    ) -> None:
        """`tensors`: parameters, first moments, second moments, steps, and the scales of int8 moments; dense.

        For the rounding, a parameter has a number, and its shard a place in the whole parameter.
        """
        self.kinds = [row[0].dtype for row in tensors[:3]]
        self.device, self.block = tensors[0][0].device, block
        self.sizes = [p.numel() for p in tensors[0]]
        self.addresses = [[t.data_ptr() for t in row] for row in tensors]
        self.aligned = [not (p | m | v) & 15 for p, m, v in zip(*self.addresses[:3], strict=True)]
        scales = [[0] * len(self.sizes)] * (ADDRESSES - len(tensors))  # none
        rows = [*self.addresses, *scales, self.sizes, groups, numbers, *zip(*shards, strict=True)]
        self.table = torch.tensor(rows, dtype=torch.int64).to(self.device)
        blocks = torch.tensor([-(-size // block) for size in self.sizes])
        self.owners = torch.arange(len(blocks), dtype=torch.int32).repeat_interleave(blocks).to(self.device)
        self.begins = (blocks.cumsum(0) - blocks).to(self.device, torch.int32)
        self.scalars = torch.empty(len(blocks), SCALARS.value, dtype=torch.float32, device=self.device)
        self.fresh = torch.empty(0, dtype=torch.int64, device=self.device)  # the buffer that `send` fills
        self.watched, self.tensors = False, [t for row in tensors for t in row]
        # checksums of all blocks, and the bits of all steps
        self.sums = torch.zeros(len(self.owners) + len(blocks), dtype=torch.int64, device=self.device)
        self.versions: list[int] = []  # of the tensors when these sums were computed

    def holds(self, tensors: Sequence[Sequence[Tensor]]) -> bool:
        """Return whether these tensors have the addresses in the table."""
        return all([t.data_ptr() for t in row] == known for row, known in zip(tensors, self.addresses, strict=True))

    def step(
        self,
        gradients: Sequence[Tensor],
        settings: Sequence[tuple[float, ...]],
        finite: Tensor,
        factor: Tensor,
        seed: int,
        warps: int = WARPS,
    ) -> None:
        """Step unless `finite` is 0, with gradients times `factor`, both fp32; seed: of the rounding.

        `settings` of each group: lr, weight_decay, beta1, beta2, eps. Nothing here syncs with the GPU.
        """
        addresses = [g.data_ptr() for g in gradients]
        whole = [
            size if fits and not address & 15 else 0
            for size, fits, address in zip(self.sizes, self.aligned, addresses, strict=True)
        ]
        self.places = [*addresses, *whole]
        if not torch.cuda.is_current_stream_capturing():  # otherwise it is sent before each replay
            self.send(self.places, settings, seed)
        count, fresh = len(self.sizes), self.fresh
        first: Any = prepare[(-(-count // 128),)]
        first(
            self.table, fresh, finite, factor, self.scalars, self.sums[len(self.owners) :], count,
            WATCHED=self.watched, BLOCK=128, num_warps=4,
        )  # fmt: skip
        if len(self.owners):
            kinds = {"G": KINDS[gradients[0].dtype], **self.kernel_kinds()}
            # beside the codes of int8, checksums would change which operations are fused, and so the last bit
            exact: dict[str, Any] = {"enable_fp_fusion": False} if torch.int8 in self.kinds else {}
            then: Any = adamw[(len(self.owners),)]
            then(
                self.table, fresh, self.scalars, self.sums, self.owners, self.begins, count, **kinds,
                NOISE=not {torch.bfloat16, torch.int8}.isdisjoint(self.kinds), WATCHED=self.watched, BLOCK=self.block,
                num_warps=warps, **exact,
            )  # fmt: skip

    def kernel_kinds(self) -> dict[str, Any]:
        return dict(zip("PMV", (KINDS[kind] for kind in self.kinds), strict=True))

    def send(self, places: Sequence[int], settings: Sequence[tuple[float, ...]], seed: int) -> None:
        """Send the gradients' addresses and each group's settings to the GPU; the copy runs after the previous step."""
        bits = [struct.unpack("5q", struct.pack("5d", *values)) for values in settings]
        numbers = [*places, seed, *(b for group in bits for b in group)]
        # A new pinned buffer each time: torch does not reuse its memory before the copy has finished.
        pinned = torch.tensor(numbers, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        if len(self.fresh) != len(numbers):
            self.fresh = torch.empty_like(pinned, device=self.device)
        self.fresh.copy_(pinned, non_blocking=True)
        if not self.watched:
            self.versions = []  # this step does not keep the sums
        elif not self.has_sums():
            self.versions = [t._version for t in self.tensors]
            self.sums += self.differences()

    def has_sums(self) -> bool:
        """Return whether only the kernel has written to the tensors since their sums were computed.

        torch counts what it writes to a plain tensor, and not what the kernel writes. Who writes to a shard of a
        DTensor calls AdamW.forget_sums.
        """
        return self.versions == [t._version for t in self.tensors]

    def differences(self) -> Tensor:
        """Return how much the checksum of each block, and each step, differs from the known one, without a host sync.

        A difference means that a bit changed in memory, if `has_sums`.
        """
        found = torch.zeros_like(self.sums)
        if count := len(self.owners):
            run: Any = sum_up[(count,)]
            run(
                self.table, self.owners, self.begins, self.sums, self.sums[count:], found, found[count:],
                len(self.sizes), **self.kernel_kinds(), BLOCK=self.block, num_warps=WARPS,
            )  # fmt: skip
        return found

    def changed(self, differences: Tensor) -> list[int]:
        """Return the numbers of the tensors of these differences; it waits for the GPU."""
        places = torch.cat([self.owners, torch.arange(len(self.sizes), device=self.device)])
        return sorted(set(places[differences != 0].tolist()))
