"""One GPU's work for a micro-batch: matmuls, attention and memory traffic of a block and of the ends.

Bytes are counted op by op, from what each op reads and writes per element of the residual stream. The counts were
checked on an H200 by profiling GPT-2 124M, GPT-2 1.5B and Llama 1B, eager and compiled
(benchmarks/results/probe-h200.json).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from dtrain.config.hardware import Hardware
from dtrain.kernels import chunk_rows
from dtrain.plan.model_shape import Transformer
from dtrain.plan.parameters import block_linears
from dtrain.plan.time.roofline import attention_s, matmul_flops, moved_s, product_s
from dtrain.plan.time.stack import Stack

HALF = 2  # bytes of a 16-bit element
FP8 = 1.7  # speedup over a 16-bit matmul: assumed, out of the tensor cores' factor of 2

# GB/s that one SM moves in the kernels between matmuls, if memory is not the limit: eager kernels are many and small,
# and some access memory in strides (transposing copies, sums over the batch). From profiles on the H200: eager kernels
# reach about 67% of a large copy's rate (time for 450 bytes per element of GPT-2 where 297 are counted, 702 for 455 of
# Llama's), compiled ones 85% (190 for 160). A slower memory is easier to saturate: eager kernels reach 81% on an A100.
PER_SM = {"eager": 70.0, "fused": 70.0, "compiled": 180.0}


def kernels_s(hardware: Hardware, style: str, num_bytes: float) -> float:
    """Seconds for kernels of this style to read and write this many bytes."""
    assert hardware.num_sms
    return moved_s(hardware, num_bytes) + num_bytes / (PER_SM[style] * hardware.num_sms * 1e9)


@dataclass(frozen=True)
class Pass:
    """Seconds on the GPU by category, and the number of kernels that the host must launch."""

    products: float = 0.0
    attention: float = 0.0
    moved: float = 0.0
    kernels: float = 0

    def __add__(self, other: Pass) -> Pass:
        return Pass(
            self.products + other.products,
            self.attention + other.attention,
            self.moved + other.moved,
            self.kernels + other.kernels,
        )

    def __mul__(self, times: float) -> Pass:
        return Pass(self.products * times, self.attention * times, self.moved * times, self.kernels * times)

    @property
    def gpu_s(self) -> float:
        return self.products + self.attention + self.moved


@dataclass(frozen=True)
class Traffic:
    """Bytes that ops read and write per token, forward and backward, and the number of launches."""

    forward: float
    backward: float
    forward_launches: int
    backward_launches: int


def block_traffic(shape: Transformer, stack: Stack, tp: int, sequence_parallel: bool) -> Traffic:
    """Traffic of one block outside matmuls and attention: norms, residual sums, activation, casts, biases.

    r: bytes of an element of the residual stream, e: of a 16-bit one. Tensor parallelism shards the inside of attention
    and MLP; the rest is replicated on each rank, unless it is sharded along the sequence.
    """
    r, e = stack.stream, HALF
    between = shape.dim / (tp if sequence_parallel else 1)
    inside, hidden = shape.dim / tp, shape.hidden_dim / tp
    keys = (shape.dim + shape.kv_dim) / tp  # rotated by rotary positions
    cast = r + e if r > e else 0  # a matmul's input in 16 bits
    inputs = (1 if shape.fused_qkv else 3) + (2 if shape.gated else 1)  # casts of a norm's output: one per linear layer
    biases = (inside * 3 + 2 * between + hidden) * e if shape.biased else 0.0  # their gradients: one more read
    drop = (2 * e + 1, 2 * e + 1) if stack.dropout else (0, 0)
    gate = (5 * e, 8 * e) if shape.gated else (2 * e, 3 * e)  # the activation: one read, one write; backward two reads
    if stack.kernels == "compiled":  # a norm, the sum before it and the casts around it are one kernel
        turned = (2 * e, 2 * e) if shape.rotary else (0, 0)
        gate = (3 * e, 5 * e) if shape.gated else gate
        forward = 2 * (2 * r + 2 * e) * between + gate[0] * hidden + turned[0] * keys
        backward = (2 * (3 * r + 2 * e) + 2 * (r + e)) * between + gate[1] * hidden + turned[1] * keys
        backward += 6 * e * inside + biases + (2 * e * hidden if shape.biased else 0)  # q, k, v concatenated; sums
        counts = (2, 6)  # a graph's own launches are cheap; matmuls and attention are counted separately
    elif stack.kernels == "fused":  # bias, dropout and residual sum are one kernel; so are bias and activation
        forward = 2 * (2 * r + 2 * r + e + drop[0] / 2) * between + gate[0] * hidden + 4 * e * inside
        backward = 2 * (5 * r + 3 * r + drop[1]) * between + gate[1] * hidden + 8 * e * inside + biases
        counts = (14, 28)
    else:
        turned = (48, 60) if shape.rotary else (0, 0)  # casts, four multiplications, two sums, concatenation, cast back
        forward = (2 * 2 * r + inputs * cast + 2 * (2 * r + e) + drop[0]) * between
        forward += gate[0] * hidden + turned[0] * keys
        gradients = inputs * cast + (inputs - 2) * 3 * r  # each linear layer's input gradient is cast and summed
        backward = (2 * 5 * r + 2 * cast + 2 * 3 * r + gradients + drop[1]) * between + gate[1] * hidden
        backward += turned[1] * keys + biases + (16 * e * inside if shape.fused_qkv else 0)
        counts = (42, 32)
    return Traffic(forward, backward, *counts)


@functools.lru_cache(maxsize=4096)
def block(
    shape: Transformer, hardware: Hardware, stack: Stack, batch: int, tp: int, sequence_parallel: bool, size: int
) -> tuple[Pass, Pass]:
    """(forward, backward) of one block over `batch` samples on one of `tp` tensor ranks; elements of `size` bytes."""
    tokens = batch * shape.seq_len
    linears = [(x.ins, x.outs // tp) if x.column else (x.ins // tp, x.outs) for x in block_linears(shape)]
    frozen = bool(shape.lora_rank)
    each = [linear_s(hardware, stack, tokens, *sizes, size, frozen, stack.fp8) for sizes in linears]
    products = [sum(seconds) for seconds in zip(*each, strict=True)]
    heads, length = shape.num_heads // tp, shape.seq_len
    if stack.attention == "scores":
        attention = scores_s(hardware, stack, batch * heads, length, shape.head_dim, size)
        kernels = (5, 10)
    elif size == 4:  # a kernel without tensor cores, which does not write its scores either
        product = 2.0 * batch * heads * length**2 * shape.head_dim * (0.5 if shape.causal else 1.0)
        attention = 2 * product / matmul_flops(hardware, size), 5 * product / matmul_flops(hardware, size)
        kernels = (1, 3)
    else:
        attention = attention_s(hardware, stack.attention, batch, heads, length, shape.head_dim, shape.causal)
        kernels = (1, 3)
    traffic = block_traffic(shape, stack, tp, sequence_parallel)
    return (
        Pass(
            products[0], attention[0], kernels_s(hardware, stack.kernels, tokens * traffic.forward),
            len(linears) + kernels[0] + traffic.forward_launches,
        ),
        Pass(
            products[1], attention[1], kernels_s(hardware, stack.kernels, tokens * traffic.backward),
            2 * len(linears) + kernels[1] + traffic.backward_launches,
        ),
    )  # fmt: skip


def last_product(shape: Transformer, hardware: Hardware, stack: Stack, batch: int, tp: int, size: int) -> Pass:
    """A block's last matmul, if recomputation skips it: only a norm after it, as in BERT, reads its result in the
    backward pass, and eager dropout comes after it."""
    if not stack.stops_early or shape.kind == "bert" or (shape.dropout and stack.kernels == "eager"):
        return Pass()
    last = block_linears(shape)[-1]
    frozen = bool(shape.lora_rank)
    tokens = batch * shape.seq_len
    forward, _ = linear_s(hardware, stack, tokens, last.ins // tp, last.outs, size, frozen, stack.fp8)
    return Pass(forward, kernels=1)


def linear_s(
    hardware: Hardware,
    stack: Stack,
    tokens: int,
    ins: int,
    outs: int,
    size: int,
    frozen: bool = False,
    fp8: bool = False,
) -> tuple[float, float]:
    """Seconds of a linear layer's (forward, backward): one matmul, and one each for input and weight gradients.

    A frozen layer has no weight gradients; the two thin matmuls of its adapter read and write as much as an activation
    does, once forward and twice backward.
    """
    fastest = stack.fast_products and not fp8
    forward, inputs, weights = (
        product_s(hardware, *sizes, size=size, fastest=fastest)
        for sizes in ((tokens, ins, outs), (tokens, outs, ins), (ins, tokens, outs))
    )
    backward = inputs if frozen else inputs + weights
    if fp8:
        # inputs, weights and gradients are scanned for their maximum and cast: 5 bytes each, twice for both directions
        casts = [moved_s(hardware, 5.0 * count) for count in (tokens * ins + ins * outs, tokens * (ins + 2 * outs))]
        return forward / FP8 + casts[0], backward / FP8 + casts[1]
    if frozen:
        thin = moved_s(hardware, float(size) * tokens * (ins + 2 * outs))
        return forward + thin, backward + 2 * thin
    return forward, backward


def scores_s(
    hardware: Hardware, stack: Stack, heads: int, length: int, head_dim: int, size: int
) -> tuple[float, float]:
    """Seconds of (forward, backward) of attention that writes its scores: batched matmuls, and passes over the scores.

    A fused mask and softmax read and write each score; so does dropout, with one more byte for its mask.
    """
    inner = product_s(hardware, length, head_dim, length, heads, size)
    outer = product_s(hardware, length, length, head_dim, heads, size)
    scores = float(heads) * length**2
    forward = 2 * size + (2 * size + 1 if stack.dropout else 0)
    backward = 3 * size + (2 * size + 1 if stack.dropout else 0)
    return (
        inner + outer + kernels_s(hardware, stack.kernels, scores * forward),
        2 * (inner + outer) + kernels_s(hardware, stack.kernels, scores * backward),
    )


@functools.lru_cache(maxsize=4096)
def head(shape: Transformer, hardware: Hardware, stack: Stack, batch: int, ways: int, size: int) -> tuple[Pass, Pass]:
    """(forward, backward) of the last norm, the logits and the loss, over a vocabulary sharded `ways` ways.

    The logits are cast to fp32 (6 bytes), a softmax reads them twice and writes once (12); its gradient reads two and
    writes one (12), and is cast back to 16 bits (6). Compiled, 16-bit logits are read twice, and their gradient is
    written. Megatron's loss over a sharded vocabulary has four more passes over fp32.
    """
    if stack.head == "chunked" and shape.task != "classify":
        return chunked_head(shape, hardware, stack, batch, ways, size)
    if stack.head == "chunked":
        stack = replace(stack, head="")
    tokens = max(1, round(batch * shape.seq_len * shape.asked))
    rows = max(1, shape.vocab_size // ways)
    frozen = bool(shape.lora_rank) and shape.task != "classify"
    forward, backward = linear_s(hardware, stack, tokens, shape.dim, rows, size, frozen)
    logits = float(tokens) * rows
    there, back = {"compiled": (4, 7), "eager": (16, 18), "fused": (34, 18)}[stack.head or stack.kernels]
    ends = float(batch * shape.seq_len * shape.dim) * stack.stream  # embedding and last norm
    return (
        Pass(forward, 0.0, kernels_s(hardware, stack.head or stack.kernels, logits * there + 4 * ends), 12),
        Pass(backward, 0.0, kernels_s(hardware, stack.head or stack.kernels, logits * back + 8 * ends), 16),
    )


def chunked_head(
    shape: Transformer, hardware: Hardware, stack: Stack, batch: int, ways: int, size: int
) -> tuple[Pass, Pass]:
    """Like `head`, with head and loss as one operation: all work is forward, chunk by chunk; backward only scales.

    A kernel reads each logit twice and writes its gradient (measured: the second read misses the cache, because many
    rows are in flight). Over a sharded vocabulary, plain operations move 52 bytes per logit. The weight gradient is
    summed in fp32: the first chunk writes it, each further chunk reads and writes it, and it is scaled once.
    """
    asked, rows = max(1, round(batch * shape.seq_len * shape.asked)), max(1, shape.vocab_size // ways)
    chunk, frozen = min(asked, chunk_rows(asked, rows)), bool(shape.lora_rank)
    chunks = asked / chunk
    there, back = linear_s(hardware, stack, chunk, shape.dim, rows, size, frozen)
    logits, table = float(asked) * rows, 0.0 if frozen else float(rows) * shape.dim
    plain = ways > 1 or size == 4
    moved = kernels_s(hardware, "eager" if plain else "compiled", logits * (52 if plain else 3 * size))
    moved += moved_s(hardware, table * (8 * chunks + 4) + 2.0 * size * asked * shape.dim)
    ends = float(batch * shape.seq_len * shape.dim) * stack.stream
    return (
        Pass(chunks * (there + back), 0.0, moved + kernels_s(hardware, stack.kernels, 4 * ends), 12 + 6 * chunks),
        Pass(0.0, 0.0, kernels_s(hardware, stack.kernels, 8 * ends), 8),
    )
