"""Incremental saves: unchanged files are links, every checkpoint is complete, and a crash loses nothing."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from dtrain.checkpoint import incremental, integrity, manifest, rank_files, resume_point, store
from dtrain.checkpoint.background import Saver
from dtrain.checkpoint.incremental import Links
from dtrain.commands.verify import compare
from dtrain.util.dtensor import Chunk
from tests.world import make_run, spawn, start, summary, train

META: dict[str, Any] = {"samples": 8, "extra": {}}
State = dict[str, torch.Tensor]
FROZEN = "rank-00000-8.safetensors"


def state(value: float, frozen: float = 1.0) -> State:
    return {
        "model.embed": torch.full((300, 70), frozen),  # larger than its sample
        "model.weight": torch.full((5, 7), value),
        "optim.weight.exp_avg": torch.full((5, 7), value / 2),
    }


def content(path: Path, like: State) -> State:
    target = {name: torch.zeros_like(t) for name, t in like.items()}
    store.load(path, store.read_manifest(path), target)
    return target


def assert_holds(path: Path, expected: State) -> None:
    assert not integrity.verify(path)
    found = content(path, expected)
    assert all(torch.equal(found[name], t) for name, t in expected.items())


def inode(folder: Path, step: int, file: str = FROZEN) -> int:
    return (folder / f"step-{step:08d}" / file).stat().st_ino


def flip(path: Path) -> None:
    with open(path, "r+b") as file:  # as bit rot does: the inode stays the same
        file.seek(-9, os.SEEK_END)
        byte = file.read(1)
        file.seek(-9, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))


# ---- what is linked ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("background", [True, False])
def test_what_stays_the_same_is_written_once_and_every_checkpoint_is_complete(background: bool, tmp_path: Path) -> None:
    with Saver(tmp_path, keep=9, background=background, incremental=9) as saver:
        for step in (1, 2, 3):
            saver.save(step, state(float(step)), META)
        saver.wait()
    assert inode(tmp_path, 1) == inode(tmp_path, 2) == inode(tmp_path, 3)
    assert len({inode(tmp_path, step, "rank-00000.safetensors") for step in (1, 2, 3)}) == 3
    first, second, third = saver.finished()
    assert first["save_linked_gib"] == 0 < second["save_linked_gib"] == third["save_linked_gib"]
    assert first["save_gib"] == pytest.approx(second["save_gib"] + second["save_linked_gib"])
    assert saver.totals["save_linked_gib"] == pytest.approx(2 * second["save_linked_gib"])
    shutil.rmtree(tmp_path / "step-00000001")
    for step in (2, 3):
        assert_holds(tmp_path / f"step-{step:08d}", state(float(step)))


def test_every_nth_save_writes_all(tmp_path: Path) -> None:
    links = Links(3)
    for step in range(1, 8):
        store.save(tmp_path, step, state(float(step)), META, 9, links)
    files = [inode(tmp_path, step) for step in range(1, 8)]
    assert [files.index(file) for file in files] == [0, 0, 0, 3, 3, 3, 6], "shared by three at most"


def test_off_is_as_before(tmp_path: Path) -> None:
    for step in (1, 2):
        store.save(tmp_path, step, state(1.0), META, 9)
    assert not (tmp_path / "step-00000001" / FROZEN).exists()
    assert all(p.stat().st_nlink == 1 for p in tmp_path.glob("*/rank-*"))


def test_a_frozen_weight_that_has_optimizer_state_is_found_after_two_saves(tmp_path: Path) -> None:
    links = Links(9)
    for step in range(1, 6):
        now = state(float(step)) | {"optim.embed.exp_avg": torch.full((300, 70), float(step))}
        store.save(tmp_path, step, now, META, 9, links)
    assert not (tmp_path / "step-00000002" / FROZEN).exists()
    assert inode(tmp_path, 3) == inode(tmp_path, 4) == inode(tmp_path, 5)


def test_a_weight_that_is_trained_again_is_written_and_the_others_stay_links(tmp_path: Path) -> None:
    links = Links(9)
    for step in range(1, 6):
        now = state(float(step)) | {"model.thawed": torch.full((4, 4), float(max(step, 3)))}
        store.save(tmp_path, step, now, META, 9, links)
        assert_holds(tmp_path / f"step-{step:08d}", now)
    files = [inode(tmp_path, step) for step in range(1, 6)]
    assert [files.index(file) for file in files] == [0, 0, 0, 3, 4]
    store.save(tmp_path, 6, now, META, 9, links)
    assert inode(tmp_path, 5) == inode(tmp_path, 6)


def test_a_change_that_the_sample_does_not_see_is_saved(tmp_path: Path) -> None:
    links, now = Links(9), state(1.0)
    store.save(tmp_path, 1, now, META, 9, links)
    for step in range(2, 6):
        before = incremental.sample(now["model.embed"])
        now["model.embed"].view(-1)[1000 + step] += 1
        assert incremental.sample(now["model.embed"]) == before, "the test needs a change outside of the sample"
        store.save(tmp_path, step, now, META, 9, links)
        assert_holds(tmp_path / f"step-{step:08d}", now)
    assert links.changed == {("model.embed", "model.embed")}
    assert "model.embed" not in load_file(tmp_path / "step-00000005" / FROZEN), "and it is not compared in vain again"


def test_samples_of_any_tensor() -> None:
    for values in (torch.tensor(3.5), torch.zeros(0), torch.ones(3, 5).t(), torch.ones(9, dtype=torch.bfloat16),
                   torch.tensor([True]), torch.ones(70_001, dtype=torch.int8)):  # fmt: skip
        other = values.clone()
        assert incremental.sample(other) == incremental.sample(values)
        if other.numel():
            other[(-1,) * other.dim()] = 0
            assert incremental.sample(other) != incremental.sample(values)


# ---- a link that is lost -------------------------------------------------------------------------------------


def test_a_damaged_file_is_written_again_and_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    links = Links(9)
    for step in (1, 2):
        store.save(tmp_path, step, state(float(step)), META, 9, links)
    flip(tmp_path / "step-00000001" / FROZEN)
    store.save(tmp_path, 3, state(3.0), META, 9, links)
    assert "damaged" in caplog.text
    assert_holds(tmp_path / "step-00000003", state(3.0))
    assert all(integrity.verify(tmp_path / f"step-{step:08d}") for step in (1, 2)), "what they share is damaged in both"
    store.save(tmp_path, 4, state(4.0), META, 9, links)
    assert inode(tmp_path, 3) == inode(tmp_path, 4), "it is linked again"


def test_damage_after_the_last_save_falls_back_to_a_full_one(tmp_path: Path) -> None:
    links = Links(2)
    for step in (1, 2, 3, 4):
        store.save(tmp_path, step, state(float(step)), META, 3, links)
    flip(tmp_path / "step-00000004" / FROZEN)
    found = resume_point.newest_good(tmp_path, lambda text: None)
    assert found is not None and found[1]["step"] == 2
    assert_holds(found[0], state(2.0))


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV])
def test_a_file_system_without_hard_links(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **more: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    links = Links(9)
    for step in (1, 2):
        store.save(tmp_path, step, state(float(step)), META, 9, links)
        assert_holds(tmp_path / f"step-{step:08d}", state(float(step)))


def remove(path: Path) -> None:
    shutil.rmtree(path)


def replace_by_symlink(path: Path) -> None:
    os.rename(path / FROZEN, path.parent / "elsewhere")
    (path / FROZEN).symlink_to(path.parent / "elsewhere")


def replace_by_folder(path: Path) -> None:
    os.unlink(path / FROZEN)
    (path / FROZEN).mkdir()


@pytest.mark.parametrize("lose", [remove, replace_by_symlink, replace_by_folder])
def test_a_lost_file_is_written(lose: Callable[[Path], None], tmp_path: Path) -> None:
    links = Links(9)
    store.save(tmp_path, 1, state(1.0), META, 9, links)
    lose(tmp_path / "step-00000001")
    store.save(tmp_path, 2, state(2.0), META, 9, links)
    assert_holds(tmp_path / "step-00000002", state(2.0))
    assert (tmp_path / "step-00000002" / FROZEN).stat().st_nlink == 1


def test_a_copy_of_the_folder_needs_nothing_else(tmp_path: Path) -> None:
    links = Links(9)
    for step in (1, 2):
        store.save(tmp_path / "run", step, state(float(step)), META, 9, links)
    shutil.copytree(tmp_path / "run" / "step-00000002", tmp_path / "copy" / "step-00000002")
    shutil.rmtree(tmp_path / "run")
    assert_holds(tmp_path / "copy" / "step-00000002", state(2.0))


def test_buffers_follow_a_weight_into_another_file(tmp_path: Path) -> None:
    """A wrong guess must not hold a second copy of the state in host memory."""
    with Saver(tmp_path, keep=9, incremental=9) as saver:
        for step in (1, 2, 3):
            now = {f"model.{i}": torch.full((300, 70), float(step if i else 0)) for i in range(4)}
            saver.save(step, now, META)
            saver.wait()
            sizes = {file: len(buffer) for file, buffer in saver.buffers.tensors.items()}
            assert sum(sizes.values()) <= 2 * 4 * 300 * 70 * 4
        assert sizes[FROZEN] < sizes["rank-00000.safetensors"]


# ---- crashes and pruning -------------------------------------------------------------------------------------


class Crash(BaseException):
    """The process ends here: no error handler sees it."""


OPERATIONS = ("link", "unlink", "rename", "replace", "mkdir", "rmdir")


@contextmanager
def crash_at(number: int | None) -> Iterator[list[int]]:
    """Crash before the n-th operation on the file system; count them."""
    count = [0]

    def counted(operation: Any) -> Any:
        def call(*arguments: Any, **more: Any) -> Any:
            count[0] += 1
            if number is not None and count[0] >= number:
                raise Crash
            return operation(*arguments, **more)

        return call

    operations = {name: counted(getattr(os, name)) for name in OPERATIONS}
    operations["fsync"] = counted(lambda descriptor: None)  # a process that ends loses nothing that it has written
    with mock.patch.multiple(os, **operations):
        yield count


# a save: which tensors change before it, and the operation at which it crashes
SAVES = st.tuples(st.sets(st.integers(0, 5), max_size=4), st.none() | st.integers(1, 40))


@settings(max_examples=40, deadline=None)
@given(st.lists(SAVES, min_size=2, max_size=8), st.integers(1, 3), st.integers(1, 4))
def test_whatever_changes_and_wherever_it_crashes_kept_checkpoints_load_bit_exact(
    saves: list[tuple[set[int], int | None]], keep: int, full_every: int
) -> None:
    few_bytes = mock.patch.multiple(incremental, PIECES=1, PIECE_BYTES=1)  # of a sample: it sees almost no change
    with tempfile.TemporaryDirectory() as name, mock.patch.object(rank_files, "FILE_BYTES", 400), few_bytes:
        folder, links = Path(name) / "checkpoints", Links(full_every)
        names = [f"{'model' if i % 2 else 'optim'}.{i}.x" for i in range(6)]
        now = {name: torch.full((10, 9), 1.0) for name in names}
        begun: dict[int, State] = {}
        complete: list[int] = []
        for step, (changed, crash) in enumerate(saves, start=1):
            for i in changed:
                now[names[i]].view(-1)[step] += 1
            begun[step] = {key: t.clone() for key, t in now.items()}
            acknowledged = complete[-1] if complete else 0
            try:
                with crash_at(crash):
                    store.save(folder, step, now, META, keep, links)
                acknowledged = step
            except Crash:
                links = Links(full_every)  # a new process
            there = {int(p.name[5:]): p for p in folder.glob("step-????????")}
            complete += [step] if step in there else []
            for found, path in there.items():
                assert_holds(path, begun[found])
            assert max(there, default=0) >= acknowledged
            assert set(complete[-keep:]) <= set(there), "pruned too much"
            assert crash is not None or len(there) <= keep, "pruned too little"


def saves_of_two_ranks(folder: Path) -> None:
    """Each rank links its own files; the second rank's frozen shard changes once, the first one's never."""
    rank, links = dist.get_rank(), Links(9)
    frozen = torch.full((40, 8), 1.0 + rank)
    for step in range(1, 6):
        if rank == 1 and step == 3:
            frozen[0, 0] = 7
        now = {
            "model.frozen": [Chunk(frozen, (80, 8), (40 * rank, 0))],
            "model.w": [Chunk(torch.full((4,), float(step)), (8,), (4 * rank,))],
            "optim.w.m": [Chunk(torch.full((4,), float(step)), (8,), (4 * rank,))],
        }
        store.save(folder, step, now, META, 9, links)
        whole = {"model.frozen": torch.zeros(80, 8), "model.w": torch.zeros(8), "optim.w.m": torch.zeros(8)}
        path = folder / f"step-{step:08d}"
        store.load(path, store.read_manifest(path), whole)
        assert torch.equal(whole["model.frozen"][40 * rank : 40 * rank + 40], frozen)
        assert not integrity.verify(path)
    files = [(folder / f"step-{step:08d}" / f"rank-{rank:05d}-8.safetensors") for step in range(1, 6)]
    inodes = [file.stat().st_ino if file.exists() else None for file in files]
    assert inodes == [inodes[0]] * 5 if rank == 0 else inodes[0] == inodes[1] != inodes[2] and inodes[3] is None


def test_each_rank_decides_about_its_own_files(tmp_path: Path) -> None:
    spawn(2, saves_of_two_ranks, tmp_path)


# ---- runs ----------------------------------------------------------------------------------------------------

FROZEN_RUN = (
    "model=llama-tiny", *(word for word in compare.SMALL if word.startswith("model.") and word != "model.dropout=0"),
    "model._target_=tests.checkpoint.frozen_model.FrozenEmbeddings", "trust=[tests]",
    "train.steps=8", "checkpoint.every=1", "checkpoint.keep=9", "checkpoint.incremental=4",
)  # fmt: skip
EMBED = "model.embed.weight"


def linked_files(run: Path) -> int:
    return sum(p.stat().st_nlink > 1 for p in (run / "checkpoints").glob("step-*/rank-*"))


@pytest.mark.parametrize("one, other", [("ddp", "fsdp"), ("fsdp", "tensor"), ("tensor", "ddp")])
def test_strategies_take_over_from_each_other(one: str, other: str, tmp_path: Path) -> None:
    common = (*FROZEN_RUN, "cluster.processes=2")
    whole = make_run(tmp_path / "whole", *common, f"strategy={one}", "checkpoint.incremental=0", "train.stop_after=4")
    run = make_run(tmp_path / "run", *common, f"strategy={one}", "train.stop_after=4")
    assert train(run, 2) == train(whole, 2) == [0, 0]
    assert linked_files(run) and not linked_files(whole)
    for step in range(1, 5):
        paths = [r / "checkpoints" / f"step-{step:08d}" for r in (run, whole)]
        assert store.weights_sha256(paths[0]) == store.weights_sha256(paths[1])
        assert paths[0].name and manifest.read(paths[0]).tensors == manifest.read(paths[1]).tensors
    for r in (run, whole):
        make_run(r, *common, f"strategy={other}", *(["checkpoint.incremental=0"] if r is whole else []))
        assert train(r, 2) == [0, 0]
        assert summary(r)["start_step"] == 4 and summary(r)["steps"] == 8
    assert summary(run)["weights_sha256"] == summary(whole)["weights_sha256"]
    assert summary(run)["save_linked_gib"] > 0 and "save_linked_gib" not in summary(whole)


def test_a_killed_run_resumes_bit_exact(tmp_path: Path) -> None:
    common = (*FROZEN_RUN, "cluster.processes=2", "checkpoint.keep=2")
    whole = make_run(tmp_path / "whole", *common)
    assert train(whole, 2) == [0, 0]
    run = make_run(tmp_path / "run", *common)
    for phase in ("save.link:2", "save.prune:1"):  # while files are linked; while the first of them are deleted
        assert -9 in start(run, 2, env={"DTRAIN_FAILPOINT": phase}).join()
    assert train(run, 2) == [0, 0]
    assert 0 < summary(run)["start_step"] < 8
    assert summary(run)["weights_sha256"] == summary(whole)["weights_sha256"]
