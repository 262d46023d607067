"""The software that runs a step: what its kernels move, how it attends, what it hides behind computation.

A stack says how a program is built, not how fast it was measured to be. Ours follow from the configuration; the others
are those of published tables (benchmarks/planner).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dtrain.plan.activations import stream_bytes
from dtrain.plan.layout import Layout


@dataclass(frozen=True)
class Stack:
    """One way to execute a transformer."""

    name: str
    attention: str = "cudnn"  # cudnn | flash2 | flash1 (kernels.ATTENTION) | scores: they are written to memory
    kernels: str = "eager"  # eager: one kernel an operation · fused: by hand (Megatron) · compiled: by torch.compile
    head: str = ""  # its kernels, where they are not the blocks'; chunked: one operation with the loss, by chunks
    stream: int = 4  # bytes of an element of the residual stream, and of what a norm reads and writes
    # bytes that each parameter costs beside the products: casts of weights and gradients, sums, copies
    casts: float = 12.0  # in every pass
    sums: float = 12.0  # in every pass of a step that has several, whose gradients are summed
    dropout: bool = False  # the model is trained with dropout, also in attention
    gradient: int = 4  # bytes of an element of a gradient when it is reduced
    overlap: bool = True  # communication of data ranks runs beside computation
    # launches' worth of host time for a block beside its kernels: in every pass for the hooks around it; where it is
    # computed again; and once a step, for clipping, update and clearing of its weights
    hooks: float = 0.0
    again: float = 0.0
    update: float = 0.0
    stops_early: bool = False  # what is computed again ends with the last value that the backward pass reads
    collectives_per_layer: int = 1  # gathers of one layer's weights in one pass: 1, or one for each weight
    network: float = 1.0  # share of a collective's rate across nodes that it reaches
    reduce_every_pass: bool = False  # gradients are reduced in every pass, not only in a step's last
    sums_in_stream: bool = False  # tensor ranks sum a half's input gradient in the stream's type, else in 16 bits
    sharded_head: bool = False  # tensor ranks cut embedding and logits, too, without being told
    fp8: bool = False  # the products of blocks
    fast_products: bool = False  # of 16 bits: large ones by the fastest of several kernels


# Launches of ours were measured on the H200 where the batch is so small that the host is the limit: GPT-2 124M with 8
# samples in one and in four passes, 1.5B with 4, Llama 1B with 2 (benchmarks/results/planner-h200.json). Runs of one
# layout differ by 10 to 15% there. tests/plan/test_step.py counts the messages of tensor ranks.
#
# torch's checkpointing, eager: hooks around every tensor that is kept, generators' states, a frame. Looking at each
# operation (`ops`) takes about as long in place of them: GPT-2 1.5B with 16 samples would be right with 40.
AGAIN = 50.0
EAGER = Stack("eager", again=AGAIN, sums_in_stream=True, stops_early=True)
COMPILED = replace(EAGER, name="compiled", kernels="compiled", again=0.0)
HOOKS = {"fsdp": 82.0, "grad_op": 82.0, "zero1": 20.0, "zero2": 117.0, "zero3": 390.0}
# Of an update's host time in one launch for all parameters: 1 ms for the 580 tensors of GPT-2 1.5B, and the norm.
ONE_LAUNCH = 0.1
UPDATE = {"fsdp": 112.0, "grad_op": 112.0, "zero1": 57.0, "zero2": 127.0, "zero3": 250.0}

# Of what torch's checkpointing costs the host, Megatron's own: no hooks, but generators' states to read, set and put
# back, and a backward pass inside another. Measured on a CPU (benchmarks/planner/again.py: 0.225 to 0.232, four runs).
MEGATRON_AGAIN = 0.23
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
    again=MEGATRON_AGAIN * AGAIN,
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


# What was not measured: DTensor's dispatch around each linear layer of a block that tensor ranks share, and the
# schedule's own work for a stage and micro-batch. Assumed to be as dear as fsdp's hooks, which are Python, too.
DISPATCH = 82.0


def sharded(layout: Layout) -> bool:
    """Is it FSDP2 that carries the data ranks? Also under data=ddp of tensor, pipeline and 3d: in groups of one."""
    if layout.strategy in ("tensor", "pipeline", "3d"):
        return layout.dp > 1
    return layout.data in ("fsdp", "grad_op")


def stack_of(layout: Layout) -> Stack:
    """Our own software, as the layout runs it."""
    base = EAGER if layout.compile == "none" else COMPILED  # which has recomputation in its graphs
    head = "chunked" if layout.fused_loss else "eager" if layout.compile == "blocks" else ""
    data = "fsdp" if sharded(layout) else layout.data
    hooks = HOOKS.get(data, 0.0) + DISPATCH * ((layout.tp > 1) + (layout.pp > 1))
    update = UPDATE.get(data, 47.0) * (ONE_LAUNCH if layout.fused_update else 1.0)
    stack = replace(base, head=head, stream=stream_bytes(layout), hooks=hooks, update=update)
    if layout.fast_products and layout.precision in ("bf16", "bf16-pure", "fp16"):
        stack = replace(stack, fast_products=True, casts=6.0)  # their weight gradients need no cast; small ones' do
    if layout.precision == "fp8":
        stack = replace(stack, fp8=True)
    if layout.precision == "bf16-pure":
        stack = replace(stack, casts=0.0, sums=6.0, gradient=2)
    if layout.data.startswith("zero"):
        # 16-bit weights beside float32 masters. Copies as DeepSpeed makes them: gradients into buckets, in float32
        # (6), and from there into the owner's part (8); under zero3 also out of what is gathered, twice (8)
        copies = {"zero1": 4.0, "zero2": 14.0, "zero3": 22.0}[layout.data]
        dear = layout.data == "zero3" and layout.compile == "none"
        return replace(stack, casts=copies, sums=6.0, again=160.0 if dear else stack.again)
    if sharded(layout) and layout.dp > 1:
        if layout.pp > 1:  # gathered in 16 bits once a step; gradients are summed whole, in float32
            return replace(stack, casts=0.0, sums=10.0)
        return replace(stack, casts=18.0)  # copies into and out of what is gathered, and what is reduced
    return stack
