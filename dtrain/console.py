"""What a person sees: the header and progress of a run, its summary at the end, and errors.

The launcher process imports this, so it stays quick: no torch, and rich (about 55 ms) only inside functions.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain.rundir import Tail, latest_checkpoint, launch_time, parse_line, read_json, read_summary
from dtrain.words import (
    as_dict,
    clean,
    duration,
    gib,
    loss_text,
    number,
    percent,
    perplexity,
    resume_argument,
    shell_path,
    short_path,
    si,
    step_time,
)

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

LAUNCH = "python launch.py" if Path("launch.py").exists() else "dtrain launch"  # in a checkout, or installed


def stdout_console() -> Console:
    """A console for stdout. A pipe stays plain even under FORCE_COLOR, or progress bars end up in CI logs."""
    from rich.console import Console

    return Console(force_terminal=None if sys.stdout.isatty() else False)


def say(console: Console, *parts: str | tuple[str, str]) -> None:
    """One line of text or (text, style) parts, never wrapped or cut by rich and never read as markup."""
    from rich.text import Text

    text = Text.assemble(*(clean(p) if isinstance(p, str) else (clean(p[0]), p[1]) for p in parts))
    console.print(text, soft_wrap=True, highlight=False)


def print_error(message: str) -> None:
    """`error: …` on stderr, red on a terminal. Without rich: the answer to a typing mistake comes at once."""
    colour = sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    label = "\x1b[1;31merror:\x1b[0m" if colour else "error:"
    print(label, clean(message), file=sys.stderr, flush=True)


def header_rows(run_dir: Path, summary: dict[str, Any]) -> list[tuple[str, str]]:
    """What is about to run, as (label, text); what the summary does not say is left out."""
    get = summary.get

    def join(*texts: object) -> str:
        return " · ".join(str(t) for t in texts if t)

    # An axis of size 1 does nothing, but dp is what people look for first.
    mesh = {axis: size for axis, size in as_dict(get("mesh")).items() if size != 1 or axis == "dp"}
    axes = " × ".join(f"{axis} {size}" for axis, size in mesh.items())
    parameters = get("parameters") and f"{si(get('parameters'))} parameters"
    if parameters and get("trained_parameters") not in (None, get("parameters")):
        parameters += f" ({si(get('trained_parameters'))} trained)"
    device = get("device") and f"{get('world_size') or '?'} × {get('device')}"
    tokens = get("tokens_per_step") and f"{si(get('tokens_per_step'))} {get('unit') or 'tokens'} per step"
    start = number(get("start_step")) or 0
    compiling = get("compile") not in (None, "none") and "the first compiles the model, and takes longer"
    rows = [
        ("model", join(get("model"), parameters, get("precision"))),
        ("strategy", join(get("strategy"), axes, device)),
        ("batch", join(batch_text(summary), tokens)),
        ("steps", join(get("total_steps"), start > 0 and f"resuming from step {start:.0f}", compiling)),
        ("run", short_path(run_dir)),
    ]
    return [(label, text) for label, text in rows if text]


def batch_text(summary: dict[str, Any]) -> str | None:
    whole, micro, accumulation = (
        number(summary.get(k)) for k in ("global_batch_size", "micro_batch_size", "accumulation")
    )
    if not whole:
        return None
    if not micro or not accumulation or whole % (micro * accumulation):
        return f"{whole:.0f}"
    ranks = whole / (micro * accumulation)  # by arithmetic: a mesh may split its data axis in two
    parts = f"{micro:.0f} micro × {accumulation:.0f} accumulation × {ranks:.0f} data rank"
    return f"{whole:.0f} = {parts}" + ("" if ranks == 1 else "s")


def eval_text(row: dict[str, Any]) -> str:
    parts = [f"step {row.get('step', '?')}", f"validation loss {loss_text(row.get('val_loss'))}"]
    if perplexity(row.get("val_perplexity")) != "-":
        parts.append(f"perplexity {perplexity(row['val_perplexity'])}")
    if number(row.get("val_accuracy")) is not None:
        parts.append(f"accuracy {percent(row['val_accuracy'])}")
    return "  ".join(parts)


class Monitor:
    """Follows a run from the launcher: a live line on a terminal, sparse plain lines in a pipe or file.

    with Monitor(run_dir) as monitor:
        while process_alive():
            monitor.poll()
            time.sleep(0.1)
    """

    def __init__(self, run_dir: Path, console: Console | None = None):
        self.run_dir = Path(run_dir)
        self.console = console or stdout_console()
        self.live_wanted = self.console.is_terminal and not self.console.is_dumb_terminal
        self.live: Any = None
        self.clock = time.monotonic
        self.began = self.clock()
        self.finished = False
        self.summary: dict[str, Any] = {}
        self.header: list[tuple[str, str]] = []
        self.row: dict[str, Any] = {}  # the newest metrics line
        self.printed: dict[str, Any] = {}  # the newest one that was printed (plain output)
        self.printed_at = 0.0
        self.refreshed_at = -1.0
        self.first: tuple[float, float] | None = None  # (step, clock) of the first line seen, for the ETA
        self.tail = Tail(self.run_dir / "metrics.jsonl")
        self.summary_path = self.run_dir / "summary.json"
        self.summary_seen: tuple[int, int, int] | None = None
        # A resumed run starts with the files of its last attempt, perhaps with "running" in them when that
        # was killed. They are history until they change. One second: file times are coarser than clocks.
        since = (launch_time(read_json(self.run_dir / "launch.json")) or 0.0) - 1
        self.history = {}
        for path in (self.summary_path, self.tail.path):
            signature = self._signature(path)
            if signature and signature[0] < since * 1e9:
                self.history[path] = signature

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *error: object) -> None:
        self.finish()

    def poll(self) -> None:
        """Show what is new. Costs two stat calls and a 64-byte read when nothing is."""
        if self.finished:
            return
        if self.live_wanted and self.live is None:
            from rich.live import Live

            self.live = Live(console=self.console, auto_refresh=False, get_renderable=self._render)
            self.live.start()
        self._update()
        if self.live and self.clock() - self.refreshed_at >= 1:
            self.refreshed_at = self.clock()
            self.live.refresh()

    def message(self, text: str) -> None:
        """A line above the progress."""
        say(self.console, (text, "yellow"))

    def finish(self) -> None:
        """Show the last of it and give the terminal back. Calling it again does nothing."""
        if self.finished:
            return
        self._update(final=True)
        self.finished = True
        if self.live:
            self.live.transient = not self.row  # a bar that never moved is not worth keeping
            self.live.stop()
        elif not self.live_wanted and self.row is not self.printed:
            self._print_row(self.row)

    def _update(self, final: bool = False) -> None:
        self._read_summary()
        if not self.header or self._signature(self.tail.path) == self.history.get(self.tail.path, ()):
            return
        lines, again = self.tail.read(final)
        start = number(self.summary.get("start_step")) or 0
        # Left out: bad lines, and those from before this resume.
        rows = [row for row in map(parse_line, lines) if (number(row.get("step")) or 0) > start]
        if again:  # a restart cut the file back; its lines were shown before, so only where it is now is news
            self.row = {}
            rows = [row for row in rows if "loss" in row][-1:]
        for row in rows:
            if "loss" in row:
                self.row = row
                if not self.first or row["step"] < self.first[0]:
                    self.first = (row["step"], self.clock())
                if not self.live_wanted and self._due(row["step"]):
                    self._print_row(row)
            if "val_loss" in row:
                say(self.console, (eval_text(row), "green"))

    def _read_summary(self) -> None:
        signature = self._signature(self.summary_path)
        if signature in (None, self.summary_seen, self.history.get(self.summary_path)):
            return
        summary = read_json(self.summary_path)
        if not summary:
            return  # half-written: the next poll reads it
        self.summary, self.summary_seen = summary, signature
        header = header_rows(self.run_dir, summary)
        # Again after a restart that changed something (start step, ranks); a run that failed before it had a
        # model has no header.
        if header != self.header and (summary.get("model") or summary.get("status") == "running"):
            self.header = header
            for label, text in header:
                say(self.console, (f"{label:<10}", "dim"), text)

    @staticmethod
    def _signature(path: Path) -> tuple[int, int, int] | None:
        try:
            stat = os.stat(path)
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_ino, stat.st_size

    def _total(self) -> float:
        return number(self.summary.get("total_steps")) or 0

    def _due(self, step: float) -> bool:
        """Plain output: about 50 lines for a short run, one each 10 s for a slow one; always the first."""
        if not self.printed or step < self.printed["step"]:
            return True
        every = self._total() * 0.02
        return self.clock() - self.printed_at >= 10 or (every > 0 and step - self.printed["step"] >= every)

    def _print_row(self, row: dict[str, Any]) -> None:
        if row:
            self.printed, self.printed_at = row, self.clock()
            say(self.console, "  ".join(text for _, text in self._fields(row)))

    def _fields(self, row: dict[str, Any]) -> list[tuple[str, str]]:
        """(name, text) of a metrics line; what it does not have (MFU on a CPU) is left out."""
        total = self._total()
        step = f"{row['step']:>{len(f'{total:.0f}')}}/{total:.0f}" if total else row["step"]
        unit = {"tokens": "tok"}.get(str(self.summary.get("unit") or "tokens"), "samples")
        fields = [("step", f"step {step}"), ("loss", f"loss {loss_text(row.get('loss'))}")]
        if (lr := number(row.get("lr"))) is not None:
            fields.append(("lr", f"lr {lr:.2e}"))
        for name, form in (("tokens_per_s", f"{{}} {unit}/s"), ("mfu", "MFU {}"), ("mem_gib", "{}")):
            write = {"tokens_per_s": si, "mfu": percent, "mem_gib": gib}[name]
            if number(row.get(name)) is not None:
                fields.append((name, form.format(write(row[name]))))
        if self.finished:
            fields.append(("eta", f"in {duration(self.clock() - self.began)}"))
        elif (eta := self._eta(row)) is not None:
            fields.append(("eta", f"ETA {duration(eta)}"))
        return fields

    def _eta(self, row: dict[str, Any]) -> float | None:
        step, total = number(row.get("step")), self._total()
        if step is None or step >= total:
            return None
        seconds = number(row.get("step_s"))
        # The clock counts evaluations and checkpoints too, but is only fair after a while.
        if self.first and step > self.first[0] and self.clock() - self.first[1] > 10:
            seconds = (self.clock() - self.first[1]) / (step - self.first[0])
        return None if seconds is None else seconds * (total - step)

    def _render(self) -> RenderableType:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        if not self.row:
            what = "waiting for the first step" if self.header else "starting the workers"
            return Text(f"{what} … {duration(self.clock() - self.began)}", style="dim", no_wrap=True)
        fields = self._fields(self.row)
        room = self.console.width - 1  # some terminals wrap when the last column is written
        for least in ("mem_gib", "lr", "mfu", "tokens_per_s", "eta"):
            if sum(len(text) + 2 for _, text in fields) + 10 <= room:
                break
            fields = [field for field in fields if field[0] != least]
        text = Text("  ".join(text for _, text in fields), no_wrap=True, overflow="ellipsis")
        bar = min(20, room - len(text) - 2)
        if not self._total() or bar < 5:
            return text
        line = Table.grid(padding=(0, 2, 0, 0))
        line.add_row(ProgressBar(total=self._total(), completed=self.row["step"], width=bar), text)
        return line


def measured_rows(run_dir: Path, summary: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(label, measured, predicted or "") of a summary; what is not known is left out."""
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
    accuracy = percent(get("val_accuracy"))
    if number(get("val_top5")) is not None:
        accuracy += f" (among the best five {percent(get('val_top5'))})"
    unit = str(get("unit") or "tokens")
    checkpoint = latest_checkpoint(run_dir)
    rows = [
        ("steps", f"{steps} of {total}" if total and steps is not None else str(steps or "-"), "-"),
        ("skipped steps", str(get("skipped_steps") or "-"), "-"),
        ("train loss", loss_text(get("train_loss")), "-"),
        ("validation loss", val, "-"),
        ("accuracy", accuracy, "-"),
        (f"{unit}/s", si(speed), si(forecast("tokens_per_s"))),
        ("step time", step_time(tokens / speed if tokens and speed else None), step_time(forecast("step_s"))),
        ("MFU", percent(get("mfu")), percent(forecast("mfu"))),
        ("peak memory", gib(get("peak_mem_gib")), gib(forecast("peak_mem_gib", "memory_gib"))),
        ("wall time", duration(get("wall_s")), "-"),  # a plan is of the steps alone
        ("saves", saves_text(summary), "-"),
        ("checkpoint", short_path(checkpoint) if checkpoint else "-", "-"),
    ]
    return [(label, value, "" if guess == "-" else guess) for label, value, guess in rows if value != "-"]


def saves_text(summary: dict[str, Any]) -> str:
    """How often was saved, what the training waited for a save, and how fast they were written."""
    saves, seconds, size = (number(summary.get(key)) for key in ("saves", "save_s", "save_gib"))
    if not saves:
        return "-"
    stall = step_time(summary.get("save_stall_median_s"))
    parts = [f"median stall {stall}"] if stall != "-" else []
    parts += [f"{size / seconds:.3g} GiB/s"] if size and seconds else []
    return f"{saves:.0f}" + (f" ({', '.join(parts)})" if parts else "")


def next_commands(run_dir: Path, status: str, summary: dict[str, Any]) -> list[str]:
    """What to type next."""
    resume = f"{LAUNCH} {resume_argument(run_dir)}"
    resume += f" 'trust=[{','.join(trusted(run_dir))}]'" if trusted(run_dir) else ""
    if status in ("failed", "preempted", "died", "cancelled"):
        return [resume]
    if status != "done":
        return []
    run, total = shell_path(run_dir), number(summary.get("total_steps")) or 1000
    longer = f"{resume} train.steps={2 * total:.0f} 'resume_allow=[train.steps]'"
    if (number(summary.get("steps")) or total) < total:  # train.stop_after ended it early
        longer = resume
    # a language model has a perplexity; what classifies, or fills gaps, has an accuracy, too
    writes = summary.get("val_accuracy") is None and number(summary.get("val_perplexity")) is not None
    look = f'dtrain sample {run} "def "' if writes else f"dtrain evaluate {run}"
    own = trusted(run_dir)
    trust = f" --trust {' '.join(own)}" if own else ""
    profiled = [f"dtrain profile {run}"] if (run_dir / "profiles").is_dir() else []
    return [*profiled, look + trust, f"dtrain export {run}{trust}", longer]


def trusted(run_dir: Path) -> list[str]:
    """Your own modules, which are trusted by name each time: a run folder may come from elsewhere."""
    from omegaconf import OmegaConf

    try:
        return list(OmegaConf.select(OmegaConf.load(run_dir / "config.yaml"), "trust") or [])
    except Exception:  # yaml errors have many types; a run that failed early may have no such file
        return []


def print_summary(
    run_dir: Path, console: Console | None = None, status: str | None = None, failure: dict[str, Any] | None = None
) -> None:
    """The end of a run on one screen: its figures, what failed, and what to type next.

    status, failure: what the caller knows better than the files, of a run that was killed, or on a full disk.
    """
    console, run_dir = console or stdout_console(), Path(run_dir)
    summary, failure = read_summary(run_dir), failure or read_json(run_dir / "failure.json")
    status = str(status or summary.get("status") or ("failed" if failure else "unknown"))
    style = {"done": "bold green", "failed": "bold red", "died": "bold red", "preempted": "bold yellow"}
    label = "{:<17}".format
    say(
        console,
        (label("status"), "dim"),
        (status, style.get(status, "bold")),
    )
    say(console, (label("run"), "dim"), short_path(run_dir))
    for name, value, guess in measured_rows(run_dir, summary):
        say(
            console,
            (label(name), "dim"),
            f"{value:<12}  " if guess else value,
            (f"predicted {guess}" if guess else "", "dim"),
        )
    if status in ("failed", "died"):
        _say_failure(console, run_dir, failure if status == "failed" else {})
    if failure.get("exit_code") == 2 and not latest_checkpoint(run_dir):
        return  # a bad configuration, and nothing to go on with
    for i, command in enumerate(next_commands(run_dir, status, summary)):
        say(console, (label("" if i else "next"), "dim"), (command, "cyan"))


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
    if failure.get("log"):
        say(console, (label("log"), "dim"), short_path(run_dir / str(failure["log"])))
