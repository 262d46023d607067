"""Run folders that were written at 1884d17, before the package was split into folders, work with every command."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors import safe_open

from dtrain.checkpoint import store
from dtrain.cli import main
from tests.world import ROOT


@pytest.mark.parametrize("strategy", ["fsdp", "zero1"])
def test_every_command_reads_an_old_run(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """tests/checkpoint/test_manifest.py resumes them. Their config.yaml names targets that have moved since."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    run = Path(shutil.copytree(ROOT / "tests" / "old_runs" / strategy, "run"))
    assert "dtrain.launchers.local.Local" in (run / "config.yaml").read_text()
    (run / "launch.json").write_text(json.dumps({"overrides": [], "launches": [{"time": "2026-11-14T10:00:00"}]}))
    for command in (["status", "run"], ["runs", "run"], ["evaluate", "run"]):
        assert main(command) == 0, command
    assert main(["sample", "run", "12", "--tokens", "4"]) == 0
    assert main(["export", "run", "one.safetensors"]) == 0
    assert main(["export", "run", "hf", "--format", "hf"]) == 0
    capsys.readouterr()
    assert main(["launch", "resume=run", "dry_run=true"]) == 0
    assert "dtrain.train.rank" in capsys.readouterr().out
    with safe_open("one.safetensors", "pt") as weights:  # type: ignore[no-untyped-call]
        manifest = store.read_manifest(run / "checkpoints" / "step-00000002")
        saved = {name.removeprefix("model.") for name in manifest.tensors}
        assert set(weights.keys()) <= saved and len(list(weights.keys())) > 10
