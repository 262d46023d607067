"""The GEMMs of compiled graphs, each by the kernel that is fastest for its shapes (cublaslt.py).

A pass over torch.compile's graphs, forward and backward, after its own passes: large GEMMs of 16-bit matrices on a GPU
become our op. A GEMM whose output is directly cast to fp32 (a weight's gradient) is written in fp32: one kernel less,
and no rounding in between. Nothing else changes, so models need no changes.

Not used under `deterministic=true`, nor on tensor-parallel ranks: timing decides which kernel is fastest.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from dtrain.kernels import cublaslt

aten: Any = torch.ops.aten

library = torch.library.Library("dtrain", "FRAGMENT")
library.define(
    "product(Tensor a, Tensor b, Tensor? bias, ScalarType dtype) -> Tensor", tags=(torch.Tag.flexible_layout,)
)


@torch.library.impl(library, "product", "CUDA")
def _(a: Tensor, b: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    out = a.new_empty(a.shape[0], b.shape[1], dtype=dtype)
    if cublaslt.multiply(out, a, b, bias):
        return out
    if bias is not None:
        return torch.addmm(bias, a, b, out=out)
    return torch.mm(a, b, out=out) if dtype == a.dtype else torch.mm(a, b, out_dtype=dtype, out=out)


@torch.library.impl(library, "product", "CPU")
def _(a: Tensor, b: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return (torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)).to(dtype)


@torch.library.register_fake("dtrain::product", lib=library)
def _(a: Tensor, b: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=dtype)


class FastestProducts(CustomGraphPass):
    """torch.compile calls it with each graph, just before lowering it to kernels."""

    def __init__(self, large: float = cublaslt.LARGE, device: str = "cuda") -> None:
        self.large, self.device = large, device

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,)), self.large, self.device

    def __call__(self, graph: fx.Graph) -> None:
        for node in list(graph.nodes):
            bias: Any = None
            if node.target is aten.mm.default:
                a, b = node.args
            elif node.target is aten.addmm.default and not node.kwargs:
                bias, a, b = node.args
                out, given = node.meta["val"], bias.meta["val"]
                if given.shape != out.shape[1:] or given.dtype != out.dtype:  # a bias that is not added per column
                    continue
            else:
                continue
            if self.is_large(a, b):
                self.replace(graph, node, a, b, bias)

    def is_large(self, a: Any, b: Any) -> bool:
        x, y = a.meta["val"], b.meta["val"]
        if x.device.type != self.device or x.dtype not in (torch.bfloat16, torch.float16):
            return False
        sizes = [n if isinstance(n, int) else n.node.hint or 0 for n in (*x.shape, y.shape[1])]
        return 2.0 * sizes[0] * sizes[1] * sizes[2] >= self.large

    def replace(self, graph: fx.Graph, node: fx.Node, a: Any, b: Any, bias: Any) -> None:
        """Replace `node` by our op, together with its cast to fp32 if nothing else reads it."""
        dtype, last = node.meta["val"].dtype, node
        users = list(node.users)
        if bias is None and len(users) == 1 and is_widened(users[0]):
            dtype, last = torch.float32, users[0]
        with graph.inserting_before(node):
            ours = graph.call_function(torch.ops.dtrain.product.default, (a, b, bias, dtype))
        ours.meta = {**node.meta, "val": node.meta["val"].to(dtype)}
        last.replace_all_uses_with(ours)
        graph.erase_node(last)
        if last is not node:
            graph.erase_node(node)


def is_widened(node: fx.Node) -> bool:
    """Return whether a node is a cast to fp32 that leaves the graph: inside, later ops read 16 bits faster than 32."""
    is_cast = node.target is torch.ops.prims.convert_element_type.default and node.args[1] is torch.float32
    return is_cast and all(user.op == "output" for user in node.users)


@functools.cache
def fastest_products() -> FastestProducts:
    """A shared instance: graphs compiled with two different passes are not shared between layers."""
    return FastestProducts()
