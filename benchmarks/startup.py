"""From the command to the first step: how many seconds, and what for? Cold, on a new node, warm; beside plain torch.

    python benchmarks/startup.py [--models gpt2-124m …] [--rounds 2] [--json benchmarks/results/startup-h200.json]
    python benchmarks/startup.py --cpu              (gpt2-tiny, to see that all of it runs)

Each row is `python launch.py` for some steps, and its phases are those that the run itself records (start_s in
summary.json, `dtrain profile RUN`):

- cold: nothing has been compiled.
- new node: a machine without compiled files, and the cache that the cold run has stored in the user's folder.
- warm: a restart on the same machine.

The plain script (handwritten.py with torch.compile, torchrun) starts cold and warm with a cache folder of torch's own.
Its time ends when it prints the first step; ours when that step's results have been read. The rounds of all rows take
turns; the table has medians. File caches of the machine are warm in all of them: one launch goes first.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from throughput import ROOT, environment

COMMON = [
    "data=stdlib", "train.steps=12", "train.eval_batches=0", "checkpoint=none", "cluster.processes=1", "strategy=ddp",
]  # fmt: skip
# model -> (overrides, batch of the plain script)
MODELS = {
    "gpt2-tiny": (["model=gpt2-tiny", "train.global_batch_size=8"], 8),
    "gpt2-124m": (["model=gpt2-124m", "precision=bf16", "train.global_batch_size=32"], 32),
    "gpt2-1.5b": (["model=gpt2-1.5b", "precision=bf16", "train.global_batch_size=16"], 16),
    "llama-1b": (["model=llama-1b", "precision=bf16", "model.seq_len=2048", "train.global_batch_size=4"], 0),
    "bert-base": (["model=bert-base", "data=stdlib-mlm", "precision=bf16", "train.global_batch_size=32"], 0),
}
STATES = ("cold", "new node", "warm")
STARTS = {"torchrun": [], "fork": ["cluster.fork=always"]}  # how the ranks start where there is a GPU
MODES = ("whole", "blocks", "none")
Row = dict[str, Any]


def ours(model: str, mode: str, node: Path, shared: Path, start: str = "torchrun") -> Row:
    """Launch once; return the phases of its start, and what was compiled."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        common = [o for o in COMMON if o.split("=")[0] not in {word.split("=")[0] for word in MODELS[model][0]}]
        words = [*common, *MODELS[model][0], *STARTS[start], f"compile={mode}", f"run_dir={run_dir}"]
        node.mkdir(exist_ok=True)
        env = clean() | {"TMPDIR": str(node), "DTRAIN_COMPILE_CACHE": str(shared)}
        began = time.time()
        ran = subprocess.run([sys.executable, str(ROOT / "launch.py"), *words], env=env, capture_output=True, text=True)
        if ran.returncode:
            return {"error": (ran.stderr or ran.stdout or f"ended with {ran.returncode}")[-600:]}
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        summary = json.loads((run_dir / "summary.json").read_text())
    return {
        "seconds": lines[0]["time"] - began, "start_s": summary["start_s"], "second_step_s": lines[1]["step_s"],
        "compile_cache": summary.get("compile_cache"),
    }  # fmt: skip


def plain(model: str, mode: str, node: Path) -> Row:
    """The script by hand, with a cache folder of torch's own: seconds until it prints its first step."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    words = ["--steps", "2", "--model", model, "--batch", str(MODELS[model][1])]
    words += [*([] if mode == "none" else ["--compile"]), *([] if model == "gpt2-tiny" else ["--bf16"])]
    env = clean() | {"TORCHINDUCTOR_CACHE_DIR": str(node / "inductor"), "TRITON_CACHE_DIR": str(node / "triton")}
    node.mkdir(exist_ok=True)
    with tempfile.TemporaryFile("w+") as log:
        began = time.perf_counter()
        command = [*torchrun, str(ROOT / "benchmarks" / "handwritten.py"), *words]
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=log, text=True)
        assert process.stdout is not None
        seconds = next((time.perf_counter() - began for line in process.stdout if line.startswith("step 1 ")), None)
        process.stdout.read()
        process.wait()
        log.seek(0)
        return {"error": log.read()[-600:] or "no first step"} if seconds is None else {"seconds": seconds}


def clean() -> dict[str, str]:
    """The environment without caches of earlier compilations."""
    left_out = ("TORCHINDUCTOR_", "TRITON_CACHE_DIR", "DTRAIN_COMPILE_CACHE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    return kept | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}


def rounds_of(model: str, mode: str, folder: Path, no_plain: bool, starts: list[str]) -> dict[tuple[str, str], Row]:
    """One round of one model and mode: our three states in a row, and the plain script's two."""
    found: dict[tuple[str, str], Row] = {}
    for start, (state, node) in itertools.product(starts, zip(STATES, ("a", "b", "b"), strict=True)):
        if mode == "none" and state == "new node":
            continue
        tool = "dtrain" if start == "torchrun" else f"dtrain, {start}"
        found[tool, state] = ours(model, mode, folder / f"{start}-{node}", folder / f"{start}-shared", start)
        say(model, mode, tool, state, found[tool, state])
    if MODELS[model][1] and mode != "blocks" and not no_plain:
        for state in ("cold", "warm"):
            found["plain script", state] = plain(model, mode, folder / "plain")
            say(model, mode, "plain script", state, found["plain script", state])
    return found


def say(*what: Any) -> None:
    *names, row = what
    print(*names, {key: value for key, value in row.items() if key != "start_s"}, flush=True)


def median_row(model: str, mode: str, tool: str, state: str, found: list[Row]) -> Row:
    row: Row = {"model": model, "compile": mode, "tool": tool, "state": state, "rounds": len(found)}
    good = [one for one in found if "error" not in one]
    if not good:
        return row | {"error": found[0]["error"]}
    row["seconds"] = statistics.median(one["seconds"] for one in good)
    row["all_seconds"] = [round(one["seconds"], 2) for one in good]
    if "start_s" in good[0]:
        phases = dict.fromkeys(itertools.chain.from_iterable(one["start_s"] for one in good))
        row["start_s"] = {p: statistics.median(one["start_s"].get(p, 0.0) for one in good) for p in phases}
        row["second_step_s"] = statistics.median(one["second_step_s"] for one in good)
        row["compile_cache"] = good[-1]["compile_cache"]
    return row


def table(rows: list[Row]) -> str:
    """For a page of the docs: seconds of each row, and of its phases."""
    phases = dict.fromkeys(itertools.chain.from_iterable(row.get("start_s", {}) for row in rows))
    phases.pop("total", None)
    heads = ["model", "compile", "", "", "first step after", *(phase.replace("_", " ") for phase in phases)]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for row in rows:
        cells = [row["model"], row["compile"], row["tool"], row["state"]]
        if "error" in row:
            cells.append(f"failed: {row['error'].strip().splitlines()[-1][:80]}")
        else:
            start = row.get("start_s", {})
            cells += [f"{row['seconds']:.1f} s", *(f"{start[p]:.1f}" if p in start else "" for p in phases)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["gpt2-124m", "gpt2-1.5b"], choices=list(MODELS))
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=MODES)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=25, help="no round begins after that")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--no-plain", action="store_true", help="without the plain script")
    parser.add_argument("--starts", nargs="*", default=["torchrun"], choices=list(STARTS), help="of the ranks")
    parser.add_argument("--cpu", action="store_true", help="gpt2-tiny")
    options = parser.parse_args()
    models = ["gpt2-tiny"] if options.cpu else options.models
    head, found, ends = environment(), {}, time.monotonic() + 60 * options.minutes  # type: ignore[var-annotated]
    with tempfile.TemporaryDirectory() as folder:
        ours(models[0], "none", Path(folder) / "first", Path(folder) / "shared")  # the machine's file caches
    for _, model, mode in itertools.product(range(options.rounds), models, options.modes):
        if time.monotonic() > ends:
            print(f"{model}, compile={mode}: left out, the time is up", flush=True)
            continue
        folder = tempfile.mkdtemp(prefix="start-")
        try:
            for (tool, state), row in rounds_of(model, mode, Path(folder), options.no_plain, options.starts).items():
                found.setdefault((model, mode, tool, state), []).append(row)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        rows = [median_row(*which, of_rounds) for which, of_rounds in found.items()]
        if options.json:  # after each round: a lent machine may be taken back
            options.json.write_text(json.dumps({"benchmark": "startup", **head, "rows": rows}, indent=1) + "\n")
    print(table([median_row(*which, of_rounds) for which, of_rounds in found.items()]))


if __name__ == "__main__":
    main()
