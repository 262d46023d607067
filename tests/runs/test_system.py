"""System metrics: what a line holds, that the sampler ends with its parent, and that its file stays small."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dtrain.runs import system
from dtrain.runs.metrics import rows, system_files
from tests.patience import until
from tests.world import ROOT

needs_psutil = pytest.mark.skipif(not system.is_installed(), reason=f"no psutil here: {system.INSTALL}")
PARENT = """
import sys, time
from pathlib import Path
from dtrain.runs import system
system.begin(Path(sys.argv[1]))
time.sleep(600)
"""


@needs_psutil
def test_a_line_has_the_node_s_values(tmp_path: Path) -> None:
    sampler = system.Sampler(tmp_path)
    began = time.monotonic()
    while time.monotonic() - began < 0.2:
        pass  # one CPU is busy
    line = sampler.read()
    assert abs(line["time"] - time.time()) < 5
    assert 0 < line["cpu_percent"] <= 100
    assert 0 < line["memory_gib"] < line["memory_total_gib"]
    assert line["disk_free_gib"] == pytest.approx(
        os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize / 2**30, 0.05
    )
    assert line["net_in_mib_s"] >= 0 and line["net_out_mib_s"] >= 0
    assert json.loads(json.dumps(line)) == line


def begin(run_dir: Path, every: float) -> subprocess.Popen[bytes]:
    """A process that starts the sampler as a rank does."""
    (run_dir / "logs").mkdir()
    launches = [{"cluster": {"system_metrics_every": every}}]
    (run_dir / "launch.json").write_text(json.dumps({"launches": launches}))
    env = os.environ | {"PYTHONPATH": str(ROOT), "SLURMD_NODENAME": "node-7"}
    return subprocess.Popen([sys.executable, "-c", PARENT, str(run_dir)], env=env)


def sampler_of(run_dir: Path) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
        except OSError:
            continue
        if b"dtrain.runs.system" in command and str(run_dir).encode() in command:
            found.append(int(entry.name))
    return found


@needs_psutil
def test_the_sampler_survives_signals_to_the_ranks_and_ends_with_its_parent(tmp_path: Path) -> None:
    parent = begin(tmp_path, 0.1)
    try:
        path = tmp_path / "logs" / "system-node-7.jsonl"
        until(lambda: len(rows(path)) >= 2, "two lines")
        assert list(system_files(tmp_path)) == ["node-7"]
        (process,) = sampler_of(tmp_path)
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGURG):
            os.kill(process, number)
        before = len(rows(path))
        until(lambda: len(rows(path)) > before + 1, "lines after the signals")
    finally:
        parent.kill()
        parent.wait()
    until(lambda: not sampler_of(tmp_path), "the sampler's end")


@pytest.mark.parametrize("every", [0, None, "often", -1, float("nan")])
def test_it_is_off(every: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a sampler was started"))
    (tmp_path / "launch.json").write_text(json.dumps({"launches": [{"cluster": {"system_metrics_every": every}}]}))
    system.begin(tmp_path)


def test_a_month_stays_small(tmp_path: Path) -> None:
    """Old lines get farther apart, at equal distances; the last hour keeps all of its lines."""
    every, most, days = 60, 400, 10
    file = system.SystemFile(tmp_path / "system-a.jsonl", most)
    num = days * 86400 // every
    largest = 0
    for i in range(num):
        file.append({"time": i * every})
        largest = max(largest, file.num_lines)
    times = [row["time"] for row in rows(file.path)]
    assert largest <= most + 1 and len(times) == file.num_lines <= most
    assert times == sorted(set(times)) and times[-1] == (num - 1) * every
    assert times[0] == 0  # the beginning is still there
    assert times[-60:] == [(num - 60 + i) * every for i in range(60)]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert max(gaps) <= 4 * days * 86400 / (most / 2)
    assert len(times) > most / 4


def test_a_damaged_file_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "system-a.jsonl"
    path.write_bytes(b'{"time": 1}\n\xff\xfe\n[]\n{"time": "x"}\n{"time": 2}\n{"ti')
    file = system.SystemFile(path, 4)
    for i in range(3, 9):
        file.append({"time": i})
    times = [row["time"] for row in rows(path)]
    assert times[-1] == 8 and len(times) <= 5
