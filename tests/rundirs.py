"""Run folders made by hand, and consoles to print them on."""

from __future__ import annotations

import io
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dtrain.records import all_runs, load

HERE = socket.gethostname()


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
