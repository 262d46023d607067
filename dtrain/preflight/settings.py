"""The preflight settings that its checks read; Preflight (run.py) has them."""

from __future__ import annotations

from typing import Protocol


class Settings(Protocol):
    timeout_s: float
    measure_s: float
    min_shm_gib: float
    max_skew_s: float
    tolerance: float
    outlier: float
    sizes_mib: list[int]
