"""`dtrain comm bench`: real ranks, real slow links, and what it says about them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dtrain.cli import main
from dtrain.commands.comm import Options, lines, read_options, step_line, time_text
from dtrain.config.hardware import Hardware
from dtrain.plan.layout import Layout
from dtrain.plan.time.collectives import Group
from dtrain.preflight.bench import KINDS, Bench, groups_of
from dtrain.util.format import size_text
from tests import slurm
from tests.patience import patience
from tests.slurm_runs import at_home
from tests.test_bad_inputs import COMPOSE_ONCE
from tests.world import ROOT

PROMISE_S = 30  # until the slow direction is named
COMMAND = [sys.executable, "-m", "dtrain", "comm", "bench"]


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*COMPOSE_ONCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)


def test_two_ranks_measure_and_a_step_is_priced(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    words = ["strategy=ddp", "model=gpt2-tiny", "cluster.processes=2", "--sizes", "4K,64K", "--seconds", "1"]
    assert main(["comm", "bench", "--json", "--svg", "a.svg", *words]) == 0
    result = json.loads(capsys.readouterr().out)
    found = {(row["kind"], row["num_bytes"]) for row in result["rows"]}
    assert found >= {(kind, 4096) for kind in KINDS}
    for row in result["rows"]:
        assert 0 < row["p50"] <= row["p99"] and row["ranks"] == 2 and row["calls"] >= 1
        assert row["algorithm_gb_s"] == pytest.approx(row["num_bytes"] / row["p50"] / 1e9)
    assert {(pair["from"], pair["to"]) for pair in result["pairs"]} == {("rank 0", "rank 1"), ("rank 1", "rank 0")}
    assert result["step"]["seconds"] == pytest.approx(sum(m["count"] * m["p50"] for m in result["messages"]))
    assert result["step"]["calls"] == 2  # one bucket, and the loss
    assert (tmp_path / "a.svg").read_text().count("<svg") == 1
    shown = "\n".join(lines(result))
    assert "gloo, inside a node, 2 ranks" in shown and "strategy=ddp would spend " in shown.splitlines()[-1]
    assert not list(tmp_path.glob(".comm-bench-*"))


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_one_rank_has_nothing_to_measure(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["comm", "bench", "cluster.processes=1", *words]) == 0
    out = capsys.readouterr().out
    text = json.loads(out)["note"] if words else out
    assert text.startswith("nothing to measure: the configuration has one rank, and one rank sends nothing")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--backend", "nccl"], "--backend=nccl: NCCL needs ranks with GPUs"),
        (["--backend", "mpi"], "--backend=mpi: must be gloo, nccl or both"),
        (["--sizes", "1M,64K"], "--sizes=1M,64K: must be numbers of bytes in ascending order"),
        (["--sizes", ""], "--sizes=: must be numbers of bytes"),
        (["--seconds", "0"], "--seconds=0: must be a number of seconds"),
        (["--svg", "a.png"], "--svg=a.png: must end in .svg"),
        (["--jsn"], "--jsn: there is no such option\n  fix: did you mean --json?"),
        (["model=gpt3"], "gpt3"),
        (["cluster=slurm", "cluster.launcher=torchrun", "cluster.nodes=2"], "cluster.node_rank=null: by hand, each"),
    ],
)
def test_mistakes(words: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["comm", "bench", "cluster.gpus_per_node=0" if "cluster=slurm" in words else "name=x", *words]) == 2
    assert error in capsys.readouterr().err
    assert main(["comm"]) == 2


def test_options() -> None:
    found = read_options(["model=gpt2-tiny", "--sizes=64K,1M", "--backend", "gloo,nccl", "--json", "--seconds", "5"])
    assert found == Options(["model=gpt2-tiny"], True, None, [65536, 2**20], ["gloo", "nccl"], 5.0)


# ---- what is said --------------------------------------------------------------------------------------------


def result(**more: Any) -> dict[str, Any]:
    row = {"kind": "all_reduce", "num_bytes": 2**20, "ranks": 4, "p50": 1e-3, "p99": 2e-3, "calls": 9}
    row |= {"algorithm_gb_s": 1.05, "bus_gb_s": 1.57, "backend": "gloo", "where": "all"}
    base = {"nodes": ["a", "b"], "ranks_per_node": 2, "backends": ["gloo"], "pairs": [], "slow": []}
    return base | {"rows": [row | {"expected": 4e-4, "verdict": "slow"}]} | more


def test_a_rate_below_the_expected_one_is_called_slow() -> None:
    shown = lines(result())
    assert shown[0] == "gloo, 2 nodes × 2 ranks"
    assert shown[2].split()[-6:] == ["slow:", "40%", "of", "the", "expected", "rate"]
    assert shown[-1] == "slow: 1 of 1 measurements are below 70% of what is expected: all_reduce"


def test_a_slow_direction_is_the_last_word() -> None:
    pairs = [{"backend": "gloo", "from": "a", "to": "b", "gb_s": 1.0}]
    pairs += [{"backend": "gloo", "from": "b", "to": "a", "gb_s": 0.012}]
    slow = [{"what": "b → a", "backend": "gloo", "directions": [{"from": "b", "to": "a", "gb_s": 0.012}]}]
    shown = lines(result(rows=[], pairs=pairs, slow=slow))
    assert shown[-1] == "slow: b → a (gloo): b → a 0.012 GB/s; the best direction has 1 GB/s"
    assert "  b → a  0.012 GB/s   slow" in shown


def test_the_last_line_says_what_a_step_spends_and_what_is_hidden() -> None:
    step = {"strategy": "fsdp", "seconds": 0.5, "calls": 40, "bytes": 2**30, "exact": True}
    known = step_line(step | {"compute_s": 2.0, "hidden_s": 0.4})
    assert known == (
        "strategy=fsdp would spend 500 ms a step on communication here, in 40 calls with 1 GiB in all; "
        "the planner's 2 s of computation hide 400 ms (80%) of it, and 100 ms remain"
    )
    assert "is not known without the compute rates" in step_line(step | {"compute_s": None, "hidden_s": None})
    assert (size_text(3), size_text(1536), time_text(2e-5), time_text(90)) == ("3 B", "1.5 KiB", "20 µs", "1m 30s")


def test_groups_are_those_of_the_mesh() -> None:
    groups = groups_of(Layout("3d", tp=2, pp=2, dp=2, data="fsdp"))
    assert groups["tensor"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert groups["data"] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert groups["pipeline"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    hybrid = groups_of(Layout("fsdp", dp=4, data="fsdp", replica_size=2))
    assert hybrid["shard"] == [[0, 1], [2, 3]] and hybrid["replicate"] == [[0, 2], [1, 3]]


def test_only_what_the_hardware_section_says_is_expected(tmp_path: Path) -> None:
    from dtrain.launch.compose import compose

    known = {"nvlink_max_gb_s": 2.0, "gather_max_gb_s": 1.0, "collective_us": 100, "nvlink_latency_us": 10}
    words = [f"hardware.{key}={value}" for key, value in (known | {"gpus_per_node": 2}).items()]
    config = compose(["cluster.processes=2", *words])
    bench = Bench(config, tmp_path, ["here"], 1.0, ["gloo"])
    bench.desk.close()
    assert bench.expected_s("all_reduce", 10**6, Group(2, 2), "gloo") == pytest.approx(120e-6 + 0.5e-3)
    assert bench.expected_s("all_gather", 10**6, Group(2, 2), "gloo") == pytest.approx(110e-6 + 0.5e-3)
    assert bench.expected_s("all_to_all", 10**6, Group(2, 2), "gloo") is None
    assert bench.expected_s("all_reduce", 10**6, Group(4, 2), "gloo") is None  # no network rate
    assert bench.expected_s("reduce_scatter", 10**6, Group(2, 2), "gloo") is None  # of gloo, not a ring
    row = {"kind": "all_reduce", "backend": "gloo", "where": "all", "ranks": 2, "p50": 0.65e-3 / 0.69}
    assert bench.judged(row | {"num_bytes": 2**20})["verdict"] == "slow"
    assert bench.judged(row | {"num_bytes": 2**20, "p50": 0.64e-3 / 0.7})["verdict"] == "ok"
    assert bench.judged(row | {"num_bytes": 2**16})["verdict"] is None
    bench.hardware = Hardware()
    assert bench.expected_s("all_reduce", 10**6, Group(2, 2), "gloo") is None


# ---- slow links, throttled by the kernel ---------------------------------------------------------------------

LIMIT = ("rate", "100mbit", "burst", "64kb", "latency", "200ms")
NODE = 'hostname "$1"; ip link set lo up; echo ready; exec sleep infinity'


@contextmanager
def two_hosts() -> Iterator[dict[str, list[str]]]:
    """Two network namespaces with a cable; host name → what to put before a command to run it there."""
    if reason := slurm.network_available():
        pytest.skip(reason)
    unshare = ["unshare", "--net", "--uts", "sh", "-c", NODE, "sh"]
    hosts = {
        name: subprocess.Popen([*unshare, name], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        for name in ("left", "right")
    }
    try:
        for host in hosts.values():
            assert host.stdout and host.stdout.readline() == b"ready\n"
        inside = {n: ["nsenter", f"--target={h.pid}", "--net", "--uts", "--"] for n, h in hosts.items()}
        pid = {name: str(host.pid) for name, host in hosts.items()}
        cable = ["ip", "link", "add", "eth0", "netns", pid["left"], "type", "veth", "peer", "name", "eth0"]
        subprocess.run([*cable, "netns", pid["right"]], check=True)
        for i, prefix in enumerate(inside.values(), 1):
            subprocess.run([*prefix, "ip", "addr", "add", f"10.77.0.{i}/24", "dev", "eth0"], check=True)
            subprocess.run([*prefix, "ip", "link", "set", "eth0", "up"], check=True)
        yield inside
    finally:
        for host in hosts.values():
            host.kill()
            host.wait()


@pytest.mark.slow
@pytest.mark.parametrize("slow", ["left", "right"])
def test_by_hand_a_slow_direction_is_named(slow: str, tmp_path: Path) -> None:
    """The same command on two hosts; one end of their cable sends at 100 Mbit/s."""
    words = ["cluster=slurm", "cluster.launcher=torchrun", "cluster.nodes=2", "cluster.gpus_per_node=0"]
    words += ["cluster.master_addr=10.77.0.1", "--seconds", "6"]
    env = os.environ | {"GLOO_SOCKET_IFNAME": "eth0", "PYTHONPATH": str(ROOT)}
    with two_hosts() as inside:
        subprocess.run([*inside[slow], "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *LIMIT], check=True)
        began = time.monotonic()
        ranks = []
        for i, (name, prefix) in enumerate(inside.items()):
            folder = tmp_path / name
            folder.mkdir()
            command = [*prefix, *COMMAND, *words, f"cluster.node_rank={i}"]
            pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            ranks.append(subprocess.Popen(command, cwd=folder, env=env, **pipes))
        outs = [rank.communicate(timeout=patience(120)) for rank in ranks]
        took = time.monotonic() - began
    print(outs[0][0], f"{took:.1f} s")
    assert [rank.returncode for rank in ranks] == [0, 0], outs
    other = {"left": "right", "right": "left"}[slow]
    last = outs[0][0].splitlines()[-1]
    assert last.startswith(f"slow: {slow} → {other} (gloo): {slow} → {other} 0.01"), outs[0][0]
    assert "measured; node0 prints the results" in outs[1][0]
    assert took < patience(PROMISE_S)


@pytest.mark.slow
def test_on_slurm_the_node_that_sends_slowly_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with slurm.temporary(slurm.network_available(), network=True) as cluster:
        at_home(cluster, tmp_path, monkeypatch)
        cluster._in_net("node2", "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *LIMIT)
        words = ["cluster=gcp-ethernet", "cluster.nodes=3", "cluster.gpus_per_node=0", "cluster.processes=2"]
        began = time.monotonic()
        done = cluster.run(*COMMAND, *words, "--seconds", "8", cwd=tmp_path, timeout=120)
        took = time.monotonic() - began
    print(done.stdout, f"{took:.1f} s")
    assert done.returncode == 0, done
    assert done.stdout.startswith("asking SLURM for the nodes: salloc ")
    assert "gloo, inside a node, 2 ranks, the slowest node" in done.stdout and "gloo, 3 nodes × 2 ranks" in done.stdout
    [line] = [line for line in done.stdout.splitlines() if line.startswith("slow: ")]
    assert line.startswith("slow: from node2 to every other one (gloo): node2 → node"), done.stdout
    rates = re.findall(r"node2 → node\d ([\d.]+) GB/s", line)
    assert len(rates) == 2 and all(0.005 < float(rate) < 0.02 for rate in rates)
    assert took < patience(PROMISE_S)
