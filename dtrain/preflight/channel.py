"""How the coordinator and the agents talk: JSON lines over TCP, and files in the run folder where the network fails.

A node that cannot be reached over the network can still say why, as long as it sees the run folder; and on a full disk
the network still works. A random token, passed in the environment, keeps strangers out. Nothing is unpickled.
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

from dtrain.comm.interfaces import is_ipv6
from dtrain.rundir import look_again, read_json, write_json
from dtrain.words import as_dict

CONNECT_S = 3.0
CHOICE_S = 0.3  # how long after one connection another may still turn out better
MOST_BYTES = 1 << 20  # of one line: whoever sends more is not one of ours
POLL_S = 0.2
WANT_S = 0.3  # an agent that waits for news also looks into the folder so often


def send(stream: socket.socket, message: dict[str, Any]) -> None:
    stream.sendall(json.dumps(message).encode() + b"\n")


def receive(file: BinaryIO) -> dict[str, Any]:
    """The next message, or {} at the end."""
    line = file.readline(MOST_BYTES)
    try:
        return as_dict(json.loads(line)) if line else {}
    except ValueError:
        return {}


def admitted(file: BinaryIO, token: str) -> dict[str, Any]:
    """The first message, if it carries the token; else {}."""
    hello = receive(file)
    return hello if hmac.compare_digest(str(hello.get("token", "")).encode(), token.encode()) else {}


def listen(address: str = "") -> socket.socket:
    """A listening socket on an address, or on all of IPv4 and IPv6."""
    if address:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, 0), family=family, backlog=512)
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # compiled in, and switched off on this host
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=512)
    return socket.create_server(("", 0), backlog=512)


def serve(listener: socket.socket, handle: Callable[[socket.socket], None]) -> None:
    """Answer connections, a thread each, until the listener is closed."""

    def one(stream: socket.socket) -> None:
        with stream, contextlib.suppress(OSError, ValueError):  # the other side has gone: it says so itself
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
    """The folder of one preflight: `NODE.KIND.json` from an agent, `KIND.json` from the coordinator."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.refreshed = 0.0

    def path(self, kind: str, node: str = "") -> Path:
        return self.folder / f"{node.replace('/', '_')}.{kind}.json" if node else self.folder / f"{kind}.json"

    def write(self, kind: str, value: dict[str, Any], node: str = "") -> bool:
        try:
            write_json(self.path(kind, node), value)
        except OSError:  # a full disk, or not seen from here: the network must do
            return False
        return True

    def read(self, kind: str, node: str = "") -> dict[str, Any]:
        if time.monotonic() > self.refreshed + 1:
            self.refreshed = time.monotonic()
            look_again(self.folder)
        return read_json(self.path(kind, node))


class Desk:
    """The coordinator's side: takes what agents post, hands out what it publishes, and tells the time."""

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
        with contextlib.suppress(OSError):  # closing alone would leave the thread in accept(), and the port taken
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()


class Link:
    """An agent's side: over TCP if any of the coordinator's addresses answers, else through the run folder."""

    def __init__(self, addresses: list[tuple[str, int]], token: str, node: str, messages: Messages) -> None:
        self.node, self.messages = node, messages
        self.stream, self.problems = first_choice(addresses, {"token": token, "node": node})
        if self.stream:
            self.file = self.stream.makefile("rb")

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message and its answer; {} when the connection is gone, and from then on."""
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
        """(how far this clock is ahead of the coordinator's, half the way there and back), the best of five tries."""
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
        """What the coordinator publishes under this name; {} when that takes too long (by the monotonic clock)."""
        while time.monotonic() < until:
            found = as_dict(self._ask({"want": kind}).get("value")) or self.messages.read(kind)
            if found:
                return found
            if self.stream is None:
                time.sleep(POLL_S)
        return {}


def first_choice(addresses: list[tuple[str, int]], hello: dict[str, Any]) -> tuple[socket.socket | None, list[str]]:
    """A connection to the first address that answers, IPv4 before IPv6, and why others did not.

    Not to the quickest one, so that all nodes take the same way; but nobody waits for a network that leads nowhere.
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
    """A connection to one of ours, who has answered. An OSError names the address."""
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
    """Once at once, then again and again until the monotonic clock says so."""
    yield
    while time.monotonic() < until:
        time.sleep(every)
        yield
