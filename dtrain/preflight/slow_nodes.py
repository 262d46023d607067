"""Find slow nodes by measuring pairs: a node that is slow with good nodes is named. A few rounds are always enough.

The pairs of a round are disjoint and measured at the same time. All ranks reach the same decisions from the same data.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

Pair = tuple[str, str]
MOST_ROUNDS = 8


@dataclass(frozen=True)
class Verdict:
    nodes: list[str]  # slow with a good node, or with all nodes
    links: list[Pair]  # slow only between these two
    all_slow: bool  # no pair is good: the fabric or the profile, not one node


class Hunt:
    """The measurements so far. `least`: what a pair must reach; without it, a part of the best pair's rate."""

    def __init__(self, nodes: list[str], least: float | None, outlier: float) -> None:
        self.nodes, self.least, self.outlier = nodes, least, outlier
        self.rates: dict[Pair, float] = {}

    def record(self, pair: Pair, rate: float) -> None:
        self.rates[self.key(pair)] = rate

    def key(self, pair: Pair) -> Pair:
        a, b = sorted(pair, key=self.nodes.index)
        return a, b

    def slow(self, pair: Pair) -> bool:
        least = self.least if self.least is not None else self.outlier * max(self.rates.values())
        return self.rates[self.key(pair)] < least

    def good(self) -> set[str]:
        """Return nodes with at least one pair that is not slow: a slow node has none."""
        return {node for pair in self.rates if not self.slow(pair) for node in pair}

    def settled(self) -> set[str]:
        """Return good nodes, and nodes that are slow with two good ones: with one, the link may be the cause."""
        good = self.good()
        beside = [node for pair in self.rates for node, other in (pair, pair[::-1]) if other in good]
        return good | {node for node in beside if beside.count(node) > 1}

    def next_round(self) -> list[Pair]:
        """Return disjoint pairs to measure now; [] if pairs can show nothing more."""
        if not self.rates:
            return list(zip(self.nodes[::2], self.nodes[1::2], strict=False))
        if self.least is None and len(self.rates) < 3:  # a single result is always the best: compare at least three
            return self.disjoint(combinations(self.nodes, 2))
        good, settled = self.good(), self.settled()
        open_nodes = [node for node in self.nodes if node not in settled]
        # with a good node the result is certain; without one, a new combination of the others may find one
        partners = [node for node in self.nodes if node in good] + open_nodes
        return self.disjoint((node, other) for node in open_nodes for other in partners if node != other)

    def disjoint(self, wanted: Iterable[Pair]) -> list[Pair]:
        """Return as many new, disjoint pairs as possible, in order."""
        free, chosen = set(self.nodes), []
        for pair in map(self.key, wanted):
            if pair not in self.rates and set(pair) <= free:
                chosen.append(pair)
                free -= set(pair)
        return chosen

    def verdict(self) -> Verdict:
        good = self.good()
        slow_nodes = [node for node in self.nodes if node not in good and any(node in pair for pair in self.rates)]
        links = [pair for pair in self.rates if self.slow(pair) and set(pair) <= good]
        return Verdict(slow_nodes, links, not good)
