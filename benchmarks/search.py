"""What do ASHA and PBT find, and for how many steps? A small convolutional net on the handwritten digits.

    python benchmarks/search.py [--json benchmarks/results/search-cpu.json] [--picture docs/pictures/lineage.svg]

asha: a sweep trains each of 9 learning rates to the end; `algorithm=asha` has the same 9 points. Does it end within one
grid step of the sweep's best, at how much of the sweep's steps? Once for each seed of the weights, the data order and
the order of the points. pbt: 4 members and 8 perturbations, two at a time. Is the first loss of a member that copied
the donor's next loss to the last bit, and is the result the same with one member at a time?

The runs are trained in processes that are forked from one that has imported torch (`WarmTrials`): without the launcher
and its imports, a short run is several times as fast. The journal, the decisions and the training are the same.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dtrain.commands.search.driver import Driver, num_steps
from dtrain.commands.search.request import algorithm, read_request
from dtrain.commands.search.trials import Trials
from dtrain.commands.verify.world import World, train_rank
from dtrain.config.run_file import save
from dtrain.launch.arguments import prepare_arguments
from dtrain.launch.compose import hydra_config
from dtrain.launch.resolve import resolve
from dtrain.report.lineage import lineage_svg
from dtrain.runs.folder import read_summary, write_json
from dtrain.runs.metrics import rows
from dtrain.runs.search_journal import read_journal

COMMON = [
    "model=convnet", "model.width=4", "model.image_size=8", "data=digits", "train.global_batch_size=32",
    "train.eval_every=0", "train.eval_batches=8",
    "checkpoint.every=0", "checkpoint.keep=1", "guard.replicas_every=0", "cluster.processes=1",
]  # fmt: skip
RATES = [float(f"{1e-4 * 10 ** (k / 2):.3g}") for k in range(9)]  # 1e-4 to 1: half a decade apart
STEPS = 160
ASHA = ["algorithm=asha", f"train.steps={STEPS}", "factor=4", "min_steps=10", "schedule.warmup_steps=2"]
PBT = [
    "algorithm=pbt", "population=4", "every=20", "train.steps=180", "schedule=constant",
    "optim.lr=tag(log,interval(1e-4,1e-1))", "optim.weight_decay=interval(0.0,0.3)",
]  # fmt: skip
TARGET = 0.4  # of the sweep's steps


class WarmTrials(Trials):
    """Trains each run in one forked rank, composed and checked as the launcher does."""

    def __init__(self, folder: Path, fixed: Sequence[str]) -> None:
        super().__init__(folder, fixed)
        self.worlds: dict[Path, World] = {}

    def launch(self, run_dir: Path, values: Sequence[str], more: Sequence[str] = (), may_differ: str = "") -> None:
        overrides = prepare_arguments([*self.fixed, *values, *more, f"run_dir='{run_dir}.new'"])
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        save(run_dir, resolve(hydra_config(overrides)) | {"run_dir": str(run_dir)})
        if not (run_dir / "launch.json").exists():
            write_json(run_dir / "launch.json", {"id": uuid.uuid4().hex, "overrides": list(values)})
        self.worlds[run_dir] = World(1, train_rank, run_dir)

    def exit_code(self, run_dir: Path) -> int | None:
        return self.worlds[run_dir].ranks[0].exitcode if run_dir in self.worlds else None

    def has_launcher(self, run_dir: Path) -> bool:
        return run_dir in self.worlds and self.exit_code(run_dir) is None

    def num_launchers(self) -> int:
        return sum(map(self.has_launcher, self.worlds))

    def pause(self) -> None:
        time.sleep(0.02)

    def stop_on_signals(self) -> None:
        """Leave signals to this process: its ranks end with it."""


def search(folder: Path, overrides: Sequence[str]) -> list[dict[str, Any]]:
    """Run a search, or continue it; return its journal."""
    folder.mkdir(parents=True, exist_ok=True)
    request = read_request(overrides)
    code = Driver(folder, request, algorithm(request), WarmTrials(folder, request.fixed)).run()
    assert code == 0, code
    return read_journal(folder)


def best_of(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the training that ended best, of those that trained longest."""
    trains = [e for e in events if e["event"] == "train"]
    longest = max(e["steps"] for e in trains)
    values = {e["trial"]: e["value"] for e in events if e["event"] == "result" and e["steps"] == longest}
    best = min((t for t in values if values[t] is not None), key=lambda t: values[t])
    return next(e for e in trains if e["trial"] == best and e["steps"] == longest) | {"value": values[best]}


def sweep(folder: Path, fixed: Sequence[str], parallel: int = 2) -> dict[float, float | None]:
    """Train every learning rate to the end; return the validation losses, None for a run that diverged."""
    trials = WarmTrials(folder, fixed)
    run_dirs = {rate: folder / f"lr={rate}" for rate in RATES}
    for rate, run_dir in run_dirs.items():
        while trials.num_launchers() >= parallel:
            trials.pause()
        trials.launch(run_dir, [f"optim.lr={rate}"])
    while trials.num_launchers():
        trials.pause()
    losses = {rate: read_summary(run_dir).get("val_loss") for rate, run_dir in run_dirs.items()}
    return {rate: loss if trials.exit_code(run_dirs[rate]) == 0 else None for rate, loss in losses.items()}


def asha_row(folder: Path, seed: int) -> dict[str, Any]:
    """Compare ASHA with the sweep over the same points."""
    overrides = [*COMMON, *ASHA, f"train.seed={seed}", f"seed={seed}", f"optim.lr={','.join(map(str, RATES))}"]
    losses = sweep(folder / "sweep", read_request(overrides).fixed)
    best = min((rate for rate in RATES if losses[rate] is not None), key=lambda rate: losses[rate] or 0.0)
    events = search(folder / "asha", overrides)
    found, steps, all_steps = best_of(events), sum(num_steps(events)), STEPS * len(RATES)
    rate = found["values"]["optim.lr"]
    return {
        "seed": seed, "sweep_best_lr": best, "sweep_val_loss": losses[best], "asha_lr": rate,
        "asha_val_loss": found["value"], "grid_steps_apart": abs(RATES.index(best) - RATES.index(rate)),
        "steps": steps, "sweep_steps": all_steps, "share": round(steps / all_steps, 3), "sweep_val_losses": losses,
    }  # fmt: skip


def pbt_rows(folder: Path, picture: Path | None) -> dict[str, Any]:
    """Check the lineage and the first losses of 4 members with 8 perturbations, two at a time and one at a time."""
    began = time.perf_counter()
    events = search(folder / "two", [*COMMON, *PBT, "parallel=2"])
    wall_s = time.perf_counter() - began
    exploits = [e for e in events if e["event"] == "exploit"]
    equal = 0
    for event in exploits:
        mine, donors = (
            {row["step"]: row["loss"] for row in rows(folder / "two" / run / "metrics.jsonl") if "loss" in row}
            for run in (event["run"], event["donor_run"])
        )
        equal += mine[event["steps"] + 1].hex() == donors[event["steps"] + 1].hex()
    if picture:
        picture.parent.mkdir(exist_ok=True)
        picture.write_text(lineage_svg(events))
    again = search(folder / "one", [*COMMON, *PBT, "parallel=1"])
    return {
        "members": 4, "perturbations": len({e["steps"] for e in exploits}), "exploits": len(exploits),
        "first_losses_equal_to_the_donors": equal, "wall_s": round(wall_s, 1), "best": best_of(events),
        "same_result_one_at_a_time": sorted(map(str, again)) == sorted(map(str, events)),
        "lineage": [{k: e[k] for k in ("steps", "trial", "donor", "donor_values", "values")} for e in exploits],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path, help="write the lineage of the PBT search as an SVG")
    options = parser.parse_args()
    from throughput import environment  # beside this file; tests import WarmTrials from elsewhere

    result: dict[str, Any] = {"benchmark": "search", **environment(), "settings": [*COMMON, *ASHA], "asha": []}
    with tempfile.TemporaryDirectory() as folder:
        result |= {"pbt_settings": PBT, "pbt": pbt_rows(Path(folder) / "pbt", options.picture)}
        for seed in range(options.seeds):
            result["asha"].append(row := asha_row(Path(folder) / f"asha-{seed}", seed))
            print(json.dumps(row), flush=True)
            good = sum(r["grid_steps_apart"] <= 1 and r["share"] <= TARGET for r in result["asha"])
            result["within_one_grid_step_at_the_target"] = f"{good} of {len(result['asha'])} seeds"
            if options.json:
                options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
