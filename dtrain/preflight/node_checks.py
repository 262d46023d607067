"""Checks of one node that take about a second, without torch: each returns findings and never raises.

System paths are parameters, so that tests can simulate other nodes.
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from dtrain.config.files import is_script
from dtrain.preflight.interfaces import Interface, describe
from dtrain.util import file_handles
from dtrain.util.format import as_dict, three_digits

Finding = dict[str, str]  # a Check without its node
EFA_FOLDERS = (
    "/opt/amazon/ofi-nccl/lib",
    "/opt/amazon/ofi-nccl/lib64",
    "/opt/aws-ofi-nccl/lib",
    "/usr/lib",
    "/usr/lib64",
)
GIB = 2**30


def finding(name: str, state: str, text: str, fix: str = "", short: str = "") -> Finding:
    return {"name": name, "state": state, "text": text, "fix": fix, "short": short}


def interface(wanted: str | None, found: dict[str, Interface]) -> Finding:
    """Check the profile's interface: present, up, with a link and an address."""
    if wanted is None:
        return finding("interface", "skipped", f"cluster.fabric.interface is null; there is {describe(found)}")
    here, setting = found.get(wanted), f"cluster.fabric.interface={wanted}"
    if here is None:
        ready = [i.name for i in found.values() if i.running and i.addresses and i.name != "lo"]
        fix = f"cluster.fabric.interface={ready[0]}" if ready else "bring a network interface up"
        return finding("interface", "bad", f"{setting}: this node has no such interface; it has {describe(found)}", fix)
    if not here.up:
        problem, fix = "it is switched off", f"ip link set {wanted} up, as root"
    elif not here.running:
        problem, fix = "it has no link", "check the cable, the switch's port, or the virtual machine's network"
    elif not here.addresses:
        problem, fix = "it has no address", f"ip -br addr show {wanted}; is DHCP running?"
    else:
        return finding(
            "interface", "ok", f"{wanted}: {', '.join(here.addresses)}", short=f"{wanted} {here.addresses[0]}"
        )
    return finding("interface", "bad", f"{setting}: {problem}; there is {describe(found)}", fix)


def adapters(
    transport: str | None, hca: str | None, environ: Mapping[str, str], sys_path: Path = Path("/sys")
) -> Finding:
    """Check for InfiniBand adapters with an active port, or EFA devices and the plugin, if the profile needs them."""
    if transport not in ("ib", "efa"):
        return finding("adapters", "skipped", f"cluster.fabric.transport={transport or 'null'} needs none")
    folder = sys_path / "class" / "infiniband"
    try:
        names = sorted(p.name for p in folder.iterdir())
    except OSError:
        names = []
    efa = [name for name in names if _is_efa(folder / name)]
    if transport == "efa":
        return _efa(efa, names, environ)
    others = [name for name in names if name not in efa]
    if efa and not others:
        return finding(
            "adapters",
            "bad",
            f"InfiniBand was requested, but this node has EFA ({', '.join(efa)}): AWS offers no InfiniBand",
            "cluster=aws-efa",
        )
    active = [name for name in others if any(_active(p) for p in (folder / name / "ports").glob("*"))]
    wanted = [word.partition(":")[0] for word in (hca or "").split(",") if word] or active
    missing, idle = [w for w in wanted if w not in others], [w for w in wanted if w in others and w not in active]
    if not wanted or missing or idle:
        problems = [
            f"{', '.join(missing)} not there" if missing else "",
            f"{', '.join(idle)} without an active port" if idle else "",
        ]
        if not others:
            fix = "is the driver loaded (lsmod | grep mlx5_ib)? where there is no InfiniBand: cluster=gcp-ethernet"
            return finding("adapters", "bad", "InfiniBand was requested, but this node shows no adapter", fix)
        there = f"active here: {', '.join(active)}" if active else f"there is {', '.join(others)}, none of them active"
        fix = "ibstat shows the ports; is the subnet manager up?"
        if active:
            fix = f"'cluster.fabric.hca=\"{','.join(active)}\"'"
        text = f"cluster.fabric.hca={hca}: {'; '.join(filter(None, problems)) or 'no adapter'}; {there}"
        return finding("adapters", "bad", text, fix)
    return finding("adapters", "ok", f"active: {', '.join(wanted)}", short=f"{len(wanted)} ib")


def _is_efa(device: Path) -> bool:
    driver = device / "device" / "driver"
    return device.name.startswith(("efa", "rdmap")) or (driver.exists() and driver.resolve().name == "efa")


def _active(port: Path) -> bool:
    try:
        return "ACTIVE" in (port / "state").read_text()
    except OSError:
        return False


def _efa(devices: list[str], names: list[str], environ: Mapping[str, str]) -> Finding:
    if not devices:
        there = f"there is {', '.join(names)}" if names else "there is no RDMA device"
        return finding(
            "adapters", "bad", f"EFA was requested, but this node has no EFA device; {there}",
            "an instance type with EFA, started with EFA network interfaces; else cluster=gcp-ethernet or infiniband",
        )  # fmt: skip
    plugin = find_plugin([*environ.get("LD_LIBRARY_PATH", "").split(":"), *EFA_FOLDERS])
    if plugin is None:
        return finding(
            "adapters", "bad", f"EFA devices {', '.join(devices)}, but no libnccl-net*.so: NCCL would use sockets",
            "install aws-ofi-nccl, and put its lib folder on LD_LIBRARY_PATH in cluster.setup",
        )  # fmt: skip
    try:
        ctypes.CDLL(str(plugin))
    except OSError as error:
        return finding(
            "adapters", "bad", f"the plugin {plugin} cannot be loaded: {error}",
            "put the libraries that it names on LD_LIBRARY_PATH (libfabric: /opt/amazon/efa/lib)",
        )  # fmt: skip
    return finding("adapters", "ok", f"{len(devices)} EFA devices, plugin {plugin}", short=f"{len(devices)} efa")


def find_plugin(folders: Iterable[str]) -> Path | None:
    for folder in filter(None, folders):
        for pattern in ("libnccl-net-ofi.so*", "libnccl-net-aws-ofi.so*", "libnccl-net.so*"):
            for path in sorted(Path(folder).glob(pattern)):
                return path
    return None


def run_folder(run_dir: Path, needed: int | None, why_unknown: str, shared: Path | None) -> list[Finding]:
    """Check from this node: same folder, writable, enough space for the checkpoints."""
    if shared is not None and not shared.is_dir():
        return [
            finding(
                "run folder", "bad", f"{run_dir} does not exist here: every node must see the same folder",
                "run_dir=… on a file system that all nodes share",
            )
        ]  # fmt: skip
    place = next((p for p in (run_dir, *run_dir.parents) if p.is_dir()), Path("/"))
    free = None
    try:
        free = disk_free(place)
        write_something(place)
    except OSError as error:
        fix = "make room there, or run_dir=… on another disk"
        room = "" if free is None else f"; {gigabytes(free)} are free"
        room += f", and the checkpoints need {gigabytes(needed)}" if needed else ""
        return [finding("run folder", "bad", f"{place} cannot be written to: {error.strerror}{room}", fix)]
    found = [finding("run folder", "ok", f"{place} is here and can be written to")]
    if needed is None:
        return [*found, finding("disk", "skipped", why_unknown)]
    if free < needed:
        text = f"{gigabytes(needed)} are needed for the checkpoints, and {gigabytes(free)} are free at {place}"
        fix = "make room, run_dir=… on another disk, or a smaller checkpoint.keep"
        return [*found, finding("disk", "bad", text, fix)]
    return [
        *found,
        finding("disk", "ok", f"{gigabytes(needed)} needed, {gigabytes(free)} free", short=f"{gigabytes(free)} free"),
    ]


def write_something(folder: Path) -> None:
    """Write a file: quotas, read-only mounts and a full disk show only here."""
    path = folder / f".dtrain-write-{os.getpid()}-{os.uname().nodename}"
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
        try:
            left = 65536
            while left:  # near the end of a disk, write() writes less without an error
                left -= os.write(descriptor, bytes(left))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    finally:
        path.unlink(missing_ok=True)


def gigabytes(number: float) -> str:
    return f"{three_digits(number / 1e9)} GB" if number >= 1e8 else f"{three_digits(number / 1e6)} MB"


def disk_free(path: Path) -> int:
    return shutil.disk_usage(path).free


def checkpoint_bytes(config: Mapping[str, Any], run_dir: Path) -> tuple[int | None, str]:
    """Bytes that future checkpoints need at most: 4 per weight and 8 for Adam, times `keep` plus one being written; or
    None, and why it is unknown."""
    if is_script(config):
        return None, "what a program saves is not known"
    model = as_dict(config.get("model"))
    if model.get("_target_") != "dtrain.models.gpt2.GPT2":
        return None, f"the number of parameters of {model.get('_target_')} is known only once it is built"
    layers, dim, length = int(model["num_layers"]), int(model["dim"]), int(model["seq_len"])
    multiple = int(model.get("vocab_multiple") or 1)
    vocabulary = math.ceil(int(model["vocab_size"]) / multiple) * multiple
    weights = (vocabulary + length + 2) * dim + layers * (12 * dim * dim + 13 * dim)
    keep = int(config["checkpoint"]["keep"])
    there = len(list((run_dir / "checkpoints").glob("step-*")))  # of a resumed run
    return weights * 12 * (keep + 1 - min(there, keep)), ""


def shared_memory(least_gib: float, path: Path = Path("/dev/shm")) -> Finding:
    """NCCL and data loaders pass tensors through /dev/shm; a container's default of 64 MiB ends in a bus error."""
    if sys.platform != "linux":
        return finding("shm", "skipped", "only Linux has it")
    try:
        free = disk_free(path) / GIB
    except OSError as error:
        return finding("shm", "bad", f"{path}: {error.strerror}", f"mount a tmpfs at {path}")
    if free < least_gib:
        text = f"{path} has {free:.2f} GiB free, and preflight.min_shm_gib={least_gib:g}"
        return finding(
            "shm", "bad", text, "docker run --shm-size=8g or --ipc=host; on the host: mount -o remount,size=…"
        )
    return finding("shm", "ok", f"{free:.1f} GiB free", short=f"{free:.1f} GiB")


def memlock(transport: str | None, limit: Callable[[int], tuple[int, int]] = resource.getrlimit) -> Finding:
    """RDMA pins memory; with a limit its registration fails late, with an unclear message."""
    if transport not in ("ib", "efa"):
        return finding("memlock", "skipped", "only RDMA needs it")
    soft, _ = limit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY:
        return finding(
            "memlock", "bad", f"ulimit -l is {soft // 1024} KiB, and RDMA needs unlimited",
            "LimitMEMLOCK=infinity for slurmd (systemctl edit slurmd), and PropagateResourceLimitsExcept=MEMLOCK",
        )  # fmt: skip
    return finding("memlock", "ok", "unlimited", short="unlimited")


def host_memory(needed: int | None, total: int, limited: bool) -> Finding:
    """CPU training needs host memory, of which a container or a job may have only a part."""
    whose = "the memory limit of this container or job" if limited else "this node's memory"
    has = f"{total / GIB:.1f} GiB"
    if needed is not None and needed > total:
        text = f"weights, gradients and optimizer state need {needed / GIB:.1f} GiB a node, {whose} is {has}"
        return finding("host memory", "bad", text, "cluster.mem=…, more nodes, strategy=fsdp, or a smaller model")
    return finding("host memory", "ok", f"{whose} is {has}", short=has)


def handles(world_size: int) -> Finding:
    """Check the limit: a rank holds connections to all others."""
    if why := file_handles.problem(world_size):
        fix = file_handles.FIX.format(needed=file_handles.needed(world_size))
        return finding("file handles", "bad", why, fix)
    limit = file_handles.hard_limit()
    has = "unlimited" if limit is None else f"{limit}"
    return finding("file handles", "ok", f"{file_handles.needed(world_size)} needed, {has} allowed", short=has)


def guarded(name: str, function: Callable[[], Finding | list[Finding]]) -> list[Finding]:
    """Turn an exception of a check into a finding: what could not be checked, and why."""
    try:
        found = function()
    except (OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
        return [finding(name, "skipped", f"could not be checked: {type(error).__name__}: {error}")]
    return found if isinstance(found, list) else [found]


def python_version() -> str:
    return ".".join(map(str, sys.version_info[:3]))
