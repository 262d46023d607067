"""Tables of runs: sorted, compared, one line a point of a sweep."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.commands.runs import main as runs_main
from dtrain.report.why import diagnose
from dtrain.runs.record import Record
from dtrain.ui.comparison import compare, print_compare
from dtrain.ui.sweep_table import print_sweep
from dtrain.ui.tables import print_runs, sort_runs
from tests import rundirs
from tests.rundirs import lines, list_runs, make, plain, sweep, terminal

in_tmp_path = rundirs.in_tmp_path


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
    with pytest.raises(ValueError, match=r"--sort=valloss: no column has this name\n  fix: did you mean val_loss\?"):
        sort_runs([], "valloss")
    with pytest.raises(ValueError, match=r"fix: did you mean 'train loss'\?"):
        sort_runs([], "trian loss")


@pytest.mark.parametrize("name", ["val_loss", "val loss", "Val Loss", "VAL_LOSS"])
def test_sort_takes_the_heading_that_the_table_prints(name: str) -> None:
    table = [{"val_loss": 2.0, "tokens_per_s": 1.0}, {"val_loss": 1.0, "tokens_per_s": 2.0}]
    assert [run["val_loss"] for run in sort_runs(table, name)] == [1.0, 2.0]
    assert [run["tokens_per_s"] for run in sort_runs(table, "tok/s")] == [2.0, 1.0]


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
    assert "dtrain launch" in lines(out)[0]


def test_the_prediction_s_errors_have_columns_and_the_nearest_is_the_best() -> None:
    for name, speed in (("a", 100.0), ("b", 98.0), ("c", 150.0), ("d", 90.0)):
        predicted = {"tokens_per_s": 100.0, "memory_gib": 5.0} if name != "d" else None
        make(f"outputs/{name}", status="done", tokens_per_s=speed, peak_mem_gib=4.0, predicted=predicted)
    out = plain()
    print_runs(list_runs(), out, columns=["path", "step_error", "memory_error"], sort="step_error")
    assert [line.split() for line in lines(out)] == [
        ["run", "time", "error", "memory", "error"],
        ["outputs/a", "+0.0%", "+25.0%"],
        ["outputs/b", "-2.0%", "+25.0%"],
        ["outputs/c", "+50.0%", "+25.0%"],
        ["outputs/d", "-", "-"],
    ]


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


def test_a_comparison_shows_what_was_set() -> None:
    """Not what follows from it: another optimizer has other settings, and each run has a name and an origin."""
    config = "name: {name}\nfork: {fork}\nchoices: {{optim: {optim}, model: net}}\n"
    config += "optim: {{_target_: {optim}, {settings}}}\n"
    given = {"overrides": ["optim=sgd", "optim.nesterov=true"]}
    runs = [
        make("outputs/a", config=config.format(name="a", fork="null", optim="adamw", settings="lr: 0.1, eps: 1")),
        make(
            "outputs/b",
            config=config.format(name="b", fork="/x@3", optim="sgd", settings="lr: 0.2, momentum: 0, nesterov: true"),
            launch={"launches": [given]},
        ),
    ]
    assert compare(runs)["settings"] == {
        "optim": ["adamw", "sgd"],
        "optim.lr": [0.1, 0.2],
        "optim.nesterov": [None, True],
    }


def test_trials_that_a_search_stopped_early_are_paused(tmp_path: Path) -> None:
    def trial(name: str, steps: int, loss: float, **more: Any) -> Path:
        launch = {"launches": [{"overrides": ["data=x", f"optim.lr={name[0]}", "train.stop_after=10"]}]}
        return make(f"s/{name}", launch=launch, status="done", steps=steps, total_steps=40, val_loss=loss, **more)

    trials = [trial("0-lr", 40, 2.0), trial("1-lr", 10, 1.0), trial("2-lr", 20, 3.0, ended_by={"hook": "early_stop"})]
    out = plain()
    print_sweep(trials, out)
    assert "paused" not in "".join(lines(out)), "not of a search"
    (tmp_path / "s" / "search.jsonl").touch()
    trials.append(trial("1-at-10-from-0", 20, 2.5))
    out = plain()
    print_sweep(trials, out)
    rows = [line.split() for line in lines(out)]
    assert rows[0][:4] == ["#", "overrides", "status", "steps"]
    assert rows[1][2:] == ["done", "40/40", "2.0000", "←", "best"]
    assert rows[2][2:] == ["replaced", "10/40", "1.0000"]
    assert rows[3][-3:] == ["paused", "20/40", "2.5000"]
    assert rows[4][-3:] == ["done", "20/40", "3.0000"]
    assert lines(out)[-1] == "all jobs: data=x"
    assert "paused it" in diagnose(Record.read(trials[-1])).paragraph


@pytest.mark.parametrize(
    ("losses", "best"),
    [
        ([(1.0, 3.0), (2.0, 2.0), (3.0, float("nan"))], [1]),  # by validation, whatever the training loss
        ([(1.0, None), (0.5, None), (float("inf"), None)], [1]),
        ([(0.1, None), (2.0, 2.0)], [1]),
        ([(None, None), (float("nan"), None)], []),
        ([(1.0, 2.0000001), (1.0, 2.0), (1.0, 2.5)], [0, 1]),  # strategies of one computation
    ],
)
def test_sweep_marks_the_best(losses: list[tuple[Any, Any]], best: list[int]) -> None:
    out = plain()
    print_sweep(sweep(*losses), out)
    rows = lines(out)[1 : 1 + len(losses)]
    assert [line.split()[1] for line in rows] == [f"optim.lr={i}" for i in range(len(losses))]
    assert [i for i, line in enumerate(rows) if line.endswith("← best")] == best
    assert lines(out)[-1] == "all jobs: model=gpt2"


def test_sweep_orders_jobs_by_number_and_shows_all_overrides_of_one() -> None:
    jobs = sweep(*((1.0, 1.0 + i) for i in range(11)))
    out = plain()
    print_sweep(sorted(jobs), out)  # by name: 0, 1, 10, 2
    assert [line.split()[0] for line in lines(out)[1:-1]] == [str(i) for i in range(11)]
    out = plain()
    print_sweep(jobs[:1], out)
    assert lines(out)[1].split()[:3] == ["0", "model=gpt2", "optim.lr=0"]


def test_a_run_that_ended_early_is_never_best_and_points_that_wait_are_listed(tmp_path: Path, capsys: Any) -> None:
    points = {f"{i}-seed={i}": [f"++train.seed={i}", "train.steps=9"] for i in range(3)}
    (tmp_path / "sweep.json").write_text(json.dumps({"arguments": [], "points": points}))
    for name, status, loss in (("0-seed=0", "preempted", 0.5), ("1-seed=1", "done", 0.7)):
        (tmp_path / name).mkdir()
        launch = {"overrides": points[name], "launches": [{"overrides": points[name]}]}
        (tmp_path / name / "launch.json").write_text(json.dumps(launch))
        (tmp_path / name / "summary.json").write_text(json.dumps({"status": status, "val_loss": loss}))
    print_sweep(sorted(tmp_path.glob("*-*")))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("by val loss") and "++" not in "".join(lines)
    assert "best" not in lines[1] and lines[2].endswith("← best")
    assert lines[-1].split() == ["2", "train.seed=2", "not", "started"]
    print_sweep([tmp_path / "1-seed=1"])  # the others have not begun: what all have in common is known anyway
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["1", "train.seed=1"]
    (tmp_path / "0-seed=0" / "summary.json").write_text(json.dumps({"status": "failed"}))
    (tmp_path / "0-seed=0" / "failure.json").write_text(json.dumps({"rank": 1, "type": "ValueError", "message": "no"}))
    print_sweep(sorted(tmp_path.glob("*-*")))
    assert "0  failed: rank 1: ValueError: no\n   dtrain why 0-seed=0\n" in capsys.readouterr().out


def test_a_folder_of_several_sweeps_is_a_list_of_runs(capsys: pytest.CaptureFixture[str]) -> None:
    for sweep_name in ("s", "t"):
        make(f"multirun/{sweep_name}/0-optim.lr=1", status="done", val_loss=1.0)
    assert runs_main(["multirun"]) == 0
    said = capsys.readouterr().out
    assert "multirun/s/0-optim.lr=1" in said and "multirun/t/0-optim.lr=1" in said and "best" not in said


def test_a_point_that_was_resumed_with_another_setting_says_so() -> None:
    """Otherwise its result would be taken for that of the setting that failed."""
    launches = [
        {"overrides": ["data=x", "optim.lr=9", "run_dir=y"]},
        {"overrides": ["recipe=as-run", "resume=y", "data=x", "optim.lr=0.1", "resume_allow=[optim.lr]"]},
    ]
    again = make("s/1-optim.lr=9", launch={"launches": launches}, status="done", val_loss=1.0)
    other = make("s/0-optim.lr=1", launch={"launches": [{"overrides": ["data=x", "optim.lr=1"]}]}, status="done")
    out = plain()
    print_sweep([other, again], out)
    assert [line.split()[1] for line in lines(out)[1:3]] == ["optim.lr=1", "optim.lr=0.1"]
