"""Rules for a fabric's profile: reject, with the reason, what NCCL would silently clamp, misread or ignore."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from dtrain.config.files import CONTROL, SECRET
from dtrain.errors import bad
from dtrain.util.format import as_dict

ENV = "cluster.fabric.env"
TRANSPORTS = ("socket", "ib", "efa")
LEVELS = ("LOC", "PIX", "PXB", "PHB", "SYS")  # NCCL's former levels 0 to 4; more than 4 meant SYS
# Variables that a profile may set. Others select code or a rank's identity, and a profile may be someone else's file.
# FI_PROVIDER_PATH, OMP_TOOL_LIBRARIES, NCCL_CONF_FILE: shared libraries to load; NCCL_DEBUG_FILE: a file to overwrite
LOADS = "PLUGIN|PATH|LIBRAR|MODULE|TOOL|COMPONENT|FILE|CONF|PROFILER|AGENT|PIPE|DUMP"
OURS = re.compile(rf"(NCCL|GLOO|TORCH_NCCL|FI|UCX|OMP|RDMAV|OMPI_MCA)_(?!.*({LOADS})).*|CUDA_DEVICE_MAX_CONNECTIONS")
FOR_SOCKETS = "affects only NCCL's socket transport, which EFA does not use"
NO_INFINIBAND = "configures InfiniBand, which EFA is not: AWS offers no InfiniBand"
ON_EFA = {
    "NCCL_PROTO": "was needed by plugins up to 1.5.0; with a newer one it only disables the faster protocols",
    "RDMAV_FORK_SAFE": "breaks newer kernels; the plugin sets what is needed itself",
    "NCCL_SOCKET_NTHREADS": FOR_SOCKETS,
    "NCCL_NSOCKS_PERTHREAD": FOR_SOCKETS,
}
EFA_MAY_NEED = ("FI_EFA_USE_HUGE_PAGE", "FI_LOG_LEVEL")


def check(config: Mapping[str, Any]) -> None:
    """Raise a ValueError for the first broken rule of cluster.fabric. No torch; this machine is not inspected."""
    fabric = config["cluster"].get("fabric")
    if fabric is None:  # cluster=local
        return
    settings = ("transport", "interface", "hca", "env")
    if not isinstance(fabric, dict) or set(fabric) - set(settings):
        wrong = next(iter(set(fabric) - set(settings))) if isinstance(fabric, dict) else ""
        raise bad("cluster.fabric", wrong or fabric, f"has the settings {', '.join(settings)}", "use one of them")
    transport, interface, hca = (fabric.get(key) for key in settings[:3])
    if transport not in (None, *TRANSPORTS):
        raise bad(
            "cluster.fabric.transport",
            transport,
            f"must be one of {', '.join(TRANSPORTS)}, or null to let NCCL choose",
            "cluster.fabric.transport=null",
        )
    if interface is not None and not re.fullmatch(r"[A-Za-z0-9][\w.@:-]{0,14}", str(interface), re.ASCII):
        raise bad(
            "cluster.fabric.interface",
            interface,
            "must be the exact name of one network interface, without = or ^ in front",
            "`ip -br addr` on a node lists them: cluster.fabric.interface=eth0",
        )
    if hca is not None and not re.fullmatch(r"[\w.-]+(:\d+)?(,[\w.-]+(:\d+)?)*", str(hca), re.ASCII):
        raise bad(
            "cluster.fabric.hca",
            hca,
            "must be exact names of InfiniBand adapters with commas between, without = or ^ in front",
            "`ls /sys/class/infiniband` on a node lists them: 'cluster.fabric.hca=\"mlx5_0,mlx5_1\"'",
        )
    env = fabric.get("env")
    if not isinstance(env, dict):
        raise bad(ENV, env, "must be a mapping of NAME: {value: …, why: …}", f"{ENV}={{}}")
    unmade = [str(name) for name, entry in env.items() if as_dict(entry).get("value") in (None, "=None")]
    if unmade and None in (interface, hca):  # "=${cluster.fabric.interface}" where that is null
        raise bad(
            f"cluster.fabric.{'interface' if interface is None else 'hca'}",
            None,
            f"{' and '.join(unmade)} would be set from it",
            f"set it, or remove: {' '.join(f'~{ENV}.{name}' for name in unmade)}",
        )
    for name, entry in env.items():
        check_entry(name, entry)
    values = {name: str(entry["value"]) for name, entry in env.items()}
    for name, value in values.items():
        if name in VALUE_RULES:
            VALUE_RULES[name](f"{ENV}.{name}.value", value)
        if transport == "efa":
            check_on_efa(name, value)
    check_sockets(values)
    check_transport(transport, values)


def check_entry(name: Any, entry: Any) -> None:
    """Check one variable: its name, and that it has exactly a value and a reason."""
    key = f"{ENV}.{name}"
    if not isinstance(name, str) or not re.fullmatch(r"[A-Z][A-Z0-9_]*", name):
        raise bad(ENV, repr(name), "a variable's name must be capital letters, digits and _", "rename it")
    if SECRET.search(name):
        raise bad(key, "…", "looks like a secret, and a profile is written to disk", "export it in your own shell")
    if not OURS.fullmatch(name):
        raise bad(
            key, "…", "must not be set by a network profile", "export it in your own shell, or set it in cluster.setup"
        )
    if not isinstance(entry, dict) or set(entry) != {"value", "why"}:
        raise bad(
            key,
            sorted(map(str, entry)) if isinstance(entry, dict) else entry,
            "needs exactly a value and a why: nobody dares to remove a variable without a known reason",
            f"'+{key}={{value: …, why: …}}'",
        )
    value, why = entry["value"], entry["why"]
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise bad(
            f"{key}.value", value, "must be text or a whole number", f"{key}.value='\"1\"', or '~{key}' without it"
        )
    if not isinstance(why, str) or not why.strip():
        raise bad(f"{key}.why", why, "must say why the variable is set", f"'{key}.why=\"…\"'")
    for part, text in (("value", str(value)), ("why", why)):
        if CONTROL.search(text):
            raise bad(f"{key}.{part}", repr(text), "must have no line breaks or control characters", "take them out")


def check_interface_rule(key: str, value: str) -> None:
    """NCCL excludes docker and lo by default, but not if a custom rule is given."""
    if not value.startswith("^"):
        return
    excluded = [word for word in value.lstrip("^=").split(",") if word]
    lo = "lo" in excluded or ("l" in excluded and not value.startswith("^="))
    docker = any("docker0".startswith(word) for word in excluded)
    if not (lo and docker):
        missing = [word for word, there in (("docker", docker), ("lo", lo)) if not there]
        fixed = "^" + ",".join(dict.fromkeys([*(re.sub(r"^docker0$", "docker", w) for w in excluded), *missing]))
        raise bad(
            key,
            value,
            f"switches off NCCL's own filter, so that {' and '.join(missing)} could be chosen",
            f"{key}=\"'=eth0'\" for exactly one, or {key}=\"'{fixed}'\"",
        )


def check_gloo(key: str, value: str) -> None:
    if not re.fullmatch(r"[\w.@:-]+(,[\w.@:-]+)*", value, re.ASCII):
        raise bad(
            key,
            value,
            "gloo accepts only plain names, without = or ^",
            f"{key}={value.lstrip('^=').split(',')[0] or 'eth0'}",
        )


def check_level(more: tuple[str, ...]) -> Callable[[str, str], None]:
    def check(key: str, value: str) -> None:
        if re.fullmatch(r"-?\d+", value):
            meant = LEVELS[min(max(int(value), 0), 4)]
            raise bad(key, value, "numbers changed their meaning between versions of NCCL", f"{key}={meant}")
        if value not in (*LEVELS, *more):
            raise bad(key, value, f"must be one of {', '.join((*LEVELS, *more))}", f"{key}=PXB")

    return check


def check_on_efa(name: str, value: str) -> None:
    reason = ON_EFA.get(name)
    if name.startswith("NCCL_IB_"):
        reason = NO_INFINIBAND
    elif name.startswith("FI_") and name not in EFA_MAY_NEED:
        reason = "is obsolete: plugins since 1.7 and libfabric since 1.18 choose it themselves"
    if reason:
        raise bad(f"{ENV}.{name}.value", value, reason, f"leave it out: '~{ENV}.{name}'")


def check_sockets(values: dict[str, str]) -> None:
    """Reject values that NCCL would clamp with a warning that is easy to miss."""
    numbers = {}
    for name, most in (("NCCL_SOCKET_NTHREADS", 16), ("NCCL_NSOCKS_PERTHREAD", 64)):
        text = values.get(name)
        if text is None:
            continue
        if not re.fullmatch(r"\d{1,6}", text, re.ASCII) or not 1 <= int(text) <= most:
            raise bad(f"{ENV}.{name}.value", text, f"must be a number from 1 to {most}", f"{ENV}.{name}.value=4")
        numbers[name] = int(text)
    threads, sockets = numbers.get("NCCL_SOCKET_NTHREADS", 1), numbers.get("NCCL_NSOCKS_PERTHREAD", 1)
    if threads * sockets > 64:
        raise bad(
            f"{ENV}.NCCL_NSOCKS_PERTHREAD.value",
            sockets,
            f"times NCCL_SOCKET_NTHREADS={threads} makes {threads * sockets} connections, and NCCL allows 64",
            f"{ENV}.NCCL_NSOCKS_PERTHREAD.value={64 // threads}",
        )


def check_transport(transport: str | None, values: dict[str, str]) -> None:
    """Reject a profile whose variables contradict its transport."""
    for name, wrong, other in (
        ("NCCL_IB_DISABLE", "0", "socket"),
        ("NCCL_IB_DISABLE", "1", "ib"),
        ("NCCL_NET", "IB", "socket"),
        ("NCCL_NET", "Socket", "ib"),
        ("NCCL_NET", "Socket", "efa"),
        ("NCCL_NET", "IB", "efa"),
    ):
        if transport == other and values.get(name) == wrong:
            raise bad(
                f"{ENV}.{name}.value", wrong, f"contradicts cluster.fabric.transport={other}", "change one of the two"
            )


VALUE_RULES: dict[str, Callable[[str, str], None]] = {
    "NCCL_SOCKET_IFNAME": check_interface_rule,
    "GLOO_SOCKET_IFNAME": check_gloo,
    "NCCL_NET_GDR_LEVEL": check_level(()),
    "NCCL_P2P_LEVEL": check_level(("NVL",)),
}
