"""Lines of the standard library: what each is, no marks that give it away, equally many of each."""

from __future__ import annotations

import numpy as np
import pytest

from dtrain.data import stdlib_lines
from dtrain.data.stdlib_lines import LABELS, SHORTEST, Lines, lines_of

SOURCE = '''"""What this module is for.

    >>> doctest(1)
"""
# a remark about it
#: another remark
total = 1  # both code and remark
text = """a string
# no remark
"""


class Thing:
    "One line."

    def method(self):
        """First.
        Second.
        """
        return f"""{self}
        inside"""
'''


def test_each_line_is_what_it_is() -> None:
    found = {kind: [line for line, k in lines_of(SOURCE) if k == kind and line] for kind in LABELS}
    assert found["docstring"] == ["What this module is for.", "One line.", "First.", "Second."]
    assert found["comment"] == ["a remark about it", "another remark"]
    assert found["code"] == ["class Thing:", "def method(self):"]


def test_the_library_gives_equally_many_of_each_once() -> None:
    data = Lines(seq_len=64, pad_id=0)
    assert data.labels == LABELS
    records = [r for split in data._splits.values() for r in split]
    counts = np.unique([r.label for r in records], return_counts=True)[1]
    assert len(set(counts)) == 1 and counts[0] > 1000
    texts = [r.text for r in records]
    assert len(set(texts)) == len(texts), "so none is on both sides"
    assert all(len(t) >= SHORTEST and t == t.strip() for t in texts)
    assert not [r for r in records if r.label != "docstring" and r.text.startswith("#")]
    val = data.dataset("val")
    assert 0.07 < len(val) / len(records) < 0.13
    assert np.bincount(val.targets[:256]).min() > 60, "the first of them are of all kinds"
    assert data.dataset("train").fingerprint == Lines(64, 0).dataset("train").fingerprint


def test_what_the_model_must_have() -> None:
    assert stdlib_lines.check(seq_len=64, pad_id=0, val_fraction=0.1) == {"vocab_size": 259, "num_classes": 3}
    with pytest.raises(ValueError, match=r"model.pad_id=5: .*\n  fix: model.pad_id=0"):
        stdlib_lines.check(seq_len=64, pad_id=5)
