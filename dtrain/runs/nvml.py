"""What NVML reports about the GPUs of a run: load, memory, power, clock, throttling, temperature, errors."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from typing import Any

GIB = 2**30
# Bits of NVML's clock event reasons that mean "slower than it could be". Not here: idle, and clocks that someone set.
THROTTLE = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
MOST_EVENTS = 32  # read after one sample


def visible(uuids: list[str], environ: Mapping[str, str] = os.environ) -> list[int]:
    """Return the indices of the GPUs that the ranks of this node use, given the UUIDs of all GPUs in NVML's order.

    A rank takes the GPU of its local rank, so GPUs beyond the number of local ranks belong to someone else.
    """
    words = environ.get("CUDA_VISIBLE_DEVICES")
    found = list(range(len(uuids)))
    if words is not None:
        named = [w.strip() for w in words.split(",")]
        by_uuid = {w: i for w in named if w.startswith("GPU-") for i, uuid in enumerate(uuids) if uuid.startswith(w)}
        found = [int(w) if w.isdigit() else by_uuid.get(w, -1) for w in named]
    ranks = environ.get("LOCAL_WORLD_SIZE", "")
    return [i for i in found if 0 <= i < len(uuids)][: int(ranks) if ranks.isdigit() else None]


def throttle_reasons(bits: int) -> list[str]:
    return [word for bit, word in THROTTLE.items() if bits & bit]


class Gpus:
    """The GPUs of this node that the run uses. None, if there is no driver or the library is not installed."""

    def __init__(self) -> None:
        self.handles: dict[int, Any] = {}
        self.events: Any = None
        try:
            import pynvml

            self.nvml: Any = pynvml
            pynvml.nvmlInit()
            # a job may list GPUs that it must not use: those have no handle
            handles = [self._try(pynvml.nvmlDeviceGetHandleByIndex, i) for i in range(pynvml.nvmlDeviceGetCount())]
        except Exception:  # the driver's library may be missing, too old or broken in many ways: then no GPU values
            return
        uuids = [str(self._try(pynvml.nvmlDeviceGetUUID, h)) if h is not None else "" for h in handles]
        self.handles = {i: handles[i] for i in visible(uuids) if handles[i] is not None}
        self.events = self._watch_xid()

    def _try(self, function: Any, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except self.nvml.NVMLError:  # not supported by this GPU, not permitted, or the GPU is lost
            return None

    def _watch_xid(self) -> Any:
        """Ask the driver to report errors (XID) of these GPUs; None: it does not."""
        nvml, events = self.nvml, self._try(self.nvml.nvmlEventSetCreate)
        if events is not None:
            for handle in self.handles.values():
                self._try(nvml.nvmlDeviceRegisterEvents, handle, nvml.nvmlEventTypeXidCriticalError, events)
        return events

    def read(self) -> list[dict[str, Any]]:
        """Return one object per GPU; a value that the GPU does not report is left out."""
        xids = self._xids() if self.handles and self.events is not None else []
        found = []
        for index, handle in self.handles.items():
            values = {"index": index, **self._values(handle)}
            if mine := [number for address, number in xids if address == _address(handle)]:
                values["xid"] = mine
            found.append(values)
        return found

    def _values(self, handle: Any) -> dict[str, Any]:
        nvml = self.nvml
        load = self._try(nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = self._try(nvml.nvmlDeviceGetMemoryInfo, handle)
        power = self._try(nvml.nvmlDeviceGetPowerUsage, handle)  # milliwatts
        limit = self._try(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
        reasons = self._reasons(handle)
        values = {
            "utilization_percent": load.gpu if load else None,
            "memory_gib": round(memory.used / GIB, 3) if memory else None,
            "memory_total_gib": round(memory.total / GIB, 3) if memory else None,
            "power_w": None if power is None else round(power / 1000, 1),
            "power_limit_w": None if limit is None else round(limit / 1000, 1),
            "sm_clock_mhz": self._try(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            "temperature_c": self._try(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            "throttle": None if reasons is None else throttle_reasons(reasons),
            "ecc_errors": self._try(
                nvml.nvmlDeviceGetTotalEccErrors,
                handle,
                nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                nvml.NVML_VOLATILE_ECC,  # since the driver was loaded
            ),
        }
        return {name: value for name, value in values.items() if value is not None}

    def _reasons(self, handle: Any) -> int | None:
        """The second name is of drivers and libraries before CUDA 12.2."""
        for name in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
            if hasattr(self.nvml, name) and (bits := self._try(getattr(self.nvml, name), handle)) is not None:
                return int(bits)
        return None

    def _xids(self) -> list[tuple[int | None, int]]:
        """(address of the GPU's handle, XID) of each error since the last call."""
        found = []
        for _ in range(MOST_EVENTS):
            event = self._try(self.nvml.nvmlEventSetWait, self.events, 1)  # milliseconds; it raises when none is left
            if event is None:
                break
            found.append((_address(event.device), int(event.eventData)))
        return found


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value
