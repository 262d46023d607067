"""`cluster.processes=2:4` and `cluster.nodes=2:8`: a run whose number of ranks may change while it trains."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dtrain.errors import bad

SETTINGS = ("processes", "nodes")  # of cluster
MOST = 1024  # numbers in a range: each is checked before the launch


@dataclass(frozen=True)
class Range:
    """The smallest and the largest number of ranks of this machine, or of nodes."""

    setting: str  # processes or nodes
    low: int
    high: int

    @property
    def unit(self) -> str:
        return {"processes": "rank", "nodes": "node"}[self.setting]

    def __str__(self) -> str:
        return f"cluster.{self.setting}={self.low}:{self.high}"


def parse(setting: str, value: str) -> Range:
    """Read `2:4`."""
    found = re.fullmatch(r"(\d{1,9}):(\d{1,9})", value)
    if not found:
        rule = "must be a whole number, or a range: the smallest and the largest number"
        raise bad(f"cluster.{setting}", value, rule, f"cluster.{setting}=2, or cluster.{setting}=2:4")
    low, high = int(found[1]), int(found[2])
    if not 1 <= low < high or high - low >= MOST:
        rule = f"must be two numbers from 1 up, the smaller one first, and at most {MOST} numbers apart"
        meant = f"{high}:{low}" if 1 <= high < low < high + MOST else "1:4"
        raise bad(f"cluster.{setting}", value, rule, f"cluster.{setting}={meant}")
    return Range(setting, low, high)


def range_of(config: Mapping[str, Any]) -> Range | None:
    """The range in a configuration; None: the number of ranks is fixed."""
    cluster = config["cluster"]
    found = [parse(name, cluster[name]) for name in SETTINGS if isinstance(cluster.get(name), str)]
    if len(found) > 1:
        rule = "only one of cluster.processes and cluster.nodes may be a range"
        raise bad("cluster.processes", cluster["processes"], rule, f"cluster.processes={found[0].high}")
    return found[0] if found else None


def sized(config: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The configuration with one number of the range in its place; one without a range stays as it is."""
    found = range_of(config)
    cluster = {**config["cluster"], **({found.setting: number} if found else {})}
    return {**config, "cluster": cluster}
