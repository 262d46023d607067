"""Refuse a port that cannot be bound before anything slow starts, and name the next free one."""

from __future__ import annotations

import errno
import os
import socket

from dtrain.errors import bad

TRIED = 50  # ports after the wanted one


def check(setting: str, port: int, host: str, otherwise: str = "", sign: str = "=") -> None:
    """Raise an error if another program has the port. otherwise: how to do without it."""
    try:
        bind(host, port)
    except OSError as error:
        raise refusal(setting, port, host, error, otherwise, sign) from None


def refusal(setting: str, port: int, host: str, error: OSError, otherwise: str = "", sign: str = "=") -> ValueError:
    if why := problem_of(host):
        rule = f"is no address of this machine ({why})"
        return bad(setting.replace("port", "host"), host, rule, setting.replace("port", "host") + f"{sign}127.0.0.1")
    why = os.strerror(error.errno) if error.errno else str(error)
    rule = f"{host}:{port} cannot be bound ({why})"
    if error.errno == errno.EADDRINUSE:
        rule += ": another program listens there (`ss -ltnp` names it)"
    found = near(host, port)
    fix = f"{setting}{sign}{found}, which is free" if found else f"another {setting}"
    return bad(setting, port, rule, f"{fix}, or {otherwise}" if otherwise else fix)


def problem_of(host: str) -> str:
    """Return why no port of a host can be bound, or ""."""
    try:
        bind(host, 0)
    except OSError as error:  # Python adds what it has tried to the text; an error of getaddrinfo is negative
        number = error.errno or 0
        return os.strerror(number) if number > 0 else str(error.strerror).partition(" (while")[0]
    return ""


def near(host: str, port: int) -> int | None:
    """Return the first free port after this one that needs no privilege."""
    for other in range(max(port + 1, 1024), min(max(port, 1024) + TRIED, 65536)):
        try:
            bind(host, other)
        except OSError:
            continue
        return other
    return None


def bind(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    socket.create_server((host, port), family=family).close()
