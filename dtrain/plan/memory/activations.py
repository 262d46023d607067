"""What the backward pass needs of the forward pass, in bytes: what autograd really saves in our models, op by op.

Norms compute in float32; products are in 2 bytes under bf16 and fp16, the residual stream under bf16 (float32 under the
others, and in what was measured before). An eager block saves for each token (d: dim, h: hidden_dim, e: bytes of a
product's numbers):

- of a norm its input in float32 (4 d) and its statistics; of a linear layer its input in e bytes. Where the stream is
  float32 each layer casts for itself, so q, k and v have three copies (autocast remembers casts of weights only);
- of attention queries, keys, values, its result, and the logarithm of each row's sum (4 bytes a head);
- of the activation its input and its result; a gated one has the other factor and the product, too.

activation_checkpointing=ops keeps the block's input and what products and attention gave, and nothing else.

torch.compile's partitioner keeps less: one cast for all layers that read it, the gate's activation is computed again;
and block by block it keeps what attention gave in e bytes instead of the float32 sum with it. These lists are those of
its graphs (torch 2.13, counted in tests/plan/test_activations.py), and the H200's figures agree to 1%.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from dtrain.plan.counts import block_linears, is_target
from dtrain.plan.layout import Layout
from dtrain.plan.shape import Convolutions, Transformer

WIDE = 4  # bytes of a float32 number
MIB = 2**20
GIB = 2**30


def product_bytes(precision: str) -> int:
    """Of a number that goes through a matrix product."""
    return 4 if precision == "fp32" else 2


def stream_bytes(layout: Layout) -> int:
    """Of a number of the residual stream."""
    return WIDE if layout.stream == "float32" else 2


def allocated(size: float) -> float:
    """What CUDA's caching allocator takes for a tensor: from 10 MiB on, pieces of 2 MiB whose rest is only given away
    if it is more than 1 MiB (torch's kMinLargeAlloc, kRoundLarge and kSmallSize). A tensor of 25 MiB takes 26."""
    if size < 10 * MIB:
        return -(-size // 512) * 512
    rest = -size % (2 * MIB)
    return size + rest if rest <= MIB else size


@dataclass(frozen=True)
class Way:
    """How a block is computed, as far as its memory goes."""

    product: int  # bytes of a number in a product
    graph: str  # eager | block (compiled block by block) | whole (the model as one graph)
    tp: int = 1
    sequence_parallel: bool = False
    wide_inputs: bool = False  # zero3's own linear layer keeps its input as it came, in float32
    stream: int = WIDE  # bytes of a number of the residual stream
    ops: bool = False  # only results of products and attention are kept


def way_of(layout: Layout) -> Way:
    graph = {"none": "eager", "blocks": "block", "whole": "whole"}[layout.compile]
    e, stream = product_bytes(layout.precision), stream_bytes(layout)
    wide = layout.data == "zero3" and e != WIDE == stream
    ops = layout.activation_checkpointing == "ops"
    return Way(e, graph, layout.tp, layout.sequence_parallel, wide, stream, ops)


@functools.lru_cache(maxsize=4096)
def block_tensors(shape: Transformer, way: Way) -> tuple[tuple[str, float], ...]:
    """What one block saves for one token on one tensor rank: names and bytes."""
    if way.ops:
        return kept_tensors(shape, way)
    e, d, tp, eager = way.product, shape.dim, way.tp, way.graph == "eager"
    between = tp if way.sequence_parallel else 1  # who shares what lies between the products
    first, second = (WIDE, WIDE) if eager else (way.stream, e if way.graph == "block" else way.stream)
    tensors = [("residual stream", first * d / between), ("residual stream after attention", second * d / between)]
    tensors.append(("statistics of norms", 2 * (8 if shape.biased else 4) / between))
    tensors += input_tensors(shape, way)
    widths = [("queries, keys, values", d + 2 * shape.kv_dim)]
    if not shape.fused_qkv:
        widths = [("queries", d), ("keys", shape.kv_dim), ("values", shape.kv_dim)]
    tensors += [(name, e * width / tp) for name, width in widths]
    tensors += [("attention's result", e * d / tp), ("log-sums of attention", WIDE * shape.num_heads / tp)]
    if shape.rotary and saves_input(shape, "attention.proj"):  # its layout is that of the turned queries
        tensors.append(("attention's result, head by head", e * d / tp))
    tensors += score_tensors(shape, way)
    hidden = e * shape.hidden_dim / tp
    tensors.append(("MLP, before its activation", hidden))
    if shape.gated:
        tensors.append(("MLP, the other factor", hidden))
        if eager:
            tensors.append(("MLP, the gate's activation", hidden))
    if saves_input(shape, "mlp.down"):
        tensors.append(("MLP, after its activation", hidden))
    if shape.dropout and eager:
        tensors += [("dropout: which stay", d / between)] * 2
    if shape.lora_rank:
        count = sum(is_target(shape, linear) for linear in block_linears(shape))
        tensors.append(("adapters, between their matrices", float(count * e * shape.lora_rank)))
    return tuple(tensors)


def kept_tensors(shape: Transformer, way: Way) -> tuple[tuple[str, float], ...]:
    """The same under activation_checkpointing=ops. Tensor ranks keep a sum beside their part of it.

    A graph keeps the last product only where a norm follows in the same block; eager contexts cannot know.
    """
    e, d, tp = way.product, shape.dim, way.tp
    between = tp if way.sequence_parallel else 1
    sums = e * d + (e * d / between if tp > 1 else 0.0)
    tensors = [("residual stream", way.stream * d / between)]
    tensors += [("queries, keys, values", e * (d + 2 * shape.kv_dim) / tp), ("attention's result", e * d / tp)]
    tensors += [("log-sums of attention", WIDE * shape.num_heads / tp), ("attention's projection", sums)]
    tensors += [("MLP, before its activation", e * shape.hidden_dim / tp)]
    if shape.gated:
        tensors.append(("MLP, the other factor", e * shape.hidden_dim / tp))
    if way.graph == "eager" or shape.kind == "bert":
        tensors.append(("MLP's result", sums))
    if not shape.packed:
        tensors += score_tensors(shape, way)
    for linear in block_linears(shape):
        if shape.lora_rank and is_target(shape, linear):
            tensors.append(("adapters, both products", float(e * (shape.lora_rank + linear.outs))))
    return tuple(tensors)


def input_tensors(shape: Transformer, way: Way) -> list[tuple[str, float]]:
    """The inputs of a block's first products, of attention and of the MLP; never cut by tensor ranks."""
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
    """A weight's gradient needs the layer's input; a frozen weight has none, but an adapter beside it does."""
    if not shape.lora_rank:
        return True
    return any(linear.name == name and is_target(shape, linear) for linear in block_linears(shape))


def score_tensors(shape: Transformer, way: Way) -> list[tuple[str, float]]:
    """Where attention has no kernel that forgets its scores, or reads a mask."""
    e, tp = way.product, way.tp
    if shape.packed:  # the mask becomes numbers to add, in every layer anew; shared heads are written out
        return [("mask", float(e * shape.seq_len)), ("shared heads", 2.0 * e * (shape.dim - shape.kv_dim) / tp)]
    if e == WIDE and shape.num_kv_heads < shape.num_heads:
        # no float32 kernel knows shared heads: the softmax of all scores is kept (llama-1b on an H200: 16 GiB of 30)
        return [("scores", WIDE * shape.num_heads * shape.seq_len / tp)]
    return []


@functools.lru_cache(maxsize=65536)
def block_bytes(shape: Transformer, way: Way, tokens: int) -> tuple[float, float]:
    """(saved by one block for so many tokens, what rounding adds to that)."""
    sizes = [tokens * size for _, size in block_tensors(shape, way)]
    saved = sum(sizes)
    return saved, sum(allocated(size) for size in sizes) - saved


def block_again_bytes(shape: Transformer, way: Way, tokens: int) -> float:
    """The largest that one block's backward pass makes beside what was saved: gradients inside its MLP, and two of the
    residual stream. What it has used goes as they come, so of the wide ones one more is there (gated: two)."""
    hidden = way.product * shape.hidden_dim / way.tp * (2 if shape.gated else 1)
    wide = WIDE if way.graph == "eager" else way.stream
    return tokens * (hidden + 2 * wide * shape.dim)


def recomputed_bytes(shape: Transformer, way: Way, tokens: int) -> float:
    """What one block makes again for its backward pass, with rounding: all that it would save, less what it kept."""
    whole = sum(block_bytes(shape, replace(way, ops=False), tokens))
    return max(0.0, whole - sum(block_bytes(shape, way, tokens))) if way.ops else whole


def kept_layers(num_layers: int, layout: Layout) -> tuple[int, int]:
    """How many layers keep what they save, and how many only their input, to be computed again."""
    if layout.activation_checkpointing == "full":
        return 0, num_layers
    if layout.activation_checkpointing == "selective":
        again = -(-num_layers // layout.activation_checkpointing_every)
        return num_layers - again, again
    return num_layers, 0


def end_bytes(shape: Transformer, way: Way, tokens: int, is_first: bool, is_last: bool) -> float:
    """Saved outside the blocks: by the embedding's dropout and norm, by the last norm and the head's input."""
    d, e, saved = shape.dim, way.product, 0.0
    if is_first:
        saved += tokens * (d if shape.dropout and way.graph == "eager" else 0)
        if shape.kind == "bert":
            saved += tokens * (WIDE * d + 8)
        saved += tokens * e * shape.patch_inputs
    if is_last:
        asked = tokens * shape.asked
        between = way.tp if way.sequence_parallel else 1
        # ViT's norm reads the class token only, as a part of all tokens, which it so keeps
        before = tokens if shape.kind == "vit" else asked
        norm = WIDE if way.graph == "eager" else way.stream
        saved += before * norm * d / between + asked * (WIDE if way.wide_inputs else e) * d
        if shape.kind == "bert":  # transform, GELU and norm on the asked tokens, or pooler and tanh
            saved += asked * (3 * e * d + WIDE * d)
    return saved


# ---- convolutions --------------------------------------------------------------------------------------------


def convolution_bytes(shape: Convolutions, layout: Layout) -> float:
    """Of one picture, at the worst moment of the backward pass.

    A convolution's result is saved by the norm after it, and what the activation makes of that by the activation and
    the next convolution. A pooling also saves which pixel was the largest: 8 bytes for each that comes out. A unit that
    is computed again keeps its input; early units are the widest, so the worst moment may be at any unit.
    """
    e, picture = product_bytes(layout.precision), shape.image_size**2 * shape.channels
    saved: dict[int, float] = {-1: float(e * picture)}
    inputs: dict[int, float] = {-1: saved[-1]}
    widest: dict[int, float] = {}
    before = float(e * picture)
    for layer in shape.layers:
        unit, out = layer.unit, float(e * layer.outputs)
        inputs.setdefault(unit, before)
        # beside a shortcut's norm there is no activation; `ops` keeps what convolutions gave
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
    """Is the layer with this number computed again? As shared.checkpoint_layers chooses."""
    mode = layout.activation_checkpointing
    return mode == "full" or (mode == "selective" and index % layout.activation_checkpointing_every == 0)
