"""nsys=true: run Nsight Systems around the launcher of the ranks, or around each rank."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dtrain.config.hardware import gpus_per_node
from dtrain.errors import bad


def check(config: Mapping[str, Any]) -> None:
    """Check that nsys exists on the machine that starts the ranks; a container's content is not visible here."""
    contained = config["cluster"].get("container_image")
    if config.get("nsys") and not contained and shutil.which("nsys") is None:
        fix = "install Nsight Systems, or `module load` it; without it: profile=torch"
        raise bad("nsys", "true", "there is no nsys on PATH", fix)


def prepare(config: Mapping[str, Any], run_dir: Path) -> None:
    """Check for nsys before the ranks start, also for a point of a sweep; create its output folder."""
    check(config)
    if config.get("nsys"):
        (run_dir / "profiles").mkdir(exist_ok=True)


def around(config: Mapping[str, Any], run_dir: Path, name: str, command: list[str]) -> list[str]:
    """Prefix the command with nsys; the report is RUN/profiles/NAME.nsys-rep. Without nsys=true, return it unchanged.

    With GPUs, nsys records only the steps of conf/profile, which the ranks mark (dtrain.profile.record.Nsys): a report
    of a whole run would be as large as its checkpoints. The ranks end by themselves, and nsys exits after them.
    """
    if not config.get("nsys"):
        return command
    steps = ["--capture-range=cudaProfilerApi", "--capture-range-end=stop"] if gpus_per_node(config["cluster"]) else []
    return [
        "nsys", "profile", f"--output={run_dir / 'profiles' / name}", "--force-overwrite=true",
        "--trace=cuda,nvtx,osrt,cublas,cudnn", "--sample=none", "--cpuctxsw=none", *steps,
        "--kill=none", "--wait=primary", *command,
    ]  # fmt: skip
