"""Run folders: found by name, listed with the truth about their status, compared."""

import json
import os
import shlex
import time
from pathlib import Path
from typing import Any

import pytest

from dtrain.commands.runs import main
from dtrain.runs.find import At, find_checkpoint, find_run
from dtrain.ui.tables import COLUMNS, print_runs
from dtrain.util import regular_file
from tests import rundirs
from tests.rundirs import HERE, list_runs, make, plain, sweep

in_tmp_path, dead_pid = rundirs.in_tmp_path, rundirs.dead_pid


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


@pytest.mark.parametrize("word", ["lates", "lastest", "Latest"])
def test_latest_misspelt(word: str) -> None:
    make("outputs/2025-01-01/10-00-00-gpt2-tiny")
    with pytest.raises(ValueError, match=r"fix: did you mean latest, which is outputs/2025-01-01/10-00-00-gpt2-tiny\?"):
        find_run(word)


def test_find_ambiguous() -> None:
    for i in range(7):
        make(f"outputs/d/10-00-0{i}-gpt2-{i}", time=f"2025-01-0{i + 1}T00:00:00")
    with pytest.raises(ValueError) as error:
        find_run("gpt2")
    assert str(error.value).splitlines() == [
        "run 'gpt2': 7 runs have that in their name; it must match exactly one",
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
    with pytest.raises(ValueError, match=r"(?s)run 'latest'.*outputs/ and multirun/.*dtrain launch"):
        find_run("latest")


def test_find_a_sweep_folder() -> None:
    make("elsewhere/10-00-00/0-a=1")
    make("elsewhere/10-00-00/1-a=2")
    with pytest.raises(ValueError, match=r"(?s)holds 2 runs.*elsewhere/10-00-00/0-a=1"):
        find_run("elsewhere/10-00-00")


# ---------------------------------------------------------------- a checkpoint


def saved(run: Path, step: int, **metrics: Any) -> None:
    folder = run / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({"step": step, "metrics": metrics}))


def test_a_checkpoint_of_a_run() -> None:
    run = make("outputs/d/10-00-00-a@host", config="checkpoint: {keep_best: val_accuracy}")
    for step, accuracy in ((100, 0.5), (200, 0.7), (300, 0.7), (400, None), (500, float("nan")), (600, 0.2)):
        saved(run, step, val_accuracy=accuracy)
    assert find_checkpoint("latest") == find_checkpoint("a@host") == find_checkpoint(str(run)) == At(run)
    assert find_checkpoint("latest@100") == find_checkpoint(f"{run}@step-00000100") == At(run, 100)
    assert find_checkpoint("a@host@best") == At(run, 200), "the earlier one of two equals"
    assert str(At(run, 200)) == f"{run}@200" and str(At(run)) == str(run)
    for word, said in {
        "latest@249": "it has 100, 200, 300, 400, 500, 600\n  fix: latest@200",
        "latest@bets": "after the @ comes a step, or best\n  fix: latest@best",
        "latest@": "after the @ comes a step, or best\n  fix: latest@600",
        "nobody@best": "no such folder",
    }.items():
        with pytest.raises(ValueError) as error:
            find_checkpoint(word)
        assert said in str(error.value)


def test_a_fix_is_what_to_type() -> None:
    run = make("multirun/d/0-lr=0.1,a b", config="checkpoint: {every: 100}")
    saved(run, 100, val_loss=2.0)
    for word in (f"{run}@7", f"{run}@best"):
        with pytest.raises(ValueError) as error:
            find_checkpoint(word, setting="fork")
        [typed] = shlex.split(str(error.value).partition("fix: ")[2].partition(", of those")[0])
        assert typed == f'fork="{run}@100"'
        with pytest.raises(ValueError) as error:
            find_checkpoint(word)
        assert shlex.split(str(error.value).partition("fix: ")[2].partition(", of those")[0]) == [f"{run}@100"]
    with pytest.raises(ValueError, match=r"fix: resume=latest@100$"):
        find_checkpoint("latest@x", setting="resume")


def test_the_best_of_a_fork_with_other_data_is_its_own() -> None:
    """The parent measured the checkpoint that the fork began with on its own data."""
    origin: dict[str, Any] = {"run": "/r", "id": "parent", "step": 100}
    launch = {"id": "child", "forked_from": origin}
    run = make("outputs/d/a", config="checkpoint: {keep_best: val_loss}", launch=launch)
    for step, loss in ((100, 1.0), (200, 3.0), (300, 2.0)):
        saved(run, step, val_loss=loss)
    assert find_checkpoint("latest@best") == At(run, 100), "the same data"
    (run / "launch.json").write_text(json.dumps(launch | {"forked_from": origin | {"anew": ["data"]}}))
    assert find_checkpoint("latest@best") == At(run, 300)
    manifest = run / "checkpoints" / "step-00000100" / "manifest.json"
    manifest.write_text(json.dumps({"step": 100, "run": "child", "metrics": {"val_loss": 1.0}}))
    assert find_checkpoint("latest@best") == At(run, 100), "saved by the fork itself"


def test_best_of_a_run_that_kept_none_or_has_none_yet() -> None:
    run = make("outputs/d/a", config="checkpoint: {every: 100}")
    with pytest.raises(ValueError, match="has no checkpoint"):
        find_checkpoint("latest@best")
    saved(run, 100, val_loss=2.0)
    saved(run, 200, val_loss=3.0)
    with pytest.raises(ValueError, match=r"did not keep its best(?s:.*)fix: latest@100, of those kept"):
        find_checkpoint("latest@best")
    (run / "config.yaml").write_text("checkpoint: {keep_best: other, best_mode: max}")
    with pytest.raises(ValueError, match="no checkpoint has other yet"):
        find_checkpoint("latest@best")


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
        "job_id": None,
        "model": "gpt2",
        "strategy": "ddp",
        "precision": "bf16",
        "world_size": 2,
        "steps": 5,
        "total_steps": 9,
        "train_loss": 1.5,
        "val_loss": None,
        "val_accuracy": None,
        "tokens_per_s": None,
        "mfu": None,
        "peak_mem_gib": None,
        "wall_s": 3.0,
        "step_error": None,
        "memory_error": None,
        "tags": None,
        "forked_from": None,
        "started": "2025-01-01T00:00:00.000000+00:00",
    }
    assert list(first) == list(COLUMNS)
    assert len(list_runs("outputs", "outputs/d", tmp_path / "outputs")) == 1  # each run once
    assert list_runs("nowhere") == []


def test_how_far_the_prediction_was_off() -> None:
    """Twice the speed was measured: the time was predicted twice as long. 9 of 10 GiB are a tenth too little."""
    predicted = {"tokens_per_s": 500.0, "step_s": 2.0, "memory_gib": 9.0}
    make("outputs/a", status="done", tokens_per_s=1000.0, peak_mem_gib=10.0, predicted=predicted)
    make("outputs/b", status="done", tokens_per_s=1000.0, peak_mem_gib=0.0, predicted=predicted)
    make("outputs/c", status="done", tokens_per_s=1000.0, peak_mem_gib=10.0, predicted=None)
    make("outputs/d", status="failed", predicted=predicted)
    found = {run["path"][-1]: (run["step_error"], run["memory_error"]) for run in list_runs()}
    assert found == {"a": (1.0, pytest.approx(-0.1)), "b": (1.0, None), "c": (None, None), "d": (None, None)}


def test_list_walks_four_levels_and_not_into_runs() -> None:
    make("root/1/2/3/4", status="done")
    make("root/1/2/3/b/5", status="done")
    make("root/run", status="done")
    make("root/run/checkpoints", status="done")
    make("root/.hidden", status="done")
    os.symlink(Path("root/run").absolute(), "root/latest")
    assert sorted(run["path"] for run in list_runs("root")) == ["root/1/2/3/4", "root/run"]


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
    read, original = [], regular_file.regular

    def counted(path: Path, flags: int) -> int:
        read.append(path.name)
        return original(path, flags)

    monkeypatch.setattr(regular_file, "regular", counted)
    assert len(list_runs()) == 5
    assert set(read) == {"launch.json", "summary.json", "tags.json"} and len(read) <= 4 * 5


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
        ({"pid": "dead", "host": HERE, "launches": [{"cluster": {"_target_": "x.ray_cluster.Ray"}}]}, 0, "died"),
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
    make("outputs/d/a", launch={"pid": dead_pid, "host": HERE}, status="running", steps=3)
    assert main(["latest"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "status           died"
    assert shown[-2] == "next             dtrain why outputs/d/a"
    assert shown[-1] == "                 python launch.py resume=outputs/d/a"


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
        (["--sort", "los"], "--sort=los"),
        (["--limit", "0"], "--limit=0"),
        (["--root", "nowhere"], "--root=nowhere"),
    ],
)
def test_command_refuses(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    make("outputs/d/a", status="done")
    assert main(argv) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"error: {message}") and "\n  fix: " in shown.err and shown.out == ""


@pytest.mark.parametrize("skew", [-3600, 3600])
def test_a_reader_with_a_wrong_clock_does_not_doubt_a_run(skew: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """How long a run was quiet is told by the clock that dates its files."""
    make("outputs/fresh", launch={"host": "another-host"}, status="running", steps=3)
    old = make("outputs/quiet", launch={"host": "another-host"}, status="running", steps=3)
    for name in ("summary.json", "launch.json"):
        os.utime(old / name, (time.time() - 1800,) * 2)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + skew)
    assert {Path(run["path"]).name: run["status"] for run in list_runs()} == {"fresh": "running", "quiet": "running?"}


def test_the_folder_of_a_checkpoint_is_not_its_run() -> None:
    (make("outputs/d/a") / "checkpoints/step-00000030").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"is the folder of a checkpoint, not of a run\n  fix: resume=outputs/d/a@30$"):
        find_run("outputs/d/a/checkpoints/step-00000030", setting="resume")
