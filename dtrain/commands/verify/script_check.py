"""`dtrain verify script=theirs.py`: does somebody's training script compute at several processes what it does at one?

The script runs at 1, 2 and 4 processes with the same global batch, launched as `dtrain launch script=…` does. Its steps
are read from what `dtrain.check.step(loss, model)` noted in its ranks, or from the losses in its log.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dtrain import start
from dtrain.commands.verify.likely_cause import NEAR, of_ratio
from dtrain.errors import bad
from dtrain.runs.folder import read_json
from dtrain.runs.protocol import CHECK_FOLDER, DONE, FAILED
from dtrain.ui import console
from dtrain.util.format import counted

LOSS = re.compile(r"""["']?\b(?:train_)?loss["']?\s*[:=]\s*["']?([-+]?(?:[\d.]+(?:e[-+]?\d+)?|nan|inf))""", re.I)
HOOK = "import dtrain.check, and dtrain.check.step(loss, model) before optimizer.step()"


@dataclass
class Step:
    """One update of a run, over all its ranks."""

    losses: list[float] = field(default_factory=list)  # of the ranks
    gradients: list[dict[str, list[float]]] = field(default_factory=list)  # of the ranks: norm, then some elements
    samples: Counter[int] = field(default_factory=Counter)

    @property
    def loss(self) -> float | None:
        return sum(self.losses) / len(self.losses) if self.losses else None


@dataclass(frozen=True)
class Verdict:
    """A row of the table; the names are those of `--json`."""

    processes: int
    steps: int
    max_loss_diff: float | None  # relative
    max_gradient_diff: float | None  # of a parameter at the first step, relative to its norm
    follows: bool
    first_step: int | None  # that differs
    named: str
    reason: str


@dataclass(frozen=True)
class Request:
    script: str
    args: str
    sizes: list[int]
    batch: int | None
    tolerance: float
    others: list[str]


def read_request(settings: Sequence[str]) -> Request:
    words = dict(word.partition("=")[::2] for word in settings)
    text = words.pop("processes", "1,2,4").strip("[]")
    sizes = [int(size) for size in text.split(",") if size.strip().isdecimal()]
    if not sizes or len(sizes) < len(text.split(",")) or 0 in sizes:
        raise bad("processes", text, "must be whole numbers, at least 1", "processes=1,2,4")
    sizes = sorted({1, *sizes})
    args, batch = words.pop("script_args", ""), words.pop("batch", "")
    if "{batch" in args and not (batch.isdecimal() and all(int(batch) % size == 0 for size in sizes) and int(batch)):
        rule = f"script_args has a placeholder for it: a whole number that {', '.join(map(str, sizes))} divide"
        raise bad("batch", batch, rule, f"batch={math.lcm(*sizes) * 4}")
    try:
        tolerance = float(words.pop("tolerance", "1e-4"))
    except ValueError:
        raise bad("tolerance", settings, "must be a number", "tolerance=1e-4") from None
    script = words.pop("script")
    if not Path(script).expanduser().is_file():
        raise bad("script", script, "there is no such file", "script=train.py")
    return Request(
        script, args, sizes, int(batch) if batch else None, tolerance, [f"{k}={v}" for k, v in words.items()]
    )


def arguments(request: Request, size: int) -> str:
    """Fill in the placeholders, so that the global batch is the same for any number of processes."""
    batch = request.batch or 0
    known = {"batch": batch, "batch_per_process": batch // size, "processes": size, "world_size": size}
    return re.sub(r"\{(\w+)\}", lambda found: str(known.get(found[1], found[0])), request.args)


def run(request: Request, size: int, folder: Path, timeout: float) -> tuple[dict[int, Step], str]:
    """Run the script to its end; return its steps, and the error if it failed."""
    notes = folder / f"notes-{size}"
    notes.mkdir(parents=True)
    run_dir = folder / f"processes-{size}"
    args = arguments(request, size)
    command = [
        *start.command("dtrain.cli"), "launch", f"script={request.script}", *([f"script_args={args}"] if args else []),
        f"cluster.processes={size}", f"run_dir={run_dir}", *request.others,
    ]  # fmt: skip
    env = os.environ | start.environment() | {CHECK_FOLDER: str(notes)}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return {}, f"it did not end in {timeout:.0f} s"
    if done.returncode:
        return {}, f"it ended with {done.returncode}: {_reason(run_dir, done.stdout + done.stderr)}"
    steps = read_notes(notes) or read_log(run_dir / "logs" / "rank-0.log")
    return steps, "" if steps else f"no loss was noted, and none is in its log\n  fix: {HOOK}"


def _reason(run_dir: Path, output: str) -> str:
    failure = read_json(run_dir / "failure.json")
    if not failure.get("message"):
        return " ".join([line for line in output.splitlines() if line.strip()][-3:])[-400:]
    where = f", at {failure['where']}" if failure.get("where") else ""
    text = f"{failure.get('type')}: {failure['message']}{where}"
    if "No module named 'dtrain'" in text:
        text += "\n  fix: install dtrain into that Python, too: PYTHON -m pip install --no-deps FOLDER_OF_DTRAIN"
    return text


def read_notes(folder: Path) -> dict[int, Step]:
    steps: dict[int, Step] = {}
    for path in sorted(folder.glob("rank-*.jsonl")):
        for line in path.read_text().splitlines():
            note = json.loads(line)
            step = steps.setdefault(note["step"], Step())
            step.losses += [note["loss"]] if "loss" in note else []
            step.gradients += [note["gradients"]] if "gradients" in note else []
            step.samples.update(note.get("samples", []))
    return steps


def read_log(path: Path) -> dict[int, Step]:
    """Return the losses that a log has, one in a line: JSON, Python's dicts, or `loss 1.23`."""
    text = path.read_text(errors="replace") if path.exists() else ""
    found = [LOSS.search(line) for line in text.splitlines()]
    losses = [float(match[1]) for match in found if match]
    return {i: Step([loss]) for i, loss in enumerate(losses, 1)}


# ---- the judgement ---------------------------------------------------------------------------------------------------


def judge(size: int, ours: dict[int, Step], theirs: dict[int, Step], tolerance: float) -> Verdict:
    both = sorted(ours.keys() & theirs.keys())
    pairs = [(a, b) for step in both if (a := ours[step].loss) is not None and (b := theirs[step].loss) is not None]
    losses = [relative(a, b) for a, b in pairs]
    first = next(iter(differences(size, ours, theirs, both, tolerance)), None)
    at, named, reason = first or (None, "", "")
    if len(ours) != len(theirs):
        more = ""
        if len(ours) * size == len(theirs):
            more = f": each of the {size} processes takes as many samples as one alone, so the global batch grows"
        reason = ", ".join(
            filter(None, [reason, f"it makes {counted(len(ours), 'step')}, one process {len(theirs)}{more}"])
        )
    gradients = apart(ours[both[0]], theirs[both[0]]) if both else {}
    return Verdict(
        size, len(ours), max(losses, default=None), max((d for d, _ in gradients.values()), default=None),
        not reason, at, named, reason,
    )  # fmt: skip


def differences(
    size: int, ours: dict[int, Step], theirs: dict[int, Step], steps: Sequence[int], tolerance: float
) -> Iterator[tuple[int, str, str]]:
    """Yield each step that differs: which, what is named, and in what it differs, with the likely cause."""
    for step in steps:
        mine, other = ours[step], theirs[step]
        if mine.samples and other.samples and mine.samples != other.samples:
            missing = sum((other.samples - mine.samples).values())
            twice = sum(count - 1 for count in mine.samples.values() if count > 1)
            text = f"{missing} of {other.samples.total()} samples are not those that one process reads"
            yield step, "samples", f"step {step}: {text}{f', {twice} are read more than once' if twice else ''}"
            continue
        unequal = differing_ranks(mine)
        if unequal:
            rank, name = unequal
            text = f"the ranks' gradients of {name} differ (rank {rank}): they are not reduced, or not yet"
            yield step, name, f"step {step}: {text}"
            continue
        a, b = mine.loss, other.loss
        loss_differs = a is not None and b is not None and not relative(a, b) <= tolerance
        found = {name: d for name, d in apart(mine, other).items() if not d[0] <= 10 * tolerance}
        if found:
            name = max(found, key=lambda key: found[key][0])
            text = f"the gradient of {name}{others(found)} differs by {found[name][0]:.1e} of its size"
            yield step, name, f"step {step}: {text}{gradient_cause(found, size, loss_differs)}"
        elif loss_differs and a is not None and b is not None:
            cause = loss_cause(a / b if b else 0.0, step, size, bool(mine.gradients))
            yield step, "loss", f"step {step}: the loss is {a:.7g}, not {b:.7g}{cause}"


def others(found: dict[str, Any]) -> str:
    return f" and of {len(found) - 1} other parameters" if len(found) > 1 else ""


def relative(a: float, b: float) -> float:
    difference = abs(a - b) / max(abs(b), 1e-12)
    return math.inf if math.isnan(difference) else difference


def apart(ours: Step, theirs: Step) -> dict[str, tuple[float, float]]:
    """Return each parameter's difference relative to its norm, and the ratio of the norms."""
    if not ours.gradients or not theirs.gradients:
        return {}
    mine, other = ours.gradients[0], theirs.gradients[0]
    typical = max((b[0] for b in other.values()), default=0.0)
    found = {}
    for name, b in other.items():
        a = mine.get(name)
        if a is None or len(a) != len(b):
            found[name] = (math.inf, 0.0)
            continue
        size = max(math.dist(b[1:], [0.0] * (len(b) - 1)), 1e-3 * typical, 1e-30)
        by_norm = abs(a[0] - b[0]) / max(b[0], 1e-3 * typical, 1e-30)
        found[name] = (max(math.dist(a[1:], b[1:]) / size, by_norm), a[0] / b[0] if b[0] else 0.0)
    return found


def differing_ranks(step: Step) -> tuple[int, str] | None:
    """Return a rank whose gradient is not rank 0's, and the parameter."""
    for rank, gradients in enumerate(step.gradients[1:], 1):
        for name, values in gradients.items():
            first = step.gradients[0].get(name)
            if first is not None and not relative(values[0], first[0]) <= 1e-4 and max(values[0], first[0]) > 1e-7:
                return rank, name
    return None


def gradient_cause(found: dict[str, tuple[float, float]], size: int, loss_differs: bool) -> str:
    ratios = [ratio for _, ratio in found.values()]
    middle = sorted(ratios)[len(ratios) // 2]
    if middle and all(abs(ratio / middle - 1) < NEAR for ratio in ratios) and abs(middle - 1) > NEAR:
        return f": {of_ratio(middle, size)}" + ("" if loss_differs else "; the loss is right")
    return (
        "" if loss_differs else "; the loss is right, so what follows it is not: how gradients are reduced or weighted"
    )


def loss_cause(ratio: float, step: int, size: int, has_gradients: bool) -> str:
    for factor, text in ((size, "summed over"), (1 / size, "divided twice by")):
        if abs(ratio / factor - 1) < NEAR:
            return f": {ratio:.3g} times, as if {text} the {size} processes"
    if step > 1 and has_gradients:
        return ": gradients agree up to here, so the update differs (learning rate, weight decay, clipping)"
    if step == 1:
        return ": other samples, other first weights, dropout, or a mean over parts of unequal size"
    return ": the steps before agree, so gradients or updates differ"


# ---- the command -----------------------------------------------------------------------------------------------------


def main(settings: Sequence[str], folder: Path, timeout: float, as_json: bool) -> int:
    from rich.console import Console

    request = read_request(settings)
    out = Console(stderr=True) if as_json else console.stdout_console()
    verdicts: list[Verdict] = []
    reference: dict[int, Step] = {}
    for size in request.sizes:
        steps, problem = run(request, size, folder, timeout * (2 + size))
        if size == 1:
            if problem:
                raise ValueError(f"script={request.script} at one process: {problem}")
            reference = steps
            has = [what for what in ("losses", "gradients", "samples") if any(getattr(s, what) for s in steps.values())]
            console.say(out, (f"1 process: {counted(len(steps), 'step')}, {', '.join(has)}", "bold"))
            continue
        verdict = (
            Verdict(size, 0, None, None, False, None, "", problem.splitlines()[0])
            if problem else judge(size, steps, reference, request.tolerance)
        )  # fmt: skip
        verdicts.append(verdict)
        far = {"losses": verdict.max_loss_diff, "gradients": verdict.max_gradient_diff}
        apart_by = ", ".join(f"{what} {x:.1e}" for what, x in far.items() if x is not None)
        head = f"{size} processes: {'follow one process' if verdict.follows else 'DIFFER'}"
        console.say(out, (head, "" if verdict.follows else "red"), f" ({apart_by})  {verdict.reason}".rstrip())
    if as_json:
        print(json.dumps([asdict(verdict) for verdict in verdicts], indent=1))
    return DONE if all(verdict.follows for verdict in verdicts) else FAILED
