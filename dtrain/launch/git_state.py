"""What git knows about the code of the current folder, read within a second and a bounded size, and without secrets.

A repository may be huge, its file system slow, and git missing: none of this may delay or fail the start of a run.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import re
import select
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from dtrain.config.redaction import hide, hide_in_code

LIMIT_S = 1.0  # for all calls of git together
MOST_DIFF = 256 * 1024
MOST_NAMES = 100
LONGEST_NAME = 200
# Files that are made to hold secrets: the diff names them only.
SECRET_FILE = re.compile(
    r"(^|/)(\.env[^/]*|\.netrc|id_(rsa|dsa|ecdsa|ed25519)[^/]*|[^/]*\.(pem|key|p12|pfx|keystore)"
    r"|[^/]*(secret|credential|passw(or)?d)s?[^/]*\.(json|ya?ml|toml|ini|txt|env|cfg))$",
    re.IGNORECASE,
)
# Run nothing that the repository configures, fetch nothing, lock nothing; larger files count as binary: named only.
GIT = ("git", "-c", "core.fsmonitor=false", "-c", "core.bigFileThreshold=8m", "-c", "core.quotePath=false")
QUIET = {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "GIT_NO_LAZY_FETCH": "1", "LC_ALL": "C"}
STREAMS: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL,
           "start_new_session": True}  # fmt: skip
HEAD = ("rev-parse", "HEAD", "--abbrev-ref", "HEAD")
DIFF = (
    "diff", "HEAD", "--no-ext-diff", "--no-textconv", "--no-color", "--src-prefix=a/", "--dst-prefix=b/",
    "--stat=120,100,300", "--patch",
)  # fmt: skip
UNTRACKED = (
    "ls-files",
    "--others",
    "--exclude-standard",
    "--directory",
    "--no-empty-directory",
    "--full-name",
    "-z",
    "--",
    ":/",
)

FRESH_S = 5.0  # the points of a sweep that are submitted together ask once; points that train take longer

Answer = tuple[dict[str, Any], bytes]
answers: dict[str, tuple[float, Answer]] = {}  # folder → until when it is valid, and the answer


def git_state() -> Answer:
    """Return (commit, branch, whether dirty, untracked names, problem; the diff). {}: no repository with a commit."""
    found: dict[str, Any] = {}
    diff = b""
    with contextlib.suppress(OSError):  # git is not installed, or the folder is gone
        folder, now = os.getcwd(), time.monotonic()
        until, answer = answers.get(folder, (now, (found, diff)))
        if now < until:
            return dict(answer[0]), answer[1]
        found, diff = _ask(now + LIMIT_S)
        # no point of a sweep waits again for a git that is too slow
        answers[folder] = math.inf if found.get("problem") else now + FRESH_S, (found, diff)
    return dict(found), diff


def _ask(deadline: float) -> Answer:
    started: list[subprocess.Popen[bytes]] = []
    try:
        for command in (HEAD, DIFF, UNTRACKED):  # at the same time: each takes some milliseconds
            started.append(subprocess.Popen([*GIT, *command], env=os.environ | QUIET, **STREAMS))
        head, head_ended = _read(started[0], deadline, 4096)
        if not head_ended:
            return {"problem": f"git took longer than {LIMIT_S:g} s"}, b""
        commit, _, branch = head.decode(errors="replace").strip().partition("\n")
        if _code(started[0], deadline) != 0 or not re.fullmatch(r"[0-9a-f]{40,64}", commit):
            return {}, b""
        found: dict[str, Any] = {"commit": commit, "branch": None if branch == "HEAD" else branch[:LONGEST_NAME]}
        diff, ended = _read(started[1], deadline, MOST_DIFF)
        failed = ended and _code(started[1], deadline) != 0
        names, listed = _read(started[2], deadline, MOST_NAMES * LONGEST_NAME)
    finally:
        for process in started:
            _stop(process)
    found["dirty"] = True if diff else False if ended and not failed else None
    if diff and not ended:
        found["diff_cut"] = True
    untracked = [name for name in hide(names.decode(errors="replace")).split("\0") if name]
    found["untracked"] = [name[:LONGEST_NAME] for name in untracked[:MOST_NAMES]]
    if len(untracked) > MOST_NAMES or not listed:
        found["untracked_cut"] = True
    if failed:
        found["problem"] = "git diff failed"
    elif time.monotonic() >= deadline:
        found["problem"] = f"git took longer than {LIMIT_S:g} s: the changes are not complete"
    return found, without_secrets(diff, cut=not ended)


def _read(process: subprocess.Popen[bytes], deadline: float, most: int) -> tuple[bytes, bool]:
    """Return at most so many bytes of its output, and whether this is all of it."""
    assert process.stdout is not None
    descriptor, data, poll = process.stdout.fileno(), b"", select.poll()
    poll.register(descriptor, select.POLLIN)
    while len(data) <= most and poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        if not (chunk := os.read(descriptor, 65536)):
            return data, True
        data += chunk
    return data[:most], False


def _code(process: subprocess.Popen[bytes], deadline: float) -> int | None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(max(0.05, deadline - time.monotonic()))
    return None


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End git and what it started. One that a dead file server holds is left to itself: waiting could take forever."""
    if process.poll() is None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
    if process.stdout is not None:
        process.stdout.close()


def without_secrets(diff: bytes, cut: bool = False) -> bytes:
    """Redact a diff, and leave only the names of files that are made to hold secrets."""
    if cut:
        diff = diff[: diff.rfind(b"\n") + 1]
    parts = re.split(r"(?m)^(?=diff --git )", diff.decode("utf-8", "surrogateescape"))
    for i, part in enumerate(parts):
        first = part.partition("\n")[0]
        if first.startswith("diff --git ") and SECRET_FILE.search(first.removesuffix('"')):
            parts[i] = f"{first}\nleft out: a file of secrets\n"
    text = hide_in_code("".join(parts)) + ("\nthe rest is left out\n" if cut else "")
    return text.encode("utf-8", "surrogateescape")


def save_diff(run_dir: Path, diff: bytes, number: int, earlier: dict[str, Any]) -> dict[str, Any]:
    """Write the diff of the run's launch of this number, unless an earlier launch had the same; return its name."""
    if not diff:
        return {}
    digest = hashlib.sha256(diff).hexdigest()[:16]
    if earlier.get("diff") and earlier.get("diff_digest") == digest:
        return {"diff": earlier["diff"], "diff_digest": digest}
    path = run_dir / (f"code-{number}.diff" if number else "code.diff")
    try:
        path.unlink(missing_ok=True)  # a link in someone else's folder must not lead the writer elsewhere
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(diff)
    except OSError as error:  # the run is worth more than its diff
        return {"problem": f"{path.name} could not be written: {error.strerror}"}
    return {"diff": path.name, "diff_digest": digest}
