"""The `dtrain` command: each word, its exit code, and what a shell does with it."""

import importlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from dtrain import __version__, cli
from dtrain.cli import COMMANDS, USAGE, main
from dtrain.commands import table
from dtrain.config.files import RECIPES
from dtrain.launch.local import Local
from dtrain.launch.recipes import built_in
from tests.test_bad_inputs import COMPOSE_ONCE
from tests.world import make_run


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*COMPOSE_ONCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)


@pytest.mark.parametrize("argv", [[], ["-h"], ["--help"], ["help"]])
def test_help(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    assert capsys.readouterr().out == USAGE + "\n"


def test_the_help_has_every_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """A word of the help is a command, and a command that does not exist is in no help."""
    listed = [line.split()[0] for line in USAGE.splitlines() if line.startswith("  ") and line[2] != " "]
    assert set(listed) == {*COMMANDS}
    for word in listed:
        called: list[list[str]] = []
        where = importlib.import_module(COMMANDS[word])
        monkeypatch.setattr(where, "main", lambda rest, called=called: called.append(rest) or 0)
        assert main([word, "a", "b=c"]) == 0
        assert called == [["a", "b=c"]], word


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_each_command_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In its own text, or from the table of commands, whose examples name commands that exist."""
    try:
        code = main([command, "--help"])
    except SystemExit as stop:
        code = int(stop.code or 0)
    text = capsys.readouterr().out
    assert code == 0
    examples = re.findall(r"^(?!usage:).*(?:dtrain|python launch.py) ?(.*)$", text, re.MULTILINE)
    assert any(re.match(rf"{command} \S|\S+=", example) for example in examples), text
    for example in table.COMMANDS[command].examples:
        assert example.split()[0] in COMMANDS
        assert f"  dtrain {example}\n" in text


@pytest.mark.parametrize("argv", [["version"], ["--version"]])
def test_version(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    assert capsys.readouterr().out == f"dtrain {__version__}\n"


@pytest.mark.parametrize(
    ("argv", "word", "fix"),
    [
        (["luanch"], "luanch", "did you mean dtrain launch?"),
        (["RECIPES"], "RECIPES", "did you mean dtrain recipes?"),
        (["optimz"], "optimz", "did you mean dtrain search?"),
        (["evalute"], "evalute", "did you mean dtrain evaluate latest?"),
        (["train"], "train", "dtrain launch"),
        (["stop", "latest"], "stop", "dtrain cancel latest"),
        (["qqq"], "qqq", "dtrain --help lists them"),
        ([""], "''", "dtrain --help lists them"),
        (["strategy=fsdp", "name=a b"], "strategy=fsdp", "dtrain launch strategy=fsdp 'name=a b'"),
    ],
)
def test_an_unknown_command(argv: list[str], word: str, fix: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert capsys.readouterr().err == f"error: {word}: there is no such command\n  fix: {fix}\n"


def test_launch_is_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Path] = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(Local, "launch", lambda self, run_dir: started.append(run_dir) or 75)
    assert main(["launch", "run_dir=here"]) == 75
    assert started == [tmp_path / "here"]


def test_the_environment_and_the_arguments_of_the_caller_survive(monkeypatch: pytest.MonkeyPatch) -> None:
    """`HYDRA_FULL_ERROR` is set on the way, and must not stay."""
    assert main(["launch", "strategy=fdsp"]) == 2
    assert "HYDRA_FULL_ERROR" not in os.environ
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(Exception, match="fdsp"):
        main(["launch", "strategy=fdsp"])
    assert os.environ["HYDRA_FULL_ERROR"] == "1"


# ---- recipes -------------------------------------------------------------------------------------------------


def test_recipes_are_listed_shown_and_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = list(built_in())
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == names
    assert all(len(line.split()) > 3 and "#" not in line for line in lines), "each says what it is for"

    assert main(["recipes", "show", "cpu-tiny"]) == 0
    assert capsys.readouterr().out == (RECIPES / "cpu-tiny.yaml").read_text()

    assert main(["recipes", "cp", "cpu-tiny"]) == 0
    (tmp_path / "folder").mkdir()
    assert main(["recipes", "cp", "cpu-tiny", "folder"]) == 0
    assert "recipe=./folder/cpu-tiny.yaml" in capsys.readouterr().out
    for path in (tmp_path / "cpu-tiny.yaml", tmp_path / "folder" / "cpu-tiny.yaml"):
        assert path.read_text() == (RECIPES / "cpu-tiny.yaml").read_text()


def test_the_command_that_a_copy_proposes_works(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "cp", "cpu-tiny", "mine.yaml"]) == 0
    recipe = capsys.readouterr().out.split()[-1]
    config = OmegaConf.load("mine.yaml")
    OmegaConf.update(config, "cluster.processes", 4)
    OmegaConf.save(config, "mine.yaml")
    assert main(["launch", recipe, "dry_run=true"]) == 0
    assert "--nproc-per-node=4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["recipes", "show", "nope"], "recipe=nope: there is no such recipe"),
        (["recipes", "show"], "recipe=: there is no such recipe"),
        (["recipes", "cp", "cpu-tiny", "taken.yaml"], "taken.yaml: already exists"),
        (["recipes", "cp", "cpu-tiny", "no/such/folder.yaml"], "no/such/folder.yaml: No such file or directory"),
        (["data", "prepare", "nothing", "out"], "does not exist"),
        (["data", "prepare", "taken.yaml", "out", "--val-fraction", "2"], "val_fraction=2.0"),
        (["data", "prepare", "taken.yaml", "out", "--tokenizer", "nothing"], "leave out --tokenizer for bytes"),
        (["data", "prepare", "taken.yaml", "/proc/out"], "/proc/"),
        (["export", "nothing"], "'nothing'"),
        (["sample", "nothing"], "'nothing'"),
        (["runs", "nothing"], "'nothing'"),
        (["recipes", "fly"], "action=fly"),
        (["data", "prepare"], "SOURCE OUT: are missing"),
        (["sample", "a", "--x"], "--x: there is no such option"),
    ],
)
def test_mistakes(argv: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "taken.yaml").write_text("mine, and long enough to be cut in two parts: training and validation")
    before = (tmp_path / "taken.yaml").read_bytes()
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and words in err and "\n  fix: " in err
    assert [p.name for p in tmp_path.iterdir()] == ["taken.yaml"]
    assert (tmp_path / "taken.yaml").read_bytes() == before


def test_data_prepare_says_what_it_made_and_what_comes_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("x" * 1000)
    assert main(["data", "prepare", "text.txt", "out"]) == 0
    out = capsys.readouterr().out
    assert "950 training and 50 validation tokens (uint16)" in out
    override = out.splitlines()[-1].split("launch.py ")[1].split()
    assert main(["launch", *override, "dry_run=true"]) == 0


def test_a_full_traceback_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(ValueError, match="there is no such recipe"):
        main(["recipes", "show", "nope"])


# ---- in a shell ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [["recipes", "show", "cpu-tiny"], ["launch", "dry_run=true", "run_dir=out", "strategy=zero2"], ["runs"]],
)
def test_a_reader_that_goes_away_is_no_error_and_starts_nothing(words: list[str], tmp_path: Path) -> None:
    """dtrain recipes show X | head -0"""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "dtrain", *words]
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])}
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, env=environment)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")
    assert not (tmp_path / "out").exists()


def test_ctrl_c_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(COMMANDS["evaluate"])
    monkeypatch.setattr(module, "main", lambda argv: signal.raise_signal(signal.SIGINT))
    assert main(["evaluate", "run"]) == 130
    assert capsys.readouterr().err.strip() == "error: interrupted"


@pytest.mark.parametrize("ranks", ["2", "1:2"])
def test_a_run_that_has_ended_is_not_scaled(ranks: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", f"cluster.processes={ranks}")
    (run / "launch.json").write_text('{"overrides": [], "launches": [{"time": "2026-01-01T00:00:00"}]}')
    (run / "summary.json").write_text('{"status": "done", "steps": 4}')
    assert main(["scale", str(run), "4"]) == 2
    said = capsys.readouterr().err
    assert "the run has ended (done)" in said and "cluster.processes=4 train.steps=…" in said
