"""How long does a checkpoint hold up the training, and when is it safe? dtrain beside torch.save and DCP.

    python benchmarks/checkpoint.py [--model gpt2-1.5b] [--folder .] [--seconds 60] [--rows NAME ...] [--json FILE]

One process, on the GPU if there is one; weights and AdamW moments are random, and the same tensors for all. The ways to
save take turns, round after round until the time is used up; a row is the median of its rounds after the first, which
makes buffers and stands in a column of its own. Ours are made before, while a run's first steps run: what that costs
those is printed first.

stall: until the next step could start: the call, and until the device has nothing left to do.
durable: until the files are flushed to the disk (torch.save does not do that: an fsync is added, after its stall).
DCP writes in eight threads, as ours does; its asynchronous save keeps its pinned buffers. It has no checksums.

Then the stall as a loop feels it: the time of an eager training step alone, and while a save is under way.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from throughput import environment
from torch import Tensor, nn

from dtrain.checkpoint import shards
from dtrain.checkpoint.background import Saver
from dtrain.commands.verify import compare
from dtrain.config.build import build

State = dict[str, Tensor]
Save = Callable[[Path], tuple[Callable[[], Any], Path]]  # starts one; gives what waits for it, and where it is
GIB = 2**30
ROWS = (
    "torch.save", "dtrain, background", "dtrain", "DCP async_save", "DCP save", "dtrain, background, no checksums",
    "dtrain, no checksums",
)  # fmt: skip
IN_A_LOOP = ("torch.save", "dtrain, background", "DCP async_save")
META: dict[str, Any] = {"samples": 0, "data": "", "extra": {}}


def random_state(model: str, device: torch.device) -> State:
    """Weights and AdamW moments by their names in a checkpoint."""
    with torch.device("meta"):
        named = list(build(compare.compose([f"model={model}"]).model).named_parameters())
    state: State = {}
    for name, p in named:
        state[f"model.{name}"] = torch.rand(p.shape, device=device)
        for moment in ("exp_avg", "exp_avg_sq"):
            state[f"optim.{name}.{moment}"] = torch.rand(p.shape, device=device)
    return state


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


# ---- the ways to save ----------------------------------------------------------------------------------------


def with_torch_save(state: State) -> Save:
    def save(folder: Path) -> tuple[Callable[[], Any], Path]:
        folder.mkdir()
        torch.save(state, folder / "state.pt")

        def flush() -> None:
            with open(folder / "state.pt", "rb") as file:
                os.fsync(file.fileno())

        return flush, folder

    return save


def with_dcp(state: State) -> Save:
    def save(folder: Path) -> tuple[Callable[[], Any], Path]:
        dcp.save(state, checkpoint_id=folder, storage_writer=dcp.FileSystemWriter(folder, thread_count=8))
        return lambda: None, folder

    return save


def with_dcp_async(state: State) -> Save:
    writers: list[Any] = []  # one, which has the buffers

    def save(folder: Path) -> tuple[Callable[[], Any], Path]:
        if not writers:
            keep = torch.cuda.is_available()  # its kept buffers are always pinned, which a CPU alone cannot do
            writers.append(dcp.FileSystemWriter(folder, thread_count=8, cache_staged_state_dict=keep))
        response: Any = dcp.async_save(state, checkpoint_id=folder, storage_writer=writers[0])
        return getattr(response, "upload_completion", response).result, folder

    return save


class NoHash:
    """In the place of sha256, to see what it costs."""

    def update(self, block: object) -> None:
        pass

    def hexdigest(self) -> str:
        return ""


def with_dtrain(state: State, parent: Path, background: bool) -> tuple[Save, Saver]:
    saver = Saver(parent / f"dtrain-{background}", keep=1000, background=background)
    steps = iter(range(10**6))

    def save(folder: Path) -> tuple[Callable[[], Any], Path]:
        step = next(steps)
        saver.save(step, state, META)
        return saver.wait, saver.folder / f"step-{step:08d}"

    return save, saver


def unhashed() -> AbstractContextManager[Any]:
    return patch.object(shards, "hashlib", SimpleNamespace(sha256=NoHash))


# ---- the table -----------------------------------------------------------------------------------------------


def size_of(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def measure(save: Save, folder: Path, device: torch.device) -> tuple[float, float, int]:
    """(stall, until durable, bytes) of one save, which is deleted again."""
    synchronize(device)
    os.sync()  # what others left to be written is not this one's
    start = time.perf_counter()
    wait, where = save(folder)
    synchronize(device)
    stall = time.perf_counter() - start
    wait()
    durable = time.perf_counter() - start
    num_bytes = size_of(where)
    shutil.rmtree(where)
    return stall, durable, num_bytes


def rows_of(figures: dict[str, list[tuple[float, float, int]]]) -> list[dict[str, Any]]:
    rows = []
    for name, rounds in figures.items():
        later = rounds[1:] or rounds
        stall, durable = (statistics.median(r[i] for r in later) for i in (0, 1))
        rows.append({
            "row": name, "stall_s": stall, "durable_s": durable, "gib_per_s": rounds[0][2] / GIB / durable,
            "bytes": rounds[0][2], "first_stall_s": rounds[0][0], "rounds": len(rounds),
        })  # fmt: skip
    reference = next((row["stall_s"] for row in rows if row["row"] == "torch.save"), None)
    return [row | {"stall_of_torch_save": row["stall_s"] / reference if reference else None} for row in rows]


def show(rows: list[dict[str, Any]]) -> None:
    print(f"{'':<36}{'stall':>9}{'of torch.save':>15}{'durable':>10}{'GiB/s':>8}{'first stall':>13}{'rounds':>8}")
    for row in rows:
        share = row["stall_of_torch_save"]
        print(
            f"{row['row']:<36}{row['stall_s']:>7.2f} s{'-' if share is None else f'{share:.1%}':>15}"
            f"{row['durable_s']:>8.2f} s{row['gib_per_s']:>8.2f}{row['first_stall_s']:>11.2f} s{row['rounds']:>8}"
        )


# ---- inside a loop -------------------------------------------------------------------------------------------


def training_step(device: torch.device) -> Callable[[], None]:
    """An eager step of some hundred small operations, as Python's lock is what a thread might hold up."""
    dim, tokens, depth = (1024, 8192, 24) if device.type == "cuda" else (128, 256, 8)
    blocks = [
        nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        for _ in range(depth)
    ]
    model = nn.Sequential(*blocks).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    inputs = torch.randn(tokens, dim, device=device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(inputs).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()

    return step


def timed(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def felt(save: Save, folder: Path, step: Callable[[], None], device: torch.device) -> dict[str, Any]:
    """Median time of a step alone, and of those from the call of a save until it is durable; what the save added."""
    alone = statistics.median([timed(step) for _ in range(25)][5:])
    start = time.perf_counter()
    wait, where = save(folder)
    call = time.perf_counter() - start
    first = timed(step)  # the copies lie before it
    during = []
    ended: list[float] = []

    def until_durable() -> None:
        wait()
        ended.append(time.perf_counter())

    waiting = threading.Thread(target=until_durable)
    waiting.start()
    while not ended and len(during) < 2000:
        during.append(timed(step))
    waiting.join()
    shutil.rmtree(where)
    beside = statistics.median(during) if during else alone
    return {
        "step_s": alone, "step_beside_a_save_s": beside, "stall_s": call + max(0.0, first - alone),
        "added_s": call + first + sum(during) - alone * (1 + len(during)), "steps_beside": len(during),
    }  # fmt: skip


def felt_before(saver: Saver, state: State, step: Callable[[], None]) -> dict[str, Any]:
    """What making the buffers costs steps that run meanwhile, as a run's first ones do."""
    alone = statistics.median([timed(step) for _ in range(25)][5:])
    start = time.perf_counter()
    saver.prepare(state)
    call = time.perf_counter() - start
    during = []
    while saver.thread and saver.thread.is_alive():
        during.append(timed(step))
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "call_s": call, "added_s": call + sum(during) - alone * len(during), "step_s": alone}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", default="gpt2-1.5b" if device.type == "cuda" else "gpt2-124m")
    parser.add_argument("--folder", type=Path, default=Path("."), help="on the disk to measure; /dev/shm: no disk")
    parser.add_argument("--seconds", type=float, default=60, help="for the table: begin no round after them")
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS), metavar="NAME")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    state = random_state(options.model, device)
    step = training_step(device)
    parent = Path(tempfile.mkdtemp(dir=options.folder, prefix="checkpoint-benchmark-"))
    try:
        beside, first = with_dtrain(state, parent, background=True)
        waited, second = with_dtrain(state, parent, background=False)
        ways: dict[str, tuple[Save, Callable[[], AbstractContextManager[Any]]]] = {
            "torch.save": (with_torch_save(state), nullcontext),
            "dtrain, background": (beside, nullcontext),
            "dtrain": (waited, nullcontext),
            "DCP async_save": (with_dcp_async(state), nullcontext),
            "DCP save": (with_dcp(state), nullcontext),
            "dtrain, background, no checksums": (beside, unhashed),
            "dtrain, no checksums": (waited, unhashed),
        }
        figures: dict[str, list[tuple[float, float, int]]] = {}
        content: dict[str, Any] = {"benchmark": "checkpoint", **environment(), "cores": os.cpu_count()}
        content |= {"model": options.model, "folder": str(options.folder)}
        if "dtrain, background" in options.rows:
            made = content["buffers"] = felt_before(first, state, step)
            print(f"buffers made in {made['seconds']:.2f} s; steps meanwhile took {made['added_s']:.2f} s more in all")
        began, rounds = time.perf_counter(), 0
        while time.perf_counter() - began < options.seconds:
            for name in options.rows:
                save, without = ways[name]
                if rounds and time.perf_counter() - began >= options.seconds:
                    break
                with without():
                    figures.setdefault(name, []).append(measure(save, parent / "one", device))
                content["rows"] = rows_of(figures)
                write(options.json, content)
            rounds += 1
        show(content["rows"])
        content["loop"] = [
            {"row": name, **felt(ways[name][0], parent / "felt", step, device)}
            for name in IN_A_LOOP
            if name in options.rows
        ]
        for row in content["loop"]:
            print(
                f"{row['row']:<20} a step takes {1e3 * row['step_s']:.1f} ms alone, "
                f"{1e3 * row['step_beside_a_save_s']:.1f} ms beside a save ({row['steps_beside']} of them); "
                f"stall {row['stall_s']:.2f} s, a save adds {row['added_s']:.2f} s in all"
            )
        write(options.json, content)
        for saver in (first, second):
            saver.buffers.free()
    finally:
        shutil.rmtree(parent)
    dist.destroy_process_group()


def write(path: Path | None, content: dict[str, Any]) -> None:
    if path:  # after each row: a lent machine may be taken back
        path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
