"""The store by which Horovod's ranks find each other, as Horovod asks it; tests/launch/test_horovod.py runs Horovod."""

from __future__ import annotations

import http.client

from dtrain.util import horovod_gloo


def ask(port: int, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path, body)
    response = connection.getresponse()
    return response.status, response.read()


def test_the_store_keeps_a_scope_until_all_are_connected() -> None:
    with horovod_gloo.store("127.0.0.1", size=2, local_size=1) as port:
        assert ask(port, "GET", "/global/0") == (404, b"")
        assert ask(port, "PUT", "/global/0", b"\0an address\n") == (200, b"")
        assert ask(port, "PUT", "/local_10.0.0.1/0", b"other") == (200, b"")
        assert ask(port, "GET", "/global/0") == (200, b"\0an address\n")
        assert ask(port, "DELETE", "/global/1") == (200, b"")
        assert ask(port, "GET", "/global/0") == (200, b"\0an address\n"), "rank 0 may still read"
        assert ask(port, "DELETE", "/global/0") == (200, b"")
        assert ask(port, "GET", "/global/0") == (404, b""), "or a second hvd.init() would use the first one's"
        assert ask(port, "GET", "/local_10.0.0.1/0") == (200, b"other")
        assert ask(port, "PUT", "/global/0", bytes(1 << 17))[0] == 413


def test_the_last_of_two_ranks_on_each_of_two_nodes() -> None:
    hosts = ["10.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.2"]
    found = horovod_gloo.variables(hosts, rank=3, local_size=2, port=4711, interface="eth0")
    assert {name.removeprefix("HOROVOD_"): value for name, value in found.items()} == {
        "RANK": "3", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "CROSS_RANK": "1", "CROSS_SIZE": "2",
        "HOSTNAME": "10.0.0.2", "GLOO_RENDEZVOUS_ADDR": "10.0.0.1", "GLOO_RENDEZVOUS_PORT": "4711",
        "CONTROLLER": "gloo", "CPU_OPERATIONS": "gloo", "GLOO_IFACE": "eth0",
    }  # fmt: skip
