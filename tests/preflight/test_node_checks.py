"""What a node says about itself, shown nodes that we do not have: other trees, adapters, GPUs, limits and disks."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest

from dtrain.models.gpt2 import GPT2
from dtrain.preflight import gpus, node_checks, versions
from dtrain.preflight.interfaces import Interface, interfaces, usable
from tests.preflight.test_network_env import CONFIGS

ETH0 = Interface("eth0", True, True, ("10.0.0.1",), 1250.0)
LO = Interface("lo", True, True, ("127.0.0.1",))


# ---- network -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "says", "fix"),
    [
        ({"lo": LO, "ens5": Interface("ens5", True, True, ("10.0.0.1",))}, "has ens5 (up)", "interface=ens5"),
        ({"lo": LO}, "it has none but lo", "bring a network"),
        ({"eth0": Interface("eth0", False, False, ("10.0.0.1",))}, "it is switched off", "ip link set eth0 up"),
        ({"eth0": Interface("eth0", True, False, ("10.0.0.1",))}, "it has no link", "cable"),
        ({"eth0": Interface("eth0", True, True)}, "it has no address", "ip -br addr show eth0"),
    ],
)
def test_an_interface_that_cannot_be_used(found: dict[str, Interface], says: str, fix: str) -> None:
    finding = node_checks.interface("eth0", found)
    assert finding["state"] == "bad" and says in finding["text"] and fix in finding["fix"]


def test_an_interface_that_can() -> None:
    assert node_checks.interface("eth0", {"eth0": ETH0})["state"] == "ok"
    assert node_checks.interface(None, {"eth0": ETH0})["state"] == "skipped"


def test_the_interfaces_of_this_machine_are_found() -> None:
    found = interfaces()
    assert found["lo"].up and found["lo"].addresses[0] == "127.0.0.1"
    assert usable({"lo": LO}, None) == ["127.0.0.1"]
    assert usable({"lo": LO, "a": Interface("a", True, True, ("10.1.0.1",)), "eth0": ETH0}, "eth0")[0] == "10.0.0.1"


def adapters(tmp_path: Path, transport: str, devices: dict[str, str], hca: str | None = None, **environ: str) -> Any:
    for name, state in devices.items():
        port = tmp_path / "class/infiniband" / name / "ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(state)
    return node_checks.adapters(transport, hca, environ, tmp_path)


ACTIVE, DOWN = "4: ACTIVE\n", "1: DOWN\n"


def test_adapters_with_active_ports(tmp_path: Path) -> None:
    assert adapters(tmp_path, "ib", {"mlx5_0": ACTIVE, "mlx5_1": ACTIVE}, "mlx5_0,mlx5_1:1")["state"] == "ok"


def test_a_missing_and_an_idle_adapter_are_named_with_what_would_work(tmp_path: Path) -> None:
    found = adapters(tmp_path, "ib", {"mlx5_0": ACTIVE, "mlx5_1": DOWN}, "mlx5_0,mlx5_1,mlx5_2")
    assert found["state"] == "bad" and "mlx5_2 not there; mlx5_1 without an active port" in found["text"]
    assert found["fix"] == "'cluster.fabric.hca=\"mlx5_0\"'"


def test_infiniband_on_a_node_without_and_on_one_with_efa(tmp_path: Path) -> None:
    assert "no adapter" in adapters(tmp_path / "none", "ib", {}, "mlx5_0")["text"]
    found = adapters(tmp_path / "efa", "ib", {"rdmap16s27": ACTIVE}, "mlx5_0")
    assert found["state"] == "bad" and "AWS offers no InfiniBand" in found["text"] and found["fix"] == "cluster=aws-efa"


def test_efa_needs_devices_and_a_plugin_that_loads(tmp_path: Path) -> None:
    assert "no EFA device" in adapters(tmp_path / "a", "efa", {"mlx5_0": ACTIVE})["text"]
    assert "no libnccl-net" in adapters(tmp_path / "b", "efa", {"efa_0": ACTIVE})["text"]
    (tmp_path / "libnccl-net.so").write_text("not a library")
    found = adapters(tmp_path / "c", "efa", {"efa_0": ACTIVE}, LD_LIBRARY_PATH=str(tmp_path))
    assert found["state"] == "bad" and "cannot be loaded" in found["text"]
    assert adapters(tmp_path / "d", "socket", {})["state"] == "skipped"


# ---- disk, memory, limits ------------------------------------------------------------------------------------


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_checks, "disk_free", lambda path: 10**9)
    assert [f["state"] for f in node_checks.run_folder(tmp_path, 5 * 10**8, "", None)] == ["ok", "ok"]
    disk = node_checks.run_folder(tmp_path / "not" / "yet", 2 * 10**9, "", None)[-1]
    assert disk["state"] == "bad" and "2 GB are needed" in disk["text"] and "1 GB are free" in disk["text"]

    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(node_checks, "write_something", full)
    (folder,) = node_checks.run_folder(tmp_path, 2 * 10**9, "", None)
    assert folder["state"] == "bad" and "No space left" in folder["text"] and "need 2 GB" in folder["text"]


def test_a_folder_that_is_not_shared(tmp_path: Path) -> None:
    (found,) = node_checks.run_folder(tmp_path, 1, "", tmp_path / "elsewhere")
    assert found["state"] == "bad" and "does not exist here" in found["text"]
    assert list(tmp_path.iterdir()) == []


def test_checkpoints_are_counted_like_the_model_counts_itself(tmp_path: Path) -> None:
    config = CONFIGS["local"]
    model = GPT2(**{k: v for k, v in config["model"].items() if k != "_target_"})
    weights = sum(p.numel() for p in model.parameters())
    assert node_checks.checkpoint_bytes(config, tmp_path) == (weights * 12 * 4, "")  # keep=3, and one being written
    for step in range(5):
        (tmp_path / "checkpoints" / f"step-{step}").mkdir(parents=True)
    assert node_checks.checkpoint_bytes(config, tmp_path)[0] == weights * 12
    needed, why = node_checks.checkpoint_bytes({"model": {"_target_": "my.Model"}}, tmp_path)
    assert needed is None and "my.Model" in why
    assert node_checks.run_folder(tmp_path, None, why, None)[-1]["state"] == "skipped"


def test_shared_memory_and_memlock(tmp_path: Path) -> None:
    assert node_checks.shared_memory(1e9, tmp_path)["state"] == "bad"
    assert node_checks.shared_memory(0, tmp_path)["state"] == "ok"
    assert node_checks.shared_memory(0, tmp_path / "none")["state"] == "bad"
    assert node_checks.memlock("ib", lambda _: (8192 * 1024, -1))["text"].startswith("ulimit -l is 8192 KiB")
    assert node_checks.memlock("ib", lambda _: (resource.RLIM_INFINITY, -1))["state"] == "ok"
    assert node_checks.memlock("socket")["state"] == "skipped"


def test_a_check_that_breaks_is_a_finding() -> None:
    def broken() -> node_checks.Finding:
        raise OSError("the driver hangs")

    assert "the driver hangs" in node_checks.guarded("gpus", broken)[0]["text"]


# ---- GPUs ----------------------------------------------------------------------------------------------------

GOOD = "0, NVIDIA H100 80GB HBM3, 550.54.15, 4, 81559, 0\n1, NVIDIA H100 80GB HBM3, 550.54.15, 4, 81559, 0\n"


def smi(
    text: str, reasons: str = "0x0000000000000001\n0x0000000000000000\n", knows: str = "clocks_event"
) -> gpus.Query:
    return lambda fields: text if fields.startswith("index") else reasons if fields.startswith(knows) else None


def test_good_gpus() -> None:
    (found,) = gpus.gpus(2, gpus.look(smi(GOOD)))
    assert found["state"] == "ok" and found["short"] == "2 × H100 80GB HBM3"
    assert gpus.gpus(0, [])[0]["state"] == "skipped"
    assert gpus.gpus(2, [], present=2)[0]["state"] == "ok"  # no nvidia-smi, but /dev/nvidia0 and 1


def test_only_the_gpus_that_are_ours_count() -> None:
    assert [gpu["index"] for gpu in gpus.look(smi(GOOD), "1")] == ["1"]
    assert len(gpus.look(smi(GOOD), "GPU-1234")) == 2  # by another name: all are looked at


def test_gpus_that_are_missing_or_sick_are_named() -> None:
    (few,) = gpus.gpus(8, gpus.look(smi(GOOD)))
    assert few["state"] == "bad" and "8 GPUs are needed on each node, but this one shows 2" in few["text"]
    assert "cluster.gpus_per_node=0" in gpus.gpus(8, [], present=0)[0]["fix"]
    sick = GOOD.replace(
        "1, NVIDIA H100 80GB HBM3, 550.54.15, 4, 81559, 0", "1, NVIDIA H100 80GB HBM3, 550.54.15, 20480, 81559, 7"
    )
    found = gpus.gpus(2, gpus.look(smi(sick, "0x0\n0x0000000000000060\n", knows="clocks_throttle")))
    assert [f["state"] for f in found] == ["bad"] * 3
    text = " ".join(f["text"] for f in found)
    assert (
        "7 memory errors" in text and "too hot" in text and "20.0 GiB are held by other" in text and "GPU 0" not in text
    )


def test_a_card_without_ecc_says_nothing_about_it() -> None:
    assert (
        gpus.gpus(1, gpus.look(smi("0, NVIDIA GeForce RTX 4090, 550, 4, 24564, [N/A]\n", "0x0\n")))[0]["state"] == "ok"
    )


# ---- versions ------------------------------------------------------------------------------------------------


def test_the_odd_one_out_is_named() -> None:
    same = {"torch": "2.13.0", "code": "aaaa"}
    found = versions.compare({"n1": same, "n2": same | {"torch": "2.12.0"}, "n3": same})
    assert found["n1"][0]["state"] == found["n3"][0]["state"] == "ok"
    assert found["n2"][0]["text"] == "torch is 2.12.0 here and 2.13.0 on 2 nodes (n1, …)"
    found = versions.compare({"n1": same, "n2": same | {"code": "bbbb"}})  # no majority: the first is right
    assert found["n1"][0]["state"] == "ok" and "bbbb here and aaaa on n1" in found["n2"][0]["text"]


def test_versions_are_read_without_torch_and_code_by_content(tmp_path: Path) -> None:
    import torch

    assert versions.versions([], [])["torch"] == torch.__version__
    (tmp_path / "a.py").write_text("x = 1")
    before = versions.code_digest(tmp_path)
    (tmp_path / "a.py").write_text("x = 2")
    assert versions.code_digest(tmp_path) != before
