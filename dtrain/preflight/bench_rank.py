"""A rank of `dtrain comm bench`: `python -m dtrain.preflight.bench_rank`, as many per node as the run will have.

It measures pairs in each direction, then collectives by size inside the node and over all ranks, then the messages of
a configuration in their own groups. Rank 0 posts the results.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from dtrain.preflight.probe import Rank, main
from dtrain.preflight.slow_nodes import slow_pairs

PLAN = "DTRAIN_BENCH"
SENT_BYTES = {"gloo": 2**20, "nccl": 64 * 2**20}  # of a send between two ranks: enough for the link's rate
MOST_REPEATS = 16  # slow directions that are measured once more: a busy host slows one measurement, not two


class BenchRank(Rank):
    def run(self) -> None:
        import torch
        import torch.distributed as dist

        self.join()
        self.control = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.plan["limit_s"]))
        self.began = time.monotonic()
        hosts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(hosts, socket.gethostname(), group=self.control)
        self.post("hosts", {"hosts": hosts[:: self.tasks]})
        first = self.rank - self.local
        inside = dist.new_group(list(range(first, first + self.tasks)), use_local_synchronization=True)
        devices = {"gloo": torch.device("cpu"), "nccl": self.device}
        for backend in self.plan["backends"]:
            device = devices[backend]
            self.post(f"pairs-{backend}", {"pairs": self.pairs(backend, device)})
            rows = []
            if self.tasks > 1 and len(self.nodes) > 1:
                rows += self.sweeps(backend, device, inside, "inside")
            rows += self.sweeps(backend, device, dist.group.WORLD, "all")
            self.post(f"rows-{backend}", {"rows": rows})
        self.post("messages", {"messages": self.messages(devices[self.plan["backends"][0]])})
        self.stage(self.link, "done")
        dist.barrier(self.control)

    def post(self, kind: str, value: dict[str, Any]) -> None:
        if self.rank == 0:
            self.link.post(kind, value)

    # ---- pairs -----------------------------------------------------------------------------------------------

    def pairs(self, backend: str, device: Any) -> list[tuple[int, int, float]]:
        """(sender, receiver, GB/s) of the first ranks of each two nodes, or on one node of each two ranks."""
        from dtrain.comm import measure

        places = list(range(0, len(self.nodes) * self.tasks, self.tasks if len(self.nodes) > 1 else 1))
        self.stage(self.link, f"pairs, {backend}")
        schedule = measure.rounds(places)
        until = time.monotonic() + self.plan["pairs_s"]
        each = min(0.25, self.plan["pairs_s"] / 2 / len(schedule))
        rates: dict[tuple[int, int], float] = {}
        for pairs in schedule:
            for way in (1, -1):
                self.directions([pair[::way] for pair in pairs], backend, device, each, rates)
            if measure.slowest_of(self.control)([time.monotonic() - until])[0] > 0:
                break  # so many nodes that the time is up: the rest is not measured
        for pair in slow_pairs(rates, self.plan["least"][backend], self.plan["outlier"])[:MOST_REPEATS]:
            self.directions([pair], backend, device, each, rates)
        return [(a, b, rate) for (a, b), rate in rates.items()]

    def directions(
        self, pairs: list[Any], backend: str, device: Any, budget_s: float, rates: dict[tuple[int, int], float]
    ) -> None:
        """Measure disjoint directions at the same time, and give every rank the results; the best of several counts."""
        import torch.distributed as dist

        from dtrain.comm import measure

        mine, rate = next((pair for pair in pairs if self.rank in pair), None), 0.0
        if mine:
            group = dist.group.WORLD
            sender, receiver = mine
            found = measure.one_way(SENT_BYTES[backend], group, self.control, device, sender, receiver, budget_s)
            rate = found.algorithm_gb_s
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, (mine, rate), group=self.control)
        for pair, value in gathered:
            if pair is not None:
                rates[tuple(pair)] = max(value, rates.get(tuple(pair), 0.0))

    # ---- collectives -----------------------------------------------------------------------------------------

    def sweeps(self, backend: str, device: Any, group: Any, where: str) -> list[dict[str, Any]]:
        from dtrain.comm import measure

        agree, rows = measure.slowest_of(self.control), []  # over all nodes: their times are the slowest node's
        for kind in self.plan["kinds"]:
            self.stage(self.link, f"{kind}, {where}, {backend}")
            timings = measure.sweep(kind, self.plan["sizes"][backend], group, agree, device, self.plan["each_s"])
            rows += [self.row(t) | {"backend": backend, "where": where} for t in timings]
        return rows

    def row(self, timing: Any) -> dict[str, Any]:
        return asdict(timing) | {"algorithm_gb_s": timing.algorithm_gb_s, "bus_gb_s": timing.bus_gb_s}

    def messages(self, device: Any) -> list[dict[str, Any]]:
        """Time each message of the configuration in its group; one that takes too long at a smaller size."""
        import torch.distributed as dist

        from dtrain.comm import measure

        groups = {}
        for name, members in self.plan["groups"].items():
            made = {tuple(ranks): dist.new_group(ranks) for ranks in members}  # by every rank, in the same order
            groups[name] = next(group for ranks, group in made.items() if self.rank in ranks)
        agree, found = measure.slowest_of(self.control), []
        for kind, num_bytes, name in self.plan["asked"]:
            self.stage(self.link, f"{kind} of {num_bytes} bytes, {name}")
            size, budget = min(num_bytes, 2**20), self.plan["message_s"]
            timing = measure.measure(kind, size, groups[name], agree, device, budget / 4)
            if num_bytes > size:
                fits = int(size * max(1.0, budget / timing.p50))
                size = min(num_bytes, fits, self.plan["most_bytes"])
                timing = measure.measure(kind, size, groups[name], agree, device, budget)
            found.append(self.row(timing))
        return found


if __name__ == "__main__":
    main(BenchRank, PLAN)
    os._exit(0)  # threads of remaining groups can abort the process when Python exits
