"""Does `dtrain comm bench` agree with a short torch script that shares no code with it?

    python benchmarks/comm_bench.py [--json benchmarks/results/comm-bench-cpu.json]

`plain` below is that script: torch.distributed, a clock, a median. Both run in the same world of 2 and of 4 gloo ranks,
in turns, so that a busy machine slows both; a row is the median of many ratios of neighbouring measurements.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from throughput import environment

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
SIZES = (4 * 2**10, 16 * 2**10, 64 * 2**10, 256 * 2**10, 2**20, 4 * 2**20)
CALLS, LEAST_BLOCKS = 20, 60


def plain(kind: str, num_bytes: int) -> float:
    """Seconds of a call, the median of the slowest rank."""
    n = dist.get_world_size()
    full, piece = torch.ones(num_bytes // 4), torch.ones(num_bytes // 4 // n)
    call = {
        "all_reduce": lambda: dist.all_reduce(full),
        "all_gather": lambda: dist.all_gather_into_tensor(full, piece),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(piece, full),
        "broadcast": lambda: dist.broadcast(full, src=0),
    }[kind]
    for _ in range(2):
        call()
    dist.barrier()
    seconds = []
    for _ in range(CALLS):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    worst = torch.tensor(statistics.median(seconds), dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


def rank(index: int, size: int, folder: str, blocks: int, most_s: float) -> None:
    from dtrain.comm import measure

    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=index, world_size=size)
    agree, cpu, rows = measure.slowest_of(dist.group.WORLD), torch.device("cpu"), []
    for kind in KINDS:
        for num_bytes in SIZES:
            ratios: list[float] = []
            ours: list[float] = []
            theirs: list[float] = []
            until = time.monotonic() + most_s
            while len(ratios) < blocks and (len(ratios) < LEAST_BLOCKS or agree([time.monotonic() - until])[0] < 0):
                turns: dict[str, float] = {}
                for who in ("ours", "theirs") if len(ratios) % 2 else ("theirs", "ours"):
                    if who == "ours":
                        found = measure.measure(kind, num_bytes, dist.group.WORLD, agree, cpu, 60.0, CALLS)
                        turns[who] = found.p50
                    else:
                        turns[who] = plain(kind, num_bytes)
                ours.append(turns["ours"])
                theirs.append(turns["theirs"])
                ratios.append(turns["ours"] / turns["theirs"])
            row = {"collective": kind, "ranks": size, "bytes": num_bytes, "blocks": len(ratios)}
            row |= {"ours_us": statistics.median(ours) * 1e6, "theirs_us": statistics.median(theirs) * 1e6}
            rows.append(row | {"ratio": statistics.median(ratios)})
            if index == 0:
                print({key: round(v, 3) if isinstance(v, float) else v for key, v in rows[-1].items()}, flush=True)
    if index == 0:
        (Path(folder) / "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--blocks", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=10.0, help="of one collective at one size, at most")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for size in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(rank, (size, folder, options.blocks, options.seconds), nprocs=size)
            rows += json.loads((Path(folder) / "rows.json").read_text())
    worst = max(rows, key=lambda row: abs(row["ratio"] - 1))
    print(f"{len(rows)} rows; the farthest from 1: {worst}")
    if options.json:
        load = {"load_average": [round(value, 1) for value in os.getloadavg()]}
        within = sum(abs(row["ratio"] - 1) <= 0.05 for row in rows)
        content = {"benchmark": "comm-bench", **environment(), **load, "within_5_percent": f"{within} of {len(rows)}"}
        options.json.write_text(json.dumps(content | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
