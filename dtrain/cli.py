"""The `dtrain` command. Each subcommand imports only what it needs, so that help and tables appear at once."""

from __future__ import annotations

import gc
import importlib
import os
import shlex
import sys

from dtrain import __version__

USAGE = """usage: dtrain COMMAND ...

  launch …                     train: the same as `python launch.py …` (dtrain launch --help)
  plan model=… cluster=…       will it fit, how fast, what does it cost, which strategy (dtrain plan --help)
  verify [strategies=…]        check here that every strategy computes the same as one process
  search SETTING=SPACE …       look for the best settings: optuna, ASHA, PBT (dtrain search --help)
  runs [RUN …|SWEEP]           list runs, or compare them; a sweep's table
  watch [RUN|SWEEP]            follow it live: curve, speed against the plan, ranks, GPUs, queue, log
  status RUN                   one run: its job, progress, attempts, and the next command
  logs RUN [-f] [--rank N]     the log of a rank
  log RUN … logger=…           send runs to a tracker: later, or what it missed
  why RUN                      why it ended: the cause, the rank, the evidence, what to do
  chaos RUN [--kinds …]        inject faults into copies of a run; is each recognised?
  cancel RUN|SWEEP [--save]    remove it from the queue, or stop it
  scale RUN N                  continue with N ranks or nodes, if cluster.processes or nodes is a range
  metrics serve [FOLDER]       the metrics of all live runs of a folder, for Prometheus
  report RUN … [-o FILE]       one HTML page of runs, or a picture (--format png|svg)
  plot RUN … [METRIC …]        draw curves in the terminal
  profile RUN                  where its step time or memory goes, after profile=torch or memory
  env cluster=NAME             a cluster's environment variables as shell exports, with reasons
  preflight [preflight=full]   check the nodes, before a run or alone (cluster=…)
  comm bench [model=… …]       measure collectives and links, and the messages of a strategy (cluster=…)
  evaluate RUN                 loss, perplexity or accuracy over the whole held-out split
  sample RUN "prompt"          generate text with a trained language model
  export RUN [OUT] [--format]  the weights: one safetensors file, or a Hugging Face folder
  recipes ls|show|cp           complete configurations to start from
  data prepare SOURCE OUT      turn text into memory-mapped token files
  version

RUN is a run folder, a part of its name, or `latest`. Exit codes: 0 done, 2 bad configuration, 3 failed while
running, 4 preflight failed, 75 preempted with a checkpoint saved."""


# each module has a main(argv) and is imported on use
COMMANDS = {
    "launch": "dtrain.launch.app",
    "plan": "dtrain.commands.plan.command",
    "verify": "dtrain.commands.verify.command",
    "search": "dtrain.commands.search.command",
    "runs": "dtrain.commands.runs",
    "watch": "dtrain.commands.watch",
    "status": "dtrain.commands.status",
    "logs": "dtrain.commands.logs",
    "log": "dtrain.commands.log",
    "why": "dtrain.commands.why",
    "chaos": "dtrain.commands.chaos",
    "cancel": "dtrain.commands.cancel",
    "scale": "dtrain.commands.scale",
    "metrics": "dtrain.commands.metrics",
    "report": "dtrain.commands.report",
    "plot": "dtrain.commands.plot",
    "profile": "dtrain.commands.profile",
    "env": "dtrain.commands.env",
    "preflight": "dtrain.commands.preflight",
    "comm": "dtrain.commands.comm",
    "evaluate": "dtrain.commands.evaluate",
    "sample": "dtrain.commands.sample",
    "export": "dtrain.commands.export",
    "recipes": "dtrain.commands.recipes",
    "data": "dtrain.commands.data",
}


def main(argv: list[str] | None = None) -> int:
    is_process = argv is None
    argv = sys.argv[1:] if argv is None else argv
    command, rest = (argv[0], argv[1:]) if argv else ("--help", [])
    if command in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    if command in ("version", "--version"):
        print(f"dtrain {__version__}")
        return 0
    thresholds = gc.get_threshold()
    if command in ("plan", "launch"):
        gc.set_threshold(200_000)  # most objects stay alive: collecting them would take a tenth of the time
    try:
        if command not in COMMANDS:
            import difflib

            near = difflib.get_close_matches(command.lower(), COMMANDS, 1)
            fix = f"did you mean dtrain {near[0]}?" if near else "dtrain --help lists them"
            fix = f"dtrain launch {shlex.join(argv)}" if "=" in command else fix
            raise ValueError(f"{command or repr(command)}: there is no such command\n  fix: {fix}")
        code = int(importlib.import_module(COMMANDS[command]).main(rest))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # dtrain runs | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes stdout once more at exit
        return 0
    except (ValueError, OSError) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        from dtrain.ui import console

        text = str(error)
        if isinstance(error, OSError) and error.filename:
            text = f"{error.filename}: {error.strerror}\n  fix: check the path and its permissions"
        console.print_error(text)
        return 2
    finally:
        gc.set_threshold(*thresholds)
        if is_process:
            gc.freeze()  # the process ends now: a final collection would take a tenth of a launch


if __name__ == "__main__":  # run by dtrain/start.py
    sys.exit(main())
