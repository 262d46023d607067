"""Which half of the package imports what, seen in fresh processes: import-linter reads the source, this asks Python."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.world import ROOT

LAUNCHER_HALF = ("config", "runs", "formats", "ui", "checks", "plan", "preflight", "launch", "commands")
IN_RANKS = ("dtrain.commands.verify.mutations", "dtrain.commands.verify.probe")  # what verify runs inside the ranks
SCRIPT = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps(sorted(sys.modules)))
"""


def imported_by(*modules: str) -> set[str]:
    """What is in sys.modules of a new Python that has imported these."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, *modules], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def modules_of(*folders: str) -> list[str]:
    files = [file for folder in folders for file in sorted((ROOT / "dtrain" / folder).rglob("*.py"))]
    return [".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files]


def test_a_rank_imports_torch_and_nothing_of_the_launcher() -> None:
    found = imported_by("dtrain.train.loop", "dtrain.train.rank")
    rooms = {name.split(".")[1] for name in found if name.startswith("dtrain.")}
    assert not rooms & {"launch", "plan", "preflight", "checks", "ui", "commands", "cli", "api"}
    assert "torch" in found, "else the next test could not fail"


def test_the_launcher_half_imports_no_torch() -> None:
    modules = [name for name in modules_of(*LAUNCHER_HALF) if not name.startswith(IN_RANKS)]
    assert len(modules) > 60, modules
    assert not {"torch", "numpy", "deepspeed", "submitit", "wandb"} & imported_by("dtrain.cli", *modules)
