"""The pages of `dtrain watch`: they fit any terminal, and nothing in a run folder can reach it as a command."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from rich.text import Text

from dtrain.runs.live import Glance, LiveRun
from dtrain.runs.metrics import SYSTEM_FILE
from dtrain.runs.slurm_queue import Job
from dtrain.ui.lines import keys_line, one_line
from dtrain.ui.watch import run_page
from dtrain.ui.watch_list import list_page
from dtrain.ui.watch_ranks import rank_lines
from tests.rundirs import fakes, in_tmp_path, make  # noqa: F401
from tests.runs.test_live import looks_each_time, running  # noqa: F401
from tests.screens import RUNNING, append, metric, write

EVIL = "\x1b[2J\x1b]0;title\x07[red]log[/red] \u202eabc\r\t日本語 \x9b5A end"
GPU = {"utilization_percent": 97, "memory_gib": 61.0, "memory_total_gib": 139.8, "power_w": 650.0, "temperature_c": 61}


def full(name: str = "run") -> Path:
    """A run with something in every part of the page."""
    run_dir = running(name)
    append(run_dir, *(metric(step) for step in range(1, 201)))
    append(run_dir, json.dumps({"step": 200, "val_loss": 4.5}) + "\n")
    own = [1.0] * 15 + [1.5]
    ranks = {"rank_own_s": own, "rank_wait_s": [0.5] * 15 + [0.0], "rank_data_s": [0.01] * 16}
    append(run_dir, json.dumps({"step": 200, **ranks}) + "\n")
    append(run_dir, json.dumps({"step": 200, "slow_text": f"rank 15 (node2) is 1.5x as slow {EVIL}"}) + "\n")
    write(run_dir, "plan.json", {"tokens_per_s": 100_000.0, "memory_gib": {"total": 13.0, "limit": 139.0}})
    write(run_dir, "summary.json", RUNNING | {"world_size": 16, "model": EVIL})
    for node in ("node1", "node2"):
        gpus = [{"index": i, **GPU, "throttle": ["power cap"] if i == 3 else []} for i in range(8)]
        (run_dir / SYSTEM_FILE.format(node)).write_text(json.dumps({"time": 1, "cpu_percent": 5, "gpus": gpus}) + "\n")
    # without its carriage return, which hides what stands before it in a log, as in a terminal
    (run_dir / "logs" / "rank-0.log").write_text(f"INFO hello\n2026 WARNING {EVIL}\n".replace("\r", ""))
    checkpoint = run_dir / "checkpoints" / "step-00000100"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    return run_dir


def read(run_dir: Path) -> LiveRun:
    run = LiveRun(run_dir)
    run.poll()
    return run


def text(lines: list[Text]) -> str:
    return "\n".join(line.plain for line in lines)


@pytest.mark.parametrize(
    ("width", "height"), [(20, 3), (40, 10), (80, 23), (100, 60), (119, 33), (120, 34), (200, 49), (300, 90)]
)
def test_every_page_fits_its_terminal(width: int, height: int) -> None:
    pages = [run_page(read(full()), width, height, note="x" * 300, why="y " * 300)]
    pages.append(run_page(read(running("empty")), width, height))
    pages.append(run_page(LiveRun(Path("none")), width, height))
    runs = [Glance(full(f"{i}-lr={i}" + "z" * 50 * i)) for i in range(5)]
    for run in runs:
        run.poll()
    pages += [list_page(runs * 20, width, height, selected=93, title="t" * 400), list_page([], width, height)]
    pages.append([keys_line([("q", "quit")] * 20, width, "note")])
    for page in pages:
        assert 0 < len(page) <= height
        assert all(line.cell_len <= width for line in page), [line.cell_len for line in page]
        assert all(char.isprintable() for line in page for char in line.plain)


def test_a_small_terminal_shows_what_matters() -> None:
    shown = text(run_page(read(full()), 80, 23))
    for part in ("running", "step 200/1000  20.0%", "ETA 6m 40s", "loss 4.8", "val 4.5", "81.2K 81% of plan",
                 "own 1.02s", "slowest 15: 1.50s (1.50 × median)", "node1  8 GPUs 97%", "power cap", "step 100",
                 "slow rank", "2026 WARNING", "validation"):  # fmt: skip
        assert part in shown, f"{part}\n{shown}"


def test_a_large_terminal_shows_two_columns() -> None:
    page = run_page(read(full()), 200, 49)
    first = next(line.plain for line in page if "── loss" in line.plain)
    assert "tokens/s" in first and len(page) == 49
    shown = text(page)
    assert "loss, newest steps" in shown and "where a step goes" in shown and "the slowest of 16" in shown


def test_untrusted_text_has_no_codes_and_is_no_markup() -> None:
    assert one_line(EVIL) == "[red]log[/red] abc 日本語 5A end"
    page = run_page(read(full()), 200, 49)
    assert "[red]log[/red] abc" in text(page)


def test_secrets_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "0123456789abcdef")
    assert one_line("key 0123456789abcdef in a log") == "key <redacted> in a log"


def test_what_needs_a_person_is_at_the_top() -> None:
    run_dir = full()
    write(run_dir, "logs/hang.json", {"text": "rank 3 waits for nobody"})
    page = run_page(read(run_dir), 80, 23)
    assert page[3].plain == "stands still  rank 3 waits for nobody" and "ETA" not in text(page)
    write(run_dir, "summary.json", RUNNING | {"status": "failed"})
    write(
        run_dir,
        "failure.json",
        {"rank": 2, "type": "ValueError", "message": "no\nsuch thing", "log": "logs/rank-2.log"},
    )
    assert "failed  rank 2: ValueError: such thing" in text(run_page(read(run_dir), 80, 23))


@pytest.mark.parametrize(
    ("job", "shown"),
    [
        (Job("7", "PENDING", "Priority", submitted=time.time() - 90_000), "7 PENDING, waits 1d 01h"),
        (Job("7", "RUNNING", "", "node[1-2]", 62.0, 3600.0), "7 RUNNING, 1m 02s of 1h 00m, node[1-2]"),
    ],
)
def test_the_queue(job: Job, shown: str) -> None:
    run = LiveRun(make("run", launch={"launches": [{"job_id": "7"}]}))
    run.poll(job)
    page = text(run_page(run, 80, 23))
    assert shown in page and run.is_live


def test_many_ranks_fit_one_line() -> None:
    run = LiveRun(Path("none"))
    run.ranks = {"own_s": [1.0] * 1000 + [3.0] + [1.0] * 23}
    (line,) = rank_lines(run, 80)
    assert line.cell_len <= 80 and line.plain.count("█") == 1 and "slowest 1000: 3.00s" in line.plain


def test_the_list_marks_one_run_and_names_all() -> None:
    runs = [
        Glance(make(f"multirun/d/{i}-lr={i}", status="done", val_loss=3 - i / 10, steps=5, total_steps=5))
        for i in range(3)
    ]
    runs.append(Glance(make("other/2-lr=2")))
    for run in runs:
        run.poll()
    page = list_page(runs, 80, 20, selected=1, title="multirun")
    assert "3 done" in page[0].plain
    assert [line.plain.split()[0] for line in page[2:]] == ["0-lr=0", "1-lr=1", "d/2-lr=2", "other/2-lr=2"]
    marked: list[Any] = [i for i, line in enumerate(page) if any("reverse" in str(span.style) for span in line.spans)]
    assert marked == [3]


ODD = [None, True, -1, 0, 1e308, -1e308, 10**400, "x", "\x1b[2J", [], {}, [1, "a", None], {"a": 1}]


@pytest.mark.parametrize("value", ODD, ids=lambda value: str(value)[:8])
def test_any_value_anywhere_can_be_drawn(value: Any) -> None:
    """A run folder is untrusted, and may come from another version."""
    run_dir = full()
    names = [*json.loads(metric(1)), "val_loss", "val_accuracy", "rank_own_s", "rank_wait_s", "slow_text", "save_step"]
    rows = [dict.fromkeys(names, value) | {"step": 300}, json.loads(metric(301)) | {"loss": value}]
    rows += [{"step": 302, "rank_own_s": [value, 1.0], "rank_wait_s": [value]}]
    append(run_dir, *(json.dumps(row) + "\n" for row in rows))
    write(
        run_dir,
        "summary.json",
        dict.fromkeys([*RUNNING, "steps", "unit", "ranks", "wall_s"], value) | {"status": "running"},
    )
    write(run_dir, "plan.json", {"tokens_per_s": value, "memory_gib": {"total": value, "limit": value}})
    write(run_dir, "logs/position-0.json", {"phase": value})
    gpus = [dict.fromkeys([*GPU, "index", "throttle", "xid", "ecc_errors"], value), value]
    sample = {"cpu_percent": value, "memory_gib": value, "net_in_mib_s": value, "net_out_mib_s": 1, "gpus": gpus}
    (run_dir / SYSTEM_FILE.format("odd")).write_text(json.dumps(sample) + "\n")
    run, glance = read(run_dir), Glance(run_dir)
    glance.poll()
    for width, height in ((80, 23), (200, 49)):
        for page in (run_page(run, width, height), list_page([glance], width, height)):
            assert all(line.cell_len <= width for line in page)
