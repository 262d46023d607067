"""Copies in the memory of the hosts: they outlive the ranks and one host, and a restart uses the newest good state."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dtrain.checkpoint import peer, resume_point, store
from dtrain.checkpoint.background import Saver
from dtrain.checkpoint.peer import PeerCopies, next_host
from dtrain.checkpoint.rank_files import share_out
from dtrain.checkpoint.writers import Writers
from dtrain.errors import CheckpointError
from dtrain.runs import memory
from dtrain.util.dtensor import Chunk
from tests.world import make_run, metrics, spawn, start, summary, train

META: dict[str, Any] = {"samples": 8, "extra": {}}


def state(value: float) -> dict[str, torch.Tensor]:
    return {"model.weight": torch.full((5, 7), value), "optim.weight.exp_avg": torch.full((5, 7), value / 2)}


def copied(copies: PeerCopies, step: int, tensors: Any) -> bool:
    writers = Writers()
    return copies.save(step, share_out(tensors, writers), writers.index, META)


def held(path: Path) -> float:
    target = {name: torch.zeros_like(t) for name, t in state(0.0).items()}
    store.load(path, store.read_manifest(path), target)
    assert torch.equal(target["model.weight"], 2 * target["optim.weight.exp_avg"])
    return float(target["model.weight"][0, 0])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


# ---- one host ------------------------------------------------------------------------------------------------


def test_one_copy_is_kept_and_the_newest_state_is_loaded(tmp_path: Path) -> None:
    copies = PeerCopies(tmp_path / "run", root=tmp_path)
    assert copies.newest(0) is None
    for step in (1, 2, 3):
        assert copied(copies, step, state(float(step)))
    assert [p.name for p in copies.folder.iterdir()] == ["step-00000003"]
    assert oct(copies.folder.stat().st_mode)[-3:] == oct(copies.folder.parent.stat().st_mode)[-3:] == "700"
    found = PeerCopies(tmp_path / "run", root=tmp_path).newest(3)
    assert found is not None and found[1]["step"] == 3 and held(found[0]) == 3.0
    assert copies.newest(4) is None, "the disk has a newer one"
    assert PeerCopies(tmp_path / "other", root=tmp_path).newest(0) is None, "of another run"
    copies.remove()
    assert not copies.folder.exists()


@pytest.mark.parametrize("on_disk, in_memory, used", [(2, 3, 3.0), (3, 3, 3.0), (4, 3, 4.0)])
def test_the_newest_of_disk_and_memory_is_used(on_disk: int, in_memory: int, used: float, tmp_path: Path) -> None:
    copies = PeerCopies(tmp_path / "run", root=tmp_path)
    copied(copies, in_memory, state(float(in_memory)))
    store.save(tmp_path / "run" / "checkpoints", on_disk, state(float(on_disk)), META, 3)
    saver = Saver(tmp_path / "run" / "checkpoints", 3, peer=copies)
    found = saver.newest_good()
    assert found is not None and held(found[0]) == used
    assert (copies.folder in found[0].parents) == (on_disk <= in_memory)
    assert saver.only_in_memory == (on_disk < in_memory)


@pytest.mark.parametrize("others", [[], [1], [1, 5]])
def test_an_older_copy_is_used_if_all_newer_ones_on_disk_are_damaged(others: list[int], tmp_path: Path) -> None:
    copies = PeerCopies(tmp_path / "run", root=tmp_path)
    copied(copies, 3, state(3.0))
    for step in (*others, 7):
        store.save(tmp_path / "run" / "checkpoints", step, state(float(step)), META, 9)
    flip(tmp_path / "run" / "checkpoints" / "step-00000007" / "rank-00000.safetensors")
    saver = Saver(tmp_path / "run" / "checkpoints", 3, peer=copies)
    found = saver.newest_good()
    assert found is not None and held(found[0]) == (5.0 if 5 in others else 3.0)
    assert saver.only_in_memory == (5 not in others)


def test_nothing_good_is_an_error_as_without_copies(tmp_path: Path) -> None:
    store.save(tmp_path / "run" / "checkpoints", 7, state(7.0), META, 9)
    flip(tmp_path / "run" / "checkpoints" / "step-00000007" / "rank-00000.safetensors")
    with pytest.raises(CheckpointError, match="no usable checkpoint is left"):
        Saver(tmp_path / "run" / "checkpoints", 3, peer=PeerCopies(tmp_path / "run", root=tmp_path)).newest_good()


def damage(path: Path) -> None:
    flip(path / "rank-00000.safetensors")


def lose(path: Path) -> None:
    (path / "rank-00000.safetensors").unlink()


def damage_manifest(path: Path) -> None:
    flip(path / "manifest.json")


def rename(path: Path) -> None:
    path.rename(path.with_name("step-00000009"))


@pytest.mark.parametrize("harm", [damage, lose, damage_manifest, rename])
def test_a_damaged_copy_falls_back_to_the_disk(harm: Any, tmp_path: Path) -> None:
    copies = PeerCopies(tmp_path / "run", root=tmp_path)
    store.save(tmp_path / "run" / "checkpoints", 2, state(2.0), META, 3)
    copied(copies, 3, state(3.0))
    harm(copies.folder / "step-00000003")
    saver = Saver(tmp_path / "run" / "checkpoints", 3, peer=copies)
    found = saver.newest_good()
    assert found is not None and held(found[0]) == 2.0 and not saver.only_in_memory


def link(path: Path) -> None:
    (path.parent.parent / "elsewhere").mkdir()
    path.parent.symlink_to("elsewhere")


def open_to_all(path: Path) -> None:
    path.parent.mkdir()
    path.parent.chmod(0o777)


@pytest.mark.parametrize("made", [link, open_to_all])
def test_a_folder_that_is_not_ours_alone_is_not_used(
    made: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copies = PeerCopies(tmp_path / "run", root=tmp_path)
    made(copies.folder)
    assert not copied(copies, 1, state(1.0)) and "checkpoint.peer is off" in caplog.text
    assert not copied(copies, 2, state(2.0)), "and it is not tried again"
    (copies.folder / "step-00000001").mkdir(parents=True, exist_ok=True)
    assert copies.newest(0) is None


def test_too_little_memory_leaves_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(peer, "free_bytes", lambda: 100)
    copies = PeerCopies(tmp_path / "run", root=tmp_path)
    with Saver(tmp_path / "run" / "checkpoints", 3, peer=copies) as saver:
        saver.save(1, state(1.0), META)
        saver.wait()
    assert "are needed in memory" in caplog.text and not copies.folder.exists()
    found = resume_point.newest_good(tmp_path / "run" / "checkpoints")
    assert found is not None and held(found[0]) == 1.0


def test_a_copy_in_memory_only_leaves_the_disk_alone(tmp_path: Path) -> None:
    copies = PeerCopies(tmp_path / "run", root=tmp_path)
    with Saver(tmp_path / "run" / "checkpoints", 3, peer=copies) as saver:
        saver.save(1, state(1.0), META)
        saver.save(2, state(2.0), META, on_disk=False)
        saver.wait()
    assert [p.name for p in (tmp_path / "run" / "checkpoints").glob("step-*")] == ["step-00000001"]
    assert [p.name for p in copies.folder.iterdir()] == ["step-00000002"]
    first, second = saver.finished()
    assert first["save_step"] == first["peer_step"] == 1 and second["peer_step"] == 2 and "save_step" not in second
    assert saver.totals["saves"] == 1


# ---- several hosts, as folders of one machine ----------------------------------------------------------------


def test_the_next_host_keeps_the_copy() -> None:
    assert [next_host(["a", "a", "b", "b"], r) for r in range(4)] == [2, 3, 0, 1]
    assert [next_host(["a", "b", "c"], r) for r in range(3)] == [1, 2, 0]
    assert [next_host(["a", "a", "a", "b"], r) for r in range(4)] == [3, 3, 3, 0]


def shard(value: float) -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    return {"model.w": [Chunk(torch.full((1000,), value + rank), (1000 * size,), (1000 * rank,))]}


def whole(path: Path) -> torch.Tensor:
    target = {"model.w": torch.zeros(1000 * dist.get_world_size())}
    store.load(path, store.read_manifest(path), target)
    return target["model.w"].view(-1, 1000)[:, 0]


def lose_a_host(folder: Path, hosts: str, lost: str) -> None:
    """Copy two steps, lose the memory of one host, and load on all of them."""
    rank, mine = dist.get_rank(), hosts[dist.get_rank()]
    root = folder / mine
    root.mkdir(exist_ok=True)
    peer.PIECE = 1500  # several sends for a file
    copies = PeerCopies(folder / "run", host=mine, root=root)
    for step in (1, 2):
        assert copied(copies, step, shard(10.0 * step))
    there = {int(p.name[5:10]) for p in (copies.folder / "step-00000002").glob("rank-*")}
    own = {r for r, host in enumerate(hosts) if host == mine}
    assert own < there and (len(there) < len(hosts) or len(set(hosts)) == 2), "its own and those of one other host"
    dist.barrier()
    if mine == lost and copies.leads:
        shutil.rmtree(root)
        root.mkdir()
    dist.barrier()
    found = PeerCopies(folder / "run", host=mine, root=root).newest(1)
    assert found is not None and found[1]["step"] == 2
    assert torch.equal(whole(found[0]), 20.0 + torch.arange(float(len(hosts)))), rank
    dist.barrier()
    # bytes that differ on one host are found by its own ranks: no host uses that copy
    if mine == hosts[-1] and copies.leads:
        flip(found[0] / "rank-00000.safetensors")
    dist.barrier()
    assert PeerCopies(folder / "run", host=mine, root=root).newest(1, say=lambda text: None) is None
    # two hosts are gone: nobody has all files
    dist.barrier()
    copies.remove()
    assert copied(copies, 3, shard(30.0))
    dist.barrier()
    if len(set(hosts)) > 2 and mine in hosts[:2]:
        shutil.rmtree(copies.folder, ignore_errors=True)
    dist.barrier()
    again = PeerCopies(folder / "run", host=mine, root=root).newest(1, say=lambda text: None)
    assert (again is None) == (len(set(hosts)) > 2)


@pytest.mark.parametrize("hosts, lost", [("aabb", "a"), ("abc", "b"), ("aab", "a")])
def test_a_lost_host_loses_nothing(hosts: str, lost: str, tmp_path: Path) -> None:
    spawn(len(hosts), lose_a_host, tmp_path, hosts, lost)


# ---- runs ----------------------------------------------------------------------------------------------------

RUN = ("cluster.processes=2", "train.steps=12", "checkpoint.every=4", "checkpoint.peer=true")


def in_memory(run: Path) -> list[int]:
    return sorted(int(p.name[5:]) for p in memory.folder(run).glob("step-*"))


@pytest.fixture
def run(tmp_path: Path) -> Any:
    yield tmp_path / "run"
    shutil.rmtree(memory.folder(tmp_path / "run"), ignore_errors=True)  # what a failed test leaves in /dev/shm


@pytest.mark.parametrize(
    "phase, before", [("own:7", "ddp"), ("manifest:7", "ddp"), ("prune:6", "ddp"), ("own:7", "fsdp")]
)
def test_a_killed_run_resumes_from_memory(phase: str, before: str, run: Path, tmp_path: Path) -> None:
    every = (*RUN, "checkpoint.peer_every=1")
    make_run(run, *every, f"strategy={before}")
    assert -9 in start(run, 2, env={"DTRAIN_FAILPOINT": f"peer.{phase}"}).join()
    good = resume_point.newest_good(run / "checkpoints")
    assert good is not None and good[1]["step"] == 4 and max(in_memory(run)) in (6, 7)
    make_run(run, *every)
    assert train(run, 2) == [0, 0]
    assert summary(run)["start_step"] in (6, 7) and summary(run)["steps"] == 12
    saved = [m["save_step"] for m in metrics(run) if "save_step" in m]
    assert summary(run)["start_step"] in saved, "what was in memory only was written to the disk"
    assert not memory.folder(run).exists(), "the run has ended, and its last state is on disk"
    if before == "ddp":
        whole_run = make_run(tmp_path / "whole", *RUN, "checkpoint.peer=false")
        assert train(whole_run, 2) == [0, 0]
        assert summary(run)["weights_sha256"] == summary(whole_run)["weights_sha256"]


def test_a_run_whose_last_step_was_in_memory_only_ends_on_disk(run: Path) -> None:
    make_run(run, *RUN, "checkpoint.peer_every=1", "train.stop_after=3", "checkpoint.every=0")
    assert train(run, 2) == [0, 0]
    (last,) = (run / "checkpoints").glob("step-*")
    memory.create(memory.folder(run))
    shutil.move(last, memory.folder(run) / last.name)  # as if the save to the disk had not ended
    (run / "checkpoints" / "latest").unlink()
    assert train(run, 2) == [0, 0]
    assert summary(run)["start_step"] == 3 and summary(run)["status"] == "done"
    assert resume_point.newest_good(run / "checkpoints")[1]["step"] == 3  # type: ignore[index]
    assert not memory.folder(run).exists()
