"""What the optimizer costs: gradient norm, clipping and update, on the GPU or in the host's memory."""

from __future__ import annotations

from dtrain.hardware import Hardware
from dtrain.plan.kernels import moved_s
from dtrain.plan.layout import Layout
from dtrain.plan.ledger import Item

# Bytes that an update moves for each trained parameter in float32: gradient norm 4, clipping 8, AdamW reads weight,
# gradient and two moments and writes all but the gradient, 28; SGD with momentum 20. One kernel clips as it updates.
BYTES = {"adamw": 40.0, "sgd": 32.0}
CLIPPING = 8.0
# What torch's AdamW reaches of DeepSpeed's rate on the host: 3.5 s for GPT-2 1.5B under fsdp, offload=cpu, 16 cores.
TORCH_ON_HOST = 0.085
# Shares of a copy's rate, from GPT-2 1.5B (1.56 billion parameters) on an H200: 18 ms in three passes of torch's, 12.1
# ms for the norm and the one kernel.
RATE, FUSED_RATE = 0.83, 0.96


def optimizer_items(layout: Layout, hardware: Hardware, held: float) -> list[Item]:
    """Of what this rank owns: all that it trains, or its share where data ranks have dealt out the state."""
    ranks = layout.replica_size or layout.dp
    owned = held if layout.data == "ddp" else held / ranks
    moved = BYTES.get(layout.optimizer, BYTES["adamw"]) - (CLIPPING if layout.fused_update else 0.0)
    if layout.precision == "bf16-pure":
        moved /= 2
    rate = FUSED_RATE if layout.fused_update else RATE
    if layout.offload == "none":
        seconds = moved_s(hardware, owned * moved / rate)
        formula = "{:.3g} parameters × {:.0f} bytes, at {:.0%} of {} GB/s"
        return [
            Item("optimizer", "norm, clipping, update", seconds, formula, (owned, moved, rate, hardware.stream_gb_s))
        ]
    return offload_items(layout, hardware, owned, moved)


def offload_items(layout: Layout, hardware: Hardware, owned: float, moved: float) -> list[Item]:
    """Gradients go to the host, AdamW runs there, weights come back; the ranks of a node share the host's memory."""
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
