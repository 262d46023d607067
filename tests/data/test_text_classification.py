"""Texts and their classes: the split, the marks around texts, cutting and padding, and files that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.data import text_classification
from dtrain.data.text_classification import BYTE_CLS, BYTE_PAD, BYTE_SEP, Labelled, Record, cut, split
from tests.data.test_masked_lm import bert_tokenizer  # noqa: F401  (a fixture)

ROWS = [{"text": f"text number {n}", "label": ("no", "yes", "maybe")[n % 3]} for n in range(60)]


def write(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def rows_of(data: Labelled, split: str) -> list[tuple[list[int], int]]:
    dataset = data.dataset(split)
    inputs, targets = dataset.batch(np.arange(len(dataset)))
    return list(zip(inputs.tolist(), targets.tolist(), strict=True))


def test_bytes_between_marks_padded_to_one_length(tmp_path: Path) -> None:
    data = Labelled(str(write(tmp_path / "a.jsonl", ROWS)), seq_len=20, pad_id=0, val_fraction=0.2)
    assert data.labels == ["maybe", "no", "yes"] and data.vocab_size == 259
    found = rows_of(data, "train") + rows_of(data, "val")
    expected = [
        ([BYTE_CLS, *r["text"].encode(), BYTE_SEP] + [BYTE_PAD] * (18 - len(r["text"])), data.labels.index(r["label"]))
        for r in ROWS
    ]
    assert sorted(found) == sorted(expected)
    assert 1 <= len(data.dataset("val")) <= 25
    assert data.dataset("train").batch(np.array([0]))[0].dtype == torch.int64
    assert text_classification.check(str(tmp_path / "a.jsonl"), 20, 0) == {"vocab_size": 259, "num_classes": 3}


def test_a_text_stays_on_its_side_whatever_else_is_there() -> None:
    records = [Record(f"text {n}", None, n % 2) for n in range(200)]
    sides = split(records, 0.1)
    assert 5 <= len(sides["val"]) <= 40 and len(sides["train"]) + len(sides["val"]) == 200
    again = split([*records[::-1], *records[:50], *[Record(f"other {n}", None, 0) for n in range(100)]], 0.1)
    extreme = {min(records, key=text_classification.share_of), max(records, key=text_classification.share_of)}
    assert set(sides["val"]) - extreme <= set(again["val"]) and set(sides["train"]) - extreme <= set(again["train"])
    assert not set(again["train"]) & set(again["val"]), "copies are on one side"
    assert again["val"] == sorted(again["val"], key=text_classification.share_of), "and not in the order of the file"


@settings(deadline=None, max_examples=30)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=2, unique=True))
def test_neither_side_is_ever_empty(texts: list[str]) -> None:
    sides = split([Record(text, None, 0) for text in texts], 0.1)
    assert sides["train"] and sides["val"] and len(sides["train"]) + len(sides["val"]) == len(texts)


@settings(deadline=None)
@given(st.integers(0, 50), st.integers(0, 50), st.integers(2, 60))
def test_the_longer_of_two_texts_is_cut(first: int, second: int, room: int) -> None:
    a, b = cut(first, second, room)
    assert a <= first and b <= second and a + b == min(room, first + second)
    if a < first and b < second:
        assert abs(a - b) <= 1
    elif a < first:
        assert b <= a + 1
    elif b < second:
        assert a <= b + 1


def test_pairs_have_segments(tmp_path: Path) -> None:
    rows = [{"text": "abc", "text_pair": "defgh", "label": 7}, {"text": "x", "text_pair": "y", "label": 2}] * 2
    for name in ("train", "val"):
        write(tmp_path / f"{name}.jsonl", rows)
    data = Labelled(str(tmp_path), seq_len=9, pad_id=0)
    assert data.labels == [2, 7]
    found = dict((target, np.array(sample)) for s in ("train", "val") for sample, target in rows_of(data, s))
    assert found[1][:, 0].tolist() == [BYTE_CLS, *b"abc", BYTE_SEP, *b"def", BYTE_SEP], "cut from 5 bytes to 3"
    assert found[1][:, 1].tolist() == [0] * 5 + [1] * 4
    assert found[0][:, 0].tolist() == [BYTE_CLS, *b"x", BYTE_SEP, *b"y", BYTE_SEP, 0, 0, 0, 0]
    assert found[0][:, 1].tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 0]


def test_a_tokenizer_brings_its_own_marks(tmp_path: Path, bert_tokenizer: str) -> None:  # noqa: F811
    rows = [{"text": "the cat sat", "label": "a"}, {"text": "number and cat", "label": "b"}]
    for name in ("train", "val"):
        write(tmp_path / f"{name}.jsonl", rows)
    path = str(tmp_path)
    data = Labelled(path, 6, pad_id=1, tokenizer=bert_tokenizer)
    found = {target: sample for s in ("train", "val") for sample, target in rows_of(data, s)}
    assert found[0] == [2, *data.tokenizer.encode("the cat sat"), 3, 1]
    assert text_classification.check(path, 6, 1, bert_tokenizer) == {"vocab_size": 15, "num_classes": 2}
    with pytest.raises(ValueError, match=r"(?s)model.pad_id=0: .*fix: model.pad_id=1"):
        text_classification.check(path, 6, 0, bert_tokenizer)


def test_a_tokenizer_without_the_marks_is_refused(tmp_path: Path, tokenizer_file: str) -> None:
    with pytest.raises(ValueError, match=r"(?s)has no token \[CLS\] or \[SEP\] or \[PAD\]\n  fix: "):
        text_classification.check(str(write(tmp_path / "a.jsonl", ROWS)), 16, 0, tokenizer_file)


def test_a_folder_has_its_own_split(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", ROWS[:50])
    write(tmp_path / "val.jsonl", ROWS[50:])
    data = Labelled(str(tmp_path), 16, 0)
    assert (len(data.dataset("train")), len(data.dataset("val"))) == (50, 10)
    before = data.dataset("train").fingerprint
    write(tmp_path / "train.jsonl", [ROWS[0] | {"label": "yes"}, *ROWS[1:50]])
    assert Labelled(str(tmp_path), 16, 0).dataset("train").fingerprint != before, "the label is data, too"
    write(tmp_path / "val.jsonl", [{"text": "x", "label": "new"}])
    with pytest.raises(ValueError, match=r"val.jsonl has the label 'new', which train.jsonl does not have"):
        text_classification.check(str(tmp_path), 16, 0)
    (tmp_path / "val.jsonl").unlink()
    with pytest.raises(ValueError, match=r"is a folder without val.jsonl"):
        text_classification.check(str(tmp_path), 16, 0)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{no json", "line 4 of a.jsonl is not JSON"),
        ("[" * 100_000, "line 4 of a.jsonl is not JSON"),
        ("[1, 2]", "line 4 of a.jsonl is not an object"),
        ({"text": 5, "label": "no"}, "line 4 of a.jsonl: text must be text, and not empty"),
        ({"text": "", "label": "no"}, "line 4 of a.jsonl: text must be text, and not empty"),
        ({"label": "no"}, "line 4 of a.jsonl: text must be text"),
        ({"text": "a"}, "line 4 of a.jsonl: label must be text or a whole number"),
        ({"text": "a", "label": 0.5}, "line 4 of a.jsonl: label must be text or a whole number"),
        ({"text": "a", "label": True}, "line 4 of a.jsonl: label must be text or a whole number"),
        ({"text": "a", "label": 3}, "line 4 of a.jsonl: labels must be all text or all numbers"),
        (
            {"text": "a", "text_pair": "b", "label": "no"},
            "line 4 of a.jsonl: text_pair must be in all lines, or in none",
        ),
        ({"text": "a", "text_pair": 1, "label": "no"}, "line 4 of a.jsonl: text_pair must be text"),
        ({"text": "a\ud800", "label": "no"}, "line 4 of a.jsonl: text has a lone surrogate"),
        ({"text": "a\0", "label": "no"}, "line 4 of a.jsonl: text has a NUL character"),
    ],
)
def test_bad_lines_are_refused_by_number(row: Any, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [*ROWS[:2], "", row, *ROWS[2:]])
    with pytest.raises(ValueError) as error:
        text_classification.check(str(path), 16, 0)
    assert message in str(error.value) and "\n  fix: " in str(error.value)


def test_what_cannot_work_is_refused(tmp_path: Path) -> None:
    path = str(write(tmp_path / "a.jsonl", ROWS))
    for arguments, message in (
        ((str(tmp_path / "no.jsonl"), 16, 0), "does not exist"),
        ((path, 2, 0), "model.seq_len=2: must be at least 3"),
        ((path, 16, None), r"(?s)model.pad_id=null: .*fix: model.pad_id=0"),
        ((path, 16, 0, None, 1.5), "data.val_fraction=1.5"),
        ((str(write(tmp_path / "b.jsonl", [])), 16, 0), "has no train samples"),
        ((str(write(tmp_path / "c.jsonl", ROWS[:1] * 5)), 16, 0), "has no val samples"),
        ((str(write(tmp_path / "f.jsonl", ROWS[:3])), 16, 0), "has no val samples"),  # one of each class
        ((str(write(tmp_path / "d.jsonl", ROWS[::3])), 16, 0), "all texts have the label 'no'"),
    ):
        with pytest.raises(ValueError, match=message):
            text_classification.check(*arguments)  # type: ignore[arg-type]
    (tmp_path / "e.jsonl").write_bytes(b'{"text": "caf\xe9", "label": 1}\n')
    with pytest.raises(ValueError, match=r"line 1 of e.jsonl is not JSON \('utf-8'"):
        text_classification.check(str(tmp_path / "e.jsonl"), 16, 0)


def test_a_class_of_few_texts_is_trained(tmp_path: Path) -> None:
    """Held out by their hashes, all of a rare class could be in val, and nobody would ever learn it."""
    rare = min((f"rare {n}" for n in range(50)), key=lambda t: text_classification.share_of(Record(t, None, "rare")))
    sides = split([Record(r["text"], None, r["label"]) for r in ROWS] + [Record(rare, None, "rare")], 0.1)
    assert {r.label for r in sides["train"]} == {"no", "yes", "maybe", "rare"} and sides["val"]


def test_a_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    read_records = text_classification.read_records
    monkeypatch.setattr(text_classification, "read_records", lambda file: read.append(file) or read_records(file))  # type: ignore[func-returns-value]
    data = Labelled(str(write(tmp_path / "a.jsonl", ROWS)), 16, 0)
    assert len(data.dataset("train")) + len(data.dataset("val")) == 60 and len(read) == 1
