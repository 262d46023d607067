"""What do incremental checkpoints save, and do they lose anything? Full saves in turn with checkpoint.incremental.

    python benchmarks/incremental.py [--model OVERRIDE ...] [--rounds 5] [--folder .] [--rows NAME ...] [--json FILE]
    python benchmarks/incremental.py --kills 200 [--folder .] [--json FILE]

One process, on the GPU if there is one. Weights, moments and their names are those that dtrain saves; between two
rounds its AdamW makes one step with random gradients. Both ways then save the same state to the same disk, in turn, the
first of them alternating. The first round of each is full and not counted; a row has the medians of the others, and of
their ratios.

written: bytes of new files. stall: until training could continue. on disk: until `latest` names it.
read back: until older checkpoints are deleted, which needs a second look at what is on the disk.

--kills: a process that saves without a pause is killed by SIGKILL at random moments, and started again. After each
kill, every checkpoint that is there must be what was saved, bit for bit, and all that were to be kept must be there.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from throughput import environment
from torch import Tensor, nn

from dtrain.checkpoint import integrity, resume_point, store
from dtrain.checkpoint.background import Saver
from dtrain.commands.verify import compare
from dtrain.config.build import build
from dtrain.train.build import make

State = dict[str, Tensor]
GIB = 2**30
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
META: dict[str, Any] = {"samples": 0, "data": "", "extra": {}}
FULL_EVERY, KEEP = 8, 3
KEYS = {"save_gib": "GiB", "save_stall_s": "s", "save_s": "s", "read_back_s": "s"}
# name -> overrides, the parameters that are frozen (by the start of their names), whether frozen ones are saved
ROWS: dict[str, tuple[list[str], tuple[str, ...], bool]] = {
    "LoRA, as dtrain saves it (no base)": (["lora.rank=16"], (), False),
    "LoRA, base in the checkpoint": (["lora.rank=16"], (), True),
    "frozen embeddings": ([], ("embed.", "positions."), True),
    "bf16-pure": (["precision=bf16-pure"], (), True),
    "AdamW fp32": ([], (), True),
}


# ---- bytes and time ------------------------------------------------------------------------------------------


class Trained:
    """A model with its optimizer, and random gradients in the place of a backward pass."""

    def __init__(self, model: list[str], overrides: list[str], frozen: tuple[str, ...], save_frozen: bool) -> None:
        cfg = compare.compose([*model, *overrides])
        dtype = build(cfg.precision).parameters
        self.parameters = {
            name: nn.Parameter(
                torch.rand(p.shape, dtype=dtype, device=DEVICE), p.requires_grad and not name.startswith(frozen or "-")
            )
            for name, p in make(cfg).named_parameters()
        }
        self.optimizer = build(cfg.optim, global_batch_size=32)(self.parameters.items())
        self.save_frozen = save_frozen
        self.step()

    def step(self) -> None:
        for p in self.parameters.values():
            if p.requires_grad:
                p.grad = torch.empty_like(p).normal_(std=1e-3)
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-4
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def state(self) -> State:
        state = {f"model.{n}": p.detach() for n, p in self.parameters.items() if p.requires_grad or self.save_frozen}
        for name, p in self.parameters.items():
            for key, value in self.optimizer.state.get(p, {}).items():
                if isinstance(value, Tensor) and value.shape == p.shape:
                    state[f"optim.{name}.{key}"] = value
        return state


def measure(row: str, model: list[str], rounds: int, parent: Path) -> Iterator[dict[str, Any]]:
    """Save in both ways, round after round; yield the figures so far after each."""
    trained = Trained(model, *ROWS[row])
    whole = sum(t.nbytes for t in trained.state().values()) / GIB
    found: dict[str, list[dict[str, float]]] = {"full": [], "incremental": []}
    with Saver(parent / "full", KEEP) as full, Saver(parent / "incremental", KEEP, incremental=FULL_EVERY) as linked:
        savers = {"full": full, "incremental": linked}
        for i in range(rounds + 1):
            trained.step()
            for way in sorted(savers, reverse=bool(i % 2)):
                saver = savers[way]
                if DEVICE.type == "cuda":
                    torch.cuda.synchronize()
                os.sync()  # what the other one has left to the disk is not this one's time
                begin = time.perf_counter()
                saver.save(i + 1, trained.state(), META)
                saver.wait()
                (figures,) = saver.finished()
                found[way].append(figures | {"read_back_s": time.perf_counter() - begin})
            yield {"row": row, "model": model, "rounds": i, "checkpoint_gib": whole, **summary(found)}
    for folder in ("full", "incremental"):
        shutil.rmtree(parent / folder)


def summary(found: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians of each way, and of the ratios of its rounds: what comes and goes on the machine hits both of a round."""
    pairs = list(zip(found["full"][1:], found["incremental"][1:], strict=False))
    if not pairs:
        return {}
    result: dict[str, Any] = {
        way: {key: statistics.median(pair[i][key] for pair in pairs) for key in KEYS}
        for i, way in enumerate(("full", "incremental"))
    }
    return result | {"ratio": {key: statistics.median(new[key] / old[key] for old, new in pairs) for key in KEYS}}


def show(rows: list[dict[str, Any]]) -> None:
    print("| | checkpoint | written | stall | on disk | read back |\n|---|---|---|---|---|---|")
    for row in rows:
        full, new, ratio = row["full"], row["incremental"], row["ratio"]
        cells = [f"{full[key]:.2f} → {new[key]:.2f} {unit}, × {ratio[key]:.2f}" for key, unit in KEYS.items()]
        print(f"| {row['row']} | {row['checkpoint_gib']:.2f} GiB | {' | '.join(cells)} |")


# ---- kills ---------------------------------------------------------------------------------------------------


def state_at(step: int) -> State:
    """A state that is a function of the step: some tensors never change, some do now and then, some always."""
    sizes = {"model.frozen": 400_000, "model.seldom": 100_000, "model.sparse": 100_000, "model.trained": 100_000}
    state = {name: torch.arange(size, dtype=torch.float32) for name, size in sizes.items()}
    state["model.seldom"] += step // 7
    state["model.sparse"][1000 + step % 1000] += step  # where a sample does not look
    state["model.trained"] += step
    return state | {"optim.trained.exp_avg": state["model.trained"] * 0.5}


def writer(folder: Path, acknowledge: int) -> None:
    """Resume and save every step until killed; each step that is on disk goes into the pipe."""
    found = resume_point.newest_good(folder, lambda text: os._exit(9))
    step = found[1]["step"] if found else 0
    with Saver(folder, KEEP, incremental=4) as saver:
        while True:
            step += 1
            saver.save(step, state_at(step), META)
            saver.wait()
            os.write(acknowledge, step.to_bytes(8, "little"))


def kills(count: int, folder: Path) -> dict[str, Any]:
    """Kill a writer so often; raise if anything acknowledged is lost, or is not what was saved."""
    rng = random.Random(0)
    acknowledged, complete = 0, list[int]()
    met = {"during_a_save": 0, "with_links": 0, "checkpoints_compared": 0}
    for i in range(count):
        reading, writing = os.pipe()
        process = os.fork()
        if process == 0:
            try:
                writer(folder, writing)
            finally:
                os._exit(1)
        os.close(writing)
        first = os.read(reading, 8)  # the writer has resumed and saved once
        time.sleep(rng.random() * 0.5)
        os.kill(process, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL, "the writer failed"
        data = first
        while block := os.read(reading, 2**16):
            data += block
        os.close(reading)
        new = [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data) // 8 * 8, 8)]
        acknowledged += len(new)
        met["during_a_save"] += any(folder.glob(".attempt-*"))
        there = sorted(folder.glob("step-????????"))
        met["with_links"] += any(p.stat().st_nlink > 1 for path in there for p in path.glob("rank-*"))
        steps = {int(path.name[5:]) for path in there}
        # the newest may be complete although the writer did not live to say so
        complete = sorted({*complete, *new, max(steps)})[-KEEP:]
        assert set(complete) <= steps, f"kill {i}: {complete} were complete, {sorted(steps)} are there"
        for path in there:
            expected = state_at(int(path.name[5:]))
            target = {name: torch.zeros_like(t) for name, t in expected.items()}
            assert not integrity.verify(path), path
            store.load(path, store.read_manifest(path), target)
            assert all(torch.equal(target[name], t) for name, t in expected.items()), path
            met["checkpoints_compared"] += 1
    return {"kills": count, "acknowledged": acknowledged, **met}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="*", default=["model=gpt2-124m"], help="overrides", metavar="OVERRIDE")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("."), help="on the disk to measure")
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS), metavar="NAME")
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--json", type=Path, help="rows and kills that the file has, and that are not measured, stay")
    options = parser.parse_args()
    torch.set_num_threads(1)  # a forked process has no others, and on a busy machine they wait for each other
    parent = Path(tempfile.mkdtemp(dir=options.folder, prefix="incremental-benchmark-"))
    content: dict[str, Any] = {}
    if options.json and options.json.exists():
        content = json.loads(options.json.read_text())
    content |= {"benchmark": "incremental", **environment(), "full_every": FULL_EVERY, "keep": KEEP}

    def write() -> None:
        if options.json:
            options.json.write_text(json.dumps(content, indent=1) + "\n")

    try:
        if options.kills:
            content["kills"] = kills(options.kills, parent / "checkpoints")
            print(content["kills"])
            write()
            return
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        rows = {row["row"]: row for row in content.get("rows", [])}
        for name in options.rows:
            for row in measure(name, options.model, options.rounds, parent):
                rows[name] = row
                content["rows"] = [rows[name] for name in ROWS if name in rows]
                write()
        show(content["rows"])
        dist.destroy_process_group()
    finally:
        shutil.rmtree(parent)


if __name__ == "__main__":
    main()
