"""The `dtrain` command. Each subcommand imports only what it needs, so that help and tables answer at once."""

from __future__ import annotations

import argparse
import gc
import importlib
import math
import os
import shlex
import shutil
import sys
from pathlib import Path

from dtrain import __version__

USAGE = """usage: dtrain COMMAND ...

  launch …                     train: the same as `python launch.py …` (dtrain launch --help)
  plan model=… cluster=…       will it fit, how fast, what does it cost, which strategy (dtrain plan --help)
  verify [strategies=…]        prove, here, that every strategy computes what one process does
  search SETTING=SPACE …       look for the best settings with optuna (dtrain search --help)
  runs [RUN …|SWEEP]           list runs, or compare them; a sweep's table
  status RUN                   one run: its job, progress, attempts, and the next command
  logs RUN [-f] [--rank N]     what a rank says
  cancel RUN|SWEEP [--save]    take it out of the queue, or end it
  profile RUN                  where its steps go, when it ran with profile=torch or memory
  env cluster=NAME             the environment of a cluster's profile, as exports with reasons
  preflight [preflight=full]   check the nodes, before a run or alone (cluster=…)
  evaluate RUN                 loss, perplexity or accuracy over the whole held-out split
  sample RUN "prompt"          let a trained language model write
  export RUN [OUT] [--format]  the weights: one safetensors file, or a Hugging Face folder
  recipes ls|show|cp           complete starting points
  data prepare SOURCE OUT      turn text into memory-mapped token files
  version

RUN is a run folder, a part of its name, or `latest`. Exit codes: 0 done, 2 bad configuration, 3 failed while
running, 4 preflight failed, 75 preempted with a checkpoint saved."""


# where each lies; imported when it is asked for
COMMANDS = {
    "launch": "dtrain.launch:main", "plan": "dtrain.plan.command:main", "verify": "dtrain.verify:main",
    "search": "dtrain.search:main", "runs": "dtrain.runs:main", "status": "dtrain.status:main",
    "logs": "dtrain.logs:main", "cancel": "dtrain.cancel:main", "env": "dtrain.comm.profile:main",
    "preflight": "dtrain.comm.preflight:main", "evaluate": "dtrain.evaluate:main",
    "profile": "dtrain.profile.show:main", "sample": "dtrain.cli:sample", "export": "dtrain.cli:export",
    "recipes": "dtrain.cli:recipes", "data": "dtrain.cli:data",
}  # fmt: skip


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
        gc.set_threshold(200_000)  # so many objects stay that looking through them is a tenth of the time
    try:
        if command not in COMMANDS:
            import difflib

            near = difflib.get_close_matches(command.lower(), COMMANDS, 1)
            fix = f"did you mean dtrain {near[0]}?" if near else "dtrain --help lists them"
            fix = f"dtrain launch {shlex.join(argv)}" if "=" in command else fix
            raise ValueError(f"{command or repr(command)}: there is no such command\n  fix: {fix}")
        module, _, function = COMMANDS[command].partition(":")
        code = int(getattr(importlib.import_module(module), function)(rest))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # dtrain runs | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes once more at its end
        return 0
    except (ValueError, OSError) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        from dtrain import console

        text = str(error)
        if isinstance(error, OSError) and error.filename:
            text = f"{error.filename}: {error.strerror}\n  fix: check that the path is right, and yours to use"
        console.print_error(text)
        return 2
    finally:
        gc.set_threshold(*thresholds)
        if is_process:
            gc.freeze()  # it ends now: a last search for garbage would take a tenth of a launch


def sample(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("dtrain sample", description="Let a trained language model go on with a text.")
    parser.add_argument("run", help="a run folder, a part of its name, or latest")
    parser.add_argument("prompt", nargs="?", default="\n")
    parser.add_argument("--tokens", type=int, default=200, help="how many to write")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 = always the likeliest")
    parser.add_argument("--top-k", type=int, default=50, help="choose among the k likeliest; 0 = all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trust", nargs="*", default=[], metavar="MODULE", help="your own modules that the run names")
    options = parser.parse_args(argv)
    from dtrain.config import bad

    if options.tokens < 1:
        raise bad("--tokens", options.tokens, "must be at least 1", "--tokens 200")
    if not 0 <= options.temperature < math.inf:
        raise bad("--temperature", options.temperature, "must be a number from 0 on", "--temperature 0.8")
    if options.top_k < 0:
        raise bad("--top-k", options.top_k, "must be at least 0", "--top-k 0, which chooses among all")
    if not 0 <= options.seed < 2**63:
        raise bad("--seed", options.seed, "must be at least 0 and less than 2^63", "--seed 0")
    from dtrain.runs import find_run

    run_dir = find_run(options.run)
    from dtrain.sample import sample as sample_text

    choices = (options.temperature, options.top_k, options.seed, options.trust)
    print(sample_text(run_dir, options.prompt, options.tokens, *choices))
    return 0


def export(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("dtrain export", description="A run's newest weights, for other programs.")
    parser.add_argument("run", help="a run folder, a part of its name, or latest")
    parser.add_argument("out", nargs="?", help="default: RUN/model.safetensors, or the folder RUN/hf")
    parser.add_argument(
        "--format", choices=["safetensors", "hf"], default="safetensors",
        help="one file with our names, or a folder for Hugging Face's transformers",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="of the weights; default: as they are"
    )
    parser.add_argument("--trust", nargs="*", default=[], metavar="MODULE", help="your own modules that the run names")
    options = parser.parse_args(argv)
    from dtrain.runs import find_run

    run_dir = find_run(options.run)
    import torch

    from dtrain import export as write

    dtype = getattr(torch, options.dtype) if options.dtype else None
    if options.format == "hf":
        path = write.export_hf(run_dir, Path(options.out or run_dir / "hf"), dtype, options.trust)
    else:
        path = write.export_file(run_dir, Path(options.out or run_dir / "model.safetensors"), dtype, options.trust)
    size = sum(p.stat().st_size for p in (path.iterdir() if path.is_dir() else [path]))
    print(f"wrote {path} ({size / 2**20:.1f} MiB)")
    return 0


def recipes(argv: list[str]) -> int:
    from dtrain.arguments import built_in

    parser = argparse.ArgumentParser("dtrain recipes", description="Complete starting points: recipe=NAME runs one.")
    parser.add_argument("action", choices=["ls", "show", "cp"], nargs="?", default="ls")
    parser.add_argument("name", nargs="?")
    parser.add_argument("target", nargs="?", help="cp: the new file")
    options = parser.parse_args(argv)
    found = built_in()
    if options.action == "ls":
        width = max(map(len, found), default=0)
        for name, path in found.items():
            print(f"{name:{width}}  {path.read_text().splitlines()[0].lstrip('# ')}")
        return 0
    if options.name not in found:
        raise ValueError(f"recipe={options.name or ''}: there is no such recipe\n  fix: use one of {', '.join(found)}")
    if options.action == "show":
        print(found[options.name].read_text(), end="")
        return 0
    target = Path(options.target or found[options.name].name)
    if target.is_dir():
        target = target / found[options.name].name
    if target.exists():
        raise ValueError(f"{target}: is there already\n  fix: another name; nothing was written")
    shutil.copyfile(found[options.name], target)
    relative = target if target.is_absolute() else f"./{target}"
    from dtrain.console import LAUNCH

    print(f"wrote {target}; edit it, then: {LAUNCH} recipe={relative}")
    return 0


def data(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("dtrain data", description="Turn text into memory-mapped token files.")
    parser.add_argument("action", choices=["prepare"])
    parser.add_argument("source", help="a text or .jsonl file, a folder of them, or one that datasets saved to disk")
    parser.add_argument("out", help="the folder to make")
    parser.add_argument("--tokenizer", help="a tokenizers JSON file; default: bytes")
    parser.add_argument("--val-fraction", type=float, default=0.05)
    parser.add_argument("--pattern", help="which files of a folder, e.g. '**/*.md'; default: its .txt or .jsonl files")
    parser.add_argument("--field", default="text", help="where in a JSON line or a saved dataset the text is")
    options = parser.parse_args(argv)
    from dtrain.data.tokens import prepare

    choices = (options.tokenizer, options.val_fraction, options.pattern, options.field)
    meta = prepare(Path(options.source), Path(options.out), *choices)
    counts = f"{meta['train_tokens']:,} training and {meta['val_tokens']:,} validation tokens"
    print(f"wrote {options.out}: {counts} ({meta['dtype']})")
    from dtrain.console import LAUNCH

    print(f"next: {LAUNCH} data=tokens data.path={shlex.quote(options.out)}")
    return 0


if __name__ == "__main__":  # of dtrain/start.py
    sys.exit(main())
