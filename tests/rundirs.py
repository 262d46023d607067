"""Run folders made by hand, and consoles to print them on."""

from __future__ import annotations

import io
import json
import socket
import subprocess
import sys
import time as clock
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dtrain.runs import slurm_queue
from dtrain.runs.record import all_runs, load

HERE = socket.gethostname()
LOCAL = {"_target_": "dtrain.launch.local.Local", "max_restarts": 0}
SLURM = {"_target_": "dtrain.launch.slurm.Slurm", "nodes": 2, "processes": 2}
Fakes = Callable[..., Path]


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def make(path: str, *, time: str | None = None, config: str | None = None, launch: Any = None, **summary: Any) -> Path:
    """A run folder below the current folder."""
    run_dir = Path(path).absolute()
    run_dir.mkdir(parents=True)
    record = {"overrides": [], "launches": [{"time": time}] if time else [], **(launch or {})}
    (run_dir / "launch.json").write_text(json.dumps(record))
    if summary:
        (run_dir / "summary.json").write_text(json.dumps(summary))
    if config is not None:
        (run_dir / "config.yaml").write_text(config)
    return run_dir


def list_runs(*roots: str | Path) -> list[dict[str, Any]]:
    return [record.row() for record in load(all_runs(roots or ("outputs", "multirun")))[0]]


def plain() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=40)


def terminal(width: int) -> Console:
    return Console(
        file=io.StringIO(),
        force_terminal=True,
        width=width,
        color_system=None,
        legacy_windows=False,
        _environ={"TERM": "xterm"},
    )


def lines(c: Console) -> list[str]:
    assert isinstance(c.file, io.StringIO)
    return c.file.getvalue().splitlines()


@pytest.fixture
def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    return process.pid


def sweep(*losses: tuple[Any, Any]) -> list[Path]:
    return [
        make(
            f"multirun/d/t/{i}-optim.lr={i}",
            launch={"overrides": ["model=gpt2", f"optim.lr={i}"]},
            status="done",
            train_loss=train,
            val_loss=val,
            wall_s=5.0,
        )
        for i, (train, val) in enumerate(losses)
    ]


# ---------------------------------------------------------------- SLURM


@pytest.fixture(autouse=True)
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    """SLURM's commands are shell scripts that a test writes; each call is noted. Without any, there is no SLURM."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(slurm_queue, "_silent", set())

    def write(**scripts: str) -> Path:
        for name, script in scripts.items():
            (folder / name).write_text(
                f'#!/bin/sh\nPATH=/bin:/usr/bin\necho "{name} $*" >> {tmp_path}/calls\n{script}\n'
            )
            (folder / name).chmod(0o755)
        return tmp_path / "calls"

    return write


def job(job_id: str, **more: Any) -> dict[str, Any]:
    return {"command": "dtrain launch cluster=slurm", "launches": [{"cluster": SLURM, "job_id": job_id, **more}]}


def note(run_dir: Path, **lines: float) -> None:
    """attempts.jsonl: note(run, start=step, end=step)."""
    with open(run_dir / "attempts.jsonl", "a") as file:
        for event, step in lines.items():
            more = (
                {"job_id": "7", "restart": 0, "nodes": ["node1", "node2"]} if event == "start" else {"why": "preempted"}
            )
            file.write(json.dumps({"event": event, "time": clock.time(), "step": step, "code": 75, **more}) + "\n")


def row(job_id: str, state: str, reason: str = "None", nodes: str = "") -> str:
    return f"echo '{job_id}|{state}|{nodes}|1:02|1-00:00:00|2030-01-02T03:04:05|N/A|{reason}'"
