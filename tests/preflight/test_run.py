"""Preflight with real agents, several "nodes" on this machine: who is missing, odd, late or cut off is named."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dtrain.commands.preflight import main
from dtrain.preflight import quick
from dtrain.preflight import run as module
from dtrain.preflight.channel import Desk, Link, Messages
from dtrain.preflight.report import Check, Report, as_check
from dtrain.preflight.run import Preflight, local_starter
from tests.patience import patience
from tests.preflight.test_network_env import CONFIGS

NODES = ["node1", "node2", "node3"]


def config(**fabric: Any) -> dict[str, Any]:
    found = copy.deepcopy(CONFIGS["gcp-ethernet"])
    found["cluster"]["gpus_per_node"] = 0
    found["cluster"]["fabric"].update({"interface": "lo"} | fabric)
    return found


class Starts:
    """A starter that plays tricks on one node."""

    def __init__(self, node: str = "", argv: list[str] | None = None, env: dict[str, str] | None = None) -> None:
        self.node, self.argv, self.env = node, argv, env or {}

    def __call__(
        self, argv: list[str], nodes: list[str], tasks_per_node: int, env: dict[str, str], log: Path
    ) -> subprocess.Popen[bytes]:
        if nodes[0] == self.node:
            argv, env = self.argv or argv, env | self.env
        return local_starter(argv, nodes, tasks_per_node, env, log)


def check(
    tmp_path: Path, start: Starts, nodes: list[str] = NODES, timeout_s: float = 50, **fabric: Any
) -> tuple[Report, list[str]]:
    said: list[str] = []
    settings = Preflight(min_shm_gib=0.001, timeout_s=timeout_s)
    return settings.run(config(**fabric), tmp_path, nodes, start, said.append), said


def test_three_good_nodes(tmp_path: Path) -> None:
    report, said = check(tmp_path, Starts())
    assert report.ok and report.good == NODES, said
    assert {
        report.state(node, name) for node in NODES for name in ("interface", "clock", "versions", "reach", "stream")
    } == {"ok"}
    written = json.loads((tmp_path / "preflight.json").read_text())
    assert written["ok"] and len(written["checks"]) == len(report.checks)
    assert [line.split()[0] for line in said[2:5]] == NODES and "preflight passed" in said[-1]
    assert not list((tmp_path / "preflight").glob(".messages*"))


def test_a_node_with_another_torch(tmp_path: Path) -> None:
    fake = tmp_path / "fake" / "torch-0.1.dist-info"
    fake.mkdir(parents=True)
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 0.1\n")
    odd = [
        sys.executable,
        "-c",
        f"import sys; sys.path.insert(0, {str(fake.parent)!r}); import dtrain.preflight.agent as n; n.main()",
    ]
    report, said = check(tmp_path, Starts("node2", argv=odd))
    assert list(report.bad) == ["node2"] and report.good == ["node1", "node3"]
    assert (
        report.bad["node2"][0].startswith("torch is 0.1 here and ")
        and "on 2 nodes (node1, …)" in report.bad["node2"][0]
    )
    assert any(line.startswith("node2: versions: torch is 0.1") for line in said)


def test_a_node_that_never_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick, "ANSWER_PART", 0.1)
    report, said = check(tmp_path, Starts("node3", argv=["sleep", "60"]), timeout_s=40)
    assert report.seconds < patience(20)
    assert list(report.bad) == ["node3"] and report.bad["node3"][0].startswith("no answer within ")
    assert report.state("node1", "reach") == "ok", said  # the others went on


def test_an_agent_that_breaks_is_quoted(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", "import sys; sys.exit('slurmstepd: error: no such account')"]
    report, _ = check(tmp_path, Starts("node1", argv=argv), ["node1"])
    assert list(report.bad) == ["node1"] and "ended with code 1" in report.bad["node1"][0]
    assert "no such account" in report.bad["node1"][0]
    report, _ = check(tmp_path, Starts("node1", argv=["/no/such/srun"]), ["node1"])
    assert "could not be started" in report.bad["node1"][0]


def test_a_wrong_interface_on_every_node_is_one_line(tmp_path: Path) -> None:
    report, said = check(tmp_path, Starts(), NODES[:2], interface="ens99")
    assert list(report.bad) == NODES[:2]
    line = next(line for line in said if "ens99" in line)
    assert line.startswith(
        "all nodes: interface: cluster.fabric.interface=ens99: this node has no such interface; it has "
    )


def test_a_node_that_cannot_reach_the_coordinator_answers_through_the_folder(tmp_path: Path) -> None:
    """Its plan names an address where nobody listens, as when its link is down."""
    code = (
        "import json, os, dtrain.preflight.agent as n; plan = json.loads(os.environ[n.PLAN]);"
        "plan['addresses'] = ['127.0.0.9']; plan['port'] = 1; os.environ[n.PLAN] = json.dumps(plan); n.main()"
    )
    report, said = check(tmp_path, Starts("node2", argv=[sys.executable, "-c", code]), NODES[:2])
    assert list(report.bad) == ["node2"], said
    assert "cannot reach the coordinator" in report.bad["node2"][0] and "127.0.0.9" in report.bad["node2"][0]
    assert report.state("node2", "reach") == "ok"  # the peers came through the folder, too


def test_a_stop_ends_it_early(tmp_path: Path) -> None:
    began = time.monotonic()
    settings = Preflight(timeout_s=40)
    report = settings.run(
        config(), tmp_path, ["node1"], Starts("node1", argv=["sleep", "60"]), print, stop=lambda: True
    )
    assert report.stopped and report.ok and time.monotonic() - began < patience(15)


# ---- the parts -----------------------------------------------------------------------------------------------


def test_clocks_are_measured_and_the_wrong_one_is_named(tmp_path: Path) -> None:
    desk = Desk("token", Messages(tmp_path))
    link = Link([("127.0.0.1", desk.port)], "token", "n", Messages(tmp_path))
    ahead = link.skew(lambda: time.time() + 5)
    assert ahead is not None and abs(ahead[0] - 5) < 0.5
    stranger = Link([("127.0.0.1", desk.port)], "wrong", "n", Messages(tmp_path))
    assert stranger.skew() is None and stranger.problems
    desk.close()

    def answers(**skews: float) -> dict[str, dict[str, Any]]:
        return {n: {"checks": [{"name": "clock", "text": f"{skew} 0.001"}]} for n, skew in skews.items()}

    found = quick.judge_clocks(answers(a=3.0, b=3.1, c=0.0), 1.0)  # the coordinator is on c, whose clock is wrong
    assert [f[0]["state"] for f in found.values()] == ["ok", "ok", "bad"] and "3.0 s behind" in found["c"][0]["text"]
    found = quick.judge_clocks(answers(a=0.0, b=-7.0), 1.0)
    assert found["b"][0]["text"].startswith("its clock is 7.0 s behind the coordinator")


def test_messages_go_over_tcp_or_through_files(tmp_path: Path) -> None:
    desk = Desk("token", Messages(tmp_path))
    tcp = Link([("127.0.0.1", 1), ("127.0.0.1", desk.port)], "token", "a", Messages(tmp_path / "nowhere"))
    files = Link([("127.0.0.1", 1)], "token", "b", Messages(tmp_path))
    for link in (tcp, files):
        link.post("report", {"from": link.node})
        assert desk.get(link.node, "report") == {"from": link.node}
        assert link.wait("peers", time.monotonic() + 0.1) == {}
    desk.publish("peers", {"x": 1})
    assert tcp.wait("peers", time.monotonic() + 20) == files.wait("peers", time.monotonic() + 20) == {"x": 1}
    desk.close()


def test_a_report_groups_and_escapes() -> None:
    sent = as_check("n1", {"name": "gpus", "state": "weird", "text": "\x1b[31mred", "evil": 1})
    assert sent == Check("n1", "gpus", "skipped", "red")
    checks = [Check(n, "shm", "bad", "too small", "more") for n in ("n1", "n2")] + [
        Check("n1", "disk", "ok", "x", short="9 GB")
    ]
    report = Report("quick", ["n1", "n2", "n3"], checks)
    lines = report.lines()
    assert [line.split() for line in lines[:4]] == [
        ["node", "shm", "disk"], ["n1", "BAD", "9", "GB"], ["n2", "BAD", "-"], ["n3", "-", "-"],
    ]  # fmt: skip
    assert lines[4:6] == ["n1, n2: shm: too small", "  fix: more"] and report.good == ["n3"]


def test_settings_are_checked() -> None:
    for bad in ({"tolerance": 2.0}, {"timeout_s": 1}, {"sizes_mib": [16, 1]}, {"sizes_mib": []}, {"outlier": -0.1}):
        with pytest.raises(ValueError, match=r"preflight\.\w+=.*\n  fix: "):
            Preflight(**bad)  # type: ignore[arg-type]


# ---- the command ---------------------------------------------------------------------------------------------


def test_the_command_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["preflight.min_shm_gib=0.001"]) == 0
    assert "preflight passed · quick" in capsys.readouterr().out and not list((tmp_path / "outputs").rglob("*.log"))
    assert main(["preflight.min_shm_gib=1e9"]) == 4
    said = capsys.readouterr().out
    assert "preflight.min_shm_gib=1e+09" in said and "details in outputs/.preflight-" in said


def test_for_a_cluster_the_command_asks_slurm_for_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match="no salloc on this machine\n  fix: "):
        main(["cluster=slurm", "cluster.nodes=2"])
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    called: list[list[str]] = []

    def become(file: str, command: list[str]) -> None:
        called.append(command)
        raise InterruptedError("the real one does not come back")

    monkeypatch.setattr(os, "execvp", become)
    with pytest.raises(InterruptedError):
        main(["cluster=slurm", "cluster.nodes=2", "cluster.partition=gpu", "cluster.gpus_per_node=4"])
    (command,) = called
    assert command[0] == "salloc" and {"--nodes=2", "--partition=gpu", "--gpus-per-node=4"} <= set(command)
    assert command[command.index("preflight") :][1:3] == ["cluster=slurm", "cluster.nodes=2"]
    with pytest.raises(ValueError, match="nothing to check"):
        main(["preflight=off"])


def test_it_starts_without_torch() -> None:
    modules = "dtrain.preflight.run, dtrain.preflight.agent, dtrain.preflight.full"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ).returncode == 0
    assert module.Starter  # what launchers type their starters with
