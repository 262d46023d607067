"""Real servers of trackers: a run is sent while they are up, down, and up again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dtrain.cli import main
from dtrain.runs.protocol import free_port
from tests.loggers import read_back
from tests.loggers.test_follow import end, followed, make_run, steps, train
from tests.patience import until


@contextmanager
def mlflow_server(folder: Path, port: int) -> Iterator[None]:
    store = [f"--backend-store-uri=sqlite:///{folder}/server.db", f"--artifacts-destination={folder}/artifacts"]
    command = [sys.executable, "-m", "mlflow", "server", "--host=127.0.0.1", f"--port={port}", "--workers=1", *store]
    with open(folder / "server.log", "ab") as log:
        environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # ten more processes
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)

    def is_up() -> bool:
        try:
            return bool(urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).status == 200)
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
