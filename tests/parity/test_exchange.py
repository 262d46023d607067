"""Any checkpoint, any strategy: what one layout saved another one loads, bit for bit, and goes on as the first would.

By default four strategies, one of each kind of layout, exchange with each other; `--all` does all pairs, and
`--matrix FILE` writes the results.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dtrain.checkpoint import shards, store
from dtrain.checkpoint.initial_weights import Drawn
from dtrain.config.build import build
from dtrain.config.mesh import batch_sizes
from dtrain.config.run_file import load
from dtrain.data.loader import Loader
from dtrain.train.process import seed_everything
from tests.world import STRATEGIES, losses, make_run, sizes_of, spawn, train

SAVED, STEPS = 4, 6  # a checkpoint after the 4th step; the 5th loss needs its weights, the 6th its optimizer state
# plain weights, shards, DeepSpeed's flat partitions, and stages of shards
FEW = ("ddp", "fsdp", "zero3", "3d")
OPTIONS = (
    f"train.steps={STEPS + 2}", f"train.stop_after={STEPS}", "train.max_grad_norm=0.5", "train.micro_batch_size=2",
    f"checkpoint.every={SAVED}", "checkpoint.keep=9",
)  # fmt: skip

OTHERS = {"muon": ("optim=muon", "optim.lr=3e-3"), "adafactor": ("optim=adafactor", "optim.lr=0.1")}


@dataclass
class Cell:
    source: str
    target: str
    loss_diff: float  # of the next loss
    second_loss_diff: float | None  # of the one after an update; None where the maths of one side differ by design
    state_equal: bool  # what the target saves again, without a step, has the bits of what it loaded
    differing: list[str]
    optimizer: str = "adamw"

    @property
    def passed(self) -> bool:
        return self.state_equal and self.loss_diff < 1e-5 and (self.second_loss_diff or 0.0) < 1e-5


def size_of(strategy: str, role: str, largest: int = 8) -> int:
    """Saved on the smallest number of ranks, loaded on the next: so they differ where they can."""
    sizes = sizes_of(strategy, [size for size in (2, 4, 8) if size <= largest])
    return sizes[0] if role == "source" else sizes[:2][-1]


def pairs(everything: bool) -> list[tuple[str, str]]:
    """(source, target)"""
    among = STRATEGIES if everything else FEW
    return [(source, target) for source, target in product(among, among) if everything or source != target]


def step_folder(run_dir: Path, step: int = SAVED) -> Path:
    return run_dir / "checkpoints" / f"step-{step:08d}"


def take_over(target: Path, sources: dict[str, Path], out: Path) -> None:
    """On each rank of the target's world: load each source's checkpoint, save it again, and go on for two steps."""
    cfg = load(target)
    sizes = build(cfg.strategy).resolve_mesh(dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"]))
    schedule = build(cfg.schedule, steps=cfg.train.steps)
    for name, source in sources.items():
        with torch.device("meta"):
            model = build(cfg.model)
        strategy = build(cfg.strategy)
        strategy.setup(
            model,
            build(cfg.optim, global_batch_size=cfg.train.global_batch_size),
            precision=build(cfg.precision),
            device=torch.device("cpu"),
            first=Drawn(cfg.train.seed + 1),
            micro_batch_size=batch_sizes(cfg, sizes)[1],
            max_grad_norm=cfg.train.max_grad_norm,
        )  # fmt: skip  (another seed: weights that are not loaded would show)
        manifest = store.read_manifest(step_folder(source))
        state = strategy.state_dict()
        store.load(step_folder(source), manifest, state)
        strategy.load_state_dict(state, manifest["extra"])
        store.save(out / name / "checkpoints", SAVED, strategy.state_dict(), {"extra": strategy.extra_state()}, 1)

        place = (cfg.train.global_batch_size, cfg.train.seed, strategy.data_rank, sizes.dp)
        data = Loader(build(cfg.data).dataset("train"), *place)
        went_on = []
        for step in range(SAVED, STEPS):
            strategy.set_lr(schedule(step))
            seed_everything(cfg.train.seed, step, strategy.random_rank)
            went_on.append(strategy.train_step(*data.batch(step * cfg.train.global_batch_size)).read().loss)
        if dist.get_rank() == 0:
            (out / name / "losses.json").write_text(json.dumps([went_on, strategy.tolerance]))


def differing(one: Path, other: Path) -> list[str]:
    """The tensors of model and optimizer, and the update counts, whose bits are not the same in two checkpoints."""
    contents = [store.read_manifest(path) for path in (one, other)]
    tensors = [{n for n in c.tensors if n.startswith(("model.", "optim."))} for c in contents]
    wrong = sorted(tensors[0] ^ tensors[1])
    with shards.Reader(one, contents[0]) as ours, shards.Reader(other, contents[1]) as theirs:
        for name in tensors[0] & tensors[1]:
            a, b = ours.whole(name), theirs.whole(name)
            if a.dtype != b.dtype or not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
                wrong.append(name)
    counts = [c["extra"]["optimizer"] for c in contents]
    return wrong + [
        f"count of {n}" for n in counts[0].keys() | counts[1].keys() if counts[0].get(n) != counts[1].get(n)
    ]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A run of a strategy, uninterrupted, with a checkpoint on the way; trained when it is first asked for."""
    folder = tmp_path_factory.mktemp("saved")

    @functools.cache
    def run_of(strategy: str) -> Path:
        size = size_of(strategy, "source")
        run = make_run(folder / strategy, *OPTIONS, f"strategy={strategy}", f"cluster.processes={size}")
        assert train(run, size) == [0] * size, strategy
        return run

    return run_of


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = make_run(tmp_path_factory.mktemp("one"), *OPTIONS, "checkpoint.every=0", "cluster.processes=1")
    assert train(run, 1) == [0]
    return run


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_save_on_the_way_changes_nothing(strategy: str, saved: Callable[[str], Path], one_process: Path) -> None:
    ours, theirs = losses(saved(strategy)), losses(one_process)
    allowed = build(load(saved(strategy)).strategy).tolerance or 1e-5
    assert max(abs(ours[s] - theirs[s]) for s in theirs) < allowed, "one process, which saves at the end only"


@pytest.fixture(scope="module")
def cells(request: pytest.FixtureRequest) -> Any:
    """What the tests below found out; written at the end, whole or not."""
    found: list[Cell] = []
    yield found
    if file := request.config.getoption("--matrix"):
        write_matrix(Path(file), found)


@pytest.mark.timeout(600)  # 20 s on a quiet machine, for all sources
@pytest.mark.parametrize("target", STRATEGIES)
def test_takes_over_from(
    target: str, saved: Callable[[str], Path], cells: list[Cell], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    everything = request.config.getoption("--all")
    sources = {source: saved(source) for source, t in pairs(everything) if t == target}
    found = exchanged(target, size_of(target, "target", 8 if everything else 4), sources, tmp_path)
    cells += found
    assert found and all(cell.passed for cell in found), [cell for cell in found if not cell.passed]


@pytest.fixture(scope="module")
def saved_by(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Path]]:
    """Runs of another optimizer under a strategy of each kind."""
    folder = tmp_path_factory.mktemp("optimizers")

    @functools.cache
    def runs_of(optim: str) -> dict[str, Path]:
        runs = {}
        for strategy in FEW:
            size = size_of(strategy, "source")
            options = (*OPTIONS, *OTHERS[optim], f"strategy={strategy}", f"cluster.processes={size}")
            runs[strategy] = make_run(folder / f"{strategy}+{optim}", *options)
            assert train(runs[strategy], size) == [0] * size, strategy
        return runs

    return runs_of


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", [*FEW, "tensor", "pipeline", "fairscale", "zero1"])
@pytest.mark.parametrize("optim", OTHERS)
def test_takes_over_from_optimizers_of_whole_matrices(
    optim: str, target: str, saved_by: Callable[[str], dict[str, Path]], cells: list[Cell], tmp_path: Path
) -> None:
    """Muon's momentum is cut like the weight; Adafactor's means of rows and columns are whole under every layout."""
    found = exchanged(target, size_of(target, "target", 4), saved_by(optim), tmp_path, *OTHERS[optim])
    for cell in found:
        cell.optimizer = optim
    cells += found
    assert found and all(cell.passed for cell in found), [cell for cell in found if not cell.passed]


INT8 = ("optim.state=int8", "model.dim=128")  # whose rows 4 tensor ranks can share in whole blocks


@pytest.fixture(scope="module")
def saved_int8(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs whose moments are in int8, under a strategy of each kind that has them."""
    folder, runs = tmp_path_factory.mktemp("int8"), {}
    for strategy in ("ddp", "fsdp", "3d"):
        size = size_of(strategy, "source")
        runs[strategy] = make_run(
            folder / strategy, *OPTIONS, *INT8, f"strategy={strategy}", f"cluster.processes={size}"
        )
        assert train(runs[strategy], size) == [0] * size, strategy
    return runs


@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", ["tensor", pytest.param("fsdp", marks=pytest.mark.slow),
                                    pytest.param("3d", marks=pytest.mark.slow)])  # fmt: skip
def test_takes_over_moments_in_int8(
    target: str, saved_int8: dict[str, Path], cells: list[Cell], tmp_path: Path
) -> None:
    found = exchanged(target, size_of(target, "target", 4), saved_int8, tmp_path, *INT8)
    for cell in found:
        cell.optimizer = "adamw, moments in int8"
    cells += found
    assert found and all(cell.passed for cell in found), [cell for cell in found if not cell.passed]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", ["ddp", "zero3", "fairscale"])
def test_takes_over_moments_in_another_dtype(target: str, saved_int8: dict[str, Path], tmp_path: Path) -> None:
    """From int8 to fp32 no value changes, so the next update is the same; only then are moments rounded, or not."""
    found = exchanged(target, size_of(target, "target", 4), saved_int8, tmp_path, "model.dim=128")
    assert all(cell.loss_diff < 1e-5 and (cell.second_loss_diff or 0.0) < 1e-5 for cell in found), found
    assert all(name.startswith("optim.") for cell in found for name in cell.differing)


def exchanged(target: str, size: int, sources: dict[str, Path], tmp_path: Path, *options: str) -> list[Cell]:
    """What became of the checkpoints of these runs under a strategy."""
    run = make_run(tmp_path / "run", *OPTIONS, *options, f"strategy={target}", f"cluster.processes={size}")
    spawn(size, take_over, run, sources, tmp_path, timeout=500)
    found = []
    for source, run_dir in sources.items():
        went_on, tolerance = json.loads((tmp_path / source / "losses.json").read_text())
        diffs = [abs(loss - losses(run_dir)[SAVED + 1 + i]) for i, loss in enumerate(went_on)]
        same_maths = tolerance is None and build(load(run_dir).strategy).tolerance is None
        wrong = differing(step_folder(run_dir), step_folder(tmp_path / source))
        names = (f"{source} × {size_of(source, 'source')}", f"{target} × {size}")
        found.append(Cell(*names, diffs[0], diffs[1] if same_maths else None, not wrong, wrong))
    return found


def write_matrix(file: Path, cells: list[Cell]) -> None:
    """FILE.json with every cell, FILE.md as a table: the larger of the two loss differences, ✓ for equal state."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.with_suffix(".json").write_text(json.dumps([vars(cell) | {"passed": cell.passed} for cell in cells], indent=1))
    optimizers = dict.fromkeys(cell.optimizer for cell in cells)
    tables = [table([cell for cell in cells if cell.optimizer == optimizer]) for optimizer in optimizers]
    file.with_suffix(".md").write_text("\n".join(tables))


def table(cells: list[Cell]) -> str:
    targets = list(dict.fromkeys(cell.target for cell in cells))
    text = {
        (c.source, c.target): f"{max(c.loss_diff, c.second_loss_diff or 0.0):.0e} {'✓' if c.state_equal else '✗'}"
        for c in cells
    }
    text = {cell: entry.replace("0e+00", "0") for cell, entry in text.items()}
    lines = ["| saved by ↓, resumed by → | " + " | ".join(targets) + " |", "|---" * (len(targets) + 1) + "|"]
    for source in sorted({cell.source for cell in cells}):
        lines.append(f"| {source} | " + " | ".join(text.get((source, target), "") for target in targets) + " |")
    return "\n".join(lines) + "\n"
