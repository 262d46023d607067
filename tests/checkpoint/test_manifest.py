"""Manifests as untrusted input: each fault falls back to the older checkpoint, and no mutation gives other weights."""

from __future__ import annotations

import copy
import json
import math
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dtrain.checkpoint import integrity, manifest, resume_point, shards, store
from dtrain.checkpoint.store import CheckpointError
from dtrain.util import dtensor
from tests.world import ROOT, make_run, metrics, spawn, summary, train

OLD_RUNS = ROOT / "tests" / "old_runs"
META: dict[str, Any] = {
    "run": "a" * 32, "samples": 8, "data": "10 samples",
    "extra": {"optimizer": {"weight": {"step": 3.0}}, "precision": {"scale": 1.0, "good_steps": 0}},
}  # fmt: skip
NEEDED = ("samples", "data", "extra", "extra.optimizer", "extra.precision")


def state(scale: float) -> dict[str, torch.Tensor]:
    """Every tensor has a shape of its own, so that no two can be exchanged unseen."""
    return {
        "model.weight": torch.arange(35.0).reshape(5, 7) * scale,
        "model.half": torch.arange(6, dtype=torch.bfloat16) * scale,
        "model.scalar": torch.tensor(3.5 * scale),
        "optim.weight.exp_avg": torch.arange(36.0).reshape(4, 9) * scale,
    }


def sharded(scale: float) -> dict[str, Any]:
    """What one of two ranks holds: rows of some, all of others, a run of the flattened last one."""
    from dtrain.util.collective import rank

    r, whole = rank(), state(scale)
    rows = [slice(0, 3), slice(3, 5)][r]
    run = whole["optim.weight.exp_avg"].flatten()[[slice(0, 13), slice(13, 36)][r]].clone()
    return whole | {
        "model.weight": [dtensor.Chunk(whole["model.weight"][rows].clone(), (5, 7), (3 * r, 0))],
        "optim.weight.exp_avg": dtensor.flat_chunks(run, (4, 9), 13 * r),
    }


def save_both(folder: Path) -> None:
    for step in (1, 2):
        store.save(folder, step, sharded(float(step)), META, keep=10)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of two ranks."""
    folder = tmp_path_factory.mktemp("good") / "checkpoints"
    spawn(2, save_both, folder)
    return folder


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "checkpoints"))


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest as an attacker would: with the right checksum."""
    values = json.loads((path / "manifest.json").read_text())
    change(values)
    store.write_manifest(path, values)


def loaded(folder: Path, say: Callable[[str], object] = lambda text: None) -> float:
    """The scale of the checkpoint that a run would resume from, all of its values checked."""
    (folder.parent / "launch.json").write_text(json.dumps({"id": "a" * 32}))
    found = resume_point.newest_good(folder, say, needed=NEEDED)
    assert found is not None
    target = {name: torch.full_like(t, 77.0) for name, t in state(0.0).items()}
    store.load(*found, target)
    scale = float(target["model.scalar"]) / 3.5
    assert all(torch.equal(target[name], t) for name, t in state(scale).items()), "values of no checkpoint"
    return scale


def test_what_two_ranks_saved_is_read_whole(folder: Path) -> None:
    saved = store.read_manifest(folder / "step-00000002")
    kinds = {name: tensor.layout.kind for name, tensor in saved.tensors.items()}
    assert kinds == {
        "model.weight": "grid",
        "model.half": "grid",
        "model.scalar": "grid",
        "optim.weight.exp_avg": "runs",
    }
    assert loaded(folder) == 2.0


# ---- the faults that were found, each falls back -------------------------------------------------------------


def drop(*keys: str) -> Callable[[dict[str, Any]], None]:
    def change(values: dict[str, Any]) -> None:
        for key in keys[:-1]:
            values = values[key]
        del values[keys[-1]]

    return change


def rename_file(to: str) -> Callable[[dict[str, Any]], None]:
    def change(values: dict[str, Any]) -> None:
        values["files"] = {to if i == 0 else name: f for i, (name, f) in enumerate(values["files"].items())}

    return change


FAULTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "no samples": drop("samples"), "no data": drop("data"), "no extra": drop("extra"), "no step": drop("step"),
    "no files": drop("files"), "no tensors": drop("tensors"), "no layouts": drop("layouts"),
    "no precision": drop("extra", "precision"), "no counts": drop("extra", "optimizer", "weight"),
    "a tensor that is not there": lambda v: v["tensors"].update(more=v["tensors"]["model.weight"]),
    "a tensor too few": drop("tensors", "model.half"),
    "a name that leads out": rename_file("../step-00000001/rank-00000.safetensors"),
    "an absolute name": rename_file("/dev/zero"),
    "another layout": lambda v: v["tensors"]["model.weight"].update(layout=v["tensors"]["model.scalar"]["layout"]),
    "a layout of a rank without files": lambda v: [layout["ranks"].__setitem__(0, 7) for layout in v["layouts"]],
    "a larger shape": lambda v: v["tensors"]["model.weight"].update(shape=[50_000_000, 7]),
    "another dtype": lambda v: v["tensors"]["model.weight"].update(dtype="float64"),
    "steps of a fraction": lambda v: v.update(step=2.5), "true for a step": lambda v: v.update(step=True),
    "samples below zero": lambda v: v.update(samples=-1), "another step": lambda v: v.update(step=9),
    "an unknown format": lambda v: v.update(format="zip"),
    "a loss scale of zero": lambda v: v["extra"]["precision"].update(scale=0),
    "classes that are no names": lambda v: v.update(classes=["cat", 1]),
    "spikes without a norm": lambda v: v.update(spikes={"recent": [[1, 2.0]]}),
    "samples to pass over that are text": lambda v: v.update(
        spikes={"passed_over": [{"step": 1, "begin": "0", "end": 8}]}
    ),
    "counts that are text": lambda v: v["extra"]["optimizer"].update(weight={"step": "3"}),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_manifest_that_no_save_writes_falls_back(fault: str, folder: Path) -> None:
    rewrite(folder / "step-00000002", FAULTS[fault])
    said: list[str] = []
    assert loaded(folder, said.append) == 1.0
    assert "step-00000002 is damaged" in said[0] and list(folder.glob("step-00000002.corrupt-*"))


def replace(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "step-00000002" / name
        path.unlink()
        make(path)

    return change


def sparse(path: Path) -> None:
    """20 GB that take no room, with a header of nearly as much."""
    with open(path, "wb") as file:
        file.write((20 * 10**9 - 8).to_bytes(8, "little"))
        file.truncate(20 * 10**9)


SHARD = "rank-00000.safetensors"
ON_DISK: dict[str, Callable[[Path], object]] = {
    "manifest is a FIFO": replace("manifest.json", os.mkfifo),
    "manifest is a device": replace("manifest.json", lambda p: p.symlink_to("/dev/zero")),
    "manifest is a folder": replace("manifest.json", Path.mkdir),
    "manifest is deep": replace("manifest.json", lambda p: p.write_text("[" * 200_000)),
    "manifest is a deep object": replace("manifest.json", lambda p: p.write_text('{"a":' * 200_000)),
    "manifest is large": replace("manifest.json", lambda p: os.truncate(os.open(p, os.O_CREAT | os.O_WRONLY), 10**10)),
    "manifest is not UTF-8": replace("manifest.json", lambda p: p.write_bytes(b"\xff\xfe\x00")),
    "shard is a FIFO": replace(SHARD, os.mkfifo),
    "shard is a device": replace(SHARD, lambda p: p.symlink_to("/dev/zero")),
    "shard is a link": replace(SHARD, lambda p: p.symlink_to(p.parent.parent / "step-00000001" / SHARD)),
    "shard is a folder": replace(SHARD, Path.mkdir),
    "shard is sparse": replace(SHARD, sparse),
    "shard is empty": replace(SHARD, Path.touch),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("fault", ON_DISK)
def test_what_is_no_regular_file_of_its_size_falls_back(fault: str, folder: Path) -> None:
    ON_DISK[fault](folder)
    assert loaded(folder) == 1.0


def test_a_sparse_shard_is_refused_by_its_header_and_not_hashed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sparse(folder / "step-00000002" / SHARD)
    rewrite(folder / "step-00000002", lambda v: v["files"][SHARD].update(size=20 * 10**9))
    monkeypatch.setattr(shards, "sha256", lambda path: pytest.fail("hashing 20 GB takes 17 s"))
    assert "header" in integrity.verify(folder / "step-00000002")


def test_strays_and_renamed_folders_do_not_win(folder: Path) -> None:
    (folder / "step-00000099").write_text("a file")
    (folder / "step-12").mkdir()
    (folder / "step-²²²²²²²²").mkdir()
    (folder / ("step-" + "9" * 5000)[:200]).mkdir()
    shutil.copytree(folder / "step-00000001", folder / "step-00000050")  # an older one under a newer name
    said: list[str] = []
    assert loaded(folder, said.append) == 2.0
    assert len(said) == 1 and "step-00000050 is damaged (its folder name does not match its step, 1)" in said[0]


def test_a_checkpoint_of_another_run_is_left_alone(folder: Path) -> None:
    rewrite(folder / "step-00000002", lambda v: v.update(run="b" * 32))
    said: list[str] = []
    assert loaded(folder, said.append) == 1.0
    assert "was saved by another run" in said[0] and (folder / "step-00000002").is_dir()
    rewrite(folder / "step-00000001", lambda v: v.update(run="b" * 32))
    with pytest.raises(CheckpointError, match=r"was saved by another run.*init_from="):
        loaded(folder)


def test_a_run_saves_its_id_and_refuses_the_checkpoints_of_another(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "cluster.processes=1", "train.steps=4", "train.stop_after=2")
    (run / "launch.json").write_text('{"id": "mine"}')
    assert train(run) == [0]
    assert store.read_manifest(run / "checkpoints" / "step-00000002")["run"] == "mine"
    make_run(run, "cluster.processes=1", "train.steps=4")
    (run / "launch.json").write_text('{"id": "another"}')
    assert train(run) == [3]
    assert "saved by another run" in json.loads((run / "logs" / "failure-0.json").read_text())["message"]


@pytest.mark.parametrize("how", ["hash", "compare"])
def test_a_read_back_comes_from_the_disk(how: str, tmp_path: Path) -> None:
    """Of pages that the kernel has in memory, none is left when the read begins."""
    path = tmp_path / "shard"
    tensors = {"a": torch.rand(2**20), "b": torch.arange(3)}
    size, digest = shards.write(path, tensors, {})
    assert path.stat().st_size == size > 2**22

    def read_from_disk() -> int:
        lines = Path("/proc/self/io").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])

    try:
        before = read_from_disk()
    except OSError:
        pytest.skip("this kernel does not say what was read from the disk")
    if os.statvfs(tmp_path).f_fsid == os.statvfs("/dev/shm").f_fsid:
        pytest.skip("a file system in memory has no disk to read from")
    assert shards.sha256(path) == digest if how == "hash" else not shards.differing(path, tensors, {})
    assert read_from_disk() - before >= 2**22


@pytest.mark.parametrize("block", [7, 64, 8 * 2**20])
def test_a_file_is_compared_with_its_tensors_to_the_last_byte(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "BLOCK", block)
    path, tensors = tmp_path / "shard", {"a": torch.tensor([1.0, math.nan]), "none": torch.empty(0), "b": torch.ones(3)}
    shards.write(path, tensors, {"boxes": "{}"})
    data = path.read_bytes()
    assert data == bytes(shards.header(tensors, {"boxes": "{}"})) + b"".join(
        t.numpy().tobytes() for t in tensors.values()
    )
    assert not shards.differing(path, tensors, {"boxes": "{}"})
    for i in range(len(data)):
        path.write_bytes(data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :])
        assert shards.differing(path, tensors, {"boxes": "{}"}), i
    for other in (data[:-1], data + b"x", b""):
        path.write_bytes(other)
        assert shards.differing(path, tensors, {"boxes": "{}"})


# ---- the first format ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["fsdp", "zero1"])
def test_a_run_of_an_older_version_resumes(strategy: str, tmp_path: Path) -> None:
    """Checkpoint and config.yaml were written at 1884d17, by two ranks. It continues on one and on two."""
    stored = json.loads((OLD_RUNS / strategy / "summary.json").read_text())
    ends = []
    for size in (1, 2):
        run = Path(shutil.copytree(OLD_RUNS / strategy, tmp_path / str(size)))
        assert store.weights_sha256(run / "checkpoints" / "step-00000002") == stored["weights_sha256"]
        options = ["model.num_layers=2", "model.dim=8", "model.num_heads=2", "train.steps=4"]
        make_run(run, *options, "checkpoint.every=2", f"strategy={strategy}", f"cluster.processes={size}")
        assert train(run, size) == [0] * size
        assert summary(run)["start_step"] == 2 and summary(run)["steps"] == 4
        ends.append([row["loss"] for row in metrics(run) if "loss" in row])
    assert ends[0] == pytest.approx(ends[1], abs=1e-5)


@pytest.mark.parametrize("fault", ["no chunks", "a chunk too few", "a chunk twice", "../", "/etc/hostname", "a key"])
def test_the_first_format_is_checked_as_well(fault: str, tmp_path: Path) -> None:
    path = Path(shutil.copytree(OLD_RUNS / "fsdp" / "checkpoints", tmp_path / "checkpoints")) / "step-00000002"
    assert integrity.verify(path) == ""

    def change(values: dict[str, Any]) -> None:
        chunks = values["tensors"]["model.layers.0.mlp.up.weight"]["chunks"]
        if fault == "no chunks":
            chunks.clear()
        elif fault == "a chunk too few":
            chunks.pop()
        elif fault == "a chunk twice":
            chunks.append(chunks[0])
        elif fault == "a key":
            chunks[0]["key"] = "model.layers.0.mlp.up.bias"
        else:
            chunks[0]["file"] = fault + SHARD if fault == "../" else fault

    rewrite(path, change)
    assert integrity.verify(path) != ""


# ---- fuzz ----------------------------------------------------------------------------------------------------

JUNK: list[Any] = [
    None, True, False, -1, 0, 1, 2**31, 2**63, 10**400, 0.5, 1e308, "", "x", "../x", "/dev/zero", SHARD, "a" * 5000,
    "dtrain-1", "float64", "\x00", [], {}, [[]], [0], [2**62] * 16, [{}], {"": {}},
    {"ranks": [0], "boxes": [[[0], [1]]]},
    {"ranks": [0], "grid": [[0, 5], [0, 7]]}, {"ranks": [0], "runs": [[0, 35]]},
]  # fmt: skip


def mutated(values: Any, rng: random.Random) -> Any:
    """One place of a JSON tree, at any depth, is removed, doubled, moved or replaced by something else."""
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
            places.append((node, key))
            walk(node[key])

    walk(values)
    parent, key = rng.choice(places)
    kind = rng.randrange(6)
    if kind == 0:
        del parent[key]
    elif kind == 1 and isinstance(parent[key], int) and not isinstance(parent[key], bool):
        parent[key] += rng.choice([-1, 1, 7, -(2**40), 2**40])
    elif kind == 2:  # of somewhere else in the tree
        other, there = rng.choice(places)
        parent[key] = json.loads(json.dumps(other[there])) if there in other or isinstance(other, list) else 0
    elif kind == 3 and isinstance(parent, dict):
        parent[rng.choice([str(key) + "x", "../" + str(key), "", "rank-00009.safetensors"])] = parent.pop(key)
    elif kind == 4 and isinstance(parent, list):
        parent.append(parent[key])
    else:
        parent[key] = copy.deepcopy(rng.choice(JUNK))
    return values


def fuzz(good: Path, tmp_path: Path, seeds: range) -> dict[str, int]:
    """How often each outcome came: the newer checkpoint, the older one, an error. Anything else fails."""
    outcomes = {"newer": 0, "older": 0, "refused": 0}
    text = (good / "step-00000002" / "manifest.json").read_text()
    for seed in seeds:
        rng = random.Random(seed)
        folder = tmp_path / str(seed)
        shutil.copytree(good, folder)
        values = json.loads(text)
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            values = mutated(values, rng)
        path = folder / "step-00000002"
        if isinstance(values, dict) and rng.random() < 0.9:
            values["sha256"] = manifest.checksum(values)
        (path / "manifest.json").write_text(json.dumps(values))
        try:
            scale = loaded(folder)
            outcomes["newer" if scale == 2.0 else "older"] += 1
            assert scale in (1.0, 2.0), seed
        except CheckpointError:  # a format of a newer version, or of another run: said, and nothing is loaded
            outcomes["refused"] += 1
        shutil.rmtree(folder)
    return outcomes


def test_no_mutation_of_a_manifest_gives_other_weights(good: Path, tmp_path: Path) -> None:
    outcomes = fuzz(good, tmp_path, range(200))
    assert outcomes["older"] > 100 and outcomes["refused"] < 5, outcomes


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_mutation_of_a_manifest_gives_other_weights_in_6800_tries(good: Path, tmp_path: Path) -> None:
    outcomes = fuzz(good, tmp_path, range(200, 7000))
    assert outcomes["older"] > 3000 and outcomes["refused"] < 120, outcomes


# ---- beside the checkpoints of another run -------------------------------------------------------------------


def test_a_run_neither_counts_nor_deletes_nor_takes_what_another_run_saved(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    (tmp_path / "launch.json").write_text('{"id": "another"}')
    for step in (100, 900):
        store.save(folder, step, state(9.0), {}, keep=9)
    (tmp_path / "launch.json").write_text('{"id": "mine"}')
    for step in (50, 75, 100):  # the last one where the other run has one, too
        store.save(folder, step, state(float(step)), {}, keep=2)
    own = {"step-00000075", "step-00000100"}
    assert {p.name for p in folder.glob("step-????????")} == {*own, "step-00000900"}
    assert len(list(folder.glob("step-00000100.other-run-*"))) == 1
    found = resume_point.newest_good(folder, lambda text: None)
    assert found is not None and found[0].name == "step-00000100" and found[1]["run"] == "mine"
    target = {name: torch.zeros_like(t) for name, t in state(0.0).items()}
    store.load(*found, target)
    assert torch.equal(target["model.weight"], state(100.0)["model.weight"])


def test_what_a_load_would_call_damaged_is_never_saved(tmp_path: Path) -> None:
    saved_first = store.save(tmp_path, 1, state(1.0), {}, keep=2)
    with pytest.raises(CheckpointError, match="samples is not a whole number"):
        store.save(tmp_path, 2, state(2.0), {"samples": -1}, keep=2)
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == [saved_first.name]
    own = {"extra": {"precision": {"scale": 2.0, "growth_tracker": 3}}}  # of a precision that is a user's
    store.save(tmp_path, 3, state(3.0), own, keep=2)
    assert resume_point.newest_good(tmp_path, pytest.fail) is not None


def test_a_box_of_other_dimensions_falls_back(folder: Path) -> None:
    """In the header of a shard, with the right checksums everywhere."""
    path = folder / "step-00000002"
    values = {name: t.clone() for name, t in state(2.0).items()}
    chunks = {(n, n): dtensor.Chunk(t, tuple(t.shape), (0,) * t.dim()) for n, t in values.items()}
    flat = values["optim.weight.exp_avg"].flatten()
    chunks["optim.weight.exp_avg", "optim.weight.exp_avg"] = dtensor.Chunk(flat, (4, 9), (0,))
    for file in path.glob("*.safetensors"):
        file.unlink()
    size, digest = shards.write(path / SHARD, {k: c.values for (_, k), c in chunks.items()}, shards.metadata(chunks))
    rewrite(path, lambda v: v.update(files={SHARD: {"size": size, "sha256": digest}}, layouts=[
        {"ranks": [0], "grid": [[0, n] for n in tensor["shape"]]} if name != "optim.weight.exp_avg" else
        {"ranks": [0], "runs": [[0, 36]]} for name, tensor in v["tensors"].items()
    ]))  # fmt: skip
    rewrite(path, lambda v: [spec.update(layout=i) for i, spec in enumerate(v["tensors"].values())])
    assert loaded(folder) == 1.0


# ---- nothing else is wrong: without the check, the newer checkpoint would be taken ------------------------------


@pytest.mark.parametrize("absolute", [False, True])
def test_a_file_elsewhere_with_the_right_bytes_falls_back(absolute: bool, folder: Path) -> None:
    path, elsewhere = folder / "step-00000002", folder.parent / SHARD
    shutil.move(path / SHARD, elsewhere)
    name = str(elsewhere) if absolute else f"../../{SHARD}"
    rewrite(path, lambda v: v["files"].update({name: v["files"].pop(SHARD)}))
    assert "is not a valid name of a checkpoint file" in integrity.verify(path)
    assert loaded(folder) == 1.0


@pytest.mark.parametrize("name", ["manifest.json", SHARD])
def test_a_link_to_the_right_bytes_falls_back(name: str, folder: Path) -> None:
    path, elsewhere = folder / "step-00000002", folder.parent / name
    shutil.move(path / name, elsewhere)
    (path / name).symlink_to(elsewhere)
    assert "a symbolic link" in integrity.verify(path)
    assert loaded(folder) == 1.0


def test_a_manifest_that_is_too_large_is_not_read(folder: Path) -> None:
    path = folder / "step-00000002"
    os.truncate(path / "manifest.json", 3 * manifest.BASE_BYTES)
    assert "more than any save writes" in integrity.verify(path)


def test_a_manifest_without_the_file_of_a_rank_falls_back(folder: Path) -> None:
    """No file is left that could disagree with the layouts; a load would look for what rank 1 wrote."""
    rewrite(folder / "step-00000002", drop("files", "rank-00001.safetensors"))
    assert "a rank without files" in integrity.verify(folder / "step-00000002")
    assert loaded(folder) == 1.0


def test_tensors_that_the_files_cannot_hold_are_refused_by_the_manifest_alone(folder: Path) -> None:
    """With a layout that covers them: nothing of such a shape is allocated for a reader that has not hashed."""

    def change(values: dict[str, Any]) -> None:
        values["layouts"].append({"ranks": [0], "grid": [[0, 50_000_000], [0, 7]]})
        values["tensors"]["model.weight"] |= {"shape": [50_000_000, 7], "layout": len(values["layouts"]) - 1}

    rewrite(folder / "step-00000002", change)
    with pytest.raises(manifest.Damaged, match="larger than the files"):
        store.read_manifest(folder / "step-00000002")
