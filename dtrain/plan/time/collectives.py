"""Time of collectives: latency and bandwidth, inside a node and between nodes.

NCCL's ring: every rank sends in n - 1 steps (twice as many for an all-reduce), and each step costs a hop. Measured
all-reduces over 2 to 8 A100 match with a mean error of 9% (benchmarks/planner/collectives.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from dtrain.config.hardware import Hardware

# NCCL's own values (src/graph/tuning.cc), for a file with measured bandwidths but no latencies: until the first byte
# moves, per hop inside a node (PCIe, the slower), per hop between nodes.
START_US, INSIDE_US, OUTSIDE_US = 8.4, 5.7, 14.0
STEPS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


@dataclass(frozen=True)
class Group:
    """Ranks that communicate: how many, and how many of them per node."""

    size: int
    per_node: int

    @property
    def nodes(self) -> int:
        return -(-self.size // self.per_node)


def collective_s(hardware: Hardware, kind: str, group: Group, num_bytes: float, share: float = 1.0) -> float:
    """Seconds of a collective over `num_bytes`: the whole tensor, as every rank has it before or after.

    `share`: the part of the rate between nodes that a stack reaches.
    """
    if group.size == 1:
        return 0.0
    steps = STEPS[kind] * (group.size - 1)
    reached = rate(hardware, kind, group) * (share if group.nodes > 1 else 1.0)
    return start_s(hardware) + steps * hop_s(hardware, group) + steps / group.size * num_bytes / reached


def start_s(hardware: Hardware) -> float:
    """Seconds until the first byte moves."""
    return (hardware.collective_us or START_US) * 1e-6


def hop_s(hardware: Hardware, group: Group) -> float:
    """Latency of an average ring step: most go to a neighbor in the node, one per node to the next node."""
    inside, outside = hardware.nvlink_latency_us or INSIDE_US, hardware.network_latency_us or OUTSIDE_US
    if group.nodes == 1:
        return inside * 1e-6
    share = group.nodes / group.size
    return ((1 - share) * inside + share * outside) * 1e-6


def rate(hardware: Hardware, kind: str, group: Group) -> float:
    """Bus bandwidth in bytes per second: of the links, or of the group's share of the node's adapters."""
    asked = hardware.nvlink_max_gb_s if kind == "all_reduce" else hardware.gather_max_gb_s
    links = asked or hardware.gather_max_gb_s or hardware.pcie_gb_s
    assert links and hardware.gpus_per_node
    if group.nodes == 1:
        return links * 1e9
    network = hardware.network_max_gb_s or hardware.network_busbw_gb_s
    assert network
    share = network * group.per_node / hardware.gpus_per_node
    if kind == "all_reduce" and group.nodes == 2:  # a tree of two sends each byte once over an adapter
        return min(links, share * 2 * (group.size - 1) / group.size) * 1e9
    return min(hardware.gather_max_gb_s or links, share) * 1e9


def send_s(hardware: Hardware, num_bytes: float, crosses: bool) -> float:
    """Seconds to send to one other rank, in this node or in another."""
    if not crosses:
        links = hardware.gather_max_gb_s or hardware.pcie_gb_s
        assert links
        return start_s(hardware) + num_bytes / (links * 1e9)
    assert hardware.gpus_per_node
    network = hardware.network_max_gb_s or hardware.network_busbw_gb_s
    rail = hardware.network_rail_gb_s or (network / hardware.gpus_per_node if network else None)
    assert rail
    return start_s(hardware) + (hardware.network_latency_us or OUTSIDE_US) * 1e-6 + num_bytes / (rail * 1e9)
