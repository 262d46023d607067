"""The preflight agent, one per node: `python -m dtrain.preflight.agent`, with its plan in the environment.

It checks its node, reports to the coordinator, then tries to reach the other nodes. No torch: it takes 1 to 2 seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dtrain.preflight import gpus, node_checks, versions
from dtrain.preflight.channel import Link, Messages
from dtrain.preflight.interfaces import Interface, interfaces, is_ipv6
from dtrain.preflight.node_checks import Finding, finding
from dtrain.preflight.reachability import Peer
from dtrain.util import file_handles, host_memory
from dtrain.util.format import as_dict

PLAN = "DTRAIN_PREFLIGHT"  # an environment variable: other users can read a process's arguments


def node_name(environ: Mapping[str, str] = os.environ) -> str:
    """Return this node's name as the coordinator knows it: SLURM's, or the one that the starter set."""
    return environ.get("DTRAIN_NODE") or environ.get("SLURMD_NODENAME") or socket.gethostname()


def main() -> int:
    began = time.monotonic()
    file_handles.raise_limit()  # it connects to all other nodes
    plan, node = json.loads(os.environ[PLAN]), node_name()
    messages = Messages(Path(plan["messages"]))
    link = Link([(host, plan["port"]) for host in plan["addresses"]], plan["token"], node, messages)
    found = interfaces()
    report = look(plan, found)
    report["checks"] += clock(plan, link)
    peers = open_peers(plan, node, link, found)
    report["peers"] = [peer.address for peer in peers]
    named = found.get(plan["interface"] or "")
    report["speed_mb_s"] = named.speed_mb_s if named else None
    link.post("report", report)

    others = link.wait("peers", began + plan["timeout_s"])
    addresses = {n: (str(a[0]), int(a[1])) for n, a in as_dict(others.get("peers")).items()}
    order, mine = list(addresses), addresses.pop(node, None)
    peer = next((peer for peer in peers if peer.address == mine), None)
    if peer:
        result: dict[str, Any] = {"reach": peer.reach(addresses, plan["reach_s"])}
        reached = {n: addresses[n] for n, why in result["reach"].items() if not why}
        result["streams"] = peer.streams(reached, order, plan["reach_s"] / 2)
        link.post("result", result)
        link.wait("done", began + plan["timeout_s"])  # until then other nodes may still connect
    return 0


def look(plan: dict[str, Any], found: dict[str, Interface]) -> dict[str, Any]:
    """Check this node on its own: {"checks": findings, "versions": name → version}."""
    seen: list[dict[str, str]] = []

    def gpu_findings() -> list[Finding]:
        seen.extend(gpus.look(visible=os.environ.get("CUDA_VISIBLE_DEVICES")))
        return gpus.gpus(plan["gpus"], seen)

    run_dir, shared = Path(plan["run_dir"]), Path(plan["messages"])
    transport = plan["transport"]
    findings = [
        *node_checks.guarded("interface", lambda: node_checks.interface(plan["interface"], found)),
        *node_checks.guarded("adapters", lambda: node_checks.adapters(transport, plan["hca"], os.environ)),
        *node_checks.guarded("gpus", gpu_findings),
        *node_checks.guarded(
            "run folder",
            lambda: node_checks.run_folder(
                run_dir, plan["needed_bytes"], plan["why_unknown"], shared if plan["shared"] else None
            ),
        ),
        *node_checks.guarded("shm", lambda: node_checks.shared_memory(plan["min_shm_gib"])),
        *node_checks.guarded("memlock", lambda: node_checks.memlock(transport)),
        *node_checks.guarded("file handles", lambda: node_checks.handles(plan["world_size"])),
        *node_checks.guarded(
            "host memory",
            lambda: node_checks.host_memory(
                plan["host_bytes"], host_memory.total_bytes(), host_memory.limit_bytes() is not None
            ),
        ),
    ]
    names, drivers = [gpu["name"] for gpu in seen], [gpu["driver_version"] for gpu in seen]
    return {"checks": findings, "versions": versions.versions(names, drivers)}


def clock(plan: dict[str, Any], link: Link) -> list[Finding]:
    """Check the connection to the coordinator and the clock skew, which the coordinator judges over all nodes."""
    measured = link.skew()
    if measured is None:
        why = "; ".join(link.problems) or "the connection was lost"
        text = f"the node cannot reach the coordinator over the network ({why}); it answered through the run folder"
        fix = "ip -br addr and ip route on the node; is a link down, or is there a firewall?"
        return [finding("coordinator", "bad", text, fix)]
    skew, half = measured
    return [finding("clock", "ok", f"{skew:+.6f} {half:.6f}")]


def open_peers(plan: dict[str, Any], node: str, link: Link, found: dict[str, Interface]) -> list[Peer]:
    """Listen where the others connect: on the profile's interface, or on the one used to reach the coordinator, on one
    IPv4 and one IPv6 address. Nowhere if the interface is down: other nodes must not be blamed for that."""
    addresses: tuple[str, ...] = ()
    if plan["interface"] is not None:
        named = found.get(plan["interface"])
        addresses = named.addresses if named and named.up and named.running else ()
    elif link.stream is not None:
        mine = str(link.stream.getsockname()[0])
        addresses = (mine, *next((i.addresses for i in found.values() if mine in i.addresses), ()))
    peers = []
    for ipv6 in (False, True):
        address = next((a for a in addresses if is_ipv6(a) == ipv6), None)
        with contextlib.suppress(OSError):  # unusable; the interface check reports why
            peers += [Peer(address, plan["token"], node)] if address else []
    return peers


if __name__ == "__main__":
    sys.exit(main())
