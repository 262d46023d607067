"""What a run of `dtrain verify` did differently, by name: the sample, the rank, the parameter (notes of probe.py)."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain.commands.verify.likely_cause import likely_cause

if TYPE_CHECKING:
    from torch import Tensor

Notes = dict[int, list[dict[str, Any]]]  # by step, of all ranks
LINEAR = ("exp_avg", "momentum_buffer")  # state that after the first update is the gradient times a constant
# A gradient that is nearly 0 by nature (a bias before a norm) is noise. It is compared with the others' size.
SMALLEST = 1e-2


@dataclass(frozen=True)
class Finding:
    """One difference from the reference run."""

    what: str  # samples, random numbers, gradient, weight, optimizer state, progress
    named: str  # the parameter, the sample or the rank
    text: str


# ---- samples and random numbers ------------------------------------------------------------------------------------


def notes_of(run_dir: Path) -> Notes:
    notes: Notes = defaultdict(list)
    for path in sorted(run_dir.glob("logs/verify-*.jsonl")):
        for line in path.read_text().splitlines():
            note = json.loads(line)
            notes[note["step"]].append(note)
    return notes


def compare_samples(ours: Notes, theirs: Notes) -> Finding | None:
    """Find the first step whose global batch is another one: a sample that is missing, or read twice."""
    known = {s: i for notes in theirs.values() for n in notes for s, i in zip(n["samples"], n["ids"], strict=True)}
    for step in sorted(ours):
        parts: dict[int, list[int]] = {}
        for note in ours[step]:
            if parts.setdefault(note["data_rank"], note["samples"]) != note["samples"]:
                where = f"data rank {note['data_rank']}"
                text = f"step {step}: the ranks of {where}, which compute one sample together, got different samples"
                return Finding("samples", where, text)
        wanted = Counter(s for part in {n["data_rank"]: n["samples"] for n in theirs[step]}.values() for s in part)
        got = Counter(s for part in parts.values() for s in part)
        if got == wanted:
            continue
        missing, extra = list((wanted - got).elements()), list((got - wanted).elements())
        text = f"step {step}: {len(missing)} of {wanted.total()} samples differ"
        named = f"sample {known[missing[0]]}" if missing else f"sample {known.get(extra[0], 'unknown')}"
        text += f"; {named} is not read" if missing else f"; {named} is read too often"
        if extra:
            first = extra[0]
            from_step = next((s for s, notes in theirs.items() if any(first in n["samples"] for n in notes)), None)
            if got[first] > 1 and first in known:
                text += f", sample {known[first]} is read {got[first]} times"
            elif from_step is not None:
                text += f", sample {known[first]} of step {from_step} is read in its place"
            else:
                text += ", a sample is read in its place that one process never reads"
        return Finding("samples", named, text)
    return None


def compare_random(ours: Notes, theirs: Notes) -> Finding | None:
    """Ranks that compute the same activations must draw the same random numbers, all others different ones."""
    earlier: dict[int, int] = {}  # random state → the step that drew from it
    for step in sorted(ours):
        states: dict[tuple[int, int], int] = {}
        owners: dict[int, str] = {}
        for note in ours[step]:
            stage, data, _ = note["place"]
            who, state = f"rank {note['rank']}", note["random"]
            if states.setdefault((stage, data), state) != state:
                text = f"step {step}: {who} draws other random numbers than the rank that holds the same activations"
                return Finding("random numbers", who, text)
            if owners.setdefault(state, who) != who and sum(s == state for s in states.values()) > 1:
                text = f"step {step}: {who} draws the random numbers of {owners[state]}, for other activations"
                return Finding("random numbers", who, text)
            if state in earlier:
                text = f"step {step}: {who} draws the random numbers of step {earlier[state]} again"
                return Finding("random numbers", who, text)
        one = next(n["random"] for n in theirs[step] if n["place"] == [0, 0, 0])
        if states[0, 0] != one:
            text = f"step {step}: rank 0 draws other random numbers than the reference"
            return Finding("random numbers", "rank 0", text)
        earlier |= dict.fromkeys(owners, step)
    return None


# ---- the state after an update -------------------------------------------------------------------------------------


def tensors_of(path: Path) -> Iterator[tuple[str, Tensor]]:
    from dtrain.checkpoint import moments, shards, store

    saved = store.read_manifest(path)
    with shards.Reader(path, saved) as reader:
        for name in sorted(saved.tensors):
            yield name, moments.whole(reader, name)


def manifest(path: Path | None) -> Any:
    from dtrain.checkpoint import store

    assert path is not None, "a run that has ended has a checkpoint"
    return store.read_manifest(path)


def saved_steps(run_dir: Path) -> dict[int, Path]:
    return {int(path.name.removeprefix("step-")): path for path in run_dir.glob("updates/step-*[0-9]")}


@dataclass(frozen=True)
class Update:
    """How far the state after one update is from the reference's."""

    gradient: float  # the largest difference of a parameter's, relative to its norm
    findings: list[Finding]


def compare_update(
    ours: Path, theirs: Path, step: int, allowed: float, rate: float, factors: tuple[float, float], size: int
) -> Update:
    """Compare gradients (as the optimizer's first moments) and weights, each parameter by itself.

    `rate`: the learning rate. `factors`: by which each run has clipped its gradients, to take them out of the moments.
    """
    mine, other = dict(tensors_of(ours)), dict(tensors_of(theirs))
    for names, text in ((other.keys() - mine.keys(), "is not saved"), (mine.keys() - other.keys(), "is saved, too")):
        if names:
            name = min((n for n in names if n.startswith(("model.", "optim."))), default="")
            if name:
                return Update(math.inf, [Finding("state", name, f"step {step}: {name} {text}")])
    # weights: one update moves a weight by at most the learning rate, so more than two of them is not rounding
    first = next(
        (n for n in other if n.startswith("model.") and ".running_" not in n and far(mine[n], other[n], rate)), ""
    )
    found = []
    if first:
        a, b = mine[first].double(), other[first].double()
        text = (
            f"step {step}: {short(first)} differs by {float((a - b).abs().max()):.1e}, more than an update can move it"
        )
        found.append(Finding("weight", short(first), text))
    worst = []
    kinds = sorted({n.rpartition(".")[2] for n in other if n.startswith("optim.")})
    linear = next((key for key in LINEAR if key in kinds), None)
    for key in [linear] if linear else kinds:
        of_kind = [n for n in other if n.startswith("optim.") and n.rpartition(".")[2] == key]
        scale = factors if key == linear else (1.0, 1.0)
        pairs = {n: (mine[n].double() / scale[0], other[n].double() / scale[1]) for n in of_kind}
        numbers = sum(b.numel() for _, b in pairs.values())
        typical = math.sqrt(sum(float(b.square().sum()) for _, b in pairs.values()) / max(1, numbers))
        for name, (a, b) in pairs.items():
            noise = SMALLEST * typical * math.sqrt(b.numel())
            difference = float((a - b).norm()) / max(float(b.norm()), noise, 1e-30)
            worst.append((math.inf if math.isnan(difference) else difference, short(name).rpartition(".")[0], a, b))
    differing = [entry for entry in worst if not entry[0] <= allowed]
    if differing:
        difference, name, a, b = max(differing, key=lambda entry: entry[0])
        what = "gradient" if linear else "optimizer state"
        others = f" and of {len(differing) - 1} other parameters" if len(differing) > 1 else ""
        text = f"step {step}: the {what} of {name}{others} differs by {difference:.1e} of its size"
        cause = likely_cause(a, b, size)
        found.append(Finding(what, name, f"{text} ({allowed:.1e} allowed){cause}"))
    return Update(max((entry[0] for entry in worst), default=0.0), found)


def far(a: Tensor, b: Tensor, rate: float) -> bool:
    """Are these weights farther apart than two updates? Those in 16 bits were also rounded, each to one neighbour."""
    import torch

    if a.shape != b.shape:
        return True
    spacing = 2 * torch.finfo(b.dtype).eps * b.double().abs() if b.dtype.itemsize == 2 else 0.0
    return not bool(((a.double() - b.double()).abs() <= 2 * rate + 1e-6 + spacing).all())


def short(name: str) -> str:
    return name.removeprefix("model.").removeprefix("optim.")


def compare_progress(ours: Any, theirs: Any) -> Finding | None:
    """Compare what two checkpoints of the same step count: samples, updates of each weight."""
    if ours["samples"] != theirs["samples"]:
        text = f"the checkpoint counts {ours['samples']} samples, not {theirs['samples']}"
        return Finding("progress", "samples", text)
    mine, other = ours["extra"]["optimizer"], theirs["extra"]["optimizer"]
    for name in sorted(other):
        if mine.get(name) != other[name]:
            text = f"the checkpoint counts other updates of {name}: {mine.get(name)}, not {other[name]}"
            return Finding("progress", name, text)
    return None
