"""`dtrain metrics serve`: what it refuses. tests/test_monitoring.py scrapes it with a real Prometheus."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from dtrain.cli import main
from tests.test_bad_inputs import COMPOSE_ONCE


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main([*argv]) == 2
    return capsys.readouterr().err


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("prometheus_client")
    assert "there is no such folder" in refused(capsys, "metrics", "serve", str(tmp_path / "none"))
    assert "must be 1 to 65535" in refused(capsys, "metrics", "serve", str(tmp_path), "--port=70000")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        error = refused(capsys, "metrics", "serve", str(tmp_path), f"--port={port}")
    assert f"--port={port}: 127.0.0.1:{port} cannot be bound (Address already in use)" in error


def test_without_the_library(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*COMPOSE_ONCE)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)  # as if it were not installed
    monkeypatch.chdir(tmp_path)
    for command in (["metrics", "serve", "."], ["launch", "cluster.metrics_port=9000", "run_dir=run"]):
        assert "pip install 'dtrain[prometheus]'" in refused(capsys, *command)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("setting", ["metrics_port=0", "metrics_port=70000", "system_metrics_every=-1"])
def test_settings_out_of_range(setting: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert f"cluster.{setting}: must be at" in refused(
        capsys, "launch", f"cluster.{setting}", f"run_dir={tmp_path}/run"
    )
