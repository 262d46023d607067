"""Memory limits of containers and jobs: trees of both versions of cgroups, made by hand, and a real one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dtrain.preflight import node_checks
from dtrain.util import host_memory
from dtrain.util.host_memory import free_bytes, limit_bytes, total_bytes

MIB, GIB = 2**20, 2**30
NONE_V1 = 0x7FFFFFFFFFFFF000  # what the kernel says where there is no limit
V1 = "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
V1 += "35 31 0:32 {inside} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
V2 = "31 23 0:28 {inside} /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "physical_bytes", lambda: 64 * GIB)
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)


def host(root: Path, version: int, path: str, limits: dict[str, str], inside: str = "/") -> Path:
    """A host whose process lies in the group `path`. limits: of groups by their folder below the mount."""
    proc = root / "proc" / "self"
    proc.mkdir(parents=True)
    (root / "proc" / "meminfo").write_text(f"MemTotal: {64 * MIB} kB\nMemAvailable:  {50 * MIB} kB\n")
    (proc / "mountinfo").write_text((V1 if version == 1 else V2).format(inside=inside))
    (proc / "cgroup").write_text(f"5:cpu:/elsewhere\n4:memory:{path}\n0::/\n" if version == 1 else f"0::{path}\n")
    top = root / "sys/fs/cgroup" / ("memory" if version == 1 else "")
    limit_file, used_file, (inactive, active) = host_memory.FILES[version]
    for name, limit in limits.items():
        folder = top / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / limit_file).write_text(f"{limit}\n")
        (folder / used_file).write_text(f"{3 * GIB}\n")
        (folder / "memory.stat").write_text(f"cache {9 * GIB}\nfile {9 * GIB}\n{inactive} {GIB}\n{active} {GIB}\n")
        (folder / "memory.high").write_text("1\n")
    return root


@pytest.mark.parametrize("version", [1, 2])
def test_the_least_limit_of_a_group_and_those_above_it_counts(version: int, tmp_path: Path) -> None:
    none = "max" if version == 2 else f"{NONE_V1}"
    for case, (own, above, expected) in enumerate(
        [(8, 16, 8), (16, 8, 8), (None, 8, 8), (8, None, 8), (None, None, None), (100, 200, None)]
    ):
        limits = {name: none if g is None else f"{g * GIB}" for name, g in (("job/step", own), ("job", above))}
        root = host(tmp_path / f"{case}", version, "/job/step", limits)
        assert limit_bytes(root) == (expected and expected * GIB), (own, above)
        assert total_bytes(root) == (expected or 64) * GIB
        # 3 GiB are used, 2 of them page cache, which the kernel gives back when somebody needs the memory
        assert free_bytes(root) == (expected - 1 if expected else 50) * GIB


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_sees_its_own_group_as_the_root(version: int, tmp_path: Path) -> None:
    # docker without a namespace of cgroups: the host's path, and its own group mounted
    limits = {"": f"{8 * GIB}"}
    assert limit_bytes(host(tmp_path / "a", version, "/docker/f00", limits, inside="/docker/f00")) == 8 * GIB
    assert limit_bytes(host(tmp_path / "b", version, "/", limits)) == 8 * GIB  # with one
    assert limit_bytes(host(tmp_path / "c", version, "/../other", limits)) == 8 * GIB  # moved out of it


def test_no_cgroups_no_limit(tmp_path: Path) -> None:
    assert total_bytes(tmp_path) == 64 * GIB and free_bytes(tmp_path) is None


@pytest.mark.parametrize(
    ("variables", "mib"),
    [
        ({"SLURM_MEM_PER_NODE": "4096"}, 4096),
        ({"SLURM_MEM_PER_CPU": "512", "SLURM_CPUS_ON_NODE": "4"}, 2048),
        ({"SLURM_MEM_PER_NODE": "0"}, None),  # all of it
        ({}, None),
    ],
)
def test_what_a_slurm_job_asked_for_counts(variables: dict[str, str], mib: int | None, tmp_path: Path) -> None:
    expected = None if mib is None else mib * MIB
    assert limit_bytes(tmp_path, {"SLURM_JOB_ID": "7", **variables}) == expected
    assert limit_bytes(tmp_path, variables) is None, "outside of a job they say nothing"


def test_preflight_holds_the_states_against_the_limit() -> None:
    assert node_checks.host_memory(None, 8 * GIB, True)["state"] == "ok"
    assert node_checks.host_memory(7 * GIB, 8 * GIB, True)["state"] == "ok"
    found = node_checks.host_memory(9 * GIB, 8 * GIB, True)
    assert (
        found["state"] == "bad"
        and "need 9.0 GiB a node, the memory limit of this container or job is 8.0 GiB" in (found["text"])
    )


def test_a_real_group_of_this_kernel(tmp_path: Path) -> None:
    """What a launch says inside it: half a GiB is too little for a model of 1.5 billion parameters."""
    own = next(iter(host_memory.folders(Path("/"))), None)
    if own is None:
        pytest.skip("no cgroups here")
    version, above = own
    group = above / f"dtrain-test-{os.getpid()}"
    limit, _, _ = host_memory.FILES[version]
    program = (
        f"from pathlib import Path; Path({str(group / 'cgroup.procs')!r}).write_text('0')\n"
        "from dtrain.util import host_memory; print(host_memory.total_bytes(), host_memory.free_bytes(), flush=True)\n"
        "from dtrain.cli import main; import sys; sys.exit(main(sys.argv[1:]))"
    )
    try:
        group.mkdir()
        try:
            (group / limit).write_text(f"{512 * MIB}")
        except OSError:
            group.rmdir()
            raise
    except OSError as error:
        pytest.skip(f"no group can be made here, or none with a limit of memory: {error}")
    try:
        words = ["launch", "model=gpt2-1.5b", "data=synthetic", "cluster.processes=1", f"run_dir={tmp_path}/run"]
        environ = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, env=environ)
    finally:
        group.rmdir()
    total, free = map(int, done.stdout.split()[:2])
    assert total == 512 * MIB and 0 < free < 512 * MIB
    assert done.returncode == 2 and "the memory limit of this container or job is 0.50 GiB" in done.stderr, done.stderr
