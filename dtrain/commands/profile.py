"""`dtrain profile RUN`: print the tables that a profiled run wrote."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain.commands.run_parser import RunParser
from dtrain.errors import bad
from dtrain.profile.attribute import COMPUTE, PARTS, TOP
from dtrain.runs import comm_profile
from dtrain.runs.find import find_run
from dtrain.runs.folder import read_json
from dtrain.ui.console import LAUNCH, say, stdout_console
from dtrain.util.format import as_dict, clean, counted, gib, number, shell_path, short_path, without_nan

if TYPE_CHECKING:
    from rich.console import Console

LETTERS = 110  # maximum length of a kernel's name: two lines on 80 columns, beside the numbers

# The meaning of each part, for first-time readers of the table.
MEANING = {
    "compute": "forward and backward pass",
    "optimizer": "update and gradient norm",
    "exposed_communication": "not overlapped with compute",
    "copies": "to the GPU, or to another layout",
    "data_wait": "the next batch was not ready",
    "between_steps": "logging, evaluation, saving",
    "host_gaps": "idle GPU: launch-bound",
}

# The phases of summary.json's start_s (dtrain/train/startup.py).
START = {
    "command": "composing, checks, prediction",
    "ranks": "torchrun, or the forking process",
    "imports": "torch and dtrain, in the rank",
    "process_group": "until all ranks have joined",
    "data": "data sets; comparing the ranks",
    "model": "weights, sharding, optimizer",
    "loader": "a first sample; compiled graphs",
    "checkpoint": "finding and loading it",
    "prepare": "summary, hooks",
    "first_batch": "waiting for it",
    "compile": "tracing; compiling or loading",
    "first_step": "kernels, memory, timing of GEMMs",
}


def main(argv: list[str]) -> int:
    """Print where the time of a run's recorded steps goes: a table for each rank and kind of profile."""
    parser = RunParser("dtrain profile", description="Show where the time or memory of the recorded steps goes.")
    parser.add_argument("run", help="a run folder, a part of its name, or latest")
    parser.add_argument("--json", action="store_true", help="print data instead of tables")
    parser.add_argument(
        "--kernels", type=int, default=10, metavar="N",
        help=f"how many of the longest kernels, or of the lines that hold most memory: 1 to {TOP} (default 10)",
    )  # fmt: skip
    options = parser.parse_args(argv)
    if not 1 <= options.kernels <= TOP:
        rule = f"must be 1 to {TOP}, which is how many a profile keeps (its trace has all)"
        raise bad("--kernels", options.kernels, rule, f"--kernels {10 if options.kernels < 1 else TOP}")
    run_dir = find_run(options.run)
    folder = run_dir / "profiles"
    tables = read_tables(folder)
    reports = sorted(folder.glob("*.nsys-rep"))
    start = as_dict(read_json(run_dir / "summary.json").get("start_s"))
    if not tables and not reports and not start:
        raise ValueError(
            f"{short_path(run_dir)}: the run has no profile, or has not reached the steps that it records\n"
            f"  fix: {LAUNCH} … profile=torch (or profile=memory, nsys=true), then dtrain profile latest"
        )
    sent = comm_profile.profile(run_dir)
    if options.json:
        content = {"start_s": start, "tables": tables, "communication": sent, "nsys_reports": [str(r) for r in reports]}
        print(json.dumps(without_nan(content), indent=2))
        return 0
    console = stdout_console()
    if start:
        print_start(start, console)
    if not tables and not reports:
        say(console, f"where a step's time goes: {LAUNCH} … profile=torch, then dtrain profile latest")
    for table in tables:
        if table["kind"] == "torch":
            print_time(table, folder, options.kernels, console)
        else:
            print_memory(table, folder, options.kernels, console)
    if sent:
        print_communication(sent, options.kernels, console)
    for report in reports:
        say(console, (f"nsys stats {shell_path(report)}", "bold"), "  (or open it in Nsight Systems)")
    return 0


def print_start(start: dict[str, Any], console: Console) -> None:
    """Print what the time from the command to the first step went to."""
    total = number(start.get("total")) or 0.0
    rows = grid("start of the newest attempt, rank 0", "part", "s", "%", "")
    for phase, value in start.items():
        if phase != "total" and (seconds := number(value)) is not None:
            share = decimal(100 * seconds / total if total else None, 1)
            rows.add_row(phase.replace("_", " "), decimal(seconds, 2), share, START.get(phase, ""))
    rows.add_section()
    rows.add_row("total", decimal(total, 2), "100.0", "")
    console.print(rows)


def read_tables(folder: Path) -> list[dict[str, Any]]:
    """Read every table in the folder: time, then memory, each by rank. Unknown files are ignored."""
    found = [read_json(path) for path in folder.glob("*.json")]
    wanted = {"torch": ("parts", "phases", "kernels"), "memory": ("allocations",), "out-of-memory": ("allocations",)}
    whole = [t for t in found if t.get("kind") in wanted and all(k in t for k in ("rank", *wanted[t["kind"]]))]
    return sorted(whole, key=lambda t: (list(wanted).index(t["kind"]), number(t["rank"]) or 0))


def print_time(table: dict[str, Any], folder: Path, num_kernels: int, console: Console) -> None:
    steps = "–".join(str(s) for s in dict.fromkeys(table.get("steps") or []))
    title = (
        f"rank {table['rank']} · {table.get('device')} · steps {steps} · {milliseconds(table.get('step_ms'))} a step"
    )
    if number(table.get("step_ms_without_profiler")):
        title += f" ({milliseconds(table['step_ms_without_profiler'])} before the profiler began)"
    rows = grid(title, "part", "ms", "%", "")
    parts = as_dict(table["parts"])
    add(rows, "compute", table.get("compute"), MEANING["compute"])
    for part in PARTS:
        indent = "  " if part in COMPUTE else ""
        add(rows, indent + label(part), parts.get(part), MEANING.get(part, ""), dim=bool(indent))
    rows.add_section()
    add(rows, "step", {"ms": table.get("step_ms"), "percent": 100.0}, "")
    console.print(rows)
    phases = as_dict(table["phases"])
    say(console, "by phase: ", ", ".join(f"{label(p)} {milliseconds(as_dict(t).get('ms'))}" for p, t in phases.items()))
    total, exposed = (
        as_dict(table.get("communication")).get("ms"),
        as_dict(parts.get("exposed_communication")).get("ms"),
    )
    if number(total):
        say(
            console,
            f"communication: {milliseconds(total)} in all, {milliseconds(exposed)} of it not overlapped with compute",
        )
    kernels = grid("", "ms", "%", "calls", "longest kernels" if table.get("device") == "cuda" else "longest operations")
    from rich.text import Text  # Text disables rich's markup: brackets are part of the name

    longest = table["kernels"][:num_kernels]
    for kernel, name in zip(longest, short_names([clean(str(k.get("name"))) for k in longest]), strict=True):
        calls = number(kernel.get("calls")) or 0
        kernels.add_row(decimal(kernel.get("ms"), 2), decimal(kernel.get("percent"), 1), f"{calls:.4g}", Text(name))
    console.print(kernels)
    trace = folder / str(table.get("trace"))
    say(console, f"trace: {short_path(trace)}  (open it in ui.perfetto.dev or chrome://tracing)\n")


def print_communication(sent: dict[str, Any], num_rows: int, console: Console) -> None:
    """Print the messages by kind and size, and who waits for whom."""
    steps = f"{sent['num_steps']} step" + ("s" if sent["num_steps"] > 1 else "")
    rows = grid(f"communication · {counted(len(sent['ranks']), 'rank')} · {steps}", *comm_profile.HEADS)
    for message in sent["messages"][:num_rows]:
        rows.add_row(*comm_profile.cells(message))
    console.print(rows)
    say(console, comm_profile.HINT)
    if all(message["expected_gb_s"] is None for message in sent["messages"]):
        say(console, "expected: the hardware file has no rates; dtrain plan calibrate measures them")
    for wait in sent["waits"][:num_rows]:
        say(console, comm_profile.wait_text(wait))
    if sent["problem"]:
        say(console, sent["problem"])
    say(console, "")


def print_memory(table: dict[str, Any], folder: Path, num_lines: int, console: Console) -> None:
    when = "peak"
    if table["kind"] == "out-of-memory":
        when = f"out of memory, requested {size(table.get('asked_bytes'))} more at"
    title = (
        f"rank {table['rank']} · {when} {size(table.get('peak_bytes'))}, reserved {size(table.get('reserved_bytes'))}"
    )
    from rich.text import Text

    rows = grid(title, "GiB", "%", "tensors", "allocated at")
    for row in table["allocations"][:num_lines]:
        text = clean(str(row.get("where")))
        rows.add_row(size(row.get("bytes")), decimal(row.get("percent"), 1), str(row.get("count")), Text(text))
    console.print(rows)
    snapshot = folder / str(table.get("snapshot"))
    say(console, f"snapshot: {short_path(snapshot)}  (open it in pytorch.org/memory_viz)\n")


def short_names(names: list[str]) -> list[str]:
    """Shorten C++ template names, which can have 1,000 letters, if the shortened names stay distinct."""
    num_alike = Counter(name[: LETTERS - 1] for name in names)
    return [n if len(n) <= LETTERS or num_alike[n[: LETTERS - 1]] > 1 else n[: LETTERS - 1] + "…" for n in names]


def grid(title: str, *columns: str) -> Any:
    """Create a table that never truncates numbers and wraps long names."""
    from rich import box
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        name = column == "allocated at" or column.startswith("longest")
        text = name or column in ("", "part", "collective")
        width = 23 if column == "part" else None if text else 6
        table.add_column(
            column, justify="left" if text else "right", no_wrap=not name, overflow="fold" if name else "ellipsis",
            min_width=width,
        )  # fmt: skip
    return table


def add(table: Any, label: str, value: object, meaning: str, dim: bool = False) -> None:
    share = as_dict(value)
    style = "dim" if dim else None
    table.add_row(label, decimal(share.get("ms"), 2), decimal(share.get("percent"), 1), meaning, style=style)


def label(part: str) -> str:
    return {"matrix_products": "matmuls"}.get(part, part.replace("_", " "))


def decimal(value: object, digits: int) -> str:
    n = number(value)
    return "-" if n is None else f"{n:.{digits}f}"


def milliseconds(value: object) -> str:
    return f"{decimal(value, 2)} ms"


def size(value: object) -> str:
    n = number(value)
    return gib(None if n is None else n / 2**30)
