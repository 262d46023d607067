"""What a run remembers of its code and its environment, in temporary repositories. Nothing is trained."""

import json
import os
import shutil
import stat
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from dtrain.cli import main
from dtrain.launch import environment as environments
from dtrain.launch import git_state
from dtrain.launch.environment import cpu_model, driver, environment, variables, versions
from dtrain.launch.local import Local
from dtrain.report.page import collect
from dtrain.runs import environment as remembered
from dtrain.runs.folder import read_json
from dtrain.runs.protocol import Deadline
from tests.test_bad_inputs import COMPOSE_ONCE

CANARY = "canary7d1f5b9e"
GIVEN = "q8Zr" + "2LmX0vTn4BwY6c"  # looks like a key
DATED = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}


def git(*words: str) -> str:
    alone = os.environ | DATED | {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
    return subprocess.run(["git", *words], env=alone, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "code"
    (folder / "sub").mkdir(parents=True)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(git_state, "LIMIT_S", 30.0)  # the machine may be busy
    git("init", "-q", "-b", "trunk")
    (folder / "net.py").write_text("width = 1\n")
    (folder / "weights.bin").write_bytes(bytes(range(256)))
    (folder / ".env").write_text("A=1\n")
    git("add", "-A")
    git("commit", "-q", "-m", "first")
    monkeypatch.setattr(git_state, "answers", {})
    monkeypatch.setattr(git_state, "FRESH_S", 0.0)
    return folder


def taken(run_dir: Path, launches: list[Any] | None = None) -> dict[str, Any]:
    run_dir.mkdir(exist_ok=True)
    return environment(run_dir, launches or [])


def test_a_clean_repository(repository: Path, tmp_path: Path) -> None:
    code = taken(tmp_path / "run")["environment"]["code"]
    assert code == {"commit": git("rev-parse", "HEAD"), "branch": "trunk", "dirty": False, "untracked": []}
    assert not list((tmp_path / "run").iterdir())
    git("checkout", "-q", "--detach")
    assert taken(tmp_path / "run")["environment"]["code"]["branch"] is None


def test_changes_can_be_applied_again(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (repository / "net.py").write_bytes("width = 2\nname = 'é'\n".encode("latin-1"))
    (repository / "weights.bin").write_bytes(bytes(range(255, -1, -1)))
    (repository / "new.py").touch()
    git("config", "diff.external", "false")  # nothing that the repository configures is run
    git("config", "diff.noprefix", "true")
    monkeypatch.chdir(repository / "sub")  # the whole repository counts
    code = taken(tmp_path / "run")["environment"]["code"]
    assert code["dirty"] and code["untracked"] == ["new.py"] and "diff_cut" not in code and "problem" not in code
    path = tmp_path / "run" / code["diff"]
    assert path.name == "code.diff" and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert b"Binary files a/weights.bin and b/weights.bin differ" in path.read_bytes()
    monkeypatch.chdir(repository)
    changed = (repository / "net.py").read_bytes()
    git("checkout", "-q", "net.py")
    git("apply", "--include=net.py", str(path))
    assert (repository / "net.py").read_bytes() == changed


def test_secrets_stay_out(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", CANARY)
    monkeypatch.setenv("TORCH_HUB_TOKEN", "anything")
    monkeypatch.setenv("NCCL_DEBUG_FILE", "x" * 490 + CANARY)  # the limit must not cut it before it is seen
    monkeypatch.setenv("DEPLOY_SECRET", "-----BEGIN\nlinetwo" + CANARY + "\nlinethree" + CANARY)
    (repository / f"{CANARY}.py").touch()
    (repository / ".env").write_text(f"A={GIVEN}\n")
    (repository / "net.py").write_text(
        f"width = 3\nx = '{CANARY}'\nAPI_KEY = '{GIVEN}1'\n"
        f"config = {{'password': \"{GIVEN}2\"}}\nexport WANDB_KEY={GIVEN}3\n"
        f"url = 'https://me:{GIVEN}4@host/'\nlogin('hf_{GIVEN}{GIVEN}')\nlinetwo{CANARY}\n"
        f"-----BEGIN RSA PRIVATE KEY-----\n{GIVEN}5\n-----END RSA PRIVATE KEY-----\n"
        "token = tokenizer.encode_2(text)\nsort_key = 'validation_loss'\nnum_tokens = 1234567890123456789\n"
    )
    run_dir = tmp_path / "run"
    found = taken(run_dir)
    text = (run_dir / "code.diff").read_text()
    for written in (text, json.dumps(found)):
        assert CANARY not in written and GIVEN not in written and "anything" not in written
    assert "+width = 3" in text and ".env" in text and "+config = {'password': \"<redacted>\"}" in text
    for kept in ("tokenizer.encode_2(text)", "'validation_loss'"):
        assert kept in text
    assert found["environment"]["variables"]["TORCH_HUB_TOKEN"] == "<redacted>"


def test_a_huge_diff_is_cut(repository: Path, tmp_path: Path) -> None:
    (repository / "net.py").write_text("".join(f"line = {i}\n" for i in range(100_000)))
    for i in range(git_state.MOST_NAMES + 5):
        (repository / f"new-{i}.py").touch()
    code = taken(tmp_path / "run")["environment"]["code"]
    text = (tmp_path / "run" / "code.diff").read_text()
    assert code["diff_cut"] and code["dirty"] and "problem" not in code
    assert git_state.MOST_DIFF / 2 < len(text) <= git_state.MOST_DIFF + 100 and text.endswith(
        "\nthe rest is left out\n"
    )
    assert len(code["untracked"]) == git_state.MOST_NAMES and code["untracked_cut"]


def test_a_launch_that_changed_nothing_adds_nothing(repository: Path, tmp_path: Path) -> None:
    (repository / "net.py").write_text("width = 2\n")
    launches = [taken(tmp_path / "run")]
    assert taken(tmp_path / "run", launches) == {}
    launches.append({})
    (repository / "new.py").touch()
    assert taken(tmp_path / "run", launches)["environment"]["code"]["diff"] == "code.diff"  # as it is
    (repository / "net.py").write_text("width = 4\n")
    assert taken(tmp_path / "run", launches)["environment"]["code"]["diff"] == "code-2.diff"
    assert "width = 2" in (tmp_path / "run" / "code.diff").read_text()


def test_points_that_are_submitted_together_ask_git_once(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(git_state, "FRESH_S", 1000.0)
    (repository / "net.py").write_text("width = 2\n")
    first = taken(tmp_path / "1")
    fake_git(tmp_path / "bin", monkeypatch, "exit 1")
    assert taken(tmp_path / "2") == first
    assert (tmp_path / "2" / "code.diff").read_bytes() == (tmp_path / "1" / "code.diff").read_bytes()


def test_a_link_in_the_run_folder_is_not_followed(repository: Path, tmp_path: Path) -> None:
    (repository / "net.py").write_text("width = 2\n")
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "code.diff").symlink_to(tmp_path / "mine")
    taken(tmp_path / "run")
    assert (tmp_path / "mine").read_text() == "mine" and "width = 2" in (tmp_path / "run" / "code.diff").read_text()
    (tmp_path / "run" / "code.diff").unlink()
    (tmp_path / "run" / "code.diff").mkdir()
    code = taken(tmp_path / "run")["environment"]["code"]
    assert "could not be written" in code["problem"] and "diff" not in code and code["dirty"]


def fake_git(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    folder.mkdir()
    (folder / "git").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def is_alive(pid: str) -> bool:
    """Killed orphans may stay as zombies in a container."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_git_that_hangs_is_ended_and_not_asked_again(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(git_state, "LIMIT_S", 0.5)
    fake_git(
        tmp_path / "bin", monkeypatch, f"echo $$ >> {tmp_path}/pids; sleep 1000 & echo $! >> {tmp_path}/pids; wait"
    )
    code = taken(tmp_path / "run")["environment"]["code"]
    assert code == {"problem": "git took longer than 0.5 s"}
    asked = (tmp_path / "pids").read_text() if (tmp_path / "pids").exists() else ""
    until = Deadline(10)
    while any(map(is_alive, asked.split())):
        assert until.left() > 0
        time.sleep(0.01)
    assert taken(tmp_path / "run")["environment"]["code"] == code
    assert ((tmp_path / "pids").read_text() if asked else "") == asked


def test_a_diff_that_hangs_leaves_the_commit(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit, real = git("rev-parse", "HEAD"), shutil.which("git")
    monkeypatch.setattr(git_state, "LIMIT_S", 3.0)
    fake_git(tmp_path / "bin", monkeypatch, f'case "$*" in *" diff "*) sleep 1000;; *) exec {real} "$@";; esac')
    code = taken(tmp_path / "run")["environment"]["code"]
    assert code["commit"] == commit and code["dirty"] is None and "git took longer" in code["problem"]


def test_no_git_and_no_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(git_state, "LIMIT_S", 30.0)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert taken(tmp_path / "run")["environment"]["code"] == {}
    monkeypatch.setattr(git_state, "FRESH_S", 0.0)
    git_state.answers.clear()
    git("init", "-q")  # without a commit
    assert taken(tmp_path / "run")["environment"]["code"] == {}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert taken(tmp_path / "run")["environment"]["code"] == {}


def test_versions_cpu_driver_and_variables(tmp_path: Path) -> None:
    for name in ("Torch-2.13.0.dist-info", "flash_attn-2.7.dist-info", "left_pad-1.dist-info", "numpy-9"):
        (tmp_path / "first" / name).mkdir(parents=True)
    (tmp_path / "second" / "torch-1.0.dist-info").mkdir(parents=True)
    found = versions([str(tmp_path / "first"), str(tmp_path / "missing"), str(tmp_path / "second")])
    assert found == {"torch": "2.13.0", "flash-attn": "2.7"}
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Good CPU @ 3 GHz\nflags: a\n" * 1000)
    assert cpu_model(tmp_path / "cpuinfo") == "Good CPU @ 3 GHz" and cpu_model(tmp_path / "none")
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23\n")
    assert driver(tmp_path / "version") == "570.86.15" and driver(tmp_path / "none") is None
    environ = {"NCCL_DEBUG": "INFO", "SLURM_JOB_ID": "7", "HOME": "/x", "DTRAIN_TRUST": "m", "TORCH_LOGS": "y" * 9999}
    assert variables(environ) == {"NCCL_DEBUG": "INFO", "SLURM_JOB_ID": "7", "TORCH_LOGS": "y" * environments.LONGEST}


def test_it_is_shown(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(*COMPOSE_ONCE)
    monkeypatch.setattr(Local, "launch", lambda self, run_dir: 0)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    (repository / "net.py").write_text("width = 2\n")
    run_dir = tmp_path / "run"
    assert main(["launch", f"run_dir={run_dir}"]) == 0
    launches = read_json(run_dir / "launch.json")
    assert "git_commit" not in launches and remembered.commit(launches) == git("rev-parse", "HEAD")
    capsys.readouterr()
    assert main(["runs", str(run_dir)]) == 0
    shown = capsys.readouterr().out
    assert f"{git('rev-parse', 'HEAD')} on trunk, with changes (code.diff)" in shown
    assert "NCCL_DEBUG=INFO" in shown and "torch 2." in shown and " cores" in shown
    (page,) = collect([run_dir])["runs"]
    rows = dict(page["environment"])
    assert rows["commit"].endswith("on trunk, with changes (code.diff)") and rows["torch"].startswith("2.")
    assert "NCCL_DEBUG=INFO" in rows["variables"] and rows["launched on"].endswith(" cores")
    assert main(["runs", "--json", str(run_dir)]) == 0
    assert json.loads(capsys.readouterr().out)["environment"]["code"]["branch"] == "trunk"


def test_a_hostile_folder_is_shown_in_bounds() -> None:
    big: Any = "x\n" * 10**3
    many = {f"{i}{big}": [big] for i in range(1000)}
    code = {"commit": big, "branch": {"a": big}, "dirty": big, "diff": big, "untracked": 7, "problem": [big]}
    machine = {"cpu": many, "cores": big, "usable_cores": [1], "num_gpus": big, "gpu": 1, "driver": {}}
    launches = {
        "launches": [3, {"environment": {"code": code, "machine": machine, "variables": many, "versions": many}}]
    }
    rows = remembered.rows(launches)
    assert [label for label, _ in rows] == ["commit", "launched on", "GPUs", "variables"]
    assert all(len(text) < 30_000 and "\n" not in text for _, text in rows)
    assert len(remembered.versions(launches)) == remembered.MOST
    for odd in ([], {}, None, "text", [None], [{"environment": []}], [{"environment": {"code": 1, "machine": 2}}]):
        assert remembered.rows({"launches": odd, "git_commit": "older"}) in ([], [("commit", "older")])
