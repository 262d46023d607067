"""What a launch remembers: the code, the versions, the machine and the variables. Never fails, takes milliseconds."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dtrain.config import hardware
from dtrain.config.build import TRUST
from dtrain.config.redaction import HIDDEN, NAME, hide
from dtrain.launch.git_state import git_state, save_diff
from dtrain.runs.environment import recorded
from dtrain.runs.protocol import SCRIPT_TYPED

PACKAGES = (
    "dtrain", "torch", "numpy", "triton", "torchvision", "nvidia-nccl-cu13", "nvidia-nccl-cu12", "deepspeed",
    "fairscale", "flash-attn", "transformers", "tokenizers", "datasets", "accelerate", "peft", "timm", "lightning",
    "safetensors", "hydra-core", "omegaconf",
)  # fmt: skip
PREFIXES = (
    "NCCL_", "CUDA_", "NVIDIA_TF32", "CUBLAS", "OMP_", "MKL_", "KMP_", "TORCH", "PYTORCH_", "TRITON_", "GLOO_", "UCX_",
    "FI_", "DTRAIN_",
)  # fmt: skip
VARIABLES = (
    "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHASHSEED",
    "CONDA_DEFAULT_ENV", "VIRTUAL_ENV", "HF_HUB_OFFLINE",
)  # fmt: skip
OWN = (TRUST, SCRIPT_TYPED)  # set by the launcher for its ranks
MOST_VARIABLES = 100
LONGEST = 500  # characters of a value
DRIVER_VERSION = Path("/proc/driver/nvidia/version")


def environment(run_dir: Path, launches: list[Any]) -> dict[str, Any]:
    """Return {"environment": …} for the next launch of a run, and write its diff; {} if nothing changed since."""
    earlier = recorded(launches)
    code, diff = git_state()
    code |= save_diff(run_dir, diff, len(launches), earlier.get("code") or {})
    found = {
        "code": code,
        "python": platform.python_version(),
        "versions": versions(sys.path),
        "machine": machine(),
        "variables": variables(os.environ),
    }
    return {} if found == earlier else {"environment": found}


def versions(folders: Iterable[str]) -> dict[str, str]:
    """Name → version of the packages that matter and are installed.

    Read from the names of the dist-info folders: importlib.metadata parses the metadata, and its import alone takes
    longer than all of this.
    """
    wanted = {name.replace("-", "_"): name for name in PACKAGES}
    found: dict[str, str] = {}
    for folder in folders:
        try:
            names = os.listdir(folder or ".")
        except OSError:  # a zip file, or not there
            continue
        for name in names:
            if name.endswith(".dist-info"):
                package, _, version = name.removesuffix(".dist-info").partition("-")
                if (known := wanted.get(package.lower().replace(".", "_"))) and version:
                    found.setdefault(known, version[:LONGEST])  # Python imports from the first folder that has it
    return {name: found[name] for name in PACKAGES if name in found}


def machine() -> dict[str, Any]:
    """CPU, cores, memory and GPUs of the machine that launches, from files of the kernel and the driver."""
    found: dict[str, Any] = {"cpu": cpu_model(hardware.CPU_INFO), "cores": os.cpu_count()}
    if hasattr(os, "sched_getaffinity"):
        found["usable_cores"] = len(os.sched_getaffinity(0))
    found["memory_gib"] = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    if num_gpus := hardware.count_gpus():
        found |= {"num_gpus": num_gpus, "gpu": hardware.driver_name(hardware.DRIVER), "driver": driver(DRIVER_VERSION)}
    return found


def cpu_model(path: Path) -> str:
    """The CPU's name as Linux gives it for the first core, else the architecture."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            first = file.read(4096)  # the kernel writes the file while it is read: hundreds of cores take long
    except OSError:
        first = ""
    named = re.search(r"^model name\s*:\s*(.+?)\s*$", first, re.MULTILINE)
    return named[1] if named else platform.machine()


def driver(path: Path) -> str | None:
    try:
        named = re.search(r"\b(\d{3}\.\d+(\.\d+)?)\b", path.read_text(encoding="utf-8", errors="replace"))
    except OSError:  # a container may hide it
        return None
    return named[1] if named else None


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that change how a run computes, without secrets."""
    names = sorted(name for name in environ if name.startswith(PREFIXES) or name in VARIABLES)
    kept = [name for name in names if name not in OWN][:MOST_VARIABLES]
    return {name: HIDDEN if NAME.search(name) and environ[name] else hide(environ[name])[:LONGEST] for name in kept}
