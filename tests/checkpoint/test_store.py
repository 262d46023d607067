"""Checkpoints: what a save writes, kills at every phase of it, a full disk, another model."""

from __future__ import annotations

import json
import math
import random
import shutil
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from dtrain.checkpoint import integrity, layouts, manifest, ownership, resume_point, shards, store
from dtrain.checkpoint.manifest import Manifest
from dtrain.util import dtensor
from tests.checkpoint.small_state import assert_holds, saved, state
from tests.patience import patience
from tests.world import ROOT, SMALL, make_run, metrics, spawn, start, summary, train

PHASES = ["save.begin", "save.shard", "save.manifest", "save.rename", "save.latest", "save.prune"]
BESIDE = ["save.stage", "save.copied"]  # only where the training goes on meanwhile
BACKGROUND = {"true": [*PHASES, *BESIDE], "false": PHASES}


# ---- what is written -----------------------------------------------------------------------------------------


def test_round_trip_and_latest(tmp_path: Path) -> None:
    saved(tmp_path, 3, 7)
    assert (tmp_path / "latest").read_text() == "step-00000007\n"
    found = resume_point.newest_good(tmp_path)
    assert found is not None and found[1]["step"] == 7 and found[1]["samples"] == 56
    assert_holds(*found, 7.0)
    assert not list(tmp_path.glob(".attempt*"))


def test_files_are_plain_safetensors(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    loaded = load_file(tmp_path / "step-00000001" / "rank-00000.safetensors")
    assert all(torch.equal(loaded[name], t) for name, t in state().items())


def test_nothing_is_pickled(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    assert {p.suffix for p in (tmp_path / "step-00000001").iterdir()} == {".safetensors", ".json"}
    source = "".join(Path(m.__file__ or "").read_text() for m in (store, shards, integrity, ownership, resume_point))
    assert "torch.load" not in source and "pickle.load" not in source and "import pickle" not in source


def test_keep_prunes_the_oldest(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3, 4, keep=2)
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-00000003", "step-00000004"]


def test_a_good_checkpoint_of_the_same_step_stays_and_older_ones_are_pruned(tmp_path: Path) -> None:
    """After a restart a step is saved again, perhaps with other bits: what is there is not compared with these."""
    saved(tmp_path, 1, 2)
    store.save(tmp_path, 2, state(7.0), {"samples": 16, "extra": {}}, keep=1)
    assert [p.name for p in tmp_path.glob("step-*")] == ["step-00000002"]
    assert_holds(tmp_path / "step-00000002", store.read_manifest(tmp_path / "step-00000002"), 2.0)


@given(shape=st.lists(st.integers(1, 6), min_size=1, max_size=3), data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_cut_is_read_as_any_other(
    shape: list[int], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Saved in slabs of one dimension, read in boxes of any kind: the arithmetic of resharding."""
    folder = tmp_path_factory.mktemp("cut")
    whole = torch.randn(shape)
    dim = data.draw(st.integers(0, len(shape) - 1))
    cuts = sorted({0, shape[dim], *data.draw(st.lists(st.integers(0, shape[dim]), max_size=3))})
    pieces, files = [], {}
    for i, (low, high) in enumerate(pairwise(cuts)):
        part = whole.narrow(dim, low, high - low)
        offset = tuple(low if d == dim else 0 for d in range(len(shape)))
        chunk = dtensor.Chunk(part, tuple(shape), offset)
        files[f"rank-{i:05d}.safetensors"] = {"size": 0}
        shards.write(folder / f"rank-{i:05d}.safetensors", {"t": part}, shards.metadata({("t", "t"): chunk}))
        pieces.append((i, offset, tuple(part.shape)))
    box = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    values = torch.full([hi - lo for lo, hi in box], float("nan"))
    target = dtensor.Chunk(values, tuple(shape), tuple(lo for lo, _ in box))
    tensor = manifest.Tensor(tuple(shape), "float32", layouts.of(tuple(shape), pieces))
    with shards.Reader(folder, Manifest({}, files, {"t": tensor})) as reader:
        reader.fill("t", target)
    assert torch.equal(target.values, whole[tuple(slice(lo, hi) for lo, hi in box)])


@given(shape=st.lists(st.integers(1, 5), max_size=4), data=st.data())
@settings(max_examples=200, deadline=None)
def test_a_run_of_elements_is_a_few_boxes(shape: list[int], data: st.DataObject) -> None:
    """DeepSpeed cuts a flattened weight anywhere; boxes of it are what a checkpoint can hold."""
    whole = torch.arange(math.prod(shape), dtype=torch.float32)
    begin, end = sorted(data.draw(st.tuples(*[st.integers(0, whole.numel())] * 2)))
    run = whole[begin:end].clone()
    boxes = dtensor.flat_chunks(run, tuple(shape), begin)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    for box in boxes:
        assert torch.equal(box.values, whole.view(shape)[box.box])
        box.values.neg_()  # the values are views: a load that fills them fills the run
    assert torch.equal(run, -whole[begin:end])


def _save_replicated(folder: Path) -> None:
    store.save(folder, 1, state(), {"extra": {}}, keep=1)


def test_what_all_ranks_hold_is_written_once_and_shared_out(tmp_path: Path) -> None:
    spawn(3, _save_replicated, tmp_path)
    content = store.read_manifest(tmp_path / "step-00000001")
    assert all(len(tensor.layout.ranks) == 1 for tensor in content.tensors.values())
    assert {tensor.layout.ranks[0] for tensor in content.tensors.values()} == {0, 1, 2}
    assert_holds(tmp_path / "step-00000001", content, 1.0)


# ---- kills ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("background, phase", [(b, phase) for b in BACKGROUND for phase in BACKGROUND[b]])
def test_sigkill_at_each_phase_loses_no_acknowledged_checkpoint(background: str, phase: str, tmp_path: Path) -> None:
    options = ("cluster.processes=2", "train.steps=30", "checkpoint.every=2", "checkpoint.keep=1")
    run = make_run(tmp_path / "run", *options, f"checkpoint.background={background}")
    world = start(run, 2, env={"DTRAIN_FAILPOINT": f"{phase}:3"})  # the third save dies; two were acknowledged
    assert -9 in world.join()
    assert summary(run)["status"] == "running"
    good = resume_point.newest_good(run / "checkpoints", lambda text: pytest.fail(text))
    assert good is not None and good[1]["step"] >= 4
    assert train(run, 2) == [0, 0]
    assert summary(run)["start_step"] == good[1]["step"] and summary(run)["steps"] == 30
    assert not list((run / "checkpoints").glob(".attempt*"))


@pytest.mark.timeout(600)  # a minute on a quiet machine
def test_50_random_kills_lose_no_acknowledged_checkpoint(tmp_path: Path) -> None:
    """One run, killed 50 times wherever it is; `latest` is the acknowledgement, and it must hold each time."""
    run = make_run(
        tmp_path / "run", "cluster.processes=2", "train.steps=100000", "checkpoint.every=1", "checkpoint.keep=2"
    )
    rng = random.Random()
    folder = run / "checkpoints"
    reached = 0
    for _ in range(50):
        world = start(run, 2)
        pointer = folder / "latest"
        while not pointer.exists() or int(pointer.read_text()[5:]) <= reached:
            assert world.ranks[0].exitcode is None
            time.sleep(0.002)
        time.sleep(rng.random() * 0.03)  # a step with its save takes about that long
        world.kill()
        acknowledged = int(pointer.read_text()[5:])
        assert acknowledged > reached
        good = resume_point.newest_good(folder, lambda text: pytest.fail(text))
        assert good is not None and good[1]["step"] >= acknowledged
        reached = good[1]["step"]


# ---- what stops a run, with exit code 3 ----------------------------------------------------------------------


def test_a_checkpoint_of_another_model(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "train.steps=2", "cluster.processes=1")
    assert train(run) == [0]
    make_run(run, "train.steps=4", "cluster.processes=1", "model.dim=64")
    assert train(run) == [2]
    note = json.loads((run / "logs" / "failure-0.json").read_text())
    assert "another model: embed.weight has shape [64, 32] in the checkpoint, [64, 64] in the model" in note["message"]
    assert "\n  fix: use the old settings" in note["message"]


@pytest.fixture
def small_disk(tmp_path: Path):
    """A file system of one megabyte, so that full is really full."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize("background", BACKGROUND)
def test_a_full_disk_keeps_the_old_checkpoint_and_says_what_is_needed(background: str, small_disk: Path) -> None:
    options = ("cluster.processes=2", "train.steps=8", "checkpoint.every=2")  # one checkpoint is about 0.4 MB
    run = make_run(small_disk / "run", *options, f"checkpoint.background={background}")
    assert train(run, 2) == [3, 3]
    notes = [json.loads((run / "logs" / f"failure-{r}.json").read_text()) for r in (0, 1)]
    assert all(" is full" in n["message"] and "bytes needed" in n["message"] for n in notes), "agreed by all ranks"
    good = resume_point.newest_good(run / "checkpoints", lambda text: pytest.fail(text))
    assert good is not None and good[1]["step"] >= 2
    assert not list((run / "checkpoints").glob(".attempt*")), "the failed attempt gave its room back"


def test_a_disk_without_a_byte_left_is_exit_code_3_and_says_so(small_disk: Path) -> None:
    run = small_disk / "run"
    command = [
        sys.executable,
        str(ROOT / "launch.py"),
        *SMALL,
        f"run_dir={run}",
        "cluster.processes=1",
        "train.steps=99999",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while not metrics(run):
        assert process.poll() is None
        time.sleep(0.02)
    with open(small_disk / "filler", "wb", buffering=0) as filler:
        try:
            while filler.write(b"0" * 4096):
                pass
        except OSError:
            pass
    output, _ = process.communicate(timeout=patience(60))
    assert process.returncode == 3, output
    assert "disk" in output and "full" in output and "Traceback" not in output


def test_weights_hash_is_of_the_values_not_of_the_layout(tmp_path: Path) -> None:
    hashes = set()
    for i, cuts in enumerate([[0, 5], [0, 2, 5]]):
        folder = tmp_path / str(i) / "step-00000001"
        folder.mkdir(parents=True)
        whole = torch.from_numpy(np.arange(20, dtype=np.float32).reshape(5, 4))
        chunks, files = [], {}
        for j, (low, high) in enumerate(pairwise(cuts)):
            name = f"rank-{j:05d}.safetensors"
            size, digest = shards.write(folder / name, {"model.w": whole[low:high]}, {})
            files[name] = {"size": size, "sha256": digest}
            chunks.append({"file": name, "offset": [low, 0], "shape": [high - low, 4]})
        tensors = {"model.w": {"shape": [5, 4], "dtype": "float32", "chunks": chunks}}
        store.write_manifest(folder, {"format": "dtrain-1", "step": 1, "files": files, "tensors": tensors})
        hashes.add(store.weights_sha256(folder))
    assert len(hashes) == 1
    shutil.rmtree(tmp_path / "0")
