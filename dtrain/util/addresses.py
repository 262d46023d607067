"""This host's address, and its network interface, as the other nodes of a run reach it."""

from __future__ import annotations

import contextlib
import os
import socket


def own_address() -> str:
    """Return the address of this host that the first one reaches: that of the interface towards it."""
    if int(os.environ["WORLD_SIZE"]) == int(os.environ["LOCAL_WORLD_SIZE"]):
        return "127.0.0.1"
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))  # sends nothing
        address = str(probe.getsockname()[0])
        if not address.startswith("127."):
            return address
        return os.environ["MASTER_ADDR"]
    return socket.gethostbyname(socket.gethostname())


def interface(address: str) -> str:
    """Return the network interface for gloo: the one that the cluster's profile names, or that has this address.

    "": not known.
    """
    if named := os.environ.get("GLOO_SOCKET_IFNAME"):
        return named.split(",")[0]
    try:
        import psutil
    except ImportError:
        return ""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return name
    return ""
