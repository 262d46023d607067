"""The wheel, outside a checkout: configuration and recipes are inside, a copied recipe runs from any folder."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.world import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(folder),
        str(ROOT),
    ]
    subprocess.run(pip, check=True)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def dtrain(site: Path, cwd: Path, *words: str) -> str:
    """The command as installed: only the wheel on the path, nothing of the checkout."""
    script = (
        f"import sys; sys.path[:0] = [{str(site)!r}]; import dtrain.cli; "
        f"assert dtrain.__file__.startswith({str(site)!r}); sys.exit(dtrain.cli.main(sys.argv[1:]))"
    )
    env = os.environ | {"PYTHONPATH": str(site)}
    result = subprocess.run([sys.executable, "-c", script, *words], cwd=cwd, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_a_copied_recipe_runs_from_any_folder(site: Path, tmp_path: Path) -> None:
    assert "cpu-tiny" in dtrain(site, tmp_path, "recipes", "ls")
    dtrain(site, tmp_path, "recipes", "cp", "cpu-tiny", "my.yaml")
    (tmp_path / "elsewhere").mkdir()
    short = ["train.steps=2", "train.eval_batches=0", "cluster.processes=1", "train.global_batch_size=2"]
    output = dtrain(site, tmp_path / "elsewhere", "launch", "recipe=../my.yaml", "model.dim=32", *short)
    assert "done" in output
    (run,) = (tmp_path / "elsewhere").glob("outputs/*/*")
    assert (run / "checkpoints" / "latest").read_text() == "step-00000002\n"
    assert "1 run" in dtrain(site, tmp_path, "report", str(run)), "the files of the page are inside, too"
    assert "cpu-tiny" not in (run / "config.yaml").read_text(), "it is the copy that ran"
