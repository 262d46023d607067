"""Versions that must be equal on every node, read without importing torch, and which nodes differ."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections import Counter
from pathlib import Path

from dtrain.preflight.node_checks import Finding, finding, python_version

LABELS = {"python": "Python", "torch": "torch", "nccl": "NCCL", "deepspeed": "DeepSpeed", "code": "dtrain's code"}


def versions(gpu_names: list[str], drivers: list[str]) -> dict[str, str]:
    """Name → version of this node. `code` is a digest, because the version number does not change while editing."""
    found = {"python": python_version(), "torch": installed("torch"), "deepspeed": installed("deepspeed")}
    nccl = [installed(f"nvidia-nccl-{cuda}") for cuda in ("cu13", "cu12", "cu11")]
    found["nccl"] = next((v for v in nccl if v != "none"), "none")
    found["code"] = code_digest()
    found["driver"] = ", ".join(sorted(set(drivers))) or "none"
    found["GPUs"] = ", ".join(sorted(set(gpu_names))) or "none"
    return found


def installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def code_digest(folder: Path | None = None) -> str:
    folder = folder or Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def compare(by_node: dict[str, dict[str, str]]) -> dict[str, list[Finding]]:
    """Node → findings. Names the nodes that differ from most nodes or, without a majority, from the first."""
    found: dict[str, list[Finding]] = {node: [] for node in by_node}
    for name in dict.fromkeys(key for values in by_node.values() for key in values):
        values = {node: versions.get(name, "unknown") for node, versions in by_node.items()}
        counts = Counter(values.values())
        usual = max(counts, key=lambda v: (counts[v], v == next(iter(values.values()))))
        for node, value in values.items():
            if value == usual:
                continue
            others = [n for n, v in values.items() if v == usual]
            who = others[0] if len(others) == 1 else f"{len(others)} nodes ({others[0]}, …)"
            label = LABELS.get(name, name)
            text = f"{label} is {value} here and {usual} on {who}"
            found[node].append(finding("versions", "bad", text, fix_for(name, node)))
    for node, mine in found.items():
        if not mine:
            torch = by_node[node].get("torch", "?")
            text = ", ".join(f"{LABELS.get(k, k)} {v}" for k, v in by_node[node].items())
            mine.append(finding("versions", "ok", text, short=f"torch {torch}"))
    return found


def fix_for(name: str, node: str) -> str:
    if name == "code":
        return "use one checkout on a shared file system for all nodes; is an old copy installed (pip show -f dtrain)?"
    if name in ("driver", "GPUs"):
        return f"use nodes of one kind: cluster.constraint=…, or cluster.exclude={node}"
    return "use one environment on a shared file system, or one container image (cluster.python, cluster.setup)"
