"""Memory of this host that we may use: the machine's, limited by a container or a job.

A process belongs to a tree of cgroups. The limits of its own group and of every group above it apply, in version 1
(docker, SLURM on older systems) and in version 2. No torch: the launcher calls this before every run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path("/")  # tests simulate other hosts
# per version: the limit, the usage, and the page cache inside it (which the kernel can reclaim), by the names of
# memory.stat. Not "file" or "cache": those include shared memory. memory.high is no limit: above it processes slow
# down.
FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
    2: ("memory.max", "memory.current", ("inactive_file", "active_file")),
}


def total_bytes(root: Path = ROOT) -> int:
    """The maximum that this process and its children may use."""
    return limit_bytes(root) or physical_bytes()


def described(total: int) -> str:
    """Describe that number of bytes, for a message that continues with the number."""
    return "the memory limit of this container or job is" if total == limit_bytes() else "this machine has"


def physical_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def limit_bytes(root: Path = ROOT, environ: Mapping[str, str] = os.environ) -> int | None:
    """The limit of a container or a job; None if there is none below the machine's memory."""
    limits = [limit for limit, _ in groups(root)]
    if (asked := slurm_bytes(environ)) is not None:
        limits.append(asked)
    least = min(limits, default=physical_bytes())
    return least if least < physical_bytes() else None


def free_bytes(root: Path = ROOT) -> int | None:
    """Bytes that are still available; None if the kernel does not report them."""
    try:
        fields = dict(line.split(":") for line in (root / "proc/meminfo").read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    return max(0, min([free, *(limit - used for limit, used in groups(root))]))


def slurm_bytes(environ: Mapping[str, str] = os.environ) -> int | None:
    """Memory that a SLURM job requested on this node (MB): not every site enforces it by cgroup. 0 means all."""
    if "SLURM_JOB_ID" not in environ:
        return None
    per_node, per_cpu, cpus = (
        int(value) if (value := environ.get(name, "")).isdigit() else 0
        for name in ("SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SLURM_CPUS_ON_NODE")
    )
    return (per_node or per_cpu * cpus) * 2**20 or None


def groups(root: Path = ROOT) -> Iterator[tuple[int, int]]:
    """(limit, used) in bytes of this process's cgroup and of each above it that has a limit."""
    for version, folder in folders(root):
        limit_file, used_file, cached = FILES[version]
        try:
            limit = int((folder / limit_file).read_text())  # "max" in version 2: none; 2**63 in version 1
            used = int((folder / used_file).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        yield limit, used - sum(int(stat.get(name, 0)) for name in cached)


def folders(root: Path) -> Iterator[tuple[int, Path]]:
    """(version, folder) of the cgroups that count this process's memory, from its own up to the root."""
    try:
        places = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
        mounts = [line.split() for line in (root / "proc/self/mountinfo").read_text().splitlines()]
    except OSError:
        return
    for number, controllers, path in places:
        version = 2 if number == "0" else 1
        if version == 1 and "memory" not in controllers.split(","):
            continue
        for fields in mounts:
            kind, options = fields[fields.index("-") + 1], fields[-1]
            if kind != ("cgroup2" if version == 2 else "cgroup"):
                continue
            if version == 1 and "memory" not in options.split(","):
                continue
            inside, top = fields[3], root / fields[4].replace("\\040", " ").lstrip("/")
            # A container sees the host's path of its group, and that group mounted as the root.
            below = path[len(inside) :] if f"{path}/".startswith(f"{inside.rstrip('/')}/") else ""
            folder = top / below.strip("/")
            if ".." in folder.parts:  # moved out of the namespace's tree
                folder = top
            yield version, folder
            while folder != top:
                folder = folder.parent
                yield version, folder
