"""What does the metadata of a checkpoint cost at thousands of ranks? And are saves of few real ranks as fast as before?

    python benchmarks/checkpoint_ranks.py [--model llama-70b] [--ranks 16 64 256 1024 4096] [--json FILE]
    python benchmarks/checkpoint_ranks.py --real 2 4 8 16 [--beside OTHER_CHECKOUT] [--rounds 7]

The first: one process plays one rank of many, under fsdp with AdamW in fp32, with torch's "fake" process group,
DTensors without memory and the functions that a run calls; messages are delivered by hand, and sparse files stand for
the shards.
Network and disk time are not in it. What a rank does is timed for rank 0, which also writes the manifest, and for the
referee (writers.py) that has the most tensors.

The second: real processes on gloo save 48 tensors of 1 MiB each, replicated and sharded, several times. With `--beside`
another checkout takes turns with this one, and the ratio of the medians is printed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from throughput import environment

ROOT = Path(__file__).resolve().parent.parent
REAL = """
import statistics, sys, time
from pathlib import Path
import torch, torch.distributed as dist
try:
    from dtrain.checkpoint.background import Saver
    from dtrain.util.dtensor import Chunk
except ImportError:  # an older checkout
    from dtrain.saving import Saver
    from dtrain.shards import Chunk
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
state = {f"model.{i}": torch.rand(2**18) for i in range(24)}
state |= {f"optim.{i}": [Chunk(torch.rand(2**18 // size), (2**18,), (rank * 2**18 // size,))] for i in range(24)}
saves, calls = [], []
saver = Saver(Path(sys.argv[1]), keep=2, background=False)
for step in range(1, 14):
    dist.barrier()
    begin = time.perf_counter()
    saver.save(step, state, {"samples": 0, "data": "", "extra": {}})
    calls.append(time.perf_counter() - begin)
    saves += [report["save_s"] for report in saver.finished()]
if rank == 0:
    print(statistics.median(saves[3:]), statistics.median(calls[3:]), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def timed(function: Any, *arguments: Any) -> tuple[Any, float]:
    begin = time.perf_counter()
    return function(*arguments), time.perf_counter() - begin


def simulate(model: str, size: int, folder: Path) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from dtrain.checkpoint import manifest, shards, store, writers
    from dtrain.commands.verify import compare
    from dtrain.config.build import build
    from dtrain.util import dtensor

    os.environ.setdefault("LOCAL_WORLD_SIZE", "8")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    mesh = init_device_mesh("cpu", (size,))
    with torch.device("meta"):
        named = list(build(compare.compose([f"model={model}"]).model).named_parameters())
    shapes = {f"model.{name}": tuple(p.shape) for name, p in named}
    shapes |= {f"optim.{n}.{m}": tuple(p.shape) for n, p in named for m in ("exp_avg", "exp_avg_sq")}
    row: dict[str, Any] = {"ranks": size, "tensors": len(shapes)}

    def part(shape: tuple[int, ...], r: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        step = -(-shape[0] // size)
        low, high = min(shape[0], r * step), min(shape[0], (r + 1) * step)
        return (low, *(0 for _ in shape[1:])), (high - low, *shape[1:])

    def entries(r: int, names: Any) -> list[Any]:
        return [(n, *part(shapes[n], r), shapes[n], "float32") for n in names if 0 not in part(shapes[n], r)[1]]

    # ---- the first save: who writes what
    names_of: dict[int, list[str]] = {}
    for name in shapes:
        names_of.setdefault(writers.referee(name, size), []).append(name)
    own = entries(0, shapes)
    reports, seconds = timed(writers.reports, own, size)
    busiest = max(names_of, key=lambda r: len(names_of[r]))
    received = json.loads(json.dumps({r: entries(r, names_of[busiest]) for r in range(size)}))
    received = {int(r): value for r, value in received.items()}
    answers, judge_s = timed(writers.judge, received)
    row["referee_received_mb"] = sum(len(json.dumps(v)) for v in received.values()) / 1e6
    replies = {r: [["g", 1, 0]] * len(parcel) for r, parcel in reports.items()}
    mine, divide_s = timed(writers.divide, own, size, replies)
    confirmed = {r: [entry[:3] for entry in value] for r, value in received.items()}
    (_, _), describe_s = timed(writers.describe, received, confirmed)
    assert len(answers) == size and len(mine) == len(own)
    # the same functions for one tensor of each shape give the whole index: layouts are shared
    layout_of: dict[Any, Any] = {}
    described: dict[str, Any] = {}
    for name, shape in shapes.items():
        if shape not in layout_of:
            held = {r: entries(r, [name]) for r in range(size)}
            tensors, kept = writers.describe(held, {r: [e[:3] for e in value] for r, value in held.items()})
            layout_of[shape], described = tensors[name], described | kept
    index, index_s = timed(writers.index, [{n: layout_of[s] for n, s in shapes.items()}], [described])
    row["plan_first_s"] = seconds + judge_s + divide_s + describe_s
    row["plan_first_rank_0_s"] = row["plan_first_s"] + index_s

    # ---- every later save: the stall for planning
    state = {
        n: DTensor.from_local(torch.empty(part(s, 0)[1], device="meta"), mesh, [Shard(0)], shape=s, stride=strides(s))
        for n, s in shapes.items()
    }
    kept_writers = writers.Writers()
    kept_writers.entries, kept_writers.mine, kept_writers.index = own, mine, index
    files, first = timed(store.share_out, state, kept_writers)
    assert kept_writers.entries is own, "the plan was kept"
    row["plan_later_s"] = statistics.median(timed(store.share_out, state, kept_writers)[1] for _ in range(5))
    row["share_out_first_s"] = first

    # ---- the manifest, and what each rank reads of it
    meta = {
        "run": "0" * 32,
        "samples": 0,
        "data": "0" * 40,
        "extra": {"optimizer": {name: {"step": 1000.0} for name, _ in named}, "precision": {}},
    }
    specs: dict[str, Any] = {}
    for r in range(size):
        num_files = len(files)
        for i in range(num_files):
            stem = f"rank-{r:05d}-{i}" if i else f"rank-{r:05d}"
            specs[f"{stem}.safetensors"] = {"size": 2**40, "sha256": "0" * 64}
    path = folder / "step-00000001"
    path.mkdir(parents=True)
    _, row["write_manifest_s"] = timed(store.write_manifest, path, manifest.content(1, meta, specs, index))
    row["manifest_mb"] = (path / "manifest.json").stat().st_size / 1e6
    row["rank_0_received_mb"] = len(json.dumps(specs)) / 1e6
    header_mb = 0.0
    for r in (0, 1):
        for file, chunks in files.items():
            moved = {
                names: dtensor.Chunk(c.values, c.whole_shape, part(c.whole_shape, r)[0]) for names, c in chunks.items()
            }
            header_mb += write_sparse(path / file.replace("00000", f"{r:05d}"), moved) / 1e6
    row["header_mb"] = header_mb / 2
    saved, row["read_manifest_s"] = timed(store.read_manifest, path)
    _, row["check_files_s"] = timed(shards.check_files, path, saved, 0)

    # ---- load: which parts of which files this rank needs, in the same layout, and in one of half as many ranks
    def plan_load(both: bool) -> int:
        found = 0
        with shards.Reader(path, store.read_manifest(path)) as reader:
            for name, held in state.items():
                (chunk,) = dtensor.chunks_of(held)
                if both:
                    rows = sum(part(shapes[name], r)[1][0] for r in (0, 1))
                    values = torch.empty((rows, *chunk.shape[1:]), device="meta")
                    chunk = dtensor.Chunk(values, chunk.whole_shape, chunk.offset)
                found += sum(1 for _ in reader._parts(name, chunk))
        return found

    parts, row["plan_load_s"] = timed(plan_load, False)
    row["read_mb"] = row["manifest_mb"] + row["header_mb"]
    halved, row["plan_load_half_s"] = timed(plan_load, True)
    row["read_half_mb"] = row["manifest_mb"] + 2 * row["header_mb"]
    assert parts == len(own) and halved >= len(own)
    dist.destroy_process_group()
    return row


def strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def write_sparse(path: Path, chunks: Any) -> int:
    """A shard with a real header and a hole for the values; the bytes of the header."""
    from dtrain.checkpoint import shards

    header: dict[str, Any] = {"__metadata__": shards.metadata(chunks)}
    end = 0
    for (_, key), chunk in chunks.items():
        begin, end = end, end + chunk.nbytes
        header[key] = {"dtype": "F32", "shape": list(chunk.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return len(text)


def real(size: int, checkout: Path) -> list[float]:
    """Median seconds of a save by `size` processes of a checkout: until it is on disk, and with the read back."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "save.py"
        script.write_text(REAL)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
        found = subprocess.run(
            [*command, str(script), str(Path(folder) / "checkpoints")], capture_output=True, text=True,
            env=os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}, cwd=folder,
        )  # fmt: skip
        if found.returncode:
            raise SystemExit(f"{size} ranks of {checkout}:\n{found.stdout[-1000:]}{found.stderr[-4000:]}")
        return [float(figure) for figure in found.stdout.strip().splitlines()[-1].split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-70b")
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64, 256, 1024, 4096])
    parser.add_argument("--real", type=int, nargs="+")
    parser.add_argument("--beside", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if options.real:
        for size in options.real:
            ours, theirs = [], []
            for _ in range(options.rounds):
                ours.append(real(size, ROOT))
                theirs += [real(size, options.beside)] if options.beside else []
            row: dict[str, Any] = {"ranks": size}
            for i, name in enumerate(("save", "save_and_read_back")):
                row[f"{name}_s"] = statistics.median(figures[i] for figures in ours)
                if theirs:
                    row[f"{name}_beside_s"] = statistics.median(figures[i] for figures in theirs)
                    row[f"{name}_ratio"] = statistics.median(a[i] / b[i] for a, b in zip(ours, theirs, strict=True))
            rows.append(row)
            print(row, flush=True)
    else:
        for size in options.ranks:
            with tempfile.TemporaryDirectory() as folder:
                rows.append({"model": options.model} | simulate(options.model, size, Path(folder)))
            print({k: round(v, 4) if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)
    if options.json:
        kept = json.loads(options.json.read_text())["rows"] if options.json.exists() else []
        same = Counter((row.get("model"), row["ranks"]) for row in rows)
        kept = [row for row in kept if (row.get("model"), row["ranks"]) not in same]
        content = {"benchmark": "checkpoint_ranks", **environment(), "rows": kept + rows}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
