"""`dtrain plan …`: does it fit, how fast, at what cost, which strategy. Needs no GPU and no torch; starts nothing."""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dtrain.commands.plan.request import launch_command
from dtrain.errors import bad
from dtrain.util.format import without_nan

if TYPE_CHECKING:
    from dtrain.commands.plan.request import Question
    from dtrain.plan.predict import Prediction, Task

USAGE = """usage: dtrain plan [GROUP=OPTION ...] [setting=value ...] [OPTION ...]
       dtrain plan calibrate ...      measure this machine, or one run, for better predictions (… --help)

Takes the settings of a launch, also recipe=NAME. Settings you give are fixed; the planner searches over the rest:
  dtrain plan model=llama-7b cluster=aws-ib cluster.nodes=4        all strategies, the best first
  dtrain plan model=llama-7b hardware=h100 strategy=fsdp           the layouts of one strategy
  dtrain plan … strategy=3d strategy.tp=8 strategy.pp=4            that one layout
  dtrain plan recipe=gpt2-1.5b-fsdp-4gpu hardware=a100-80gb        what a recipe needs there

  --json                    the same for scripts: a list of layouts, best first; for the three questions below an object
                            (question, answer, sentence, rows, command); not with --explain
  --all                     every layout, even slow ones, not only the best few and the best of each strategy
  --explain                 the calculation of the best layout, with its numbers
  --tokens N                plan a run of N tokens (or images): 300B, 1.5T, 26e6; default: train.steps
  --gpus-for TIME           how many GPUs finish the run in 3d, 12h, 90m ...
  --largest-model           the largest model of this family that fits here
  --largest-micro-batch     the largest micro-batch that fits, by strategy and activation checkpointing
  --stack NAME              predict another program's step time, to compare with published results: megatron-2021,
                            llm-foundry, torchtitan, ... (dtrain/plan/time/stack.py); memory stays dtrain's
  --config-dir DIR          your own files in addition to conf/, e.g. DIR/hardware/mine.yaml for hardware=mine

Exit codes: 0 there is a plan (even if nothing fits), 2 bad configuration."""

FLAGS = ("--json", "--all", "--explain", "--largest-model", "--largest-micro-batch")
VALUES = ("--tokens", "--gpus-for", "--config-dir", "--stack")
QUESTIONS = ("--gpus-for", "--largest-model", "--largest-micro-batch")
WORDS = {"thousand": "K", "million": "M", "billion": "B", "trillion": "T"}
UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


@dataclass
class Options:
    """The options given beside the settings."""

    overrides: list[str]
    json: bool = False
    all: bool = False
    explain: bool = False
    largest_model: bool = False
    largest_micro_batch: bool = False
    tokens: float | None = None
    gpus_for: float | None = None  # seconds
    config_dir: str | None = None
    stack: str | None = None


def main(argv: list[str]) -> int:
    """Exit codes: 0 there is a plan, 2 bad configuration."""
    if {"-h", "--help"} & set(argv[:1]) or (argv[:1] != ["calibrate"] and {"-h", "--help"} & set(argv)):
        print(USAGE)
        return 0
    if argv[:1] == ["calibrate"]:
        from dtrain.plan.calibrate.command import main as calibrate

        return calibrate(argv[1:])
    options = read_options(argv)
    from dtrain.commands.plan import request  # imported late: Hydra takes 0.2 s, and a mistyped option does not need it

    question = request.compose(options.overrides, options.config_dir)
    return answer(question, options)


def read_options(argv: Sequence[str]) -> Options:
    """Separate options from settings; the settings go to Hydra."""
    options, rest = Options([]), list(argv)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if not word.startswith("-"):
            meant = f"--{name.replace('_', '-')}"
            if equals and meant in READ:  # tokens=100B
                READ[meant](meant, value)
            if equals and meant in (*FLAGS, *VALUES):
                fix = f"{meant} {value or '…'}" if meant in VALUES else meant
                raise bad(name, value, "is an option of dtrain plan, not a setting", fix)
            options.overrides.append(word)
            continue
        if name in FLAGS and not equals:
            setattr(options, name[2:].replace("-", "_"), True)
        elif name in VALUES:
            if not equals:
                value = rest.pop(0) if rest else ""
                unit = WORDS.get(rest[0].lower(), rest[0].upper()) if rest else ""
                if name == "--tokens" and unit and unit in UNITS:  # --tokens 300 B, 300 billion
                    value += unit
                    del rest[0]
            setattr(options, name[2:].replace("-", "_"), READ[name](name, value) if name in READ else value)
        else:
            if name in ("-m", "--multirun"):
                raise ValueError(f"{word}: dtrain plan takes no sweep\n  fix: plan each point, or launch with {name}")
            from dtrain.launch.arguments import check_dashes

            check_dashes(word, rest[0] if rest else "")
            near = difflib.get_close_matches(name.lower(), (*FLAGS, *VALUES), 1, 0.75)
            fix = f"did you mean {near[0]}?" if near else f"use one of {', '.join((*FLAGS, *VALUES))}"
            raise ValueError(f"{word}: there is no such option\n  fix: {fix}")
    if options.json and options.explain:
        raise bad("--explain", "", "is text for people and cannot be combined with --json", "leave out one of them")
    return options


def tokens(name: str, text: str) -> float:
    """Parse 300B, 1.5T, 26e6 or 1000000."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?(?:e\d+)?)([KMBGT]?)", text.replace("_", ""), re.IGNORECASE)
    if found is None or float(found[1]) <= 0:
        near = re.match(r"(\d+(?:\.\d*)?(?:e\d+)?)\s*([KMBGT]?)", re.sub("[_,]", "", text), re.IGNORECASE)
        fix = f"{near[1]}{near[2].upper()}" if near and float(near[1]) else "300B"  # 100Bn, 100 billion
        raise bad(name, text, "must be a number of tokens, or of images", f"{name} {fix}")
    return float(found[1]) * UNITS[found[2].upper()]


def stack(name: str, text: str) -> str:
    """Check the name of a software stack whose steps can be timed."""
    from dtrain.plan.time.stack import STACKS

    if text not in STACKS:
        raise bad(name, text, "there is no such stack", f"{name} can be {', '.join(STACKS)}")
    return text


def seconds(name: str, text: str) -> float:
    """Parse 3d, 12h, 1d12h or 90m as seconds."""
    found = re.fullmatch(r"(?:\d+(?:\.\d+)?[smhdw])+", text)
    value = sum(float(n) * SECONDS[unit] for n, unit in re.findall(r"(\d+(?:\.\d+)?)([smhdw])", text)) if found else 0
    if not value:
        near = re.match(r"(\d+(?:\.\d+)?)\s*([smhdw]?)", text.lower())  # 2weeks, 14
        fix = f"{near[1]}{near[2] or 'd'}" if near and float(near[1]) else "3d"
        raise bad(name, text, "must be a time: a number and w, d, h, m or s", f"{name} {fix}")
    return value


READ = {"--tokens": tokens, "--gpus-for": seconds, "--stack": stack}


def answer(question: Question, options: Options) -> int:
    """Print the answer."""
    from dtrain.plan.predict import task_of
    from dtrain.plan.search.search import search

    config = question.config
    if config["train"]["steps"] is None and options.tokens is None:
        rule = "dtrain plan does not read the data, so it does not know the steps of an epoch"
        raise bad("train.epochs", config["train"]["epochs"], rule, "train.steps=1000, or --tokens 26e6")
    task = task_of(config, options.tokens)
    if task is None:
        raise unknown(config, dict(w.split("=", 1) for w in question.overrides if "=" in w).get("hardware"))
    if options.tokens and task.samples < task.global_batch_size:
        step = task.global_batch_size * task.tokens_per_sample
        rule = f"is less than one step, which takes {step:,} {task.unit}; K, M, B and T stand for thousands and more"
        raise bad("--tokens", f"{options.tokens:g}", rule, f"--tokens {step}, or --tokens 300B")
    task = replace(task, stack=options.stack)
    asked = [name for name in QUESTIONS if getattr(options, name[2:].replace("-", "_"))]
    if asked:
        if len(asked) > 1 or options.stack or options.explain:
            raise bad(
                asked[0],
                "",
                "cannot be combined with --stack, --explain or another question",
                f"dtrain plan … {asked[0]} without the other options",
            )
        from dtrain.commands.plan import capacity

        if options.gpus_for:
            found = capacity.gpus_for(question, options.gpus_for, options.tokens)
        elif options.largest_model:
            found = capacity.largest_model(question)
        else:
            found = capacity.largest_micro_batch(question, task)
        capacity.show(found, options.json)
        return 0
    if question.is_one_layout:
        predictions = [one_layout(question, task)]
    else:
        predictions = search(config, question.typed, task, everything=options.all)
    if not predictions:
        one_layout(question, task)  # the launcher's own checks explain best what is wrong
        raise none_possible(config)
    if options.json:
        notes = {"notes": question.notes}
        rows = [without_nan(p.row()) | {"command": launch_command(question, p)} | notes for p in predictions]
        print("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]")  # one line each: indent is 5 times slower
        return 0
    show(question, predictions, options)
    return 0


def one_layout(question: Question, task: Task) -> Prediction:
    """Predict the layout that was typed, checked by the launcher's rules."""
    from dtrain.config.mesh import MeshSizes
    from dtrain.plan.layout import layout_of
    from dtrain.plan.predict import predict_layout
    from dtrain.plan.sections import check_layout, check_micro_batches

    layout, strategy = layout_of(question.config), question.config["strategy"]
    few = layout.micro_batches < layout.pp and strategy.get("schedule") == "1f1b"
    if few and "strategy.schedule" not in question.typed:  # the launcher would reject it and suggest this one
        strategy["schedule"] = "gpipe"
        layout = layout_of(question.config)
        question.notes.append("strategy.schedule=gpipe, as 1f1b needs as many micro-batches as pipeline ranks")
    sizes = MeshSizes(layout.pp, layout.dp, layout.tp, layout.cp)
    check_layout(question.config, sizes)
    check_micro_batches(question.config, sizes, layout.micro_batches)
    return predict_layout(layout, task)


def show(question: Question, predictions: Sequence[Prediction], options: Options) -> None:
    """Print the table and the lines below it."""
    from dtrain.plan import report as texts
    from dtrain.plan.search.explain_choice import faster_micro_batch, little_room, name, order_notes, why
    from dtrain.plan.search.search import search

    config, best = question.config, predictions[0]
    print(texts.heading(best, config))
    print()
    rows = texts.shown(predictions, options.all)
    texts.print_predictions(rows)
    if len(rows) < len(predictions):
        print(f"({len(rows)} of {len(predictions)} layouts: --all shows the others)")
    print()
    if not question.is_one_layout:
        reason = why(predictions, config, "strategy" in question.typed)
        print(reason if best.fits is False else f"chosen  {reason}")
    elif best.fits is False:
        others = search(config, {*question.typed} - {"train.micro_batch_size", "activation_checkpointing"}, best.task)
        others = [p for p in others if p.fits] or [p for p in search(config, (), best.task) if p.fits]
        lacks = f"It {texts.lacking(best)} on each GPU."
        print(f"{lacks} {name(others[0].layout)} fits: {launch_command(question, others[0])}" if others else lacks)
    for line in (*texts.details(best), *texts.bounds(best)):
        print(line)
    notes = [*question.notes, *length_note(question, best.task, options.tokens)]
    if question.is_one_layout and best.fits is not False:
        notes += [f"it fits{room}"] if (room := little_room(best)) else []
        notes += faster_micro_batch(best) if "train.micro_batch_size" not in question.typed else []
    notes += order_notes(rows) if not question.is_one_layout else []
    for note in (*notes, *precision_note(best), *package_note(best), *missing_values_note(best), *texts.no_price(best)):
        print(f"note    {note}")
    if options.explain:
        print("\n" + "\n".join(texts.explained(best)))
    if best.fits is not False:
        print(f"\nlaunch  {launch_command(question, best)}")
    sys.stdout.flush()


def length_note(question: Question, task: Task, tokens: float | None) -> list[str]:
    """Tell that time and cost are those of a run of the default length."""
    if tokens is not None or {"train.steps", "train.epochs", "resume"} & question.typed:
        return []
    steps = task.samples / task.global_batch_size
    return [f"the run is train.steps={steps:g} long, the default; for another length: --tokens 300B"]


def precision_note(best: Prediction) -> list[str]:
    """Suggest 16 bits if fp32 was requested."""
    from dtrain.config.hardware import half_precision
    from dtrain.plan.predict import predict_layout

    half = half_precision(best.task.hardware.gpu)
    if best.layout.precision != "fp32" or half is None or not best.step_s:
        return []
    stream = "bfloat16" if half == "bf16" else "float32"
    other = predict_layout(replace(best.layout, precision=half, stream=stream), best.task)
    gain = best.step_s / other.step_s if other.step_s else 0.0
    return [f"precision={half} would be {gain:.1f} times as fast"] if gain >= 1.05 else []


def missing_values_note(best: Prediction) -> list[str]:
    """List what could not be predicted because the hardware file lacks values."""
    from dtrain.plan.report import host_known

    notes = []
    if not best.time:
        notes.append("no time is predicted: the hardware file lacks rates (dtrain plan calibrate measures them)")
    if not host_known(best):
        notes.append(
            "the offloaded state may not fit in host memory, whose size is not known (hardware.host_memory_gib=…)"
        )
    return notes


def package_note(best: Prediction) -> list[str]:
    """Name a package that the first layout needs and that is not installed here."""
    from dtrain.plan.sections import missing_package

    missing = missing_package(best.layout.strategy)
    if missing is None:
        return []
    return [f"{best.layout.strategy} needs {missing[0]}, which is not installed here: {missing[1]}"]


def unknown(config: dict[str, Any], given: str | None = None) -> ValueError:
    """Explain why nothing can be planned, with a fix."""
    from dtrain.commands.plan.request import own_model
    from dtrain.config.files import options_of
    from dtrain.plan.model_shape import shape_of

    if shape_of(config) is None:
        return own_model(config["choices"].get("model"))
    chosen = given or config["choices"].get("hardware")  # a typed hardware stays, even if one was detected
    names = ", ".join(name for name in options_of("hardware") if name not in ("unknown", "cpu"))
    rule = "there is no GPU here to plan for" if chosen == "cpu" else "nothing is known about the GPUs to plan for"
    fix = f"hardware=NAME, where NAME can be {names}; or measure this machine: dtrain plan calibrate"
    return bad("hardware", chosen, rule, fix)


def none_possible(config: dict[str, Any]) -> ValueError:
    """No layout satisfies the rules: nearly always because of the batch size."""
    from dtrain.config.hardware import world_size

    batch, ranks = config["train"]["global_batch_size"], world_size(config)
    rule = f"no layout of {ranks} GPUs is valid with it and the other settings you gave"
    return bad("train.global_batch_size", batch, rule, f"train.global_batch_size={-(-batch // ranks) * ranks}")
