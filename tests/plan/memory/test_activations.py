"""What a block saves, against torch: its own hooks in eager mode, its partitioner's graph when compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dtrain.models import bert, gpt2, layers, llama, vit
from dtrain.plan.memory.activations import MIB, Way, allocated, block_tensors
from dtrain.plan.model_shape import Transformer
from dtrain.strategies.recompute import Recompute

DIM, HEADS, LENGTH = 64, 4, 48


class FusedNorm(torch.autograd.Function):
    """What a GPU's RMS norm saves: its input and 1/rms. A CPU has no such kernel, and saves more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        scale = (x.square().mean(dim=-1, keepdim=True) + 1e-5).rsqrt()
        ctx.save_for_backward(x, scale)
        return x * scale * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        raise AssertionError("only what is saved is looked at")


def block_of(kind: str, dropout: float = 0.0) -> tuple[nn.Module, Transformer]:
    sizes: dict[str, Any] = {"num_layers": 1, "dim": DIM, "num_heads": HEADS, "num_kv_heads": HEADS}
    sizes |= {"hidden_dim": 4 * DIM, "seq_len": LENGTH, "vocab_size": 512, "dropout": dropout}
    if kind == "llama":
        block = llama.Block(DIM, HEADS, 2, 3 * DIM, 1e-5, dropout)
        gated = {"num_kv_heads": 2, "hidden_dim": 3 * DIM, "gated": True, "biased": False, "rotary": True}
        return block, Transformer(**sizes | gated, fused_qkv=False)
    if kind == "bert":
        return bert.Block(DIM, HEADS, dropout), Transformer(**sizes, kind="bert", fused_qkv=False, causal=False)
    module = gpt2 if kind == "gpt2" else vit
    return module.Block(DIM, HEADS, dropout), Transformer(**sizes)


def call(kind: str, block: nn.Module, x: Tensor) -> Tensor:
    if kind != "llama":
        out: Tensor = block(x)
        return out
    angle = torch.outer(torch.arange(LENGTH).float(), torch.ones(DIM // HEADS // 2))
    out = block(x, torch.stack([angle.cos(), angle.sin()]))
    return out


def saved_bytes(kind: str, block: nn.Module, batch: int, dtype: torch.dtype, stream: torch.dtype) -> int:
    """Bytes of all that autograd keeps of one forward pass, each piece of memory once."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)  # or its address would be given to the next one
        return tensor

    alive: list[Tensor] = []
    x = torch.randn(batch, LENGTH, DIM, requires_grad=True).to(stream) + 0.0  # no leaf: autocast remembers its casts
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16),
    ):
        call(kind, block, x)
    return sum(kept.values())


@pytest.mark.parametrize("dtype", ["fp32", "bf16 float32", "bf16 bfloat16"])
@pytest.mark.parametrize("kind", ["gpt2", "vit", "bert", "llama"])
def test_an_eager_block_saves_what_the_list_says(kind: str, dtype: str, monkeypatch: Any) -> None:
    if kind == "llama":
        fused = lambda norm, x: FusedNorm.apply(x.float(), norm.weight).to(x.dtype)  # noqa: E731
        monkeypatch.setattr(layers.RMSNorm, "forward", fused)
    block, shape = block_of(kind)
    product, stream = (torch.bfloat16 if word in dtype else torch.float32 for word in ("bf16", "bfloat16"))
    more, less = (saved_bytes(kind, block, batch, product, stream) for batch in (6, 2))  # the weights' casts cancel out
    way = Way(product.itemsize, "eager", stream=stream.itemsize)
    tensors = dict(block_tensors(shape, way))
    expected = sum(size for _, size in block_tensors(shape, way))
    if kind == "llama":  # a CPU's attention writes its result token by token, and with shared heads keeps no scores
        expected -= tensors["attention output, head by head"] + tensors.get("scores", 0.0)
        shared = 2 * way.product * (shape.dim - shape.kv_dim)  # but it writes them out
        assert (more - less) / (4 * LENGTH) in (expected, expected + shared)
    else:
        assert (more - less) / (4 * LENGTH) == expected


def test_dropout_keeps_a_byte_for_each_number() -> None:
    (_, with_it), (_, without) = block_of("gpt2", 0.1), block_of("gpt2")
    way = Way(2, "eager")
    more, less = (sum(size for _, size in block_tensors(shape, way)) for shape in (with_it, without))
    assert more - less == 2 * DIM


@pytest.mark.parametrize("ops", [False, True], ids=["none", "ops"])
@pytest.mark.parametrize(
    ("kind", "stream"),
    [(kind, stream) for kind in ("gpt2", "llama") for stream in (torch.float32, torch.bfloat16)]
    + [("bert", torch.bfloat16)],
)
def test_a_compiled_block_saves_what_the_partitioner_says(kind: str, stream: torch.dtype, ops: bool) -> None:
    block, shape = block_of(kind)
    if ops:
        block.forward = Recompute(block.forward, cheap_only=True)  # type: ignore[method-assign]
    batch = 3  # no size of a weight or of the table of angles
    found: list[float] = []

    def look(graph: Any, inputs: Any) -> Any:
        """Bytes a token of the forward graph's results that have tokens: the next block's input among them."""
        (output,) = (node for node in graph.graph.nodes if node.op == "output")
        values = [n.meta["val"] for n in output.args[0] if isinstance(n, torch.fx.Node) and n.op != "placeholder"]
        of_tokens = [v for v in values if isinstance(v, Tensor) and v.ndim and v.shape[0] in (batch, batch * LENGTH)]
        found.append(sum(v.numel() * v.element_size() for v in of_tokens) / (batch * LENGTH))
        return graph.forward

    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    backend = aot_autograd(
        fw_compiler=look, bw_compiler=lambda graph, inputs: graph.forward, decompositions=select_decomp_table(),
        partition_fn=min_cut_rematerialization_partition,
    )  # fmt: skip
    torch._dynamo.reset()
    with torch.autocast("cpu", torch.bfloat16):
        torch.compile(lambda x: call(kind, block, x), backend=backend)(
            torch.randn(batch, LENGTH, DIM, dtype=stream, requires_grad=True)
        )
    expected = sum(size for _, size in block_tensors(shape, Way(2, "block", stream=stream.itemsize, ops=ops)))
    # the graph has attention's result twice, as it came and as the next product reads it: without rotary positions
    # these are two names of one memory
    twice = 0 if shape.rotary or ops else 2 * DIM
    assert found == [pytest.approx(expected + twice, abs=8)]


def test_the_allocator_rounds_large_tensors_as_torch_does() -> None:
    assert allocated(25 * MIB) == 26 * MIB
    assert allocated(24.5 * MIB) == 24.5 * MIB  # 1.5 MiB are left for others
    assert allocated(1) == 512
    assert allocated(9 * MIB) == 9 * MIB


def test_tensor_ranks_share_what_lies_between_products_only_with_sequence_parallel() -> None:
    _, shape = block_of("gpt2")
    whole, cut, both = (
        sum(size for _, size in block_tensors(shape, way))
        for way in (Way(2, "eager"), Way(2, "eager", tp=2), Way(2, "eager", tp=2, sequence_parallel=True))
    )
    assert whole > cut > both
    inputs = 2 * 2 * DIM  # of the first products, whole on every rank
    assert both == (whole - inputs) / 2 + inputs


def test_packed_documents_are_seen_through_a_mask_in_fp32() -> None:
    _, shape = block_of("gpt2")
    import dataclasses

    packed = dataclasses.replace(shape, packed=True)
    assert dict(block_tensors(packed, Way(4, "eager")))["mask"] == 4 * LENGTH
    assert "mask" not in dict(block_tensors(packed, Way(2, "eager"))), "16 bits have a kernel without one"
