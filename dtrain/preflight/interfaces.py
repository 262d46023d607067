"""The network interfaces of this node, from the kernel, for this process's own network namespace.

Not from /sys/class/net: inside a network namespace it still shows the interfaces of the namespace that mounted it.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

SIOCGIFFLAGS, SIOCGIFADDR, SIOCETHTOOL = 0x8913, 0x8915, 0x8946
IFF_UP, IFF_RUNNING = 0x1, 0x40
ETHTOOL_GSET = 1


@dataclass(frozen=True)
class Interface:
    name: str
    up: bool  # switched on
    running: bool  # has a link
    addresses: tuple[str, ...] = ()  # IPv4 first; no link-local ones
    speed_mb_s: float | None = None  # megabytes per second, as the driver reports

    def __str__(self) -> str:
        state = "down" if not self.up else "no link" if not self.running else "up" if self.addresses else "no address"
        return f"{self.name} ({state})"


def interfaces(proc: Path = Path("/proc")) -> dict[str, Interface]:
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        for _, name in socket.if_nameindex():
            flags = _flags(asker, name)
            addresses = (*_ipv4(asker, name), *_ipv6(proc / "net" / "if_inet6", name))
            speed = _speed(asker, name)
            found[name] = Interface(name, bool(flags & IFF_UP), bool(flags & IFF_RUNNING), addresses, speed)
    return found


def describe(found: dict[str, Interface]) -> str:
    """List all except lo, without addresses: equal text on every node is reported once."""
    return ", ".join(str(i) for i in found.values() if i.name != "lo") or "none but lo"


def is_ipv6(address: str) -> bool:
    return ":" in address


def usable(found: dict[str, Interface], preferred: str | None) -> list[str]:
    """Return addresses where others may reach this node, the preferred interface first; loopback as a last resort."""
    ordered = sorted(found.values(), key=lambda i: (i.name != preferred, i.name == "lo"))
    addresses = [a for i in ordered if i.up and i.name != "lo" for a in i.addresses]
    return list(dict.fromkeys(addresses)) or ["127.0.0.1"]


def _request(asker: socket.socket, code: int, name: str) -> bytes | None:
    try:
        return fcntl.ioctl(asker.fileno(), code, struct.pack("256s", name.encode()[:15]))
    except OSError:  # e.g. an interface without an IPv4 address
        return None


def _flags(asker: socket.socket, name: str) -> int:
    answer = _request(asker, SIOCGIFFLAGS, name)
    return int(struct.unpack_from("H", answer, 16)[0]) if answer else 0


def _ipv4(asker: socket.socket, name: str) -> tuple[str, ...]:
    answer = _request(asker, SIOCGIFADDR, name)
    return (socket.inet_ntoa(answer[20:24]),) if answer else ()


def _ipv6(path: Path, name: str) -> tuple[str, ...]:
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:  # no IPv6 here
        return ()
    addresses = [ipaddress.IPv6Address(bytes.fromhex(line[0])) for line in lines if len(line) > 5 and line[5] == name]
    return tuple(str(a) for a in addresses if not a.is_link_local)


def _speed(asker: socket.socket, name: str) -> float | None:
    """Return the link speed from the driver, by the old ethtool request that every kernel still supports."""
    command = array.array("B", struct.pack("I", ETHTOOL_GSET) + bytes(60))
    address, _ = command.buffer_info()
    try:
        fcntl.ioctl(asker.fileno(), SIOCETHTOOL, struct.pack("16sP16x", name.encode()[:15], address))
    except OSError:
        return None
    low, high = struct.unpack_from("H", command, 12)[0], struct.unpack_from("H", command, 28)[0]
    megabits = low | high << 16
    return megabits / 8 if 0 < megabits < 0xFFFFFFFF and megabits != 0xFFFF else None
