"""Streams: the same global batches on any number of ranks, an exact resume from any position, and clear errors."""

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dtrain.checks.resume import num_steps_saved
from dtrain.commands.evaluate import as_text, evaluate
from dtrain.commands.verify.compare import compare
from dtrain.data.adapt import open_data
from dtrain.data.fields import Fields
from dtrain.data.samples import in_memory
from dtrain.data.stream_loader import StreamLoader
from dtrain.data.stream_reader import Reader
from tests.data import streams as mine
from tests.own_runs import own_run
from tests.world import losses, summary

ME, OWN = "tests.data.streams", "tests.data.own_data"


def opened(name: str, **settings: Any) -> Any:
    return open_data({"_target_": f"{ME}.{name}", **settings}, [ME]).dataset("train")


def batches(loader: StreamLoader, first: int, count: int) -> list[Any]:
    """Batches from a position in samples on."""
    size = loader.global_batch_size
    try:
        return [loader.batch(position) for position in range(first, first + count * size, size)]
    finally:
        loader.close()


def tensors(batch: Any) -> list[torch.Tensor]:
    inputs, targets = batch
    return [*([t for _, t in inputs.leaves()] if isinstance(inputs, Fields) else [inputs]), targets]


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        for a, b in zip(tensors(one), tensors(other), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    "name, settings",
    [("Drawing", {}), ("Stateful", {}), ("Endless", {}), ("generator", {}), ("loader", {}), ("hugging_face", {}),
     ("hugging_face", {"shuffled": True}), ("Shards", {}), ("WithSplit", {})],
    ids=["Drawing", "Stateful", "Endless", "generator", "loader", "hugging_face", "shuffled", "Shards", "WithSplit"],
)  # fmt: skip
def test_every_rank_count_sees_the_same_batches_and_a_resume_goes_on_exactly(name: str, settings: Any) -> None:
    stream = opened(name, **settings)
    assert stream.restores == (name in ("Stateful", "Shards") or (name == "hugging_face" and not settings))
    loader = StreamLoader(stream, 8, 0)
    before = batches(loader, 0, 6)  # the fourth batch reaches into the second epoch
    cursor = json.loads(json.dumps(loader.cursor_at(48)))  # as a checkpoint keeps it
    assert cursor["samples"] == 48 and ("mark" in cursor) == stream.restores
    after = batches(StreamLoader(stream, 8, 0), 0, 10)
    assert_equal(after[:6], before)

    halves = [batches(StreamLoader(stream, 8, 0, rank, 2), 0, 10) for rank in range(2)]
    for whole, *parts in zip(after, *halves, strict=True):
        for a, *b in zip(tensors(whole), *map(tensors, parts), strict=True):
            assert torch.equal(a, torch.cat(b))

    again = StreamLoader(opened(name, **settings), 8, 0)
    again.load(cursor)
    assert_equal(batches(again, 48, 4), after[6:])
    smaller = batches(StreamLoader(stream, 4, 0), 48, 2)  # another batch size, and a checkpoint without a cursor
    for a, *b in zip(tensors(after[6]), *map(tensors, smaller), strict=True):
        assert torch.equal(a, torch.cat(b))
    if name not in ("Endless", "hugging_face"):
        assert not torch.equal(tensors(after[0])[0], tensors(batches(StreamLoader(stream, 8, 1), 0, 1)[0])[0])


def test_a_rollback_and_samples_that_are_passed_over() -> None:
    stream = opened("Drawing")
    expected = batches(StreamLoader(stream, 8, 0), 0, 6)
    loader = StreamLoader(stream, 8, 0)
    loader.batch(0)
    saved = loader.cursor_at(8)
    for position in (8, 16):
        loader.batch(position)
    loader.load(saved)
    assert_equal(batches(loader, 32, 2), expected[4:6])


def test_a_state_is_restored_without_reading_again() -> None:
    loader = StreamLoader(stream := opened("Stateful"), 8, 0)
    batches(loader, 0, 2)
    reader = Reader(stream, 0)
    reader.seek(16, loader.cursor_at(16))
    assert reader.data.num_read == 2 and torch.equal(reader.next()[0], batches(loader, 16, 1)[0][0][0])


@pytest.mark.parametrize("wrong_by", [-1, 1])
def test_a_state_that_gives_other_samples_is_found(wrong_by: int) -> None:
    stream = opened("Stateful", wrong_by=wrong_by)
    assert not stream.restores and "gives other samples" in " ".join(stream.notes)


def test_a_state_that_has_passed_by_chance_is_found() -> None:
    assert opened("Shards").restores and not opened("ByItself").restores


@pytest.mark.parametrize("name", ["large_shuffle", "Wrapped"])
def test_a_shuffle_buffer_is_found(name: str) -> None:
    stream = opened(name)
    assert not stream.restores and "its state does not keep the shuffle buffer" in " ".join(stream.notes)


def test_a_shuffle_with_the_default_buffer_is_read_again_exactly() -> None:
    stream = opened("large_shuffle")
    expected = batches(StreamLoader(stream, 200, 0), 0, 10)
    loader = StreamLoader(stream, 200, 0)
    batches(loader, 0, 8)
    again = StreamLoader(stream, 200, 0)
    again.load(loader.cursor_at(1600))
    assert_equal(batches(again, 1600, 2), expected[8:])


@pytest.fixture
def logged(tmp_path: Path) -> Iterator[Path]:
    """The log, also of forked processes."""
    handler = logging.FileHandler(tmp_path / "log")
    logger = logging.getLogger("dtrain")
    level, logger.level = logger.level, logging.INFO
    logger.addHandler(handler)
    yield tmp_path / "log"
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.mark.parametrize("name, size", [("Growing", 8), ("Changed", 8), ("Stateful", 1), ("Shards", 1)])
def test_a_cursor_restores_exactly_whatever_becomes_of_the_state(name: str, size: int, logged: Path) -> None:
    stream = opened(name)
    assert stream.restores
    expected = batches(StreamLoader(stream, size, 0), 0, 24 // size + 2)
    before = StreamLoader(stream, size, 0)
    batches(before, 0, 24 // size)
    cursor = json.loads(json.dumps(before.cursor_at(24)))
    again = StreamLoader(stream, size, 0)
    again.load(cursor)
    assert_equal(batches(again, 24, 2), expected[24 // size :])
    assert ("mark" in cursor) == (name != "Growing")
    text = logged.read_text()
    assert text.count("its state cannot be kept from now on") == 3 * (name == "Growing"), "one for each process"
    assert text.count("its state from the checkpoint is of no use") == (name == "Changed")
    assert ("reading and dropping the 24 samples" in text) == (name in ("Growing", "Changed"))


@pytest.mark.parametrize("name", ["OpenFile", "of_open_file"])
def test_a_file_that_is_opened_early_is_read_from_its_beginning(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAM_FILE", str(tmp_path / "lines"))
    mine.write_lines(tmp_path / "lines")
    stream = opened(name)
    in_memory(stream, 8)
    targets = torch.cat([batch[1] for batch in batches(StreamLoader(stream, 6, 0), 0, 10)])
    assert targets.tolist() == [number % 3 for number in range(30)] * 2


def test_the_cursor_before_a_batch_that_fails_is_known() -> None:
    loader = StreamLoader(opened("Drawing"), 8, 0)
    batches(loader, 0, 3)
    assert [loader.cursor_at(position)["samples"] for position in (16, 23, 24)] == [16, 16, 24]  # type: ignore[index]
    assert loader.cursor_at(8) is None


def test_a_long_read_and_a_wrong_length_are_logged(logged: Path) -> None:
    batches(StreamLoader(opened("WithLength"), 8, 0), 32, 1)
    noted = logged.read_text()
    assert "reading and dropping all 32 samples since the first step" in noted
    assert "epoch 1 had 30 samples, but len() says 31" in noted


def test_it_is_read_after_the_parent_has_used_its_threads() -> None:
    torch.set_num_threads(2)
    torch.ones(2000, 2000).sum()
    assert opened("WithThreads").first[0].shape == (1, 8)


def test_a_stream_that_has_changed_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAM_CHANGES", str(tmp_path / "now"))
    loader = StreamLoader(opened("changing"), 8, 0)
    batches(loader, 0, 2)
    (tmp_path / "now").touch()
    again = StreamLoader(opened("changing"), 8, 0)
    again.load(loader.cursor_at(16))
    with pytest.raises(RuntimeError, match=r"sample 16 of epoch 1 is another one\. Fix: "):
        batches(again, 16, 1)


def test_evaluations_read_the_first_samples() -> None:
    data = open_data({"_target_": f"{ME}.loader"}, [ME]).dataset("val")
    kept = in_memory(data, 8)
    assert len(kept) == 8 and len(in_memory(data, 100)) == 24 and kept.fingerprint == data.fingerprint


def test_what_cannot_be_read_is_refused() -> None:
    with pytest.raises(ValueError, match=rf"data={ME}.empty: it gives no samples.*\n  fix: "):
        opened("empty")
    with pytest.raises(ValueError, match=r"batch_size=None.*\n  fix: "):
        opened("whole_batches")
    with pytest.raises(ValueError, match=r"starts processes while it is read.*\n  fix: DataLoader\(…, num_workers=0\)"):
        opened("WithProcesses")
    with pytest.raises(ValueError, match=r"gives the same generator each time.*\n  fix: make it in the function"):
        opened("one_generator")
    with pytest.raises(ZeroDivisionError) as found:
        opened("broken")
    assert "streams.py" in found.value.__notes__[0]
    with pytest.raises(ValueError, match=r"no samples in epoch 2: it can be iterated over only once"):
        batches(StreamLoader(opened("once"), 8, 0), 0, 5)


def test_a_file_that_all_processes_would_share_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAM_FILE", str(tmp_path / "lines"))
    mine.write_lines(tmp_path / "lines")
    with pytest.raises(ValueError, match=r"reads .*/lines, which was opened before.*\n  fix: open the file in"):
        opened("of_global_file")
    mine.opened.file.close()
    mine.opened = None


# ---- real runs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy, data, other", [("ddp", "Drawing", "fsdp"), ("fsdp", "Stateful", "ddp")])
def test_killed_and_resumed_it_is_bit_exact_also_with_other_ranks(
    strategy: str, data: str, other: str, tmp_path: Path
) -> None:
    words = (f"model={OWN}.Net", f"data={ME}.{data}", "loss=cross_entropy", "train.steps=8", "checkpoint.every=3")
    words += (f"hooks=[{ME}.Dies]", "checkpoint.background=false")
    whole = own_run(tmp_path / "whole", 2, *words, f"strategy={strategy}")
    broken = own_run(tmp_path / "broken", 2, *words, f"strategy={strategy}", code=None, env={"DIE": "5"})
    assert num_steps_saved(broken) == 3 and max(losses(broken)) < 8
    shutil.copytree(broken, tmp_path / "elsewhere")
    again = own_run(broken, 2, *words, f"strategy={strategy}")
    assert losses(again) == losses(whole) and summary(again)["weights_sha256"] == summary(whole)["weights_sha256"]
    log = (again / "logs" / "rank-0.log").read_text()
    assert ("reading and dropping the 24 samples" in log) == (data == "Drawing")
    elsewhere = own_run(tmp_path / "elsewhere", 1, *words, f"strategy={other}")
    assert compare(elsewhere, whole).loss <= 1e-5
    found = evaluate(whole, "train", trust=[ME, OWN])
    assert not found["is_whole"] and as_text(found).startswith("train: the first 8 samples of a stream, 8 targets")


def test_ranks_that_read_different_streams_are_refused(tmp_path: Path) -> None:
    words = (f"model={OWN}.Net", f"data={ME}.by_rank", "loss=cross_entropy")
    run = own_run(tmp_path / "run", 2, *words, code=2)
    assert "give every rank the whole stream" in (run / "logs" / "rank-0.log").read_text()
