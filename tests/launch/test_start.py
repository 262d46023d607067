"""A queue.py in the working folder is not Python's own, in any process that is started; a user's modules are found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dtrain import start
from dtrain.config import build, run_file
from dtrain.launch.local import Local
from tests.launch import shadows
from tests.world import ROOT, SMALL, summary

COMMON = [*SMALL, *shadows.OVERRIDES, "train.steps=2", "cluster.processes=1", "train.loader_workers=1"]


def clean(**more: str) -> dict[str, str]:
    """An environment without a PYTHONPATH: everything else must do."""
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "RANK")} | {"OMP_NUM_THREADS": "1"} | more


def run(*command: str, cwd: Path, **env: str) -> str:
    ended = subprocess.run(command, cwd=cwd, env=clean(**env), capture_output=True, text=True, timeout=150)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_a_launch_beside_such_files(tmp_path: Path) -> None:
    """launch.py of a checkout that is not installed, typed in it: preflight, torchrun, ranks, their loaders."""
    shadows.write(tmp_path)
    (tmp_path / "launch.py").write_text((ROOT / "launch.py").read_text())
    for name in ("dtrain", "conf"):
        (tmp_path / name).symlink_to(ROOT / name)
    run(sys.executable, "launch.py", *COMMON, "run_dir=run", "preflight=quick", cwd=tmp_path)
    assert summary(tmp_path / "run")["status"] == "done"
    (tmp_path / "types.py").unlink()  # which Python itself imports for -m
    assert "dtrain " in run(sys.executable, "-m", "dtrain", "version", cwd=tmp_path)


def test_what_dry_run_prints_works_when_it_is_pasted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shadows.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")  # as for a user: nothing of ours
    monkeypatch.setattr(sys, "path", [*sys.path[1:], str(tmp_path)])
    monkeypatch.setenv(build.TRUST, "mine")  # as if typed
    from tests.world import make_run

    folder = make_run(tmp_path / "run", *COMMON)
    Local().dry_run(folder, run_file.load(folder))
    run("bash", "-c", capsys.readouterr().out, cwd=tmp_path)
    assert summary(folder)["status"] == "done"


def test_a_world_of_verify(tmp_path: Path) -> None:
    shadows.write(tmp_path)
    script = (
        "import sys; sys.path.append(sys.argv[1])\n"
        "import mine\n"
        "from dtrain.commands.verify.world import World\n"
        "if __name__ == '__main__':\n"
        "    with World(1, mine.check, sys.argv[1]) as world:\n"
        "        sys.exit(world.join()[0])\n"
    )
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "script.py").write_text(script)
    run(sys.executable, "elsewhere/script.py", str(tmp_path), cwd=tmp_path, PYTHONPATH=str(ROOT))


def test_the_users_own_paths_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'a'}{os.pathsep}{ROOT}")
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.setenv(start.VARIABLE, str(tmp_path / "b"))
    wanted = {start.VARIABLE: f"{tmp_path / 'b'}{os.pathsep}{tmp_path}"}
    assert start.environment() == wanted, "the file does the rest itself"
    wanted |= {"PYTHONSAFEPATH": "1", start.SAFE_PATH: "1"}
    assert start.environment(argv=()) == wanted
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "a"))
    monkeypatch.setattr(start, "_installed", lambda checkout: False)
    own = start.environment(start.command("dtrain.train.rank", ["singularity", "run", "python"]))
    assert own == wanted | {"PYTHONPATH": f"{tmp_path / 'a'}{os.pathsep}{ROOT}"}, "a container must find it, too"
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    assert "PYTHONSAFEPATH" not in start.environment(argv=()), "the user's own is inherited"


def test_what_a_rank_itself_starts_finds_pythons_own_modules(tmp_path: Path) -> None:
    """Trackers of loaders and compilers are `python -c …` or `python -m …` in the working folder."""
    shadows.write(tmp_path)
    child = "import queue, random, subprocess, sys\n"
    child += "sys.exit(subprocess.run([sys.executable, '-c', 'import queue, random']).returncode)\n"
    (tmp_path / "child.py").write_text(child)
    run(sys.executable, start.START, "-m", "child", cwd=tmp_path, **{start.VARIABLE: str(tmp_path)})
