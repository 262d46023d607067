"""Communication between coordinator and agents: JSON lines over TCP, and files in the run folder as a fallback.

A node without network can still report why, as long as it sees the run folder; and on a full disk the network still
works. A random token, passed in the environment, keeps strangers out. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from dtrain.preflight.interfaces import is_ipv6
from dtrain.runs.folder import look_again, read_json, write_json
from dtrain.util.format import as_dict

CONNECT_S = 3.0
CHOICE_S = 0.3  # how long after the first connection to wait for a preferred one
MOST_BYTES = 1 << 20  # longest line: a sender of more is not one of ours
POLL_S = 0.2
WANT_S = 0.3  # a waiting agent also checks the folder this often


def send(stream: socket.socket, message: dict[str, Any]) -> None:
    stream.sendall(json.dumps(message).encode() + b"\n")


def receive(file: BinaryIO) -> dict[str, Any]:
    """Return the next message, or {} at the end."""
    line = file.readline(MOST_BYTES)
    try:
        return as_dict(json.loads(line)) if line else {}
    except ValueError:
        return {}


def admitted(file: BinaryIO, token: str) -> dict[str, Any]:
    """Return the first message if it has the token; otherwise {}."""
    hello = receive(file)
    return hello if hmac.compare_digest(str(hello.get("token", "")).encode(), token.encode()) else {}


def listen(address: str = "") -> socket.socket:
    """Open a listening socket on one address, or on all of IPv4 and IPv6."""
    if address:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, 0), family=family, backlog=512)
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # compiled in, but disabled on this host
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=512)
    return socket.create_server(("", 0), backlog=512)


def serve(listener: socket.socket, handle: Callable[[socket.socket], None]) -> None:
    """Handle connections, one thread each, until the listener is closed."""

    def one(stream: socket.socket) -> None:
        with stream, contextlib.suppress(OSError, ValueError):  # the other side is gone and reports it itself
            handle(stream)

    def loop() -> None:
        while True:
            try:
                stream, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=one, args=(stream,), daemon=True).start()

    threading.Thread(target=loop, daemon=True).start()


class Messages:
    """The message folder of one preflight: `NODE.KIND.json` from an agent, `KIND.json` from the coordinator."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.refreshed = 0.0

    def path(self, kind: str, node: str = "") -> Path:
        return self.folder / f"{node.replace('/', '_')}.{kind}.json" if node else self.folder / f"{kind}.json"

    def write(self, kind: str, value: dict[str, Any], node: str = "") -> bool:
        try:
            write_json(self.path(kind, node), value)
        except OSError:  # disk full or folder not visible here: rely on the network
            return False
        return True

    def read(self, kind: str, node: str = "") -> dict[str, Any]:
        if time.monotonic() > self.refreshed + 1:
            self.refreshed = time.monotonic()
            look_again(self.folder)
        return read_json(self.path(kind, node))


class Desk:
    """The coordinator's side: receives posts of agents, serves published messages, and answers clock requests."""

    def __init__(self, token: str, messages: Messages) -> None:
        self.token, self.messages = token, messages
        self.posted: dict[tuple[str, str], dict[str, Any]] = {}
        self.published: dict[str, dict[str, Any]] = {}
        self.news = threading.Condition()
        self.listener = listen()
        self.port = int(self.listener.getsockname()[1])
        serve(self.listener, self._handle)

    def _handle(self, stream: socket.socket) -> None:
        with stream.makefile("rb") as file:
            node = str(admitted(file, self.token).get("node", ""))
            if not node:
                return
            send(stream, {"ok": True})
            for message in iter(lambda: receive(file), {}):
                if "clock" in message:
                    send(stream, {"clock": time.time()})
                elif "post" in message:
                    with self.news:
                        self.posted[node, str(message["post"])] = as_dict(message.get("value"))
                        self.news.notify_all()
                    send(stream, {"ok": True})
                elif "want" in message:
                    send(stream, {"value": self._wait(str(message["want"]))})

    def _wait(self, kind: str) -> dict[str, Any]:
        with self.news:
            self.news.wait_for(lambda: kind in self.published, WANT_S)
            return self.published.get(kind, {})

    def get(self, node: str, kind: str) -> dict[str, Any]:
        with self.news:
            found = self.posted.get((node, kind))
        return found or self.messages.read(kind, node)

    def publish(self, kind: str, value: dict[str, Any]) -> None:
        with self.news:
            self.published[kind] = value
            self.news.notify_all()
        self.messages.write(kind, value)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # close() alone would leave the thread in accept(), and the port in use
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()


class Link:
    """An agent's side: over TCP if any of the coordinator's addresses answers, otherwise through the run folder."""

    def __init__(self, addresses: list[tuple[str, int]], token: str, node: str, messages: Messages) -> None:
        self.node, self.messages = node, messages
        self.stream, self.problems = first_choice(addresses, {"token": token, "node": node})
        if self.stream:
            self.file = self.stream.makefile("rb")

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a message and return the answer; {} once the connection is lost."""
        if self.stream is None:
            return {}
        try:
            send(self.stream, message)
            answer = receive(self.file)
        except OSError:
            answer = {}
        if not answer:
            self.stream.close()
            self.stream = None
        return answer

    def skew(self, clock: Callable[[], float] = time.time) -> tuple[float, float] | None:
        """(this clock's lead over the coordinator's, half the round trip time), the best of five tries."""
        tries = []
        for _ in range(5):
            before, began = clock(), time.monotonic()
            answer = self._ask({"clock": True}).get("clock")
            rtt = time.monotonic() - began
            if isinstance(answer, (int, float)):
                tries.append((rtt / 2, before + rtt / 2 - answer))
        return (min(tries)[1], min(tries)[0]) if tries else None

    def post(self, kind: str, value: dict[str, Any]) -> None:
        if not self._ask({"post": kind, "value": value}):
            self.messages.write(kind, value, self.node)

    def wait(self, kind: str, until: float) -> dict[str, Any]:
        """Wait for the coordinator to publish this kind of message; {} on timeout (monotonic clock)."""
        while time.monotonic() < until:
            found = as_dict(self._ask({"want": kind}).get("value")) or self.messages.read(kind)
            if found:
                return found
            if self.stream is None:
                time.sleep(POLL_S)
        return {}


def first_choice(addresses: list[tuple[str, int]], hello: dict[str, Any]) -> tuple[socket.socket | None, list[str]]:
    """Connect to the first address in order that answers, IPv4 before IPv6; also return why others did not.

    Not to the fastest one, so that all nodes use the same route; but a dead network does not delay it.
    """
    answers: queue.Queue[tuple[int, socket.socket | str]] = queue.Queue()

    def attempt(place: int, address: tuple[str, int]) -> None:
        try:
            answers.put((place, greet(address, hello)))
        except OSError as error:
            answers.put((place, str(error)))

    for place, address in enumerate(sorted(addresses, key=lambda a: is_ipv6(a[0]))):
        threading.Thread(target=attempt, args=(place, address), daemon=True).start()
    streams: dict[int, socket.socket] = {}
    problems = []
    for _ in addresses:
        try:
            place, answer = answers.get(timeout=CHOICE_S if streams else None)
        except queue.Empty:
            break
        if isinstance(answer, str):
            problems.append(answer)
        else:
            streams[place] = answer
    chosen = streams.pop(min(streams)) if streams else None
    for stream in streams.values():
        stream.close()
    return chosen, problems


def greet(
    address: tuple[str, int], hello: dict[str, Any], source: str = "", timeout: float = CONNECT_S
) -> socket.socket:
    """Connect to one of our processes and wait for its answer. An OSError names the address."""
    try:
        stream = socket.create_connection(address, timeout, source_address=(source, 0) if source else None)
    except OSError as error:
        raise OSError(f"{address[0]}: {error.strerror or error}") from error
    try:
        send(stream, hello)
        with stream.makefile("rb") as file:
            if not receive(file):
                raise OSError("it closed the connection")
        stream.settimeout(30)
    except OSError as error:
        stream.close()
        raise OSError(f"{address[0]}: connected, but no answer ({error})") from error
    return stream


def waiting(until: float, every: float = POLL_S) -> Iterator[None]:
    """Yield at once, then repeatedly until the monotonic clock reaches `until`."""
    yield
    while time.monotonic() < until:
        time.sleep(every)
        yield
