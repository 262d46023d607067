"""Measuring ranks and their coordinator: start them on nodes, wait, and say which node broke or was behind."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtrain.config.hardware import gpus_per_node, ranks_per_node
from dtrain.preflight import network_env
from dtrain.preflight.channel import Desk, Messages, waiting
from dtrain.preflight.interfaces import interfaces, usable
from dtrain.preflight.start import Starter, end, python_command, tail
from dtrain.runs.protocol import LOST_PEER
from dtrain.util.format import as_dict, number


@dataclass(frozen=True)
class Trouble:
    """Why the ranks of a node did not finish."""

    node: str
    text: str
    fix: str


class Ranks:
    """As many ranks on each node as the run will have. They post what they measure; `get` returns it.

    `here`: the nodes on which this coordinator starts ranks; None: all of them.
    """

    longer = "a longer preflight.measure_s if it is only slow"

    def __init__(
        self, config: dict[str, Any], folder: Path, nodes: list[str], limit_s: float, here: list[str] | None = None
    ) -> None:
        self.config, self.folder, self.nodes, self.limit_s = config, folder, nodes, limit_s
        self.here = nodes if here is None else here
        self.tasks, self.gpus = ranks_per_node(config["cluster"]), gpus_per_node(config["cluster"]) > 0
        interface = as_dict(config["cluster"].get("fabric")).get("interface")
        messages = Messages(folder / f".messages-{secrets.token_hex(4)}")
        with contextlib.suppress(OSError):
            messages.folder.mkdir(mode=0o700)
        self.desk = Desk(secrets.token_hex(16), messages)
        self.plan: dict[str, Any] = {
            "token": self.desk.token, "port": self.desk.port, "addresses": usable(interfaces(), interface),
            "messages": str(messages.folder), "folder": str(folder), "nodes": nodes, "tasks": self.tasks,
            "gpus": self.gpus, "store_host": None, "join_s": min(60.0, limit_s / 4),
        }  # fmt: skip

    def run(self, module: str, variable: str, start: Starter, stop: Callable[[], bool]) -> list[Trouble]:
        """Start `module` on the nodes, with the plan in an environment variable, and wait until all have ended."""
        began, processes, died = time.monotonic(), {}, ""
        env = network_env.environment(self.config, os.environ) | {variable: json.dumps(self.plan)}
        argv = python_command(self.config, module)
        try:
            for node in self.here:
                self.log(node).unlink(missing_ok=True)
                processes[node] = start(argv, [node], self.tasks, env, self.log(node))
            for _ in waiting(began + self.limit_s):
                store = self.desk.get(f"{self.nodes[0]}:0", "store")
                if store and "store" not in self.desk.published:
                    self.desk.publish("store", store)
                if any(p.poll() for p in processes.values()):
                    time.sleep(1)  # the other ranks fail too, and report a lost peer
                    died = self.who_broke([n for n, p in processes.items() if p.poll()])
                if died or stop() or all(p.poll() == 0 for p in processes.values()):
                    break
            unfinished = [n for n, p in processes.items() if p.poll() != 0]
            codes = {n: p.poll() for n, p in processes.items()}
        finally:
            end(processes.values())
            self.desk.close()
            self.desk.messages.write("done", {"done": True})
        return [] if stop() else self.troubles(died, unfinished, codes, time.monotonic() - began)

    def clean_up(self) -> None:
        shutil.rmtree(self.desk.messages.folder, ignore_errors=True)

    def log(self, node: str) -> Path:
        return self.folder / f"{node.replace('/', '_')}-measure.log"

    def get(self, node: str, kind: str, local: int = 0) -> dict[str, Any]:
        return self.desk.get(f"{node}:{local}", kind)

    def who_broke(self, dead: list[str]) -> str:
        return next((n for n in dead if not LOST_PEER.search(tail(self.log(n), lines=30))), dead[0])

    def troubles(self, died: str, unfinished: list[str], codes: dict[str, int | None], seconds: float) -> list[Trouble]:
        """Explain an unfinished measurement: which node broke, or which was behind at the timeout."""
        if not unfinished:
            return []
        if died:
            output = tail(self.log(died)) or f"see {self.log(died)}"
            text = f"the measuring ranks ended with code {codes[died]}: {output}"
            return [Trouble(died, text, f"the whole log: {self.log(died)}")]
        stages = {
            n: [str(self.get(n, "stage", i).get("name") or "not started") for i in range(self.tasks)]
            for n in unfinished
        }
        since = {
            n: min(number(self.get(n, "stage", i).get("time")) or 0.0 for i in range(self.tasks)) for n in unfinished
        }
        first = min(since.values())  # the others wait for the node that entered its stage long before them
        behind = [n for n in unfinished if since[n] <= first + 1]
        return [
            Trouble(
                node,
                f"did not finish within {seconds:.0f} s; its ranks were at: {', '.join(sorted(set(stages[node])))}",
                f"see {self.log(node)}; {self.longer}",
            )
            for node in behind
        ]
