"""Which GPUs belong to a run, and what NVML says about them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dtrain.runs.nvml import THROTTLE, Gpus, throttle_reasons, visible
from tests.world import ROOT

UUIDS = [f"GPU-{i}{i}{i}{i}-0000" for i in range(4)]


@pytest.mark.parametrize(
    ("words", "ranks", "expected"),
    [
        (None, None, [0, 1, 2, 3]),
        (None, "2", [0, 1]),
        ("2,3", None, [2, 3]),
        ("3, 1", "1", [3]),
        ("GPU-2222,GPU-0000-0000", None, [2, 0]),
        ("GPU-9999,1", None, [1]),
        ("7,0", None, [0]),
        ("MIG-1", None, []),
        ("", None, []),
        ("-1", "2", []),
    ],
)
def test_only_the_gpus_of_the_run(words: str | None, ranks: str | None, expected: list[int]) -> None:
    given = {"CUDA_VISIBLE_DEVICES": words, "LOCAL_WORLD_SIZE": ranks}
    assert visible(UUIDS, {name: value for name, value in given.items() if value is not None}) == expected


def test_the_words_stand_for_the_library_s_bits() -> None:
    nvml = pytest.importorskip("pynvml")
    names = {
        "power cap": "SwPowerCap",
        "hardware slowdown": "HwSlowdown",
        "sync boost": "SyncBoost",
        "thermal slowdown": "SwThermalSlowdown",
        "hardware thermal slowdown": "HwThermalSlowdown",
        "power brake": "HwPowerBrakeSlowdown",
    }
    assert {word: getattr(nvml, f"nvmlClocksEventReason{name}") for word, name in names.items()} == {
        word: bit for bit, word in THROTTLE.items()
    }
    harmless = nvml.nvmlClocksEventReasonGpuIdle | nvml.nvmlClocksEventReasonApplicationsClocksSetting
    assert throttle_reasons(harmless) == []
    assert throttle_reasons(harmless | 0x44) == ["power cap", "hardware thermal slowdown"]


def test_no_driver_means_no_gpus() -> None:
    if any(name.startswith("nvidia") for name in os.listdir("/dev")):
        pytest.skip("there is a driver here")
    assert Gpus().read() == []


@pytest.mark.gpu
def test_a_gpu_at_work() -> None:
    """In another process, like the sampler: the values are those of the device, not of this process."""
    import torch

    program = """
import json
from dtrain.runs.nvml import Gpus
gpus = Gpus()
print(json.dumps([gpus.read(), gpus.events is not None]))
"""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(300):  # a second and more on an H200, queued; the process below reads meanwhile
        b = a @ a
    ran = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT), "LOCAL_WORLD_SIZE": "1"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    for _ in range(3000):
        b = a @ a
    (gpu,), listens = json.loads(ran.stdout)
    here = Gpus()
    (busy, *_) = here.read()
    torch.cuda.synchronize()
    del b
    assert listens  # the driver takes requests for XID events
    for read in (gpu, busy):
        assert read["index"] == 0 or "CUDA_VISIBLE_DEVICES" in os.environ
        assert read["memory_gib"] >= 0.125  # the matrix alone
        assert read["memory_gib"] <= read["memory_total_gib"]
        assert read["memory_total_gib"] == pytest.approx(
            torch.cuda.get_device_properties(0).total_memory / 2**30, rel=0.05
        )
        assert 0 < read["power_w"] < 1.5 * read["power_limit_w"]
        assert 0 < read["sm_clock_mhz"] < 5000 and 0 < read["temperature_c"] < 120
        assert set(read["throttle"]) <= set(THROTTLE.values())
        assert "xid" not in read
    assert 0 <= busy["utilization_percent"] <= 100


# NVML as a driver from before CUDA 12.2 would answer: GPU 1 is not ours, GPU 2 has fallen off the bus (XID 79)
DRIVER = r"""
#include <stdint.h>
enum { OK = 0, NO_PERMISSION = 4, TIMEOUT = 10, LOST = 15 };
static int gpus[3], events, waits;
static int of(void *gpu) { return gpu == &gpus[0] ? OK : LOST; }
int nvmlInitWithFlags(unsigned f) { return OK; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 3; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **gpu) { *gpu = &gpus[i]; return i == 1 ? NO_PERMISSION : OK; }
int nvmlDeviceGetUUID(void *gpu, char *text, unsigned n) { text[0] = 'G'; text[1] = 0; return of(gpu); }
int nvmlDeviceGetUtilizationRates(void *gpu, unsigned *u) { u[0] = 97; u[1] = 12; return of(gpu); }
int nvmlDeviceGetMemoryInfo(void *gpu, uint64_t *m)
{ m[0] = 80ull << 30; m[1] = 60ull << 30; m[2] = 20ull << 30; return of(gpu); }
int nvmlDeviceGetPowerUsage(void *gpu, unsigned *mw) { *mw = 699400; return of(gpu); }
int nvmlDeviceGetEnforcedPowerLimit(void *gpu, unsigned *mw) { *mw = 700000; return of(gpu); }
int nvmlDeviceGetClockInfo(void *gpu, unsigned kind, unsigned *mhz) { *mhz = kind == 1 ? 1755 : 0; return of(gpu); }
int nvmlDeviceGetTemperature(void *gpu, unsigned kind, unsigned *c) { *c = kind == 0 ? 66 : 0; return of(gpu); }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *gpu, uint64_t *bits) { *bits = 0x45; return of(gpu); }
int nvmlDeviceGetTotalEccErrors(void *gpu, unsigned kind, unsigned counter, uint64_t *n)
{ *n = kind == 1 && counter == 0 ? 2 : 9; return of(gpu); }
int nvmlEventSetCreate(void **set) { *set = &events; return OK; }
int nvmlDeviceRegisterEvents(void *gpu, uint64_t kinds, void *set)
{ return kinds == 8 && set == &events ? of(gpu) : NO_PERMISSION; }
struct event { void *gpu; uint64_t kind, data; unsigned a, b; };
int nvmlEventSetWait_v2(void *set, struct event *event, unsigned ms)
{ event->gpu = &gpus[2]; event->kind = 8; event->data = 79; return waits++ ? TIMEOUT : OK; }
"""


def test_a_driver_that_answers_as_documented(tmp_path: Path) -> None:
    """The real library against a driver made of C: what a machine without GPUs can test of it."""
    pytest.importorskip("pynvml")
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("no C compiler here")
    (tmp_path / "driver.c").write_text(DRIVER)
    library = tmp_path / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, tmp_path / "driver.c"], check=True)
    program = "import json; from dtrain.runs.nvml import Gpus; g = Gpus(); print(json.dumps([g.read(), g.read()]))"
    env = {k: v for k, v in os.environ.items() if k not in ("CUDA_VISIBLE_DEVICES", "LOCAL_WORLD_SIZE")}
    ran = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, env=env | {"PYTHONPATH": str(ROOT), "LD_LIBRARY_PATH": str(tmp_path)},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    healthy = {
        "index": 0, "utilization_percent": 97, "memory_gib": 20.0, "memory_total_gib": 80.0, "power_w": 699.4,
        "power_limit_w": 700.0, "sm_clock_mhz": 1755, "temperature_c": 66,
        "throttle": ["power cap", "hardware thermal slowdown"], "ecc_errors": 2,
    }  # fmt: skip
    assert json.loads(ran.stdout) == [[healthy, {"index": 2, "xid": [79]}], [healthy, {"index": 2}]]
