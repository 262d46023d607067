"""Where documents come from: told by the path, read the same everywhere, and refused with file and line."""

import gzip
import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.data import documents, text
from dtrain.data.text import Text
from dtrain.data.tokens import prepare

TEXTS = [f"document {n}: naïve\ncat" for n in range(40)]


def write_lines(path: Path, texts: list[str], field: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps({"id": n, field: t}) + "\n" for n, t in enumerate(texts))
    opened: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt", encoding="utf-8") as file:
        file.write(lines)
    return path


def found(path: Path, **settings: Any) -> dict[str, list[str]]:
    """The documents of each split, from the bytes that a model would see."""
    data = Text(str(path), seq_len=8, **settings)
    return {split: data.dataset(split).tokens.tobytes().decode().split("\0") for split in ("train", "val")}


def test_json_lines_hold_out_whole_documents(tmp_path: Path) -> None:
    splits = found(write_lines(tmp_path / "a.jsonl", TEXTS), val_fraction=0.2)
    assert sorted(splits["train"] + splits["val"]) == sorted(TEXTS)
    assert 2 < len(splits["val"]) < 20
    assert splits["train"] == [t for t in TEXTS if t in splits["train"]], "in the order of the lines"


def test_plain_packed_zipped_and_in_several_files_are_the_same_split(tmp_path: Path) -> None:
    whole = found(write_lines(tmp_path / "whole.jsonl", TEXTS), val_fraction=0.2)
    assert found(write_lines(tmp_path / "whole.jsonl.gz", TEXTS), val_fraction=0.2) == whole
    write_lines(tmp_path / "parts" / "a.jsonl", TEXTS[:25])
    write_lines(tmp_path / "parts" / "deep" / "b.jsonl.gz", TEXTS[25:])
    assert found(tmp_path / "parts", val_fraction=0.2) == whole
    other = found(write_lines(tmp_path / "other.jsonl", TEXTS, "body"), val_fraction=0.2, field="body")
    assert other == whole


def test_few_json_lines_hold_out_the_tail(tmp_path: Path) -> None:
    splits = found(write_lines(tmp_path / "a.jsonl", TEXTS[:5]), val_fraction=0.3)
    assert "".join(splits["train"]) + "".join(splits["val"]) in ("".join(TEXTS[:5]), "\0".join(TEXTS[:5]))


def test_blank_lines_and_empty_texts_leave_no_trace(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('\ufeff{"text": "one"}\r\n\n  \n{"text": ""}\n{"text": "two"}', encoding="utf-8")
    assert [t for t, _ in documents.JsonLines([tmp_path / "a.jsonl"], "text", 0.5).texts()] == [b"one", b"two"]


BAD_LINES = [
    (b"{", "line 3 is not JSON \\(Expecting property name .*, at character 3\\)\n  fix: one object a line"),
    (b"\xff", "line 3 is not JSON"),
    (b"[" * 100_000, "line 3 is not JSON"),
    (b'["text"]', "line 3 is not a JSON object but a list"),
    (b'{"n": 1, "body": "x"}', "line 3 has no field 'text', only n, body\n  fix: data.field=body"),
    (b"{}", "line 3 has no field 'text', only none"),
    (b'{"text": null}', "line 3 has a NoneType in data.field='text'"),
    (b'{"text": ["x"]}', "line 3 has a list in data.field='text'"),
    (b'{"text": "\\ud800"}', "line 3 has half of a surrogate pair"),
]


@pytest.mark.parametrize("line, message", BAD_LINES)
def test_a_bad_line_is_named(line: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "good"}\n\n' + line + b"\n")
    for read in (lambda: Text(str(file), seq_len=2).dataset("train"), lambda: prepare(file, tmp_path / "out")):
        with pytest.raises(ValueError, match=message) as caught:
            read()
        assert str(file) in str(caught.value) and "\n  fix: " in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


@given(st.binary(max_size=30))
def test_any_line_is_a_document_or_refused_with_a_fix(line: bytes) -> None:
    try:
        documents.document(line, "text", "'a.jsonl' line 1").decode()
    except ValueError as error:
        assert str(error).startswith("'a.jsonl' line 1 ") and "\n  fix: " in str(error)


def test_a_torn_archive_is_named(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl.gz", TEXTS * 20)
    whole = file.read_bytes()
    for broken in (whole[: len(whole) // 2], b"not an archive", whole[:100] + b"garbage" * 20):
        file.write_bytes(broken)
        with pytest.raises(ValueError, match=r"a.jsonl.gz' (cannot be read|line)"):
            Text(str(file), seq_len=8).dataset("train")


def test_packed_text_is_unpacked_or_refused(tmp_path: Path) -> None:
    """Once it was taken as it is: a model was trained on compressed bytes."""
    plain, packed = tmp_path / "a.txt", tmp_path / "a.txt.gz"
    plain.write_text("the cat\nsat\n" * 50)
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert found(packed) == found(plain) == found(tmp_path, pattern="*.gz")
    for content, message in (
        (packed.read_bytes(), "is compressed by gzip"),
        (b"\x28\xb5\x2f\xfd\x24\x10", "is compressed by zstd"),
        (b"PK\x03\x04\x14\0", "is a zip archive"),
        (b"PAR1\x15\x04", "is a Parquet table"),
        (b"a.txt".ljust(257, b"\0") + b"ustar\0", "is a tar archive"),
    ):
        plain.write_bytes(content)
        with pytest.raises(ValueError, match=f"{message}(.|\n)*\n  fix: "):
            text.check(path=str(plain))
    (tmp_path / "more").mkdir()
    for n in range(3):  # the check looks into one file, and reading into all
        (tmp_path / "more" / f"{n}.txt").write_bytes(b"PAR1" if n else b"good text")
    with pytest.raises(ValueError, match=r"txt' is a Parquet table"):
        Text(str(tmp_path / "more"), seq_len=2).dataset("train")
    packed.write_bytes(gzip.compress(b"x" * 5000)[:-12])
    with pytest.raises(ValueError, match=r"a.txt.gz' cannot be read"):
        Text(str(packed), seq_len=2).dataset("train")


def test_linked_folders_are_entered_once(tmp_path: Path) -> None:
    for name in ("root/own/a.txt", "other/b.txt", "other/deep/c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    root = tmp_path / "root"
    (root / "linked").symlink_to(tmp_path / "other")
    (root / "again").symlink_to(root / "own")  # before "own" in the alphabet, and yet that one keeps its name
    (tmp_path / "other" / "loop").symlink_to(root)
    (root / "own" / "up").symlink_to(root)

    def names(pattern: str) -> list[str]:
        return sorted(path.relative_to(root).as_posix() for path in documents.list_files(root, pattern))

    assert names("**/*.txt") == ["linked/b.txt", "linked/deep/c.txt", "own/a.txt"]
    assert names("linked/**/c.*") == ["linked/deep/c.txt"]
    assert names("*/*.txt") == ["again/a.txt", "linked/b.txt", "own/a.txt"], "named, it is taken"


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from(["**", "*", "a", "?", "*.txt", "[ab]"]), min_size=1, max_size=4))
def test_a_pattern_finds_what_glob_finds(tmp_path_factory: pytest.TempPathFactory, parts: list[str]) -> None:
    root = tmp_path_factory.mktemp("tree")
    for name in ("x.txt", "a/x.txt", "a/b/x.txt", "a/b/a/b", "b/.hidden.txt", "b/c/X.TXT"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    pattern = "/".join(parts)
    expected = {path for path in root.glob(pattern) if path.is_file()} if parts[-1] != "**" else set()
    assert sorted(documents.list_files(root, pattern)) == sorted(expected)


def test_what_a_folder_holds_is_found_out(tmp_path: Path, folder: Path) -> None:
    assert found(folder) == found(folder, pattern="**/*.txt")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.md").write_text("a")
    cases: list[tuple[Path, str]] = [
        (tmp_path / "notes", r"(?s)no file that matches .*its files are .md: data.pattern='\*\*/\*.md'")
    ]
    write_lines(folder / "more.jsonl", TEXTS)
    cases += [
        (folder, r"(?s)has both .txt and .jsonl files.*data.pattern='\*\*/\*.txt' or data.pattern='\*\*/\*.jsonl'")
    ]
    prepare(folder / "more.jsonl", tmp_path / "tokens")
    cases += [(tmp_path / "tokens", "is a folder of tokens.*\n  fix: data=tokens")]
    for path, message in cases:
        with pytest.raises(ValueError, match=message):
            text.check(path=str(path))
        with pytest.raises(ValueError, match=message):
            Text(str(path), seq_len=8)
    assert sorted(chain(*found(folder, pattern="*.jsonl").values())) == sorted(TEXTS)
    with pytest.raises(ValueError, match=r"matches .jsonl files and others"):
        Text(str(folder), seq_len=8, pattern="**/*.*").dataset("train")


def test_the_first_json_line_is_looked_at_before_anything_is_started(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"line 1 has no field 'text'.*\n  fix: data.field=body"):
        text.check(path=str(write_lines(tmp_path / "a.jsonl", TEXTS, "body")))
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ValueError, match=r"empty.jsonl' is empty"):
        text.check(path=str(tmp_path / "empty.jsonl"))
