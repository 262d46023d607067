"""The scripts of docs/examples: each is short, and trains under ddp and fsdp on two ranks as its call of fit says."""

import ast
import importlib
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dtrain
from dtrain.launch.python_objects import spell
from tests.own_runs import own_run
from tests.patience import patience
from tests.world import ROOT, losses, summary

EXAMPLES = ROOT / "docs" / "examples"
TORCHVISION = Path(sys.prefix) / "torchvision"  # beside the packages: see the Makefile
SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("*.py") if "dtrain.fit(" in path.read_text())
NEEDS = {
    "timm_vit": ("torchvision", "timm"), "torchvision_resnet": ("torchvision",), "lightning_module": ("lightning",),
    "bert_classifier": ("transformers", "datasets"), "gpt2_tied": ("transformers",), "sklearn_array": ("sklearn",),
}  # fmt: skip
MODEL_FILES = ("lightning_module", "dict_batches", "iterable_workers")  # they also define the user's own class
MOST_LINES = 12


def skip_without(name: str) -> None:
    for package in NEEDS.get(name, ()):
        pytest.importorskip("tests.torchvision_ops" if package == "torchvision" else package)


def folder_of(name: str, tmp_path: Path) -> Path:
    """The scripts' folder; if it needs torchvision, one with a copy that first declares what a CPU wheel lacks."""
    skip_without(name)
    if "torchvision" not in NEEDS.get(name, ()):
        return EXAMPLES
    docstring, rest = (EXAMPLES / f"{name}.py").read_text().split("\n", 1)
    (tmp_path / f"{name}.py").write_text(f"{docstring}\nimport tests.torchvision_ops\n{rest}")
    return tmp_path


def given_to_fit(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The overrides that the script's call of dtrain.fit stands for, with the length left out."""
    found: dict[str, Any] = {}
    with monkeypatch.context() as patch:
        patch.setattr(dtrain, "fit", lambda **given: found.update(given))
        runpy.run_path(str(folder / f"{name}.py"), run_name="__main__")
    module = importlib.import_module(name)

    def imported(thing: Any) -> Any:
        if isinstance(thing, tuple):
            return imported(thing[0]), *thing[1:]
        return getattr(module, thing.__name__) if getattr(thing, "__module__", "") == "__main__" else thing

    assert found.pop("processes") == 2 and found.pop("strategy") == "fsdp"
    assert (found.pop("epochs", None) or found.pop("steps", None)) is not None
    return spell({key: imported(value) for key, value in found.items()})[0]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_short(name: str) -> None:
    """Without the user's own classes, blank lines and the docstring."""
    text = (EXAMPLES / f"{name}.py").read_text()
    nodes = ast.parse(text).body[1:]
    own = [node for node in nodes if not (name in MODEL_FILES and isinstance(node, ast.ClassDef))]
    lines = sum(len([x for x in ast.get_source_segment(text, node).splitlines() if x.strip()]) for node in own)  # type: ignore[union-attr]
    assert lines <= MOST_LINES, lines


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_trains(name: str, strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "torchvision" in NEEDS.get(name, ()) and TORCHVISION.is_dir():
        monkeypatch.syspath_prepend(str(TORCHVISION))
    folder = folder_of(name, tmp_path)
    monkeypatch.syspath_prepend(str(folder))
    words = given_to_fit(name, folder, monkeypatch)
    run = own_run(tmp_path / "run", 2, *words, f"strategy={strategy}", "train.steps=3")
    assert summary(run)["status"] == "done" and losses(run).keys() == {1, 2, 3}


def test_a_script_runs_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "iterable_workers.py").write_text((EXAMPLES / "iterable_workers.py").read_text())
    env = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "iterable_workers.py"], cwd=tmp_path, env=env, timeout=patience(120),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout
    (run,) = (tmp_path / "outputs").glob("*/*")
    assert summary(run)["status"] == "done" and summary(run)["steps"] == 8
