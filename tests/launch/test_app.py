"""`dtrain launch` up to the launcher: what was probably meant, the run folder, sweeps. Nothing is trained."""

import json
import shlex
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import DictConfig

from dtrain.cli import main
from dtrain.config.files import options_of
from dtrain.config.hydra_errors import probably_meant
from dtrain.launch import app as launch
from dtrain.launch.app import slug
from dtrain.launch.local import Local
from dtrain.launch.resolve import resolve
from tests.launch.dry_launches import read, run, started

__all__ = ["started"]


def test_a_warning_is_printed_before_the_start_and_stops_nothing(
    started: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train.steps=5", "schedule.warmup_steps=50", "run_dir=run"]
    run(*words, "dry_run=true")
    shown = capsys.readouterr()
    assert shown.err.startswith("warning: schedule.warmup_steps=50 is longer") and "warning:" not in shown.out
    run(*words)
    shown = capsys.readouterr()
    assert shown.err.count("warning:") == 1 and len(started) == 1


# ---- the run folder ------------------------------------------------------------------------------------------


def test_a_run_folder(started: list[Path], tmp_path: Path) -> None:
    run("strategy=fsdp", "train.steps=7", "name=mine")
    [run_dir] = started
    assert run_dir.relative_to(tmp_path / "outputs").parts[1].endswith("-mine")
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    config = read(run_dir)
    assert config["train"]["steps"] == 7
    assert config["run_dir"] == str(run_dir)
    assert config["choices"] | {"strategy": "fsdp", "model": "gpt2-tiny", "recipe": None} == config["choices"]
    record = json.loads((run_dir / "launch.json").read_text())
    assert shlex.split(record["command"]) == ["dtrain", "launch", "strategy=fsdp", "train.steps=7", "name=mine"]
    assert record["cwd"] == str(tmp_path)
    assert [launch["overrides"] for launch in record["launches"]] == [["strategy=fsdp", "train.steps=7", "name=mine"]]
    assert {p.name for p in run_dir.iterdir()} == {".hydra", ".lock", "config.yaml", "launch.json", "plan.json"}


def test_data_paths_are_absolute_so_that_a_resume_finds_them_from_anywhere(started: list[Path], tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("words and words\n" * 40)
    run("data=text", "data.path=text.txt")
    assert read(started[0])["data"]["path"] == str(tmp_path / "text.txt")


@pytest.mark.parametrize("code", [3, 75])
def test_the_exit_code_is_the_launchers(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Local, "launch", lambda self, run_dir: code)
    assert main(["launch"]) == code


ELASTIC = {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
STEP = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2"}


@pytest.mark.parametrize(
    ("environ", "typed", "starter", "fix"),
    [
        (ELASTIC, [], "torchrun", "cluster.processes=4 train.steps=1"),
        (ELASTIC, ["cluster.processes=2"], "torchrun", "cluster.processes=2 train.steps=1"),
        (ELASTIC | {"LOCAL_WORLD_SIZE": "2"}, [], "torchrun", "cluster=slurm cluster.nodes=2 train.steps=1"),
        (ELASTIC | {"ACCELERATE_MIXED_PRECISION": "no"}, [], "accelerate launch", "cluster.processes=4 train.steps=1"),
        ({"RANK": "0", "WORLD_SIZE": "2", "CROSS_SIZE": "1"}, [], "deepspeed", "cluster.processes=2 train.steps=1"),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, [], "mpirun", "cluster.processes=2 train.steps=1"),
        (STEP, [], "srun", "cluster=slurm cluster.nodes=2 train.steps=1; if each task"),
    ],
)
def test_a_launcher_that_was_started_several_times(
    environ: dict[str, str], typed: list[str], starter: str, fix: str,
    started: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert main(["launch", *typed, "train.steps=1"]) == 2 and not started
    said = capsys.readouterr().err
    assert f"{starter}: is not needed" in said and f"fix: dtrain launch {fix}" in said


@pytest.mark.parametrize(
    ("environ", "typed"),
    [
        (ELASTIC | {"WORLD_SIZE": "1"}, []),
        ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "a"}, []),  # of the user's own shell
        (STEP | {"SLURM_STEP_NUM_TASKS": "1"}, []),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "3"}, []),  # of an allocation
        (STEP | {"SLURM_PTY_PORT": "4321", "PMI_RANK": "0", "PMI_SIZE": "4"}, []),  # srun --pty bash
        (STEP, ["cluster.node_rank=0"]),  # one launcher on each node
        (ELASTIC | {"DTRAIN_RUN_DIR": "run"}, []),  # a program that dtrain runs
    ],
)
def test_a_launcher_that_was_started_once(
    environ: dict[str, str], typed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    launch.check_alone(typed)


def test_a_cluster_of_ones_own(started: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_cluster_xyz.py").write_text(
        "from dtrain.launch.local import Local\n"
        "class Mine(Local):\n"
        "    def __init__(self, nodes: int, processes: int, max_restarts: int, grace_s: int,\n"
        "                 hang_timeout: float | None, on_hang: str, system_metrics_every: float,\n"
        "                 metrics_port: int | None, metrics_host: str):\n"
        "        super().__init__(1, processes)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    run("cluster._target_=my_cluster_xyz.Mine", "trust=[my_cluster_xyz]", "cluster.nodes=3", "cluster.processes=2",
        "train.global_batch_size=6")  # fmt: skip
    assert read(started[0])["cluster"]["nodes"] == 3


def test_an_empty_folder_may_be_the_run_folder(started: list[Path], tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    run("run_dir=here")
    assert started == [tmp_path / "here"]


# ---- what was typed ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("fsdp", "strategy=fsdp"), ("strategy", "strategy=…"), ("strategy:fsdp", "strategy=fsdp"),
        ("model/gpt2-tiny", "model=gpt2-tiny"),
        ("train.steps = 5", "train.steps=5"), ("train.steps==", "train.steps=300"),
        ("strategy fsdp", "strategy=fsdp"), ("run_dir=a=b", "'run_dir=\"a=b\"'"), ("", "key=value"), ("?", "key=value"),
        ("cluster.srun=[--a=b, -c]", """'cluster.srun=["--a=b","-c"]'"""),
    ],
)  # fmt: skip
def test_what_was_probably_meant(typed: str, meant: str) -> None:
    assert probably_meant(typed) == meant


def test_what_was_probably_meant_by_words_with_spaces() -> None:
    assert probably_meant("strategy", ["strategy", "fsdp"]) == "strategy=fsdp"
    assert probably_meant("strategy", ["strategy"]).startswith("strategy=ddp; strategy can be 3d, ")
    assert probably_meant("train.steps", ["train.steps", "=", "100"]) == "train.steps=100"
    assert probably_meant("train.steps", ["train.steps", "=100"]) == "train.steps=100"
    assert probably_meant("train.steps", ["train.steps", "=", "few"]) == "train.steps=300"
    assert probably_meant("my/train.py") == "script=my/train.py"


@given(st.text(max_size=300))
def test_a_slug_is_one_folder_name(text: str) -> None:
    name = slug(text)
    assert len(name) <= 120
    assert not set(name) & set("/\\ \0\n'\"$*?<>|:;&")
    assert slug(name) == name


def test_a_folder_name_of_a_sweep_has_no_plus_before_a_name() -> None:
    assert slug("1-++model.layers=1,+model.width=32") == "1-model.layers=1,model.width=32"
    assert slug("0-optim.lr=1e+05") == "0-optim.lr=1e+05" and slug("0-") == "0"


# ---- sweeps --------------------------------------------------------------------------------------------------


def test_a_sweep(started: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("-m", "strategy=ddp,fsdp", "train.seed=2", "hydra.sweep.dir=sweep")
    assert [p.parent for p in started] == [tmp_path / "sweep"] * 2
    assert [(read(p)["choices"]["strategy"], read(p)["train"]["seed"]) for p in started] == [("ddp", 2), ("fsdp", 2)]
    assert [read(p)["run_dir"] for p in started] == [str(p) for p in started]
    table = capsys.readouterr().out
    assert "strategy=fsdp" in table and "train.seed=2" in table


def test_a_sweep_over_all_options_of_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    run("-m", "schedule=glob(*)", "dry_run=true")
    commands = [c for c in capsys.readouterr().out.splitlines() if "dtrain.train.rank" in c]
    assert len(commands) == len(options_of("schedule")) > 1


def test_a_dry_sweep_shows_each_command_and_starts_none(
    started: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("-m", "train.seed=1,2", "dry_run=true", "hydra.sweep.dir=sweep")
    commands = [shlex.split(c) for c in capsys.readouterr().out.splitlines() if "dtrain.train.rank" in c]
    assert [Path(c[-1]).parent for c in commands] == [tmp_path / "sweep"] * 2
    assert [Path(c[-1]).name.partition("-")[0] for c in commands] == ["0", "1"]
    assert started == [] and not list(tmp_path.iterdir())


def test_the_folder_that_was_checked_is_the_one_that_is_used(
    started: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`${now:}` is read once: a second later it would be a folder that nobody has looked at."""
    checked: list[str] = []

    def spy(cfg: DictConfig) -> dict[str, Any]:
        config = resolve(cfg)
        checked.append(config["run_dir"])
        return config

    monkeypatch.setattr(launch, "resolve", spy)
    run("run_dir=outputs/${now:%f}")
    run("-m", "train.seed=1,2", "hydra.sweep.dir=multirun/${now:%f}")
    assert sorted(set(checked)) == sorted(map(str, started))
    assert len(started) == 3


def test_points_of_a_sweep_that_record_nothing_share_its_words(started: list[Path]) -> None:
    run("-m", "profile=none,torch", "profile.start=3", "profile.num_steps=1", "train.steps=9", "hydra.sweep.dir=sweep")
    assert len(started) == 2
