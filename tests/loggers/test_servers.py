"""Real servers of trackers: a run is sent while they are up, down, and up again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from dtrain.cli import main
from dtrain.runs.protocol import free_port
from tests.loggers import read_back
from tests.loggers.test_follow import end, followed, make_run, steps, train
from tests.patience import until


def mlflow_server(folder: Path, port: int) -> AbstractContextManager[None]:
    store = [f"--backend-store-uri=sqlite:///{folder}/server.db", f"--artifacts-destination={folder}/artifacts"]
    command = [sys.executable, "-m", "mlflow", "server", "--host=127.0.0.1", f"--port={port}", "--workers=1", *store]
    environment = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # ten more processes
    return serving(folder, command, environment, f"http://127.0.0.1:{port}/health")


def trackio_server(folder: Path, port: int) -> AbstractContextManager[None]:
    code = f"import trackio; trackio.show(open_browser=False, host='127.0.0.1', server_port={port}, block_thread=True)"
    environment = {"TRACKIO_DIR": str(folder / "server"), "TRACKIO_WRITE_TOKEN": "of-the-test", "HF_HUB_OFFLINE": "1"}
    return serving(folder, [sys.executable, "-c", code], environment, f"http://127.0.0.1:{port}/")


@contextmanager
def serving(folder: Path, command: list[str], environment: dict[str, str], url: str) -> Iterator[None]:
    with open(folder / "server.log", "ab") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=os.environ | environment, start_new_session=True, cwd=folder
        )

    def is_up() -> bool:
        try:
            return bool(urllib.request.urlopen(url, timeout=5).status == 200)
        except OSError:
            return False

    try:
        until(is_up, "the server", 120, lambda: (folder / "server.log").read_text())
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_mlflow_server_that_goes_away_and_comes_back(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    run = make_run(tmp_path / "run", mlflow={"uri": url})
    train(run, 0, 12)
    with mlflow_server(tmp_path, port), followed(run) as process:
        until(lambda: "12" in stored_steps(run, url), "twelve steps", 120)
        process.send_signal(signal.SIGKILL)
    train(run, 10, 20)
    with followed(run) as process:  # nobody listens
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(300) == 1
    end(run)
    with mlflow_server(tmp_path, port):
        assert main(["log", str(run), "logger=mlflow", f"logger.mlflow.uri={url}"]) == 0
        found = read_back.of_mlflow(run, url)
        assert steps(found) == steps(read_back.truth(run)) and found["loss"] == read_back.truth(run)["loss"]
        _, stored = read_back.mlflow_run(run, url)
        assert stored.info.status == "FINISHED"


def stored_steps(run: Path, url: str) -> list[str]:
    try:
        return [str(step) for step, _ in read_back.of_mlflow(run, url).get("loss", [])]
    except (AssertionError, ValueError):  # nothing there yet
        return []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_trackio_server_that_goes_away_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_WRITE_TOKEN", "of-the-test")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    words = ["log", "run", "logger=trackio", f"logger.trackio.server_url={url}"]
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "run")
    train(run, 0, 12)
    with trackio_server(tmp_path, port):
        assert main(words) == 0
    train(run, 10, 20)
    end(run)
    assert main(words) == 3, "nobody listens"
    with trackio_server(tmp_path, port):
        assert main(words) == 0 and main(words) == 0
    found = read_back.of_trackio(run, tmp_path / "server")
    assert steps(found) == steps(read_back.truth(run)) and found["loss"] == read_back.truth(run)["loss"]
