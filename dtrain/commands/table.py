"""The commands of `dtrain`, by what people want to do. A command is one entry here and a module with main(argv) -> int.

Imports nothing, so that `dtrain --help` and completion appear at once.
"""

from __future__ import annotations

from typing import NamedTuple


class Command(NamedTuple):
    module: str  # imported when the command is used
    arguments: str  # as in `dtrain --help`
    summary: str
    examples: tuple[str, ...] = ()  # below the command's --help; none if that text has examples of its own
    others: tuple[str, ...] = ()  # what other programs call it, for did-you-mean


SECTIONS: dict[str, dict[str, Command]] = {
    "Train": {
        "launch": Command(
            "dtrain.commands.launch", "…", "train: the same as `python launch.py …`",
            others=(
                "train", "run", "start", "fit", "torchrun", "accelerate", "deepspeed", "mpirun", "horovodrun", "srun",
                "exec", "submit", "sbatch", "finetune", "pretrain",
            ),
        ),
        "search": Command(
            "dtrain.commands.search.command", "SETTING=SPACE …", "look for the best settings: optuna, ASHA, PBT",
            ("search strategy=ddp,fsdp 'optim.lr=tag(log,interval(1e-4,1e-2))' trials=20",
             "search algorithm=asha optim.lr=1e-4,1e-3,1e-2"),
            others=("tune", "optimize", "hpo", "sweep", "optuna", "lr-find", "lr_find", "multirun"),
        ),
        "recipes": Command(
            "dtrain.commands.recipes", "ls|show|cp", "complete configurations to start from",
            ("recipes ls", "recipes show cpu-tiny", "recipes cp cpu-tiny my.yaml"),
            others=("recipe", "init", "new", "examples", "templates"),
        ),
    },
    "Before a run": {
        "plan": Command(
            "dtrain.commands.plan.command", "model=… cluster=…",
            "will it fit, how fast, what does it cost, which strategy", others=("predict", "estimate", "cost"),
        ),
        "explain": Command(
            "dtrain.commands.explain", "SETTING|GROUP", "what it means, its type, its default, its values",
            others=("describe", "man", "config", "settings", "docs"),
        ),
        "verify": Command(
            "dtrain.commands.verify.command", "[strategies=…]",
            "check here that every strategy computes the same as one process",
            ("verify strategies=ddp,fsdp processes=2", "verify model=gpt2-tiny train.steps=5"),
            others=("selftest", "compare", "self-test"),
        ),
        "preflight": Command(
            "dtrain.commands.preflight", "[preflight=full]", "check the nodes, before a run or alone (cluster=…)",
            ("preflight preflight=full", "preflight cluster=slurm cluster.nodes=2"),
            others=("doctor", "check", "nvidia-smi", "diagnose-node"),
        ),
        "comm": Command(
            "dtrain.commands.comm", "bench [model=… …]",
            "measure collectives and links, and the messages of a strategy", others=("benchmark", "bench", "nccl"),
        ),
        "env": Command(
            "dtrain.commands.env", "cluster=NAME",
            "a cluster's environment variables as shell exports, with reasons", others=("environment",),
        ),
        "data": Command(
            "dtrain.commands.data", "prepare SOURCE OUT", "turn text into memory-mapped token files",
            ("data prepare FOLDER tokens",), others=("prepare", "tokenize"),
        ),
    },
    "While it runs": {
        "runs": Command(
            "dtrain.commands.runs", "[RUN …|SWEEP]", "list runs, or compare them; a sweep's table",
            ("runs", "runs latest", "runs --sort val_loss --limit 10"),
            others=("ls", "list", "ps", "jobs", "show", "history", "checkpoints", "checkpoint"),
        ),
        "watch": Command(
            "dtrain.commands.watch", "[RUN|SWEEP]",
            "follow it live: curve, speed against the plan, ranks, GPUs, queue, log",
            ("watch latest", "watch latest --once"),
            others=("follow", "live", "top", "monitor", "dashboard", "ui", "progress"),
        ),
        "status": Command(
            "dtrain.commands.status", "RUN", "one run: its job, progress, attempts, and the next command",
            ("status latest",), others=("info", "state"),
        ),
        "logs": Command(
            "dtrain.commands.logs", "RUN [-f] [--rank N]", "the log of a rank",
            ("logs latest -f", "logs latest --rank 1 -n all"), others=("tail", "cat", "output"),
        ),
        "plot": Command(
            "dtrain.commands.plot", "RUN … [METRIC …]", "draw curves in the terminal",
            ("plot latest", "plot latest val_loss lr"), others=("curve", "curves", "draw"),
        ),
        "scale": Command(
            "dtrain.commands.scale", "RUN N",
            "continue with N ranks or nodes, if cluster.processes or nodes is a range",
            ("scale latest 4",), others=("resize", "elastic"),
        ),
        "cancel": Command(
            "dtrain.commands.cancel", "RUN|SWEEP [--save]", "remove it from the queue, or stop it",
            ("cancel latest --save",), others=("stop", "kill", "scancel", "abort"),
        ),
        "metrics": Command(
            "dtrain.commands.metrics", "serve [FOLDER]", "the metrics of all live runs of a folder, for Prometheus",
            ("metrics serve outputs",), others=("prometheus",),
        ),
    },
    "After a run": {
        "why": Command(
            "dtrain.commands.why", "RUN", "why it ended: the cause, the rank, the evidence, what to do",
            ("why latest",), others=("diagnose", "debug", "error"),
        ),
        "report": Command(
            "dtrain.commands.report", "RUN … [-o FILE]", "one HTML page of runs, or a picture (--format png|svg)",
            ("report latest", "report latest -o run.svg --format svg"), others=("page", "html"),
        ),
        "profile": Command(
            "dtrain.commands.profile", "RUN", "where its step time or memory goes, after profile=torch or memory",
            ("launch profile=torch", "profile latest"), others=("trace", "profiler"),
        ),
        "log": Command(
            "dtrain.commands.log", "RUN … logger=…", "send runs to a tracker: later, or what it missed",
            ("log latest logger=csv",), others=("upload", "track", "sync", "wandb"),
        ),
        "evaluate": Command(
            "dtrain.commands.evaluate", "RUN", "loss, perplexity or accuracy over the whole held-out split",
            ("evaluate latest", "evaluate latest --split train --json"),
            others=("eval", "test", "validate", "score", "val", "evaluation"),
        ),
        "sample": Command(
            "dtrain.commands.sample", 'RUN "prompt"', "generate text with a trained language model",
            ('sample latest "def " --tokens 100',), others=("infer", "inference", "predict-text"),
        ),
        "generate": Command(
            "dtrain.commands.generate", "RUN PROMPTS -o OUT", "continue each prompt of a file; resumes after a kill",
            ("generate latest prompts.jsonl -o out.jsonl",
             "generate latest@best prompts.jsonl -o best.jsonl --temperature 0 --processes 2"),
            others=("batch", "batch-generate"),
        ),
        "serve": Command(
            "dtrain.commands.serve", "RUN [--port]", "an HTTP server with OpenAI's API, or for a classifier",
            ("serve latest --port 8000", "serve latest@best --slots 64"), others=("server", "api", "chat", "openai"),
        ),
        "export": Command(
            "dtrain.commands.export", "RUN [OUT] [--format]",
            "the weights: one safetensors file, or a Hugging Face folder",
            ("export latest --format hf",), others=("save", "convert", "upload-model", "download"),
        ),
        "chaos": Command(
            "dtrain.commands.chaos", "RUN [--kinds …]", "inject faults into copies of a run; is each recognised?",
            ("chaos latest --kinds kill not-finite",), others=("faults", "inject"),
        ),
    },
    "This command": {
        "completion": Command(
            "dtrain.commands.completion", "bash|zsh|fish", "let Tab complete commands, settings and runs",
            others=("complete", "autocomplete", "completions"),
        ),
    },
}  # fmt: skip
COMMANDS = {name: command for section in SECTIONS.values() for name, command in section.items()}


def usage() -> str:
    """What `dtrain --help` prints."""
    width = max(len(f"{name} {command.arguments}") for name, command in COMMANDS.items())
    lines = ["usage: dtrain COMMAND ...      (dtrain COMMAND --help describes one, with examples)"]
    for title, commands in SECTIONS.items():
        lines += ["", f"{title}:"]
        lines += [f"  {f'{name} {command.arguments}':{width}}  {command.summary}" for name, command in commands.items()]
    lines += [
        "",
        "`dtrain version` prints the version.",
        "RUN is a run folder, a part of its name, or `latest`. Exit codes: 0 done, 2 bad configuration, 3 failed while",
        "running, 4 preflight failed, 75 preempted with a checkpoint saved.",
    ]
    return "\n".join(lines)


def example_text(name: str) -> str:
    """What is added to the --help of a command."""
    commands = [f"  dtrain {example}" for example in COMMANDS[name].examples]
    return "\n".join(["", "examples:" if len(commands) > 1 else "example:", *commands]) if commands else ""


def nearest(word: str) -> str | None:
    """The command that a mistyped word means: by its name, or by what other programs call it."""
    import difflib

    names = {other: name for name, command in COMMANDS.items() for other in (*command.others, name)}
    near = difflib.get_close_matches(word.lower(), names, 1, 0.75)
    return names[near[0]] if near else None


def is_elsewhere(word: str) -> bool:
    """Do other programs call a command of ours so?"""
    return any(word in command.others for command in COMMANDS.values())


def meant(word: str, rest: list[str]) -> list[str] | None:
    """The arguments of `dtrain` that do what a command of another name probably should; None: there is no such command.

    `resume RUN` is a launch with resume=RUN, and `run train.py --lr 1` one with script=train.py.
    """
    import re

    processes: list[str] = []
    if word in ("python", "python3", "dtrain") and rest:
        word, rest = rest[0], rest[1:]
    if word in ("torchrun", "accelerate", "deepspeed", "mpirun", "horovodrun", "srun"):  # with flags of their own
        start = next((i for i, part in enumerate(rest) if part.endswith(".py")), 0)
        ranks = re.search(
            r"-(?:-nproc[_-]per[_-]node|-num[_-]gpus|-num[_-]processes|np?)[= ](\d+)", " ".join(rest[:start])
        )
        processes, rest = [f"cluster.processes={ranks[1]}"] if ranks else [], rest[start:]
    if word in ("resume", "restart", "continue", "fork", "branch"):
        key = "fork" if word in ("fork", "branch") else "resume"
        run = rest[0] if rest and "=" not in rest[0] and rest[0][0] != "-" else "latest"
        return ["launch", f"{key}={run}", *(rest[1:] if rest[:1] == [run] else rest)]
    if word.endswith(".py") and word.rpartition("/")[2] == "launch.py":
        return ["launch", *rest]
    if word.endswith(".py") or (nearest(word) == "launch" and rest and rest[0].endswith(".py")):
        file, *args = [word, *rest] if word.endswith(".py") else rest
        if file.rpartition("/")[2] == "launch.py":
            return ["launch", *args, *processes]
        return ["launch", f"script={file}", *processes, *([f"script_args=[{','.join(args)}]"] if args else [])]
    if word.lstrip("-") in ("config", "cfg", "compose", "settings", "show-config") and (not rest or "=" in rest[0]):
        return ["launch", "--cfg", "job", *rest]
    if word.replace("_", "-").lstrip("-") in ("dry-run", "dryrun", "preview"):
        return ["launch", "dry_run=true", *rest]
    groups = {"strategies": "strategy", "models": "model", "optimizers": "optim", "options": "strategy"}
    if word in groups or word.rstrip("s") in ("strategy", "model", "optim", "precision", "cluster", "logger", "hook"):
        return ["explain", groups.get(word, "hooks" if word.startswith("hook") else word.rstrip("s"))]
    if word in ("tensorboard", "tb"):
        return ["log", *(rest or ["latest"]), "logger=tensorboard"]
    if word in ("compare", "diff") and rest:
        return ["runs", *rest]
    if "=" in word or word in ("-m", "--multirun"):
        return ["launch", *(part.lstrip("-") if "=" in part else part for part in (word, *rest))]
    found = nearest(word)
    needs_run = found and COMMANDS[found].arguments.startswith("RUN") and not rest
    return [found, *(["latest"] if needs_run else rest)] if found else None
