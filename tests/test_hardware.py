"""The hardware files: complete, consistent, and found for the GPU that the driver names."""

from __future__ import annotations

import inspect
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dtrain import hardware
from dtrain.compose import compose
from dtrain.config import CONF, section
from dtrain.hardware import Hardware, detect, driver_name, load, option_of, smi_name

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
