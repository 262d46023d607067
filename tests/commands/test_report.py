"""`dtrain report` and `dtrain plot`: which runs, which file, what errors say."""

from __future__ import annotations

import builtins
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report_page import make_run
from dtrain.cli import main
from dtrain.commands import plot


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("here")
    for i, name in enumerate(("first-lr=1", "second-lr=2")):
        make_run(folder / "multirun" / "sweep" / name, seed=i, steps=60)
    os.utime(folder / "multirun" / "sweep" / "first-lr=1" / "launch.json")
    return folder


@pytest.fixture(autouse=True)
def in_folder(outputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(outputs)


def test_the_page_lies_in_the_run_or_where_it_is_wanted(
    outputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", "first"]) == 0
    page = outputs / "multirun" / "sweep" / "first-lr=1" / "report.html"
    assert "<title>first-lr=1 · dtrain report</title>" in page.read_text()
    assert "report.html  1 run" in capsys.readouterr().out
    assert main(["report", "multirun/sweep"]) == 0
    assert "<title>sweep, 2 runs" in (outputs / "multirun" / "sweep" / "report.html").read_text()
    assert main(["report", "first", "second", "first", "-o", str(tmp_path / "a.html")]) == 0
    assert "2 runs" in (tmp_path / "a.html").read_text()


@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml")])
def test_pictures(tmp_path: Path, name: str, start: bytes) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    assert main(["report", "multirun/sweep", "-o", str(tmp_path / name)]) == 0
    assert (tmp_path / name).read_bytes().startswith(start)


def test_a_picture_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    assert main(["report", "first", "--format", "png", "-o", str(tmp_path / "a.png")]) == 2
    assert "pip install 'dtrain[notebook]'" in capsys.readouterr().err
    assert not (tmp_path / "a.png").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["report", "third"], "third"),
        (["report", "first", "-o", "no/such/a.html"], "mkdir -p"),
        (["report", "first", "-o", "multirun"], "is a folder"),
        (["report", "first", "-o", "a.svg", "--format", "png"], "leave out --format"),
        (["plot", "first", "los"], "did you mean loss? the metrics are loss, val_loss"),
        (["plot", "third"], "third"),
    ],
)
def test_bad_words(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert says in capsys.readouterr().err


def test_plot_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", "multirun/sweep", "loss", "tokens_per_s", "--width", "60", "--height", "10"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line in ("loss", "tokens_per_s")] == ["loss", "tokens_per_s"]
    assert len(lines) == 22 and max(map(len, lines)) <= 60
    assert "\x1b" not in "".join(lines) and any("⠀" < char <= "⣿" for char in lines[3])
    assert "first-lr=1" in lines[10] and "second-lr=2" in lines[10]


def test_words_of_plot(outputs: Path) -> None:
    runs, metrics = plot.split(["first", "second", "loss", "lr", "loss"])
    assert [run.name for run in runs] == ["first-lr=1", "second-lr=2"] and metrics == ["loss", "lr"]
    assert next(iter(plot.split(["latest"])[0])).parent == outputs / "multirun" / "sweep"


def test_a_run_without_steps_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "launch.json").write_text("{}")
    assert main(["plot", str(tmp_path)]) == 2
    assert "no metrics yet" in capsys.readouterr().err
    assert main(["report", str(tmp_path)]) == 0
