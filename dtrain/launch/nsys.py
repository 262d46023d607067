"""nsys=true: Nsight Systems around what starts the ranks, or around each rank."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dtrain.config import bad, gpus_per_node


def check(config: Mapping[str, Any]) -> None:
    """On the machine that starts the ranks: is it there? What a container has is not seen from outside."""
    contained = config["cluster"].get("container_image")
    if config.get("nsys") and not contained and shutil.which("nsys") is None:
        fix = "install Nsight Systems, or `module load` it; without it: profile=torch"
        raise bad("nsys", "true", "there is no nsys on PATH", fix)


def prepare(config: Mapping[str, Any], run_dir: Path) -> None:
    """Before the ranks are started: is it there, also for a point of a sweep? It makes no folder itself."""
    check(config)
    if config.get("nsys"):
        (run_dir / "profiles").mkdir(exist_ok=True)


def around(config: Mapping[str, Any], run_dir: Path, name: str, command: list[str]) -> list[str]:
    """The command with nsys before it; its report is RUN/profiles/NAME.nsys-rep. Without nsys=true: as it was.

    With GPUs only the steps of conf/profile are recorded, which the ranks mark (dtrain.profile.record.Nsys): a report
    of a whole run would be as large as its checkpoints. The ranks decide when they end, and nsys ends after them.
    """
    if not config.get("nsys"):
        return command
    steps = ["--capture-range=cudaProfilerApi", "--capture-range-end=stop"] if gpus_per_node(config["cluster"]) else []
    return [
        "nsys", "profile", f"--output={run_dir / 'profiles' / name}", "--force-overwrite=true",
        "--trace=cuda,nvtx,osrt,cublas,cudnn", "--sample=none", "--cpuctxsw=none", *steps,
        "--kill=none", "--wait=primary", *command,
    ]  # fmt: skip
