"""The SLURM cluster that launchers are tested on (tests/slurm.py) behaves as a cluster does, faults included."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests import slurm
from tests.patience import patience, until
from tests.slurm import Cluster

cluster = slurm.cluster
accounting_cluster = slurm.accounting_cluster
network_cluster = slurm.network_cluster

# what a rank that can be told to stop looks like to SLURM
RANK = """srun sh -c 'trap "echo told; exit 0" USR1; echo started; sleep 60 & wait'"""
SEND = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=30)
begin = time.perf_counter()
connection.sendall(bytes(2 << 20))
connection.shutdown(socket.SHUT_WR)
connection.recv(1)
print(time.perf_counter() - begin)
"""


@pytest.fixture
def slow(pytestconfig: pytest.Config) -> None:
    if not pytestconfig.getoption("--all"):
        pytest.skip("SLURM itself is slow here, 10 to 50 s: --all")


def until_says(path: Path, words: str, times: int = 1) -> None:
    def text() -> str:
        return path.read_text() if path.exists() else ""

    until(lambda: text().count(words) >= times, f"{times} times {words!r} in {path}", 30, text)


def runs(pid: int) -> bool:
    """A zombie, which nobody has waited for yet, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_two_nodes_know_their_names_and_have_gpus(cluster: Cluster) -> None:
    script = "echo $(hostname) $(getent hosts node3 | cut -d' ' -f1) $CUDA_VISIBLE_DEVICES"
    result = cluster.run("srun", "-N2", "--gpus-per-node=2", "sh", "-c", script)
    assert sorted(result.stdout.split("\n")[:2]) == ["node1 127.0.0.1 0,1", "node2 127.0.0.1 0,1"], result


def test_a_client_on_the_host_needs_only_the_environment(cluster: Cluster, tmp_path: Path) -> None:
    argv = ["sbatch", "--parsable", "--export=NONE", f"--output={tmp_path}/log", "--wrap=echo [$SECRET] $(pwd)"]
    env = {**os.environ, **cluster.env, "SECRET": "seen"}
    job = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()
    assert cluster.wait(job) == "COMPLETED"
    assert (tmp_path / "log").read_text() == f"[] {tmp_path}\n"
    assert cluster.job(job)["JobName"] == "wrap"
    assert cluster.job(99_999) == {}


def test_a_signal_reaches_every_rank(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.sbatch("-N2", "-o", tmp_path / "log", script=RANK)
    until_says(tmp_path / "log", "started", 2)
    cluster.run("scancel", "--signal=USR1", job)
    assert cluster.wait(job) == "COMPLETED"
    assert (tmp_path / "log").read_text().count("told") == 2


def test_a_requeued_job_counts_its_restarts(cluster: Cluster, tmp_path: Path) -> None:
    script = "echo run [$SLURM_RESTART_COUNT]; [ $SLURM_RESTART_COUNT ] || sleep 60"
    job = cluster.sbatch("-o", tmp_path / "log", "--open-mode=append", script=script)
    until_says(tmp_path / "log", "run []")
    assert cluster.run("scontrol", "requeue", job).returncode == 0
    assert cluster.wait(job, restarts=1) == "COMPLETED"
    until_says(tmp_path / "log", "run [1]")


@pytest.mark.usefixtures("slow")
def test_a_job_of_a_low_partition_makes_room_and_comes_back(cluster: Cluster, tmp_path: Path) -> None:
    script = "echo run [$SLURM_RESTART_COUNT]; [ $SLURM_RESTART_COUNT ] || exec sleep 60"
    options = ("-p", "low", "-N3", "--exclusive", "--open-mode=append")
    low = cluster.sbatch(*options, "-o", tmp_path / "log", script=script)
    until_says(tmp_path / "log", "run []")
    high = cluster.sbatch("-p", "high", "-o", "/dev/null", script="true")
    assert cluster.wait(high) == "COMPLETED"
    assert cluster.wait(low, restarts=1) == "COMPLETED"


def test_a_killed_node_takes_all_its_processes_along(tmp_path: Path) -> None:
    with slurm.temporary(slurm.available(), nodes=2) as cluster:
        script = f"setsid sleep 61 & echo $! >{tmp_path}/pid; {RANK}"
        cluster.sbatch("-w", "node1", "-o", tmp_path / "log", script=script)
        until_says(tmp_path / "log", "started")
        pid = int((tmp_path / "pid").read_text())
        assert runs(pid)
        cluster.kill_node("node1")
        assert not runs(pid)
        assert cluster.run("srun", "-w", "node2", "hostname").stdout == "node2\n"
        cluster.start_node("node1")


@pytest.mark.usefixtures("slow")
def test_a_lost_node_is_noticed_and_its_job_moves(tmp_path: Path) -> None:
    with slurm.temporary(slurm.available()) as cluster:
        script = "echo run [$SLURM_RESTART_COUNT]; [ $SLURM_RESTART_COUNT ] || srun sleep 100"
        job = cluster.sbatch("-N2", "-o", tmp_path / "log", "--open-mode=append", script=script)
        until_says(tmp_path / "log", "run []")
        cluster.kill_node("node1")
        assert cluster.wait(job, restarts=1, timeout=90) == "COMPLETED"
        assert cluster.job(job)["NodeList"] == "node[2-3]"
        assert cluster.node_state("node1") == "down*"
        cluster.start_node("node1")
        assert cluster.run("srun", "-w", "node1", "hostname").stdout == "node1\n"


def test_jobs_survive_a_restart_of_the_controller(tmp_path: Path) -> None:
    with slurm.temporary(slurm.available(), nodes=1) as cluster:
        job = cluster.sbatch("-o", tmp_path / "log", script=RANK)
        until_says(tmp_path / "log", "started")
        cluster.stop_controller()
        cluster.start_controller()
        assert cluster.job(job)["JobState"] == "RUNNING"


@pytest.mark.usefixtures("slow")
def test_a_job_can_be_forgotten_soon() -> None:
    with slurm.temporary(slurm.available(), nodes=1, min_job_age=2) as cluster:
        job = cluster.sbatch("-o", "/dev/null", script="true")
        assert cluster.wait(job, slurm.FORGOTTEN) == slurm.FORGOTTEN
        assert cluster.wait(job) == slurm.FORGOTTEN


def test_nothing_stays_after_the_stop(tmp_path: Path) -> None:
    with slurm.temporary(slurm.network_available(), network=True) as cluster:
        job = cluster.sbatch("-N2", "-o", tmp_path / "log", script=RANK)
        until_says(tmp_path / "log", "started", 2)
        assert cluster.job(job)["JobState"] == "RUNNING"
    assert cluster.folder.name not in Path("/proc/self/mountinfo").read_text()
    assert cluster._uplink not in [name for _, name in socket.if_nameindex()]
    for process in Path("/proc").glob("[0-9]*/environ"):
        try:
            assert cluster.folder.name.encode() not in process.read_bytes(), process
        except OSError:  # it has ended, or is none of ours
            pass


def test_a_node_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "SLURM_CONF", slurm.SLURM_CONF + "Nonsense=1\n")
    with (
        pytest.raises(RuntimeError, match=r"(?s)no slurmctld.*Nonsense"),
        slurm.temporary(slurm.available(), nodes=1),
    ):
        pass


def test_accounting_answers_after_a_job(accounting_cluster: Cluster) -> None:
    job = accounting_cluster.sbatch("-o", "/dev/null", script="exit 3")
    assert accounting_cluster.wait(job) == "FAILED"

    def accounting() -> str:
        return accounting_cluster.run("sacct", "-XPn", "-j", job, "-o", "state,exitcode").stdout

    until(lambda: "FAILED|3:0" in accounting(), "the end of the job in the database", 30, accounting)


def reaches(cluster: Cluster, source: str, target: str) -> bool:
    """Whether the target's slurmd answers."""
    script = f"exec timeout 5 bash -c 'echo >/dev/tcp/{target}/{cluster.node_ports[cluster.nodes.index(target)]}'"
    return subprocess.run([*cluster.inside(source), "sh", "-c", script], capture_output=True).returncode == 0


def test_nodes_have_networks_of_their_own(network_cluster: Cluster) -> None:
    net = network_cluster.subnet
    argv = ["srun", "-N3", "sh", "-c", "echo $(hostname) $(ip -4 -o addr show eth0 | awk '{print $4}')"]
    env = {**os.environ, **network_cluster.env}
    batch = ["sbatch", "--parsable", "-N3", "-o", "/dev/null", "--wrap=true"]
    assert sorted(network_cluster.run(*argv).stdout.splitlines()) == [f"node{i} {net}.{i}/24" for i in (1, 2, 3)]
    job = subprocess.run(batch, env=env, capture_output=True, text=True).stdout.strip()
    assert network_cluster.wait(job) == "COMPLETED"
    assert reaches(network_cluster, "node1", "node2")


def test_a_link_goes_down_and_up(network_cluster: Cluster) -> None:
    network_cluster.link("node2", False)
    assert not reaches(network_cluster, "node1", "node2")
    assert reaches(network_cluster, "node1", "node3")
    network_cluster.link("node2", True)
    assert reaches(network_cluster, "node1", "node2")


def seconds(cluster: Cluster, source: str) -> float:
    """For 2 MB from a node to this process."""
    with socket.create_server((cluster.address, 0)) as server:
        argv = [*cluster.inside(source), sys.executable, "-c", SEND, *map(str, server.getsockname())]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as sender:
            server.settimeout(patience(30))
            connection, _ = server.accept()
            with connection:
                while connection.recv(1 << 16):
                    pass
                connection.send(b".")
            return float(sender.communicate(timeout=patience(30))[0])


def test_a_slow_link_is_slow(network_cluster: Cluster) -> None:
    network_cluster.slow_link("node3", "16mbit")  # 2 MB in 1 s
    slow, other = seconds(network_cluster, "node3"), seconds(network_cluster, "node1")
    network_cluster.slow_link("node3", None)
    again = seconds(network_cluster, "node3")
    assert slow > 4 * other and slow > 4 * again, (slow, other, again)


def test_a_node_with_a_network_dies_and_returns(network_cluster: Cluster) -> None:
    network_cluster.kill_node("node2")
    assert not reaches(network_cluster, "node1", "node2")
    network_cluster.start_node("node2")
    assert reaches(network_cluster, "node1", "node2")
    assert network_cluster.run("srun", "-w", "node2", "hostname").stdout == "node2\n"
