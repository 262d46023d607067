"""`script.env`: the variables by which a program finds its rank and peers, as torchrun and other launchers set them.

torchrun's own (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT) are always there. Other
launchers also set the address and a free port of each rank: here each rank publishes its own in RUN/logs.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dtrain.runs.folder import look_again, read_json, write_json
from dtrain.runs.protocol import Deadline, free_port

PEERS_S = 120.0  # for all ranks to write their addresses
ADDRESS = "logs/address-{}.json"


@contextmanager
def environment(world: str, run_dir: Path) -> Iterator[dict[str, str]]:
    """Yield the variables that a program of this world expects; what they need runs until the program has ended."""
    ranks = {name: int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    if world == "torchrun":
        yield {}
    elif world == "mpi":
        yield mpi(ranks)
    else:
        with contextlib.ExitStack() as stack:
            peers = addresses(run_dir, ranks, {"host": own_address(), "port": free_port()})
            if world == "horovod":
                yield stack.enter_context(horovod(run_dir, ranks, peers))
            else:
                yield tensorflow(ranks, peers) if world == "tensorflow" else jax(ranks, peers)


def mpi(ranks: dict[str, int]) -> dict[str, str]:
    """Return what Open MPI and MPICH set. It starts no MPI: on SLURM, `cluster.srun=[--mpi=pmix]` does."""
    ompi = {"RANK": "RANK", "SIZE": "WORLD_SIZE", "LOCAL_RANK": "LOCAL_RANK", "LOCAL_SIZE": "LOCAL_WORLD_SIZE"}
    found = {f"OMPI_COMM_WORLD_{theirs}": str(ranks[ours]) for theirs, ours in ompi.items()}
    return found | {"PMI_RANK": str(ranks["RANK"]), "PMI_SIZE": str(ranks["WORLD_SIZE"])}


def tensorflow(ranks: dict[str, int], peers: list[dict[str, Any]]) -> dict[str, str]:
    """Return TF_CONFIG: every worker's address, and which one this is."""
    workers = [f"{peer['host']}:{peer['port']}" for peer in peers]
    return {
        "TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": ranks["RANK"]}})
    }


def jax(ranks: dict[str, int], peers: list[dict[str, Any]]) -> dict[str, str]:
    """Return what jax.distributed.initialize() reads."""
    return {
        "JAX_COORDINATOR_ADDRESS": f"{peers[0]['host']}:{peers[0]['port']}",
        "JAX_NUM_PROCESSES": str(ranks["WORLD_SIZE"]),
        "JAX_PROCESS_ID": str(ranks["RANK"]),
    }


@contextmanager
def horovod(run_dir: Path, ranks: dict[str, int], peers: list[dict[str, Any]]) -> Iterator[dict[str, str]]:
    """Yield Horovod's variables for gloo; rank 0 runs the server by which its ranks find each other."""
    size, per_node = ranks["WORLD_SIZE"], ranks["LOCAL_WORLD_SIZE"]
    places = [
        {
            "rank": rank, "size": size, "local_rank": rank % per_node, "local_size": per_node,
            "cross_rank": rank // per_node, "cross_size": size // per_node,
        }
        for rank in range(size)
    ]  # fmt: skip
    server = None
    if ranks["RANK"] == 0:
        from horovod.runner.common.util.hosts import SlotInfo
        from horovod.runner.http.http_server import RendezvousServer

        server = RendezvousServer(verbose=0)
        port = server.start()
        server.init([SlotInfo(hostname=host_name(peers, place["rank"], per_node), **place) for place in places])
        write_json(run_dir / "logs" / "horovod.json", {"port": port, "attempt": attempt()})
    port = wait_for(run_dir / "logs" / "horovod.json", "rank 0's Horovod server")["port"]
    mine = {f"HOROVOD_{name.upper()}": str(value) for name, value in places[ranks["RANK"]].items()}
    try:
        yield mine | {
            "HOROVOD_HOSTNAME": host_name(peers, ranks["RANK"], per_node),
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": peers[0]["host"], "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
            "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo",
            **({"HOROVOD_GLOO_IFACE": name} if (name := peers[ranks["RANK"]]["interface"]) else {}),
        }  # fmt: skip
    finally:
        if server is not None:
            server.stop()


def host_name(peers: list[dict[str, Any]], rank: int, per_node: int) -> str:
    """Name a rank's node as all its ranks do: by the address of the first of them."""
    return str(peers[rank // per_node * per_node]["host"])


# ---- who is where --------------------------------------------------------------------------------------------


def attempt() -> str:
    """Name this start of the ranks: the files of an earlier one may still be there."""
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"


def addresses(run_dir: Path, ranks: dict[str, int], mine: dict[str, Any]) -> list[dict[str, Any]]:
    """Publish this rank's address; return the addresses of all ranks."""
    mine |= {"attempt": attempt(), "interface": interface(mine["host"])}
    own = run_dir / ADDRESS.format(ranks["RANK"])
    found = []
    for rank in range(ranks["WORLD_SIZE"]):
        write_json(own, mine)  # again: node 0 removes the files of an earlier attempt when it starts its ranks
        found.append(wait_for(run_dir / ADDRESS.format(rank), f"rank {rank}", lambda: write_json(own, mine)))
    return found


def wait_for(path: Path, what: str, again: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Read a file that another rank of this attempt writes."""
    deadline = Deadline(PEERS_S)
    while (found := read_json(path)).get("attempt") != attempt():
        if deadline.left() <= 0:
            raise SystemExit(f"{what} wrote no address into {path} in {deadline}")
        time.sleep(0.2)
        again()
        look_again(path.parent)
    return found


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
    """Return the name of the network interface with this address; "": not known."""
    try:
        import psutil
    except ImportError:
        return ""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return name
    return ""
