"""Consoles that remember what was printed, and the files of a run that is watched."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

from rich.console import Console

RUNNING = {
    "status": "running",
    "model": "gpt2-tiny",
    "parameters": 124_439_808,
    "strategy": "fsdp",
    "precision": "bf16",
    "mesh": {"pp": 2, "dp": 2, "tp": 1},
    "world_size": 4,
    "device": "NVIDIA H200",
    "global_batch_size": 32,
    "micro_batch_size": 4,
    "accumulation": 4,
    "tokens_per_step": 32768,
    "total_steps": 1000,
    "start_step": 0,
}


def plain(width: int = 80) -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=width)


def terminal(width: int = 120) -> Console:
    return Console(
        file=io.StringIO(),
        force_terminal=True,
        width=width,
        color_system="truecolor",
        legacy_windows=False,
        _environ={"TERM": "xterm-256color"},
    )


def text(c: Console) -> str:
    assert isinstance(c.file, io.StringIO)
    return c.file.getvalue()


def lines(c: Console) -> list[str]:
    return text(c).splitlines()


def screen(c: Console) -> str:
    """What is left on a terminal: a small emulation of the moves that rich's live display makes."""
    rows, row = [""], 0
    for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text(c)):
        if token == "\n":
            row += 1
            rows += [""] * (row + 1 - len(rows))
        elif token == "\x1b[2K":
            rows[row] = ""
        elif re.fullmatch(r"\x1b\[\d*A", token):
            row -= int(token[2:-1] or 1)
        elif token != "\r" and not token.startswith("\x1b"):
            rows[row] += token
    return "\n".join(rows)


def metric(step: int, **values: Any) -> str:
    row = {
        "step": step,
        "loss": 5 - step / 1000,
        "lr": 3e-4,
        "grad_norm": 1.0,
        "tokens": step * 32768,
        "tokens_per_s": 81234.5,
        "step_s": 0.5,
        "data_s": 0.0,
        "mfu": 0.4123,
        "mem_gib": 12.345,
    }
    return json.dumps({**row, **values}) + "\n"


def write(run_dir: Path, name: str, value: dict[str, Any]) -> None:
    (run_dir / name).write_text(json.dumps(value))


def append(run_dir: Path, *rows: str) -> None:
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.writelines(rows)
