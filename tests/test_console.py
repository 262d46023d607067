"""What a person sees: formats, the monitor in a pipe and on a terminal, the summary."""

import io
import json
import os
import re
import shlex
import subprocess
import sys
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from dtrain import console
from dtrain.console import Monitor, print_error, print_summary
from dtrain.rundir import Tail
from dtrain.words import duration, resume_argument, si

RUNNING = {
    "status": "running",
    "model": "gpt2-tiny",
    "parameters": 124_439_808,
    "strategy": "fsdp",
    "precision": "bf16",
    "mesh": {"pp": 2, "dp": 2, "tp": 1},
    "world_size": 4,
    "device": "NVIDIA H200",
    "global_batch_size": 32,
    "micro_batch_size": 4,
    "accumulation": 4,
    "tokens_per_step": 32768,
    "total_steps": 1000,
    "start_step": 0,
}


def plain(width: int = 80) -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=width)


def terminal(width: int = 120) -> Console:
    return Console(
        file=io.StringIO(),
        force_terminal=True,
        width=width,
        color_system="truecolor",
        legacy_windows=False,
        _environ={"TERM": "xterm-256color"},
    )


def text(c: Console) -> str:
    assert isinstance(c.file, io.StringIO)
    return c.file.getvalue()


def lines(c: Console) -> list[str]:
    return text(c).splitlines()


def screen(c: Console) -> str:
    """What is left on a terminal: a small emulation of the moves that rich's live display makes."""
    rows, row = [""], 0
    for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text(c)):
        if token == "\n":
            row += 1
            rows += [""] * (row + 1 - len(rows))
        elif token == "\x1b[2K":
            rows[row] = ""
        elif re.fullmatch(r"\x1b\[\d*A", token):
            row -= int(token[2:-1] or 1)
        elif token != "\r" and not token.startswith("\x1b"):
            rows[row] += token
    return "\n".join(rows)


def metric(step: int, **values: Any) -> str:
    row = {
        "step": step,
        "loss": 5 - step / 1000,
        "lr": 3e-4,
        "grad_norm": 1.0,
        "tokens": step * 32768,
        "tokens_per_s": 81234.5,
        "step_s": 0.5,
        "data_s": 0.0,
        "mfu": 0.4123,
        "mem_gib": 12.345,
    }
    return json.dumps({**row, **values}) + "\n"


def write(run_dir: Path, name: str, value: dict[str, Any]) -> None:
    (run_dir / name).write_text(json.dumps(value))


def append(run_dir: Path, *rows: str) -> None:
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.writelines(rows)


# ---------------------------------------------------------------- formats


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (124_439_808, "124.4M"),
        (1_557_611_200, "1.56B"),
        (512, "512"),
        (0, "0"),
        (1000, "1K"),
        (65536, "65.5K"),
        (999_960, "1M"),
        (0.25, "0.25"),
        (-2500, "-2.5K"),
        (3e12, "3T"),
        (None, "-"),
        (float("nan"), "nan"),
        ("x", "-"),
    ],
)
def test_si(value: object, expected: str) -> None:
    assert si(value) == expected


@given(st.floats(1, 9e14))
def test_si_keeps_the_value_and_is_short(n: float) -> None:
    shown = si(n)
    scale = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(shown[-1], 1)
    assert abs(float(shown.rstrip("KMBT")) * scale - n) <= 0.006 * n
    assert len(shown) <= 6


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, "0.0s"),
        (4.21, "4.2s"),
        (9.97, "10s"),
        (59.4, "59s"),
        (59.7, "1m 00s"),
        (83, "1m 23s"),
        (7500, "2h 05m"),
        (3599.6, "1h 00m"),
        (273_600, "3d 04h"),
        (None, "-"),
        (-1, "-"),
        (float("inf"), "-"),
    ],
)
def test_duration(value: object, expected: str) -> None:
    assert duration(value) == expected


@given(st.floats(0, 1e7))
def test_duration_names_the_time(seconds: float) -> None:
    units = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    parts = [(float(n), u) for n, u in re.findall(r"([\d.]+)([smhd])", duration(seconds))]
    shown = sum(n * units[u] for n, u in parts)
    assert abs(shown - seconds) <= units[parts[-1][1]]
    assert all(n < {"s": 60, "m": 60, "h": 24}.get(u, 1e9) for n, u in parts)  # never 1m 60s


def test_small_formats() -> None:
    assert console.loss_text(3.21014) == "3.2101"
    assert console.loss_text(1.5e-7) == "1.500e-07"
    assert console.loss_text(float("nan")) == "nan"
    assert console.percent(0.4123) == "41.2%"
    assert console.gib(3.214) == "3.21 GiB" and console.gib(139.6) == "139.6 GiB"
    assert console.perplexity(7.389) == "7.39" and console.perplexity(1e12) == "-"
    assert console.clean("\x1b[31mred\x1b[0m\r\x07 a\n\tb\x1b]0;title\x07!") == "red a\n\tb!"


NAMES = st.text(st.characters(codec="utf-8", exclude_characters="/\0", exclude_categories=("Cc", "Cs")), min_size=1)


@given(NAMES.filter(lambda name: name not in (".", "..") and "${" not in name))
def test_resume_argument_survives_the_shell_and_hydra(name: str) -> None:
    parser = pytest.importorskip("hydra.core.override_parser.overrides_parser").OverridesParser.create()
    [word] = shlex.split(resume_argument(Path("multirun") / name))
    override = parser.parse_override(word)
    assert override.key_or_group == "resume"
    assert not override.is_sweep_override()
    assert override.value() == f"multirun/{name}"


def test_paths_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert console.shell_path(tmp_path / "outputs" / "a") == "outputs/a"
    assert console.shell_path(tmp_path / "a b") == "'a b'"
    assert console.shell_path(tmp_path / "-x") == "./-x"
    assert console.shell_path(tmp_path.parent / "other") == str(tmp_path.parent / "other")
    assert resume_argument(tmp_path / "outputs/12-00-00-a") == "resume=outputs/12-00-00-a"
    assert resume_argument(tmp_path / "12") == "resume=./12"  # else Hydra reads a number
    assert resume_argument(tmp_path / "m/0-lr=1,a=2") == "'resume=\"m/0-lr=1,a=2\"'"


# ---------------------------------------------------------------- tail


def test_tail_reads_each_whole_line_once(tmp_path: Path) -> None:
    path = tmp_path / "f"
    tail = Tail(path)
    assert tail.read() == ([], False)  # not there yet
    path.write_bytes(b"one\ntw")
    assert tail.read() == ([b"one"], False)
    assert tail.read() == ([], False)
    with open(path, "ab") as file:
        file.write(b"o\nthree")
    assert tail.read() == ([b"two"], False)
    assert tail.read(final=True) == ([b"three"], False)


@pytest.mark.parametrize("replace", [True, False])
@pytest.mark.parametrize("new", [b"one\n", b"one\ntoo\nthree\nfour\n", b"one\nTWO\n"])
def test_tail_notices_another_file(tmp_path: Path, replace: bool, new: bytes) -> None:
    """Shorter, longer and of the same length; with a new inode and in place."""
    path = tmp_path / "f"
    path.write_bytes(b"one\ntwo\n")
    tail = Tail(path)
    tail.read()
    (tmp_path / "new" if replace else path).write_bytes(new)
    if replace:
        os.replace(tmp_path / "new", path)
    assert tail.read() == (new.splitlines(), True)
    assert tail.read() == ([], False)


def test_tail_knows_a_replaced_file_with_the_same_beginning(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"one\n")
    tail = Tail(path)
    tail.read()
    (tmp_path / "new").write_bytes(b"one\ntwo\n")
    os.replace(tmp_path / "new", path)
    assert tail.read() == ([b"two"], False)


@given(st.binary(max_size=200), st.lists(st.integers(0, 60)))
def test_tail_loses_nothing_however_the_writes_are_cut(tmp_path_factory: Any, data: bytes, cuts: list[int]) -> None:
    path = tmp_path_factory.getbasetemp() / "tail"
    path.write_bytes(b"")
    tail, seen, at = Tail(path), [], 0
    for size in [*cuts, len(data)]:
        with open(path, "ab") as file:
            file.write(data[at : at + size])
        at += size
        found, again = tail.read()
        assert not again
        seen += found
    seen += tail.read(final=True)[0]
    assert b"".join(seen) == b"".join(data.splitlines())


# ---------------------------------------------------------------- monitor, plain


def test_header_and_lines_in_a_pipe(tmp_path: Path) -> None:
    run_dir = tmp_path / ("long-name-" * 10)
    run_dir.mkdir()
    out = plain(width=40)
    with Monitor(run_dir, out) as monitor:
        monitor.began, monitor.clock = 0.0, lambda: 83.0
        monitor.poll()
        assert text(out) == ""
        write(run_dir, "summary.json", RUNNING)
        monitor.poll()
        assert lines(out) == [
            "model     gpt2-tiny · 124.4M parameters · bf16",
            "strategy  fsdp · pp 2 × dp 2 · 4 × NVIDIA H200",
            "batch     32 = 4 micro × 4 accumulation × 2 data ranks · 32.8K tokens per step",
            "steps     1000",
            f"run       {run_dir}",
        ]
        append(
            run_dir,
            metric(1),
            metric(2),
            json.dumps({"step": 2, "val_loss": 2.0, "val_perplexity": 7.389, "val_accuracy": 0.5}) + "\n",
        )
        monitor.poll()
    assert lines(out)[5:] == [
        "step    1/1000  loss 4.9990  lr 3.00e-04  81.2K tok/s  MFU 41.2%  12.3 GiB  ETA 8m 20s",
        "step 2  validation loss 2.0000  perplexity 7.39  accuracy 50.0%",
        "step    2/1000  loss 4.9980  lr 3.00e-04  81.2K tok/s  MFU 41.2%  12.3 GiB  in 1m 23s",
    ]
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", text(out))


def test_values_that_are_missing_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, "summary.json", {"status": "running", "model": "resnet", "mesh": None, "parameters": None})
    append(tmp_path, json.dumps({"step": 7, "loss": float("nan"), "mfu": None}) + "\n")
    out = plain()
    with Monitor(tmp_path, out) as monitor:
        monitor.poll()
    assert lines(out)[0] == "model     resnet"
    assert lines(out)[1].startswith("run ")
    assert lines(out)[2:] == ["step 7  loss nan"]


def test_plain_lines_are_sparse_but_have_the_first_and_the_last(tmp_path: Path) -> None:
    write(tmp_path, "summary.json", RUNNING)
    out = plain()
    with Monitor(tmp_path, out) as monitor:
        monitor.clock = lambda: 0.0  # the 10 s rule never applies
        for step in range(1, 1000):
            append(tmp_path, metric(step))
            monitor.poll()
    steps = [int(found[1]) for line in lines(out) if (found := re.match(r"step +(\d+)/", line))]
    assert steps == [*range(1, 1000, 20), 999]


def test_a_slow_run_has_a_line_every_ten_seconds(tmp_path: Path) -> None:
    write(tmp_path, "summary.json", {**RUNNING, "total_steps": 100_000})
    out, now = plain(), 0.0
    monitor = Monitor(tmp_path, out)
    monitor.clock = lambda: now
    for step in range(1, 31):
        now += 1
        append(tmp_path, metric(step))
        monitor.poll()
    steps = [int(found[1]) for line in lines(out) if (found := re.match(r"step +(\d+)/", line))]
    assert steps == [1, 11, 21]
    # By then the clock is trusted more than step_s: 1 s a step, not 0.5.
    assert lines(out)[-1].endswith(f"ETA {duration(99_979)}")


def test_bad_and_half_lines(tmp_path: Path) -> None:
    write(tmp_path, "summary.json", RUNNING)
    out = plain()
    with Monitor(tmp_path, out) as monitor:
        half = metric(100)
        append(tmp_path, "{oops\n", "[1]\n", '{"loss": 1}\n', '{"step": "x", "loss": 1}\n', half[:20])
        monitor.poll()
        assert len(lines(out)) == 5  # the header
        append(tmp_path, half[20:])
        monitor.poll()
        assert "step  100/1000" in lines(out)[5]
        append(tmp_path, metric(200).rstrip("\n"))
        monitor.poll()
        assert len(lines(out)) == 6
    assert "step  200/1000" in lines(out)[6]  # the writer is gone, so it is whole


def test_a_half_written_summary_is_read_later(tmp_path: Path) -> None:
    out = plain()
    monitor = Monitor(tmp_path, out)
    (tmp_path / "summary.json").write_text('{"status": "runn')
    monitor.poll()
    assert text(out) == ""
    write(tmp_path, "summary.json", RUNNING)
    monitor.poll()
    assert len(lines(out)) == 5


def test_resume_hides_the_history(tmp_path: Path) -> None:
    """The files of a killed attempt lie there, with running in them, when the next one starts."""
    write(tmp_path, "summary.json", {**RUNNING, "model": "stale"})
    append(tmp_path, *(metric(step) for step in range(1, 151)), '{"step": 100, "val_loss": 3.0}\n')
    for name in ("summary.json", "metrics.jsonl"):
        os.utime(tmp_path / name, (time.time() - 60,) * 2)
    launched = (datetime.now().astimezone() - timedelta(seconds=5)).isoformat()
    write(tmp_path, "launch.json", {"launches": [{"time": "2020-01-01T00:00:00"}, {"time": launched}]})
    out = plain()
    with Monitor(tmp_path, out) as monitor:
        monitor.poll()
        assert text(out) == ""
        write(tmp_path, "summary.json", {**RUNNING, "start_step": 100, "compile": "whole"})
        monitor.poll()
        compiling = "the first compiles the model, and takes longer"
        assert f"steps     1000 · resuming from step 100 · {compiling}" in lines(out)
        assert len(lines(out)) == 5
        (tmp_path / "metrics.jsonl").write_text("".join(metric(step) for step in range(1, 101)))
        monitor.poll()
        assert len(lines(out)) == 5
        append(tmp_path, metric(101))
        monitor.poll()
    assert [line[:14] for line in lines(out)[5:]] == ["step  101/1000"]


def test_restart_while_watching(tmp_path: Path) -> None:
    write(tmp_path, "summary.json", RUNNING)
    out = plain()
    with Monitor(tmp_path, out) as monitor:
        append(tmp_path, *(metric(step) for step in range(1, 151)), '{"step": 100, "val_loss": 3.0}\n')
        monitor.poll()
        before = len(lines(out))
        monitor.message("restart 1 of 3")
        write(tmp_path, "summary.json", {**RUNNING, "start_step": 100})
        new = "".join(metric(step) for step in range(1, 101)) + '{"step": 100, "val_loss": 3.0}\n'
        (tmp_path / "new").write_text(new)
        os.replace(tmp_path / "new", tmp_path / "metrics.jsonl")
        monitor.poll()
        append(tmp_path, metric(101))
        monitor.poll()
    shown = lines(out)[before:]
    assert shown[0] == "restart 1 of 3"
    assert [line for line in shown if "resuming from step 100" in line]
    assert [line[:14] for line in shown if line.startswith("step ")] == ["step  101/1000"]


def test_metrics_cut_back_before_the_summary_says_so(tmp_path: Path) -> None:
    write(tmp_path, "summary.json", RUNNING)
    out = plain()
    with Monitor(tmp_path, out) as monitor:
        append(tmp_path, *(metric(step) for step in range(1, 151)))
        monitor.poll()
        before = len(lines(out))
        kept = [*(metric(step) for step in range(1, 101)), '{"step": 100, "val_loss": 3.0}\n']
        (tmp_path / "metrics.jsonl").write_text("".join(kept))
        monitor.poll()
        assert [line[:14] for line in lines(out)[before:]] == ["step  100/1000"]  # not all hundred again
        append(tmp_path, metric(101))
        monitor.poll()
        (tmp_path / "metrics.jsonl").write_text("")
        monitor.poll()
    assert len(lines(out)) == before + 1  # step 101 is undone, so it is not the last word


def test_the_header_is_not_repeated(tmp_path: Path) -> None:
    out = plain()
    with Monitor(tmp_path, out) as monitor:
        for steps in (0, 10, 20):
            write(tmp_path, "summary.json", {**RUNNING, "steps": steps})
            monitor.poll()
    assert len(lines(out)) == 5


def test_a_run_that_fails_at_once_has_no_header(tmp_path: Path) -> None:
    out = plain()
    with Monitor(tmp_path, out) as monitor:
        write(tmp_path, "summary.json", {"status": "failed", "reason": "x"})
        monitor.poll()
    assert text(out) == ""


def test_a_run_that_ends_between_two_polls_is_shown(tmp_path: Path) -> None:
    out = plain()
    with Monitor(tmp_path, out):
        write(tmp_path, "summary.json", {**RUNNING, "status": "done"})
        append(tmp_path, metric(1), metric(2))
    assert [line[:14] for line in lines(out)[5:]] == ["step    1/1000", "step    2/1000"]


def test_message_is_not_markup_and_finish_is_final(tmp_path: Path) -> None:
    out = plain(width=20)
    with Monitor(tmp_path, out) as monitor:
        monitor.message("[red]stop requested[/red]: \x1b[31msaving a checkpoint first")
        monitor.finish()
        write(tmp_path, "summary.json", RUNNING)
        monitor.poll()
    assert text(out) == "[red]stop requested[/red]: saving a checkpoint first\n"


# ---------------------------------------------------------------- monitor, terminal


@pytest.mark.parametrize("width", [30, 40, 60, 80, 100, 200])
def test_live_line_fits_and_keeps_what_matters(tmp_path: Path, width: int) -> None:
    write(tmp_path, "summary.json", RUNNING)
    append(tmp_path, metric(500))
    out = terminal(width)
    with Monitor(tmp_path, out) as monitor:
        monitor.poll()
        out.file = io.StringIO()  # only the live line from here
        monitor.live.refresh()
        shown = screen(out)
    assert "\n" not in shown and len(shown) < width
    assert "step  500/1000  loss 4.5000" in shown
    appears = {
        "━": 40,
        "ETA 4m 10s": 60,
        "81.2K tok/s": 80,
        "MFU 41.2%": 80,
        "lr 3.00e-04": 100,
        "12.3 GiB": 100,
    }
    for name, least in appears.items():
        assert (name in shown) == (width >= least), name


def test_terminal_from_start_to_end(tmp_path: Path) -> None:
    out, now = terminal(), 0.0
    with Monitor(tmp_path, out) as monitor:
        monitor.clock = lambda: now
        monitor.began = now
        monitor.poll()
        assert screen(out) == "starting the workers … 0.0s"
        write(tmp_path, "summary.json", RUNNING)
        now = 3.0
        monitor.poll()
        assert screen(out).splitlines()[-1] == "waiting for the first step … 3.0s"
        append(tmp_path, metric(10), '{"step": 10, "val_loss": 2.0, "val_perplexity": 7.389}\n')
        now = 4.0
        monitor.poll()
        monitor.message("[b]stop[/b]")
        append(tmp_path, metric(20))
        now = 90.0
    shown = screen(out).splitlines()
    assert shown[0].startswith("model     gpt2-tiny")
    assert shown[5:7] == ["step 10  validation loss 2.0000  perplexity 7.39", "[b]stop[/b]"]
    assert len(shown) == 8 and shown[7].endswith("in 1m 30s") and "step   20/1000" in shown[7]
    assert text(out).rindex("\x1b[?25h") > text(out).rindex("\x1b[?25l")  # the cursor is back


def test_terminal_keeps_no_bar_of_a_run_that_never_stepped(tmp_path: Path) -> None:
    out = terminal()
    with pytest.raises(KeyboardInterrupt), Monitor(tmp_path, out) as monitor:
        monitor.poll()
        raise KeyboardInterrupt
    assert screen(out).strip() == ""
    assert text(out).rindex("\x1b[?25h") > text(out).rindex("\x1b[?25l")


def test_dumb_terminal_is_plain(tmp_path: Path) -> None:
    write(tmp_path, "summary.json", RUNNING)
    append(tmp_path, metric(1))
    out = Console(file=io.StringIO(), force_terminal=True, color_system=None, _environ={"TERM": "dumb"})
    with Monitor(tmp_path, out) as monitor:
        monitor.poll()
    assert "\x1b" not in text(out) and "step    1/1000" in text(out)


# ---------------------------------------------------------------- summary and errors


def summary_of(run_dir: Path, **values: Any) -> list[str]:
    write(run_dir, "summary.json", {**RUNNING, **values})
    out = plain(width=30)
    print_summary(run_dir, out)
    return lines(out)


def test_summary_of_a_finished_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / "outputs" / "my run"
    for step, name in ((900, "manifest.json"), (1000, "manifest.json"), (1100, "torn")):
        folder = run_dir / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / name).touch()
    predicted = {"tokens_per_s": 79000, "memory_gib": {"total": 11.9}, "step_s": {"total": 0.4}, "mfu": 0.4}
    shown = summary_of(
        run_dir,
        status="done",
        steps=1000,
        train_loss=3.2,
        val_loss=2.0,
        val_perplexity=7.389,
        tokens_per_s=81920.0,
        mfu=0.4123,
        peak_mem_gib=12.345,
        wall_s=83.4,
        predicted=predicted,
        skipped_steps=0,
        saves=10,
        save_s=20.0,
        save_gib=45.0,
        save_stall_s=0.9,
        save_stall_median_s=0.0352,
    )
    assert shown == [
        "status           done",
        "run              outputs/my run",
        "steps            1000 of 1000",
        "train loss       3.2000",
        "validation loss  2.0000 (perplexity 7.39)",
        "tokens/s         81.9K         predicted 79K",
        "step time        400 ms        predicted 400 ms",
        "MFU              41.2%         predicted 40.0%",
        "peak memory      12.3 GiB      predicted 11.9 GiB",
        "wall time        1m 23s",
        "saves            10 (median stall 35.2 ms, 2.25 GiB/s)",
        "checkpoint       outputs/my run/checkpoints/step-00001000",
        "next             dtrain sample 'outputs/my run' \"def \"",
        "                 dtrain export 'outputs/my run'",
        "                 python launch.py 'resume=\"outputs/my run\"' train.steps=2000 'resume_allow=[train.steps]'",
    ]


def test_summary_of_a_preempted_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "a").mkdir(parents=True)
    shown = summary_of(tmp_path / "runs" / "a", status="preempted", steps=0)
    assert shown[0] == "status           preempted"
    assert shown[2] == "steps            0 of 1000"
    assert shown[-1] == "next             python launch.py resume=runs/a"


def test_summary_of_a_failed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    message = "\n".join([*(f"noise {i}" for i in range(10)), "", "CUDA error: [bold]\x1b[31massert\x1b[0m " + "x" * 90])
    write(
        tmp_path,
        "failure.json",
        {
            "rank": 1,
            "type": "RuntimeError",
            "message": message,
            "traceback": "…",
            "log": "logs/rank-1.log",
            "exit_code": -9,
        },
    )
    shown = summary_of(tmp_path, status="failed", steps=3)
    at = shown.index("first error      rank 1: RuntimeError (exit code -9)")
    assert [line.strip() for line in shown[at + 1 :]] == [
        "noise 6",
        "noise 7",
        "noise 8",
        "noise 9",
        "CUDA error: [bold]assert " + "x" * 90,
        "log              logs/rank-1.log",
        "next             python launch.py resume=./.",
    ]


def test_summary_without_files(tmp_path: Path) -> None:
    out = plain()
    print_summary(tmp_path, out)
    assert lines(out)[0] == "status           unknown" and len(lines(out)) == 2
    write(tmp_path, "failure.json", {"type": "OSError", "traceback": "Traceback\n  x\nOSError: no space"})
    out = plain()
    print_summary(tmp_path, out)
    assert lines(out)[0] == "status           failed"
    assert "OSError: no space" in text(out)


def test_summary_of_a_killed_run_uses_its_metrics(tmp_path: Path) -> None:
    append(
        tmp_path,
        '{"step": 40, "val_loss": 3.5, "val_perplexity": 33.1}\n',
        *(metric(s) for s in range(1, 48)),
        '{"step": 48, "lo',
    )
    write(tmp_path, "failure.json", {"type": "OldError"})  # of an attempt before
    write(tmp_path, "summary.json", {**RUNNING, "steps": 0})
    out = plain()
    print_summary(tmp_path, out, status="died")
    assert "steps            47 of 1000" in lines(out)
    assert "train loss       4.9530" in lines(out)
    assert "validation loss  3.5000 (perplexity 33.1)" in lines(out)
    assert "none was recorded" in text(out) and "OldError" not in text(out)
    assert "python launch.py resume=" in lines(out)[-1]


def test_error_is_plain_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    print_error("strategy=[bold]x[/bold]: " + "long " * 40 + "\x1b[31m\n  fix: y")
    assert capsys.readouterr().err == "error: strategy=[bold]x[/bold]: " + "long " * 40 + "\n  fix: y\n"


@pytest.mark.parametrize(("env", "label"), [({}, "\x1b[1;31merror:\x1b[0m"), ({"NO_COLOR": "1"}, "error:")])
def test_error_is_red_on_a_terminal(monkeypatch: pytest.MonkeyPatch, env: dict[str, str], label: str) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    print_error("no [b]")
    assert stderr.getvalue() == f"{label} no [b]\n"


def test_a_pipe_stays_plain_and_the_import_light() -> None:
    program = (
        "import sys, dtrain.console, dtrain.runs\n"
        "heavy = {'torch', 'hydra', 'omegaconf', 'rich', 'yaml', 'numpy'} & set(sys.modules)\n"
        "print(sorted(heavy), dtrain.console.stdout_console().is_terminal)"
    )
    env = {**os.environ, "FORCE_COLOR": "1", "PYTHONPATH": str(Path(console.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "[] False\n"
