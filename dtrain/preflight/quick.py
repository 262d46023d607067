"""The quick preflight's coordinator, which runs beside the supervisor.

It starts one agent per node, each in its own process (a single srun would end with the first node that does not
answer), collects their reports, and compares versions, clocks and pairs across nodes. It always ends within its time
limit, and names missing nodes.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from dtrain.config.hardware import gpus_per_node, ranks_per_node
from dtrain.preflight import node_checks, reachability, versions
from dtrain.preflight.agent import PLAN, node_name
from dtrain.preflight.channel import Desk, Messages, waiting
from dtrain.preflight.interfaces import interfaces, usable
from dtrain.preflight.report import Check, Report, as_check
from dtrain.preflight.start import Starter, end, python_command, tail
from dtrain.util.format import as_dict

if TYPE_CHECKING:
    from dtrain.preflight.settings import Settings

ANSWER_PART = 0.65  # of the time limit, until a node must have answered; most of the rest is for the pairs
END_PART = 0.96
NO_CONTROLLER = re.compile(r"Unable to contact slurm controller")
UNREACHABLE = re.compile(r"Communication connection failure|Unable to contact|No route to host|Socket timed out")


class Quick:
    """One quick preflight: start the agents, collect reports, publish the peers, collect results, evaluate."""

    def __init__(
        self, settings: Settings, config: Mapping[str, Any], run_dir: Path, nodes: list[str], start: Starter,
        stop: Callable[[], bool],
    ) -> None:  # fmt: skip
        self.settings, self.config, self.run_dir, self.nodes, self.stop = settings, config, run_dir, nodes, stop
        self.start, self.began = start, time.monotonic()
        fabric = as_dict(config["cluster"].get("fabric"))
        self.interface: str | None = fabric.get("interface")
        self.addresses: dict[str, str] = {}  # where each node listens for the others
        self.messages = Messages(run_dir / "preflight" / f".messages-{secrets.token_hex(4)}")
        with contextlib.suppress(OSError):
            self.messages.folder.mkdir(mode=0o700)
        self.desk = Desk(secrets.token_hex(16), self.messages)
        needed, why_unknown = node_checks.checkpoint_bytes(config, run_dir)
        self.plan = {
            "token": self.desk.token, "port": self.desk.port, "addresses": usable(interfaces(), self.interface),
            "messages": str(self.messages.folder), "shared": self.messages.folder.is_dir() and len(nodes) > 1,
            "run_dir": str(run_dir), "interface": self.interface, "transport": fabric.get("transport"),
            "hca": fabric.get("hca"), "gpus": gpus_per_node(config["cluster"]), "needed_bytes": needed,
            "why_unknown": why_unknown, "min_shm_gib": settings.min_shm_gib, "timeout_s": settings.timeout_s,
            "world_size": len(nodes) * ranks_per_node(config["cluster"]), "host_bytes": host_bytes(config, len(nodes)),
            "reach_s": min(5.0, settings.timeout_s / 10),
        }  # fmt: skip

    def fill(self, report: Report) -> None:
        agents = {node: self.launch(node) for node in self.nodes}
        try:
            answers = self.gather("report", agents, self.began + ANSWER_PART * self.settings.timeout_s)
            for node in self.nodes:
                if node not in answers and not self.stop():
                    report.checks += self.silent(node, agents[node])
            listening = reachability.same_family({n: a["peers"] for n, a in answers.items() if a.get("peers")})
            self.addresses = {node: str(address[0]) for node, address in listening.items()}
            self.desk.publish("peers", {"peers": listening})
            until = self.began + END_PART * self.settings.timeout_s
            results = self.gather("result", {n: agents[n] for n in listening}, until)
            self.desk.publish("done", {"done": True})
            report.stopped = self.stop()
        finally:
            end((a for n, a in agents.items() if n not in self.addresses), patience_s=0)  # nothing more to report
            end(agents.values())
            self.desk.close()
            shutil.rmtree(self.messages.folder, ignore_errors=True)
        for node, answer in answers.items():
            findings = [as_dict(f) for f in answer.get("checks", [])]
            report.checks += [as_check(node, f) for f in findings if f.get("name") != "clock"]
        self.add(report, judge_clocks(answers, self.settings.max_skew_s))
        self.add(report, versions.compare({n: as_dict(a.get("versions")) for n, a in answers.items()}))
        for node in listening:
            if node not in results and not report.stopped:
                text = "answered at first, but not after connecting to the other nodes"
                report.checks.append(Check(node, "reach", "bad", text, f"see {self.log(node)}"))
        pairs = {n: as_dict(r) | {"speed_mb_s": answers[n].get("speed_mb_s")} for n, r in results.items()}
        self.add(report, reachability.judge_reach(pairs, self.interface))
        self.add(report, reachability.judge_streams(pairs, self.interface))

    def add(self, report: Report, found: dict[str, list[node_checks.Finding]]) -> None:
        report.checks += [as_check(node, finding) for node, findings in found.items() for finding in findings]

    def log(self, node: str) -> Path:
        return self.run_dir / "preflight" / f"{node.replace('/', '_')}.log"

    def launch(self, node: str) -> subprocess.Popen[bytes] | str:
        """Return the agent's process, or why it could not be started."""
        argv, env = python_command(self.config, "dtrain.preflight.agent"), {PLAN: json.dumps(self.plan)}
        why = ""
        for log in (self.log(node), Path(os.devnull)):  # on a full disk without a log: the agent itself reports why
            try:
                with contextlib.suppress(OSError):
                    self.log(node).unlink(missing_ok=True)
                return self.start(argv, [node], 1, env, log)
            except OSError as error:
                why = why or (f"{error.filename}: {error.strerror}" if error.filename else str(error))
        return why

    def gather(
        self, kind: str, agents: Mapping[str, subprocess.Popen[bytes] | str], until: float
    ) -> dict[str, dict[str, Any]]:
        """Collect what each node posts, until all have posted or died, or the time is up."""
        found: dict[str, dict[str, Any]] = {}
        dead: dict[str, float] = {}
        for _ in waiting(until):
            for node, agent in agents.items():
                answer = {} if node in found else self.desk.get(node, kind)
                if answer:
                    found[node] = answer
                elif isinstance(agent, str) or agent.poll() is not None:
                    dead.setdefault(node, time.monotonic())  # its file may become visible a moment later
            given_up = {n for n, since in dead.items() if time.monotonic() > since + 0.7}
            if set(agents) <= set(found) | given_up or self.stop():
                break
        return {node: found[node] for node in agents if node in found}

    def silent(self, node: str, agent: subprocess.Popen[bytes] | str) -> list[Check]:
        """Explain a node that never answered: it could not be started, its agent broke, or nothing arrived."""
        seconds = time.monotonic() - self.began
        ending = tail(self.log(node))
        fix = f"sinfo -n {node}; is it up, and does it see {self.run_dir}? cluster.exclude={node} leaves it out"
        if "SLURM_JOB_ID" not in os.environ:
            fix = f"is it up, and does it see {self.run_dir}?"
        own = []
        if isinstance(agent, str):
            text = f"the agent could not be started: {agent}"
        elif NO_CONTROLLER.search(ending):  # not the node's fault
            here = node_name()
            text = f"not checked: {here}, where this runs, cannot reach SLURM's controller, so no agent was started"
            fix = f"ip -br addr and ip route on {here}, scontrol ping there: is its link down, or the controller?"
            if node == here:
                found = node_checks.guarded("interface", lambda: node_checks.interface(self.interface, interfaces()))
                own = [as_check(node, finding) for finding in found if finding["state"] == "bad"]
        elif UNREACHABLE.search(ending):
            text = f"SLURM cannot reach it: the node is down, or its link is ({ending})"
        elif agent.poll() is not None:
            text = f"the agent ended with code {agent.poll()} before it answered" + (f": {ending}" if ending else "")
        else:
            text = f"no answer within {seconds:.0f} s" + (f"; its log says: {ending}" if ending else "")
        return [Check(node, "answer", "bad", text, fix), *own]


def host_bytes(config: Mapping[str, Any], num_nodes: int) -> int | None:
    """Bytes that the ranks of a node certainly hold in its memory; None: they use GPUs, or it is unknown."""
    if gpus_per_node(config["cluster"]):
        return None
    from dtrain.plan.host_memory import states_of  # imported late: it loads the planner

    total = states_of(config)
    return None if total is None else math.ceil(total / num_nodes)


def judge_clocks(answers: dict[str, dict[str, Any]], most: float) -> dict[str, list[node_checks.Finding]]:
    """Compare each clock with the median: with three nodes or more, the coordinator's may be the wrong one."""
    skews: dict[str, tuple[float, float]] = {}
    for node, answer in answers.items():
        for found in answer.get("checks", []):
            if as_dict(found).get("name") == "clock":
                with contextlib.suppress(ValueError):
                    skew, half = map(float, str(found.get("text")).split())
                    skews[node] = (skew, half)
    middle = median(skew for skew, _ in skews.values()) if len(skews) > 2 else 0.0
    judged = {}
    for node, (skew, half) in skews.items():
        away = skew - middle
        if abs(away) - half > most:
            against = "the other nodes" if len(skews) > 2 else "the coordinator"
            way = "ahead of" if away > 0 else "behind"
            text = f"its clock is {abs(away):.1f} s {way} {against} (preflight.max_skew_s={most:g})"
            judged[node] = [
                node_checks.finding("clock", "bad", text, "chronyc tracking on the node; systemctl restart chronyd")
            ]
        else:
            judged[node] = [
                node_checks.finding("clock", "ok", f"{1000 * away:+.1f} ms", short=f"{1000 * away:+.1f} ms")
            ]
    return judged
