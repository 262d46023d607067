"""`dtrain verify`: compare every strategy with one process on this machine: same seed, same global batch.

Each strategy trains a very small model (or the one you name) in its own world. Its losses, gradient norms and final
weights are compared with those of one process, and a table shows the differences (compare.py).
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import json
import math
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from dtrain.commands.run_parser import RunParser
from dtrain.commands.verify import compare, mutation_test, script_check, world
from dtrain.commands.verify.compare import FEWER_STEPS, FULL, SMALL, Case, Variant, compose, make_case, variants
from dtrain.commands.verify.mutants import chosen
from dtrain.config.files import flatten, options_of
from dtrain.config.hydra_errors import MISTAKES, explain
from dtrain.config.ranges import check_ranges
from dtrain.config.schema import check_section, own_defaults
from dtrain.config.source import place, source_of
from dtrain.errors import bad
from dtrain.launch.arguments import prepare_arguments
from dtrain.runs.protocol import BAD_CONFIG, DONE, FAILED
from dtrain.ui import console
from dtrain.util.format import without_nan

# our defaults that are dropped if another setting is given: a model brings matching data
TIED_TO = {"optim.lr": "model", "data": "model", "train.stop_after": "train.steps"}
# a launch has one of each, verify has several
ALIASES = {"strategy": "strategies", "precision": "precisions", "cluster.processes": "processes"}
NOT_HERE = {
    "train.epochs": "train.steps=20, as a few steps show it",
    "run_dir": "--keep DIR",
    **dict.fromkeys(["cluster", "cluster.nodes", "resume", "fork", "dry_run", "hydra.run.dir"], "leave it out"),
}  # fmt: skip
BATCH = "train.global_batch_size"
INTERRUPTED = 130  # a shell's exit code for Ctrl-C
HEADINGS = (
    "strategy", "ranks", "mesh", "precision", "loss diff", "norm diff", "grad diff", "weight diff",
    "loss tol", "seconds", "result",
)  # fmt: skip


def main(argv: list[str]) -> int:
    """Exit codes: 0 all passed, 2 bad input, 3 one did not pass."""
    options = argument_parser().parse_intermixed_args(argv)
    if os.getcwd() not in sys.path:  # the user's own modules are here; the ranks import from here too
        sys.path.append(os.getcwd())
    try:
        with term_is_ctrl_c(), run_folder(options.keep) as folder:
            if any(key_of(word) == "script" for word in options.settings):
                return script_check.main(options.settings, folder, options.timeout, options.json)
            if any(key_of(word) in ("mutants", "clean") for word in options.settings):
                return verify_itself(options, folder)
            request = read_request(options)
            references, cases = plan(request, folder)
            # an unnamed case that cannot run here (missing package or GPU) is reported as left out, not as failed
            left_out = [left_out_row(case) for case in cases if case.refused and not request.names(case)]
            cases = [case for case in cases if not case.refused or request.names(case)]
            targets = {case.config["strategy"]["_target_"] for case in cases if case.config}
            world.start_server(target.rpartition(".")[0] for target in targets if target.startswith("dtrain."))
            return show(cases, rows(references, cases, options.timeout), left_out, options.json)
    except KeyboardInterrupt:
        return INTERRUPTED
    except MISTAKES as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1" or isinstance(error, BrokenPipeError):
            raise
        console.print_error(explain(error))
        return BAD_CONFIG


def argument_parser() -> argparse.ArgumentParser:
    parser = RunParser(
        "dtrain verify",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Train with each strategy and with one process; compare losses, gradient norms and final weights.",
        epilog="""settings, all of them optional:
  strategies=ddp,fsdp      default: all of conf/strategy that can run here; the others are listed with the reason;
                           ddp+int8 is ddp with strategy.compress=int8, fsdp+int8 hybrid fsdp with it, and so on;
                           fsdp+resume begins with one process's checkpoint in the middle; ddp+uneven has samples
                           of different lengths, fsdp+dropout dropout and activation checkpointing, against ddp
  processes=2,4            default: the two smallest of 2, 4 and 8 that a strategy's axes can make a mesh of
  precisions=fp32,bf16     default: fp32, and each other one at the smallest number of processes
  mutants=all clean=20     test verify itself: does it catch published bugs, and let 20 correct layouts, drawn at
                           random, pass? mutants=NAME,NAME runs some of docs/verify.md
  script=theirs.py         run another training script at 1, 2 and 4 processes: does it follow one process?
                           script_args='--batch {batch_per_process}' batch=32 keeps its global batch; docs/verify.md
  model=… train.steps=…    any setting of `dtrain launch`, for all runs; strategy.… does not apply to the single process

Exit codes: 0 all passed, 2 bad input, 3 one did not pass.""",
    )
    parser.add_argument("settings", nargs="*", metavar="setting=value")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON; the table goes to stderr")
    parser.add_argument("--keep", metavar="DIR", help="keep the run folders there")
    parser.add_argument(
        "--timeout", type=float, default=120.0, metavar="S", help="seconds for each world (120); more on a busy machine"
    )
    return parser


def verify_itself(options: argparse.Namespace, folder: Path) -> int:
    """Run mutants=… and clean=…: test verify itself."""
    words = dict(word.split("=", 1) for word in options.settings if key_of(word) in ("mutants", "clean"))
    others = [word for word in options.settings if key_of(word) not in words]
    if others:
        rule = "mutants=… and clean=… choose their settings themselves"
        raise ValueError(f"{others[0]}: {rule}\n  fix: leave it out")
    names = words.get("mutants", "")
    mutants = chosen(names.strip("[]").split(",")) if names else []
    count = words.get("clean", "0")
    if not count.isdecimal():
        raise bad("clean", count, "must be a whole number of configurations", "clean=20")
    world.start_server(["dtrain.strategies.deepspeed"] if find_spec("deepspeed") else [])
    runs = mutation_test.Runs(folder, options.timeout, plan_one, judged)
    passed = True
    if mutants:
        outcomes = mutation_test.of_mutants(mutants, runs)
        passed &= mutation_test.show(outcomes, len(mutants), "mutants killed, each by name", options.json)
    if int(count):
        outcomes = mutation_test.of_clean(int(count), runs)
        passed &= mutation_test.show(outcomes, int(count), "clean configurations passed", options.json)
    return DONE if passed else FAILED


def plan_one(row: str, size: int, precision: str, settings: Sequence[str], folder: Path) -> tuple[Case, Case, str]:
    """Return the case of one row, its reference, which saves what any row needs, and the reference's key."""
    references, (case,) = plan(Request([row], True, [size], [precision], list(settings)), folder)
    key = key_of_reference(case)
    return case, saving_in_the_middle(references[key], middle_of(references[key])), key


def judged(case: Case, one: Case, error: str) -> tuple[bool, str, str]:
    row = judge(case, one, error, 0.0)
    return bool(row.passed), row.reason, row.named


# ---- what was asked for --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    strategies: list[str]
    named: bool  # by the user; otherwise all
    sizes: list[int]  # empty: the two smallest of each strategy
    precisions: list[str]  # empty: fp32 at these sizes, the others at the smallest one
    overrides: list[str]

    def names(self, case: Case) -> bool:
        """Whether the user named this case explicitly, rather than by default."""
        return self.named and (bool(self.precisions) or case.precision == FULL)


def key_of(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def read_request(options: argparse.Namespace) -> Request:
    lists: dict[str, list[str]] = {"strategies": [], "processes": [], "precisions": []}
    overrides = []
    for word in prepare_arguments(options.settings):
        key, _, value = word.partition("=")
        if (key := ALIASES.get(key, key)) in lists:
            items = [item.strip() for item in value.strip("[]").split(",")]
            lists[key] = list(dict.fromkeys(items))
        elif key_of(word) in NOT_HERE:
            fix = NOT_HERE[key_of(word)]
            raise ValueError(f"{word}: is not for verify, which runs each strategy on this machine\n  fix: {fix}")
        else:
            overrides.append(word)
    known = {"strategies": [*options_of("strategy"), *variants()], "precisions": options_of("precision")}
    for key, group in (("strategies", "strategy"), ("precisions", "precision")):
        for name in lists[key]:
            if name not in known[key]:
                near = difflib.get_close_matches(name, known[key], 1, 0.6)
                meant = ",".join(near[0] if one == name and near else one for one in lists[key])
                fix = f"did you mean {key}={meant}?" if near else f"{key} can be {', '.join(known[key])}"
                raise bad(key, ",".join(lists[key]), f"there is no {group} {name!r}", fix)
    for text in lists["processes"]:
        if not text.isdecimal() or int(text) < 1:
            raise bad("processes", ",".join(lists["processes"]), "must be whole numbers, at least 1", "processes=2,4")
    if not options.timeout > 0:
        raise bad("--timeout", options.timeout, "must be more than 0 seconds", "--timeout 120")
    sizes = [int(text) for text in lists["processes"]]
    strategies = lists["strategies"] or known["strategies"]
    return Request(strategies, bool(lists["strategies"]), sizes, lists["precisions"], overrides)


def settings(overrides: Sequence[str], defaults: Sequence[str]) -> list[str]:
    """Return the overrides, preceded by the defaults that do not conflict with them.

    An option chosen for a group brings its own settings, and a recipe brings all settings.
    """
    given = {key_of(o) for o in overrides}

    def wanted(default: str) -> bool:
        key = key_of(default)
        if "recipe" in given and key != "precision":
            return False
        return not given & {key, key.partition(".")[0], TIED_TO.get(key, key)}

    return [*filter(wanted, defaults), *overrides]


def plan(request: Request, folder: Path) -> tuple[dict[str, Case], list[Case]]:
    """Return the reference runs by key, and all other cases. Raises if no number of ranks is valid.

    The reference of a precision is one process; the key is its name. Rows with other data have their own.
    """
    references: dict[str, Case] = {}
    cases: list[Case] = []
    plain = [o for o in request.overrides if not key_of(o).startswith("strategy.")]
    given = {key_of(o) for o in request.overrides}
    known = variants()
    whole = math.lcm(*request.sizes) if request.sizes else 1
    small = [
        f"{key_of(word)}={-(-int(word.partition('=')[2]) // whole) * whole}" if key_of(word) == BATCH else word
        for word in SMALL
    ]  # a batch that every number of ranks divides
    for precision in request.precisions or sorted(options_of("precision"), key=lambda name: name != FULL):
        defaults = [*small, f"precision={precision}", *([] if precision == FULL else [FEWER_STEPS])]
        one = make_case("ddp", 1, precision, compose(settings(plain, defaults)), folder / f"one-{precision}")
        if one.refused and (request.precisions or precision == FULL):
            raise ValueError(one.refused)
        if one.refused:  # e.g. fp8 without a suitable GPU
            cases.append(one)
            continue
        references[precision] = one
        for strategy in request.strategies:
            variant = known.get(strategy)
            if variant and not request.precisions and precision != FULL:
                continue
            if variant and is_excluded(variant, given) and not request.named:
                continue
            shared = variant.shared if variant else ()
            chosen = [*(variant.overrides if variant else (f"strategy={strategy}",)), *shared]
            others = [default for default in defaults if key_of(default) not in map(key_of, shared)]
            cfg = compose([*chosen, *settings(request.overrides, others)])
            # each layout accumulates, one process takes the whole batch; not with batch norm, which is per micro-batch
            accumulate = "batch_norm" not in cfg.model and not given & {"recipe", "train.micro_batch_size"}
            section: Any = OmegaConf.to_container(cfg.strategy, resolve=True)
            check_section("strategy", section, cfg.trust)
            check_ranges(flatten({"strategy": section}))
            fitting = compare.world_sizes(section)
            sizes = request.sizes or ([variant.size or fitting[0]] if variant else fitting[:2])
            for size in sizes if precision == FULL or request.precisions else sizes[:1]:
                run_dir = folder / f"{strategy}-{size}-{precision}"
                case = make_case(strategy, size, precision, cfg, run_dir, accumulate)
                cases.append(with_reference(case, variant, plain, others, references, folder, accumulate))
    return references, cases


def is_excluded(variant: Variant, given: set[str]) -> bool:
    """Return whether a row that nobody named needs other data or another model than those that were given."""
    own = {part for s in variant.shared for part in (key_of(s), key_of(s).partition(".")[0])}
    return bool(variant.shared and given & {"model", "data", "recipe", *own})


def with_reference(
    case: Case, variant: Variant | None, plain: list[str], defaults: Sequence[str],
    references: dict[str, Case], folder: Path, accumulate: bool,
) -> Case:  # fmt: skip
    """Return the case with the run that it is compared with, and with its beginning if it has one in the middle."""
    if case.refused:
        return case
    if variant and variant.resumes:
        one = references[case.precision]
        train, middle = one.config["train"], middle_of(one)
        if not middle:
            return replace(case, refused=f"train.steps={train['steps']}: a run of one step cannot be resumed")
        references[case.precision] = saving_in_the_middle(one, middle)
        begins_with = one.run_dir / "checkpoints" / f"step-{middle:08d}"
        return replace(case, begins_with=begins_with, save_after=(middle + 1,))
    if not (variant and variant.shared):
        return case
    size = case.size if variant.alike else 1
    key = f"{'-'.join((*variant.shared, str(size)))}-{case.precision}"
    if key not in references:
        cfg = compose(["strategy=ddp", *variant.shared, *settings(plain, defaults)])
        run_dir = folder / f"one-{case.strategy.partition('+')[2]}-{case.precision}"
        references[key] = make_case("ddp", size, case.precision, cfg, run_dir, accumulate and variant.alike)
        if references[key].refused:
            raise ValueError(references[key].refused)
    return replace(case, reference=key)


def middle_of(case: Case) -> int:
    train = case.config["train"]
    return int(min(train["steps"], train["stop_after"] or train["steps"]) // 2)


def saving_in_the_middle(case: Case, middle: int) -> Case:
    """Let a reference save where others begin. What it computes is the same."""
    case.config["checkpoint"] |= {"every": middle, "keep": 9}
    return replace(case, save_after=(1, middle + 1))


@contextlib.contextmanager
def run_folder(keep: str | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="dtrain-verify-") as folder:
            yield Path(folder)
        return
    kept = Path(keep).expanduser().absolute()
    if kept.exists() and (not kept.is_dir() or any(kept.iterdir())):
        raise bad("--keep", keep, "already exists and is not an empty folder", "choose another name for --keep")
    yield kept


@contextlib.contextmanager
def term_is_ctrl_c() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C, so that a plain kill also ends the ranks and removes the folder."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# ---- the table -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A row of the table; the names are those of `--json`."""

    strategy: str
    world_size: int
    precision: str
    max_loss_diff: float | None
    max_grad_norm_diff: float | None  # relative to the norm
    max_weight_diff: float | None
    max_gradient_diff: float | None  # of a parameter after the first update, relative to its norm
    tolerance: float | None  # for the losses
    passed: bool | None  # None: left out
    seconds: float
    mesh: str
    reason: str  # why it did not pass
    left_out: str = ""  # why it cannot run on this machine
    named: str = ""  # the sample, rank or parameter that differs first

    def cells(self) -> list[str]:
        values = (
            self.max_loss_diff,
            self.max_grad_norm_diff,
            self.max_gradient_diff,
            self.max_weight_diff,
            self.tolerance,
        )
        return [
            self.strategy, str(self.world_size), self.mesh or "-", self.precision,
            *("-" if x is None else f"{x:.1e}" for x in values), f"{self.seconds:.1f}",
            "PASS" if self.passed else "FAIL",
        ]  # fmt: skip


def rows(references: dict[str, Case], cases: Sequence[Case], timeout: float) -> Iterator[Row]:
    """Run world after world. A reference runs before the first case that needs it."""
    # one thread per rank is best for a model this small; OMP_NUM_THREADS overrides it for larger models
    env = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    failed: dict[str, str] = {}
    for case in cases:
        key = key_of_reference(case)
        if key not in failed:
            error = compare.run(references[key], timeout, env)
            failed[key] = f"the reference run: {error}" if error else ""
        start = time.monotonic()
        error = case.refused or failed[key] or compare.run(case, timeout, env)
        yield judge(case, references[key], error, round(time.monotonic() - start, 1))


def key_of_reference(case: Case) -> str:
    return case.reference or case.precision


def judge(case: Case, one: Case, error: str, seconds: float) -> Row:
    """Build the row of a case that ran, or that could not run."""
    reason = error.splitlines()[0] if error else ""
    row = Row(case.strategy, case.size, case.precision, None, None, None, None, None, False, seconds, case.mesh, reason)
    stated = compare.stated_tolerance(case.run_dir)
    if error:
        if not case.config or not one.run_dir.exists() or case.refused:
            return row
        # what the ranks noted before they failed tells more than where they failed
        _, early = compare.named_differences(case.run_dir, one.run_dir, compare.tolerance(case.config), stated is None)
        tensor = re.search(r"\b(?:model|optim)\.([\w.]+\w)", error)
        named = early[0].named if early else tensor[1] if tensor else ""
        return replace(row, reason=", ".join([reason, *(finding.text for finding in early)]), named=named)
    allowed = compare.tolerance(case.config, stated)
    found = compare.compare(case.run_dir, one.run_dir, allowed, stated is None)
    reason = found.beyond(allowed)
    return replace(
        row, max_loss_diff=found.loss, max_grad_norm_diff=found.grad_norm, max_gradient_diff=found.gradient,
        max_weight_diff=found.weight, tolerance=allowed.loss, passed=not reason, reason=reason,
        named=found.named(allowed),
    )  # fmt: skip


def left_out_row(case: Case) -> Row:
    """Build the row of an unnamed case that cannot run here: neither passed nor failed."""
    reason = case.refused.splitlines()[0]
    empty: Any = dict.fromkeys(
        ("max_loss_diff", "max_grad_norm_diff", "max_gradient_diff", "max_weight_diff", "tolerance", "passed")
    )
    return Row(case.strategy, case.size, case.precision, **empty, seconds=0.0, mesh="", reason="", left_out=reason)


DROPOUT = "the model has dropout, and each layout draws other random numbers, so its losses differ from one process's"


def dropout_of(config: dict[str, Any]) -> str:
    """Return how to turn a model's dropout off; "": it has none, as far as settings and source tell."""
    model, target = own_defaults(config) | flatten({"model": config["model"]}), config["model"]["_target_"]
    for key, value in model.items():
        name = key.removeprefix("model.")
        if key.startswith("model.") and ("drop" in name or name == "p") and isinstance(value, float) and value:
            return f"{key}=0"
    source = None if target.startswith("dtrain.") else source_of(target)
    for node in ast.walk(source) if source else ():
        if isinstance(node, ast.Call) and "dropout" in ast.unparse(node.func).lower():
            rate = node.args[0] if node.args else next((k.value for k in node.keywords if k.arg == "p"), None)
            if rate is None or (isinstance(rate, ast.Constant) and rate.value):
                return f"an argument for the rate of {place(target, node)}, and 0 here"
    return ""


def show(cases: Sequence[Case], results: Iterator[Row], left_out: Sequence[Row], as_json: bool) -> int:
    """Print each row as it arrives, to stderr if stdout has the JSON; return the exit code."""
    from rich.console import Console

    out = Console(stderr=True) if as_json else console.stdout_console()
    widths = [len(heading) for heading in HEADINGS]
    widths[0], widths[2] = (max(w, *map(len, names)) for w, names in (
        (widths[0], [case.strategy for case in cases]), (widths[2], [case.mesh for case in cases])
    ))  # fmt: skip

    def line(texts: Sequence[str]) -> str:
        return "  ".join(f"{text:<{width}}" for text, width in zip(texts, widths, strict=True)).rstrip()

    start, done = time.monotonic(), []
    console.say(out, (line(HEADINGS), "bold"))
    for row in results:
        done.append(row)
        console.say(out, (line(row.cells()), "" if row.passed else "red"), f"  {row.reason}".rstrip())
    passed = sum(bool(row.passed) for row in done)
    for row in left_out:
        text = f"left out: {row.strategy} at {row.world_size} in {row.precision}: {row.left_out}"
        console.say(out, (text, "yellow"))
    failed = [case for case, row in zip(cases, done, strict=False) if row.max_loss_diff is not None and not row.passed]
    if fix := next((found for case in failed if (found := dropout_of(case.config))), ""):
        console.say(out, (f"{DROPOUT}; fix: {fix}", "yellow"))
    more = f", {len(left_out)} left out" if left_out else ""
    console.say(out, f"{passed} of {len(done)} passed in {time.monotonic() - start:.0f} s{more}")
    if as_json:
        print(json.dumps(without_nan([asdict(row) for row in (*done, *left_out)]), indent=2))
    return DONE if passed == len(done) else FAILED
