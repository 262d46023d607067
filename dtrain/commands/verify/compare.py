"""One strategy against one process: what is trained, how far apart the two are, and how far they may be.

`dtrain verify` and tests/parity both use this. A case is a small run with the real configuration and the real loop.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf

from dtrain import mesh, world
from dtrain.config import CONF, TRUST, build, load, save, typed_trust
from dtrain.contract import DONE
from dtrain.launch import resolve
from dtrain.rundir import latest_checkpoint, parse_line, read_json, write_json

# The smallest model that has every part, and a layer for each of four pipeline stages, in steps of milliseconds.
SMALL = [
    "model.num_layers=4", "model.dim=32", "model.num_heads=4", "model.vocab_size=61", "model.vocab_multiple=16",
    "model.seq_len=16", "data=synthetic", "train.steps=20", "train.global_batch_size=8", "train.eval_every=0",
    "train.eval_batches=2", "checkpoint.every=0", "schedule.warmup_steps=5", "optim.lr=3e-3",
]  # fmt: skip
FULL, FEWER_STEPS = "fp32", "train.stop_after=8"  # 16 bits are slow on many a CPU, and their rounding is seen at once
SIZES = (2, 4, 8)  # numbers of ranks to choose from
AXES = ("pp", "dp", "tp")


# ---- how far apart they may be -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tolerance:
    """How far a strategy may be from one process in the same precision."""

    loss: float  # of any step, and of the validation
    grad_norm: float = math.inf  # of any step, as a part of the norm
    weight: float = math.inf  # at the end, as a part of the way it can have gone: the sum of the learning rates


# Ranks sum in another order than one process does, and each sum is rounded. u is half the distance from 1 to the next
# number. The largest differences of all strategies but local_sgd, with SMALL on a CPU: fp32 at the two smallest sizes
# of each (2 to 8 ranks), 16 bits at the smallest.
#
#              u        losses            norms             weights (part of the way)
#   fp32    6.0e-8      4.8e-7 =    8 u   6.1e-7 =  10 u    2e-4; under ddp without qkv.bias 4e-6
#   bf16    3.9e-3      6.1e-4 = 0.16 u   1.6e-2 = 4.1 u    1.0
#   fp16    4.9e-4      9.6e-5 = 0.20 u   1.4e-3 = 2.9 u    0.34
#
# With seeds 1 to 3 (ddp, fsdp, tensor; 2 ranks) three figures were larger: in fp32 1.9e-6 of a norm and 9e-4 of the
# way, in bf16 1.1 of the way. On an H200 (ddp, fsdp) none was.
#
# 4.8e-7 is one step of a float32 near 4: these losses are as near as they can be written. In 16 bits zero and fsdp are
# the farthest (fsdp gathers all weights in 16 bits, not only those of products): farther from one process than that is
# from fp32 (1e-4 to 3e-4 in bf16, 1e-5 to 3e-5 in fp16). So u is the measure: half of it for losses, eight for norms;
# that is two to three times the farthest.
#
# The farthest weights (seen under ddp, in fp32 and bf16) are in qkv.bias. The true gradient of the keys' part is 0,
# as softmax ignores a constant, and Adam makes steps of up to the learning rate out of its rounding noise. In fp32 eps
# (1e-8) damps that; a hundredth of the way is a tenth of one update, so an update that is left out is seen. In 16 bits
# two runs can go opposite ways at full rate: 2. That finds garbage; losses and norms have to find the rest.
TOLERANCES = {
    "float32": Tolerance(1e-5, 1e-5, 0.01),
    "bfloat16": Tolerance(2**-8 / 2, 2**-8 * 8, 2.0),
    "float16": Tolerance(2**-11 / 2, 2**-11 * 8, 2.0),
}


def tolerance(config: dict[str, Any], stated: float | None = None) -> Tolerance:
    """What the precision allows; of a strategy with other maths, its own figure, and only for the losses."""
    usual = TOLERANCES[config["precision"].get("dtype", "float32")]
    return usual if stated is None else Tolerance(max(stated, usual.loss))


# ---- how far apart they are ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Differences:
    """Between two runs, each the largest that there is. Infinite: one has a number where the other has none."""

    loss: float
    grad_norm: float  # as a part of the norm
    weight: float
    way: float  # that a weight can have gone: the sum of the learning rates

    def beyond(self, allowed: Tolerance) -> str:
        """What is outside of the tolerance, in words, or ""."""
        parts = [
            ("losses", self.loss, allowed.loss),
            ("gradient norms", self.grad_norm, allowed.grad_norm),
            ("weights", self.weight, allowed.weight * self.way),
        ]
        return ", ".join(f"{what} differ by {a:.1e} ({b:.1e} allowed)" for what, a, b in parts if not a <= b)


def compare(run_dir: Path, reference: Path) -> Differences:
    """How far a run is from another one with the same steps."""
    ours, theirs = steps_of(run_dir), steps_of(reference)
    assert ours.keys() == theirs.keys(), f"not the same steps: {sorted(ours.keys() ^ theirs.keys())}"
    return Differences(
        loss=max(apart(ours[s].get(k), theirs[s].get(k)) for s in theirs for k in ("loss", "val_loss")),
        grad_norm=max(apart(ours[s]["grad_norm"], theirs[s]["grad_norm"], relative=True) for s in theirs),
        weight=weights_apart(run_dir, reference),
        way=sum(row["lr"] for row in theirs.values()),
    )


def steps_of(run_dir: Path) -> dict[int, dict[str, Any]]:
    """The lines of metrics.jsonl by step, those of one step together."""
    steps: dict[int, dict[str, Any]] = {}
    for line in (run_dir / "metrics.jsonl").read_bytes().splitlines():
        row = parse_line(line)
        steps.setdefault(row["step"], {}).update(row)
    return steps


def apart(a: float | None, b: float | None, relative: bool = False) -> float:
    """A null is a number that was not finite: the step was skipped, under fp16, and then it must be under both."""
    if a is None or b is None:
        return 0.0 if a is b else math.inf
    return abs(a - b) / ((abs(b) or 1.0) if relative else 1.0)


def weights_apart(run_dir: Path, reference: Path) -> float:
    import torch

    from dtrain import checkpoint

    ours, theirs = latest_checkpoint(run_dir), latest_checkpoint(reference)
    assert ours and theirs, "a run that has ended has a checkpoint"
    most = 0.0
    nothing = ("", torch.empty(0))
    pairs = itertools.zip_longest(checkpoint.weights(ours), checkpoint.weights(theirs), fillvalue=nothing)
    for (name, a), (other_name, b) in pairs:
        if name != other_name or a.shape != b.shape:
            return math.inf
        if ".running_" in name:  # a batch norm's statistics go their own way; losses and weights show if they are wrong
            continue
        difference = (a.double() - b.double()).abs().max().item()
        most = max(most, math.inf if math.isnan(difference) else difference)
    return most


# ---- what is trained -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One world: a strategy, a number of ranks, a precision."""

    strategy: str
    size: int
    precision: str
    run_dir: Path
    config: dict[str, Any] = field(default_factory=dict)
    mesh: str = ""
    refused: str = ""  # why the configuration is: not every number of ranks suits every strategy


def mesh_of(section: Any, size: int) -> mesh.MeshSizes:
    return mesh.resolve(size, **{axis: section[axis] for axis in AXES if axis in section})


def world_sizes(section: Any, sizes: Sequence[int] = SIZES) -> list[int]:
    """Those numbers of ranks that a strategy's axes make a mesh of; if none, the product of the axes that are fixed."""
    fitting = []
    for size in sizes:
        with contextlib.suppress(ValueError):
            mesh_of(section, size)
            fitting.append(size)
    return fitting or [math.prod(section[axis] for axis in AXES if section.get(axis, -1) > 0)]


def compose(overrides: Sequence[str]) -> DictConfig:
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = hydra.compose("config", list(overrides), return_hydra_config=True)
    if "whole_below" in cfg.strategy and not any(o.startswith("strategy.whole_below=") for o in overrides):
        OmegaConf.update(cfg, "strategy.whole_below", 0)  # or zero3 would keep every weight of a small model whole
    return cfg


def several_passes(cfg: DictConfig, size: int, precision: str) -> int:
    """A micro-batch of which a data rank takes four a step: a first, a last, and some between, which are summed.

    Of one sample where there are fewer, in a pipeline, which is to be filled, and in 16 bits: tolerances were found so.
    """
    sizes = mesh_of(cfg.strategy, size)
    samples = cfg.train.global_batch_size // sizes.dp
    return 1 if sizes.pp > 1 or samples % 4 or precision != FULL else samples // 4


def make_case(
    strategy: str, size: int, precision: str, cfg: DictConfig, run_dir: Path, accumulate: bool = False
) -> Case:
    OmegaConf.update(cfg, "cluster.processes", size)
    OmegaConf.update(cfg, "train.log_every", 1)  # every step is compared
    OmegaConf.update(cfg, "run_dir", str(run_dir))
    case = Case(strategy, size, precision, run_dir)
    try:
        if accumulate:
            OmegaConf.update(cfg, "train.micro_batch_size", several_passes(cfg, size, precision))
        config = resolve(cfg)
    except ValueError as error:
        return replace(case, refused=str(error))
    return replace(case, config=config, mesh=str(mesh_of(config["strategy"], size)))


def run(case: Case, timeout: float, env: dict[str, str] | None = None) -> str:
    """Train in the case's folder; what went wrong, in one line, or ""."""
    (case.run_dir / "logs").mkdir(parents=True, exist_ok=True)
    save(case.run_dir, case.config)
    trust = {TRUST: ",".join(case.config["trust"])}
    with world.World(case.size, _rank, case.run_dir, env=trust | (env or {})) as ranks:
        # torch, for the comparison: 2 s in which the ranks work. A Ctrl-C amid its import may be lost, or end in C++
        with world.held_back(signal.SIGINT, signal.SIGTERM):
            import dtrain.checkpoint  # noqa: F401

        return world.failure(case.run_dir, ranks.join(timeout))


def _rank(run_dir: Path) -> int:
    code = world.train_rank(run_dir)
    if code == DONE and os.environ["RANK"] == "0":  # asked here, where the strategy's module is imported already
        cfg = load(run_dir)
        write_json(run_dir / "tolerance.json", {"stated": build(cfg.strategy, typed_trust()).tolerance})
    return code


def stated_tolerance(run_dir: Path) -> float | None:
    """The figure of a strategy with other maths, once it was run."""
    return read_json(run_dir / "tolerance.json").get("stated")
