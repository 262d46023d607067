"""`dtrain chaos`: inject faults into short copies of a run, and check that each is recognised."""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dtrain import start
from dtrain.commands.run_parser import RunParser
from dtrain.config.files import GROUPS, options_of
from dtrain.errors import bad
from dtrain.faults.kinds import INJECTED_FILE, KINDS, VARIABLE, Fault, memory_cgroup
from dtrain.launch.quoting import quote
from dtrain.report.why import diagnose
from dtrain.runs.find import find_run
from dtrain.runs.record import Record, load
from dtrain.ui.console import say, stdout_console
from dtrain.util.format import as_dict, number, short_path

LONGEST_S = 300.0  # a launch that takes longer is ended, and counts as not recognised
ENDS = (
    "run_dir", "resume", "resume_allow", "trust", "train.steps", "train.epochs", "train.stop_after", "dry_run",
    "logger", "hydra",
)  # fmt: skip


@dataclass
class Result:
    """What became of one fault."""

    fault: Fault
    injected: bool
    cause: str
    rank: int | None
    named_after_s: float | None  # from the fault to the message on the screen; only of hangs
    text: str

    @property
    def right(self) -> bool:
        kind = KINDS[self.fault.kind]
        rank = self.fault.rank if kind.names_rank else None
        return self.injected and self.cause == kind.cause and self.rank == rank


def main(argv: list[str]) -> int:
    """`dtrain chaos`: does dtrain recognise faults in your configuration?"""
    parser = RunParser("dtrain chaos", description=__doc__, epilog=listed_kinds(),
                       formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument(
        "run", help="a run on this machine; its overrides are used again. Or a part of its name, or latest"
    )
    parser.add_argument("overrides", nargs="*", help="settings that differ from the run's")
    parser.add_argument("--kinds", nargs="+", default=[], metavar="KIND", help="default: all that the run can have")
    parser.add_argument("--rounds", type=int, default=1, help="faults of each kind, each at a random rank and step")
    parser.add_argument("--steps", type=int, default=30, help="train.steps of each copy")
    parser.add_argument("--seed", type=int, default=0, help="of the ranks and steps")
    parser.add_argument("--jobs", type=int, default=1, help="copies that run at the same time")
    parser.add_argument("--folder", type=Path, help="where the copies go; default: chaos/DATE-TIME")
    parser.add_argument("--trust", nargs="+", default=[], metavar="MODULE", help="your modules that the run names")
    parser.add_argument("--json", action="store_true", help="print data instead of a table")
    options = parser.parse_args(argv)
    for kind in options.kinds:
        if kind not in KINDS:
            raise bad("--kinds", kind, "there is no such fault", f"one of {', '.join(KINDS)}")
    folder = options.folder or Path("chaos") / time.strftime("%Y-%m-%d-%H-%M-%S")
    if folder.exists():
        raise bad("--folder", folder, "exists", "another name: the copies must be new")
    record = load([find_run(options.run)])[0][0]
    faults = chosen(record, options.kinds, options.rounds, options.steps, options.seed)
    console = stdout_console()
    results = []
    with ThreadPoolExecutor(options.jobs) as pool:
        arguments = [*own_overrides(record, options.trust), *options.overrides, f"train.steps={options.steps}"]
        runs = [(fault, folder / f"{i:03}-{fault.kind}") for i, fault in enumerate(faults)]
        for result in pool.map(lambda one: inject(one[0], one[1], arguments), runs):
            results.append(result)
            if not options.json:
                show(console, result)
    right = sum(result.right for result in results)
    if options.json:
        rows: list[dict[str, Any]] = [asdict(result) | {"right": result.right} for result in results]
        print(json.dumps(rows, indent=1))
    else:
        say(console, f"{right} of {len(results)} faults recognised; the copies are in {short_path(folder)}")
    return 0 if right == len(results) else 3


def listed_kinds() -> str:
    return "kinds:\n" + "\n".join(f"  {name:<22} {kind.what}" for name, kind in KINDS.items())


def chosen(record: Record, kinds: list[str], rounds: int, steps: int, seed: int) -> list[Fault]:
    """Faults that this run can have, at random ranks and steps."""
    cluster, size = as_dict(record.launch.get("cluster")), number(record.summary.get("world_size"))
    if record.summary.get("script"):
        raise bad("RUN", record.run_dir.name, "is a run of your own program", "a run of dtrain's training loop")
    if "local" not in str(cluster.get("_target_")):
        raise bad(
            "RUN", record.run_dir.name, "dtrain chaos needs a run of cluster=local", "launch it with cluster=local"
        )
    if not size or size < 2:
        raise bad("RUN", record.run_dir.name, "must have trained with at least 2 ranks", "cluster.processes=2")
    if steps < 12:
        raise bad("--steps", steps, "must be at least 12: the first steps are slower", "--steps 30")
    strategy, draw = str(record.summary.get("strategy")), random.Random(seed)
    faults = []
    for _ in range(rounds):
        for name, kind in KINDS.items():
            fault = Fault(name, draw.randrange(int(size)), draw.randrange(6, steps - 3))
            fits = not kind.strategies or strategy in kind.strategies
            if (name in kinds or not kinds) and fits and (not kind.needs_cgroup or memory_cgroup()):
                faults.append(fault)
    return faults


def own_overrides(record: Record, trust: list[str]) -> list[str]:
    """The overrides that the run was launched with, without those that say where and how long.

    A run folder is untrusted: code that it names must be named by the user, too.
    """
    typed = record.launch.get("overrides")
    kept = []
    for word in [str(word) for word in typed] if isinstance(typed, list) else []:
        key, _, value = word.lstrip("+~").partition("=")
        if word.startswith("-") or key.startswith(ENDS):
            continue
        module = ""
        if key in GROUPS and value not in options_of(key):
            module = value
        elif "_target_" in word and not value.startswith("dtrain."):
            module = value or key
        if module and not any(module == own or module.startswith(f"{own}.") for own in trust):
            raise bad("RUN", word, "the run names code that is not dtrain's", f"'trust=[{module.partition('.')[0]}]'")
        kept.append(word)
    return [*kept, f"trust=[{','.join(trust)}]"] if trust else kept


def inject(fault: Fault, run_dir: Path, overrides: list[str], cwd: Path | None = None) -> Result:
    """Launch a copy with one fault, and diagnose it."""
    run_dir = run_dir.absolute()
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    command = [*start.command("dtrain.cli"), "launch", *overrides, "logger=none", *KINDS[fault.kind].overrides]
    command += [f"run_dir={quote(str(run_dir))}"]
    screen = run_dir.with_suffix(".txt")
    env = os.environ | {VARIABLE: str(fault)}
    mark, happened, named = run_dir / INJECTED_FILE, None, None
    with open(screen, "wb") as output:
        process = subprocess.Popen(
            command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        began = time.monotonic()
        while process.poll() is None and time.monotonic() < began + LONGEST_S:
            if happened is None and mark.exists():
                happened = mark.stat().st_mtime
            if happened and named is None and b"no progress for" in screen.read_bytes():
                named = time.time() - happened
            time.sleep(0.1)
        if process.poll() is None:
            process.kill()
            process.wait()
    if not (run_dir / "launch.json").is_file():
        return Result(fault, False, "not launched", None, None, screen.read_text(errors="replace").strip()[-300:])
    found = diagnose(load([run_dir])[0][0])
    return Result(fault, mark.exists(), found.cause, found.rank, named, found.what)


def show(console: Any, result: Result) -> None:
    fault = result.fault
    verdict = ("right", "green") if result.right else ("wrong" if result.injected else "not injected", "bold red")
    after = f" after {result.named_after_s:.1f} s" if result.named_after_s is not None else ""
    rank = f"rank {result.rank}" if result.rank is not None else "no rank"
    say(
        console,
        f"{fault.kind:<22} rank {fault.rank}, step {fault.step:<4} ",
        verdict,
        f": {result.cause}, {rank}{after}",
    )
    if not result.right:
        say(console, ("  " + result.text, "dim"))
