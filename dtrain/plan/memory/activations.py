"""Bytes that the backward pass needs from the forward pass: what autograd saves in our models, op by op.

Norms compute in fp32; matmuls use 2 bytes under bf16 and fp16; the residual stream uses 2 bytes under bf16 (fp32 under
the others, and in older measurements). An eager block saves for each token (d: dim, h: hidden_dim, e: bytes of a matmul
element):

- for a norm: its input in fp32 (4 d) and its statistics; for a linear layer: its input in e bytes. If the stream is
  fp32, each layer casts its own copy, so q, k and v have three copies (autocast caches casts of weights only);
- for attention: queries, keys, values, its result, and the log-sum-exp of each row (4 bytes per head);
- for the activation: its input and its result; a gated one also the other factor and their product.

activation_checkpointing=ops keeps only the block's input and the results of matmuls and attention.

torch.compile's partitioner keeps less: one cast for all layers that read it, and the gate's activation is recomputed;
block by block it keeps attention output in e bytes instead of the fp32 sum with it. These lists match its graphs
(torch 2.13, counted in tests/plan/memory/test_activations.py), and measurements on an H200 agree to 1%.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from dtrain.plan.layout import Layout
from dtrain.plan.model_shape import Convolutions, Transformer
from dtrain.plan.parameters import block_linears, is_target

WIDE = 4  # bytes of an fp32 element
MIB = 2**20
GIB = 2**30


def product_bytes(precision: str) -> int:
    """Bytes of a matmul element."""
    return 4 if precision == "fp32" else 2


def stream_bytes(layout: Layout) -> int:
    """Bytes of an element of the residual stream."""
    return WIDE if layout.stream == "float32" else 2


def allocated(size: float) -> float:
    """Bytes that CUDA's caching allocator takes for a tensor: from 10 MiB on it rounds to 2 MiB, but returns a
    remainder of more than 1 MiB (torch's kMinLargeAlloc, kRoundLarge and kSmallSize). A tensor of 25 MiB takes 26."""
    if size < 10 * MIB:
        return -(-size // 512) * 512
    rest = -size % (2 * MIB)
    return size + rest if rest <= MIB else size


@dataclass(frozen=True)
class Way:
    """How a block is computed, as far as memory is concerned."""

    product: int  # bytes of a matmul element
    graph: str  # eager | block (compiled block by block) | whole (the model as one graph)
    tp: int = 1
    sequence_parallel: bool = False
    wide_inputs: bool = False  # zero3's own linear layer keeps its input in fp32, as it arrived
    stream: int = WIDE  # bytes of an element of the residual stream
    ops: bool = False  # only results of matmuls and attention are kept
    context: str = ""  # how attention sees other ranks' parts of a sequence (strategy.cp_kind); "": it is whole


def way_of(layout: Layout) -> Way:
    graph = {"none": "eager", "blocks": "block", "whole": "whole"}[layout.compile]
    e, stream = product_bytes(layout.precision), stream_bytes(layout)
    wide = layout.data == "zero3" and e != WIDE == stream
    ops = layout.activation_checkpointing == "ops"
    context = layout.cp_kind if layout.cp > 1 else ""
    return Way(e, graph, layout.tp, layout.sequence_parallel, wide, stream, ops, context)


@functools.lru_cache(maxsize=4096)
def block_tensors(shape: Transformer, way: Way) -> tuple[tuple[str, float], ...]:
    """What one block saves per token on one tensor-parallel rank: names and bytes."""
    if way.ops:
        return kept_tensors(shape, way)
    e, d, tp, eager = way.product, shape.dim, way.tp, way.graph == "eager"
    between = tp if way.sequence_parallel else 1  # ranks that shard the activations between the matmuls
    first, second = (WIDE, WIDE) if eager else (way.stream, e if way.graph == "block" else way.stream)
    tensors = [("residual stream", first * d / between), ("residual stream after attention", second * d / between)]
    tensors.append(("statistics of norms", 2 * (8 if shape.biased else 4) / between))
    tensors += input_tensors(shape, way)
    widths = [("queries, keys, values", d + 2 * shape.kv_dim)]
    if not shape.fused_qkv:
        widths = [("queries", d), ("keys", shape.kv_dim), ("values", shape.kv_dim)]
    tensors += [(name, e * width / tp) for name, width in widths]
    tensors += [("attention output", e * d / tp), ("log-sum-exp of attention", WIDE * shape.num_heads / tp)]
    if way.context == "ulysses":  # of some heads and all tokens, and exchanged
        tensors.append(("attention output, exchanged", e * d / tp))
    elif not way.context and shape.rotary and saves_input(shape, "attention.proj"):  # in the rotated queries' layout
        tensors.append(("attention output, head by head", e * d / tp))
    tensors += score_tensors(shape, way)
    hidden = e * shape.hidden_dim / tp
    tensors.append(("MLP, before its activation", hidden))
    if shape.gated:
        tensors.append(("MLP, the other input of the gate", hidden))
        if eager:
            tensors.append(("MLP, the activated gate", hidden))
    if saves_input(shape, "mlp.down"):
        tensors.append(("MLP, after its activation", hidden))
    if shape.dropout and eager:
        tensors += [("dropout masks", d / between)] * 2
    if shape.lora_rank:
        count = sum(is_target(shape, linear) for linear in block_linears(shape))
        tensors.append(("LoRA, between its matrices", float(count * e * shape.lora_rank)))
    return tuple(tensors)


def kept_tensors(shape: Transformer, way: Way) -> tuple[tuple[str, float], ...]:
    """Like `block_tensors`, under activation_checkpointing=ops. Tensor-parallel ranks keep both partial and full sums.

    A compiled graph keeps the last matmul only if a norm follows in the same block; eager contexts cannot know that.
    """
    e, d, tp = way.product, shape.dim, way.tp
    between = tp if way.sequence_parallel else 1
    sums = e * d + (e * d / between if tp > 1 else 0.0)
    tensors = [("residual stream", way.stream * d / between)]
    tensors += [("queries, keys, values", e * (d + 2 * shape.kv_dim) / tp), ("attention output", e * d / tp)]
    tensors += [("log-sum-exp of attention", WIDE * shape.num_heads / tp), ("attention projection", sums)]
    tensors += [("MLP, before its activation", e * shape.hidden_dim / tp)]
    if shape.gated:
        tensors.append(("MLP, the other input of the gate", e * shape.hidden_dim / tp))
    if way.graph == "eager" or shape.kind == "bert":
        tensors.append(("MLP output", sums))
    if not shape.packed:
        tensors += score_tensors(shape, way)
    for linear in block_linears(shape):
        if shape.lora_rank and is_target(shape, linear):
            tensors.append(("LoRA, both matmuls", float(e * (shape.lora_rank + linear.outs))))
    return tuple(tensors)


def input_tensors(shape: Transformer, way: Way) -> list[tuple[str, float]]:
    """The inputs of the first matmuls of attention and of the MLP; never sharded by tensor parallelism."""
    e, d, made = way.product, shape.dim, []
    for prefix, names in (("attention", ("qkv",) if shape.fused_qkv else ("q", "k", "v")), ("mlp", ("gate", "up"))):
        kept = [n for n in names if saves_input(shape, f"{prefix}.{n}") and (n != "gate" or shape.gated)]
        if way.wide_inputs:
            made += [(f"input of {prefix}", float(WIDE * d))] if kept else []
        elif e == way.stream or way.graph != "eager":
            made += [(f"input of {prefix}", float(e * d))] if kept else []
        else:
            made += [(f"input of {prefix}.{n}", float(e * d)) for n in kept]
    return made


def saves_input(shape: Transformer, name: str) -> bool:
    """A weight's gradient needs the layer's input; a frozen weight has no gradient, but its adapter does."""
    if not shape.lora_rank:
        return True
    return any(linear.name == name and is_target(shape, linear) for linear in block_linears(shape))


def score_tensors(shape: Transformer, way: Way) -> list[tuple[str, float]]:
    """Tensors of attention that reads a mask, or has no kernel that avoids storing its scores."""
    e, tp = way.product, way.tp
    if way.context in ("ring", "allgather"):  # masks and scores are computed again, block by block
        return []
    if shape.packed and e != WIDE and not shape.dropout:  # kernels/document_attention.py
        return []
    if shape.packed:  # shared KV heads are expanded; the mask becomes additive values, again in every layer
        shared = [("shared heads", 2.0 * e * (shape.dim - shape.kv_dim) / tp)]
        # ulysses makes them once (memory/context.py)
        return shared if way.context else [("mask", float(e * shape.seq_len)), *shared]
    if e == WIDE and shape.num_kv_heads < shape.num_heads:
        # no fp32 kernel supports shared KV heads: the softmax of all scores is kept (llama-1b on an H200: 16 GiB of 30)
        return [("scores", WIDE * shape.num_heads * shape.seq_len / tp)]
    return []


@functools.lru_cache(maxsize=65536)
def block_bytes(shape: Transformer, way: Way, tokens: int) -> tuple[float, float]:
    """(bytes that one block saves for this many tokens, additional bytes from rounding)."""
    sizes = [tokens * size for _, size in block_tensors(shape, way)]
    saved = sum(sizes)
    return saved, sum(allocated(size) for size in sizes) - saved


def block_again_bytes(shape: Transformer, way: Way, tokens: int) -> float:
    """Peak temporary bytes of one block's backward pass, beside saved tensors: gradients inside its MLP, and two of the
    residual stream. Saved tensors are freed as gradients appear, so only one more MLP-wide gradient exists (gated:
    two)."""
    hidden = way.product * shape.hidden_dim / way.tp * (2 if shape.gated else 1)
    wide = WIDE if way.graph == "eager" else way.stream
    return tokens * (hidden + 2 * wide * shape.dim)


def recomputed_bytes(shape: Transformer, way: Way, tokens: int) -> float:
    """Bytes that one block recomputes for its backward pass, with rounding: what it would save, less what it kept."""
    whole = sum(block_bytes(shape, replace(way, ops=False), tokens))
    return max(0.0, whole - sum(block_bytes(shape, way, tokens))) if way.ops else whole


def kept_layers(num_layers: int, layout: Layout) -> tuple[int, int]:
    """(layers that keep their saved tensors, layers that keep only their input and are recomputed)."""
    if layout.activation_checkpointing == "full":
        return 0, num_layers
    if layout.activation_checkpointing == "selective":
        again = -(-num_layers // layout.activation_checkpointing_every)
        return num_layers - again, again
    return num_layers, 0


def end_bytes(shape: Transformer, way: Way, tokens: int, is_first: bool, is_last: bool) -> float:
    """Bytes saved outside the blocks: by the embedding's dropout and norm, by the last norm, and the head's input."""
    d, e, saved = shape.dim, way.product, 0.0
    if is_first:
        saved += tokens * (d if shape.dropout and way.graph == "eager" else 0)
        if shape.kind == "bert":
            saved += tokens * (WIDE * d + 8)
        saved += tokens * e * shape.patch_inputs
    if is_last:
        asked = tokens * shape.asked
        between = way.tp if way.sequence_parallel else 1
        # ViT's norm reads only the class token, but as a view of all tokens, which stay alive
        before = tokens if shape.kind == "vit" else asked
        norm = WIDE if way.graph == "eager" else way.stream
        saved += before * norm * d / between + asked * (WIDE if way.wide_inputs else e) * d
        if shape.kind == "bert":  # transform, GELU and norm on the masked tokens, or pooler and tanh
            saved += asked * (3 * e * d + WIDE * d)
    return saved


# ---- convolutions --------------------------------------------------------------------------------------------


def convolution_bytes(shape: Convolutions, layout: Layout) -> float:
    """Bytes for one image, at the peak of the backward pass.

    The norm saves the convolution's result; the activation and the next convolution save the activation's result.
    Pooling also saves the index of the largest pixel: 8 bytes per output. A recomputed unit keeps its input; early
    units are the widest, so the peak can be at any unit.
    """
    e, picture = product_bytes(layout.precision), shape.image_size**2 * shape.channels
    saved: dict[int, float] = {-1: float(e * picture)}
    inputs: dict[int, float] = {-1: saved[-1]}
    widest: dict[int, float] = {}
    before = float(e * picture)
    for layer in shape.layers:
        unit, out = layer.unit, float(e * layer.outputs)
        inputs.setdefault(unit, before)
        # a shortcut's norm has no activation; `ops` keeps the convolutions' results
        kept = out if layer.shortcut or layout.activation_checkpointing == "ops" else 2 * out
        pooled = shape.pooled == "each" or (shape.pooled == "stem" and unit == -1)
        if pooled:
            kept += (e + 8) * layer.outputs / 4
        saved[unit] = saved.get(unit, 0.0) + kept
        widest[unit] = max(widest.get(unit, 0.0), out)
        if not layer.shortcut:
            before = out / 4 if pooled else out
    units = sorted(unit for unit in saved if unit != -1)
    again = {unit for unit in units if is_recomputed(unit, layout)}
    waiting, worst = saved[-1], saved[-1]
    for unit in units:
        waiting += inputs[unit] if unit in again else saved[unit]
        worst = max(worst, waiting + (saved[unit] if unit in again else 0.0) + 2 * widest[unit])
    return worst


def is_recomputed(index: int, layout: Layout) -> bool:
    """Is the layer with this index recomputed? Matches recompute.checkpoint_layers."""
    mode = layout.activation_checkpointing
    return mode == "full" or (mode == "selective" and index % layout.activation_checkpointing_every == 0)
