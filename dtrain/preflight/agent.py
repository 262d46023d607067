"""The agent of a preflight, one on each node: `python -m dtrain.comm.node`, with its plan in the environment.

It looks at its node, tells the coordinator, then tries the other nodes. No torch: it answers in a second or two.
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

from dtrain import file_handles, host_memory
from dtrain.comm import checks, gpus, versions
from dtrain.comm.channel import Link, Messages
from dtrain.comm.checks import Finding, finding
from dtrain.comm.interfaces import Interface, interfaces, is_ipv6
from dtrain.comm.peers import Peer
from dtrain.words import as_dict

PLAN = "DTRAIN_PREFLIGHT"  # the environment variable; not an argument, because others can read those


def node_name(environ: Mapping[str, str] = os.environ) -> str:
    """This node by the name that the coordinator uses: SLURM's, or what the starter said."""
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
        link.wait("done", began + plan["timeout_s"])  # until then the others may still want to connect
    return 0


def look(plan: dict[str, Any], found: dict[str, Interface]) -> dict[str, Any]:
    """Everything about this node alone: {"checks": findings, "versions": name → version}."""
    seen: list[dict[str, str]] = []

    def gpu_findings() -> list[Finding]:
        seen.extend(gpus.look(visible=os.environ.get("CUDA_VISIBLE_DEVICES")))
        return gpus.gpus(plan["gpus"], seen)

    run_dir, shared = Path(plan["run_dir"]), Path(plan["messages"])
    transport = plan["transport"]
    findings = [
        *checks.guarded("interface", lambda: checks.interface(plan["interface"], found)),
        *checks.guarded("adapters", lambda: checks.adapters(transport, plan["hca"], os.environ)),
        *checks.guarded("gpus", gpu_findings),
        *checks.guarded(
            "run folder",
            lambda: checks.run_folder(
                run_dir, plan["needed_bytes"], plan["why_unknown"], shared if plan["shared"] else None
            ),
        ),
        *checks.guarded("shm", lambda: checks.shared_memory(plan["min_shm_gib"])),
        *checks.guarded("memlock", lambda: checks.memlock(transport)),
        *checks.guarded("file handles", lambda: checks.handles(plan["world_size"])),
        *checks.guarded(
            "host memory",
            lambda: checks.host_memory(
                plan["host_bytes"], host_memory.total_bytes(), host_memory.limit_bytes() is not None
            ),
        ),
    ]
    names, drivers = [gpu["name"] for gpu in seen], [gpu["driver_version"] for gpu in seen]
    return {"checks": findings, "versions": versions.versions(names, drivers)}


def clock(plan: dict[str, Any], link: Link) -> list[Finding]:
    """Reaching the coordinator, and how far the clocks are apart; the coordinator judges that over all nodes."""
    measured = link.skew()
    if measured is None:
        why = "; ".join(link.problems) or "the connection was lost"
        text = f"the node cannot reach the coordinator over the network ({why}); it answered through the run folder"
        fix = "ip -br addr and ip route on the node; is a link down, or a firewall in between?"
        return [finding("coordinator", "bad", text, fix)]
    skew, half = measured
    return [finding("clock", "ok", f"{skew:+.6f} {half:.6f}")]


def open_peers(plan: dict[str, Any], node: str, link: Link, found: dict[str, Interface]) -> list[Peer]:
    """Listen where the others will look: on the profile's interface, or on the one that the coordinator was reached
    from, on an address of IPv4 and one of IPv6. Nowhere if it is down: nobody else is to blame for that."""
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
        with contextlib.suppress(OSError):  # it cannot be used, which the interface's check says in words
            peers += [Peer(address, plan["token"], node)] if address else []
    return peers


if __name__ == "__main__":
    sys.exit(main())
