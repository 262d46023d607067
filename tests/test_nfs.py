"""Runs on a network file system whose clients each remember for 30 s what was not there."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dtrain.commands.verify import world
from dtrain.commands.verify.world import World
from dtrain.runs.folder import checkpoints, file_clock, look_again, read_json
from tests.launch.test_supervisor import Ranks
from tests.nfs import SECONDS, mounted
from tests.world import make_run, start_server, summary


def outside(path: Path) -> None:
    """What another client does: in a process that knows nothing of this one's memory."""
    pid = os.fork()
    if pid == 0:
        os.execlp("sh", "sh", "-c", 'mkdir -p "${0%/*}" && echo "{}" > "$0"', str(path))
    assert os.waitpid(pid, 0)[1] == 0


def test_a_client_remembers_what_was_not_there(tmp_path: Path) -> None:
    now, folder = 0.0, tmp_path / "folder"
    with mounted(tmp_path, clock=lambda: now):
        assert not (folder / "file").exists() and not list(folder.glob("*"))
        outside(folder / "file")
        assert not folder.exists() and not (folder / "file").exists() and not list(folder.glob("*"))
        with pytest.raises(FileNotFoundError):
            (folder / "mine").write_text("the folder of this new file is one that the client does not see")
        now += SECONDS
        assert (folder / "file").exists()
        assert not (tmp_path / "other").exists()
        outside(tmp_path / "other")
        assert read_json(tmp_path / "other") == {} and not (tmp_path / "other").exists()
        look_again(tmp_path)
        assert (tmp_path / "other").exists(), "a change of its own makes a client ask again"
        assert abs(file_clock(tmp_path) - (tmp_path / "other").stat().st_mtime) < 60
    assert (folder / "file").exists() and not (folder / "mine").exists()


def train_on_nfs(run_dir: Path) -> int:
    with mounted(run_dir.parent):
        return world.train_rank(run_dir)


@pytest.mark.parametrize("words", [["strategy=fsdp"], ["strategy=ddp", "checkpoint.background=false"]])
def test_two_ranks_save_and_resume(words: list[str], tmp_path: Path) -> None:
    """Each rank is a client of its own. One that asks for a folder before rank 0 has made it cannot write into it."""
    start_server()
    for stop_after in (4, 8):  # the second resumes
        run_dir = make_run(tmp_path / "run", "checkpoint.every=2", *words, f"train.stop_after={stop_after}")
        assert World(2, train_on_nfs, run_dir).join() == [0, 0], [
            json.loads(p.read_text())["traceback"] for p in (run_dir / "logs").glob("failure-*.json")
        ]
        assert next(p.name for p in checkpoints(run_dir / "checkpoints")) == f"step-{stop_after:08d}"
        assert summary(run_dir)["start_step"] == stop_after - 4


def test_a_supervisor_on_another_node_sees_how_it_ended(tmp_path: Path) -> None:
    """It has looked for summary.json from the first moment on, in vain: rank 0 writes it later, elsewhere."""
    (tmp_path / "run" / "logs").mkdir(parents=True)
    ranks = Ranks("time.sleep(0.5)\nwrite('summary.json', '{\"status\": \"done\"}')", 0, start_s=60)
    with mounted(tmp_path):
        assert ranks.supervise(tmp_path / "run") == 0, ranks.failure
