"""The hardware files: complete, consistent, and found for the GPU that the driver names."""

from __future__ import annotations

import inspect
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dtrain.config import hardware
from dtrain.config.files import CONF, section
from dtrain.config.hardware import CPU_FP16, Hardware, detect, driver_name, load, option_of, smi_name
from dtrain.launch.compose import compose

FILES = sorted(path.stem for path in (CONF / "hardware").glob("*.yaml"))
SETTINGS = set(inspect.signature(Hardware).parameters)


def test_unknown_has_every_setting_so_that_each_can_be_typed() -> None:
    assert set(section("hardware", "unknown")) - {"_target_"} == SETTINGS


def test_unknown_says_what_each_setting_means_and_its_unit() -> None:
    text = (CONF / "hardware" / "unknown.yaml").read_text()
    said = [line for line in text.splitlines() if ": null" in line]
    assert all("#" in line for line in said if not line.startswith("gpus_per_node")), said


@pytest.mark.parametrize("name", FILES)
def test_a_section_is_what_hydra_composes(name: str) -> None:
    composed = compose([f"hardware={name}"])["hardware"]
    assert composed == section("hardware", name) and set(composed) - {"_target_"} == SETTINGS


@pytest.mark.parametrize("name", [name for name in FILES if name not in ("unknown", "cpu") and load(name).gpu])
def test_a_gpus_figures_do_not_contradict_each_other(name: str) -> None:
    it: Any = load(name)
    assert it.usable_memory_gib < it.gpu_memory_gib < 1.2 * it.usable_memory_gib
    assert 0.4 * it.peak_bf16_tflops < it.matmul_tflops < it.peak_bf16_tflops
    assert it.peak_fp32_tflops < it.peak_bf16_tflops
    assert 0.7 * it.memory_gb_s < it.stream_gb_s < it.memory_gb_s
    assert 0.5 < it.kernel_us < it.launch_us < 30
    assert it.gather_max_gb_s <= it.nvlink_max_gb_s
    assert not it.nvlink_busbw_gb_s or it.nvlink_busbw_gb_s < it.nvlink_max_gb_s
    if it.network_max_gb_s:
        assert it.network_rail_gb_s < it.network_max_gb_s < it.nvlink_max_gb_s
        # all adapters together carry what each does alone
        assert it.network_max_gb_s <= 1.05 * it.gpus_per_node * it.network_rail_gb_s
        assert it.network_latency_us > it.nvlink_latency_us


def test_a_free_machine_costs_nothing_and_everything_else_is_positive() -> None:
    assert Hardware(price_per_gpu_hour=0).price_per_gpu_hour == 0
    with pytest.raises(ValueError, match=r"hardware.launch_us=-1.*\n  fix: hardware.launch_us=null"):
        Hardware(launch_us=-1)


# ---- which file is about this machine ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"), ("Tesla V100-SXM2-16GB", "v100-16gb"), ("Tesla V100-SXM3-32GB", "v100"),
        ("NVIDIA B200", "b200"), ("NVIDIA L4", "l4"), ("NVIDIA GeForce RTX 4090", "rtx4090"), ("NVIDIA L40S", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("NVIDIA RTX A4000", None), ("Tesla T4", None),
        ("NVIDIA GB200", None), ("NVIDIA GH200 480GB", None), ("NVIDIA H100 PCIe", None),
        ("NVIDIA A100-PCIE-40GB", None), ("NVIDIA H100 NVL", None), ("NVIDIA H200 NVL", None),
    ],
)  # fmt: skip
def test_a_gpus_name_finds_its_file(name: str, option: str | None) -> None:
    assert option_of(name) == option
    assert option is None or option in FILES


INFORMATION = "Model: \t\t NVIDIA H200\nIRQ:   \t\t 11\nGPU UUID: \t GPU-0\nVideo BIOS: \t 96\nBus Type: \t PCIe\n"


def test_the_driver_s_files_name_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "0000:01:00.0").mkdir()
    (tmp_path / "0000:01:00.0" / "information").write_text(INFORMATION)
    assert driver_name(tmp_path) == "NVIDIA H200"
    monkeypatch.setattr(hardware, "count_gpus", lambda: 1)
    monkeypatch.setattr(hardware, "DRIVER", tmp_path)
    assert detect() == "h200"


def test_nvidia_smi_is_asked_where_the_driver_is_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert driver_name(tmp_path) is None
    answer = subprocess.CompletedProcess([], 0, stdout="NVIDIA A100-SXM4-80GB\nNVIDIA A100-SXM4-80GB\n")
    assert smi_name(lambda *a, **k: answer) == "NVIDIA A100-SXM4-80GB"
    assert smi_name(lambda *a, **k: subprocess.CompletedProcess([], 9, stdout="no devices")) is None
    monkeypatch.setattr(hardware, "count_gpus", lambda: 1)
    monkeypatch.setattr(hardware, "DRIVER", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))  # there is no nvidia-smi
    assert detect() is None


def test_without_a_gpu_it_is_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "count_gpus", lambda: 0)
    assert detect() == "cpu"
    assert load("cpu").matmul_tflops is None, "CPUs differ too much: time is predicted only after calibrate"


# ---- fp16 on a CPU -------------------------------------------------------------------------------------------

SERVER = "fpu avx2 avx512f avx512bw avx512dq avx512vl avx512_vnni"  # Cascade Lake: AVX-512 without FP16


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        (f"flags\t\t: {SERVER}\n", False),
        (f"flags\t\t: {SERVER} avx512_bf16\n", False),  # Cooper Lake
        (f"flags\t\t: {SERVER} avx512_bf16 avx_vnni avx512_fp16 amx_tile\n", True),  # Sapphire Rapids
        ("flags\t\t: fpu avx2 avx_vnni\n", None),  # Alder Lake lacks it, Arrow Lake has it, by flags that Linux hides
        ("Features\t: fp asimd fphp asimdhp asimddp\n", False),  # Graviton: torch says no for every Arm CPU
        ("", False),
    ],
)
def test_fp16_by_the_flags_of_the_cpu(cpuinfo: str, expected: bool | None, tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\n" + cpuinfo)
    assert hardware.fp16_by_flags(hardware.cpu_flags(path)) is expected
    assert hardware.cpu_flags(tmp_path / "nothing") == set()


def test_the_flags_say_what_torch_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch is asked in a process of its own, as the launcher does where the flags do not tell."""
    monkeypatch.delenv(CPU_FP16, raising=False)
    assert hardware.cpu_has_fp16() is hardware.torch_has_fp16()


@pytest.mark.parametrize(("fake", "expected"), [("1", True), ("0", False)])
def test_a_test_can_fake_what_the_cpu_can_do(fake: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CPU_FP16, fake)
    assert hardware.cpu_has_fp16() is expected
