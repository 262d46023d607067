"""docker/Dockerfile and docs/examples/skypilot.yaml, as far as they can be checked without containers and clouds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.world import ROOT

DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()


def test_the_image_gets_what_the_package_needs() -> None:
    copied = re.findall(r"^COPY (.*) \S+$", DOCKERFILE, re.M)
    sources = {word for line in copied for word in line.split()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {*wheel["packages"], *wheel["force-include"], project["project"]["readme"], "pyproject.toml", "LICENSE"}
    assert needed <= sources and all((ROOT / name).exists() for name in sources)
    allowed = {
        line[1:] for line in (ROOT / "docker/Dockerfile.dockerignore").read_text().splitlines() if line[:1] == "!"
    }
    assert allowed == sources
    extras = re.search(r"^ARG EXTRAS=(.*)$", DOCKERFILE, re.M)
    assert extras and {*extras[1].split(",")} <= set(project["project"]["optional-dependencies"])


@pytest.mark.parametrize("is_there", [False, True])
def test_the_line_of_skypilot_launches_and_resumes(is_there: bool, tmp_path: Path) -> None:
    """The shell code of the example, with the variables that SkyPilot sets; dtrain only previews."""
    task = yaml.safe_load((ROOT / "docs/examples/skypilot.yaml").read_text())
    runs, program = tmp_path / "runs", tmp_path / "dtrain"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m dtrain "$@" --dry-run\n')
    program.chmod(0o755)
    place = {
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NUM_GPUS_PER_NODE": "8", "RUN": "first", "SETTINGS": "strategy=ddp model=gpt2-tiny",
    }  # fmt: skip
    env = os.environ | place | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    command = ["bash", "-c", task["run"].replace("/runs", str(runs))]
    if is_there:
        (runs / "first").mkdir(parents=True)
        (runs / "first" / "launch.json").write_text("{}")
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    if is_there:  # it is a resume, and refuses what is no run
        assert done.returncode == 2 and "resume=" in done.stderr and "config.yaml" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert "--nnodes=2 --node-rank=1 --master-addr=10.0.0.1" in done.stdout and "--nproc-per-node=8" in done.stdout
    assert done.stdout.rstrip().endswith(str(runs / "first"))
