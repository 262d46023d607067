"""A run that is watched: in a pipe, and on a terminal."""

from __future__ import annotations

import io
import json
import os
import re
import time
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from rich.console import Console

from dtrain.ui.progress import Monitor
from dtrain.util.format import duration
from tests.screens import RUNNING, append, lines, metric, plain, screen, terminal, text, write

# ---- in a pipe -----------------------------------------------------------------------------------------------


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


def test_a_warning_of_the_first_step_is_shown_once(tmp_path: Path) -> None:
    out = plain()
    with Monitor(tmp_path, out) as monitor:
        for more in ({}, {"unused": "model=Net: extra.weight got no gradient"}, {"unused": ["odd"]}):
            write(tmp_path, "summary.json", RUNNING | more)
            monitor.poll()
            monitor.poll()
    told = [line for line in lines(out) if line.startswith("warning")]
    assert told == ["warning: model=Net: extra.weight got no gradient", "warning: ['odd']"]


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


@pytest.mark.parametrize("skew", [-60, 60])
def test_history_is_told_by_the_file_servers_clock(skew: int, tmp_path: Path) -> None:
    """The launcher's clock, which launch.json quotes, is a minute away from the one that dates the files."""
    launched = datetime.now().astimezone().isoformat()
    written = time.time() + skew
    write(tmp_path, "launch.json", {"launches": [{"time": launched}]})
    write(tmp_path, "summary.json", {**RUNNING, "model": "of the attempt before" if skew > 0 else "of this one"})
    os.utime(tmp_path / "launch.json", (written, written))
    os.utime(tmp_path / "summary.json", (written + (-5 if skew > 0 else 5),) * 2)
    out = plain()
    with Monitor(tmp_path, out) as monitor:
        monitor.poll()
    assert ("of this one" in text(out)) == (skew < 0) and "of the attempt before" not in text(out)


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


# ---- on a terminal -------------------------------------------------------------------------------------------


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
