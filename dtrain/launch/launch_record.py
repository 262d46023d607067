"""Write launch.json: the id of a run, the command that started it, and every launch with its environment."""

from __future__ import annotations

import os
import shlex
import socket
import time
import uuid
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig

from dtrain.checks.validate import usable_sizes
from dtrain.launch import fork
from dtrain.launch.environment import environment
from dtrain.launch.resume_arguments import read_config
from dtrain.runs.folder import read_json, write_json


def record_launch(run_dir: Path, config: dict[str, Any], argv: list[str], began: float, prepared: bool) -> None:
    past = read_json(run_dir / "launch.json")
    before = past.get("launches", [])
    launch = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "began": began,
        "overrides": list(HydraConfig.get().overrides.task),
        "choices": config["choices"],
        "cluster": config["cluster"],
    } | ({"prepared": True} if prepared else {})
    if usable := usable_sizes(config):
        launch["usable_sizes"] = usable  # for `dtrain scale`, which may not find the user's modules
    launch |= environment(run_dir, before)
    record = {
        "id": past.get("id") or uuid.uuid4().hex,  # the run's id, also stored in its checkpoints
        "command": shlex.join(["dtrain", "launch", *argv]), "cwd": os.getcwd(),
        "host": socket.gethostname(), "pid": os.getpid(),
        "overrides": launch["overrides"], "launches": [*before, launch],
    }  # fmt: skip
    if "forked_from" in past:
        record["forked_from"] = past["forked_from"]
    elif config.get("fork"):
        at = fork.parse(config["fork"])
        record["forked_from"] = fork.lineage(at, fork.anew(read_config(at.run_dir), config))
    write_json(run_dir / "launch.json", record)
