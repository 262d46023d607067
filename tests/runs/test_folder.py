"""Files of a run that another process writes."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.runs.folder import LogTail, Tail, last_lines, note_attempt, shown, wall_s


def test_the_wall_time_is_that_of_all_attempts(tmp_path: Path) -> None:
    assert wall_s(tmp_path) is None
    attempts, now = tmp_path / "attempts.jsonl", time.time()
    lines = [("start", now - 1000), ("end", now - 940), ("start", now - 500), ("placed", now - 499)]
    attempts.write_text("".join(json.dumps({"event": event, "time": t}) + "\n" for event, t in lines))
    assert wall_s(tmp_path) == pytest.approx(560, abs=5), "the last one still runs"
    (tmp_path / "metrics.jsonl").touch()
    os.utime(tmp_path / "metrics.jsonl", (now - 470, now - 470))  # then it was killed
    note_attempt(tmp_path, "start")
    note_attempt(tmp_path, "end")
    assert wall_s(tmp_path) == pytest.approx(90, abs=5)
    attempts.write_text('{"event": "start", "time": "x"}\n[]\n{"event": "end", "time": 3}\n{"event"')
    assert wall_s(tmp_path) == 0


def test_tail_reads_each_whole_line_once(tmp_path: Path) -> None:
    path = tmp_path / "f"
    tail = Tail(path)
    assert tail.read() == ([], False)  # not there yet
    path.write_bytes(b"one\ntw")
    assert tail.read() == ([b"one"], False)
    assert tail.read() == ([], False)
    with open(path, "ab") as file:
        file.write(b"o\nthree")
    assert tail.read() == ([b"two"], False)
    assert tail.read(final=True) == ([b"three"], False)


@pytest.mark.parametrize("replace", [True, False])
@pytest.mark.parametrize("new", [b"one\n", b"one\ntoo\nthree\nfour\n", b"one\nTWO\n"])
def test_tail_notices_another_file(tmp_path: Path, replace: bool, new: bytes) -> None:
    """Shorter, longer and of the same length; with a new inode and in place."""
    path = tmp_path / "f"
    path.write_bytes(b"one\ntwo\n")
    tail = Tail(path)
    tail.read()
    (tmp_path / "new" if replace else path).write_bytes(new)
    if replace:
        os.replace(tmp_path / "new", path)
    assert tail.read() == (new.splitlines(), True)
    assert tail.read() == ([], False)


def test_tail_knows_a_replaced_file_with_the_same_beginning(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"one\n")
    tail = Tail(path)
    tail.read()
    (tmp_path / "new").write_bytes(b"one\ntwo\n")
    os.replace(tmp_path / "new", path)
    assert tail.read() == ([b"two"], False)


@settings(deadline=None)  # on a busy machine one example may take long
@given(st.binary(max_size=200), st.lists(st.integers(0, 60)))
def test_tail_loses_nothing_however_the_writes_are_cut(tmp_path_factory: Any, data: bytes, cuts: list[int]) -> None:
    path = tmp_path_factory.getbasetemp() / "tail"
    path.write_bytes(b"")
    tail, seen, at = Tail(path), [], 0
    for size in [*cuts, len(data)]:
        with open(path, "ab") as file:
            file.write(data[at : at + size])
        at += size
        found, again = tail.read()
        assert not again
        seen += found
    seen += tail.read(final=True)[0]
    assert b"".join(seen) == b"".join(data.splitlines())


def test_last_lines_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "f"
    assert last_lines(path) == []
    path.write_bytes(b"first\nsecond\nthird")
    assert last_lines(path) == [b"first", b"second", b"third"], "the last one may still be being written"
    assert last_lines(path, 12) == [b"third"] and last_lines(path, 3) == []


@pytest.mark.parametrize("data, lines", [
    (b"", []),
    (b"a\nb", [b"a", b"b"]),
    (b"a\r\nb\r\n", [b"a", b"b"]),
    (b"\r 1%\r 2%\r100%\nnext\n", [b"100%", b"next"]),
    (b"1%\r2%\r", [b"2%"]),
])  # fmt: skip
def test_overwritten_text_is_not_shown(data: bytes, lines: list[bytes]) -> None:
    assert shown(data) == lines


def test_a_progress_bar_appears_before_its_line_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    path.write_bytes(b"begins\nan unfinished")
    tail = LogTail(path)
    assert tail.read() == ([b"begins"], False)
    with open(path, "ab", buffering=0) as file:
        file.write(b" line\n\r 1%\r 2%")
        assert tail.read()[0] == [b"an unfinished line", b"2%"]
        file.write(b"\r 3%")
        assert tail.read()[0] == [], "not again so soon"
        tail.due = 0
        assert tail.read()[0] == [b"3%"]
        file.write(b"\r 4%\nends\n")
        assert tail.read()[0] == [b" 4%", b"ends"]
