"""Every flipped bit of a checkpoint is detected."""

from __future__ import annotations

import random
from pathlib import Path

from dtrain.checkpoint import integrity, store
from dtrain.checkpoint.store import CheckpointError
from tests.checkpoint.small_state import flip, saved


def test_300_flips_in_a_shard_are_300_detected(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    shard = tmp_path / "step-00000001" / "rank-00000.safetensors"
    rng = random.Random(0)
    detected = 0
    for _ in range(300):
        bit = rng.randrange(shard.stat().st_size * 8)
        flip(shard, bit)
        detected += integrity.verify(tmp_path / "step-00000001") != ""
        flip(shard, bit)
    assert detected == 300
    assert integrity.verify(tmp_path / "step-00000001") == ""


def test_every_flip_in_the_manifest_is_detected_or_harmless(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    path = tmp_path / "step-00000001" / "manifest.json"
    good = store.read_manifest(path.parent)
    for bit in range(0, path.stat().st_size * 8, 5):
        flip(path, bit)
        try:
            assert store.read_manifest(path.parent) == good, f"bit {bit} changed the content unseen"
        except CheckpointError:
            pass
        flip(path, bit)
