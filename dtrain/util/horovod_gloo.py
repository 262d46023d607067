"""How Horovod's processes find each other under gloo: variables, and the key-value store over HTTP that they name.

horovodrun starts such a store, from Horovod's package. This one needs no Horovod: a program may run in another Python.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LARGEST = 1 << 16  # bytes of a value; an address has a few hundred


def variables(hosts: Sequence[str], rank: int, local_size: int, port: int, interface: str = "") -> dict[str, str]:
    """Return one rank's variables. `hosts`: the address of each rank's node; `port`: of the store, on rank 0's node."""
    size = len(hosts)
    places = {
        "RANK": rank, "SIZE": size, "LOCAL_RANK": rank % local_size, "LOCAL_SIZE": local_size,
        "CROSS_RANK": rank // local_size, "CROSS_SIZE": size // local_size,
        "HOSTNAME": hosts[rank // local_size * local_size],  # one name for all of a node: that of its first rank
        "GLOO_RENDEZVOUS_ADDR": hosts[0], "GLOO_RENDEZVOUS_PORT": port,
        "CONTROLLER": "gloo", "CPU_OPERATIONS": "gloo",
    }  # fmt: skip
    found = {f"HOROVOD_{name}": str(value) for name, value in places.items()}
    return found | ({"HOROVOD_GLOO_IFACE": interface} if interface else {})


@contextmanager
def store(host: str, size: int, local_size: int) -> Iterator[int]:
    """Serve the store for that many ranks while the context lasts; yield its port."""
    # not only at the address: a host name may resolve to 127.0.1.1 on its own node
    server = Store((host if host.startswith("127.") else "", 0), Handler)
    server.sizes = {"global": size, "local": local_size, "cross": size // local_size}
    threading.Thread(target=server.serve_forever, name="horovod-store", daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


class Store(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.values: defaultdict[str, dict[str, bytes]] = defaultdict(dict)  # by scope and key
        self.connected: defaultdict[str, set[str]] = defaultdict(set)  # ranks of a scope
        self.sizes: dict[str, int] = {}  # ranks of a kind of scope: global, local_HOST, cross_RANK


class Handler(BaseHTTPRequestHandler):
    """PUT and GET /SCOPE/KEY. A rank sends DELETE /SCOPE/RANK when it is connected; others may still read then."""

    server: Store

    def do_GET(self) -> None:
        _, scope, key = self.path.split("/", 2)
        self.answer(self.server.values[scope].get(key))

    def do_PUT(self) -> None:
        _, scope, key = self.path.split("/", 2)
        if (length := int(self.headers["Content-Length"])) > LARGEST:
            self.send_error(413)
            return
        self.server.values[scope][key] = self.rfile.read(length)
        self.answer(b"")

    def do_DELETE(self) -> None:
        _, scope, rank = self.path.split("/", 2)
        self.server.connected[scope].add(rank)
        if len(self.server.connected[scope]) == self.server.sizes.get(scope.partition("_")[0]):
            self.server.values.pop(scope, None)  # a second hvd.init() must not find old addresses
            del self.server.connected[scope]
        self.answer(b"")

    def answer(self, value: bytes | None) -> None:
        self.send_response(404 if value is None else 200)
        self.send_header("Content-Length", str(len(value or b"")))
        self.end_headers()
        self.wfile.write(value or b"")

    def log_message(self, *_: object) -> None:
        """Print nothing: a rank asks every 10 ms."""
