"""Files with names of Python's own modules and of packages in a working folder, and a user's model beside them."""

from __future__ import annotations

from pathlib import Path

NAMES = ("queue", "random", "types", "token", "typing", "logging", "profile", "numpy", "torch", "yaml")
MODEL = """
import os, queue, random, sys
import numpy
from dtrain.models.gpt2 import GPT2

class Mine(GPT2):
    pass

def check(folder):
    files = {name: str(getattr(module, "__file__", None)) for name, module in sys.modules.items()}
    loaded = {name.partition(".")[0] for name, file in files.items() if file.startswith(folder)}
    assert loaded <= {"mine", "dtrain", "__main__", "__mp_main__"}, loaded
    return 0 if sys.path[-1] == folder else 5
"""
OVERRIDES = ("model._target_=mine.Mine", "trust=[mine]")


def write(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name in NAMES:
        (folder / f"{name}.py").write_text(f"raise SystemExit('{name}.py of the working folder was imported')\n")
    (folder / "mine.py").write_text(MODEL)
