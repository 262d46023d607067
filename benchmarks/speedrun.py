"""A small contest: which settings train one model on one GPU to the same validation loss in the fewest seconds?

    python benchmarks/speedrun.py [--json benchmarks/results/speedrun-h200.json] [--chart FILE.svg]
    python benchmarks/speedrun.py --together 6      (six runs at a time: sooner done, the same table)
    python benchmarks/speedrun.py --cpu             (gpt2-tiny for a few steps, to see that all of it runs)
    python benchmarks/speedrun.py --draw FILE.json --chart FILE.svg         (only draw)

The text is the source of Python's standard library as bytes, without the files that a build writes: anyone with the
same release of Python has it, and its hash is printed. 5% of the files are held out. `--corpus FOLDER` takes the .py
files of another folder.

Rates: with --lrs each contestant first tries these peak rates, each for a quarter of its steps, with a seed that is not
in the contest, and takes the best one (`AdamW=2.5e-4` is for that contestant alone). Then the target is fixed:
--target, or the loss that the first contestant has at its end with that seed, plus 0.01 and rounded up to 0.01. Each
contestant then trains once with each seed, with the number of steps that CONTESTANTS gives it and a whole cosine
schedule over them.

The clock is the number of steps times the seconds of one step. Those are measured apart, alone on the GPU, in blocks of
steps that take turns in one process (turns.py): compilation and evaluations are not in them, and neither is whatever
else the machine did. The time is that of the first evaluation at or below the target. A contestant that does not reach
it has no time.
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
from concurrent.futures import ThreadPoolExecutor
from html import escape
from pathlib import Path
from typing import Any

from throughput import ROOT, environment

from dtrain.data.stdlib import SKIPPED

MODEL = ["model=gpt2-124m", "model.vocab_size=256", "train.global_batch_size=16", "precision=bf16"]
TINY = ["model=gpt2-tiny", "model.seq_len=64", "train.global_batch_size=8", "precision=fp32"]
LR = 1e-3  # peak, without --lrs: Muon's updates are scaled to suit AdamW's rates
# name -> (share of the steps of the first, settings). dtrain has no schedule of the batch size, so none takes part.
CONTESTANTS: dict[str, tuple[float, list[str]]] = {
    "AdamW": (1.0, ["optim=adamw"]),
    "Muon": (0.8, ["optim=muon"]),
    "AdamW, fp8": (1.0, ["optim=adamw", "precision=fp8"]),
    "Muon, fp8": (0.8, ["optim=muon", "precision=fp8"]),
}
ON_CPU = ("AdamW", "Muon")
PILOT_SEED = 1000
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


def words_of(name: str, cpu: bool) -> list[str]:
    """The settings of a contestant: its own come before the model's."""
    own = CONTESTANTS[name][1]
    return [
        *(word for word in (TINY if cpu else MODEL) if word.split("=")[0] not in {o.split("=")[0] for o in own}),
        *own,
    ]


def train(name: str, seed: int, lr: float, steps: int, corpus: Path, cpu: bool) -> Row:
    """One run: its validation losses by steps."""
    row: Row = {"contestant": name, "seed": seed, "lr": lr, "steps": steps}
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        settings = [
            *words_of(name, cpu), f"optim.lr={lr}", f"train.seed={seed}", f"train.steps={steps}", "schedule=cosine",
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
    losses = {line["step"]: line["val_loss"] for line in lines if line.get("val_loss") is not None}
    return row | {
        "losses": sorted(losses.items()), "final": losses[max(losses)], "wall_s": time.perf_counter() - began,
        "tokens_per_step": summary["tokens_per_step"], "compile": summary["compile"],
    }  # fmt: skip


def step_seconds(names: list[str], cpu: bool) -> dict[str, float]:
    """Seconds of one step of each contestant, from blocks of steps in turn."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "turns.json"
        ways = [word for name in names for word in ("--", *words_of(name, cpu))]
        command = [sys.executable, str(ROOT / "benchmarks" / "turns.py"), *ways, "--json", str(file)]
        done = subprocess.run([*command, *(["--rounds", "3"] if cpu else [])], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit((done.stderr or done.stdout)[-1500:])
        rows = json.loads(file.read_text())["rows"]
    # a ratio of the same round is steadier than the medians themselves
    return {name: rows[0]["step_ms"] / 1e3 / row["ratio"] for name, row in zip(names, rows, strict=True)}


def reached(row: Row, target: float) -> tuple[float, int] | None:
    """Seconds and tokens until the target; None: never."""
    return next(((s, step * row["tokens_per_step"]) for s, step, loss in row["curve"] if loss <= target), None)


def result_of(name: str, rows: list[Row], target: float, first: dict[int, Row]) -> Row:
    """What the runs of one contestant have found; `first`: the runs of the first contestant by seed."""
    good = [row for row in rows if "error" not in row]
    times = {row["seed"]: found for row in good if (found := reached(row, target))}
    result: Row = {"contestant": name, "runs": len(good), "reached": len(times)}
    if len(good) < len(rows):
        result["error"] = next(row["error"] for row in rows if "error" in row)
    if not good:
        return result
    result |= {"steps": good[0]["steps"], "lr": good[0]["lr"], "final": [round(row["final"], 4) for row in good]}
    result["tokens_per_s"] = good[0]["tokens_per_step"] * good[0]["steps"] / good[0]["curve"][-1][0]
    if len(times) == len(good):
        result["seconds"] = [round(s, 2) for s, _ in times.values()]
        result["median_s"] = statistics.median(s for s, _ in times.values())
        result["median_tokens"] = statistics.median(tokens for _, tokens in times.values())
        others = {seed: reached(row, target) for seed, row in first.items()}
        pairs = [s / other[0] for seed, (s, _) in times.items() if (other := others.get(seed))]
        result["share_of_first"] = statistics.median(pairs) if pairs else None
    # tokens until what the first contestant has at its own end, as a share of all its tokens
    result["tokens_to_final"] = [
        found[1] / (other["steps"] * other["tokens_per_step"]) if (found := reached(row, other["final"])) else None
        for row in good if (other := first.get(row["seed"]))
    ]  # fmt: skip
    return result


def table(results: list[Row], target: float) -> str:
    """For a page of the docs."""
    lines = [
        f"| settings | seconds to {target:.2f}, each seed | median | to the first row | million tokens | tokens/s "
        "| validation loss at the end | tokens to the first row's last loss |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in results:
        if not row["runs"]:
            lines.append(f"| {row['contestant']} | failed: {row['error'].strip().splitlines()[-1][:80]} | | | | | | |")
            continue
        shares = ", ".join(f"{share:.0%}" if share else "never" for share in row["tokens_to_final"])
        final = f"{', '.join(f'{loss:.3f}' for loss in row['final'])} | {shares} |"
        if "median_s" not in row:
            reason = f"reached by {row['reached']} of {row['runs']}"
            lines.append(f"| {row['contestant']} | {reason} | | | | {row['tokens_per_s']:,.0f} | {final}")
            continue
        share = f"{row['share_of_first']:.2f} ×" if row["share_of_first"] else ""
        lines.append(
            f"| {row['contestant']} | {', '.join(f'{s:.1f}' for s in row['seconds'])} | {row['median_s']:.1f} s "
            f"| {share} | {row['median_tokens'] / 1e6:.1f} | {row['tokens_per_s']:,.0f} | {final}"
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


def rates_of(name: str, words: list[str]) -> list[float]:
    """The rates that a contestant tries."""
    return [float(rate) for of, _, rate in (word.rpartition("=") for word in words) if of in ("", name)]


def ticks(low: float, high: float) -> list[float]:
    """About five round numbers."""
    rough = (high - low) / 5
    unit = 10 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    return [round(n * step, 10) for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="of the first contestant")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lrs", nargs="*", default=[], metavar="[NAME=]LR", help="peak rates to try first")
    parser.add_argument("--together", type=int, default=1, help="runs at a time; steps are timed alone")
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
            "settings": {name: CONTESTANTS[name] for name in names}, "seeds": list(range(options.seeds)),
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
    """Measure the steps, choose the rates, fix the target; then let each contestant run with each seed."""
    seconds = content["step_s"] = step_seconds(names, options.cpu)
    print({name: f"{1e3 * s:.2f} ms" for name, s in seconds.items()}, flush=True)
    content |= {"tried": [], "rows": [], "left_out": [], "results": []}
    steps = {name: round(CONTESTANTS[name][0] * options.steps) for name in names}

    def run(task: tuple[str, int, float, int]) -> Row:
        name, seed, lr, _ = task
        if time.monotonic() > ends:
            content["left_out"].append(task)
            return {"contestant": name, "seed": seed, "lr": lr, "error": "left out: the time is up"}
        row = train(*task, corpus, options.cpu)
        row["curve"] = [(round(step * seconds[name], 4), step, loss) for step, loss in row.pop("losses", [])]
        print({key: value for key, value in row.items() if key != "curve"}, flush=True)
        return row

    with ThreadPoolExecutor(options.together) as pool:
        pairs = [(name, lr) for name in names for lr in rates_of(name, options.lrs)]
        tasks = [(name, PILOT_SEED, lr, max(1, steps[name] // 4)) for name, lr in pairs]
        content["tried"] = [row for row in pool.map(run, tasks) if "error" not in row]
        rates = dict.fromkeys(names, LR)
        for name in names:
            mine = [row for row in content["tried"] if row["contestant"] == name]
            rates[name] = min(mine, key=lambda row: row["final"])["lr"] if mine else LR
        pilot = [] if options.target else [(names[0], PILOT_SEED, rates[names[0]], steps[names[0]])]
        tasks = [(name, seed, rates[name], steps[name]) for seed in range(options.seeds) for name in names]
        for row in pool.map(run, [*pilot, *tasks]):
            if row["seed"] == PILOT_SEED:
                content["pilot"] = row
            else:
                content["rows"].append(row)
            judge(content, names, options)


def judge(content: Row, names: list[str], options: argparse.Namespace) -> None:
    """Write what is known after each run: a lent machine may be taken back."""
    pilot = content.get("pilot", {})
    if "error" in pilot:
        raise SystemExit(pilot["error"])
    content["target"] = options.target or math.ceil(pilot["final"] * 100 + 1) / 100
    of = {name: [row for row in content["rows"] if row["contestant"] == name] for name in names}
    first = {row["seed"]: row for row in of[names[0]] if "error" not in row}
    content["results"] = [result_of(name, of[name], content["target"], first) for name in names if of[name]]
    if options.json:
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
