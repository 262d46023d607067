"""Terminal output: lines, errors, and the summary at the end of a run (progress.py: during a run).

The launcher imports this, so it must load fast: no torch, and rich (about 55 ms) only inside functions.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain.config.build import fewest, typed_trust
from dtrain.config.redaction import hide
from dtrain.runs.folder import latest_checkpoint, read_json, read_summary
from dtrain.runs.metrics import own_metrics
from dtrain.util.format import (
    as_dict,
    clean,
    duration,
    finite,
    gib,
    loss_text,
    number,
    percent,
    perplexity,
    resume_argument,
    shell_path,
    short_path,
    si,
    start_text,
    step_time,
    three_digits,
)

if TYPE_CHECKING:
    from rich.console import Console

# settings of a run folder that are repeated in a command to paste: the folder may be someone else's
TYPED = re.compile(r"(train|optim|schedule|checkpoint)\.[a-z]\w*=([\d.e+-]+|[a-z_]+)|resume_allow=\[[\w.,]+\]")
LAUNCH = "python launch.py" if Path("launch.py").exists() else "dtrain launch"  # in a checkout, or installed


def stdout_console() -> Console:
    """Return a console for stdout. A pipe stays plain even under FORCE_COLOR, to keep progress bars out of CI logs.

    A notebook gets text too: rich would make an output of its own, in HTML, of each line.
    """
    from rich.console import Console

    class Screen(Console):
        def on_broken_pipe(self) -> None:  # called in the handler; rich would end the process with code 1
            raise

    return Screen(force_terminal=None if sys.stdout.isatty() else False, force_jupyter=False)


def say(console: Console, *parts: str | tuple[str, str]) -> None:
    """Print one line of text or (text, style) parts, never wrapped or truncated by rich and never read as markup."""
    from rich.text import Text

    text = Text.assemble(*(hide(clean(p)) if isinstance(p, str) else (hide(clean(p[0])), p[1]) for p in parts))
    console.print(text, soft_wrap=True, highlight=False)


def print_error(message: str) -> None:
    """Print `error: …` to stderr, red on a terminal. Without rich, so that a typo is reported at once."""
    _print_labelled("error:", "1;31", message)


def print_warning(message: str) -> None:
    """Print `warning: …` to stderr, yellow on a terminal."""
    _print_labelled("warning:", "1;33", message)


def _print_labelled(label: str, colour: str, message: str) -> None:
    coloured = sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    label = f"\x1b[{colour}m{label}\x1b[0m" if coloured else label
    print(label, hide(clean(message)), file=sys.stderr, flush=True)


def measured_rows(run_dir: Path, summary: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(label, measured, predicted or "") of a summary; unknown values are left out."""
    get = summary.get
    predicted = as_dict(get("predicted"))

    def forecast(*names: str) -> object:
        values = (predicted.get(name) for name in names)  # a plan nests some as {"total": …, parts}
        return next((v.get("total") if isinstance(v, dict) else v for v in values if v is not None), None)

    steps, total = get("steps"), get("total_steps")
    tokens, speed = number(get("tokens_per_step")), number(get("tokens_per_s"))
    val = loss_text(get("val_loss"))
    if perplexity(get("val_perplexity")) != "-":
        val += f" (perplexity {perplexity(get('val_perplexity'))})"
    val = evaluated_text(val, as_dict(get("evaluated")))
    accuracy = percent(get("val_accuracy"))
    if number(get("val_top5")) is not None:
        accuracy += f" (top-5 {percent(get('val_top5'))})"
    unit = str(get("unit") or "tokens")
    checkpoint = latest_checkpoint(run_dir)
    rows = [
        ("forked from", lineage_text(get("forked_from")), "-"),
        ("steps", f"{steps} of {total}" if total and steps is not None else str(steps or "-"), "-"),
        ("skipped steps", skipped_text(summary), "-"),
        ("train loss", loss_text(get("train_loss")), "-"),
        ("validation loss", val, "-"),
        ("accuracy", accuracy, "-"),
        *((name, f"{value:.6g}", "-") for name, value in own_metrics(summary).items()),
        ("ended by", ended_text(summary.get("ended_by")), "-"),
        (f"{unit}/s", f"{si(speed)} (median)" if speed is not None else "-", si(forecast("tokens_per_s"))),
        ("step time", step_time(tokens / speed if tokens and speed else None), step_time(forecast("step_s"))),
        ("communication", exposed_text(get("exposed_comm_s")), "-"),
        ("MFU", percent(get("mfu")), percent(forecast("mfu"))),
        ("peak memory", gib(get("peak_mem_gib")), gib(forecast("peak_mem_gib", "memory_gib"))),
        ("start", start_text(get("start_s")), "-"),
        ("wall time", duration(get("wall_s")), "-"),  # a plan covers only the steps
        ("saves", saves_text(summary), "-"),
        *(("slow rank", text, "-") for text in slow_ranks(summary)),
        ("checkpoint", short_path(checkpoint) if checkpoint else "-", "-"),
        ("best", best_text(get("best")), "-"),
    ]
    return [(label, value, "" if guess == "-" else guess) for label, value, guess in rows if value != "-"]


def evaluated_text(loss: str, evaluated: dict[str, Any]) -> str:
    """Add how much of the validation split a loss is of, or why there is none."""
    batches, samples, of = (number(evaluated.get(key)) for key in ("batches", "samples", "of"))
    if loss == "-":
        return "none, because the data have no validation split" if of == 0 else loss
    return f"{loss}, of the first {batches:.0f} batches" if batches and samples and of and samples < of else loss


def skipped_text(summary: dict[str, Any]) -> str:
    """How many steps of this launch made no update, and why, if they are more than fp16's first ones."""
    skipped, made = (number(summary.get(key)) for key in ("skipped_steps", "steps"))
    if not skipped or made is None:
        return "-"
    made -= number(summary.get("start_step")) or 0
    if skipped >= made:
        return f"{skipped:.0f} of {made:.0f}: nothing was trained, loss or gradient was never finite"
    many = skipped > max(5, 0.05 * made)
    return f"{skipped:.0f} of {made:.0f}" + (": loss or gradient not finite, or a spike" if many else "")


def ended_text(ended: object) -> str:
    """Which hook ended the run before its last step, and why."""
    by = as_dict(ended)
    return f"{by.get('hook')}: {by.get('reason')}" if by else "-"


def lineage_text(origin: object) -> str:
    """Describe where a fork began: its parent and step, the parent's own, …"""
    found, most = as_dict(origin), 4
    parts: list[str] = []
    while found.get("run") is not None and len(parts) < most:
        parts.append(f"{short_path(Path(str(found['run'])))}@{found.get('step', found.get('steps'))}")
        found = as_dict(found.get("forked_from"))
    return " ← ".join([*parts, *(["…"] if found else [])]) or "-"


def best_text(best: object) -> str:
    """Describe the best checkpoint (checkpoint.keep_best)."""
    found = as_dict(best)
    return f"step {found['step']}, {found.get('metric')} {loss_text(found.get('value'))}" if "step" in found else "-"


def exposed_text(seconds: object) -> str:
    return "-" if number(seconds) is None else f"{step_time(seconds)} of a step not overlapped with compute (estimate)"


def slow_ranks(summary: dict[str, Any]) -> list[str]:
    """A sentence for each rank that held up the others: the newest ones, and how many more there were."""
    found = summary.get("slow_ranks")
    texts = [str(as_dict(one).get("text")) for one in found] if isinstance(found, list) else []
    return texts[-3:] + ([f"and {len(texts) - 3} more in summary.json"] if len(texts) > 3 else [])


def saves_text(summary: dict[str, Any]) -> str:
    """Describe the number of saves, how long training blocked for them, and how fast they were written."""
    saves, seconds, size = (number(summary.get(key)) for key in ("saves", "save_s", "save_gib"))
    if not saves:
        return "-"
    stall = step_time(summary.get("save_stall_median_s"))
    parts = [f"median stall {stall}"] if stall != "-" else []
    parts += [f"{three_digits(size / seconds)} GiB/s"] if size and seconds else []
    return f"{saves:.0f}" + (f" ({', '.join(parts)})" if parts else "")


def resume_command(run_dir: Path) -> str:
    """Return the command that resumes a run, ready to paste, with the servers of its trackers and its own modules."""
    from dtrain.config.run_file import program, servers

    return " ".join([LAUNCH, resume_argument(run_dir), *program(run_dir), *servers(run_dir), *trust_words(run_dir)])


def trust_words(run_dir: Path) -> list[str]:
    """Return `trust=[…]` for a shell: what was typed for this process, and the own modules that the run names."""
    from dtrain.config.run_file import modules

    names = fewest([*typed_trust(), *modules(run_dir)])
    return [shlex.quote(f"trust=[{','.join(names)}]")] if names else []


def can_resume(run_dir: Path, summary: dict[str, Any]) -> bool:
    """Has the run made a step, or saved anything? A user's own program does not say."""
    return bool(number(summary.get("steps")) or summary.get("script") or latest_checkpoint(run_dir))


def recommended(run_dir: Path) -> list[str]:
    """Return the settings that a failed rank recommends for a resume, and what allows them, ready to paste."""
    change = as_dict(read_json(run_dir / "failure.json").get("change"))
    values = {"optim.lr": finite(change.get("optim.lr")), "precision": change.get("precision")}
    # the file may be someone else's: only these settings, and only such values
    kept = {
        key: f"{v:g}" if key == "optim.lr" else v
        for key, v in values.items()
        if v and (v == "bf16" or key != "precision")
    }
    return [
        *(f"{key}={value}" for key, value in kept.items()),
        *([f"'resume_allow=[{','.join(kept)}]'"] if kept else []),
    ]


def typed_again(run_dir: Path) -> list[str]:
    """Return the settings of the newest launch if that was a resume: one that fails leaves the run its old ones."""
    launches = read_json(run_dir / "launch.json").get("launches")
    newest = as_dict(launches[-1]) if isinstance(launches, list) and launches else {}
    words = [word for word in newest.get("overrides") or () if isinstance(word, str)]
    is_resume = any(word.startswith("resume=") for word in words)
    return [shlex.quote(word) for word in words if is_resume and TYPED.fullmatch(word)]


def next_commands(run_dir: Path, status: str, summary: dict[str, Any]) -> list[str]:
    """Suggest the next commands."""
    resume = resume_command(run_dir)
    if status in ("failed", "preempted"):  # preempted: of dtrain why, which knows that it can be resumed
        resume = " ".join([resume, *(recommended(run_dir) or typed_again(run_dir))])
    if status in ("failed", "died") and not can_resume(run_dir, summary):
        return [f"dtrain why {shell_path(run_dir)}"]  # the same command starts it again
    if not (latest_checkpoint(run_dir) or summary.get("saves", 1) or summary.get("script")):
        return []  # checkpoint.save=false: nothing to continue from, or to look at
    if status in ("failed", "preempted", "died", "cancelled"):
        return [*([f"dtrain why {shell_path(run_dir)}"] if status in ("failed", "died") else []), resume]
    if status != "done" or summary.get("script"):
        return []
    run, total = shell_path(run_dir), number(summary.get("total_steps")) or 1000
    longer = f"{resume} train.steps={2 * total:.0f} 'resume_allow=[train.steps]'"
    if epochs := number(summary.get("epochs")):
        longer = f"{resume} train.epochs={2 * epochs:g} 'resume_allow=[train.epochs]'"
    if (number(summary.get("steps")) or total) < total:  # train.stop_after ended it early
        longer = resume
    if summary.get("ended_by"):  # with its hooks, it has nothing left to do
        longer = f"{resume} hooks=none 'resume_allow=[hooks]'"
    # a language model has a perplexity; classifiers and masked models also have an accuracy
    writes = summary.get("val_accuracy") is None and number(summary.get("val_perplexity")) is not None
    look = f'dtrain sample {run} "def "' if writes else f"dtrain evaluate {run}"
    trust = "".join(f" {word}" for word in trust_words(run_dir))
    profiled = [f"dtrain profile {run}"] if (run_dir / "profiles").is_dir() else []
    has_split = number(as_dict(summary.get("evaluated")).get("of")) != 0
    look += trust + (" --split=train" if not (writes or has_split) else "")
    return [*profiled, look, f"dtrain export {run}{trust}", longer]


def print_summary(
    run_dir: Path,
    console: Console | None = None,
    status: str | None = None,
    failure: dict[str, Any] | None = None,
    attempts: Sequence[str] = (),
    why: str = "",
) -> None:
    """Print the end of a run on one screen: its metrics, what failed, and the next commands.

    status, failure: override the files if the caller knows better (a killed run, a full disk).
    attempts: why each attempt of this launch failed. why: the cause in one sentence, as `dtrain why` gives it.
    """
    console, run_dir = console or stdout_console(), Path(run_dir)
    summary, failure = read_summary(run_dir), failure or read_json(run_dir / "failure.json")
    status = str(status or summary.get("status") or ("failed" if failure else "unknown"))
    is_refused = status == "failed" and summary.get("status") == "done"
    style = {"done": "bold green", "failed": "bold red", "died": "bold red", "preempted": "bold yellow"}
    label = "{:<17}".format
    say(
        console,
        (label("status"), "dim"),
        (status, style.get(status, "bold")),
        ": this launch; the run is done, as it was" if is_refused else "",
    )
    say(console, (label("run"), "dim"), short_path(run_dir))
    # those of a run that is done and was not resumed are not of this launch
    for name, value, guess in [] if is_refused else measured_rows(run_dir, summary):
        say(
            console,
            (label(name), "dim"),
            f"{value:<12}  " if guess else value,
            (f"predicted {guess}" if guess else "", "dim"),
        )
    if status in ("failed", "died"):
        _say_failure(console, run_dir, failure if status == "failed" else {})
        if why:
            say(console, (label("why"), "dim"), why)
    for i, line in enumerate(attempts):
        say(console, (label("" if i else "attempts"), "dim"), line)
    if failure.get("exit_code") == 2 and not latest_checkpoint(run_dir):
        return  # a bad configuration, and nothing to resume
    if status == "preempted" and not next_commands(run_dir, status, summary):
        again = "nothing was saved (checkpoint.save=false), so it cannot be resumed: the same command starts again"
        say(console, (label("next"), "dim"), again)
    # the first one is dtrain why
    later = "after the change" if "without a change" in why and not recommended(run_dir) else ""
    for i, command in enumerate(next_commands(run_dir, status, summary)):
        if i or not is_refused:  # dtrain why is of the run, which has ended well
            say(console, (label(later if i else "next"), "dim"), (command, "cyan"))


def places(failure: dict[str, Any]) -> list[str]:
    """The lines of the user's code that led to a failure, the last one last, as `net.py:12 in forward` and its text."""
    frames, lines = failure.get("frames"), []
    for frame in map(as_dict, frames if isinstance(frames, list) else []):
        lines.append(f"{short_path(Path(str(frame.get('file'))))}:{frame.get('line')} in {frame.get('function')}")
        lines += [f"    {frame['text']}"] if frame.get("text") else []
    lines = lines or ([str(failure["where"])] if failure.get("where") else [])
    return lines or used(failure)


def used(failure: dict[str, Any]) -> list[str]:
    """What of the user's dtrain was using, as data=net.points, net.py:12: of an error without a line of it."""
    objects = failure.get("objects")
    return [clean(one) for one in objects if isinstance(one, str)] if isinstance(objects, list) else []


def _say_failure(console: Console, run_dir: Path, failure: dict[str, Any]) -> None:
    label = "{:<17}".format
    if not failure:
        why = "none was recorded: killed, out of host memory, or failed before training began"
        say(console, (label("error"), "dim"), why)
        say(console, (label("logs"), "dim"), short_path(run_dir / "logs"))
        return
    where = f"rank {failure['rank']}: " if failure.get("rank") is not None else ""
    code = f" (exit code {failure['exit_code']})" if failure.get("exit_code") is not None else ""
    what = f"{where}{failure.get('type') or 'error'}"
    say(console, (label("first error"), "dim"), (what, "bold red"), code)
    message = str(failure.get("message") or failure.get("traceback") or "")
    for line in [line for line in message.splitlines() if line.strip()][-5:]:
        say(console, label(""), line)
    for i, line in enumerate(places(failure)):
        say(console, (label("" if i else "using" if line in used(failure) else "at"), "dim"), line)
    if failure.get("log"):
        say(console, (label("log"), "dim"), short_path(run_dir / str(failure["log"])))
