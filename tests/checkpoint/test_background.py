"""Saves while the training goes on: one step's state, the same bits as without it, and errors where they belong."""

from __future__ import annotations

import errno
import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dtrain.checkpoint import background as saving
from dtrain.checkpoint import manifest, rank_files, resume_point, shards, store
from dtrain.checkpoint.background import Saver
from dtrain.checkpoint.store import CheckpointError
from dtrain.commands.verify import world
from dtrain.commands.verify.world import World
from dtrain.util.dtensor import Chunk
from tests.models import vision
from tests.world import make_run, metrics, spawn, start_server, summary, train

RESNET = ["model.image_size=8", "model.channels=1", "model.num_classes=10", "model.width=8", "model.blocks=[1,1,1,1]"]
META: dict[str, Any] = {"samples": 8, "extra": {}}


def state(value: float, device: str = "cpu") -> dict[str, torch.Tensor]:
    return {
        "model.weight": torch.full((5, 7), value, device=device),
        "model.half": torch.full(
            (3,), value, dtype=torch.bfloat16, device=device
        ),  # six bytes: the next is not aligned
        "model.turned": torch.arange(12.0, device=device).reshape(3, 4).t() * value,
        "model.scalar": torch.tensor(value, device=device),
        "model.flags": torch.tensor([True, False, True], device=device),
        "model.empty": torch.zeros((0, 3), device=device),
        "optim.weight.step": torch.tensor(int(value), device=device),
    }


def held(folder: Path) -> dict[str, torch.Tensor]:
    """What the newest checkpoint of a folder holds."""
    found = resume_point.newest_good(folder, lambda text: pytest.fail(text))
    assert found is not None
    target = {name: torch.zeros_like(t) for name, t in state(0.0).items() if t.numel()}
    store.load(found[0], found[1], target)
    return target


def equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(ours[name], t.cpu()) for name, t in theirs.items() if t.numel())


class Gate:
    """Holds back the writing of shards until it is opened; then it works, or fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: OSError | None = None) -> None:
        self.open, self.entered, self.write, self.error = threading.Event(), threading.Event(), shards.write, error
        monkeypatch.setattr(shards, "write", self)

    def __call__(self, *arguments: Any) -> tuple[int, str]:
        self.entered.set()
        assert self.open.wait(60)
        if self.error:
            raise self.error
        return self.write(*arguments)


# ---- one save ------------------------------------------------------------------------------------------------


def test_what_is_saved_is_the_state_at_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    with Saver(tmp_path, keep=3) as saver:
        live, meta = state(2.0), {"samples": 8, "extra": {"count": 1}}
        saver.save(2, live, meta)
        assert gate.entered.wait(60) and saver.finished() == []
        for tensor in live.values():  # the next update
            tensor.zero_()
        meta["extra"]["count"] = 99
        assert not (tmp_path / "latest").exists(), "not before it is on disk"
        gate.open.set()
        assert saver.wait() == tmp_path / "step-00000002"
    assert equal(held(tmp_path), state(2.0))
    assert store.read_manifest(tmp_path / "step-00000002")["extra"] == {"count": 1}
    (figures,) = saver.finished()
    assert figures["save_step"] == 2 and figures["save_gib"] > 0 and figures["save_gib_per_s"] > 0
    assert 0 < figures["save_stall_s"] < figures["save_s"], "the loop did not wait for what it held back"
    assert saver.totals["saves"] == 1 and saver.totals["save_s"] == figures["save_s"]


def test_the_same_bits_as_a_save_that_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_files, "FILE_BYTES", 60)  # several files
    for name, background in (("after", False), ("beside", True)):
        with Saver(tmp_path / name, 3, background) as saver:
            for step in (1, 2):
                saver.save(step, state(float(step)), META)
            saver.wait()
    for step in ("step-00000001", "step-00000002"):
        files = {p.name: p.read_bytes() for p in (tmp_path / "after" / step).iterdir()}
        assert {p.name: p.read_bytes() for p in (tmp_path / "beside" / step).iterdir()} == files
        assert len(files) > 3
    assert equal(held(tmp_path / "beside"), state(2.0))


def test_a_save_that_is_due_waits_for_the_one_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    with Saver(tmp_path, keep=1) as saver:
        saver.save(1, state(1.0), META)
        assert gate.entered.wait(60)
        second = threading.Thread(target=saver.save, args=(2, state(2.0), META))
        second.start()
        second.join(0.2)
        assert second.is_alive() and not (tmp_path / "step-00000002").exists()
        gate.open.set()
        second.join(60)
        saver.wait()
    assert [f["save_step"] for f in saver.finished()] == [1, 2]
    assert [p.name for p in tmp_path.glob("step-*")] == ["step-00000002"], "and the older is pruned"


def test_the_last_save_is_on_disk_when_it_returns(tmp_path: Path) -> None:
    with Saver(tmp_path, keep=3) as saver:
        saver.save(1, state(1.0), META)
        saver.save(2, state(2.0), META, last=True)
        assert (tmp_path / "latest").read_text() == "step-00000002\n"
    with Saver(tmp_path / "only", keep=3) as saver:
        saver.save(1, state(1.0), META, last=True)
        assert not saver.buffers.tensors, "a run that saves once needs no copies"


def test_buffers_are_used_again_and_grow(tmp_path: Path) -> None:
    with Saver(tmp_path, keep=9) as saver:
        places = []
        for step, rows in ((1, 1000), (2, 1000), (3, 4000)):
            saver.save(step, {"model.weight": torch.full((rows, 7), float(step))}, META)
            saver.wait()
            places.append(saver.buffers.tensors["rank-00000.safetensors"].data_ptr())
    assert places[0] == places[1] != places[2]
    (weight,) = (t for _, t in store.weights(tmp_path / "step-00000003"))
    assert torch.equal(weight, torch.full((4000, 7), 3.0))


def test_buffers_can_be_made_before_the_first_save(tmp_path: Path) -> None:
    with Saver(tmp_path, keep=3) as saver:
        saver.prepare(state(0.0))
        assert saver.wait() is None and saver.finished() == []
        places = {file: buffer.data_ptr() for file, buffer in saver.buffers.tensors.items()}
        assert places
        saver.save(1, state(1.0), META)
        assert places == {file: buffer.data_ptr() for file, buffer in saver.buffers.tensors.items()}
        saver.wait()
    assert equal(held(tmp_path), state(1.0))


def test_a_save_makes_its_buffers_if_they_could_not_be_made_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty, calls = saving.empty, []

    def not_twice(size: int) -> torch.Tensor:
        calls.append(size)
        if len(calls) > 1:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return empty(size)

    monkeypatch.setattr(rank_files, "FILE_BYTES", 64)  # several files
    with Saver(tmp_path, keep=3) as saver:
        with monkeypatch.context() as patch:
            patch.setattr(saving, "empty", not_twice)
            saver.prepare(state(0.0))
            saver.wait()
        assert len(calls) == 2 and not saver.buffers.tensors, "a buffer that is there would never be pinned"
        saver.save(1, state(1.0), META)
        saver.wait()
    assert equal(held(tmp_path), state(1.0))


def test_too_little_memory_is_said_and_the_loop_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(saving, "free_bytes", lambda: 100)
    with Saver(tmp_path, keep=3) as saver:
        saver.save(1, state(1.0), META)
        assert (tmp_path / "latest").exists() and not saver.buffers.tensors
    assert "not enough host memory" in caplog.text


# ---- errors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_an_error_is_raised_by_the_next_save_with_the_same_words(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Saver(tmp_path, keep=3) as saver:
        saver.save(1, state(1.0), META, last=True)
    gate = Gate(monkeypatch, OSError(number, "cannot"))
    gate.open.set()
    with pytest.raises(CheckpointError) as waited_for:
        store.save(tmp_path, 2, state(2.0), META, 3)
    with Saver(tmp_path, keep=3) as saver:
        saver.save(2, state(2.0), META)
        while not saver.failed:
            time.sleep(0.001)
        for again in (lambda: saver.save(3, state(3.0), META), saver.wait):
            with pytest.raises(CheckpointError) as beside:
                again()
            assert str(beside.value) == str(waited_for.value)
    assert (tmp_path / "latest").read_text() == "step-00000001\n" and equal(held(tmp_path), state(1.0))
    assert not list(tmp_path.glob(".attempt*")), "the failed attempt gave its room back"


def test_a_run_that_fails_lets_a_save_under_way_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    timer = threading.Timer(0.2, gate.open.set)
    with pytest.raises(ZeroDivisionError), Saver(tmp_path, keep=3) as saver:
        saver.save(1, state(1.0), META)
        timer.start()
        raise ZeroDivisionError
    assert equal(held(tmp_path), state(1.0))


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("place", [-1, 0, None], ids=["value", "header", "size"])
def test_nothing_is_pruned_if_the_new_one_does_not_read_back(
    place: int | None, background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = shards.write

    def damaged(path: Path, *rest: Any) -> tuple[int, str]:
        """A disk that keeps other bytes than it was given."""
        written = write(path, *rest)
        data = bytearray(path.read_bytes())
        if place is not None:
            data[place] ^= 1
        path.write_bytes(data if place is not None else data[:-1])
        return written

    with Saver(tmp_path, keep=1, background=background) as saver:
        saver.save(1, state(1.0), META)
        saver.save(2, state(2.0), META)
        saver.wait()
        assert not (tmp_path / "step-00000001").exists(), "good ones are pruned"
        monkeypatch.setattr(shards, "write", damaged)
        with pytest.raises(CheckpointError, match="older checkpoints are kept") as raised:
            saver.save(3, state(3.0), META)
            saver.wait()
    assert "rank-00000.safetensors" in str(raised.value)
    shutil.rmtree(tmp_path / "step-00000003")
    assert equal(held(tmp_path), state(2.0)), "the older one is still good"


def damage_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"samples"', b'"sAmples"'))


def other_checksum(folder: Path) -> None:
    values = json.loads((folder / "manifest.json").read_text())
    values["files"]["rank-00000.safetensors"]["sha256"] = "0" * 64
    manifest.write(folder, values)


def other_index(folder: Path) -> None:
    values = json.loads((folder / "manifest.json").read_text())
    values["tensors"]["model.another"] = values["tensors"].pop("model.flags")
    manifest.write(folder, values)


@pytest.mark.parametrize("damage", [damage_manifest, other_checksum, other_index])
def test_nothing_is_pruned_if_the_manifest_is_not_that_of_the_files(
    damage: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save(tmp_path, 1, state(1.0), META, keep=1)
    point = store.point_latest

    def point_and_damage(folder: Path, name: str) -> None:
        point(folder, name)
        damage(folder / name)

    monkeypatch.setattr(store, "point_latest", point_and_damage)
    with pytest.raises(CheckpointError, match="older checkpoints are kept"):
        store.save(tmp_path, 2, state(2.0), META, keep=1)
    assert (tmp_path / "step-00000001").is_dir()


def saves_on_a_lying_disk(folder: Path) -> None:
    """The second rank's disk keeps other bytes than it was given: both ranks must keep the older checkpoint."""
    state = {"model.w": [Chunk(torch.ones(4) * dist.get_rank(), (8,), (4 * dist.get_rank(),))]}
    store.save(folder, 1, state, META, keep=1)
    write = shards.write

    def damaged(path: Path, *rest: Any) -> tuple[int, str]:
        written = write(path, *rest)
        if dist.get_rank() == 1:
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
        return written

    shards.write = damaged
    with pytest.raises(CheckpointError, match=r"rank-00001.safetensors differs .* older checkpoints are kept"):
        store.save(folder, 2, state, META, keep=1)
    assert (folder / "step-00000001").is_dir()


def test_all_ranks_keep_the_older_one_if_one_cannot_read_back(tmp_path: Path) -> None:
    spawn(2, saves_on_a_lying_disk, tmp_path)


# ---- whole runs ----------------------------------------------------------------------------------------------


def train_beside(run_dir: Path) -> int:
    """A rank whose shards are written only once the loop has gone on; the last save's at once."""
    write = shards.write

    def late(path: Path, *rest: Any) -> tuple[int, str]:
        step, deadline = int(path.parent.name.split("-")[1]), time.monotonic() + 60
        while step < 6 and max(m["step"] for m in metrics(run_dir)) <= step:
            assert time.monotonic() < deadline, "the loop waits for the save"
            time.sleep(0.001)
        return write(path, *rest)

    shards.write = late
    return world.train_rank(run_dir)


def train_on_a_bad_disk(run_dir: Path) -> int:
    """A rank; the disk of the second one fails at the second save."""
    write = shards.write

    def broken(path: Path, *rest: Any) -> tuple[int, str]:
        if path.name == "rank-00001.safetensors" and path.parent.name.startswith(".attempt-4-"):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return write(path, *rest)

    shards.write = broken
    return world.train_rank(run_dir)


@pytest.mark.parametrize(
    "options",
    [
        ["strategy=ddp"],
        ["strategy=fsdp"],
        ["strategy=local_sgd"],
        ["strategy=zero3"],
        ["model=resnet18", *RESNET],  # whose statistics change in a forward pass, too
        pytest.param(["strategy=zero2", "strategy.offload=cpu"], marks=pytest.mark.slow),
        pytest.param(["strategy=fsdp", "strategy.offload=cpu"], marks=pytest.mark.slow),
        pytest.param(["strategy=tensor"], marks=pytest.mark.slow),
        pytest.param(["strategy=pipeline"], marks=pytest.mark.slow),
    ],
    ids=lambda options: " ".join(options[:2]),
)
def test_a_run_saves_the_same_bits_while_it_goes_on(options: list[str], tmp_path: Path) -> None:
    make = vision.make_run if "model=resnet18" in options else make_run
    common = [*options, "cluster.processes=2", "train.steps=6", "checkpoint.every=2"]
    beside = make(tmp_path / "beside", *common)
    start_server()
    assert World(2, train_beside, beside).join() == [0, 0], (beside / "logs" / "rank-0.log").read_text()
    after = make(tmp_path / "after", *common, "checkpoint.background=false")
    assert train(after, 2) == [0, 0]
    for step in (2, 4, 6):
        ours, theirs = (run / "checkpoints" / f"step-{step:08d}" for run in (beside, after))
        assert [p.name for p in sorted(ours.iterdir())] == [p.name for p in sorted(theirs.iterdir())]
        for file in ours.glob("*.safetensors"):
            assert file.read_bytes() == (theirs / file.name).read_bytes(), f"{file.name} of step {step}"
        contents = [store.read_manifest(p) for p in (ours, theirs)]
        for content in contents:
            del content.meta["config_sha256"]
        assert contents[0] == contents[1]
    saves = [m for m in metrics(beside) if "save_step" in m]
    assert [m["save_step"] for m in saves] == [2, 4, 6] and all(m["step"] > m["save_step"] for m in saves[:1])
    assert summary(beside)["save_stall_median_s"] == sorted(m["save_stall_s"] for m in saves)[1]
    assert summary(beside)["saves"] == 3 and summary(beside)["save_gib"] == pytest.approx(3 * saves[0]["save_gib"])


def test_a_bad_disk_of_one_rank_ends_all_with_its_error(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "cluster.processes=2", "train.steps=100000", "checkpoint.every=2")
    start_server()
    assert World(2, train_on_a_bad_disk, run).join() == [3, 3]
    notes = [json.loads((run / "logs" / f"failure-{r}.json").read_text()) for r in (0, 1)]
    assert all(n["type"] == "CheckpointError" and n["exit_code"] == 3 for n in notes)
    assert all("step-00000004 failed on rank 1: [Errno 5] Input/output error" in n["message"] for n in notes)
    assert (run / "checkpoints" / "latest").read_text() == "step-00000002\n"
    assert metrics(run)[-1]["step"] <= 6, "the save that is due next raises it, if not a step before"


# ---- on a GPU ------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_copies_of_a_gpu_are_of_one_step_and_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    with Saver(tmp_path, keep=3) as saver:
        live = state(2.0, "cuda") | {"model.large": torch.full((2**27,), 2.0, device="cuda")}
        saver.prepare(live)
        for _ in range(50):  # the update that the copies must wait for is still under way when they are queued
            live["model.large"].add_(1.0)
        saver.save(2, live, META)
        for tensor in live.values():
            tensor.zero_()
        assert all(t.is_pinned() for t in saver.buffers.tensors.values())
        gate.open.set()
        saver.wait()
        (figures,) = saver.finished()
        assert figures["save_stall_s"] > 0
    (large,) = (t for name, t in store.weights(tmp_path / "step-00000002") if name == "large")
    assert torch.equal(large, torch.full((2**27,), 52.0))
    assert not saver.buffers.pinned
