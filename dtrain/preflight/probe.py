"""A rank of the full preflight: `python -m dtrain.preflight.probe`, as many per node as the run will have.

It measures its device, then the collectives inside its node, across all nodes and, to find slow nodes, between pairs.
It reports each stage to the coordinator in advance, so that a hanging rank can be named.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

from dtrain.preflight.agent import node_name
from dtrain.preflight.channel import Link, Messages
from dtrain.preflight.slow_nodes import MOST_ROUNDS, Hunt
from dtrain.util import file_handles

PLAN = "DTRAIN_PROBE"
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
BUDGET_S, MOST_CALLS = 1.0, 10  # of one collective at one size


def main(kind: type[Rank] | None = None, variable: str = PLAN) -> int:
    file_handles.raise_limit()
    plan, node, local = json.loads(os.environ[variable]), node_name(), int(os.environ.get("SLURM_LOCALID", "0"))
    if plan["gpus"]:  # NCCL logs the network that it uses; a file keeps this output separate
        log = Path(plan["folder"]) / f"nccl-{node}-{local}.log"
        log.unlink(missing_ok=True)
        os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV", "NCCL_DEBUG_FILE": str(log)}
    warnings.simplefilter("ignore", FutureWarning)  # torch renames collectives; the end of a log must show the error
    messages = Messages(Path(plan["messages"]))
    link = Link([(host, plan["port"]) for host in plan["addresses"]], plan["token"], f"{node}:{local}", messages)
    (kind or Rank)(plan, node, local, link).run()
    return 0


class Rank:
    def __init__(self, plan: dict[str, Any], node: str, local: int, link: Link) -> None:
        self.stage(link, "importing torch")
        import torch

        self.plan, self.node, self.local, self.link = plan, node, local, link
        self.nodes: list[str] = plan["nodes"]
        self.tasks: int = plan["tasks"]
        self.rank = self.nodes.index(node) * self.tasks + local
        self.device = torch.device("cpu")
        if plan["gpus"]:
            self.device = torch.device("cuda", local % max(1, torch.cuda.device_count()))
            torch.cuda.set_device(self.device)
        elif "OMP_NUM_THREADS" not in os.environ:  # with a thread per core in each rank, contention would be measured
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // self.tasks))

    def stage(self, link: Link, name: str) -> None:
        link.post("stage", {"name": name, "time": time.time()})

    def run(self) -> None:
        from dtrain.util import device_rates

        self.stage(self.link, "measuring its device")
        rates = {
            "matmul_tflops": device_rates.matmul_tflops(self.device),
            "memory_gb_s": device_rates.memory_gb_s(self.device),
        }
        self.link.post("rates", rates)
        if len(self.nodes) * self.tasks == 1:
            self.link.post("inside", {"done": True})
            return
        self.join()
        if self.tasks > 1:
            found = self.measure([self.node], COLLECTIVES, "collectives inside the node")
            self.link.post("inside", found)
        if len(self.nodes) > 1:
            found = self.measure(self.nodes, COLLECTIVES, "collectives across nodes")
            if self.rank == 0:
                self.link.post("across", found)
            self.hunt(found["all_reduce"][0])
        self.stage(self.link, "done")

    def join(self) -> None:
        """Join the world of all ranks; on GPUs it also has a gloo backend for the CPU."""
        import torch.distributed as dist
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self.stage(self.link, "joining the others")
        until = time.monotonic() + self.plan["join_s"]
        host, timeout = self.plan["store_host"], timedelta(seconds=self.plan["join_s"])
        fixed: int = self.plan.get("store_port", 0)  # nodes whose commands were typed by hand meet at a given port
        if self.rank == 0:
            host = host or self.own_address()
            store = TCPStore(host, fixed, is_master=True, wait_for_workers=False, timeout=timeout)
            self.link.post("store", {"host": host, "port": store.port})
        else:
            found = {"host": host, "port": fixed} if fixed else self.link.wait("store", until)
            if not found:
                raise TimeoutError("rank 0 did not open its store")
            store = TCPStore(str(found["host"]), int(found["port"]), is_master=False, timeout=timeout)
        backend = "cpu:gloo,cuda:nccl" if self.plan["gpus"] else "gloo"
        size = len(self.nodes) * self.tasks
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=size, timeout=timeout)

    def own_address(self) -> str:
        """The address from which this rank reached the coordinator: on the network that the nodes share."""
        return str(self.link.stream.getsockname()[0]) if self.link.stream and len(self.nodes) > 1 else "127.0.0.1"

    def measure(self, nodes: list[str], names: tuple[str, ...], stage: str) -> dict[str, tuple[float, int]]:
        """(GB/s on the bus, MiB of the message) of collectives over all ranks of these nodes, including this one.

        Of the largest size that the time allows.
        """
        from dtrain.comm import measure

        self.stage(self.link, stage)
        group, control = self.groups(nodes)
        sizes, agree = [mib * measure.MIB for mib in self.plan["sizes_mib"]], measure.slowest_of(control)
        found = {}
        for name in names:
            self.stage(self.link, f"{stage}: {name}")
            last = measure.sweep(name, sizes, group, agree, self.device, BUDGET_S, MOST_CALLS)[-1]
            found[name] = last.bus_gb_s, last.num_bytes // measure.MIB
        return found

    def groups(self, nodes: list[str]) -> tuple[Any, Any]:
        """Create groups of all ranks of these nodes: one on their compute device, and one on their CPUs.

        torch names a group by its ranks and by the number of groups in this process, and ranks meet under that name: so
        every rank must create equally many groups, and none is destroyed before the end.
        """
        import torch.distributed as dist

        ranks = [self.nodes.index(n) * self.tasks + i for n in nodes for i in range(self.tasks)]
        timeout = timedelta(seconds=self.plan["join_s"])
        more: dict[str, Any] = {"use_local_synchronization": True, "timeout": timeout}
        control = dist.new_group(ranks, backend="gloo", **more)
        return dist.new_group(ranks, backend="nccl", **more) if self.plan["gpus"] else control, control

    def hunt(self, across: float) -> None:
        """Measure pairs of nodes if the whole is too slow, or if the expected rate is unknown."""
        import torch.distributed as dist

        least = self.plan["least_across"]
        if (least is not None and across >= least) or (least is None and len(self.nodes) < 3):
            return
        control = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.plan["join_s"]))
        hunt = Hunt(self.nodes, least, self.plan["outlier"])
        for _ in range(MOST_ROUNDS):
            pairs = hunt.next_round()
            if not pairs:
                break
            mine = next((pair for pair in pairs if self.node in pair), None)
            rate = 0.0
            if mine:
                rate = self.measure(list(mine), COLLECTIVES[:1], f"pair {mine[0]}, {mine[1]}")["all_reduce"][0]
            else:
                self.groups([self.node])
            gathered: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, (mine, rate), group=control)
            for pair, value in gathered:
                if pair is not None:
                    hunt.record(tuple(pair), value)
        if self.rank == 0:
            self.link.post("pairs", {"pairs": [[a, b, rate] for (a, b), rate in hunt.rates.items()]})


if __name__ == "__main__":
    main()
    os._exit(0)  # threads of remaining groups can abort the process when Python exits
