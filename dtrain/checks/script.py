"""Rules for `script=FILE`: a program of the user's own that any cluster starts."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

from dtrain.checks import loggers
from dtrain.config import elastic
from dtrain.config.files import CONTROL
from dtrain.errors import bad

# what a world needs on this machine; a cluster's own Python or container may have it though this machine has not
NEEDS = {"horovod": "make horovod builds it", "tensorflow": "pip install 'dtrain[tensorflow]'"}


def check(config: dict[str, Any]) -> None:
    """Raise a ValueError for the first broken rule; keys and types have been checked."""
    section, cluster = config["script"], config["cluster"]
    path, fix = Path(section["path"]), "script=FILE, as seen from this folder"
    if not path.is_file():
        fix = f"script={path.name}.py" if path.with_name(f"{path.name}.py").is_file() else fix
        raise bad("script.path", path, "there is no such file", fix)
    if path.suffix != ".py" and not os.access(path, os.X_OK):
        rule = "is no Python file (*.py) and cannot be executed"
        raise bad("script.path", path, rule, f"chmod +x {path}, or rename it if it is Python")
    python = section["python"]
    if python is not None and shutil.which(python) is None:
        raise bad("script.python", python, "there is no such program", "script.python=/path/to/python")
    for text in section["args"]:
        if found := CONTROL.search(text):
            raise bad("script.args", repr(text), f"has a control character ({found[0]!r})", "leave it out")
    if changing := elastic.range_of(config):
        name, rule = f"cluster.{changing.setting}", "the number of ranks of a program is fixed: dtrain cannot change it"
        raise bad(name, cluster[changing.setting], rule, f"{name}={changing.high}")
    own_python = python or cluster.get("python") or cluster.get("container_image")
    needed = section["env"]
    if needed in NEEDS and not own_python and not config["dry_run"] and importlib.util.find_spec(needed) is None:
        raise bad("script.env", needed, f"{needed} is not installed", NEEDS[needed])
    loggers.check(config)
