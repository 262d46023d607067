"""Run folders: found by name, listed with the truth about their status, compared."""

import io
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from dtrain import runs
from dtrain.runs import compare, find_run, list_runs, main, print_compare, print_runs, print_sweep, sort_runs

HERE = socket.gethostname()


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def make(path: str, *, time: str | None = None, config: str | None = None, launch: Any = None, **summary: Any) -> Path:
    """A run folder below the current folder."""
    run_dir = Path(path).absolute()
    run_dir.mkdir(parents=True)
    record = {"overrides": [], "launches": [{"time": time}] if time else [], **(launch or {})}
    (run_dir / "launch.json").write_text(json.dumps(record))
    if summary:
        (run_dir / "summary.json").write_text(json.dumps(summary))
    if config is not None:
        (run_dir / "config.yaml").write_text(config)
    return run_dir


def plain() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=40)


def terminal(width: int) -> Console:
    return Console(
        file=io.StringIO(),
        force_terminal=True,
        width=width,
        color_system=None,
        legacy_windows=False,
        _environ={"TERM": "xterm"},
    )


def lines(c: Console) -> list[str]:
    assert isinstance(c.file, io.StringIO)
    return c.file.getvalue().splitlines()


@pytest.fixture
def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    return process.pid


# ---------------------------------------------------------------- find


def test_find_by_path() -> None:
    run = make("anywhere/run")
    assert find_run("anywhere/run") == run
    assert find_run("anywhere/run/") == run
    assert find_run(str(run)) == run


def test_find_latest_by_launch_time_not_by_name() -> None:
    make("outputs/2025-01-03/10-00-00-a", time="2025-01-03T10:00:00+0000")
    resumed = make("outputs/2025-01-01/10-00-00-b", time="2025-01-04T10:00:00+0000")
    make("multirun/2025-01-02/10-00-00/0-x=1", time="2025-01-04T10:30:00+0100")  # 09:30 in UTC
    assert find_run("latest") == resumed


def test_find_latest_by_file_time_where_the_launch_says_nothing_or_the_same() -> None:
    old, new = make("outputs/d/z"), make("outputs/d/a")
    os.utime(old / "launch.json", (time.time() - 100,) * 2)
    assert find_run("latest") == new
    now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    for name, ago in (("z", 0.0), ("a", 0.5)):
        (Path("outputs/d") / name / "launch.json").write_text(json.dumps({"launches": [{"time": now}]}))
        os.utime(Path("outputs/d") / name / "launch.json", (time.time() - ago,) * 2)
    assert find_run("latest") == old


def test_find_by_part_of_the_name() -> None:
    tiny = make("outputs/2025-01-01/10-00-00-gpt2-tiny")
    plain_name = make("outputs/2025-01-01/10-00-01-gpt2")
    third = make("multirun/2025-01-01/10-00-02/3-optim.lr=0.1")
    make("multirun/2025-01-01/10-00-02/13-optim.lr=0.1")
    assert find_run("gpt2-tiny") == tiny
    assert find_run("gpt2") == plain_name  # the whole name beats a part of another
    assert find_run("00-00-gpt") == tiny
    assert find_run("3-optim.lr=0.1") == third
    assert find_run("10-00-02/3-") == third


def test_find_ambiguous() -> None:
    for i in range(7):
        make(f"outputs/d/10-00-0{i}-gpt2-{i}", time=f"2025-01-0{i + 1}T00:00:00")
    with pytest.raises(ValueError) as error:
        find_run("gpt2")
    assert str(error.value).splitlines() == [
        "run 'gpt2': 7 runs have that in their name; it must mean one",
        "  fix: give more of the path; newest first:",
        *(f"    outputs/d/10-00-0{i}-gpt2-{i}" for i in (6, 5, 4, 3, 2)),
        "    … and 2 more; `dtrain runs` lists them",
    ]


def test_find_with_a_typing_mistake() -> None:
    make("outputs/d/10-00-00-gpt2-tiny")
    make("outputs/d/10-00-00-resnet")
    with pytest.raises(ValueError) as error:
        find_run("gtp2-tiny")
    assert str(error.value).endswith("fix: did you mean\n    outputs/d/10-00-00-gpt2-tiny")
    with pytest.raises(ValueError, match=r"(?s)the newest are.*resnet"):
        find_run("@@@@@@")


def test_find_where_nothing_is() -> None:
    with pytest.raises(ValueError, match=r"(?s)run 'latest'.*outputs/ and multirun/.*launch.py"):
        find_run("latest")


def test_find_a_sweep_folder() -> None:
    make("elsewhere/10-00-00/0-a=1")
    make("elsewhere/10-00-00/1-a=2")
    with pytest.raises(ValueError, match=r"(?s)holds 2 runs.*elsewhere/10-00-00/0-a=1"):
        find_run("elsewhere/10-00-00")


# ---------------------------------------------------------------- list


def test_list_reads_what_is_known(tmp_path: Path) -> None:
    make(
        "outputs/d/10-00-00-first",
        time="2025-01-01T00:00:00+00:00",
        status="done",
        model="gpt2",
        steps=5,
        total_steps=9,
        train_loss=1.5,
        world_size=2,
        wall_s=3.0,
        strategy="ddp",
        precision="bf16",
    )
    make("multirun/d/t/0-a=1", time="2025-01-02T00:00:00+00:00", status="failed")
    newest, first = list_runs()
    assert newest["path"] == "multirun/d/t/0-a=1" and newest["status"] == "failed" and newest["model"] is None
    assert first == {
        "path": "outputs/d/10-00-00-first",
        "name": "first",
        "status": "done",
        "model": "gpt2",
        "strategy": "ddp",
        "precision": "bf16",
        "world_size": 2,
        "steps": 5,
        "total_steps": 9,
        "train_loss": 1.5,
        "val_loss": None,
        "tokens_per_s": None,
        "mfu": None,
        "peak_mem_gib": None,
        "wall_s": 3.0,
        "started": "2025-01-01T00:00:00.000000+00:00",
    }
    assert list(first) == list(runs.COLUMNS)
    assert len(list_runs(["outputs", "outputs/d", tmp_path / "outputs"])) == 1  # each run once
    assert list_runs(["nowhere"]) == []


def test_list_walks_four_levels_and_not_into_runs() -> None:
    make("root/1/2/3/4", status="done")
    make("root/1/2/3/b/5", status="done")
    make("root/run", status="done")
    make("root/run/checkpoints", status="done")
    make("root/.hidden", status="done")
    os.symlink(Path("root/run").absolute(), "root/latest")
    assert sorted(run["path"] for run in list_runs(["root"])) == ["root/1/2/3/4", "root/run"]


def test_list_tolerates_broken_files() -> None:
    for name, content in (("a", "{"), ("b", "[]"), ("c", "\0\xff"), ("d", '{"status": 3, "launches": 5}')):
        run = make(f"outputs/{name}")
        for file in ("launch.json", "summary.json"):
            (run / file).write_text(content)
    table = {run["path"]: run["status"] for run in list_runs()}
    assert table == {
        "outputs/a": "starting",
        "outputs/b": "starting",
        "outputs/c": "starting",
        "outputs/d": "3",
    }
    print_runs(list_runs(), plain())


def test_list_reads_few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand runs must list quickly, so no config.yaml is parsed and no checkpoint is looked into."""
    for i in range(5):
        make(f"outputs/d/{i}", status="done", config="a: 1")
    read, original = [], Path.read_bytes

    def counted(path: Path) -> bytes:
        read.append(path.name)
        return original(path)

    monkeypatch.setattr(Path, "read_bytes", counted)
    assert len(list_runs()) == 5
    assert set(read) == {"launch.json", "summary.json"} and len(read) <= 3 * 5


@pytest.mark.parametrize(
    ("launch", "quiet_s", "expected"),
    [
        ({"pid": os.getpid(), "host": HERE}, 0, "running"),
        (
            {"pid": os.getpid(), "host": HERE},
            3600,
            "running?",
        ),  # a stalled run, or another process with that pid
        ({"pid": "dead", "host": HERE}, 0, "died"),
        ({"launches": [{"pid": "dead", "host": HERE}]}, 0, "died"),
        ({"pid": "dead", "host": "another-host"}, 0, "running"),
        ({"pid": "dead", "host": "another-host"}, 3600, "running?"),
        ({"pid": "dead", "host": HERE, "job_id": 7}, 0, "running"),
        (
            {"pid": "dead", "host": HERE, "launches": [{"cluster": {"_target_": "x.slurm.Slurm"}}]},
            0,
            "running",
        ),
        ({"pid": "dead", "host": HERE, "launches": [{"cluster": {"_target_": "x.local.Local"}}]}, 0, "died"),
        ({}, 0, "running"),
    ],
)
def test_status_of_a_running_run(dead_pid: int, launch: Any, quiet_s: int, expected: str) -> None:
    launch = json.loads(json.dumps(launch).replace('"dead"', str(dead_pid)))
    run = make("outputs/a", launch=launch, status="running")
    for file in run.iterdir():
        os.utime(file, (time.time() - quiet_s,) * 2)
    assert list_runs()[0]["status"] == expected


def test_status_before_there_is_a_summary(dead_pid: int) -> None:
    run = make("outputs/a", launch={"pid": dead_pid, "host": HERE})
    assert list_runs()[0]["status"] == "died"
    (run / "failure.json").write_text("{}")
    assert list_runs()[0]["status"] == "failed"


def test_a_new_metrics_line_is_a_sign_of_life_and_has_the_figures() -> None:
    run = make("outputs/a", status="running", steps=0, total_steps=100, train_loss=None)
    for file in run.iterdir():
        os.utime(file, (time.time() - 3600,) * 2)
    (run / "metrics.jsonl").write_text('{"step": 5, "val_loss": 2.5}\n{"step": 6, "loss": 2.0, "mfu": null}\n{"st')
    [found] = list_runs()
    assert (found["status"], found["steps"], found["train_loss"], found["val_loss"]) == (
        "running",
        6,
        2.0,
        2.5,
    )


# ---------------------------------------------------------------- sort


@given(
    st.lists(st.one_of(st.none(), st.floats(), st.integers(-5, 5))),
    st.sampled_from(["val_loss", "tokens_per_s"]),
)
def test_sort_puts_the_best_first_and_the_unknown_last(values: list[Any], key: str) -> None:
    table = [{"id": i, key: value} for i, value in enumerate(values)]
    ranked = sort_runs(table, key)
    assert sorted(run["id"] for run in ranked) == list(range(len(values)))
    known = [v for v in values if v is not None and v == v]
    assert [run[key] for run in ranked[: len(known)]] == sorted(known, reverse=key == "tokens_per_s")


def test_sort_by_an_unknown_key() -> None:
    with pytest.raises(ValueError, match=r"sort=valloss: not a column\n  fix: did you mean val_loss\?"):
        sort_runs([], "valloss")


# ---------------------------------------------------------------- tables


def test_table_in_a_pipe_has_whole_lines_and_no_empty_columns() -> None:
    name = "10-00-00-" + "long" * 30 + "[red]"
    make(
        f"outputs/d/{name}",
        time="2025-01-02T00:00:00",
        status="done",
        strategy="fsdp",
        steps=5,
        total_steps=10,
        train_loss=1.23456,
    )
    make("outputs/d/b", time="2025-01-01T00:00:00", status="failed")
    out = plain()
    print_runs(list_runs(), out)
    head, first, second = lines(out)
    assert head.split() == ["run", "status", "strategy", "steps", "train", "loss"]
    assert first.split() == [f"outputs/d/{name}", "done", "fsdp", "5/10", "1.2346"]
    assert second.split() == ["outputs/d/b", "failed", "-", "-", "-"]
    assert head.index("status") == first.index("done") == second.index("failed")
    out = plain()
    print_runs(list_runs(), out, columns=["path", "status"], sort="total_steps")
    assert lines(out)[0].split() == ["run", "status", "total", "steps"]
    out = plain()
    print_runs([], out)
    assert "python launch.py" in lines(out)[0]


def test_table_on_a_narrow_terminal_hides_what_matters_least() -> None:
    make(
        "outputs/d/a",
        status="done",
        model="gpt2",
        strategy="fsdp",
        precision="bf16",
        steps=5,
        train_loss=1.0,
        val_loss=2.0,
        tokens_per_s=1000.0,
        wall_s=5.0,
        peak_mem_gib=2.0,
        world_size=8,
    )
    wide, narrow = terminal(200), terminal(70)
    print_runs(list_runs(), wide)
    assert "precision" in lines(wide)[0] and len(lines(wide)) == 2
    print_runs(list_runs(), narrow)
    head, row, note = lines(narrow)
    assert "val loss" in head and "outputs/d/a" in row and "precision" not in head
    assert note.startswith("hidden to fit 70 columns: precision, wall")
    assert all(len(line) <= 70 for line in lines(narrow))
    narrow = terminal(70)
    print_runs(list_runs(), narrow, sort="wall_s")
    assert "wall" in lines(narrow)[0]  # asked for, so it stays


def test_compare() -> None:
    a = make(
        "outputs/d/a",
        status="done",
        train_loss=1.0,
        config="run_dir: /a\ntrain: {steps: 9, seed: 0}\noptim: {lr: 0.1, betas: [0.9, 0.95]}\nx: {}\ny: 1\n",
    )
    b = make(
        "outputs/d/b",
        status="failed",
        config="run_dir: /b\ntrain: {steps: 9, seed: false}\noptim: {lr: 0.1, betas: [0.9, 0.9]}\ny: '1'\n",
    )
    c = make("outputs/e/c", status="done", config="a: [")
    data = compare([a, b, c])
    assert data["runs"] == [str(a), str(b), str(c)]
    assert data["settings"] == {
        "train.seed": [0, False, None],
        "optim.betas": [[0.9, 0.95], [0.9, 0.9], None],
        "x": [{}, None, None],
        "y": [1, "1", None],
    }
    assert data["results"] == {"status": ["done", "failed", "done"], "train_loss": [1.0, None, None]}
    assert data["unreadable"] == [str(c)]
    out = plain()
    print_compare([a, b, c], out)
    assert [line.split() for line in lines(out)[:-1]] == [
        ["d/a", "d/b", "e/c"],
        ["settings", "that", "differ:"],
        ["train.seed", "0", "false", "-"],
        ["optim.betas", "[0.9,", "0.95]", "[0.9,", "0.9]", "-"],
        ["x", "{}", "-", "-"],
        ["y", "1", "1", "-"],
        ["results:"],
        ["status", "done", "failed", "done"],
        ["train", "loss", "1.0000", "-", "-"],
    ]
    assert lines(out)[-1] == "settings of outputs/e/c are not compared: no readable config.yaml"


def sweep(*losses: tuple[Any, Any]) -> list[Path]:
    return [
        make(
            f"multirun/d/t/{i}-optim.lr={i}",
            launch={"overrides": ["model=gpt2", f"optim.lr={i}"]},
            status="done",
            train_loss=train,
            val_loss=val,
            wall_s=5.0,
        )
        for i, (train, val) in enumerate(losses)
    ]


@pytest.mark.parametrize(
    ("losses", "best"),
    [
        ([(1.0, 3.0), (2.0, 2.0), (3.0, float("nan"))], 1),  # by validation, whatever the training loss
        ([(1.0, None), (0.5, None), (float("inf"), None)], 1),
        ([(0.1, None), (2.0, 2.0)], 1),
        ([(None, None), (float("nan"), None)], None),
    ],
)
def test_sweep_marks_the_best(losses: list[tuple[Any, Any]], best: int | None) -> None:
    out = plain()
    print_sweep(sweep(*losses), out)
    rows = lines(out)[1 : 1 + len(losses)]
    assert [line.split()[1] for line in rows] == [f"optim.lr={i}" for i in range(len(losses))]
    assert [i for i, line in enumerate(rows) if line.endswith("← best")] == ([] if best is None else [best])
    assert lines(out)[-1] == "all jobs: model=gpt2"


def test_sweep_orders_jobs_by_number_and_shows_all_overrides_of_one() -> None:
    jobs = sweep(*((1.0, 1.0 + i) for i in range(11)))
    out = plain()
    print_sweep(sorted(jobs), out)  # by name: 0, 1, 10, 2
    assert [line.split()[0] for line in lines(out)[1:-1]] == [str(i) for i in range(11)]
    out = plain()
    print_sweep(jobs[:1], out)
    assert lines(out)[1].split()[:3] == ["0", "model=gpt2", "optim.lr=0"]


# ---------------------------------------------------------------- command


def test_command_lists_sorts_and_limits(capsys: pytest.CaptureFixture[str]) -> None:
    for i, loss in enumerate([3.0, 1.0, float("nan")]):
        make(f"outputs/d/{i}", time=f"2025-01-0{i + 1}T00:00:00", status="done", val_loss=loss)
    assert main([]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "run", "outputs/d/2", "outputs/d/1", "outputs/d/0"]  # fmt: skip
    assert main(["--sort", "val_loss", "--limit", "1"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[1].startswith("outputs/d/1") and shown[2:] == ["2 more were left out by --limit"]
    assert main(["--json", "--root", "outputs"]) == 0
    data = json.loads(capsys.readouterr().out, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert [run["val_loss"] for run in data] == [None, 1.0, 3.0]


def test_command_with_runs(capsys: pytest.CaptureFixture[str]) -> None:
    make("outputs/d/a", status="preempted", config="x: 1")
    make("outputs/d/b", status="done", config="x: 2")
    assert main(["a"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "status           preempted"
    assert main(["a", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "preempted"
    assert main(["a", "b"]) == 0
    assert "settings that differ:" in capsys.readouterr().out
    assert main(["a", "b", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"] == {"x": [1, 2]}


def test_command_tells_that_a_run_died(dead_pid: int, capsys: pytest.CaptureFixture[str]) -> None:
    make("outputs/d/a", launch={"pid": dead_pid, "host": HERE}, status="running")
    assert main(["latest"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "status           died"
    assert shown[-1] == "next             python launch.py resume=outputs/d/a"


def test_command_with_a_sweep_folder(capsys: pytest.CaptureFixture[str]) -> None:
    sweep((1.0, 3.0), (2.0, 2.0))
    assert main(["multirun/d/t"]) == 0
    assert "← best" in capsys.readouterr().out.splitlines()[2]
    assert main(["multirun/d/t", "--sort", "val_loss"]) == 0
    assert "← best" in capsys.readouterr().out.splitlines()[1]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nope"], "run 'nope'"),
        (["--sort", "los"], "sort=los"),
        (["--limit", "0"], "--limit=0"),
        (["--root", "nowhere"], "--root=nowhere"),
    ],
)
def test_command_refuses(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    make("outputs/d/a", status="done")
    assert main(argv) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"error: {message}") and "\n  fix: " in shown.err and shown.out == ""
