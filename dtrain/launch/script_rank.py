"""The entry point that torchrun or srun starts for each rank of `script=FILE`: it runs the user's program.

It gives the program its environment and its log, passes on stop requests, and reports how the program ended: with the
program's own last words, for the supervisor and for `dtrain why`. No torch here: the program may not use it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from dtrain import start
from dtrain.config import run_file
from dtrain.config.redaction import hide
from dtrain.launch import process_tree, script_world
from dtrain.launch.attempt_files import signature
from dtrain.runs import system
from dtrain.runs.causes import FRAME, is_users_file
from dtrain.runs.folder import last_lines, newest_metrics, read_json, wall_s, write_json
from dtrain.runs.protocol import (
    BAD_CONFIG,
    DONE,
    FAILED,
    LOST_PEER,
    PREEMPTED,
    SCRIPT_ASKS,
    SCRIPT_RUN,
    SCRIPT_STOPPED,
    SCRIPT_TYPED,
    STARTER,
    STOP_FILE,
    STOP_SIGNALS,
    die_with_parent,
    name_slurm_rank,
)
from dtrain.util import file_handles
from dtrain.util.format import duration

POLL_S = 0.5
LAST_WORDS = 65536  # bytes of the log that are searched for an error
ERROR = re.compile(r"^([A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Warning|Failure)\w*)(?:: (.*))?$")


def identity(section: dict[str, Any]) -> str:
    """Name the program that is executed: the file, and the Python of a Python file."""
    return f"{section['python'] or ''} {section['path']}".strip()


class Program:
    """One rank's program, from its start to its end."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self.run_dir, self.rank, self.stopped_by = run_dir, rank, ""
        self.section: dict[str, Any] = run_file.load(run_dir)["script"]
        self.log = run_dir / "logs" / f"rank-{rank}.log"
        self.asks, self.stopped = (run_dir / name.format(rank) for name in (SCRIPT_ASKS, SCRIPT_STOPPED))
        for old in (self.asks, self.stopped):
            old.unlink(missing_ok=True)
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        self.stopped_by = signal.Signals(number).name
        note_stop(self.run_dir)

    def run(self) -> int:
        """Run the program to its end; return this rank's exit code."""
        if identity(self.section) not in os.environ.get(SCRIPT_TYPED, "").splitlines():
            why = f"config.yaml names {identity(self.section)}, and that was not typed: the run folder was changed"
            return self._note(BAD_CONFIG, {"type": "untrusted program", "message": why})
        with script_world.environment(self.section["env"], self.run_dir) as wanted:
            argv = command(self.section)
            print(f"rank {self.rank}, on {socket.gethostname()}: {shlex.join(argv)}", flush=True)
            began = self.log.stat().st_size
            here = os.getpid()
            try:
                process = subprocess.Popen(
                    argv,
                    env=own_environment() | wanted | {SCRIPT_RUN: str(self.run_dir)},
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # a signal to the rank's process group is for the rank
                    preexec_fn=lambda: self._before(here),
                )
            except OSError as error:  # no #! line, or another node without this Python
                why = f"{argv[0]} cannot be executed: {error.strerror}"
                return self._note(BAD_CONFIG, {"type": "OSError", "message": why})
            try:
                code = self._wait(process)
            finally:
                process_tree.kill_descendants()
        return self._report(code, began)

    def _before(self, parent: int) -> None:
        """Run in the new process: end with the rank, and ignore the signals by which SLURM asks the rank to stop."""
        die_with_parent(parent)
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            ignored = number.name != f"SIG{self.section['stop_signal']}"
            signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)

    def _wait(self, process: subprocess.Popen[bytes]) -> int:
        signalled, stop_file = False, self.run_dir / STOP_FILE
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(POLL_S)
            self.stopped_by = self.stopped_by or ("the stop file" if stop_file.exists() else "")
            if self.stopped_by and not signalled:
                signalled = True
                if self.section["stop_signal"] != "none" and not self._asks():
                    process.send_signal(signal.Signals[f"SIG{self.section['stop_signal']}"])

    def _asks(self) -> bool:
        """Does the program ask for stops itself? If any rank does: the ranks stop together."""
        return any(self.run_dir.glob(SCRIPT_ASKS.format("*")))

    def _report(self, code: int, began: int) -> int:
        # a program that asks says itself how it ended; one that got a signal cannot, and any end is that of a stop
        was_signal = -code in STOP_SIGNALS or code - 128 in STOP_SIGNALS  # 128 + n: of a shell
        if code == PREEMPTED or (self.stopped_by and (code == 0 or was_signal or not self._asks())):
            print(f"the program ended with {ended(code)} after a stop request ({self.stopped_by or 'its own'})")
            self.stopped.touch()
            return DONE  # torchrun and srun would end the others; the supervisor reads the file
        if code == 0:
            return DONE
        found = last_words(self.log, began, code)
        if code < 0 and not found["where"]:  # killed from outside
            found |= {"type": signal.Signals(-code).name, "message": f"the program was killed by {ended(code)}"}
        return self._note(found["exit_code"], found)

    def _note(self, code: int, found: dict[str, Any]) -> int:
        """Write a failure note for the supervisor; return the exit code."""
        note = {
            "time": time.time(), "rank": self.rank, "exit_code": code, "log": f"logs/rank-{self.rank}.log",
            "where": "", "traceback": "", "lost_peer": False, **found,
        }  # fmt: skip
        print(f"{note['type']}: {note['message']}", flush=True)
        with contextlib.suppress(OSError):
            write_json(self.run_dir / "logs" / f"failure-{self.rank}.json", note)
        return code


def note_stop(run_dir: Path) -> None:
    """Ask all ranks to stop: a scheduler may have signalled this one only."""
    with contextlib.suppress(OSError):
        (run_dir / STOP_FILE).touch()


def own_environment() -> dict[str, str]:
    """Return this process's environment as the program would have it without dtrain, which it can import, though.

    PYTHONSAFEPATH, which dtrain sets for its own processes, would keep a program from importing what is beside it.
    """
    environ = dict(os.environ)
    environ.pop(STARTER, None)
    if environ.pop(start.SAFE_PATH, ""):
        environ.pop("PYTHONSAFEPATH", None)
    found = start.environment(argv=()).get("PYTHONPATH")
    return environ | ({"PYTHONPATH": found} if found else {})


def command(section: dict[str, Any]) -> list[str]:
    """Return the program with its arguments; a Python file runs in this Python, unless another one is given."""
    path = str(section["path"])
    python = [section["python"] or sys.executable, "-u"] if path.endswith(".py") else []
    return [*python, path, *section["args"]]


def last_words(log: Path, began: int, code: int) -> dict[str, Any]:
    """Find the error in what the program wrote last: its type, message, place and traceback."""
    size = min(LAST_WORDS, log.stat().st_size - began + 1)  # 1: the end of the line before
    texts = [line.decode(errors="replace") for line in last_lines(log, size)]
    lines = [hide(re.sub(r"^\[rank\d+\]: ?", "", text)) for text in texts]  # torch writes it before each line
    begin = next((i for i in range(len(lines) - 1, -1, -1) if lines[i].startswith("Traceback (most recent")), None)
    kind, message, traceback = f"exit code {code}", "", ""
    if begin is not None:
        found = next(((i, ERROR.match(lines[i])) for i in range(begin, len(lines)) if ERROR.match(lines[i])), None)
        if found and found[1]:
            kind, message = found[1][1].rpartition(".")[2], found[1][2] or ""
            traceback = "\n".join(lines[begin : found[0] + 1])
    message = message or "\n".join([line for line in lines if line.strip()][-5:]) or "it printed nothing"
    frames = [frame for frame in FRAME.findall(traceback) if is_users_file(frame[0])]
    where = f"{frames[-1][0]}:{frames[-1][1]}, in {frames[-1][2]}" if frames else ""
    return {
        "type": kind, "message": message, "where": where, "traceback": traceback,
        "exit_code": BAD_CONFIG if code == BAD_CONFIG else FAILED,
        "lost_peer": bool(LOST_PEER.search(message)),
    }  # fmt: skip


def ended(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def write_beginning(run_dir: Path) -> None:
    """Write what is known of a run that has just begun; rank 0 calls this."""
    config = run_file.load(run_dir)
    values = {
        "status": "running", "name": config["name"], "script": shlex.join(shown(config["script"])),
        "world_size": int(os.environ["WORLD_SIZE"]), "env": config["script"]["env"],
    }  # fmt: skip
    write_json(run_dir / "summary.json", values)


def shown(section: dict[str, Any]) -> list[str]:
    return [Path(section["path"]).name, *section["args"]]


def conclude(run_dir: Path, writes: bool) -> int:
    """Return the exit code of a run all of whose ranks ended well, and write it down; the supervisor calls this."""
    code = PREEMPTED if any((run_dir / "logs").glob(Path(SCRIPT_STOPPED).name.format("*"))) else DONE
    if writes:
        summary = read_json(run_dir / "summary.json")
        ended = {"status": "preempted" if code else "done", "wall_s": wall_s(run_dir)}
        write_json(run_dir / "summary.json", summary | newest_metrics(run_dir) | ended)
    return code


def newest_save(run_dir: Path) -> int:
    """Return when the program last wrote into RUN/checkpoints (dtrain.script.checkpoint_dir), in ns; 0: never."""
    files = (path for path in (run_dir / "checkpoints").rglob("*") if path.is_file())
    return max((path.stat().st_mtime_ns for path in files), default=0)


class Silence:
    """Finds a program that has stopped writing, if cluster.hang_timeout is given: all that can be known."""

    def __init__(self, run_dir: Path, timeout: float | None) -> None:
        self.run_dir, self.timeout = run_dir, timeout
        self.seen: list[Any] = []
        self.since, self.is_reported = time.monotonic(), False

    def look(self) -> str:
        """Return a sentence once, when it is silent for too long."""
        if self.timeout is None:
            return ""
        paths = [self.run_dir / "metrics.jsonl", *sorted((self.run_dir / "logs").glob("rank-*.log"))]
        now = [signature(path) for path in paths]
        if now != self.seen:
            self.seen, self.since, self.is_reported = now, time.monotonic(), False
        seconds = time.monotonic() - self.since
        if seconds < self.timeout or self.is_reported:
            return ""
        self.is_reported = True
        return f"no rank has written anything for {duration(seconds)} (cluster.hang_timeout={self.timeout:g})"


def main(run_dir: Path) -> int:
    if "RANK" not in os.environ:
        name_slurm_rank(os.environ)
    die_with_parent(int(os.environ.get(STARTER, os.getppid())))
    rank = int(os.environ["RANK"])
    descriptor = os.open(run_dir / "logs" / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    for number in STOP_SIGNALS:  # of this process; its child, which runs the program, sees the file
        signal.signal(number, lambda *_: note_stop(run_dir))
    code = process_tree.run_in_child(lambda: run_program(run_dir, rank))
    if code < 0:  # end as it did
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def run_program(run_dir: Path, rank: int) -> int:
    program = Program(run_dir, rank)  # first: from now on stop signals are handled
    if os.environ["LOCAL_RANK"] == "0":
        system.begin(run_dir)
    if rank == 0:
        write_beginning(run_dir)
    file_handles.raise_limit()
    return program.run()


if __name__ == "__main__":
    os._exit(main(Path(sys.argv[1])))
