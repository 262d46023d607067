"""torch.compile: the whole model as one graph, or layer by layer."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from dtrain.kernels import cublaslt
from dtrain.kernels.compile_cache import Inductor

Compile = Literal["auto", "blocks", "whole", "none"] | bool


def compile_mode(wanted: Compile, usual: str, device: torch.device, model: nn.Module) -> str:
    """Return blocks, whole or none. `auto` uses the strategy's usual mode on a GPU if the model defines its blocks."""
    if wanted == "auto":
        wanted = device.type == "cuda" and hasattr(model, "fsdp_units")
    if wanted is True:
        return usual
    return wanted or "none"


def compile_model(model: nn.Module, mode: str) -> None:
    """Compile a model whose forward pass has no collectives: as one graph, or each block by itself.

    One graph is 1 to 2% faster on an H200: a block's last addition and the next block's norm are one kernel. With
    blocks, one graph serves all of them: gpt2-1.5b compiles in 8 s instead of 71.
    """
    if mode == "whole":
        model.compile(backend=backend())
    elif mode == "blocks":
        compile_layers(model, ends=True)


def backend() -> Inductor:
    """Return torch.compile's backend: on a GPU, with a graph pass that gives each GEMM its fastest kernel.

    That pass times kernels, and so does the compiler: two ranks may choose different ones. Tensor-parallel ranks repeat
    computations and must get the same bits, so both are turned off there.
    """
    if cublaslt.copies_stay_alike:
        return Inductor({"deterministic": True})
    if not torch.cuda.is_available() or not cublaslt.is_used():
        return Inductor({})
    from dtrain.kernels.gemm_pass import fastest_products  # imports the compiler: seconds

    return Inductor({"post_grad_custom_post_pass": fastest_products()})


def compile_layers(model: nn.Module, ends: bool = False) -> None:
    """Compile layer by layer: collectives between layers cannot be part of a graph.

    `ends`: also compile what comes before and after the layers, if no hook communicates inside it.
    """
    if not hasattr(model, "fsdp_units"):
        raise ValueError(
            f"compile=blocks: {type(model).__name__} does not define its blocks\n"
            "  fix: add fsdp_units() to the model (a list of its layers), compile=whole, or compile=none"
        )
    torch._dynamo.config.recompile_limit = 64  # a ResNet has 8 kinds of blocks, in training and in evaluation
    inductor = backend()
    for unit in model.fsdp_units():  # type: ignore[operator]
        unit.compile(backend=inductor)
    whole: Any = model
    if ends and hasattr(whole, "embedded"):
        whole.embedded = torch.compile(whole.embedded, backend=inductor)
    if ends and isinstance(getattr(whole, "norm", None), nn.Module):
        whole.norm.compile(backend=inductor)
