"""A file system that takes nothing more is named with its path and what it ran out of: bytes, inodes, shared memory."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtrain.config.hydra_errors import explain
from dtrain.runs.folder import write_json
from dtrain.util import disk_space
from tests.launch.test_local import launch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB and 16 inodes; the first is its own folder."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=16", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"mount: {error}")
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def use_up_inodes(folder: Path) -> None:
    with pytest.raises(OSError):
        for i in range(100):
            (folder / f"file-{i}").touch()


def test_inodes_are_told_from_bytes(small: Path) -> None:
    assert disk_space.shortage(small) == ""
    (small / "large").write_bytes(bytes(900 * 1024))
    assert "is full: 500,000 bytes needed" in disk_space.shortage(small, 500_000)
    with pytest.raises(OSError, match=r"is full: .* bytes needed, .* free.*Fix: make room") as bytes_used:
        write_json(small / "summary.json", {"text": "x" * 500_000})
    assert bytes_used.value.errno == errno.ENOSPC and str(small) in str(bytes_used.value)
    (small / ".summary.json.tmp").unlink()
    use_up_inodes(small)
    with pytest.raises(OSError, match=r"no inodes are left on .*all 16 are in use, though .* bytes are free") as inodes:
        write_json(small / "failure.json", {})
    assert str(small) in str(inodes.value) and "df -i" in str(inodes.value)
    with pytest.raises(OSError) as plain:
        (small / "log").touch()
    assert f"{small}/log" in explain(plain.value) and "no inodes" in explain(plain.value)
    assert "\n  fix: remove files" in explain(plain.value)
    reset = ConnectionResetError(errno.ECONNRESET, "reset")
    assert disk_space.describe(reset, small) is reset


FILL = """
from dtrain.models.gpt2 import GPT2

class Filling(GPT2):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        import os
        if "RANK" in os.environ:
            try:
                for i in range(1000):
                    open(f"small/file-{i}", "w").close()
            except OSError:
                pass
"""


def test_a_run_without_inodes_says_so_on_the_screen(small: Path) -> None:
    subprocess.run(["mount", "-o", "remount,nr_inodes=60", str(small)], check=True)
    folder = small.parent
    (folder / "mine.py").write_text(FILL)
    words = ["cluster.processes=1", "model._target_=mine.Filling", "trust=[mine]", "run_dir=small/run"]
    process = launch(folder, *words, env={"PYTHONPATH": f"{folder}:{ROOT}"})
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 3, output
    assert "no inodes are left" in output and str(small) in output and "df -i" in output, output


# A batch of 8 MiB from a loader's process, where /dev/shm has 4: what the rank reports of it.
LOADER = """
import json
from pathlib import Path
import torch
from dtrain.util import disk_space
from dtrain.data.loader import Loader

class Large:
    def __len__(self): return 4
    def batch(self, indices): return torch.ones(1, 2**21), torch.ones(1)

if __name__ == "__main__":
    try:
        Loader(Large(), 1, seed=0, workers=1).batch(0)
        said = "nothing"
    except Exception as error:
        said = disk_space.explain(error, Path("."))
    print(json.dumps(said), flush=True)
    import os
    os._exit(0)
"""


def test_a_loader_without_shared_memory_names_it(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(LOADER)
    inside = f"mount -t tmpfs -o size=4m tmpfs /dev/shm || exit 77; exec {sys.executable} {tmp_path}/mine.py"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(["unshare", "-m", "sh", "-c", inside], env=env, capture_output=True, text=True, timeout=120)
    if result.returncode in (1, 77) and not result.stdout:
        pytest.skip(f"no mount namespace here: {result.stderr.strip()[-200:]}")
    said = json.loads(result.stdout)
    assert "/dev/shm" in said and "4.0 MiB in all" in said and "--shm-size" in said, (said, result.stderr)


def test_what_a_rank_killed_by_a_bus_error_hints_at(tmp_path: Path) -> None:
    from dtrain.launch.failures import first_failure

    (tmp_path / "logs").mkdir()
    found = first_failure(tmp_path, [(1, "SIGBUS")])
    assert found and "killed by SIGBUS" in found["message"] and "/dev/shm" in found["message"]
    triton = RuntimeError("out of resource: shared memory, Required: 147456, Hardware limit: 101376. Reducing block")
    assert disk_space.explain(triton, tmp_path) == str(triton)


def test_the_note_of_a_rank_names_what_ran_out(tmp_path: Path) -> None:
    from dtrain.train.process import report_failure

    (tmp_path / "logs").mkdir()
    report_failure(tmp_path, 0, RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error. "), 3)
    message = json.loads((tmp_path / "logs" / "failure-0.json").read_text())["message"]
    assert message.startswith("DataLoader worker") and "/dev/shm" in message and "--shm-size" in message, message
