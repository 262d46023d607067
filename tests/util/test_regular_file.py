"""Only regular files are opened: a FIFO in a run folder does not block the commands that look at runs."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from dtrain.cli import main
from dtrain.report.prometheus import Collector
from dtrain.runs.folder import last_lines, locked
from dtrain.util.regular_file import NotRegular, open_regular, read_bytes, regular
from tests import rundirs
from tests.rundirs import make

pytestmark = pytest.mark.timeout(30)
in_tmp_path, fakes = rundirs.in_tmp_path, rundirs.fakes

FILES = (
    "summary.json", "metrics.jsonl", "config.yaml", "plan.json", "attempts.jsonl", "preflight.json", "failure.json",
    "cancelled", "stop", "elastic.json", "logs/rank-0.log", "logs/position-0.json", "logs/hang.json",
    "logs/system-n1.jsonl", "logs/batch.log", "logs/torchrun.log", "logs/failure-0.json", "checkpoints/latest",
    "checkpoints/step-00000002/manifest.json", "profiles/rank-0.json", "profiles/memory-rank-0.json",
)  # fmt: skip
COMMANDS = (
    "status", "status --json", "why", "runs", "runs --json", "watch --once", "report", "report --format=svg", "plot",
    "logs", "profile", "cancel",
)  # fmt: skip


def fifo(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def run_with_fifos(*names: str) -> Path:
    """A run that failed, with a FIFO in place of these files."""
    run = make("outputs/d/t-run", config="model: {}\n", status="failed", steps=2)
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 2.4}\n')
    (run / "failure.json").write_text('{"rank": 0, "type": "ValueError", "message": "no", "log": "logs/rank-0.log"}')
    for name in names:
        fifo(run / name)
    return run


@pytest.mark.parametrize("names", [*((name,) for name in FILES), FILES], ids=[*FILES, "all"])
def test_a_fifo_in_a_run_folder_blocks_no_command(names: tuple[str, ...]) -> None:
    run = run_with_fifos(*names)
    for command in COMMANDS:
        name, *options = command.split()
        assert main([name, str(run), *options]) in (0, 2), command


def test_a_fifo_blocks_no_list_and_no_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    run_with_fifos(*FILES)
    fifo(make("outputs/d/t-other", status="done") / "launch.json")  # then it is no run
    assert main(["runs"]) == main(["watch", "--once"]) == main(["report", "outputs", "-o", "r.html"]) == 0
    assert "1 run" in capsys.readouterr().out
    collector = Collector(Path("outputs"), ask_slurm=False)
    collector.scan()
    list(collector.samples())


def test_what_is_no_regular_file(tmp_path: Path) -> None:
    fifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")  # relative: the name of a socket is short
    for path, kind in (("fifo", "a FIFO"), ("socket", "a socket"), ("/dev/zero", "a device"), (".", "a folder")):
        for mode in "r", "a":
            with pytest.raises(NotRegular, match=f"{kind}, not a regular file"), open(path, mode, opener=regular):
                pass
        assert last_lines(Path(path)) == []
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to("file")
    assert read_bytes(tmp_path / "link") == b"x"
    with pytest.raises(NotRegular, match="a symbolic link"):
        open_regular(tmp_path / "link", follow_symlinks=False)
    with open(tmp_path / "new", "a", opener=regular) as file:
        assert not os.get_inheritable(file.fileno())


def test_a_fifo_as_lock(tmp_path: Path) -> None:
    fifo(tmp_path / ".lock")
    with pytest.raises(NotRegular), locked(tmp_path):
        pass
