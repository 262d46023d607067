"""`script.env`: the variables by which a program finds its rank and peers, as torchrun and other launchers set them.

torchrun's own (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT) are always there. Other
launchers also set the address and a free port of each rank: here each rank publishes its own in RUN/logs.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dtrain.runs.folder import look_again, read_json, write_json
from dtrain.runs.protocol import Deadline, free_port
from dtrain.util import horovod_gloo
from dtrain.util.addresses import interface, own_address

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
        host, serves = own_address(), world == "horovod" and ranks["RANK"] == 0
        store = horovod_gloo.store(host, ranks["WORLD_SIZE"], ranks["LOCAL_WORLD_SIZE"])
        with store if serves else contextlib.nullcontext(free_port()) as port:
            peers = addresses(run_dir, ranks, {"host": host, "port": port})
            yield {"horovod": horovod, "tensorflow": tensorflow, "jax": jax}[world](ranks, peers)


def mpi(ranks: dict[str, int]) -> dict[str, str]:
    """Return what Open MPI and MPICH set. It starts no MPI: on SLURM, `cluster.srun=[--mpi=pmix]` does."""
    ompi = {"RANK": "RANK", "SIZE": "WORLD_SIZE", "LOCAL_RANK": "LOCAL_RANK", "LOCAL_SIZE": "LOCAL_WORLD_SIZE"}
    found = {f"OMPI_COMM_WORLD_{theirs}": str(ranks[ours]) for theirs, ours in ompi.items()}
    mpich = {
        "PMI_RANK": "RANK", "PMI_SIZE": "WORLD_SIZE",
        "MPI_LOCALRANKID": "LOCAL_RANK", "MPI_LOCALNRANKS": "LOCAL_WORLD_SIZE",
    }  # fmt: skip
    return found | {theirs: str(ranks[ours]) for theirs, ours in mpich.items()}


def tensorflow(ranks: dict[str, int], peers: list[dict[str, Any]]) -> dict[str, str]:
    """Return TF_CONFIG: every worker's address, and which one this is."""
    workers = [f"{peer['host']}:{peer['port']}" for peer in peers]
    return {
        "TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": ranks["RANK"]}})
    }


def jax(ranks: dict[str, int], peers: list[dict[str, Any]]) -> dict[str, str]:
    """Return what jax.distributed.initialize() reads: the coordinator's address, and ranks as Open MPI's.

    JAX 0.10 has no variables of its own for the ranks. Many programs read the two below, and pass them on.
    """
    return mpi(ranks) | {
        "OMPI_MCA_orte_hnp_uri": "",  # it looks whether this is set; its value would be another coordinator's address
        "JAX_COORDINATOR_ADDRESS": f"{peers[0]['host']}:{peers[0]['port']}",
        "JAX_NUM_PROCESSES": str(ranks["WORLD_SIZE"]),
        "JAX_PROCESS_ID": str(ranks["RANK"]),
    }


def horovod(ranks: dict[str, int], peers: list[dict[str, Any]]) -> dict[str, str]:
    """Return Horovod's variables for gloo; the store that they name is rank 0's port."""
    hosts, mine = [peer["host"] for peer in peers], peers[ranks["RANK"]]
    return horovod_gloo.variables(hosts, ranks["RANK"], ranks["LOCAL_WORLD_SIZE"], peers[0]["port"], mine["interface"])


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
