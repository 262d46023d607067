"""Preflight over real networks: a real SLURM whose nodes have one each, with links that go down and nodes that go away.

Each job takes the whole way: launch, sbatch, the supervisor on its first node, srun, the checks. What is wrong must be
said exactly, of the right node, within 60 s, and the job ends with exit code 4.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from dtrain.preflight.channel import Desk, Link, Messages
from dtrain.preflight.reachability import Peer, judge_streams, same_family
from tests import slurm
from tests.patience import patience
from tests.slurm import FINISHED, Cluster
from tests.slurm_runs import at_home, attempts, end_jobs, failure, job_id, said, submit, until
from tests.world import ROOT, SMALL, losses, summary

PROMISE_S = 60
GCP = ["cluster=gcp-ethernet", "cluster.gpus_per_node=0", "cluster.processes=2"]
GCP_2 = [*GCP, "cluster.nodes=2", "cluster.nodelist='node[1-2]'"]
NODES_2 = [*SMALL, *GCP_2]
NODES_3 = [*SMALL, *GCP, "cluster.nodes=3", "train.global_batch_size=12"]  # for 4 ranks, too: a node may be left out
FABRIC = {  # a second network, of eth1: SLURM's own stays as it is
    "node1": ["192.168.77.1/24", "fd77::1/64"],
    "node2": ["fd77::2/64"],
    "node3": ["192.168.77.3/24", "fd77::3/64"],
}
pytestmark = pytest.mark.timeout(300)


def network() -> AbstractContextManager[Cluster]:
    """Three nodes. SLURM waits for a lost one for 300 s, as it does by default: here the preflight is to notice."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slurm, "SLURM_CONF", re.sub(r"SlurmdTimeout=\d+", "SlurmdTimeout=300", slurm.SLURM_CONF))
        return slurm.temporary(slurm.network_available(), network=True)


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Room for a run folder, not for its checkpoints. The nodes see it because it is there when they start."""
    if reason := slurm.network_available():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("disk")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture(scope="module")
def cluster(small_disk: Path) -> Iterator[Cluster]:
    with network() as it:
        yield it


@pytest.fixture(scope="module")
def home(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty folder to type commands in."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        at_home(cluster, folder, patch)
        yield folder
        end_jobs(cluster, folder)


def held(name: str) -> str:
    """The job says that it has its nodes, and waits."""
    return f"cluster.setup=['touch {name}-there; while [ ! -e {name}-go ]; do sleep 0.05; done']"


def checks(run: Path) -> dict[tuple[str, str], tuple[str, str]]:
    """(node, check) → state and text."""
    found = json.loads((run / "preflight.json").read_text())["checks"]
    return {(check["node"], check["name"]): (check["state"], check["text"]) for check in found}


def bad_nodes(cluster: Cluster, run: Path, slurm_knows: bool = True) -> dict[str, list[str]]:
    """Node → what is wrong with it, in a job that ended of it, and as promised."""
    until(lambda: attempts(run, "end"), f"the end of {run.name}", 2 * PROMISE_S)
    [start], [end] = attempts(run, "start"), attempts(run, "end")
    report = json.loads((run / "preflight.json").read_text())
    print(f"{run.name}: {end['time'] - start['time']:.1f} s, of them {report['seconds']} s of preflight")
    assert end["code"] == 4 and not report["ok"], said(run)
    assert end["time"] - start["time"] < patience(PROMISE_S)
    if slurm_knows:
        cluster.wait(job_id(run), {*FINISHED, "COMPLETING"})  # it goes on asking a node that is lost
        job = cluster.job(job_id(run))
        assert job["ExitCode"] == "4:0" and job["Restarts"] == "0", said(run)
    assert failure(run)["type"] == "preflight" and summary(run)["status"] == "failed"
    log = (run / "logs" / "batch.log").read_text()
    assert f"preflight failed on {', '.join(report['bad'])}" in log
    for node, texts in report["bad"].items():
        print("\n".join([node, *texts]))
        assert all("\n  fix: " in text and text in log and text in failure(run)["message"] for text in texts)
    result: dict[str, list[str]] = report["bad"]
    return result


# ---- what is wrong from the start ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def jobs(cluster: Cluster, home: Path, small_disk: Path) -> dict[str, Path]:
    """In the queue together. eth1 is down on node3."""
    cluster._in_net("switch", "ip", "link", "add", "br1", "type", "bridge")
    cluster._in_net("switch", "ip", "link", "set", "br1", "up")
    for name, addresses in FABRIC.items():
        port, node = f"eth1-{name}", str(cluster._daemons[name].pid)
        cluster._in_net("switch", "ip", "link", "add", port, "type", "veth", "peer", "name", "eth1", "netns", node)
        cluster._in_net("switch", "ip", "link", "set", port, "master", "br1", "up")
        for address in addresses:
            cluster._in_net(name, "ip", "addr", "add", address, "dev", "eth1", *["nodad"] * (":" in address))
        cluster._in_net(name, "ip", "link", "set", "eth1", "down" if name == "node3" else "up")
    eth1 = "cluster.fabric.interface=eth1"
    return {
        "wrong": submit(*NODES_2, "cluster.fabric.interface=ens5", run="wrong"),
        "off": submit(*NODES_3, eth1, run="off"),
        "off-2": submit(*NODES_2, eth1, "cluster.nodelist='node[2-3]'", run="off-2"),
        "disk": submit(*NODES_2, run=str(small_disk / "run")),
    }


def test_a_wrong_interface(jobs: dict[str, Path], cluster: Cluster) -> None:
    text = (
        "cluster.fabric.interface=ens5: this node has no such interface; it has eth0 (up), eth1 (up)"
        "\n  fix: cluster.fabric.interface=eth0"
    )
    assert bad_nodes(cluster, jobs["wrong"]) == {"node1": [text], "node2": [text]}
    assert f"all nodes: interface: {text}" in (jobs["wrong"] / "logs" / "batch.log").read_text()


@pytest.mark.parametrize("name", ["off", "off-2"])
def test_a_link_that_is_down_on_one_node(name: str, jobs: dict[str, Path], cluster: Cluster) -> None:
    """Of two nodes, too, it is not the other one's fault that it does not reach this one."""
    text = (
        "cluster.fabric.interface=eth1: it is switched off; there is eth0 (up), eth1 (down)"
        "\n  fix: ip link set eth1 up, as root"
    )
    assert bad_nodes(cluster, jobs[name]) == {"node3": [text]}


def test_nodes_meet_in_an_address_family_that_both_have(jobs: dict[str, Path], cluster: Cluster) -> None:
    bad_nodes(cluster, jobs["off"])
    found = checks(jobs["off"])
    for node, addresses in (("node1", "192.168.77.1, fd77::1"), ("node2", "fd77::2")):
        assert found[node, "interface"] == ("ok", f"eth1: {addresses}")
        assert found[node, "reach"] == ("ok", "reaches every other node over eth1") and found[node, "stream"][0] == "ok"


def test_a_disk_without_room_for_the_checkpoints(jobs: dict[str, Path], cluster: Cluster) -> None:
    found = bad_nodes(cluster, jobs["disk"])
    pattern = r"([\d.]+) MB are needed for the checkpoints, and ([\d.]+) MB are free at (\S+)\n  fix: make room, .*"
    for node in ("node1", "node2"):
        [parts] = [re.fullmatch(pattern, text) for text in found.pop(node)]
        assert parts and parts[3] == str(jobs["disk"]) and float(parts[1]) > 2.5 and 1 < float(parts[2]) < 2.1
    assert not found


def test_a_disk_that_becomes_full(jobs: dict[str, Path], cluster: Cluster, home: Path, small_disk: Path) -> None:
    """Up to the last pages, on which the supervisor can just write what is wrong."""
    bad_nodes(cluster, jobs["disk"])  # its job has ended: it counts what is free on the same disk
    run = submit(*NODES_2, held("full"), run=str(small_disk / "full"))
    until(lambda: (home / "full-there").exists(), "the job's start", PROMISE_S)
    (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free - 60_000))
    (home / "full-go").touch()
    found = bad_nodes(cluster, run)
    pattern = (
        f"{run} cannot be written to: No space left on device; "
        r"0\.0\d+ MB are free, and the checkpoints need 2\.57 MB\n  fix: make room there, or run_dir=… on another disk"
    )
    assert list(found) == ["node1", "node2"] and all(re.fullmatch(pattern, *texts) for texts in found.values())


def test_the_interface_of_the_profile_is_found_and_the_run_trains(home: Path, cluster: Cluster) -> None:
    command = [sys.executable, str(ROOT / "launch.py"), *NODES_2, "run_dir=good"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0 and "2 nodes × 2 ranks" in result.stdout, result
    run = home / "good"
    assert cluster.wait(job_id(run), timeout=120) == "COMPLETED", said(run)
    found = checks(run)
    for i, node in ((1, "node1"), (2, "node2")):
        assert found[node, "interface"] == ("ok", f"eth0: {cluster.subnet}.{i}")
        assert found[node, "reach"] == ("ok", "reaches every other node over eth0")
        assert found[node, "stream"][0] == found[node, "clock"][0] == found[node, "disk"][0] == "ok"
    report = json.loads((run / "preflight.json").read_text())
    print(f"preflight {report['seconds']} s")
    assert report["ok"] and report["seconds"] < patience(PROMISE_S)
    assert len(losses(run)) == 20 and summary(run)["status"] == "done" and summary(run)["world_size"] == 4


# ---- what happens while the job has its nodes ----------------------------------------------------------------


def test_lost_nodes_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The link of node2 goes down, and node3 loses its power: one job needs the one, one the other. The supervisor of a
    third is on node2, and cannot even ask SLURM any more."""
    with network() as cluster:
        at_home(cluster, tmp_path, monkeypatch)
        pairs = {"link": "node[1-2]", "power": "node[1,3]", "alone": "node[2-3]"}
        runs = {name: submit(*NODES_2, held(name), f"cluster.nodelist='{pairs[name]}'", run=name) for name in pairs}
        until(lambda: all(Path(f"{name}-there").exists() for name in runs), "the jobs' starts", PROMISE_S)
        cluster.link("node2", False)
        cluster.kill_node("node3")
        for name in runs:
            Path(f"{name}-go").touch()

        for name, node in (("link", "node2"), ("power", "node3")):
            [(named, [text])] = bad_nodes(cluster, runs[name]).items()
            assert named == node
            assert text.startswith("SLURM cannot reach it: the node is down, or its link is (srun: error: ")
            assert f"fix: sinfo -n {node}; is it up" in text and f"cluster.exclude={node}" in text

        found = bad_nodes(cluster, runs["alone"], slurm_knows=False)
        why = "not checked: node2, where this runs, cannot reach SLURM's controller, so no agent was started\n"
        assert found["node2"][0] == found["node3"][0] and found["node2"][0].startswith(why)
        assert "ip -br addr and ip route on node2" in found["node2"][0]
        assert found["node2"][1].startswith("cluster.fabric.interface=eth0: it is switched off; there is eth0 (down)")
        assert [len(texts) for texts in found.values()] == [2, 1]


@pytest.fixture
def slow_link(cluster: Cluster) -> Iterator[None]:
    cluster.slow_link("node2", "20mbit")
    yield
    cluster.slow_link("node2", None)


def test_a_slow_link_is_named_and_can_be_left_out(home: Path, cluster: Cluster, slow_link: None) -> None:
    run = submit(*NODES_3, "preflight.exclude_bad=true", run="without")
    until(lambda: (run / "preflight.json").exists(), "the preflight", PROMISE_S)
    [(node, [text])] = bad_nodes(cluster, submit(*NODES_3, run="slow")).items()
    assert node == "node2" and text.startswith("the link is slow: ")
    streams = re.findall(r"(node\d) → (node\d) ([\d.]+) MB/s", text)
    assert len(streams) == 4 and all("node2" in stream[:2] and float(stream[2]) <= 3 for stream in streams)
    assert ", and eth0 says 10 Gb/s; the best of all has " in text and "\n  fix: ethtool, ip -s link and tc" in text

    assert cluster.wait(job_id(run), timeout=120) == "COMPLETED", said(run)
    assert "continuing without node2 (node2: the link is slow: " in (run / "logs" / "batch.log").read_text()
    assert summary(run)["status"] == "done" and summary(run)["world_size"] == 4 and len(losses(run)) == 20


@pytest.mark.slow
def test_pairs_of_nodes_tell_which_link_becomes_slow(home: Path, cluster: Cluster) -> None:
    """After the quick checks, so that it is the measurements of full that find it."""
    run = submit(*NODES_3, "preflight=full", "preflight.outlier=0.25", run="pairs")
    until(lambda: (run / "preflight" / "node1-measure.log").exists(), "the measuring ranks", PROMISE_S)
    cluster.slow_link("node2", "50mbit")
    try:
        [(node, [text])] = bad_nodes(cluster, run).items()
    finally:
        cluster.slow_link("node2", None)
    assert node == "node2" and text.startswith("the link to this node is slow: node1 – node2 0.00")
    assert re.search(r"node2 – node3 0\.00\d+ GB/s; the best has [\d.]+ \(all: all-reduce 0\.00", text)
    assert checks(run)["node1", "across"][0] == checks(run)["node3", "across"][0] == "ok"


# ---- the command ---------------------------------------------------------------------------------------------


def test_the_command(home: Path, cluster: Cluster) -> None:
    """From a login node, where it asks for one, and in a batch script."""
    command = [sys.executable, "-m", "dtrain", "preflight", *GCP_2]
    wrong = shlex.join([*command, "cluster.fabric.interface=ens5"])
    job = cluster.sbatch("--nodelist=node[1-2]", f"--output={home}/batch.log", script=wrong)
    result = cluster.run(*command, timeout=PROMISE_S)
    assert result.returncode == 0, result.stdout + result.stderr
    salloc, *lines = result.stdout.splitlines()
    assert salloc.startswith("asking SLURM for the nodes: salloc ") and "--nodes=2" in salloc
    assert lines[0].split()[:2] == ["node", "interface"] and lines[-1].startswith("preflight passed · quick · ")
    for i in (1, 2):
        assert lines[i].startswith(f"node{i} ") and f" eth0 {cluster.subnet}.{i} " in lines[i], result.stdout

    assert cluster.wait(job) == "FAILED" and cluster.job(job)["ExitCode"] == "4:0"
    log = (home / "batch.log").read_text()
    assert "all nodes: interface: cluster.fabric.interface=ens5: this node has no such interface; it has eth0" in log
    assert "fix: cluster.fabric.interface=eth0" in log and "preflight failed on node1, node2 · quick" in log


# ---- the parts -----------------------------------------------------------------------------------------------


def test_ipv4_where_all_have_it_else_ipv6(tmp_path: Path) -> None:
    four, six = ("192.0.2.1", 1), ("fd00::1", 2)
    assert same_family({"a": [four, six], "b": [six, four]}) == {"a": four, "b": four}
    assert same_family({"a": [four, six], "b": [six]}) == {"a": six, "b": six}
    assert same_family({"a": [four], "b": [six]}) == {"a": four, "b": six} and same_family({}) == {}
    why = Peer("127.0.0.1", "t", "a").reach({"b": six}, 1.0)["b"]
    assert why == "fd00::1 there, 127.0.0.1 here: IPv4 and IPv6 cannot connect"

    desk = Desk("token", Messages(tmp_path))
    link = Link([("::1", desk.port), ("127.0.0.1", desk.port)], "token", "n", Messages(tmp_path))
    assert link.stream and link.stream.family == socket.AF_INET
    desk.close()


def test_one_slow_node_of_three_is_found_when_no_driver_says_how_fast_it_should_be() -> None:
    nodes = ["a", "b", "c"]
    streams: dict[str, dict[str, Any]] = {
        n: {"streams": {m: 2.0 if "b" in (n, m) else 900.0 for m in nodes if m != n}} for n in nodes
    }
    found = judge_streams(streams, None)
    assert {node: findings[0]["state"] for node, findings in found.items()} == {"a": "ok", "b": "bad", "c": "ok"}
    found = judge_streams({"a": {"streams": {"b": 900.0}}, "b": {"streams": {"a": 0.0}}}, None)  # it came to nothing
    assert [findings[0]["text"] for findings in found.values()] == ["the link is slow: b → a 0 MB/s"] * 2
