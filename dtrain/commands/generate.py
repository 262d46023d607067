"""`dtrain generate`: continue each prompt of a file, and resume where it was killed.

The results file itself says how far it is: it only grows by whole lines, in the order of the prompts. A job file beside
it keeps what must not change on the way: the checkpoint, the prompts, the settings.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from dtrain.commands.run_parser import CHECKPOINT, TRUST, RunParser
from dtrain.errors import bad
from dtrain.formats.bounded import read_json
from dtrain.runs.find import At, find_checkpoint
from dtrain.runs.folder import write_json
from dtrain.ui.counter import Counter
from dtrain.util.regular_file import open_regular, regular

LONGEST_LINE = 2**24
FORM = '{"prompt": "…"} on each line'
CHOICES = ("max_tokens", "temperature", "top_k", "top_p", "seed", "slots", "ema")


class Prompt(NamedTuple):
    number: int  # of its line, from 0
    text: str


def main(argv: list[str]) -> int:
    parser = RunParser(
        "dtrain generate",
        description='Continue each prompt of a file of JSON lines, {"prompt": "…"}, in the order of the lines. After a '
        "kill, the same command continues; the results then have the same bytes as without the kill.",
    )
    parser.add_argument("run", help=CHECKPOINT)
    parser.add_argument("prompts", type=Path, help='JSON lines: {"prompt": "…"}, or just "…"')
    parser.add_argument("-o", "--out", type=Path, required=True, help="the results: JSON lines; OUT.job.json beside it")
    parser.add_argument("--tokens", dest="max_tokens", type=int, default=200, help="how many to generate at most")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 = always the most likely token")
    parser.add_argument("--top-k", type=int, default=50, help="sample from the k most likely tokens; 0 = all")
    parser.add_argument("--top-p", type=float, default=1.0, help="sample from the fewest that have this probability")
    parser.add_argument("--seed", type=int, default=0, help="each prompt draws from this and the number of its line")
    parser.add_argument("--slots", type=int, default=32, help="prompts that a process computes at once")
    parser.add_argument("--processes", type=int, default=1, help="share the prompts among processes, one per GPU")
    parser.add_argument("--trust", nargs="*", default=[], metavar="MODULE", help=TRUST)
    parser.add_argument("--ema", action="store_true", help="the moving average of the weights (ema.decay)")
    options = parser.parse_args(argv)
    for name, least, most in (
        ("tokens", 1, 2**31), ("top_k", 0, 2**31), ("top_p", 0, 1), ("seed", 0, 2**63), ("slots", 1, 512),
        ("processes", 1, 256),
    ):  # fmt: skip
        flag, value = "--" + name.replace("_", "-"), getattr(options, "max_tokens" if name == "tokens" else name)
        if not least <= value <= most:
            raise bad(flag, value, f"must be from {least} to {most}", f"{flag} {parser.get_default(name) or 1}")
    if not 0 <= options.temperature < math.inf:
        raise bad("--temperature", options.temperature, "must be a number, at least 0", "--temperature 0.8")
    prompts, digest = read_prompts(options.prompts)
    return generate(options, find_checkpoint(options.run), prompts, digest)


def generate(options: Any, at: At, prompts: list[Prompt], digest: str) -> int:
    from dtrain.inference import generate as model

    tokens, problems = model.encode(at.run_dir, options.trust, [prompt.text for prompt in prompts])
    refuse(options.prompts, [(prompts[i].number, problem) for i, problem in problems])
    with open_out(options.out) as file:
        done, end = whole_lines(file, prompts)
        job = begin(options, at, digest, done)
        file.truncate(end)
        task = model.Task(
            at.run_dir, job["step"], options.trust, options.ema, options.slots, options.max_tokens,
            (options.temperature, options.top_k, options.top_p), options.seed, job["threads"],
        )  # fmt: skip
        rest = [model.Encoded(*prompt, found) for prompt, found in zip(prompts[done:], tokens[done:], strict=True)]
        if done:
            print(f"{done} of {len(prompts)} prompts were there already", file=sys.stderr, flush=True)
        progress = Counter(done, len(prompts), "prompts")
        try:
            for line in model.lines(task, rest, options.processes):
                file.write(line)
                file.flush()
                progress.add()
        except (model.Failed, KeyboardInterrupt) as error:
            why = str(error) or "stopped"
            print(f"\nerror: {why}; {progress.done} of {len(prompts)} are done", file=sys.stderr)
            print("  fix: the same command continues", file=sys.stderr)
            return 130 if isinstance(error, KeyboardInterrupt) else 3
        os.fsync(file.fileno())
    print(f"wrote {options.out}: {len(prompts)} results of step {job['step']}")
    return 0


# ---- prompts -----------------------------------------------------------------------------------------------------


def read_prompts(path: Path) -> tuple[list[Prompt], str]:
    """Read and check all lines before anything starts; return them, and the hash of the file."""
    found, problems, digest = [], [], hashlib.sha256()
    with open_regular(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE), b"")):
            digest.update(line)
            try:
                found.append(Prompt(number, parse(line)))
            except ValueError as error:
                problems.append((number, str(error)))
                if len(line) == LONGEST_LINE:
                    break  # the numbers of lines are not known from here on
    refuse(path, problems)
    if not found:
        raise bad("prompts", path, "is empty", f"a file with {FORM}")
    return found, digest.hexdigest()


def parse(line: bytes) -> str:
    """Return the prompt of a line; raise a ValueError without one."""
    if len(line) == LONGEST_LINE:
        raise ValueError(f"has more than {LONGEST_LINE:,} bytes")
    if not line.strip():
        raise ValueError("is blank")
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 ({error.reason} at byte {error.start})") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON ({error})") from None
    text = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise ValueError("has no text as its prompt")
    if not text:
        raise ValueError("has an empty prompt")
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise ValueError("has half a character (a lone surrogate) in its prompt")
    return text


def refuse(path: Path, problems: list[tuple[int, str]], most: int = 5) -> None:
    """Raise the error of bad lines, if there are any: (number from 0, what is wrong)."""
    if problems:
        named = "; ".join(f"line {number + 1} {problem}" for number, problem in problems[:most])
        more = f"; and {len(problems) - most} more lines" if len(problems) > most else ""
        raise bad("prompts", path, named + more, FORM)


# ---- results -----------------------------------------------------------------------------------------------------


@contextmanager
def open_out(path: Path) -> Iterator[BinaryIO]:
    """Open and lock the results: two writers would mix their lines. The kernel frees the lock at a kill."""
    with open(path, "a+b", opener=regular) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise bad("--out", path, "another dtrain generate is writing it", "wait for it, or another file") from None
        yield file


def whole_lines(file: BinaryIO, prompts: list[Prompt]) -> tuple[int, int]:
    """Return how many results are there, and where the last one ends: a kill may have cut off what follows."""
    file.seek(0)
    end = 0
    for count, prompt in enumerate(prompts):
        line = file.readline()
        try:
            row = json.loads(line) if line.endswith(b"\n") else None
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict) or (row.get("index"), row.get("prompt")) != prompt:
            return count, end
        end = file.tell()
    return len(prompts), end


def begin(options: Any, at: At, digest: str, done: int) -> dict[str, Any]:
    """Return the job: a new one, or the one that the results were begun with. done: results that are there."""
    from dtrain.inference import generate as model

    out: Path = options.out
    path = out.with_name(f"{out.name}.job.json")
    which = "newest" if at.step is None else "best" if options.run.endswith("@best") else str(at.step)
    fixed = {"prompts": digest, "checkpoint": which, **{key: getattr(options, key) for key in CHOICES}}
    old: Any = None
    with suppress(FileNotFoundError):
        old = read_json(path, 2**20)
    if old is None and out.stat().st_size:
        raise bad("--out", out, f"is not empty, and has no {path.name}", "another file, for example results.jsonl")
    known = isinstance(old, dict) and isinstance(old.get("step"), int) and isinstance(old.get("threads"), int)
    if done and not (known and 0 < old["threads"] <= 4096 and 0 <= old["step"] < 10**18):
        raise bad("--out", out, f"its {path.name} is damaged", f"rm {out} {path}, and all prompts again")
    step = old["step"] if done and old.get("checkpoint") == which else model.step_of(at.run_dir, at.step)
    job = {
        "run": str(at.run_dir), "step": step, **fixed, "weights": weights_of(at.run_dir, step, old),
        "threads": old["threads"] if done else model.num_threads(), **model.environment(),
    }  # fmt: skip
    if done:
        differ = [key for key in job if key not in ("run", "step") and old.get(key) != job[key]]
        if differ:
            rule = f"was begun by another command: other {', '.join(differ)} (see {path.name})"
            raise bad("--out", out, rule, "the command it was begun with, or another file")
    elif old is not None and out.stat().st_size and not (isinstance(old, dict) and old.get("prompts") == digest):
        raise bad("--out", out, "has the results of other prompts", "another file")
    else:
        write_json(path, job)
    return job


def weights_of(run_dir: Path, step: int, old: Any) -> str:
    """Return the hash of a checkpoint's manifest, which has the hashes of its files."""
    try:
        with open_regular(run_dir / "checkpoints" / f"step-{step:08d}" / "manifest.json") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        begun = f"the results were begun with step {step} of {old.get('run')}" if old else "it was removed just now"
        rule = f"has no checkpoint of step {step}; {begun}"
        raise bad("run", run_dir, rule, "the run they were begun with, or another --out") from None
