"""`dtrain search`: search for the best settings, one run folder per trial, on this machine or on a cluster.

What the search has decided and found is a journal in its folder, and every trial is a run, so the search can end at any
time in any way: the same command resumes it.
"""

from __future__ import annotations

import importlib.util
import subprocess
import time
from pathlib import Path

from dtrain import start
from dtrain.commands.search.driver import Driver
from dtrain.commands.search.request import Request, algorithm, check_settings, read_request
from dtrain.config.redaction import hidden
from dtrain.errors import bad
from dtrain.launch import sweeps
from dtrain.launch.compose import compose
from dtrain.runs.folder import read_json
from dtrain.runs.protocol import DONE, FAILED
from dtrain.ui import console, sweep_table
from dtrain.ui.unread import unbroken_output
from dtrain.util.format import shell_path

USAGE = """usage: dtrain search [algorithm=NAME] SETTING=SPACE ... [option=value ...] [setting=value ...]

  optim.lr=tag(log,interval(1e-4,1e-2))    a number in this interval; log: sampled on a log scale
  schedule.warmup_steps=int(interval(10,100))
  train.global_batch_size=range(8,65,8)    start, stop (excluded), step
  strategy=ddp,fsdp                        one of these

  algorithm=optuna    each trial trains to its end
  algorithm=asha      most trials stop early: only the best 1/factor of a rung train on to the next
  algorithm=bohb      asha, with new trials drawn by TPE from the results so far
  algorithm=pbt       trials change their settings while they train; bad ones copy the weights of good ones

  metric=val_loss     a key of summary.json    direction=minimize|maximize
  parallel=1          how many runs at once    seed=0
  dir=FOLDER          default: multirun/<date>/<time>-search; the same command again resumes the search
  detach=true|false   true: continue in the background; default: true on SLURM only

  optuna, asha, bohb  trials=20       how many runs in all
  optuna              sampler=tpe|random
  asha, bohb          factor=3        each rung keeps 1 of so many trials
                      min_steps=N     steps of the first rung; default: train.steps / factor²
  pbt                 population=4    how many runs
                      every=N         steps between two perturbations; default: train.steps / 10
                      quantile=0.25   the share of runs that copy, and of those that are copied from
                      factors=0.8,1.2 a copied value is multiplied by one of these, within its range,
                      resample=0.25   or, with this probability, drawn anew

A recipe may hold all of it in a section `search:` (recipes/search-lr.yaml). Results at any time: dtrain runs FOLDER."""


def main(argv: list[str]) -> int:
    """Exit codes: 0 all trials were made, 2 bad settings, 3 none succeeded, 75 stopped; the same command resumes."""
    if not argv or {"-h", "--help"} & set(argv):
        print(USAGE)
        return 0
    if importlib.util.find_spec("optuna") is None:
        raise bad("search", "", "optuna is not installed", "pip install 'dtrain[search]'")
    request = read_request(argv)
    chosen = None if request.options["algorithm"] == "optuna" else algorithm(request)
    if chosen is None:
        check_settings(request)
    typed = ["search", *sorted(a for a in argv if not a.startswith(("dir=", "detach=", "trials=", "parallel=")))]
    folder = Path(request.options["dir"] or sweeps.earlier(typed) or time.strftime("multirun/%Y-%m-%d/%H-%M-%S-search"))
    noted = read_json(folder / sweeps.SWEEP).get("arguments")
    if chosen and noted is not None and noted != hidden(typed):
        rule = "holds a search with other settings, whose results would be mixed with these"
        raise bad("dir", folder, rule, "leave out dir=, or name a new folder")
    if request.options["detach"] == "true" or (not request.options["detach"] and _is_submitted(request)):
        return _detach(argv, folder)
    with sweeps.lock(folder), unbroken_output():
        sweeps.note(folder, typed)
        print(f"folder  {shell_path(folder)}", flush=True)
        if chosen:
            code = Driver(folder, request, chosen).run()
        else:
            from dtrain.commands.search.optuna_search import Search

            code = Search(folder, request).run()
        if runs := sweeps.points(folder):
            sweep_table.print_sweep(runs)
            print(f"results dtrain runs {shell_path(folder)}")
    return code


def _is_submitted(request: Request) -> bool:
    """Are the trials submitted to a scheduler, which outlives this terminal?"""
    overrides = [w for w in request.fixed if w.startswith(("cluster", "recipe"))]
    return compose(overrides)["cluster"].get("launcher") == "submitit"


def _detach(argv: list[str], folder: Path) -> int:
    """Continue in a separate process that survives the end of the terminal."""
    sweeps.lock(folder).close()  # creates the folder; raises if the search is already running
    overrides = [a for a in argv if not a.startswith(("detach=", "dir="))]
    with open(folder / "search.log", "ab") as log:
        process = subprocess.Popen(
            [*start.command("dtrain.cli"), "search", *overrides, f"dir={folder}", "detach=false"],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    time.sleep(3)  # long enough to see an early error
    if process.poll() not in (None, DONE):
        console.print_error((folder / "search.log").read_text(errors="replace").removeprefix("error: ").strip())
        return process.poll() or FAILED
    print(f"searching in the background (process {process.pid} here; log in {shell_path(folder / 'search.log')})")
    print(f"results   dtrain runs {shell_path(folder)}")
    print(f"cancel    dtrain cancel {shell_path(folder)}      (the same command resumes it)")
    return DONE
