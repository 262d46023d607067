"""The full preflight: real ranks on gloo, and figures that we put in the ranks' place to see who is named."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dtrain.preflight.full import Full
from dtrain.preflight.report import Report
from dtrain.preflight.run import Preflight, local_starter
from tests.patience import patience
from tests.preflight.test_nccl_log import FELL_BACK, IB
from tests.preflight.test_network_env import CONFIGS
from tests.preflight.test_run import Starts, config

NODES = ["node1", "node2", "node3"]


# one import of torch for the ranks of a node: four at once take two cores six seconds
FORKING = """
import os, sys, torch.distributed
from dtrain.preflight import probe
for i in range(2):
    os.environ["SLURM_LOCALID"] = str(i)
    if not os.fork():
        os._exit(probe.main())
sys.exit(any(os.wait()[1] for _ in range(2)))
"""


class Replaced(Starts):
    """Another program in the place of the measuring ranks."""

    def __init__(self, code: str) -> None:
        super().__init__()
        self.code = code

    def __call__(self, argv: list[str], nodes: list[str], tasks_per_node: int, *more: Any) -> subprocess.Popen[bytes]:
        if argv[-1] == "dtrain.preflight.probe":
            argv, tasks_per_node = [sys.executable, "-c", self.code], 1
        return super().__call__(argv, nodes, tasks_per_node, *more)


def test_real_ranks_measure_devices_and_collectives(tmp_path: Path) -> None:
    settings = config()
    settings["cluster"]["processes"] = 2
    settings["hardware"] = {"network_busbw_gb_s": 1e6}  # never reached, so that the pair is measured, too
    said: list[str] = []
    check = Preflight("full", min_shm_gib=0.001, sizes_mib=[1], outlier=0.0)  # a busy machine is no finding here
    report = check.run(settings, tmp_path, ["node1", "node2"], Replaced(FORKING), said.append)
    assert [texts[0].partition(":")[0] for texts in report.bad.values()] == [
        "no pair of nodes is fast enough, so the cause is the fabric or its profile"
    ] * 2, said
    for node in ("node1", "node2"):
        for name in ("matmul", "memory", "all-reduce", "all-gather", "reduce-scatter"):
            assert report.state(node, name) == "ok", (node, name, said)


def test_the_tasks_of_this_machine_know_their_number_and_end_together(tmp_path: Path) -> None:
    argv = [
        sys.executable,
        "-c",
        "import os, sys, time; i = int(os.environ['SLURM_LOCALID']); i or time.sleep(60); sys.exit(i)",
    ]
    began = time.monotonic()
    process = local_starter(argv, ["node1"], 2, {}, tmp_path / "log")
    assert process.wait(patience(30)) != 0 and time.monotonic() - began < 60, "the other task sleeps for a minute"


def test_a_rank_that_breaks_is_quoted(tmp_path: Path) -> None:
    broken = Replaced("import sys; sys.exit('CUDA error: uncorrectable ECC error')")
    report = Preflight("full", min_shm_gib=0.001).check(config(), tmp_path, ["node1"], broken)
    assert "ended with code 1: CUDA error: uncorrectable ECC error" in report.bad["node1"][0]


def test_full_waits_for_the_quick_checks(tmp_path: Path) -> None:
    report = Preflight("full", min_shm_gib=1e9).check(config(), tmp_path, ["node1"], Starts())
    assert report.state("node1", "measurements") == "skipped" and not report.ok


# ---- figures that we put in ----------------------------------------------------------------------------------


class Cluster:
    """Three nodes of 8 GPUs whose ranks would have said this."""

    def __init__(self, tmp_path: Path, cluster: str = "aws-ib", **hardware: Any) -> None:
        self.config = {**CONFIGS[cluster]}
        self.config["hardware"] = {**self.config["hardware"], **hardware}
        (tmp_path / "preflight").mkdir()
        self.report = Report("full", NODES)
        self.full = Full(Preflight("full"), self.config, tmp_path, self.report, {"node1": "127.0.0.1"})
        self.full.desk.close()
        for node in NODES:
            for i in range(8):
                self.post(node, "rates", {"matmul_tflops": 720.0, "memory_gb_s": 3000.0}, i)
            self.post(
                node, "inside", {"all_reduce": [420, 256], "all_gather": [320, 256], "reduce_scatter": [318, 256]}
            )
        self.post("node1", "across", {"all_reduce": [300, 256], "all_gather": [290, 256], "reduce_scatter": [290, 256]})

    def post(self, node: str, kind: str, value: dict[str, Any], local: int = 0) -> None:
        self.full.desk.posted[f"{node}:{local}", kind] = value

    def bad(self) -> dict[str, str]:
        self.full.judge_devices()
        self.full.judge_collectives()
        return {node: " ".join(texts) for node, texts in self.report.bad.items()}


def test_good_figures_pass(tmp_path: Path) -> None:
    assert Cluster(tmp_path).bad() == {}


def test_a_slow_gpu_is_named_by_its_number(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.post("node2", "rates", {"matmul_tflops": 300.0, "memory_gb_s": 3000.0}, 5)
    assert list(bad := cluster.bad()) == ["node2"] and "GPU 5 reaches 300 TFLOP/s; expected: 791" in bad["node2"]


def test_without_expectations_the_others_are_the_measure(tmp_path: Path) -> None:
    unknown = dict.fromkeys(("peak_bf16_tflops", "nvlink_busbw_gb_s", "gather_busbw_gb_s", "network_busbw_gb_s"))
    cluster = Cluster(tmp_path, **unknown)
    cluster.post("node3", "inside", {"all_reduce": [100, 256], "all_gather": [320, 256], "reduce_scatter": [318, 256]})
    assert list(bad := cluster.bad()) == ["node3"] and "all-reduce inside the node runs at 100 GB/s" in bad["node3"]
    assert "median of all is 420" in bad["node3"]


def test_a_slow_way_across_names_the_node(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.post("node1", "across", {"all_reduce": [40, 256], "all_gather": [40, 256], "reduce_scatter": [40, 256]})
    cluster.post(
        "node1", "pairs", {"pairs": [["node1", "node2", 41.0], ["node1", "node3", 300.0], ["node2", "node3", 42.0]]}
    )
    assert list(bad := cluster.bad()) == ["node2"]
    assert "node1 – node2 41 GB/s" in bad["node2"] and "expected: 287" in bad["node2"]


def test_all_slow_is_the_fabric(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.post("node1", "across", {"all_reduce": [40, 256]})
    pairs = [["node1", "node2", 41.0], ["node1", "node3", 40.0], ["node2", "node3", 42.0]]
    cluster.post("node1", "pairs", {"pairs": pairs})
    assert list(bad := cluster.bad()) == NODES and "no pair of nodes is fast enough" in bad["node1"]


def test_half_a_node_is_not_held_against_a_whole_one(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, gpus_per_node=4)
    for node in NODES:
        cluster.post(node, "inside", {"all_reduce": [200, 256]})
    assert cluster.bad() == {} and cluster.report.state("node1", "expected rates") == "skipped"


@pytest.mark.parametrize(("text", "bad"), [(FELL_BACK, True), (IB, False), ("", False)])
def test_what_nccl_says_is_compared_with_the_profile(tmp_path: Path, text: str, bad: bool) -> None:
    cluster = Cluster(tmp_path)
    (tmp_path / "preflight" / "nccl-node2-0.log").write_text(text)
    cluster.full.judge_transport()
    found = cluster.report.bad
    assert list(found) == (["node2"] if bad else [])
    if bad:
        assert found["node2"][0].startswith("InfiniBand requested (cluster.fabric.transport=ib), sockets used")


def test_who_hangs_is_named_with_its_stage(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    for node, when in (("node1", 50.0), ("node2", 10.0), ("node3", 50.0)):
        for i in range(8):
            cluster.post(
                node, "stage", {"name": "joining the others" if when > 10 else "importing torch", "time": when}, i
            )
    [trouble] = cluster.full.troubles("", NODES, {}, 240)
    assert trouble.node == "node2" and "were at: importing torch" in trouble.text
