"""Read from NCCL's log (NCCL_DEBUG=INFO) which network it chose, and whether the profile asks for it.

NCCL falls back from InfiniBand to sockets without a warning; the run then works, at a tenth of the speed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dtrain.util.format import as_dict

# A channel's line is reliable ("0[0] -> 8[0] [send] via NET/IB/0/GDRDMA"); announcements come before any channel.
CHANNEL = re.compile(r"NCCL INFO Channel \d+(?:/\d+)? ?:.* via NET/([^/\n]+)/\d+")
ANNOUNCED = re.compile(
    r"NCCL INFO (?:Using network|Assigned NET plugin) ([^\n]+?)(?: to comm\b[^\n]*)?\s*$", re.MULTILINE
)
INSIDE = re.compile(r"NCCL INFO Channel \d+(?:/\d+)? ?:.* via (P2P|SHM|NVLS|MNNVL)\b")
GDR = re.compile(r"via NET/[^\n]*/(?:GDRDMA|GDR)\b|GPU Direct RDMA Enabled")
# NCCL's messages about a network that it did not use
REASONS = re.compile(
    r"NCCL (?:INFO|WARN) ((?:NET/\w+ ?:? ?)?[^\n]*(?:No device found|Failed to open lib|Could not find: ?lib|"
    r"ibv_\w+ failed|No eligible providers|failed to initialize|[Ff]ailed to load|NCCL_IB_DISABLE set by environment|"
    r"NCCL_NET set by environment)[^\n]*)"
)
WORDS = {"socket": "sockets", "ib": "InfiniBand", "efa": "EFA", "gib": "gIB", "fastrak": "FasTrak"}
SAME = {"ib": ("ib", "gib"), "efa": ("efa",), "socket": ("socket", "fastsocket")}
FIXES = {
    "ib": "the node must show active adapters (ibstat) of cluster.fabric.hca, NCCL_IB_DISABLE must not be 1, and "
    "libibverbs must be installed",
    "efa": "install aws-ofi-nccl and put its lib folder on LD_LIBRARY_PATH in cluster.setup",
    "socket": "NCCL_NET=Socket, as cluster=gcp-ethernet sets it; check what your environment sets instead",
}


def chosen(text: str) -> str | None:
    """Return the network between nodes: socket, ib, efa, gib, …; None if not logged. Sockets anywhere win."""
    used = [network(name) for name in CHANNEL.findall(text)] or [network(name) for name in ANNOUNCED.findall(text)][-1:]
    return "socket" if "socket" in used else used[-1] if used else None


def network(name: str) -> str:
    """Map NCCL's name of a network to ours."""
    name = name.strip().lower()
    if name in ("aws libfabric", "libfabric", "ofi"):
        return "efa"
    return "ib" if name in ("ibext", "ib_sharp", "ibext_v8", "sharp") else name


def inside(text: str) -> str | None:
    """Transport between GPUs of a node: "P2P" (NVLink or PCIe), "SHM" (host memory), "P2P and SHM"; or None."""
    return " and ".join(sorted(set(INSIDE.findall(text)))) or None


def direct(text: str) -> bool:
    """Do the adapters access GPU memory directly (GPUDirect RDMA)?"""
    return bool(GDR.search(text))


def mismatch(config: Mapping[str, Any], text: str) -> str | None:
    """Describe a network other than the requested one, why, and a fix; None if they match or nothing was logged."""
    asked = as_dict(config["cluster"].get("fabric")).get("transport")
    used = chosen(text)
    if asked not in SAME or used is None or used in SAME[asked]:
        return None
    reasons = list(dict.fromkeys(r.strip() for r in REASONS.findall(text)))
    because = f" (NCCL: {'; '.join(reasons[:2])})" if reasons else ""
    what = f"{WORDS[asked]} requested (cluster.fabric.transport={asked}), {WORDS.get(used, used)} used{because}"
    return f"{what}\n  fix: {FIXES[asked]}"
