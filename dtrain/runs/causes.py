"""Why an attempt of a run ended: classify the error, and format each cause on one line.

Launcher and ranks import this file, so it does not import torch.
"""

from __future__ import annotations

import linecache
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from opcode import opmap
from pathlib import Path
from types import TracebackType
from typing import Any

from dtrain.errors import chain
from dtrain.runs.protocol import BAD_CONFIG, LOST_PEER

GLOO = re.compile(r"\[[^\]\n]*\bgloo/[^\]\n]*:\d+\]")  # gloo's errors start with their C++ source location
HOROVOD = "Horovod has been shut down"  # in DDP's backward pass, under strategy=horovod
INJECTED = str(Path(__file__).parents[1] / "faults" / "inject.py")
RAISE = opmap["RAISE_VARARGS"]
MOST_FRAMES = 4  # of the user's code that are shown
LONGEST = 200  # characters of a line that are shown
# A folder of dtrain that calls objects of the user: the groups that make them.
GROUPS_OF = {
    "data": ("data",),
    "optim": ("optim", "schedule"),
    "models": ("model", "loss"),
    "kernels": ("model", "loss"),
    "strategies": ("model", "loss", "optim", "schedule", "strategy"),
    "loggers": ("logger",),
}
FRAME = re.compile(r'File "([^"\n]+)", line (\d+), in (\S+)')  # in a traceback that is text


def is_lost_peer(error: BaseException) -> bool:
    """Did a torch.distributed collective fail because another rank's connection ended?

    The message text alone proves nothing: a user's data code can raise "Connection reset by peer" too. The error must
    come from torch's C++ code: one of c10d's own types, or a gloo source location in front, and no Python `raise`.
    """
    return any(_is_of_collective(e) and LOST_PEER.search(str(e)) for e in chain(error))


def _is_of_collective(error: BaseException) -> bool:
    kind, text = type(error), str(error)
    own = kind.__module__ == "torch.distributed" and kind.__name__.startswith("Dist")
    named = kind is RuntimeError and (bool(GLOO.search(text)) or HOROVOD in text)
    return (own or named) and not _raised_by_python(error)


def _raised_by_python(error: BaseException) -> bool:
    """Is the innermost frame at a `raise`? An error from C++ code comes out of a call instead."""
    innermost = _innermost(error.__traceback__)
    return innermost is None or innermost.tb_frame.f_code.co_code[innermost.tb_lasti] == RAISE


def is_users_own(error: BaseException) -> bool:
    """Is the innermost frame at a `raise` in a file of the user?"""
    innermost = _innermost(error.__traceback__)
    return innermost is not None and _raised_by_python(error) and is_users_file(innermost.tb_frame.f_code.co_filename)


def _innermost(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace


def own_line(error: BaseException) -> str:
    """`file:line, in function` of the user's code that raised the error; "" if the traceback has no user code."""
    own = own_frames(error)
    return f"{own[-1]['file']}:{own[-1]['line']}, in {own[-1]['function']}" if own else ""


def own_frames(error: BaseException) -> list[dict[str, Any]]:
    """The frames of the user's code in a traceback, the last one last: file, line, function and source text.

    Frames of torch, dtrain and other packages are left out. An error that dtrain raised about the user's code has them
    in its cause.
    """
    for one in chain(error):
        frames = [
            (frame.f_code.co_filename, line, frame.f_code.co_name)
            for frame, line in traceback.walk_tb(one.__traceback__)
        ]
        # a loader process sends its traceback as text, which repeats the notes
        noted = [place for text in getattr(one, "__notes__", []) for place in FRAME.findall(text)]
        frames += [(file, int(line), function) for file, line, function in dict.fromkeys(noted)]
        if isinstance(one, SyntaxError) and one.filename:  # of a module that is imported
            frames.append((one.filename, one.lineno or 0, "<module>"))
        own = [frame for frame in frames if is_users_file(frame[0])]
        if own:
            shown = own[-MOST_FRAMES:]
            texts = [linecache.getline(file, line).strip()[:LONGEST] for file, line, _ in shown]
            names = ("file", "line", "function", "text")
            return [dict(zip(names, (*frame, text), strict=True)) for frame, text in zip(shown, texts, strict=True)]
    return []


def sentence_of_exit(error: BaseException) -> str:
    """Return why argparse ended the process, which only stderr has otherwise; "" if it did not."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)] if isinstance(error, SystemExit) else []
    for frame in frames:
        code = frame.f_code
        if (code.co_name, Path(code.co_filename).name) == ("exit", "argparse.py"):
            message = str(frame.f_locals.get("message") or "").strip()
            return f"argparse: {message.rpartition(': error: ')[2]}" if message else ""
    return ""


def groups_of(error: BaseException) -> list[tuple[str, ...]]:
    """Return which groups' objects dtrain was using when an error came up, the innermost call first."""
    package = f"{Path(__file__).parent.parent}/"
    found: list[tuple[str, ...]] = []
    for one in chain(error):
        files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(one.__traceback__)]
        files += [place[0] for text in getattr(one, "__notes__", []) for place in FRAME.findall(text)]
        for file in reversed(files):
            folder, _, rest = file.removeprefix(package).partition("/")
            groups = ("hooks",) if folder == "train" and rest.startswith("hook") else GROUPS_OF.get(folder)
            if file.startswith(package) and groups and groups not in found:
                found.append(groups)
    return found


def is_users_file(path: str) -> bool:
    """Is it neither Python's, nor an installed package's, nor dtrain's? Injected faults stand for the user's code."""
    if path == INJECTED:
        return True
    paths = sysconfig.get_paths()
    theirs = ("<", f"{Path(__file__).parent.parent}/", *(paths[key] for key in ("stdlib", "purelib", "platlib")))
    installed = ("/site-packages/", "/dist-packages/", "/lib/python3")  # also those of a container
    return not path.startswith(theirs) and not any(part in path for part in installed)


def one_line(failure: dict[str, Any]) -> str:
    """`rank 1: RuntimeError: the first line of its message (logs/rank-1.log)`."""
    rank = f"rank {failure['rank']}: " if failure.get("rank") is not None else ""
    lines = str(failure.get("message") or "").strip().splitlines()
    log = f" ({failure['log']})" if failure.get("log") else ""
    return f"{rank}{failure.get('type') or 'error'}: {lines[0][:200] if lines else 'no message'}{log}"


def refused(error: Exception) -> Exception:
    """Mark an error as one that a script ends with; its traceback begins here anew."""
    error.code_of_dtrain = BAD_CONFIG  # type: ignore[attr-defined]
    return error.with_traceback(None)


@contextmanager
def fixes_for_script() -> Iterator[None]:
    """Mark errors with a fix as those that a script ends with. A notebook shows them as they are."""
    try:
        yield
    except Exception as error:
        if "\n  fix: " in str(error):
            error.code_of_dtrain = BAD_CONFIG  # type: ignore[attr-defined]
            watch_script()
        raise


def watch_script() -> None:
    """Show uncaught errors as a script's; at a prompt an error must not end the session."""
    is_prompt = hasattr(sys, "ps1") or sys.flags.interactive
    if sys.excepthook is sys.__excepthook__ and not is_prompt:  # not IPython's, rich's or a debugger's
        sys.excepthook = end_script


def end_script(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Exit an uncaught error of a call of dtrain with dtrain's exit code, and show the lines of the script alone."""
    code = getattr(error, "code_of_dtrain", None)  # exit_code may be an attribute of another library's error
    if code is None or os.environ.get("HYDRA_FULL_ERROR") == "1":
        sys.__excepthook__(kind, error, trace)
    else:
        shown = traceback.TracebackException(kind, error, trace)
        typed = ("<stdin>", "<string>")  # python -, python -c
        own = [one for one in shown.stack if one.filename in typed or is_users_file(one.filename)]
        shown.stack = traceback.StackSummary.from_list(own)
        print("".join(shown.format(chain=False)), end="", file=sys.stderr)
    if code is not None:
        raise SystemExit(code)


def distinct(failures: Sequence[dict[str, Any]]) -> list[str]:
    """List the cause of each attempt; attempts with the same cause share one line."""
    attempts: dict[str, list[int]] = {}
    for number, failure in enumerate(failures, 1):
        attempts.setdefault(one_line(failure), []).append(number)
    return [f"attempt{'s' if len(n) > 1 else ''} {_numbers(n)}: {line}" for line, n in attempts.items()]


def _numbers(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:5]))
    return f"{shown} and {len(numbers) - 5} more" if len(numbers) > 5 else shown
