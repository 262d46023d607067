"""Run a launch as a person types it, in this process, with ranks forked from a server that has imported torch.

All but the start of the ranks is the real thing: composition, checks, run folder, supervisor, screen and exit code.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import shlex
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest

from dtrain.cli import main
from dtrain.commands.verify import world
from dtrain.commands.verify.world import World
from dtrain.config import run_file
from dtrain.config.hardware import CPU_FP16
from dtrain.launch.local import Local
from dtrain.launch.torchrun import Torchrun
from tests.mistakes_judge import Verdict, faults_of, followed

# Hydra composes a first time only to ask for hydra.mode, which we never set; real processes do it, too.
COMPOSE_ONCE = ("hydra._internal.hydra.Hydra.get_mode", lambda self, **_: None)


class ForkedWorld:
    """The ranks as one process, as a supervisor sees it."""

    def __init__(self, size: int, run_dir: Path, env: dict[str, str]) -> None:
        self.world = World(size, world.train_rank, run_dir, env=env)

    def poll(self) -> int | None:
        codes = [rank.exitcode for rank in self.world.ranks]
        return None if None in codes else next((code for code in codes if code), 0)

    def wait(self) -> int:
        return next((code for code in self.world.join() if code), 0)


class FromServer(Torchrun):
    def start(self, run_dir: Path, log: IO[bytes]) -> ForkedWorld:
        return ForkedWorld(self.num_ranks, run_dir, self.environment())

    def kill(self, process: Any) -> None:
        process.world.kill()


def launch_here(self: Local, run_dir: Path) -> int:
    return FromServer(run_file.load(run_dir), [], self.max_restarts, self.grace_s).launch(run_dir)


@contextlib.contextmanager
def machine() -> Iterator[None]:
    """A machine without GPUs whose runs start fast."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*COMPOSE_ONCE)
        patch.setattr(Local, "launch", launch_here)
        patch.setattr("dtrain.ui.console.LAUNCH", "dtrain launch")  # the folder of a user has no launch.py
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv(CPU_FP16, "0")
        patch.setenv("COLUMNS", "80")
        patch.delenv("HYDRA_FULL_ERROR", raising=False)
        yield


def typed(argv: Sequence[str], folder: Path) -> tuple[int, str]:
    """Run a command line in a folder; return its exit code and its screen."""
    before, path, modules = os.getcwd(), list(sys.path), set(sys.modules)
    os.chdir(folder)
    screen = io.StringIO()
    try:
        with contextlib.redirect_stdout(screen), contextlib.redirect_stderr(screen):
            code = main(list(argv))
    finally:
        os.chdir(before)
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
                del sys.modules[name]
    return code, screen.getvalue()


@dataclass(frozen=True)
class Case:
    """A mistake of either kind: in net.py, or on a command line among the files of tests/test_bad_inputs.py."""

    name: str
    command: list[str]
    wanted: int
    source: str = ""


def cases(world: Path) -> list[Case]:
    from tests import test_bad_inputs as inputs
    from tests.mistakes import MISTAKES

    inputs.fill(world)
    found = [Case(m.name, m.command, m.code, m.source) for m in MISTAKES]
    for param in inputs.CASES:
        argv = [arg.replace("{world}", str(world)) for arg in param.values[0]]  # type: ignore[attr-defined]
        found.append(Case(str(param.id), argv, 2))  # type: ignore[attr-defined]
    return found


def judged(case: Case) -> tuple[int, str, Verdict]:
    """Make the mistake in an empty folder, then follow the fix there."""
    with tempfile.TemporaryDirectory() as folder:
        if case.source:
            (Path(folder) / "net.py").write_text(case.source)
        code, screen = typed(case.command, Path(folder))
        faults = faults_of(code, case.wanted, screen)
        tried = []
        for ways in followed(case.command, screen) if case.wanted == 2 else []:
            said = []
            for again in ways:
                its_code, its_screen = typed(again, Path(folder))
                if not its_code:
                    break
                said.append(f"`{shlex.join(again)}` ends with {its_code}: {' '.join(its_screen.split())}")
            else:
                faults.append(f"its fix: {'; '.join(said)}")
            tried.append(shlex.join(again))
    return code, screen, Verdict(tuple(faults), "`, and `".join(tried))


def table(first: int, last: int) -> Iterator[str]:
    """Each mistake as a person meets it: what was typed or changed, the exit code, the whole screen, the verdict."""
    from tests.mistakes import NET

    yield f"# Mistakes {first} to {last}\n\nnet.py, before each mistake in it:\n\n{indented(NET)}\n"
    with tempfile.TemporaryDirectory() as world:
        chosen = cases(Path(world))[first - 1 : last]
        bad: list[str] = []
        tried = 0
        for number, case in enumerate(chosen, first):
            code, screen, verdict = judged(case)
            tried += bool(verdict.tried)
            bad += [f"{number}. {case.name}: {fault}" for fault in verdict.faults]
            changed = difflib.unified_diff(NET.splitlines(), case.source.splitlines(), "", "", "", "", 0, "")
            lines = [line for line in changed if line[:1] in "+-" and line.strip() not in ("---", "+++")]
            yield f"## {number}. {case.name}\n\n    dtrain {shlex.join(case.command)}\n"
            yield f"net.py:\n\n{indented(chr(10).join(lines))}\n" if case.source and lines else ""
            yield f"exit code {code}\n\n{indented(screen)}\n\n{verdict.text}\n"
    good = len(chosen) - len({line.partition(".")[0] for line in bad})
    share = f"{good} of {len(chosen)} ({100 * good / max(1, len(chosen)):.1f}%)"
    yield f"## Result\n\n{share} have no fault; {tried} fixes were typed as printed.\n"
    yield "\n".join(f"- {line}" for line in bad)


def indented(text: str) -> str:
    return textwrap.indent(text.rstrip(), "    ")


if __name__ == "__main__":  # python -m tests.mistakes_run [FIRST [LAST]] > mistakes.md
    numbers = [int(word) for word in sys.argv[1:]] + [1, 10**6][len(sys.argv) - 1 :]
    with machine():
        for part in table(*numbers):
            print(part, flush=True)
