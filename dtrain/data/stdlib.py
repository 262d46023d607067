"""The running Python's standard library as training data: real text on every machine, no download."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

from dtrain.data.documents import Files
from dtrain.data.text import Text

TASK = "next"  # the kind of targets (dtrain/checks/validate.py)

# Not part of the library (installed packages), or unlike the rest of it (tests, demos, the 2to3 fixtures).
SKIPPED = {
    *("site-packages", "dist-packages", "__pycache__"),
    *("test", "tests", "lib2to3", "idlelib", "turtledemo"),
    "pydoc_data",  # one 757 kB file of prose: it would be most of the validation split if held out
}


def check(**settings: object) -> dict[str, int]:
    """Refuse a Python without its sources; return the model's required settings: a vocabulary of bytes."""
    path = sysconfig.get_paths()["stdlib"]
    if not os.path.isfile(os.path.join(path, "os.py")):
        raise ValueError(
            f"data=stdlib needs the standard library's .py files, and this Python has none in {path!r}\n  fix: "
            "use data=text with a data.path"
        )
    return {"vocab_size": 256}


class Stdlib(Text):
    """The library's .py files as bytes; whole files are held out, so validation text is never trained on."""

    def __init__(self, seq_len: int, val_fraction: float = 0.05, packed: bool = False) -> None:
        check()
        path = sysconfig.get_paths()["stdlib"]
        super().__init__(path, seq_len, val_fraction=val_fraction, pattern="**/*.py", packed=packed)

    def source(self) -> Files:
        names = []
        # os.walk instead of glob: it can skip site-packages, where torch alone has 10,000 files.
        for folder, folders, files in os.walk(self.path):
            folders[:] = [name for name in folders if name not in SKIPPED]
            names += [Path(folder, name) for name in files if name.endswith(".py")]
        relative = sorted(name.relative_to(self.path).as_posix() for name in names)
        return Files(self.path, relative, self.val_fraction)
