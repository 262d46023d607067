"""Find slow nodes by measuring pairs: a node that is slow with good nodes is named. A few rounds are always enough.

The pairs of a round are disjoint and measured at the same time. All ranks reach the same decisions from the same data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

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


# ---- directions ----------------------------------------------------------------------------------------------


def slow_pairs(rates: Mapping[Any, float], least: float | None, outlier: float) -> list[Any]:
    """(sender, receiver) of the slow directions, the slowest first: below `least`, or a part of the best one's rate."""
    limit = least if least is not None else outlier * max(rates.values(), default=0.0)
    return sorted((pair for pair, rate in rates.items() if rate < limit), key=lambda pair: rates[pair])


def name_slow(rates: Mapping[Pair, float], least: float | None, outlier: float) -> list[tuple[str, list[Pair]]]:
    """(what is slow, its directions): all directions, all of a node, those from or to it, or a single one.

    A node with one partner is never blamed: the link may be the cause, and its direction is named.
    """
    slow = slow_pairs(rates, least, outlier)
    if slow and len(slow) == len(rates):
        return [("every direction", slow)]
    found: list[tuple[str, list[Pair]]] = []
    for node in dict.fromkeys(node for pair in rates for node in pair):
        ways = [[pair for pair in rates if pair[i] == node] for i in (0, 1)]
        from_it, to_it = ([] if len(way) < 2 or not set(way) <= set(slow) else way for way in ways)
        if from_it and to_it:
            found.append((f"{node}, from it and to it", [*from_it, *to_it]))
        elif from_it:
            found.append((f"from {node} to every other one", from_it))
        elif to_it:
            found.append((f"from every other one to {node}", to_it))
    named = {pair for _, pairs in found for pair in pairs}
    return [*found, *((f"{a} → {b}", [(a, b)]) for a, b in slow if (a, b) not in named)]
