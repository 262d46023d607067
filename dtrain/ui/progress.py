"""Output during a run: the header, then a live line on a terminal or in a notebook, or occasional lines in a pipe.

The launcher imports this, so it must load fast: no torch, and rich (about 55 ms) only inside functions.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain.runs.folder import OWN, LogTail, Tail, parse_line, read_json
from dtrain.ui.console import say, stdout_console
from dtrain.ui.jupyter import WIDTH, CellOutput, in_notebook
from dtrain.util.format import as_dict, counted, duration, gib, loss_text, number, percent, perplexity, short_path, si

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


MOST_OWN = 8  # own metrics on a line
OWN_EVERY_S = 10.0  # between two lines of metrics that are neither a step's nor an evaluation's


def header_rows(run_dir: Path, summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Describe the run as (label, text); values missing in the summary are left out."""
    get = summary.get

    def join(*texts: object) -> str:
        return " · ".join(str(t) for t in texts if t)

    # Axes of size 1 are hidden, except dp, which users look for first.
    mesh = {axis: size for axis, size in as_dict(get("mesh")).items() if size != 1 or axis == "dp"}
    axes = " × ".join(f"{axis} {size}" for axis, size in mesh.items())
    parameters = get("parameters") and f"{si(get('parameters'))} parameters"
    if parameters and get("trained_parameters") not in (None, get("parameters")):
        parameters += f" ({si(get('trained_parameters'))} trained)"
    device = get("device") and f"{get('world_size') or '?'} × {get('device')}"
    tokens = get("tokens_per_step") and f"{si(get('tokens_per_step'))} {get('unit') or 'tokens'} per step"
    start = number(get("start_step")) or 0
    compiling = get("compile") not in (None, "none") and "the first compiles the model, and takes longer"
    is_other = get("effective_strategy") not in (None, get("strategy"))
    effective = is_other and f"runs as {get('effective_strategy')}: one rank has nothing to shard"
    lr = number(get("start_lr"))
    resuming = start > 0 and f"resuming from step {start:.0f}" + (f" at lr {lr:.2e}" if lr is not None else "")
    passes, size = number(get("epochs")), number(get("samples_per_epoch"))
    epochs = passes and size and f"{passes:g} epoch{'s' * (passes != 1)} of {size:,.0f} samples"
    rows = [
        ("script", join(get("script"), get("script") and counted(get("world_size"), "rank"), get("env"))),
        ("model", join(get("model"), parameters, get("precision"))),
        ("strategy", join(get("strategy"), effective, axes, device)),
        ("batch", join(batch_text(summary), tokens)),
        ("steps", join(get("total_steps"), epochs, resuming, compiling)),
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
    ranks = whole / (micro * accumulation)  # computed: a mesh may split its data axis in two
    parts = f"{micro:.0f} micro × {accumulation:.0f} accumulation × {ranks:.0f} data rank"
    return f"{whole:.0f} = {parts}" + ("" if ranks == 1 else "s")


def eval_text(row: dict[str, Any]) -> str:
    parts = [f"step {row.get('step', '?')}"]
    if "val_loss" in row:
        parts.append(f"validation loss {loss_text(row['val_loss'])}")
    if perplexity(row.get("val_perplexity")) != "-":
        parts.append(f"perplexity {perplexity(row['val_perplexity'])}")
    if number(row.get("val_accuracy")) is not None:
        parts.append(f"accuracy {percent(row['val_accuracy'])}")
    return "  ".join(parts + own_texts(row))


def own_texts(row: dict[str, Any]) -> list[str]:
    """The user's own metrics of a line of metrics.jsonl."""
    names = row.get(OWN)
    found = [(str(name), number(row.get(str(name)))) for name in names[:MOST_OWN]] if isinstance(names, list) else []
    return [f"{name} {value:.5g}" for name, value in found if value is not None]


class Monitor:
    """Follows a run from the launcher: a live line on a terminal or in a notebook, sparse plain lines elsewhere.

    with Monitor(run_dir) as monitor:
        while process_alive():
            monitor.poll()
            time.sleep(0.1)
    """

    def __init__(self, run_dir: Path, console: Console | None = None, shows_output: bool = True):
        self.shows_output = shows_output
        self.run_dir = Path(run_dir)
        self.console = console or stdout_console()
        self.in_notebook = console is None and in_notebook()
        self.live_wanted = self.in_notebook or (self.console.is_terminal and not self.console.is_dumb_terminal)
        self.live: Any = None
        self.clock = time.monotonic
        self.began = self.clock()
        self.finished = False
        self.summary: dict[str, Any] = {}
        self.header: list[tuple[str, str]] = []
        self.row: dict[str, Any] = {}  # the newest metrics line
        self.warned: list[str] = []  # the ranks' warnings that are on the screen
        self.evaluation = ""  # the newest one; in a notebook it belongs to the live line
        self.printed: dict[str, Any] = {}  # the newest printed one (plain output)
        self.printed_at = 0.0
        self.own_printed_at = -OWN_EVERY_S
        self.refreshed_at = -1.0
        self.first: tuple[float, float] | None = None  # (step, clock) of the first line seen, for the ETA
        self.tail = Tail(self.run_dir / "metrics.jsonl")
        self.output = LogTail(self.run_dir / "logs" / "rank-0.log")  # of a user's own program
        self.output.skip(0)
        self.summary_path = self.run_dir / "summary.json"
        self.summary_seen: tuple[int, int, int] | None = None
        # A resumed run starts with the files of its last attempt, which may still say "running" if that was killed.
        # They are ignored until they change. The launch is dated by its file's mtime, not by its content: that has the
        # launcher's clock, which may be a minute off the file server's.
        launched = self._signature(self.run_dir / "launch.json")
        self.history = {}
        for path in (self.summary_path, self.tail.path):
            signature = self._signature(path)
            if signature and launched and signature[0] < launched[0]:
                self.history[path] = signature

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *error: object) -> None:
        self.finish()

    def poll(self) -> None:
        """Show new output. Costs two stat calls and a 64-byte read if there is none."""
        if self.finished:
            return
        if self.live_wanted and self.live is None and not self.in_notebook:
            from rich.live import Live

            self.live = Live(console=self.console, auto_refresh=False, get_renderable=self._render)
            self.live.start()
        self._update()
        if self.in_notebook and self.live is None and self.header:  # below the header
            self.live = CellOutput(self._render)
            self.live.start()
        if self.live and self.clock() - self.refreshed_at >= 1:
            self.refreshed_at = self.clock()
            self.live.refresh()

    def message(self, text: str) -> None:
        """Print a line above the progress."""
        say(self.console, (text, "yellow"))

    def finish(self) -> None:
        """Show the last output and release the terminal. Further calls do nothing."""
        if self.finished:
            return
        self._update(final=True)
        self.finished = True
        if self.live:
            self.live.transient = not self.row  # do not keep a bar that never moved
            self.live.stop()
        elif not self.live_wanted and self.row is not self.printed:
            self._print_row(self.row)

    def _update(self, final: bool = False) -> None:
        self._read_summary()
        if self.summary.get("script") and self.shows_output:
            for line in self.output.read(final)[0]:
                say(self.console, line.decode(errors="replace"))
        if not self.header or self._signature(self.tail.path) == self.history.get(self.tail.path, ()):
            return
        lines, again = self.tail.read(final)
        start = number(self.summary.get("start_step")) or 0
        # Skip bad lines, and those from before this resume.
        rows = [row for row in map(parse_line, lines) if (number(row.get("step")) or 0) > start]
        if again:  # a restart truncated the file; its lines were already shown, so show only the newest
            self.row = {}
            rows = [row for row in rows if "loss" in row][-1:]
        for row in rows:
            if "loss" in row:
                self.row = row
                if not self.first or row["step"] < self.first[0]:
                    self.first = (row["step"], self.clock())
                if not self.live_wanted and self._due(row["step"]):
                    self._print_row(row)
            if "slow_text" in row:
                self.message(str(row["slow_text"]))
            is_own = (
                OWN in row
                and not {"loss", "val_loss"} & row.keys()
                and self.clock() - self.own_printed_at >= OWN_EVERY_S
            )
            if "val_loss" in row or is_own:
                self.own_printed_at = self.clock() if is_own else self.own_printed_at
                self.evaluation = eval_text(row)
                if not self.in_notebook:
                    say(self.console, (self.evaluation, "green"))

    def _read_summary(self) -> None:
        signature = self._signature(self.summary_path)
        if signature in (None, self.summary_seen, self.history.get(self.summary_path)):
            return
        summary = read_json(self.summary_path)
        if not summary:
            return  # half-written: the next poll reads it
        self.summary, self.summary_seen = summary, signature
        header = header_rows(self.run_dir, summary)
        # Print it again after a restart that changed something (start step, ranks). A run that failed before it had a
        # model has no header.
        if header != self.header and (summary.get("model") or summary.get("status") == "running"):
            self.header = header
            for label, text in header:
                say(self.console, (f"{label:<10}", "dim"), text)
        found = summary.get("warnings")
        for warning in [*(found if isinstance(found, list) else ()), *filter(None, [summary.get("unused")])]:
            if str(warning) not in self.warned:
                self.warned.append(str(warning))
                self.message(f"warning: {warning}")

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
        """Plain output: about 50 lines for a short run, one every 10 s for a slow one; always the first."""
        if not self.printed or step < self.printed["step"]:
            return True
        every = self._total() * 0.02
        return self.clock() - self.printed_at >= 10 or (every > 0 and step - self.printed["step"] >= every)

    def _print_row(self, row: dict[str, Any]) -> None:
        if row:
            self.printed, self.printed_at = row, self.clock()
            say(self.console, "  ".join(text for _, text in self._fields(row)))

    def _fields(self, row: dict[str, Any]) -> list[tuple[str, str]]:
        """(name, text) of a metrics line; missing values (MFU on a CPU) are left out."""
        total = self._total()
        step = f"{row['step']:>{len(f'{total:.0f}')}}/{total:.0f}" if total else row["step"]
        unit = {"tokens": "tok"}.get(str(self.summary.get("unit") or "tokens"), "samples")
        fields = [("step", f"step {step}"), ("loss", f"loss {loss_text(row.get('loss'))}")]
        fields += [("own", text) for text in own_texts(row)]
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
        # The clock includes evaluations and checkpoints, but is only representative after a while.
        if self.first and step > self.first[0] and self.clock() - self.first[1] > 10:
            seconds = (self.clock() - self.first[1]) / (step - self.first[0])
        return None if seconds is None else seconds * (total - step)

    def _render(self) -> RenderableType:
        if not self.in_notebook or not self.evaluation:
            return self._line()
        from rich.console import Group
        from rich.text import Text

        return Group(self._line(), Text(self.evaluation, style="green", no_wrap=True))

    def _line(self) -> RenderableType:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        if not self.row:
            what = "waiting for the first step" if self.header else "starting the workers"
            return Text(f"{what} … {duration(self.clock() - self.began)}", style="dim", no_wrap=True)
        fields = self._fields(self.row)
        # some terminals wrap when the last column is written
        room = (WIDTH if self.in_notebook else self.console.width) - 1
        for least in ("mem_gib", "lr", "own", "mfu", "tokens_per_s", "eta"):
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
