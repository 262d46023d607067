"""A used port is refused with a free one, and a host that is not there as a host."""

from __future__ import annotations

import socket

import pytest

from dtrain.util import ports


def test_a_used_port_is_refused_with_one_that_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ValueError, match=rf"--port={port}: .*Address already in use.*another program") as refused:
            ports.check("--port", port, "127.0.0.1", "--port 0", sign=" ")
        fix = str(refused.value).partition("  fix: ")[2]
        assert fix.startswith("--port ") and fix.endswith(", which is free, or --port 0")
        ports.bind("127.0.0.1", int(fix.split()[1].rstrip(",")))
    ports.check("--port", port, "127.0.0.1")


def test_a_host_that_is_not_there() -> None:
    with pytest.raises(ValueError, match=r"--host=nowhere\.invalid: is no address.*\n  fix: --host 127"):
        ports.check("--port", 8000, "nowhere.invalid", sign=" ")
    with pytest.raises(ValueError, match=r"cluster\.metrics_host=203\.0\.113\.9: .*\n  fix: "):
        ports.check("cluster.metrics_port", 8000, "203.0.113.9")
    for port in (0, 80, 8000):
        with pytest.raises(ValueError, match=r"--host=(fe80::1|a b): is no address of this machine \([\w ]+\)\n"):
            ports.check("--port", port, "a b" if port else "fe80::1", sign=" ")
