"""Cost of the optimizer: gradient norm, clipping and update, on the GPU or in host memory."""

from __future__ import annotations

from dtrain.config.hardware import Hardware
from dtrain.plan.layout import Layout
from dtrain.plan.ledger import Item
from dtrain.plan.memory.states import moment_bytes
from dtrain.plan.time.roofline import moved_s

# Bytes that an update moves per trained fp32 parameter: gradient norm 4, clipping 8, reads of weight and gradient and a
# write of the weight 12, and 8 for each moment. The fused kernel clips while it updates.
BYTES, MOMENT = 24.0, 8.0
CLIPPING = 8.0
# torch's AdamW relative to DeepSpeed's rate on the host: 3.5 s for GPT-2 1.5B under fsdp, offload=cpu, 16 cores.
TORCH_ON_HOST = 0.085
# Shares of a copy's rate, from GPT-2 1.5B (1.56 billion parameters) on an H200: 18 ms in torch's three passes, 12.1 ms
# for the norm and the fused kernel.
RATE, FUSED_RATE = 0.83, 0.96


def optimizer_items(layout: Layout, hardware: Hardware, held: float) -> list[Item]:
    """The update of what this rank owns: all trained parameters, or its shard if data ranks shard the state."""
    ranks = layout.replica_size or layout.token_ranks
    owned = held if layout.data == "ddp" else held / ranks
    if layout.data in ("async", "bounded"):  # an update for each micro-batch of each rank
        owned *= layout.token_ranks * layout.micro_batches
    moved = BYTES + MOMENT * layout.moments - (CLIPPING if layout.fused_update else 0.0)
    if layout.precision == "bf16-pure":
        moved /= 2
    if layout.state:  # each moment is read and written; int8 was not measured on a GPU
        usual = MOMENT / 2 if layout.precision == "bf16-pure" else MOMENT
        moved += 2 * (2 * moment_bytes(layout) - usual)
    rate = FUSED_RATE if layout.fused_update else RATE
    if layout.offload == "none":
        seconds = moved_s(hardware, owned * moved / rate)
        formula = "{:.3g} parameters × {:.0f} bytes, at {:.0%} of {} GB/s"
        return [
            Item("optimizer", "norm, clipping, update", seconds, formula, (owned, moved, rate, hardware.stream_gb_s))
        ]
    return offload_items(layout, hardware, owned, moved)


def offload_items(layout: Layout, hardware: Hardware, owned: float, moved: float) -> list[Item]:
    """Gradients go to the host, AdamW runs there, weights come back; the ranks of a node share its memory bandwidth."""
    sharing = min(layout.world_size, hardware.gpus_per_node or layout.world_size)
    share = 1.0 if layout.data.startswith("zero") else TORCH_ON_HOST
    adam = owned * moved * sharing / ((hardware.cpu_adam_gb_s or 100.0) * share * 1e9)
    carried = owned * 8 / ((hardware.pcie_gb_s or 20.0) * 1e9)
    return [
        Item(
            "optimizer", "AdamW on the host", adam,
            "{:.3g} parameters × {:.0f} bytes × {} ranks of a node", (owned, moved, sharing),
        ),
        Item("optimizer", "to the host and back", carried, "{:.3g} parameters × 8 bytes over PCIe", (owned,)),
    ]  # fmt: skip
