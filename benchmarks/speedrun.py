"""A small contest: which settings train one model on one GPU to the same validation loss in the fewest seconds?

    python benchmarks/speedrun.py [--json benchmarks/results/speedrun-h200.json] [--chart FILE.svg]
    python benchmarks/speedrun.py --cpu             (gpt2-tiny for a few steps, to see that all of it runs)
    python benchmarks/speedrun.py --draw FILE.json --chart FILE.svg         (only draw)

The text is the source of Python's standard library as bytes, without the files that a build writes: anyone with the
same release of Python has it, and its hash is printed. 5% of the files are held out. `--corpus FOLDER` takes the .py
files of another folder.

The target is fixed before the contest: --target, or the loss that the first contestant has at its end with a seed that
is not in the contest, plus 0.01 and rounded up to 0.01. Each contestant then trains once with each seed, in an order
that changes with the seed, with the number of steps that CONTESTANTS gives it and a whole cosine schedule over them.

The clock counts the seconds of steps alone: evaluations stop it, and so do compilation and the choice of kernels. The
first steps contain these, so each of them counts as much as the median of later ones. The time is that of the first
evaluation at or below the target. A contestant that does not reach it has no time.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from html import escape
from pathlib import Path
from typing import Any

from throughput import ROOT, environment

from dtrain.data.stdlib import SKIPPED

MODEL = ["model=gpt2-124m", "model.vocab_size=256", "train.global_batch_size=32", "precision=bf16"]
TINY = ["model=gpt2-tiny", "model.seq_len=64", "train.global_batch_size=8", "precision=fp32"]
LR = 1e-3  # peak, of all contestants: Muon's updates are scaled to suit AdamW's rates
# name -> (share of the steps of the first, settings). dtrain has no schedule of the batch size, so none takes part.
CONTESTANTS: dict[str, tuple[float, list[str]]] = {
    "AdamW": (1.0, ["optim=adamw"]),
    "Muon": (0.75, ["optim=muon"]),
    "AdamW, fp8": (1.0, ["optim=adamw", "precision=fp8"]),
    "Muon, fp8": (0.75, ["optim=muon", "precision=fp8"]),
}
ON_CPU = ("AdamW", "Muon")
PILOT_SEED = 1000
UNTIMED = 12  # first steps: compilation, timing of GEMMs, capture as a CUDA graph
EVALUATIONS = 60  # of a run
BUILD_WRITES = ("_sysconfigdata", "_build_config", "sitecustomize")  # names of files that differ between builds
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#6a4c93", "#b6bec8")
Row = dict[str, Any]


def copy_corpus(source: Path, folder: Path) -> Row:
    """Copy the text to a folder that has nothing else; return what it is."""
    digest, size, count = hashlib.sha256(), 0, 0
    for path in sorted(source.rglob("*.py")):
        name = path.relative_to(source)
        if SKIPPED & set(name.parts) or name.name.startswith(BUILD_WRITES) or not path.is_file():
            continue
        text = path.read_bytes()
        digest.update(f"{name.as_posix()}\0{len(text)}\0".encode() + text)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text)
        size, count = size + len(text), count + 1
    is_stdlib = source == Path(sysconfig.get_paths()["stdlib"])
    what = f"standard library of Python {sys.version.split()[0]}" if is_stdlib else source.name
    return {"what": what, "files": count, "bytes": size, "sha256": digest.hexdigest()}


def train(name: str, seed: int, steps: int, corpus: Path, cpu: bool) -> Row:
    """One run: its validation losses by seconds of training."""
    row: Row = {"contestant": name, "seed": seed, "steps": steps}
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        model = TINY if cpu else MODEL
        own = CONTESTANTS[name][1]
        settings = [
            *(word for word in model if word.split("=")[0] not in {o.split("=")[0] for o in own}), *own,
            f"optim.lr={LR}", f"train.seed={seed}", f"train.steps={steps}", "schedule=cosine",
            f"schedule.warmup_steps={max(1, steps // 20)}", "schedule.min_ratio=0.0", "data=text",
            f"data.path={corpus}", "data.pattern='**/*.py'", "data.val_fraction=0.05", "checkpoint=none",
            f"train.eval_every={max(1, steps // EVALUATIONS)}", f"train.eval_batches={2 if cpu else 8}",
            "cluster.processes=1", "strategy=ddp", "guard.replicas_every=0",
        ]  # fmt: skip
        began = time.perf_counter()
        command = [sys.executable, str(ROOT / "launch.py"), f"run_dir={run_dir}", *settings]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return row | {"error": (done.stderr or done.stdout)[-1500:]}
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        summary = json.loads((run_dir / "summary.json").read_text())
    curve = on_the_clock(lines)
    return row | {
        "curve": curve, "final": curve[-1][2], "seconds": curve[-1][0], "wall_s": time.perf_counter() - began,
        "tokens_per_step": summary["tokens_per_step"], "tokens_per_s": summary["tokens_per_s"],
        "compile": summary["compile"], "cuda_graph": summary["cuda_graph"],
    }  # fmt: skip


def on_the_clock(lines: list[Row]) -> list[tuple[float, int, float]]:
    """(seconds of training, step, validation loss) of each evaluation."""
    seconds = {line["step"]: line["step_s"] for line in lines if line.get("step_s") is not None}
    later = [s for step, s in seconds.items() if step > UNTIMED] or list(seconds.values())
    usual = statistics.median(later)
    losses = {line["step"]: line["val_loss"] for line in lines if line.get("val_loss") is not None}
    found, clock = [], 0.0
    for step in sorted(seconds):
        clock += usual if step <= UNTIMED else seconds[step]
        if step in losses:
            found.append((round(clock, 4), step, losses[step]))
    return found


def reached(row: Row, target: float) -> tuple[float, int] | None:
    """Seconds and tokens until the target; None: never."""
    return next(((s, step * row["tokens_per_step"]) for s, step, loss in row["curve"] if loss <= target), None)


def result_of(name: str, rows: list[Row], target: float, first: dict[int, float]) -> Row:
    """What the runs of one contestant have found; `first`: seconds of the first contestant by seed."""
    good = [row for row in rows if "error" not in row]
    times = {row["seed"]: found for row in good if (found := reached(row, target))}
    result: Row = {"contestant": name, "runs": len(good), "reached": len(times)}
    if len(good) < len(rows):
        result["error"] = next(row["error"] for row in rows if "error" in row)
    if not good:
        return result
    result |= {"steps": good[0]["steps"], "tokens_per_s": statistics.median(row["tokens_per_s"] for row in good)}
    result["final"] = [round(row["final"], 4) for row in good]
    if len(times) == len(good):
        result["seconds"] = [round(s, 2) for s, _ in times.values()]
        result["median_s"] = statistics.median(s for s, _ in times.values())
        result["median_tokens"] = statistics.median(tokens for _, tokens in times.values())
        pairs = [s / first[seed] for seed, (s, _) in times.items() if seed in first]
        result["share_of_first"] = statistics.median(pairs) if pairs else None
    return result


def table(results: list[Row], target: float) -> str:
    """For a page of the docs."""
    lines = [
        f"| settings | seconds to {target:.2f}, each seed | median | to the first row | million tokens | tokens/s "
        "| validation loss at the end |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in results:
        if not row["runs"]:
            lines.append(f"| {row['contestant']} | failed: {row['error'].strip().splitlines()[-1][:80]} | | | | | |")
            continue
        final = f"{', '.join(f'{loss:.3f}' for loss in row['final'])} | "
        if "median_s" not in row:
            reason = f"reached by {row['reached']} of {row['runs']}"
            lines.append(f"| {row['contestant']} | {reason} | | | | {row['tokens_per_s']:,.0f} | {final}".rstrip())
            continue
        share = f"{row['share_of_first']:.2f} ×" if row["share_of_first"] else ""
        lines.append(
            f"| {row['contestant']} | {', '.join(f'{s:.1f}' for s in row['seconds'])} | {row['median_s']:.1f} s "
            f"| {share} | {row['median_tokens'] / 1e6:.1f} | {row['tokens_per_s']:,.0f} | {final}".rstrip()
        )
    return "\n".join(lines)


def draw(content: Row) -> str:
    """Validation loss over seconds of training, a line for each run, in SVG that needs nothing else."""
    rows = [row for row in content["rows"] if "error" not in row]
    names = list(dict.fromkeys(row["contestant"] for row in rows))
    target, points = content["target"], [point for row in rows for point in row["curve"]]
    width, height, left, top, bottom, legend = 560, 320, 62, 66, 46, 190
    most_s = max(s for s, _, _ in points) * 1.02
    low = min(target, *(loss for *_, loss in points)) - 0.03
    high = min(max(loss for *_, loss in points), target + 3 * (target - low) + 0.5)

    def x(seconds: float) -> float:
        return left + width * seconds / most_s

    def y(loss: float) -> float:
        return top + height * (high - min(loss, high)) / (high - low)

    where = f"{content['hardware']}, torch {content['versions']['torch']}, {content['model']}"
    subtitle = f"{where}, {len(content['seeds'])} seeds, compilation and evaluations not counted"
    full, total = left + width + legend, top + height + bottom
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {full} {total}" width="{full}" height="{total}" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="12" fill="#24292f">',
        "<title>Validation loss over seconds of training</title>",
        f'<rect width="{full}" height="{total}" rx="8" fill="#ffffff"/>',
        f'<text x="{left}" y="26" font-size="16" font-weight="600">Validation loss over seconds of training</text>',
        f'<text x="{left}" y="46" fill="#57606a">{escape(subtitle)}</text>',
        f'<rect x="{left}" y="{top}" width="{width}" height="{height}" fill="#f6f8fa"/>',
    ]
    for tick in ticks(0, most_s):
        drawn.append(f'<path d="M{x(tick):.1f} {top}v{height}" stroke="#ffffff"/>')
        drawn.append(f'<text x="{x(tick):.1f}" y="{top + height + 17}" text-anchor="middle">{tick:g}</text>')
    for tick in ticks(low, high):
        drawn.append(f'<path d="M{left} {y(tick):.1f}h{width}" stroke="#ffffff"/>')
        drawn.append(f'<text x="{left - 7}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for row in rows:
        colour = COLOURS[names.index(row["contestant"]) % len(COLOURS)]
        line = " ".join(f"{x(s):.1f},{y(loss):.1f}" for s, _, loss in row["curve"] if loss <= high)
        label = escape(f"{row['contestant']}, seed {row['seed']}")
        drawn.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.4">')
        drawn.append(f"<title>{label}</title></polyline>")
    drawn.append(f'<path d="M{left} {y(target):.1f}h{width}" stroke="#57606a" stroke-dasharray="5 4"/>')
    drawn.append(f'<text x="{left + width - 6}" y="{y(target) - 5:.1f}" text-anchor="end">target {target:.2f}</text>')
    for i, name in enumerate(names):
        result = next(result for result in content["results"] if result["contestant"] == name)
        at, seconds = top + 14 + 34 * i, result.get("median_s")
        colour, text = COLOURS[i % len(COLOURS)], f"{seconds:.1f} s" if seconds else "not reached"
        drawn.append(f'<path d="M{left + width + 14} {at - 4}h14" stroke="{colour}" stroke-width="3"/>')
        drawn.append(f'<text x="{left + width + 34}" y="{at}">{escape(name)}</text>')
        drawn.append(f'<text x="{left + width + 34}" y="{at + 15}" fill="#57606a">{text}</text>')
    drawn.append(f'<text x="{left + width / 2}" y="{total - 9}" text-anchor="middle">seconds of training</text>')
    return "\n".join([*drawn, "</svg>", ""])


def ticks(low: float, high: float) -> list[float]:
    """About five round numbers."""
    rough = (high - low) / 5
    unit = 10 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    return [round(n * step, 10) for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1200, help="of the first contestant")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--target", type=float, help="a validation loss; default: from a pilot")
    parser.add_argument("--only", nargs="*", choices=list(CONTESTANTS), metavar="NAME", help="contestants")
    parser.add_argument("--corpus", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    parser.add_argument("--minutes", type=float, default=20, help="no run begins after that")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--chart", type=Path, help="write an SVG")
    parser.add_argument("--draw", type=Path, help="draw the results in this file, and run nothing")
    parser.add_argument("--cpu", action="store_true", help="gpt2-tiny, a few steps, two seeds")
    options = parser.parse_args()
    if options.draw:
        options.chart.write_text(draw(json.loads(options.draw.read_text())))
        return
    if options.cpu:
        options.steps, options.seeds = min(options.steps, 60), min(options.seeds, 2)
    names = options.only or list(ON_CPU if options.cpu else CONTESTANTS)
    ends = time.monotonic() + 60 * options.minutes
    corpus = Path(tempfile.mkdtemp(prefix="speedrun-"))
    try:
        content: Row = {
            "benchmark": "speedrun", **environment(), "model": (TINY if options.cpu else MODEL)[0].partition("=")[2],
            "settings": {name: CONTESTANTS[name] for name in names}, "lr": LR, "seeds": list(range(options.seeds)),
            "corpus": copy_corpus(options.corpus, corpus),
        }  # fmt: skip
        print(content["corpus"], flush=True)
        contest(content, names, corpus, ends, options)
    finally:
        shutil.rmtree(corpus, ignore_errors=True)
    print(table(content["results"], content["target"]))
    if options.chart:
        options.chart.write_text(draw(content))


def contest(content: Row, names: list[str], corpus: Path, ends: float, options: argparse.Namespace) -> None:
    """Fix the target, then let each contestant run with each seed."""
    content["target"] = options.target
    if options.target is None:
        pilot = train(names[0], PILOT_SEED, options.steps, corpus, options.cpu)
        if "error" in pilot:
            raise SystemExit(pilot["error"])
        content |= {"pilot": pilot, "target": math.ceil(pilot["final"] * 100 + 1) / 100}
    print(f"target: {content['target']:.2f}", flush=True)
    rows: list[Row] = []
    content |= {"rows": rows, "left_out": [], "results": []}
    for seed in range(options.seeds):
        turn = seed % len(names)
        for name in (*names[turn:], *names[:turn]):
            if time.monotonic() > ends:
                content["left_out"].append([name, seed])
                print(f"{name}, seed {seed}: left out, the time is up", flush=True)
                continue
            rows.append(train(name, seed, round(CONTESTANTS[name][0] * options.steps), corpus, options.cpu))
            print({k: v for k, v in rows[-1].items() if k != "curve"}, flush=True)
            of = {n: [row for row in rows if row["contestant"] == n] for n in names}
            good = [row for row in of[names[0]] if "error" not in row]
            first = {row["seed"]: found[0] for row in good if (found := reached(row, content["target"]))}
            content["results"] = [result_of(n, of[n], content["target"], first) for n in names if of[n]]
            if options.json:  # after each run: a lent machine may be taken back
                options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
