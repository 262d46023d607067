"""A real run that is killed and resumed three times: each tracker has each step once, as metrics.jsonl has it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dtrain.loggers.tracker import RunFacts
from tests.loggers import read_back
from tests.patience import until
from tests.world import ROOT, SMALL

# computed bit by bit the same after a resume; the other metrics are times
EXACT = ("loss", "lr", "grad_norm", "tokens", "val_loss", "val_perplexity")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_step_arrives_once_in_each_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("tensorboard", "wandb", "trackio", "mlflow"):
        pytest.importorskip(library)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    run, uri = tmp_path / "run", f"sqlite:///{tmp_path}/mlflow.db"
    from mlflow.tracking import MlflowClient

    MlflowClient(uri).search_experiments()  # makes the database: MLflow cannot repair one whose making was cut off
    loggers = ["logger=[csv,tensorboard,wandb,trackio,mlflow]", "logger.wandb.mode=offline", f"logger.mlflow.uri={uri}"]
    steps = ["train.steps=40", "checkpoint.every=4", "train.eval_every=5", "train.eval_batches=1"]
    first = [*SMALL, f"run_dir={run}", "cluster.processes=1", *steps, *loggers]

    def newest() -> int:
        found = read_back.truth(run).get("loss", []) if (run / "metrics.jsonl").exists() else []
        return found[-1][0] if found else 0

    for kill_at in (6, 17, 31, None):
        overrides = first if kill_at == 6 else [f"resume={run}", f"logger.mlflow.uri={uri}"]
        command = [sys.executable, str(ROOT / "launch.py"), *overrides]
        with open(tmp_path / "out.log", "ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})
        if kill_at is None:
            assert process.wait() == 0, (tmp_path / "out.log").read_text()
            break
        until(lambda at=kill_at, process=process: newest() >= at or process.poll() is not None, "a step", 120)
        # the ranks end with their supervisor; once, the follower is killed too
        if kill_at == 17:
            kill_follower(run)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert newest() >= kill_at

    truth = read_back.truth(run)
    assert [step for step, _ in truth["loss"]] == list(range(1, 41))
    found = {
        "csv": read_back.of_csv(run),
        "tensorboard": read_back.of_tensorboard(run),
        "wandb": read_back.of_wandb(run),
        "trackio": read_back.of_trackio(run, tmp_path / "trackio"),
        "mlflow": read_back.of_mlflow(run, uri),
    }
    for tracker, points in found.items():
        for name in truth:
            if name.startswith("save_"):
                continue
            assert [step for step, _ in points[name]] == [step for step, _ in truth[name]], (tracker, name)
        for name in EXACT:
            shown = [value for _, value in points[name]]
            assert shown == pytest.approx([value for _, value in truth[name]], rel=1e-6, abs=0), (tracker, name)
            assert tracker == "tensorboard" or shown == [value for _, value in truth[name]]
    assert {name: found["csv"][name] for name in truth if not name.startswith("save_")} == {
        name: points for name, points in truth.items() if not name.startswith("save_")
    }, "a file is written again, so that it has the times of the last attempt too"
    _, stored = read_back.mlflow_run(run, uri)
    assert stored.info.status == "FINISHED" and stored.data.tags["summary.steps"] == "40"
    assert RunFacts.read(run).status == "done"


def kill_follower(run: Path) -> None:
    """SIGKILL, as the kernel does when memory is short."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"dtrain.loggers.follow" in words and os.fsencode(run) in words:
            os.kill(int(process.name), signal.SIGKILL)
            return
    raise AssertionError("there is no follower")
