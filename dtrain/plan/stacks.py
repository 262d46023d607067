"""The software that runs a step: what its kernels move, how it attends, what it hides behind computation.

A stack says how a program is built, not how fast it was measured to be. Ours follow from the configuration; the others
are those of published tables (benchmarks/planner).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dtrain.plan.layout import Layout


@dataclass(frozen=True)
class Stack:
    """One way to execute a transformer."""

    name: str
    attention: str = "cudnn"  # cudnn | flash2 | flash1 (kernels.ATTENTION) | scores: they are written to memory
    kernels: str = "eager"  # eager: one kernel an operation · fused: by hand (Megatron) · compiled: by torch.compile
    stream: int = 4  # bytes of an element of the residual stream, and of what a norm reads and writes
    masters: str = (
        "autocast"  # autocast: weights are cast in every pass · held: they are 16-bit, beside the optimizer's
    )
    dropout: bool = False  # the model is trained with dropout, also in attention
    gradient: int = 4  # bytes of an element of a gradient when it is reduced
    overlap: bool = True  # communication of data ranks runs beside computation
    launch: float = 1.0  # host time of a kernel, in hardware.launch_us
    matmul: float = 1.0  # share of hardware.matmul_tflops that its library reaches
    collectives_per_layer: int = 1  # gathers of one layer's weights in one pass: 1, or one for each weight
    sharded_head: bool = False  # tensor ranks cut embedding and logits, too, without being told


EAGER = Stack("eager")
COMPILED = replace(EAGER, name="compiled", kernels="compiled")
# DeepSpeed holds 16-bit weights; its engine's hooks make every launch dearer.
ZERO = replace(EAGER, name="zero", masters="held", gradient=2)

STACKS = {
    stack.name: stack
    for stack in (
        EAGER,
        COMPILED,
        ZERO,
        # fused softmax, bias and dropout; gradients reduced after the last backward pass (arXiv 2104.04473)
        Stack("megatron-2021", "scores", "fused", 2, "held", True, 2, False, sharded_head=True),
        Stack("megatron-2020", "scores", "fused", 2, "held", True, 2, False, sharded_head=True),
        Stack("megatron-deepspeed", "scores", "fused", 2, "held", True, 2, False, sharded_head=True),
        # ZeRO-3 of 2021 gathers weight by weight: 12 of a GPT layer
        Stack("deepspeed-2021", "scores", "fused", 2, "held", True, 2, False, collectives_per_layer=12),
        Stack("llm-foundry", "flash1", "eager", 2, "held", False, 4, True),
        Stack("torchtitan", "flash2", "compiled", 2, "held", False, 4, True),
        Stack("llm.c", "cudnn", "fused", 2, "held", False, 2, True),
        Stack("nanogpt-compile", "flash2", "compiled", 4, "autocast", False, 4, True),
        Stack("nanogpt-eager", "scores", "eager", 4, "autocast", False, 4, True),
    )
}


def stack_of(layout: Layout) -> Stack:
    """Our own software, as the layout runs it."""
    if layout.data.startswith("zero"):
        return replace(ZERO, kernels="compiled") if layout.compile else ZERO
    return COMPILED if layout.compile else EAGER
