"""`dtrain comm bench`: measure collectives on this machine or a cluster, and the messages of a configuration."""

from __future__ import annotations

import difflib
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dtrain.config.hardware import gpus_per_node, ranks_per_node
from dtrain.errors import bad
from dtrain.runs.protocol import DONE, FAILED
from dtrain.util.format import clean, duration, size_text, three_digits

USAGE = """usage: dtrain comm bench [cluster=NAME] [model=… strategy=…] [setting=value ...] [OPTION ...]

Measure all_reduce, all_gather, reduce_scatter, all_to_all, broadcast and send/recv over sizes, inside a node and over
all nodes, and sends between each two nodes in each direction: time (p50, p99), bandwidth, what the hardware section
expects, and which link is slow. On this machine, on the nodes of a SLURM job, or by hand on each node.

  dtrain comm bench                                     the ranks of this machine
  dtrain comm bench cluster=slurm cluster.nodes=4       nodes of a SLURM job, which it asks for unless it runs in one
  dtrain comm bench model=llama-7b strategy=fsdp        also the messages of a step, and what a step would spend on them
  dtrain comm bench cluster=slurm cluster.launcher=torchrun cluster.nodes=2 cluster.master_addr=HOST \\
                    cluster.node_rank=0                 by hand: the same command on each node, with its own number

  --json             the same for scripts
  --svg FILE         bus bandwidth over size as a picture; needs matplotlib
  --sizes LIST       bytes of the messages, e.g. 64K,1M,16M
  --backend LIST     gloo, nccl or both, e.g. gloo,nccl; default: nccl where ranks have GPUs, otherwise gloo
  --seconds N        about how long to measure, without starting the ranks; default: 20

Exit codes: 0 measured, or one rank and so nothing to measure; 2 bad configuration; 3 a node failed."""

FLAGS, VALUES = ("--json",), ("--svg", "--sizes", "--backend", "--seconds")
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
CONFIGURATION = {"model", "strategy", "recipe"}  # one of them asks for the messages of a step
MOST_LINES = 12  # directions that are listed; of more, the slowest and the best


@dataclass
class Options:
    """The options given beside the settings."""

    overrides: list[str] = field(default_factory=list)
    json: bool = False
    svg: str | None = None
    sizes: list[int] | None = None
    backend: list[str] | None = None
    seconds: float = 20.0


def main(argv: list[str]) -> int:
    if {"-h", "--help"} & set(argv):
        print(USAGE)
        return DONE
    if argv[:1] != ["bench"]:
        raise ValueError(f"{' '.join(['dtrain comm', *argv[:1]])}: the only command is bench\n  fix: dtrain comm bench")
    options = read_options(argv[1:])
    from dtrain.launch.compose import compose

    config = compose(options.overrides)
    num_nodes, tasks = config["cluster"]["nodes"], ranks_per_node(config["cluster"])
    backends = chosen_backends(options.backend, gpus_per_node(config["cluster"]) > 0)
    if num_nodes * tasks == 1:
        fix = "cluster.processes=2, or more nodes"
        note = f"nothing to measure: the configuration has one rank, and one rank sends nothing (to measure: {fix})"
        print(json.dumps({"ranks": 1, "rows": [], "note": note}, indent=1) if options.json else note)
        return DONE
    if options.svg:
        check_picture(options.svg)
    folder = Path(tempfile.mkdtemp(prefix=".comm-bench-", dir=Path.cwd() if num_nodes > 1 else None))
    code = measure(config, folder, backends, options, argv)
    if code == DONE:  # otherwise the logs are there
        shutil.rmtree(folder, ignore_errors=True)
    return code


def measure(config: dict[str, Any], folder: Path, backends: list[str], options: Options, argv: list[str]) -> int:
    from dtrain.commands.preflight import nodes_and_starter
    from dtrain.preflight.bench import Bench, by_hand

    cluster, here = config["cluster"], None
    typed = {word.partition("=")[0].lstrip("+").partition(".")[0] for word in options.overrides}
    nodes, start = nodes_and_starter(config, argv, ["comm"], quiet=options.json)
    is_by_hand = cluster["nodes"] > 1 and cluster.get("launcher") == "torchrun"
    if is_by_hand:
        check_by_hand(cluster)
        nodes = [f"node{i}" for i in range(cluster["nodes"])]
        here = [nodes[int(cluster["node_rank"])]]
    wants = bool(typed & CONFIGURATION)
    bench = Bench(config, folder, nodes, options.seconds, backends, options.sizes, wants, here)
    bench.plan |= by_hand(config) if is_by_hand else {}
    troubles = bench.measure(start)
    for trouble in troubles:
        print(f"{trouble.node}: {clean(trouble.text)}\n  fix: {trouble.fix}", file=sys.stderr)
    if troubles:
        return FAILED
    if here not in (None, nodes[:1]):
        print(f"measured; {nodes[0]} prints the results")
        return DONE
    result = bench.result()
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        print("\n".join([*lines(result), *([bench.why_not] if bench.why_not else [])]))
    if options.svg:
        from dtrain.report.bandwidth import draw

        draw(result, Path(options.svg))
        print(f"wrote {options.svg}", file=sys.stderr)
    return DONE


# ---- the command line ----------------------------------------------------------------------------------------


def read_options(argv: Sequence[str]) -> Options:
    """Separate options from settings; the settings go to Hydra."""
    options, rest = Options(), list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            options.overrides.append(word)
            continue
        name, equals, value = word.partition("=")
        if name in FLAGS and not equals:
            options.json = True
        elif name in VALUES:
            value = value if equals else rest.pop(0) if rest else ""
            read: Any = {"--sizes": sizes, "--backend": backends, "--seconds": seconds}.get(name, text)
            setattr(options, name[2:], read(value))
        else:
            near = difflib.get_close_matches(name.lower(), (*FLAGS, *VALUES), 1)
            fix = f"did you mean {near[0]}?" if near else f"use one of {', '.join((*FLAGS, *VALUES))}"
            raise ValueError(f"{word}: there is no such option\n  fix: {fix}")
    return options


def text(value: str) -> str:
    if not value:
        raise bad("--svg", value, "needs a file", "--svg comm.svg")
    return value


def sizes(value: str) -> list[int]:
    """Parse 64K,1M,16M: ascending numbers of bytes."""
    found = [re.fullmatch(r"(\d+)([KMG]?)", part.strip(), re.IGNORECASE) for part in value.split(",")]
    numbers = [int(part[1]) * UNITS[part[2].upper()] for part in found if part]
    if len(numbers) < len(found) or not numbers or min(numbers) < 4 or sorted(set(numbers)) != numbers:
        raise bad("--sizes", value, "must be numbers of bytes in ascending order, at least 4", "--sizes 64K,1M,16M")
    return numbers


def backends(value: str) -> list[str]:
    names = value.split(",")
    if not set(names) <= {"gloo", "nccl"} or len(set(names)) < len(names):
        raise bad("--backend", value, "must be gloo, nccl or both", "--backend gloo,nccl")
    return names


def seconds(value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 1 <= number <= 3600:
        raise bad("--seconds", value, "must be a number of seconds from 1 to 3600", "--seconds 20")
    return number


def chosen_backends(asked: list[str] | None, gpus: bool) -> list[str]:
    if asked and "nccl" in asked and not gpus:
        raise bad("--backend", ",".join(asked), "NCCL needs ranks with GPUs, and these have none", "--backend gloo")
    return asked or ["nccl" if gpus else "gloo"]


def check_picture(file: str) -> None:
    """Before anything is measured: the file's name and the package that draws it."""
    import importlib.util

    if not file.endswith(".svg"):
        raise bad("--svg", file, "must end in .svg", f"--svg {file}.svg")
    if not Path(file).absolute().parent.is_dir():
        raise bad("--svg", file, "there is no such folder", "--svg comm.svg")
    if importlib.util.find_spec("matplotlib") is None:
        raise bad("--svg", file, "matplotlib is not installed", "pip install 'dtrain[notebook]', or --json")


def check_by_hand(cluster: dict[str, Any]) -> None:
    rank, last = cluster.get("node_rank"), cluster["nodes"] - 1
    if rank is None or not 0 <= int(rank) <= last:
        rule = "by hand, each node needs its own number"
        raise bad("cluster.node_rank", rank, rule, f"cluster.node_rank=0 to {last}, one on each node")
    if not cluster.get("master_addr"):
        rule = "by hand, the nodes need the address of node 0"
        raise bad("cluster.master_addr", cluster.get("master_addr"), rule, "cluster.master_addr=HOST")


# ---- what it prints ------------------------------------------------------------------------------------------


def lines(result: dict[str, Any]) -> list[str]:
    """The tables, then in words what is slow and what a step would spend."""
    nodes, tasks = result["nodes"], result["ranks_per_node"]
    out = []
    for backend in result["backends"]:
        for where in ("inside", "all"):
            rows = [row for row in result["rows"] if (row["backend"], row["where"]) == (backend, where)]
            if rows:
                several = len(nodes) > 1 and where == "all"
                ranks = f"{tasks} rank{'s' if tasks > 1 else ''}"
                place = f"{len(nodes)} nodes × {ranks}" if several else f"inside a node, {ranks}"
                note = "" if several or len(nodes) == 1 else ", the slowest node"
                out += [f"{backend}, {place}{note}", *table(rows), ""]
        out += [*direction_lines(result, backend), ""]
    if "messages" in result:
        out += [f"the messages of a step, strategy={result['step']['strategy']}", *message_table(result), ""]
    out += slow_lines(result)
    if "step" in result:
        out.append(step_line(result["step"]))
    return out


def table(rows: list[dict[str, Any]]) -> list[str]:
    head = (
        f"{'collective':<15}{'size':>9}{'p50':>10}{'p99':>10}{'alg GB/s':>10}{'bus GB/s':>10}{'expected':>10}  verdict"
    )
    out = [head]
    for row in rows:
        times = "".join(f"{time_text(row[key]):>10}" for key in ("p50", "p99"))
        rates = "".join(f"{three_digits(row[key]):>10}" for key in ("algorithm_gb_s", "bus_gb_s"))
        expected = "-" if row["expected"] is None else time_text(row["expected"])
        verdict = row["verdict"] or "-"
        if verdict == "slow":
            verdict = f"slow: {row['expected'] / row['p50']:.0%} of the expected rate"
        out.append(f"{row['kind']:<15}{size_text(row['num_bytes']):>9}{times}{rates}{expected:>10}  {verdict}")
    return out


def direction_lines(result: dict[str, Any], backend: str) -> list[str]:
    found = sorted((p for p in result["pairs"] if p["backend"] == backend), key=lambda p: float(p["gb_s"]))
    slow = {
        (d["from"], d["to"]) for s in result["slow"] if s["backend"] == backend for d in s["directions"]
    }  # fmt: skip
    shown = found if len(found) <= MOST_LINES else [*found[: MOST_LINES - 1], found[-1]]
    left_out = f", the slowest and the best of {len(found)}" if len(found) > len(shown) else ""
    out = [f"{backend}, sends in one direction{left_out}"] if found else []
    for pair in shown:
        mark = "   slow" if (pair["from"], pair["to"]) in slow else ""
        out.append(f"  {pair['from']} → {pair['to']}  {three_digits(pair['gb_s'])} GB/s{mark}")
    return out


def message_table(result: dict[str, Any]) -> list[str]:
    head = f"{'collective':<15}{'size':>9}{'calls':>7}{'group':>11}{'ranks':>6}{'p50':>10}{'a step':>10}  what"
    out = [head]
    for row in result["messages"]:
        start = f"{row['kind']:<15}{size_text(row['num_bytes']):>9}{row['count']:>7}{row['group']:>11}{row['ranks']:>6}"
        scaled = " (scaled from a smaller size)" if row["scaled"] else ""
        out.append(f"{start}{time_text(row['p50']):>10}{time_text(row['seconds']):>10}  {row['what']}{scaled}")
    return out


def slow_lines(result: dict[str, Any]) -> list[str]:
    best = {b: max((p["gb_s"] for p in result["pairs"] if p["backend"] == b), default=0.0) for b in result["backends"]}
    out = []
    for slow in result["slow"]:
        ways = ", ".join(f"{d['from']} → {d['to']} {three_digits(d['gb_s'])} GB/s" for d in slow["directions"][:4])
        more = f" and {len(slow['directions']) - 4} more" if len(slow["directions"]) > 4 else ""
        reached = f"the best direction has {three_digits(best[slow['backend']])} GB/s"
        out.append(f"slow: {slow['what']} ({slow['backend']}): {ways}{more}; {reached}")
    behind = [row for row in result["rows"] if row["verdict"] == "slow"]
    if behind:
        names = ", ".join(dict.fromkeys(row["kind"] for row in behind))
        out.append(
            f"slow: {len(behind)} of {len(result['rows'])} measurements are below 70% of what is expected: {names}"
        )
    if not out:
        known = any(row["verdict"] for row in result["rows"])
        why = "" if known else "; what to expect is not known (dtrain plan calibrate measures this machine)"
        out.append(f"no direction is slower than the others{why}")
    return out


def step_line(step: dict[str, Any]) -> str:
    calls = f"{step['calls']} calls with {size_text(step['bytes'])} in all"
    spent = f"{time_text(step['seconds'])} a step on communication here, in {calls}"
    about = "" if step["exact"] else "by estimated messages, "
    start = f"{about}strategy={step['strategy']} would spend {spent}"
    if not step["seconds"]:
        return f"strategy={step['strategy']} sends nothing in a step"
    if step["hidden_s"] is None:
        return f"{start}; how much of it is hidden is not known without the compute rates: dtrain plan calibrate"
    hidden, left = step["hidden_s"], step["seconds"] - step["hidden_s"]
    computed = f"the planner's {time_text(step['compute_s'])} of computation"
    share = hidden / step["seconds"]
    return f"{start}; {computed} hide {time_text(hidden)} ({share:.0%}) of it, and {time_text(left)} remain"


def time_text(seconds: float) -> str:
    if seconds >= 60:
        return duration(seconds)
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e6:.3g} µs"
