"""The full preflight's coordinator: starts the measuring ranks on the good nodes, and compares their results with the
hardware section and with each other."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from dtrain.config.hardware import Hardware
from dtrain.preflight import nccl_log
from dtrain.preflight.probe import PLAN
from dtrain.preflight.ranks import Ranks
from dtrain.preflight.report import Check, Report
from dtrain.preflight.slow_nodes import Hunt
from dtrain.preflight.start import Starter
from dtrain.util.format import as_dict, number, three_digits

if TYPE_CHECKING:
    from dtrain.preflight.settings import Settings

# Share of a data sheet's rates that good code reaches: 80% to 87% in the best matmuls, about 90% in a copy.
MATMUL_PART, MEMORY_PART = 0.8, 0.9
CPU_NOISE = 0.4  # results of equal CPU nodes, shared with others, differ by a factor: only gross outliers count
LABELS = {"all_reduce": "all-reduce", "all_gather": "all-gather", "reduce_scatter": "reduce-scatter"}


def measure(
    settings: Settings, config: dict[str, Any], run_dir: Path, report: Report, addresses: dict[str, str],
    start: Starter, stop: Callable[[], bool],
) -> None:  # fmt: skip
    """Add the measurements of the good nodes to the report."""
    Full(settings, config, run_dir, report, addresses).measure(start, stop)


class Full(Ranks):
    def __init__(
        self, settings: Settings, config: dict[str, Any], run_dir: Path, report: Report, addresses: dict[str, str]
    ) -> None:
        super().__init__(config, run_dir / "preflight", report.good, settings.measure_s)
        self.settings, self.report = settings, report
        self.outlier = settings.outlier * (1.0 if self.gpus else CPU_NOISE)
        hardware = {k: v for k, v in as_dict(config.get("hardware")).items() if k != "_target_"}
        self.hardware, self.why_not = self.expectations(Hardware(**hardware))
        across = self.hardware.network_busbw_gb_s
        self.plan |= {
            "store_host": addresses.get(self.nodes[0]) or "127.0.0.1", "outlier": self.outlier,
            # 256 MiB take gloo seconds on a CPU, and show no more than 16
            "sizes_mib": settings.sizes_mib if self.gpus else [s for s in settings.sizes_mib if s <= 16] or [1],
            "least_across": None if across is None else settings.tolerance * across,
        }  # fmt: skip

    def expectations(self, hardware: Hardware) -> tuple[Hardware, str]:
        """Return the applicable values: a CPU is not compared with a GPU, nor half a node with a whole one."""
        if not self.gpus:
            network = hardware.network_busbw_gb_s if hardware.gpu is None else None
            return Hardware(
                network_busbw_gb_s=network
            ), "the ranks are on CPUs, but the hardware section describes GPUs"
        if hardware.gpus_per_node and hardware.gpus_per_node != self.tasks:
            rates = Hardware(peak_bf16_tflops=hardware.peak_bf16_tflops, memory_gb_s=hardware.memory_gb_s)
            return (
                rates,
                f"the hardware section describes {hardware.gpus_per_node} GPUs per node, but {self.tasks} are used",
            )
        return hardware, ""

    def measure(self, start: Starter, stop: Callable[[], bool]) -> None:
        for trouble in self.run("dtrain.preflight.probe", PLAN, start, stop):
            self.add(trouble.node, "measurements", "bad", trouble.text, trouble.fix)
        self.report.stopped = self.report.stopped or stop()
        self.judge_devices()
        self.judge_collectives()
        self.judge_transport()
        self.clean_up()

    def add(self, node: str, name: str, state: Any, text: str, fix: str = "", short: str = "") -> None:
        self.report.checks.append(Check(node, name, state, text, fix, short))

    # ---- evaluation ------------------------------------------------------------------------------------------

    def judge_devices(self) -> None:
        """Compare each GPU with the data sheet and with the median of all."""
        what = "GPU" if self.gpus else "rank"
        for key, label, unit, expected in (
            ("matmul_tflops", "matmul", "TFLOP/s", (self.hardware.peak_bf16_tflops or 0) * MATMUL_PART),
            ("memory_gb_s", "memory", "GB/s", (self.hardware.memory_gb_s or 0) * MEMORY_PART),
        ):
            found = {
                (node, i): value
                for node in self.nodes
                for i in range(self.tasks)
                if (value := number(self.get(node, "rates", i).get(key))) is not None
            }
            if not found:
                continue
            middle = median(found.values())
            for node in dict.fromkeys(node for node, _ in found):
                mine = {i: value for (n, i), value in found.items() if n == node}
                worst = min(mine, key=lambda i: mine[i])
                problem = self.problem(mine[worst], expected, middle, len(found))
                short = f"{three_digits(mine[worst])} {unit}"
                if problem:
                    text = f"{what} {worst} reaches {short}; {problem}"
                    fix = "nvidia-smi -q -d PERFORMANCE,ECC there: clocks, heat, power; who else uses it?"
                    self.add(node, label, "bad", text, fix if self.gpus else "top: who else uses this node?")
                else:
                    self.add(node, label, "ok", f"the slowest {what} reaches {short}", short=short)

    def problem(self, value: float, expected: float | None, middle: float, count: int, what: str = "median") -> str:
        """Return why a value is bad, or ""."""
        if expected and value < self.settings.tolerance * expected:
            part = f"preflight.tolerance={self.settings.tolerance:g}"
            source = self.hardware.source or "data sheet"
            return f"expected: {three_digits(expected)}, of which {part} must be reached ({source})"
        if count > 2 and value < self.outlier * middle:
            return f"the {what} of all is {three_digits(middle)}"
        return ""

    def judge_collectives(self) -> None:
        inside = {node: self.get(node, "inside") for node in self.nodes}
        for name, label in LABELS.items():
            expected = self.hardware.nvlink_busbw_gb_s if name == "all_reduce" else self.hardware.gather_busbw_gb_s
            found = {node: busbw for node, values in inside.items() if (busbw := rate_of(values.get(name))) is not None}
            middle = median(found.values()) if found else 0.0
            for node, value in found.items():
                problem = self.problem(value, expected, middle, len(found))
                rate = f"{three_digits(value)} GB/s"
                text = f"{label} inside the node runs at {rate} on the bus; {problem or 'as expected'}"
                fix = "nvidia-smi topo -m and nvidia-smi nvlink -s there; is NVLink or the fabric manager down?"
                self.add(node, label, "bad" if problem else "ok", text, fix if problem else "", rate)
        for node in self.nodes if self.why_not else []:
            self.add(node, "expected rates", "skipped", self.why_not)
        if len(self.nodes) > 1:
            self.judge_across()

    def judge_across(self) -> None:
        across = self.get(self.nodes[0], "across")
        rates = {name: value for name in LABELS if (value := rate_of(across.get(name))) is not None}
        if not rates:
            return  # explain_end reported why
        least = self.plan["least_across"]
        summary = ", ".join(f"{LABELS[name]} {three_digits(value)} GB/s" for name, value in rates.items())
        pairs = [tuple(p) for p in self.get(self.nodes[0], "pairs").get("pairs", [])]
        hunt = Hunt(self.nodes, least, self.outlier)
        for a, b, rate in pairs:
            hunt.record((a, b), rate)
        verdict = hunt.verdict() if pairs else None
        slow = verdict.nodes if verdict else []
        slow += [node for pair in (verdict.links if verdict else []) for node in pair if node not in slow]
        too_slow = least is not None and rates.get("all_reduce", math.inf) < least
        if too_slow and not slow:
            slow = list(self.nodes)
        wanted = f"; expected: {self.hardware.network_busbw_gb_s:g} GB/s" if least is not None else ""
        for node in self.nodes:
            mine = [f"{a} – {b} {three_digits(v)} GB/s" for (a, b), v in hunt.rates.items() if node in (a, b)]
            best = three_digits(max(hunt.rates.values(), default=0.0))
            if node not in slow:
                short = f"{three_digits(rates.get('all_reduce', 0))} GB/s"
                self.add(node, "across", "ok", f"across all nodes: {summary}", short=short)
                continue
            if (verdict and verdict.all_slow) or not mine:
                text = f"no pair of nodes is fast enough, so the cause is the fabric or its profile: {summary}{wanted}"
            else:
                text = f"the link to this node is slow: {', '.join(mine)}{wanted}; the best has {best} (all: {summary})"
            fix = "ethtool or ibstat there: the link's rate and errors; cluster.exclude it until it is repaired"
            self.add(node, "across", "bad", text, fix)

    def judge_transport(self) -> None:
        """Check the transport that NCCL reports in the ranks' logs."""
        for node in self.nodes if self.gpus else []:
            text = ""
            for path in sorted(self.folder.glob(f"nccl-{node}-*.log")):
                with contextlib.suppress(OSError):
                    text += path.read_text(errors="replace")
            wrong = nccl_log.mismatch(self.config, text) if len(self.nodes) > 1 else None
            used, inner = nccl_log.chosen(text) if len(self.nodes) > 1 else None, nccl_log.inside(text)
            if wrong:
                what, _, fix = wrong.partition("\n  fix: ")
                self.add(node, "transport", "bad", what, fix)
            elif used or inner:
                how = [f"{used} between nodes{' with GPUDirect' if nccl_log.direct(text) else ''}" if used else ""]
                how.append(f"{inner} inside" if inner else "")
                self.add(node, "transport", "ok", ", ".join(filter(None, how)), short=used or inner or "")
            else:
                self.add(node, "transport", "skipped", "NCCL's log does not say what it uses")


def rate_of(value: Any) -> float | None:
    """Return the GB/s of a posted (GB/s, MiB)."""
    return number(value[0]) if isinstance(value, (list, tuple)) and value else None
