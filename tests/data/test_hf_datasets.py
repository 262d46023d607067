"""Folders that datasets has saved: split as the same documents in JSON lines, or as they were saved."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dtrain.data import text
from dtrain.data.text import Text
from dtrain.data.tokens import Tokens, prepare
from tests.data.test_documents import TEXTS, found, write_lines

datasets = pytest.importorskip("datasets")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    rows = datasets.Dataset.from_dict({"id": list(range(40)), "text": TEXTS})
    rows.save_to_disk(root / "one", num_shards=3)
    rows.with_format("numpy").select(range(39, -1, -1)).save_to_disk(root / "reversed")
    datasets.DatasetDict({"train": rows.select(range(30)), "test": rows.select(range(30, 40))}).save_to_disk(
        root / "both"
    )
    datasets.DatasetDict({"train": rows}).save_to_disk(root / "only")
    datasets.DatasetDict({"test": rows}).save_to_disk(root / "untrained")
    datasets.Dataset.from_dict({"text": ["a", None]}).save_to_disk(root / "gap")
    return root


def test_a_saved_dataset_is_split_as_its_json_lines_would_be(saved: Path, tmp_path: Path) -> None:
    lines = found(write_lines(tmp_path / "a.jsonl", TEXTS), val_fraction=0.2)
    assert found(saved / "one", val_fraction=0.2) == lines
    assert found(saved / "only", val_fraction=0.2) == lines
    backwards = found(saved / "reversed", val_fraction=0.2)
    assert backwards["train"] + backwards["val"] != lines["train"] + lines["val"]
    assert sorted(backwards["train"] + backwards["val"]) == sorted(TEXTS)


def test_splits_that_were_saved_are_kept(saved: Path, tmp_path: Path) -> None:
    assert found(saved / "both", val_fraction=0.5) == {"train": TEXTS[:30], "val": TEXTS[30:]}
    meta = prepare(saved / "both", tmp_path / "out")
    assert (meta["train_documents"], meta["val_documents"]) == (30, 10)
    mapped = Tokens(str(tmp_path / "out"), 8).dataset("val").tokens
    np.testing.assert_array_equal(mapped, Text(str(saved / "both"), 8).dataset("val").tokens)


def test_a_saved_dataset_that_cannot_be_used_is_refused(saved: Path, tmp_path: Path) -> None:
    refused: list[tuple[Path, dict[str, str], str]] = [
        (
            saved / "one",
            {"field": "body"},
            "data.field='body' is not a text column of .* id, text\n  fix: data.field=text",
        ),
        (saved / "one", {"field": "id"}, "data.field='id' is not a text column of"),
        (saved / "untrained", {}, "no split named train, only test\n  fix: data.path=.*untrained/test"),
    ]
    for path, settings, message in refused:
        with pytest.raises(ValueError, match=message):
            text.check(path=str(path), **settings)
    with pytest.raises(ValueError, match=r"row 1 of .*gap' has no text in data.field='text'\n  fix: .*filter"):
        Text(str(saved / "gap"), 8).dataset("train")
    rows = datasets.load_from_disk(str(saved / "one"))
    rows.save_to_disk(tmp_path / "torn", num_shards=2)
    (tmp_path / "torn" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(ValueError, match=r"torn' lacks data-00001-of-00002.arrow"):
        text.check(path=str(tmp_path / "torn"))
    (tmp_path / "torn" / "state.json").write_text("{}")
    with pytest.raises(ValueError, match=r"torn' is damaged .*_data_files"):
        text.check(path=str(tmp_path / "torn"))


def test_without_the_package_the_extra_is_named(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtrain.data.hf_datasets.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'dtrain\[datasets\]'"):
        text.check(path=str(saved / "one"))


def test_a_check_imports_neither_torch_nor_datasets(saved: Path, tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", TEXTS)
    code = f"""
import sys
from dtrain.data import text
for path in ({str(saved / "one")!r}, {str(saved / "both")!r}, {str(tmp_path)!r}):
    assert text.check(path=path) == {{"vocab_size": 256}}
sys.exit("torch" in sys.modules or "datasets" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
