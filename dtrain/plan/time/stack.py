"""The software that runs a step: its memory traffic, its attention, and what it overlaps with computation.

A stack describes how a program is built, not its measured speed. Ours follow from the configuration; the others are
those of published tables (benchmarks/planner).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dtrain.plan.layout import Layout
from dtrain.plan.memory.activations import stream_bytes


@dataclass(frozen=True)
class Stack:
    """One way to execute a transformer."""

    name: str
    attention: str = "cudnn"  # cudnn | flash2 | flash1 (roofline.ATTENTION) | scores: they are written to memory
    kernels: str = "eager"  # eager: one kernel per op · fused: by hand (Megatron) · compiled: by torch.compile
    head: str = ""  # its kernels, if different from the blocks'; chunked: fused with the loss, in chunks
    stream: int = 4  # bytes of an element of the residual stream, and of a norm's input and output
    # bytes per parameter outside matmuls: casts of weights and gradients, sums, copies
    casts: float = 12.0  # in every pass
    sums: float = 12.0  # in every pass of a step with gradient accumulation
    dropout: bool = False  # the model is trained with dropout, also in attention
    gradient: int = 4  # bytes of an element of a gradient when it is reduced
    overlap: bool = True  # data-parallel communication overlaps with computation
    # host time per block beside its kernels, in launches: in every pass for its hooks; if it is recomputed; and once
    # per step for clipping, update and clearing of its weights
    hooks: float = 0.0
    again: float = 0.0
    update: float = 0.0
    stops_early: bool = False  # recomputation ends with the last value that the backward pass reads
    collectives_per_layer: int = 1  # all-gathers of one layer's weights in one pass: 1, or one per weight
    network: float = 1.0  # share of a collective's rate between nodes that it reaches
    reduce_every_pass: bool = False  # gradients are reduced in every pass, not only in a step's last
    sums_in_stream: bool = False  # tp input gradients are all-reduced in the stream's dtype, else in 16 bits
    sharded_head: bool = False  # tensor parallelism always shards embedding and logits too
    fp8: bool = False  # for the matmuls of blocks
    fast_products: bool = False  # large 16-bit matmuls use the fastest of several kernels


# Our launch counts were measured on the H200 with batches so small that the host is the limit: GPT-2 124M with 8
# samples in one and in four passes, 1.5B with 4, Llama 1B with 2 (benchmarks/results/planner-h200.json). Runs of one
# layout differ by 10 to 15% there. tests/plan/time/test_step.py counts the collectives of tensor ranks.
#
# torch's checkpointing, eager: hooks around every kept tensor, generator states, a frame. Inspecting each op (`ops`)
# takes about as long instead: for GPT-2 1.5B with 16 samples, 40 would be right.
AGAIN = 50.0
EAGER = Stack("eager", again=AGAIN, sums_in_stream=True, stops_early=True)
COMPILED = replace(EAGER, name="compiled", kernels="compiled", again=0.0)
HOOKS = {"fsdp": 82.0, "grad_op": 82.0, "zero1": 20.0, "zero2": 117.0, "zero3": 390.0}
# Host time of a fused update of all parameters, relative: 1 ms for the 580 tensors of GPT-2 1.5B, and the norm.
FUSED_UPDATE = 0.1
UPDATE = {"fsdp": 112.0, "grad_op": 112.0, "zero1": 57.0, "zero2": 127.0, "zero3": 250.0}

# Host cost of Megatron's checkpointing relative to torch's: no hooks, but generator states to read, set and restore,
# and a nested backward pass. Measured on a CPU (benchmarks/planner/again.py: 0.225 to 0.232, four runs).
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
        # ZeRO-3 of 2021 gathers weight by weight, 12 per GPT layer, one after the other. Its rings reach a third of
        # NCCL's rate: 47 to 64 of 188 GB/s by DeepSpeed's own report on 256 to 1,024 A100
        # (benchmarks/planner/data/deepspeed_azure.csv).
        replace(MEGATRON, name="deepspeed-2021", sharded_head=False, collectives_per_layer=12, network=0.3),
        # FSDP1 joins a layer's gradients in one flat tensor (4), which is cast to fp32 (6), in every pass
        Stack("llm-foundry", "flash1", "eager", stream=2, casts=10.0, sums=0.0, reduce_every_pass=True),
        Stack("torchtitan", "flash2", "compiled", stream=2, casts=18.0, sums=0.0),
        Stack("torchtitan-eager", "flash2", "eager", stream=2, casts=18.0, sums=0.0),
        # NVIDIA's own examples: mixed precision by Apex; attention writes its scores
        Stack("ngc", "scores", "fused", stream=2, casts=12.0, sums=0.0, dropout=True, gradient=2),
        Stack("llm.c", "cudnn", "compiled", stream=2, casts=0.0, sums=6.0, gradient=2),
        Stack("nanogpt-compile", "flash2", "compiled", stream=4),
        Stack("nanogpt-eager", "scores", "eager", stream=4),
    )
}


# Not measured: DTensor's dispatch around each linear layer of a tensor-parallel block, and the schedule's own work per
# stage and micro-batch. Assumed to be as expensive as fsdp's hooks, which are Python too.
DISPATCH = 82.0


def sharded(layout: Layout) -> bool:
    """Does FSDP2 handle the data ranks? Also under data=ddp of tensor, pipeline and 3d: in groups of one."""
    if layout.strategy in ("tensor", "pipeline", "3d"):
        return layout.token_ranks > 1
    return layout.data in ("fsdp", "grad_op")


def stack_of(layout: Layout) -> Stack:
    """Return our own stack for the layout."""
    base = EAGER if layout.compile == "none" else COMPILED  # COMPILED has recomputation in its graphs
    head = "chunked" if layout.fused_loss else "eager" if layout.compile == "blocks" else ""
    data = "fsdp" if sharded(layout) else layout.data
    hooks = HOOKS.get(data, 0.0) + DISPATCH * ((layout.tp > 1) + (layout.pp > 1))
    update = UPDATE.get(data, 47.0) * (FUSED_UPDATE if layout.fused_update else 1.0)
    stack = replace(base, head=head, stream=stream_bytes(layout), hooks=hooks, update=update)
    if layout.fast_products and layout.precision in ("bf16", "bf16-pure", "fp16"):
        stack = replace(stack, fast_products=True, casts=6.0)  # their weight gradients need no cast
    if layout.precision == "fp8":
        stack = replace(stack, fp8=True)
    if layout.precision == "bf16-pure":
        stack = replace(stack, casts=0.0, sums=6.0, gradient=2)
    if layout.data.startswith("zero"):
        # 16-bit weights beside fp32 master weights. DeepSpeed's copies: gradients into buckets, in fp32 (6), and from
        # there into the owner's part (8); under zero3 also out of gathered buffers, twice (8)
        copies = {"zero1": 4.0, "zero2": 14.0, "zero3": 22.0}[layout.data]
        expensive = layout.data == "zero3" and layout.compile == "none"
        return replace(stack, casts=copies, sums=6.0, again=160.0 if expensive else stack.again)
    if sharded(layout) and layout.token_ranks > 1:
        if layout.pp > 1:  # gathered in 16 bits once per step; full gradients are summed in fp32
            return replace(stack, casts=0.0, sums=10.0)
        return replace(stack, casts=18.0)  # copies into and out of gathered and reduced buffers
    return stack
