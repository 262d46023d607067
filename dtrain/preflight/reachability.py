"""Test every pair of nodes over the profile's interface: can they connect, and how fast is a stream?

A TCP stream of half a second from Python does not show a fabric's best rate, but it shows a broken link: a 10 Gb/s port
that fell back to 100 Mb/s, a lossy cable, a throttled virtual network.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dtrain.preflight.channel import admitted, greet, listen, receive, send, serve
from dtrain.preflight.interfaces import is_ipv6
from dtrain.preflight.node_checks import Finding, finding
from dtrain.util.format import as_dict, number, three_digits

STREAM_S = 0.5
ROUNDS = 3  # each node sends to this many neighbors: enough to tell a slow node from a slow pair
# A stream below this part of the link's nominal rate is slow; Python is never required to reach more than 250 MB/s.
LINK_PART, MOST_ASKED_MB_S = 0.05, 250.0
OUTLIER_PART = 0.1  # or below this part of the upper quartile: one slow node of three has 4 of the 6 streams
TRIES = 3  # for a stream that seems slow, because the host may be busy
Address = tuple[str, int]


class Peer:
    """A node's server for the others: it answers with its name, and reads streams."""

    def __init__(self, address: str, token: str, node: str) -> None:
        self.token, self.node, self.source = token, node, address
        self.listener = listen(address)
        self.address: Address = (address, int(self.listener.getsockname()[1]))
        serve(self.listener, self._handle)

    def _handle(self, stream: socket.socket) -> None:
        stream.settimeout(10)
        with stream.makefile("rb", buffering=0) as raw:
            hello = admitted(raw, self.token)  # type: ignore[arg-type]
        if not hello:
            return
        send(stream, {"node": self.node})
        if hello.get("stream"):
            send(stream, {"mb_s": swallow(stream)})
            while stream.recv(1 << 20):  # closing with unread bytes would discard the answer
                pass

    def connect(self, address: Address, timeout: float, **more: Any) -> socket.socket:
        if is_ipv6(address[0]) != is_ipv6(self.source):
            raise OSError(f"{address[0]} there, {self.source} here: IPv4 and IPv6 cannot connect")
        return greet(address, {"token": self.token, "from": self.node, **more}, self.source, timeout)

    def reach(self, others: dict[str, Address], timeout: float) -> dict[str, str]:
        """Other node → why it cannot be reached, or "". In parallel: a lost packet costs the whole time limit."""

        def one(address: Address) -> str:
            try:
                self.connect(address, timeout).close()
            except OSError as error:
                return str(error)
            return ""

        with ThreadPoolExecutor(max_workers=64) as pool:
            return dict(zip(others, pool.map(one, others.values()), strict=True))

    def stream(self, address: Address, timeout: float) -> float | None:
        """Megabytes per second that arrive there, or None."""
        try:
            stream = self.connect(address, timeout, stream=True)
        except OSError:
            return None
        with stream, contextlib.suppress(OSError):
            stream.settimeout(timeout + STREAM_S)
            threading.Thread(target=_pour, args=(stream,), daemon=True).start()
            with stream.makefile("rb") as file:
                answer = number(receive(file).get("mb_s"))
            # do not wait for data still in the buffers of a slow link
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return answer
        return None

    def streams(self, others: dict[str, Address], order: list[str], timeout: float) -> dict[str, float]:
        """Send to the next few nodes in the common order; the best of some tries, 0 if no byte was acknowledged."""
        mine = order.index(self.node)
        found = {}
        for step in range(1, min(ROUNDS, len(order) - 1) + 1):
            other = order[(mine + step) % len(order)]
            if other in others:
                best, until = 0.0, time.monotonic() + timeout
                for _ in range(TRIES):
                    best = max(best, self.stream(others[other], timeout) or 0.0)
                    if best >= MOST_ASKED_MB_S or time.monotonic() > until:
                        break
                found[other] = best
        return found


def swallow(stream: socket.socket) -> float:
    """Read for half a second from the first byte on; return megabytes per second."""
    buffer, total = bytearray(1 << 20), 0
    stream.recv_into(buffer)
    began = now = time.monotonic()
    stream.settimeout(STREAM_S)
    while now - began < STREAM_S:
        try:
            count = stream.recv_into(buffer)
        except TimeoutError:
            count = -1
        now = time.monotonic()
        if count == 0:
            break
        total += max(count, 0)
    return total / max(now - began, 1e-3) / 1e6


def _pour(stream: socket.socket) -> None:
    block = bytes(1 << 20)
    with contextlib.suppress(OSError):  # the answer arrived and the stream was closed
        while True:
            stream.sendall(block)


# ---- evaluation by the coordinator ---------------------------------------------------------------------------


def same_family(offered: dict[str, list[Address]]) -> dict[str, Address]:
    """Choose one address per node: all IPv4 if every node has one, otherwise all IPv6, otherwise any."""
    for ipv6 in (False, True):
        chosen = {node: a for node, addresses in offered.items() for a in addresses if is_ipv6(a[0]) == ipv6}
        if len(chosen) == len(offered):
            return chosen
    return {node: addresses[0] for node, addresses in offered.items()}


def judge_reach(reports: dict[str, dict[str, Any]], interface: str | None) -> dict[str, list[Finding]]:
    """Node → findings, from each node's {other: why not}. The node that fails in most pairs is blamed."""
    failed: dict[tuple[str, str], str] = {}
    for node, report in reports.items():
        for other, why in as_dict(report.get("reach")).items():
            if why and other in reports:
                failed[node, other] = str(why)
    over = f"over {interface}" if interface else "over the network"
    found: dict[str, list[Finding]] = {}
    for node, report in reports.items():
        if not as_dict(report.get("reach")):
            found[node] = [finding("reach", "skipped", "there was no other node to connect to")]
        else:
            found[node] = [finding("reach", "ok", f"reaches every other node {over}", short="all")]
    for node in blame(failed):
        pairs = [f"{a} → {b} ({why})" for (a, b), why in failed.items() if node in (a, b)]
        more = f" and {len(pairs) - 4} more" if len(pairs) > 4 else ""
        text = f"no connection {over}: {', '.join(pairs[:4])}{more}"
        fix = "ip -br addr and ip route there; is there a firewall? cluster.exclude the node until it is repaired"
        found[node] = [finding("reach", "bad", text, fix)]
    return found


def blame(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Return the nodes that explain the bad pairs, worst first; both nodes if they explain a pair equally well."""
    left, guilty = list(pairs), []
    while left:
        counts = Counter(node for pair in left for node in set(pair))
        most = max(counts.values())
        worst = [node for node, count in counts.items() if count == most]
        guilty += worst
        left = [pair for pair in left if not set(pair) & set(worst)]
    return guilty


def judge_streams(reports: dict[str, dict[str, Any]], interface: str | None) -> dict[str, list[Finding]]:
    """Node → findings, from each node's {other: MB/s}. Slow compared to the link's rate or to the other pairs."""
    flows: dict[tuple[str, str], float] = {}
    for node, report in reports.items():
        for other, rate in as_dict(report.get("streams")).items():
            value = number(rate)
            if value is not None and other in reports:
                flows[node, other] = value
    if not flows:
        return {}
    upper = sorted(flows.values())[len(flows) * 3 // 4]
    slow = {}
    for (node, other), rate in flows.items():
        speeds = [s for s in (number(reports[n].get("speed_mb_s")) for n in (node, other)) if s]
        least = min(LINK_PART * min(speeds), MOST_ASKED_MB_S) if speeds else 0.0
        if len(flows) > 2:
            least = max(least, min(OUTLIER_PART * upper, MOST_ASKED_MB_S))
        if rate < least or not rate:
            slow[node, other] = f"{node} → {other} {three_digits(rate)} MB/s"
    found = {}
    for node in reports:
        mine = [rate for pair, rate in flows.items() if node in pair and pair not in slow]
        if mine:
            text = f"a TCP stream runs at {min(mine):.0f} MB/s or more"
            found[node] = [finding("stream", "ok", text, short=f"{min(mine):.0f} MB/s")]
    for node in blame_streams(slow, flows):
        mine_slow = [text for pair, text in slow.items() if node in pair]
        speed = number(reports[node].get("speed_mb_s"))
        link = f", and {interface or 'the interface'} says {speed * 8 / 1000:g} Gb/s" if speed else ""
        others = f"; the best of all has {max(flows.values()):.0f} MB/s" if len(flows) > 2 else ""
        fix = "ethtool, ip -s link and tc qdisc show there; leave it out (cluster.exclude) until it is repaired"
        found[node] = [finding("stream", "bad", f"the link is slow: {', '.join(mine_slow)}{link}{others}", fix)]
    return found


def blame_streams(slow: Iterable[tuple[str, str]], flows: Iterable[tuple[str, str]]) -> list[str]:
    """A node that sends or receives slowly with all others explains the rest; otherwise the one in most slow pairs."""
    slow, flows = set(slow), set(flows)
    nodes = dict.fromkeys(node for pair in flows for node in pair)
    guilty = []
    for end in (0, 1):
        for node in nodes:
            mine = {pair for pair in flows if pair[end] == node}
            if len(mine) > 1 and mine <= slow:
                guilty.append(node)
    left = [pair for pair in slow if not set(pair) & set(guilty)]
    return list(dict.fromkeys([*guilty, *blame(left)]))
