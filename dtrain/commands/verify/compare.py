"""Compare one strategy with one process: what is trained, the differences, and the tolerances.

`dtrain verify` and tests/parity both use this. A case is a small run with the real configuration and training loop.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import shutil
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dtrain.commands.verify import evidence, world
from dtrain.commands.verify.evidence import Finding
from dtrain.commands.verify.likely_cause import of_ratio
from dtrain.config import mesh
from dtrain.config.build import TRUST, build, typed_trust
from dtrain.config.files import options_of
from dtrain.config.run_file import load, save
from dtrain.launch.compose import hydra_config
from dtrain.launch.resolve import resolve
from dtrain.runs.folder import latest_checkpoint, parse_line, read_json, write_json
from dtrain.runs.protocol import DONE

# The smallest model with every part and one layer per stage of a four-stage pipeline; a step takes milliseconds.
SMALL = [
    "model.num_layers=4", "model.dim=32", "model.num_heads=4", "model.vocab_size=61", "model.vocab_multiple=16",
    "model.seq_len=16", "data=synthetic", "train.steps=20", "train.global_batch_size=8", "train.eval_every=0",
    "train.eval_batches=2", "checkpoint.every=0", "schedule.warmup_steps=5", "optim.lr=3e-3",
]  # fmt: skip
FULL, FEWER_STEPS = "fp32", "train.stop_after=8"  # 16 bits are slow on many CPUs, and their rounding shows at once
SIZES = (2, 4, 8)  # numbers of ranks to choose from
AXES = ("pp", "dp", "tp", "cp")


@dataclass(frozen=True)
class Variant:
    """A strategy with other settings that has a row of its own, in fp32.

    `shared`: settings that change the results, so the reference has them, too. `alike`: the reference has the strategy
    ddp and as many ranks. `resumes`: the run begins with the reference's checkpoint in the middle.
    """

    overrides: tuple[str, ...]
    size: int | None = None  # the smallest that suits the strategy
    shared: tuple[str, ...] = ()
    alike: bool = False
    resumes: bool = False


HYBRID = ("strategy=fsdp", "strategy.sharding=hybrid", "strategy.replica_size=2")
COMPRESSED = {
    # of topk a tenth: with one value in a hundred, 20 steps are too few to send each once
    word: (f"strategy.compress={word}", *(["strategy.compress_ratio=0.1"] if word == "topk" else []))
    for word in ("fp16", "bf16", "int8", "powersgd", "topk", "onebit")
}
VARIANTS = {f"ddp+{word}": Variant(("strategy=ddp", *settings), 2) for word, settings in COMPRESSED.items()} | {
    f"fsdp+{word}": Variant((*HYBRID, *settings), 4) for word, settings in COMPRESSED.items() if word != "powersgd"
}
# Uneven: samples of different lengths, with a random draw in each; for strategies that weigh micro-batches themselves.
# Dropout: the same random numbers as under ddp, also where activations are computed again in the backward pass.
UNEVEN, DROPOUT = ("data=synthetic", "data.uneven=true"), ("model.dropout=0.1",)
OTHER_DATA = {
    f"{name}+uneven": Variant((f"strategy={name}",), 2, UNEVEN) for name in ("ddp", "zero2", "pipeline", "ps")
} | {
    f"{name}+dropout": Variant((f"strategy={name}", "activation_checkpointing=full"), 2, DROPOUT, alike=True)
    for name in ("fsdp", "zero1")
}
# Sequences divided over ranks. Uneven: a rank may have no target at all.
CONTEXT = {
    f"fsdp+{kind}": Variant(("strategy=fsdp", "strategy.cp=2", f"strategy.cp_kind={kind}"), size)
    for kind, size in (("ring", 4), ("allgather", 2), ("ulysses", 2))
} | {
    "fsdp+ring4": Variant(("strategy=fsdp", "strategy.cp=4"), 4),
    "ddp+ring": Variant(("strategy=ddp", "strategy.cp=2"), 2),
    "tensor+ring": Variant(("strategy=tensor", "strategy.tp=2", "strategy.cp=2"), 4),
    "3d+ring": Variant(("strategy=3d", "strategy.cp=2"), 8),
    "fsdp+ring+uneven": Variant(("strategy=fsdp", "strategy.cp=4"), 4, UNEVEN),
}
# Moments in another dtype, also in one process. In a model of this size, most matrices are large enough for it.
STATES = {
    f"{name}+state-{word}": Variant((f"strategy={name}",), shared=(f"optim.state={word}", "model.dim=64"))
    for name, word in (("ddp", "bf16"), *((name, "int8") for name in ("ddp", "fsdp", "tensor", "pipeline", "3d")))
}


def variants() -> dict[str, Variant]:
    """Return all rows besides the strategies themselves: also of each strategy one that begins in the middle."""
    resumed = {f"{name}+resume": Variant((f"strategy={name}",), resumes=True) for name in options_of("strategy")}
    return VARIANTS | OTHER_DATA | CONTEXT | STATES | resumed


# ---- tolerances ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tolerance:
    """The allowed difference between a strategy and one process in the same precision."""

    loss: float  # of any step, and of the validation
    grad_norm: float = math.inf  # of any step, relative to the norm
    weight: float = math.inf  # at the end, relative to the sum of the learning rates: the farthest a weight can move
    gradient: float = math.inf  # of each parameter after the first update, relative to the gradient's norm


# Ranks sum in a different order than one process, and each sum is rounded. u is half the distance from 1 to the next
# number. The largest differences over all strategies except local_sgd, with SMALL on a CPU: fp32 at the two smallest
# sizes of each strategy (2 to 8 ranks), 16 bits at the smallest.
#
#              u        losses            norms             weights (relative to the learning rates' sum)
#   fp32    6.0e-8      4.8e-7 =    8 u   6.1e-7 =  10 u    2e-4; under ddp without qkv.bias 4e-6
#   bf16    3.9e-3      6.1e-4 = 0.16 u   1.6e-2 = 4.1 u    1.0
#   fp16    4.9e-4      9.6e-5 = 0.20 u   1.4e-3 = 2.9 u    0.34
#
# With seeds 1 to 3 (ddp, fsdp, tensor; 2 ranks) three values were larger: in fp32 1.9e-6 for a norm and 9e-4 for
# weights, in bf16 1.1 for weights. On an H200 (ddp, fsdp) none was larger.
#
# 4.8e-7 is one float32 step near 4: these losses cannot be closer. In 16 bits, zero and fsdp differ most (fsdp gathers
# all weights in 16 bits, not only those of matmuls): they differ more from one process than one process in 16 bits
# differs from fp32 (1e-4 to 3e-4 in bf16, 1e-5 to 3e-5 in fp16). So the tolerances are multiples of u: half for losses
# in fp16, eight for norms; that is two to three times the largest difference. gpt2-tiny is larger than SMALL: on a CPU
# without bf16 instructions its losses in bf16 differ by 3.4e-3 = 0.87 u (fsdp, zero3), so two u are allowed there.
#
# The largest weight differences (seen under ddp, in fp32 and bf16) are in qkv.bias. The true gradient of its key part
# is 0, because softmax ignores a constant, and Adam turns the rounding noise into steps of up to the learning rate.
# In fp32 eps (1e-8) damps them; 0.01 is a tenth of one update, so a missing update is detected. In 16 bits two runs
# can move in opposite directions at the full rate: 2. That detects garbage; losses and norms detect the rest. So it is
# with Lion in fp32, too: the sign of noise is a whole step.
#
# Moments in bf16 or int8 (optim.state) are rounded by the same random numbers under every layout. A gradient that
# differs in its last bit can still round a moment to the other of two neighbours, 0.4% or more from it. Largest
# differences of the rows STATES, seeds 0 to 3: losses 4.7e-5, norms 2.4e-4, gradients 7.6e-4, weights 0.016 of the
# learning rates' sum. The tolerances are two to four times that; 0.05 is half of one update.
TOLERANCES = {
    "float32": Tolerance(1e-5, 1e-5, 0.01, 1e-4),
    "bfloat16": Tolerance(2**-8 * 2, 2**-8 * 8, 2.0, 0.25),
    "float16": Tolerance(2**-11 / 2, 2**-11 * 8, 2.0, 0.1),
}


def tolerance(config: dict[str, Any], stated: float | None = None) -> Tolerance:
    """Return the tolerance of the precision; for a strategy with different math its own value, only for losses."""
    usual = TOLERANCES[config["precision"].get("dtype", "float32")]
    if config["optim"]["_target_"] == "dtrain.optim.build.lion":
        usual = replace(usual, weight=2.0)
    if config["optim"].get("state") in ("bf16", "int8"):
        at_least = {"loss": 1e-4, "grad_norm": 5e-4, "weight": 0.05, "gradient": 2e-3}
        usual = replace(usual, **{key: max(getattr(usual, key), value) for key, value in at_least.items()})
    return usual if stated is None else Tolerance(max(stated, usual.loss))


# ---- differences ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Differences:
    """The largest differences between two runs. Infinite: only one of them has a finite number."""

    loss: float
    grad_norm: float  # relative to the norm
    weight: float
    way: float  # the farthest a weight can move: the sum of the learning rates, and what bf16 weights are rounded by
    gradient: float | None = None  # of a parameter after one update, relative to its norm; None: was not saved
    first: int = 1  # step of the run
    steps: tuple[int, int] = (0, 0)  # the first at which the loss, and the norm, is farther away than allowed
    norm_ratio: float = 1.0  # at that step
    at: str = ""  # the weight that differs most
    findings: tuple[Finding, ...] = ()  # by name, from the notes of the ranks
    size: int = 1  # ranks

    def beyond(self, allowed: Tolerance) -> str:
        """Describe what exceeds the tolerance, or return ""."""
        loss_step, norm_step = self.steps
        cause = of_ratio(self.norm_ratio, self.size) if abs(self.norm_ratio - 1) > 0.05 else ""
        parts = [
            ("losses", self.loss, allowed.loss, f", first at step {loss_step}"),
            (
                "gradient norms",
                self.grad_norm,
                allowed.grad_norm,
                f", first at step {norm_step}{cause and ': '}{cause}",
            ),
            ("weights", self.weight, allowed.weight * self.way, f", most in {self.at}"),
        ]
        found = [f"{what} differ by {a:.1e} ({b:.1e} allowed){more}" for what, a, b, more in parts if not a <= b]
        return ", ".join([*(finding.text for finding in self.findings), *found])

    def named(self, allowed: Tolerance) -> str:
        """Return the sample, rank or parameter that differs first; or what differs if it has no such name."""
        if self.findings:
            return self.findings[0].named
        if not self.grad_norm <= allowed.grad_norm and self.steps[1] == self.first:
            return "gradient norm"
        if not self.weight <= allowed.weight * self.way:
            return self.at
        return "loss" if self.beyond(allowed) else ""


def compare(run_dir: Path, reference: Path, allowed: Tolerance | None = None, same_math: bool = True) -> Differences:
    """Compare a run with another one with the same steps, of which it may have the later ones only.

    `allowed`: what counts as a difference for the notes of the ranks; None: there are none.
    """
    ours, theirs = steps_of(run_dir), steps_of(reference)
    theirs = {step: row for step, row in theirs.items() if step >= min(ours)}
    assert ours.keys() == theirs.keys(), f"the runs logged different steps: {sorted(ours.keys() ^ theirs.keys())}"
    loss_at = {s: max(apart(ours[s].get(k), theirs[s].get(k)) for k in ("loss", "val_loss")) for s in theirs}
    norm_at = {s: apart(ours[s]["grad_norm"], theirs[s]["grad_norm"], relative=True) for s in theirs}
    weight, at = weights_apart(run_dir, reference)
    limits = allowed or Tolerance(math.inf)
    steps = tuple(next((s for s in sorted(d) if not d[s] <= limit), 0) for d, limit in
                  ((loss_at, limits.loss), (norm_at, limits.grad_norm)))  # fmt: skip
    norms = [rows[steps[1]]["grad_norm"] if steps[1] else 1.0 for rows in (ours, theirs)]
    found = Differences(
        loss=max(loss_at.values()), grad_norm=max(norm_at.values()), weight=weight, at=at,
        way=sum(row["lr"] for row in theirs.values()) + rounded_by(reference),
        first=min(theirs), steps=(steps[0], steps[1]), norm_ratio=norms[0] / norms[1] if all(norms) else 1.0,
    )  # fmt: skip
    return found if allowed is None else with_notes(found, run_dir, reference, limits, same_math)


def rounded_by(run_dir: Path) -> float:
    """How far rounding moves a weight of a norm, near 1, in a run that keeps its weights in bf16.

    bf16 has steps of 2^-7 there, more than a learning rate. A gradient that differs in its last bit rounds to the other
    of two neighbours: in four updates of fsdp on 3 ranks, a weight came to differ by 3 steps. Tolerances double this.
    """
    return 2 * 2**-7 if load(run_dir).precision.get("parameters") == "bfloat16" else 0.0


def with_notes(found: Differences, run_dir: Path, reference: Path, allowed: Tolerance, same_math: bool) -> Differences:
    """Add what the notes of the ranks and the states after an update show."""
    ours, theirs = evidence.notes_of(run_dir), evidence.notes_of(reference)
    assert ours.keys() == steps_of(run_dir).keys() <= theirs.keys(), "each rank notes each step"
    gradient, findings = named_differences(run_dir, reference, allowed, same_math)
    if same_math:
        assert gradient is not None, "both save the state after the first update"
        ends = [evidence.manifest(latest_checkpoint(folder)) for folder in (run_dir, reference)]
        findings += [f for f in [evidence.compare_progress(*ends)] if f]
    return replace(found, gradient=gradient, findings=tuple(findings), size=num_ranks(run_dir))


def named_differences(
    run_dir: Path, reference: Path, allowed: Tolerance, same_math: bool
) -> tuple[float | None, list[Finding]]:
    """Return how far gradients differ, and what differs by name, in the order of cause and effect.

    It uses what there is: of a run that has failed, the notes of its first steps.
    """
    ours, theirs = evidence.notes_of(run_dir), evidence.notes_of(reference)
    ours = {step: notes for step, notes in ours.items() if step in theirs}
    rows = steps_of(run_dir), steps_of(reference)
    checks = [evidence.compare_samples(ours, theirs), evidence.compare_random(ours, theirs)]
    checks += [compare_rates(*rows)] if same_math else []
    findings: list[Finding] = [f for f in checks if f]
    mine, other = evidence.saved_steps(run_dir), evidence.saved_steps(reference)
    if not same_math or not mine.keys() & other.keys():
        return None, findings
    step = min(mine.keys() & other.keys())
    limit = load(reference).train.max_grad_norm
    norms = [r.get(step, {}).get("grad_norm") if step == 1 and limit else None for r in rows]
    clipped = [min(1.0, limit / (norm + 1e-6)) if norm else 1.0 for norm in norms]
    update = evidence.compare_update(
        mine[step], other[step], step, allowed.gradient, rows[1][step]["lr"], (clipped[0], clipped[1]),
        num_ranks(run_dir),
    )  # fmt: skip
    return update.gradient, findings + update.findings


def compare_rates(ours: dict[int, dict[str, Any]], theirs: dict[int, dict[str, Any]]) -> Finding | None:
    for step in sorted(ours.keys() & theirs.keys()):
        a, b = ours[step].get("lr"), theirs[step].get("lr")
        if a is not None and b is not None and abs(a - b) > 1e-9 * abs(b):
            return Finding("learning rate", "learning rate", f"step {step}: the learning rate is {a:.3g}, not {b:.3g}")
    return None


def num_ranks(run_dir: Path) -> int:
    return len(list(run_dir.glob("logs/verify-*.jsonl")))


def steps_of(run_dir: Path) -> dict[int, dict[str, Any]]:
    """Return the lines of metrics.jsonl by step; lines of the same step are merged."""
    steps: dict[int, dict[str, Any]] = {}
    path = run_dir / "metrics.jsonl"
    for line in path.read_bytes().splitlines() if path.exists() else ():  # a run may have failed before
        row = parse_line(line)
        steps.setdefault(row["step"], {}).update(row)
    return steps


def apart(a: float | None, b: float | None, relative: bool = False) -> float:
    """Return the difference. None means not finite: a step skipped under fp16, and both runs must skip it."""
    if a is None or b is None:
        return 0.0 if a is b else math.inf
    return abs(a - b) / ((abs(b) or 1.0) if relative else 1.0)


def weights_apart(run_dir: Path, reference: Path) -> tuple[float, str]:
    """Return the largest difference of a weight at the end, and its name."""
    import torch

    from dtrain.checkpoint import store

    ours, theirs = latest_checkpoint(run_dir), latest_checkpoint(reference)
    assert ours and theirs, "a run that has ended has a checkpoint"
    most, at = 0.0, ""
    nothing = ("", torch.empty(0))
    pairs = itertools.zip_longest(store.weights(ours), store.weights(theirs), fillvalue=nothing)
    for (name, a), (other_name, b) in pairs:
        if name != other_name or a.shape != b.shape:
            return math.inf, name or other_name
        if ".running_" in name:  # batch norm statistics differ by design; losses and weights show errors
            continue
        difference = (a.double() - b.double()).abs().max().item()
        if not difference <= most:
            most, at = math.inf if math.isnan(difference) else difference, name
    return most, at


# ---- cases ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One world: a strategy, a number of ranks, a precision."""

    strategy: str
    size: int
    precision: str
    run_dir: Path
    config: dict[str, Any] = field(default_factory=dict)
    mesh: str = ""
    refused: str = ""  # why the configuration was rejected: not every number of ranks suits every strategy
    reference: str = ""  # the key of the run that it is compared with; "": that of its precision
    begins_with: Path | None = None  # a checkpoint of the reference
    save_after: tuple[int, ...] = (1,)  # steps after which the state is saved for the comparison
    mutant: str = ""  # a bug to train with (mutants.py)


def mesh_of(section: Any, size: int) -> mesh.MeshSizes:
    return mesh.resolve(size, **{axis: section[axis] for axis in AXES if axis in section})


def world_sizes(section: Any, sizes: Sequence[int] = SIZES) -> list[int]:
    """Return the sizes for which the strategy's axes form a mesh; if none, the product of its fixed axes."""
    fitting = []
    for size in sizes:
        with contextlib.suppress(ValueError):
            mesh_of(section, size)
            fitting.append(size)
    return fitting or [math.prod(section[axis] for axis in AXES if section.get(axis, -1) > 0)]


def compose(overrides: Sequence[str]) -> DictConfig:
    cfg = hydra_config(overrides)
    if "whole_below" in cfg.strategy and not any(o.startswith("strategy.whole_below=") for o in overrides):
        OmegaConf.update(cfg, "strategy.whole_below", 0)  # otherwise zero3 would not shard any weight of a small model
    return cfg


def several_passes(cfg: DictConfig, size: int, precision: str) -> int:
    """Return a micro-batch size that gives a data rank four accumulation steps: first, last, and some in between.

    One sample if the rank has fewer, for pipelines that four would not fill, and in 16 bits, as for the tolerances.
    """
    sizes = mesh_of(cfg.strategy, size)
    samples = cfg.train.global_batch_size // sizes.dp
    return 1 if sizes.pp > 2 or samples % 4 or precision != FULL else samples // 4


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
    """Train in the case's folder; return the error in one line, or ""."""
    (case.run_dir / "logs").mkdir(parents=True, exist_ok=True)
    save(case.run_dir, case.config)
    if case.begins_with is not None:
        shutil.copytree(case.begins_with, case.run_dir / "checkpoints" / case.begins_with.name)
    trust = {TRUST: ",".join(case.config["trust"])}
    with world.World(case.size, _rank, case.run_dir, case.save_after, case.mutant, env=trust | (env or {})) as ranks:
        # torch for the comparison: 2 s while the ranks work. Ctrl-C during the import may be lost or crash in C++
        with world.held_back(signal.SIGINT, signal.SIGTERM):
            import dtrain.checkpoint  # noqa: F401

        return world.failure(case.run_dir, ranks.join(timeout))


def _rank(run_dir: Path, save_after: Sequence[int], mutant: str = "") -> int:
    from dtrain.commands.verify import probe

    if mutant:
        from dtrain.commands.verify.mutations import MUTATIONS

        MUTATIONS[mutant]()
    probe.install(run_dir, save_after)
    code = world.train_rank(run_dir)
    if code == DONE and os.environ["RANK"] == "0":  # asked here, where the strategy's module is already imported
        cfg = load(run_dir)
        write_json(run_dir / "tolerance.json", {"stated": build(cfg.strategy, typed_trust()).tolerance})
    return code


def stated_tolerance(run_dir: Path) -> float | None:
    """Return the tolerance that a strategy with different math declares, after it ran."""
    return read_json(run_dir / "tolerance.json").get("stated")
