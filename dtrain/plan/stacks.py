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
    head: str = ""  # its kernels, where they are not the blocks'
    stream: int = 4  # bytes of an element of the residual stream, and of what a norm reads and writes
    # bytes that each parameter costs beside the products: casts of weights and gradients, sums, copies
    casts: float = 12.0  # in every pass
    sums: float = 12.0  # in every pass of a step that has several, whose gradients are summed
    dropout: bool = False  # the model is trained with dropout, also in attention
    gradient: int = 4  # bytes of an element of a gradient when it is reduced
    overlap: bool = True  # communication of data ranks runs beside computation
    launch: float = 1.0  # host time of a kernel, in hardware.launch_us
    # launches' worth of host time for a block beside its kernels: in every pass for the hooks around it; where it is
    # computed again; and once a step, for clipping, update and clearing of its weights
    hooks: float = 0.0
    again: float = 0.0
    update: float = 0.0
    matmul: float = 1.0  # share of hardware.matmul_tflops that its library reaches
    collectives_per_layer: int = 1  # gathers of one layer's weights in one pass: 1, or one for each weight
    network: float = 1.0  # share of a collective's rate across nodes that it reaches
    reduce_every_pass: bool = False  # gradients are reduced in every pass, not only in a step's last
    sharded_head: bool = False  # tensor ranks cut embedding and logits, too, without being told


# Launches of ours were measured on the H200 where the batch is so small that the host is the limit: GPT-2 124M with 8
# samples in one and in four passes, 1.5B with 4, Llama 1B with 2 (benchmarks/results/planner-h200.json). Runs of one
# layout differ by 10 to 15% there.
EAGER = Stack("eager", again=50.0)
COMPILED = replace(EAGER, name="compiled", kernels="compiled")
HOOKS = {"fsdp": 82.0, "grad_op": 82.0, "zero1": 20.0, "zero2": 117.0, "zero3": 390.0}
UPDATE = {"fsdp": 112.0, "grad_op": 112.0, "zero1": 57.0, "zero2": 127.0, "zero3": 250.0}

MEGATRON = Stack(
    "megatron-2021",
    "scores",
    "fused",
    stream=2,
    casts=0.0,
    sums=6.0,
    dropout=True,
    gradient=2,
    overlap=False,
    sharded_head=True,
)

STACKS = {
    stack.name: stack
    for stack in (
        EAGER,
        COMPILED,
        # Fused softmax, bias and dropout. Weights and gradients are 16-bit: a sum reads two and writes one. Gradients
        # are reduced after the last backward pass (arXiv 2104.04473).
        MEGATRON,
        replace(MEGATRON, name="megatron-2020"),
        replace(MEGATRON, name="megatron-deepspeed"),
        # ZeRO-3 of 2021 gathers weight by weight, 12 of a GPT layer, one after the other. Its rings reach a third of
        # what NCCL's do: 47 to 64 of 188 GB/s by DeepSpeed's own report on 256 to 1,024 A100 (benchmarks/planner/data/
        # deepspeed_azure.csv).
        replace(MEGATRON, name="deepspeed-2021", sharded_head=False, collectives_per_layer=12, network=0.3),
        # FSDP1 joins a layer's gradients in one flat tensor (4), which becomes float32 (6), in every pass
        Stack("llm-foundry", "flash1", "eager", stream=2, casts=10.0, sums=0.0, reduce_every_pass=True),
        Stack("torchtitan", "flash2", "compiled", stream=2, casts=18.0, sums=0.0),
        Stack("torchtitan-eager", "flash2", "eager", stream=2, casts=18.0, sums=0.0),
        # NVIDIA's own examples: mixed precision by Apex, attention's scores written
        Stack("ngc", "scores", "fused", stream=2, casts=12.0, sums=0.0, dropout=True, gradient=2),
        Stack("llm.c", "cudnn", "compiled", stream=2, casts=0.0, sums=6.0, gradient=2),
        Stack("nanogpt-compile", "flash2", "compiled", stream=4),
        Stack("nanogpt-eager", "scores", "eager", stream=4),
    )
}


def stack_of(layout: Layout) -> Stack:
    """Our own software, as the layout runs it."""
    base = COMPILED if layout.compile else EAGER
    if layout.compile and layout.data != "ddp":  # block by block; a block that is computed again stays as it is
        base = EAGER if layout.activation_checkpointing == "full" else replace(COMPILED, head="eager")
    stack = replace(base, hooks=HOOKS.get(layout.data, 0.0), update=UPDATE.get(layout.data, 47.0))
    if layout.data.startswith("zero"):  # 16-bit weights and gradients beside float32 masters
        return replace(stack, casts=4.0, sums=6.0, gradient=2, again=160.0 if layout.data == "zero3" else stack.again)
    if layout.data in ("fsdp", "grad_op") and layout.dp > 1:
        if layout.pp > 1:  # gathered in 16 bits once a step; gradients are summed whole, in float32
            return replace(stack, casts=0.0, sums=10.0)
        return replace(stack, casts=18.0)  # copies into and out of what is gathered, and what is reduced
    return stack
