"""The coordinator of `dtrain comm bench`: what is measured and expected, what is slow, what a step would spend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from dtrain.config.hardware import Hardware
from dtrain.plan.layout import Layout, layout_of
from dtrain.plan.model_shape import Shape, shape_of
from dtrain.plan.predict import hardware_of
from dtrain.plan.sections import with_detected
from dtrain.plan.time.collectives import STEPS, Group, collective_s
from dtrain.plan.time.messages import EXACT, PLANNED, Message, compute_s, exposed_s, is_exact, messages
from dtrain.preflight.bench_rank import PLAN
from dtrain.preflight.ranks import Ranks, Trouble
from dtrain.preflight.slow_nodes import name_slow
from dtrain.preflight.start import Starter
from dtrain.util.format import as_dict

KIB, MIB = 2**10, 2**20
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")
SIZES = {
    "gloo": [4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB],
    "nccl": [64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB],
}
MOST_BYTES = {"gloo": 256 * MIB, "nccl": 1024 * MIB}  # of a message that is measured; a larger one is scaled up
# like preflight's: of the best direction, and of the expected rate; CPU nodes shared with others differ by a factor
OUTLIER, CPU_OUTLIER, TOLERANCE = 0.5, 0.2, 0.7
START_S = 120.0  # at most, for srun, importing torch and joining
LEAST_JUDGED = MIB  # below it latency counts, which a file has for one hop, not for each collective
ALIKE = 0.02  # messages whose sizes differ by less are measured once


class Bench(Ranks):
    longer = "fewer --sizes if it is only slow"

    def __init__(
        self, config: dict[str, Any], folder: Path, nodes: list[str], seconds: float, backends: Sequence[str],
        sizes: Sequence[int] | None = None, wants_messages: bool = False, here: list[str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(config, folder, nodes, START_S + 4 * seconds, here)
        self.hardware = expectations(config, self.gpus, self.tasks)
        self.backends = backends
        self.by_size = {b: list(sizes) if sizes else SIZES[b] for b in backends}
        self.outlier = OUTLIER if self.gpus else CPU_OUTLIER
        self.layout, self.shape, self.calls, self.why_not = calls_of(config) if wants_messages else (None, None, [], "")
        asked = list(dict.fromkeys(alike(self.calls, m) for m in self.calls))
        sections = 2 if len(nodes) > 1 and self.tasks > 1 else 1
        share = (0.5 if asked else 0.8) * seconds / len(backends)
        self.plan |= {
            "limit_s": self.limit_s, "kinds": KINDS, "backends": list(backends), "sizes": self.by_size,
            "pairs_s": 0.2 * seconds / len(backends), "outlier": self.outlier,
            "least": {b: self.least(b) for b in backends},
            "each_s": share / sections / len(KINDS) / max(len(s) for s in self.by_size.values()),
            "asked": asked, "groups": groups_of(self.layout) if self.layout else {},
            "message_s": 0.3 * seconds / max(1, len(asked)), "most_bytes": MOST_BYTES[backends[0]],
        }  # fmt: skip

    def least(self, backend: str) -> float | None:
        """GB/s that a send between two ranks must reach; None: not known, the others are the measure."""
        rail = self.hardware.network_rail_gb_s if len(self.nodes) > 1 and backend == "nccl" else None
        return None if rail is None else TOLERANCE * rail

    def measure(self, start: Starter) -> list[Trouble]:
        return self.run("dtrain.preflight.bench_rank", PLAN, start, lambda: False)

    # ---- results ---------------------------------------------------------------------------------------------

    def result(self) -> dict[str, Any]:
        """Everything that was measured, and the verdicts: what --json prints."""
        rows = [self.judged(row) for b in self.backends for row in self.posted(f"rows-{b}", "rows")]
        pairs = {b: self.rates(b) for b in self.backends}
        slow = [
            {"what": what, "backend": b, "directions": [{"from": x, "to": y, "gb_s": rates[x, y]} for x, y in ways]}
            for b, rates in pairs.items()
            for what, ways in name_slow(rates, self.least(b), self.outlier)
        ]
        result: dict[str, Any] = {
            "nodes": self.names(), "ranks_per_node": self.tasks, "backends": list(self.backends), "rows": rows,
            "pairs": [
                {"backend": b, "from": x, "to": y, "gb_s": rate} for b, found in pairs.items()
                for (x, y), rate in found.items()
            ],
            "slow": slow, "expected_from": self.hardware.source or None,
        }  # fmt: skip
        if self.layout:
            result |= {"messages": self.timed_calls(), "step": self.step()}
        return result

    def posted(self, kind: str, key: str) -> list[Any]:
        return list(self.get(self.nodes[0], kind).get(key, []))

    def names(self) -> list[str]:
        """The nodes, by their own names if they were started by hand."""
        hosts = self.posted("hosts", "hosts") if self.here != self.nodes else []
        return [str(h) for h in hosts] if len(set(hosts)) == len(self.nodes) else self.nodes

    def rates(self, backend: str) -> dict[tuple[str, str], float]:
        """(sender, receiver) → GB/s: of nodes, or on one node of ranks."""
        names, several = self.names(), len(self.nodes) > 1

        def place(rank: int) -> str:
            return names[rank // self.tasks] if several else f"rank {rank}"

        return {(place(a), place(b)): rate for a, b, rate in self.posted(f"pairs-{backend}", "pairs")}

    def judged(self, row: dict[str, Any]) -> dict[str, Any]:
        """Add the expected time and a verdict: ok, slow, or none where too little is expected to judge."""
        per_node = self.tasks if row["where"] == "inside" or len(self.nodes) > 1 else row["ranks"]
        expected = self.expected_s(row["kind"], row["num_bytes"], Group(row["ranks"], per_node), row["backend"])
        is_judged = expected is not None and row["num_bytes"] >= LEAST_JUDGED
        verdict = None if expected is None or not is_judged else "ok" if TOLERANCE * row["p50"] <= expected else "slow"
        return row | {"expected": expected, "verdict": verdict}

    def expected_s(self, kind: str, num_bytes: int, group: Group, backend: str) -> float | None:
        """Seconds by the hardware section; None: it does not say."""
        hardware = self.hardware
        if kind not in STEPS or (backend == "gloo") == self.gpus or not hardware.gpus_per_node:
            return None
        if (kind, backend) == ("reduce_scatter", "gloo"):  # gloo makes an all-reduce and a copy of it
            return None
        if not (hardware.nvlink_max_gb_s if kind == "all_reduce" else hardware.gather_max_gb_s):
            return None
        if group.nodes > 1 and not (hardware.network_max_gb_s or hardware.network_busbw_gb_s):
            return None
        return collective_s(hardware, kind, group, num_bytes)

    # ---- the messages of a configuration ---------------------------------------------------------------------

    def timed_calls(self) -> list[dict[str, Any]]:
        """The calls of a step with their measured times; `scaled` if measured at another size."""
        measured = {
            tuple(asked): row
            for asked, row in zip(self.plan["asked"], self.posted("messages", "messages"), strict=False)
        }
        rows = []
        for call in self.calls:
            row = measured.get(tuple(alike(self.calls, call)))
            if row is None:
                continue
            factor = max(1.0, call.num_bytes / row["num_bytes"])
            bus = row["bus_gb_s"]
            rows.append(
                asdict(call) | {"ranks": row["ranks"], "p50": row["p50"] * factor, "p99": row["p99"] * factor,
                                "seconds": call.count * row["p50"] * factor, "bus_gb_s": bus, "scaled": factor > 1.05}
            )  # fmt: skip
        return rows

    def step(self) -> dict[str, Any]:
        """Seconds that a step would spend on communication, and how many of them computation hides."""
        assert self.layout and self.shape
        rows = self.timed_calls()
        total = sum(row["seconds"] for row in rows)
        known = {field.name for field in fields(Message)}
        timed = [(Message(**{key: row[key] for key in known}), row["p50"]) for row in rows]
        hardware = hardware_of(with_detected(self.config))
        computed = None if hardware is None else compute_s(self.shape, self.layout, hardware)
        left = None if hardware is None else exposed_s(self.shape, self.layout, hardware, timed)
        return {
            "strategy": self.layout.strategy, "seconds": total, "calls": sum(row["count"] for row in rows),
            "bytes": sum(row["count"] * row["num_bytes"] for row in rows), "compute_s": computed,
            "hidden_s": None if left is None else max(0.0, total - left),
            "exact": is_exact(self.shape, self.layout),
        }  # fmt: skip


def expectations(config: Mapping[str, Any], gpus: bool, tasks: int) -> Hardware:
    """The hardware section where it applies: a CPU is not compared with a GPU, nor half a node with a whole one."""
    section = {k: v for k, v in as_dict(with_detected(dict(config)).get("hardware")).items() if k != "_target_"}
    hardware = Hardware(**section)
    if (hardware.gpu is not None) != gpus or (hardware.gpus_per_node and hardware.gpus_per_node != tasks):
        return Hardware()
    return hardware


def calls_of(config: dict[str, Any]) -> tuple[Layout | None, Shape | None, list[Message], str]:
    """(layout, shape, calls of a step, why they are not known)."""
    layout, shape = layout_of(with_detected(config)), shape_of(config)
    name = layout.strategy
    if shape is None:
        return None, None, [], f"model={config['choices'].get('model')} is not one of dtrain's: its sizes are not known"
    if name not in (*EXACT, *PLANNED) or config["strategy"].get("compress", "none") != "none":
        return None, None, [], f"the messages of strategy={name} with these settings are not listed yet"
    if layout.cp > 1:
        return None, None, [], f"the messages of strategy.cp={layout.cp} between attention layers are not listed yet"
    ranks = [messages(shape, layout, rank) for rank in range(layout.pp)]
    return layout, shape, max(ranks, key=lambda calls: sum(m.count * m.num_bytes for m in calls)), ""


def alike(calls: list[Message], message: Message) -> tuple[str, int, str]:
    """(kind, bytes, group) of the first call of about this size."""
    for m in calls:
        if (m.kind, m.group) == (message.kind, message.group) and abs(
            m.num_bytes - message.num_bytes
        ) <= ALIKE * message.num_bytes:
            return m.kind, m.num_bytes, m.group
    return message.kind, message.num_bytes, message.group


def groups_of(layout: Layout) -> dict[str, list[list[int]]]:
    """The ranks of every group, by its name in a message: pipeline × data × tensor ranks, tensor innermost."""
    pp, dp, tp = layout.pp, layout.dp, layout.tp
    shards = layout.replica_size or dp
    if layout.strategy != "fsdp" and layout.data == "ddp":
        shards = 1

    def rank(p: int, d: int, t: int) -> int:
        return (p * dp + d) * tp + t

    rows = [(p, t) for p in range(pp) for t in range(tp)]
    starts = range(0, dp, shards)
    every = {
        "world": [list(range(layout.world_size))],
        "data": [[rank(p, d, t) for d in range(dp)] for p, t in rows],
        "shard": [[rank(p, first + i, t) for i in range(shards)] for p, t in rows for first in starts],
        "replicate": [[rank(p, first + i, t) for first in starts] for p, t in rows for i in range(shards)],
        "tensor": [[rank(p, d, t) for t in range(tp)] for p in range(pp) for d in range(dp)],
        "pipeline": [[rank(p, d, t) for p in range(pp)] for d in range(dp) for t in range(tp)],
    }
    return {name: lists for name, lists in every.items() if len(lists[0]) > 1}


def by_hand(config: Mapping[str, Any]) -> dict[str, Any]:
    """Additions to the plan where the same command was typed on each node: they meet at master_addr."""
    cluster = config["cluster"]
    return {"addresses": [], "store_host": cluster["master_addr"], "store_port": int(cluster["master_port"])}
