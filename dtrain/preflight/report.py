"""The result of a preflight: one table, and for every bad finding what was expected, what was found, and a fix."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dtrain.runs.folder import write_json
from dtrain.util.format import clean

if TYPE_CHECKING:
    from rich.console import Console

State = Literal["ok", "bad", "skipped"]


@dataclass(frozen=True)
class Check:
    """One finding about one node. `short` is shown in the table, `text` and `fix` below it if the state is bad."""

    node: str
    name: str
    state: State
    text: str
    fix: str = ""
    short: str = ""


def as_check(node: str, values: dict[str, Any]) -> Check:
    """Convert an agent's check: only known keys, all of them text without control characters."""
    texts = {key: clean(str(values.get(key) or ""))[:2000] for key in ("name", "text", "fix", "short")}
    state: State = "bad" if values.get("state") == "bad" else "ok" if values.get("state") == "ok" else "skipped"
    return Check(node, texts["name"], state, texts["text"], texts["fix"], texts["short"])


@dataclass
class Report:
    level: str
    nodes: list[str]
    checks: list[Check] = field(default_factory=list)
    seconds: float = 0.0
    stopped: bool = False  # a stop was requested, so not everything was checked

    @property
    def bad(self) -> dict[str, list[str]]:
        """What is wrong with each node that must not be used."""
        found: dict[str, list[str]] = {}
        for check in self.checks:
            if check.state == "bad":
                found.setdefault(check.node, []).append(f"{check.text}\n  fix: {check.fix}")
        return found

    @property
    def good(self) -> list[str]:
        bad = self.bad
        return [node for node in self.nodes if node not in bad]

    @property
    def ok(self) -> bool:
        return not self.bad

    def state(self, node: str, name: str) -> State | None:
        states = [c.state for c in self.checks if (c.node, c.name) == (node, name)]
        return next((s for s in ("bad", "ok", "skipped") if s in states), None)

    def write(self, path: Path) -> None:
        """Write preflight.json; on a full disk only the table is shown."""
        values = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "level": self.level, "ok": self.ok, "seconds": self.seconds,
            "nodes": self.nodes, "bad": self.bad, "checks": [asdict(c) for c in self.checks],
        }  # fmt: skip
        try:
            write_json(path, values)
        except OSError:
            path.with_name(f".{path.name}.tmp").unlink(missing_ok=True)

    def print(self, console: Console | None = None) -> None:
        from dtrain.ui.console import say, stdout_console

        console = console or stdout_console()
        for parts in self.parts():
            say(console, *parts)

    def lines(self) -> list[str]:
        """Return the same lines without colors, for a log."""
        return ["".join(clean(text) for text, _ in parts).rstrip() for parts in self.parts()]

    def parts(self) -> list[list[tuple[str, str]]]:
        """Return lines of (text, style)."""
        lines = self.table()
        for nodes, check in grouped(c for c in self.checks if c.state == "bad"):
            lines.append([(f"{self.who(nodes)}: {check.name}", "bold red"), (f": {check.text}", "")])
            lines.append([("  fix: ", "dim"), (check.fix, "cyan")])
        skipped: dict[str, list[str]] = {}
        for nodes, check in grouped(c for c in self.checks if c.state == "skipped"):
            skipped.setdefault(self.who(nodes), []).append(f"{check.name} ({check.text})")
        for who, texts in skipped.items():
            on = f" on {who}" if len(self.nodes) > 1 else ""
            lines.append([(f"not checked{on}: {'; '.join(texts)}", "dim")])
        verdict = "stopped" if self.stopped else "passed" if self.ok else f"failed on {', '.join(self.bad)}"
        style = "bold green" if self.ok else "bold red"
        return [*lines, [(f"preflight {verdict}", style), (f" · {self.level} · {self.seconds:.1f} s", "dim")]]

    def who(self, nodes: list[str]) -> str:
        return "all nodes" if len(nodes) == len(self.nodes) > 1 else ", ".join(nodes)

    def table(self) -> list[list[tuple[str, str]]]:
        """One line per node, one column per check; padded by hand, so that no terminal truncates a cell."""
        names = list(dict.fromkeys(c.name for c in self.checks))
        rows = [["node", *names]]
        for node in self.nodes:
            cells = [node]
            for name in names:
                mine = [c for c in self.checks if (c.node, c.name) == (node, name)]
                state = self.state(node, name)
                short = next((c.short for c in mine if c.state == state and c.short), state or "-")
                cells.append({"bad": "BAD", "skipped": "-", None: "-"}.get(state, short))
            rows.append(cells)
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        styles = {"BAD": "bold red", "-": "dim"}
        return [
            [
                (cell.ljust(width + 2), "bold" if i == 0 else styles.get(cell, ""))
                for cell, width in zip(row, widths, strict=True)
            ]
            for i, row in enumerate(rows)
        ]


def grouped(checks: Iterable[Check]) -> list[tuple[list[str], Check]]:
    """Merge equal findings of several nodes."""
    groups: dict[tuple[str, str, str], tuple[list[str], Check]] = {}
    for check in checks:
        nodes, _ = groups.setdefault((check.name, check.text, check.fix), ([], check))
        if check.node not in nodes:
            nodes.append(check.node)
    return list(groups.values())
