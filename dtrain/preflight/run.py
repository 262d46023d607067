"""Preflight: check that every node is fit for the run before the first step. Settings and entry points.

quick.py checks every node (an agent on each: agent.py), full.py measures (ranks on each: probe.py).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from dtrain.errors import bad
from dtrain.preflight.quick import Quick
from dtrain.preflight.report import Check, Report
from dtrain.preflight.start import Starter as Starter
from dtrain.preflight.start import local_starter as local_starter
from dtrain.util import file_handles


class Preflight:
    def __init__(
        self,
        level: Literal["off", "quick", "full"] = "quick",
        exclude_bad: bool = False,
        timeout_s: float = 50,
        measure_s: float = 240,
        min_shm_gib: float = 1.0,
        max_skew_s: float = 1.0,
        tolerance: float = 0.7,
        outlier: float = 0.5,
        sizes_mib: list[int] | None = None,
    ) -> None:
        for name, value, least in (
            ("timeout_s", timeout_s, 2),
            ("measure_s", measure_s, 10),
            ("max_skew_s", max_skew_s, 0),
        ):
            if value < least:
                raise bad(f"preflight.{name}", value, f"must be at least {least} seconds", f"preflight.{name}={least}")
        for name, part in (("tolerance", tolerance), ("outlier", outlier)):
            if not 0 <= part <= 1:
                raise bad(f"preflight.{name}", part, "must be a share, from 0 to 1", f"preflight.{name}=0.5")
        sizes = [1, 16, 256] if sizes_mib is None else sizes_mib
        if not sizes or min(sizes) < 1 or sorted(set(sizes)) != sizes:
            raise bad(
                "preflight.sizes_mib",
                sizes,
                "must be whole numbers in ascending order",
                "'preflight.sizes_mib=[1,16,256]'",
            )
        self.level, self.exclude_bad, self.timeout_s, self.measure_s = level, exclude_bad, timeout_s, measure_s
        self.min_shm_gib, self.max_skew_s = min_shm_gib, max_skew_s
        self.tolerance, self.outlier, self.sizes_mib = tolerance, outlier, sizes

    def run(
        self,
        config: dict[str, Any],
        run_dir: Path,
        nodes: list[str],
        start: Starter,
        say: Callable[[str], None],
        stop: Callable[[], bool] = lambda: False,
    ) -> Report:
        """Check the nodes, report the findings, and write preflight.json. `stop` is polled."""
        say(f"preflight {self.level} on {', '.join(nodes)}")
        report = self.check(config, run_dir, nodes, start, stop)
        for line in report.lines():
            say(line)
        return report

    def check(
        self,
        config: dict[str, Any],
        run_dir: Path,
        nodes: list[str],
        start: Starter,
        stop: Callable[[], bool] = lambda: False,
    ) -> Report:
        began = time.monotonic()
        file_handles.raise_limit()  # every agent and every measuring rank keeps a connection to this process
        report = Report(self.level, list(nodes))
        folder = run_dir / "preflight"
        with contextlib.suppress(OSError):  # on a full disk, the agents report it over the network
            folder.mkdir(parents=True, exist_ok=True)
        quick = Quick(self, config, run_dir, nodes, start, stop)
        quick.fill(report)
        go_on = report.ok or (self.exclude_bad and report.good)
        if self.level == "full" and go_on and not report.stopped:
            from dtrain.preflight.full import measure

            measure(self, config, run_dir, report, quick.addresses, start, stop)
        elif self.level == "full" and not report.stopped:
            why = "the quick checks must pass first, or preflight.exclude_bad=true"
            report.checks += [Check(node, "measurements", "skipped", why) for node in nodes]
        report.seconds = round(time.monotonic() - began, 2)
        report.write(run_dir / "preflight.json")
        return report
