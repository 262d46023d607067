"""`dtrain log`: a run is sent later, once."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from dtrain.cli import main
from dtrain.loggers.follow import locked
from tests.loggers import read_back
from tests.loggers.test_follow import end, make_run, train


def test_a_run_is_sent_later_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    run, uri = make_run(tmp_path / "run", csv={}), f"sqlite:///{tmp_path}/mlflow.db"
    train(run, 0, 7)
    words = ["log", "run", "logger=[csv,mlflow]", f"logger.mlflow.uri={uri}"]
    assert main(words) == 0, "while it runs"
    assert "run → mlflow: complete, 8 rows were new" in capsys.readouterr().out
    train(run, 5, 700)
    end(run)
    assert main(words) == 0
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "run → mlflow: complete, 832 rows were new" in out and "run → mlflow: complete, 0 rows were new" in out
    truth = read_back.truth(run)
    assert read_back.of_mlflow(run, uri) == truth and read_back.of_csv(run) == truth
    _, stored = read_back.mlflow_run(run, uri)
    assert stored.info.status == "FINISHED"
    assert stored.data.params["train.steps"] == "9" and stored.data.tags["choices.model"] == "gpt2-tiny"


def test_a_database_whose_creation_was_cut_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("mlflow")
    run, path = make_run(tmp_path / "run"), tmp_path / "mlflow.db"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE latest_metrics (x)")  # by a migration that did not end
    database.close()
    assert main(["log", str(run), "logger=mlflow", f"logger.mlflow.uri=sqlite:///{path}"]) == 2
    err = capsys.readouterr().err
    assert f"logger.mlflow.uri=sqlite:///{path}: this database is not complete" in err and "fix: mlflow db up" in err


def test_the_runs_own_trackers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", csv={})
    train(run, 0, 3)
    end(run)
    assert main(["log", str(run)]) == 0
    assert read_back.of_csv(run) == read_back.truth(run)
    with locked(run, "csv"):
        assert main(["log", str(run)]) == 2
    assert "another process is sending this run to csv" in capsys.readouterr().err


OWN = """
class Mine:
    mirrors, takes_system, is_remote = False, False, False

    def open(self, run):
        return {}

    def log(self, rows):
        with open("steps.txt", "a") as file:
            file.writelines(f"{row.step} " for row in rows)

    def finish(self, run):
        pass
"""


def test_a_tracker_of_the_user_needs_trust(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_tracker_of_test_log.py").write_text(OWN)
    run = make_run(tmp_path / "run")
    target = {"Mine": {"_target_": "own_tracker_of_test_log.Mine"}}
    config = json.loads((run / "config.yaml").read_text()) | {"logger": target}
    (run / "config.yaml").write_text(json.dumps(config))
    train(run, 0, 3)
    assert main(["log", "run"]) == 2, "the run folder alone must not choose code"
    assert "logger.Mine._target_=own_tracker_of_test_log.Mine" in capsys.readouterr().err
    assert main(["log", "run", "trust=[another]"]) == 2 and not (tmp_path / "steps.txt").exists()
    assert main(["log", "run", "trust=[own_tracker_of_test_log]"]) == 0
    assert main(["log", "run", "logger=own_tracker_of_test_log.Mine"]) == 0, "typing its name is trust"
    assert (tmp_path / "steps.txt").read_text() == "1 2 3 1 2 3 "


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({}, "there is no tracker to send to"),
        (
            {"mlflow": {"_target_": "dtrain.loggers.mlflow.Mlflow", "uri": "http://evil"}},
            "the run folder names this server",
        ),
        ({"own": {"_target_": "subprocess.Popen", "args": ["touch", "pwned"]}}, "logger.own._target_=subprocess.Popen"),
        ({"csv": {"_target_": "dtrain.loggers.csv.Csv", "path": "/etc/passwd"}}, "logger.csv.path"),
        ({"_target_": "dtrain.loggers.csv.Csv"}, "_target_"),
        (3, "there is no tracker to send to"),
    ],
)
def test_a_run_folder_from_someone_else(
    section: object, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "run")
    config = json.loads((run / "config.yaml").read_text()) | {"logger": section}
    (run / "config.yaml").write_text(json.dumps(config))
    assert main(["log", "run"]) == 2
    err = capsys.readouterr().err
    assert message in err and "fix:" in err and not (tmp_path / "pwned").exists()


def test_a_dead_server_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_WRITE_TOKEN", "x")
    run = make_run(tmp_path / "run")
    train(run, 0, 3)
    assert main(["log", str(run), "logger=trackio", "logger.trackio.server_url=http://127.0.0.1:9"]) == 3
    (line,) = capsys.readouterr().out.splitlines()
    assert "→ trackio: not complete: ConnectionError" in line
