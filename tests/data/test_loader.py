"""The sample order: exactly once an epoch, whatever the world size, also across a resume."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.data.counter_rng import sample_keys
from dtrain.data.loader import Loader, permutation

SIZES = st.integers(1, 60)
PER_RANK = st.integers(1, 9)
RANKS = st.integers(1, 6)
SEEDS = st.integers(0, 2**63)


class Numbers:
    """Sample i is the number i, so a batch shows which samples it holds."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def batch(self, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.from_numpy(indices)
        return inputs, inputs + 1


class Drawn(Numbers):
    """What a sample draws from is its target."""

    draws = True

    def batch(self, indices: np.ndarray, keys: np.ndarray | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        assert keys is not None and keys.dtype == np.uint64
        return torch.from_numpy(indices), torch.from_numpy(keys.view(np.int64))


def global_batch(size: int, batch: int, seed: int, ranks: int, position: int) -> list[int]:
    loaders = [Loader(Numbers(size), batch, seed, rank, ranks) for rank in range(ranks)]
    return [int(i) for loader in loaders for i in loader.indices(position)]


@given(SIZES, PER_RANK, RANKS, SEEDS)
def test_each_sample_is_seen_exactly_once_an_epoch(size: int, per_rank: int, ranks: int, seed: int) -> None:
    batch = per_rank * ranks
    epochs = 3
    num_batches = -(-epochs * size // batch)
    seen = [i for n in range(num_batches) for i in global_batch(size, batch, seed, ranks, n * batch)]
    for epoch in range(epochs):
        assert sorted(seen[epoch * size : (epoch + 1) * size]) == list(range(size))


@settings(max_examples=20)
@given(SEEDS)
def test_each_epoch_has_its_own_order(seed: int) -> None:
    loader = Loader(Numbers(50), 50, seed)
    assert len({tuple(loader.indices(epoch * 50)) for epoch in range(5)}) == 5


@given(SIZES, PER_RANK, RANKS, SEEDS, st.integers(0, 500))
def test_union_over_ranks_is_the_batch_of_one_rank(
    size: int, per_rank: int, ranks: int, seed: int, position: int
) -> None:
    batch = per_rank * ranks
    assert global_batch(size, batch, seed, ranks, position) == global_batch(size, batch, seed, 1, position)


@given(SIZES, st.permutations([1, 2, 3, 4, 6, 12]), SEEDS)
def test_resume_with_other_world_sizes_continues_exactly(size: int, worlds: list[int], seed: int) -> None:
    resumed = [i for n, ranks in enumerate(worlds) for i in global_batch(size, 12, seed, ranks, n * 12)]
    straight = [i for n in range(len(worlds)) for i in global_batch(size, 12, seed, 1, n * 12)]
    assert resumed == straight


@given(SIZES, SEEDS, st.lists(st.integers(0, 300), min_size=2, max_size=8))
def test_a_used_loader_gives_what_a_fresh_one_gives(size: int, seed: int, positions: list[int]) -> None:
    used = Loader(Numbers(size), 7, seed)
    for position in positions:  # jumps back and forth through more epochs than the cache holds
        np.testing.assert_array_equal(used.indices(position), Loader(Numbers(size), 7, seed).indices(position))


@given(SIZES, PER_RANK, st.integers(0, 500))
def test_without_shuffle_the_order_is_the_identity(size: int, batch: int, position: int) -> None:
    indices = Loader(Numbers(size), batch, seed=0, shuffle=False).indices(position)
    assert indices.tolist() == [p % size for p in range(position, position + batch)]


@settings(max_examples=20)
@given(SEEDS)
def test_seed_and_epoch_both_change_the_order(seed: int) -> None:
    orders = [permutation(seed, 0, 50), permutation(seed, 1, 50), permutation(seed + 1, 0, 50)]
    assert len({tuple(order) for order in orders}) == 3


def test_order_is_unbiased() -> None:
    """Each sample lands in each place about equally often: 2000 shuffles of 5, 400 expected a cell."""
    counts = np.zeros((5, 5))
    for epoch in range(2000):
        counts[np.arange(5), permutation(0, epoch, 5)] += 1
    assert abs(counts - 400).max() < 100  # 5.6 standard deviations


def test_order_is_pinned() -> None:
    """Runs in the field resume by recomputing this order: a change here breaks their exactly-once."""
    assert permutation(1234, 0, 10).tolist() == [7, 3, 1, 5, 6, 2, 8, 9, 0, 4]
    assert permutation(1234, 5, 10).tolist() == [1, 5, 9, 4, 2, 7, 8, 0, 3, 6]


def test_batch_is_the_dataset_at_the_indices() -> None:
    loader = Loader(Numbers(10), 8, seed=3, data_rank=1, data_ranks=2)
    inputs, targets = loader.batch(16)
    assert inputs.tolist() == loader.indices(16).tolist() and len(inputs) == 4
    assert torch.equal(targets, inputs + 1)


def test_pin_memory_is_asked_for_only_when_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor)
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)  # the real one needs CUDA
    for pin_memory, count in ((False, 0), (True, 4)):
        loader = Loader(Numbers(4), 2, seed=0, pin_memory=pin_memory)
        loader.batch(0)
        loader.close()  # and so the batch ahead was read, too
        assert len(pinned) == count


@pytest.mark.parametrize("batch, ranks, proposed", [(10, 4, 8), (3, 4, 4), (0, 2, 2), (-4, 2, 2)])
def test_a_batch_that_does_not_divide_is_refused(batch: int, ranks: int, proposed: int) -> None:
    with pytest.raises(ValueError, match=rf"train.global_batch_size={batch} .* {ranks} .*\n  fix: try {proposed}$"):
        Loader(Numbers(10), batch, seed=0, data_ranks=ranks)


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(ValueError, match=r"train.seed=-1"):
        Loader(Numbers(10), 2, seed=-1)


def test_the_next_batch_is_read_while_the_step_runs() -> None:
    asked: list[list[int]] = []

    class Slow(Numbers):
        def batch(self, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
            asked.append(indices.tolist())
            return super().batch(indices)

    loader = Loader(Slow(20), 4, seed=0, shuffle=False)
    assert loader.batch(0)[0].tolist() == [0, 1, 2, 3]
    assert loader.batch(4)[0].tolist() == [4, 5, 6, 7]
    assert loader.batch(0)[0].tolist() == [0, 1, 2, 3], "a jump is read afresh, never answered with what was ahead"
    loader.close()
    assert asked[:2] == [[0, 1, 2, 3], [4, 5, 6, 7]] and asked.count([4, 5, 6, 7]) == 2


def test_an_error_in_the_reading_thread_reaches_the_step() -> None:
    class Broken(Numbers):
        def batch(self, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
            if 4 in indices:
                raise OSError("disk gone")
            return super().batch(indices)

    loader = Loader(Broken(20), 4, seed=0, shuffle=False)
    loader.batch(0)
    with pytest.raises(OSError, match="disk gone"):
        loader.batch(4)


# ---- what a sample draws from --------------------------------------------------------------------------------


@given(SIZES, PER_RANK, RANKS, SEEDS, st.integers(0, 500))
def test_keys_follow_the_sample_in_every_layout(size: int, per_rank: int, ranks: int, seed: int, position: int) -> None:
    batch = per_rank * ranks
    parts = [Loader(Drawn(size), batch, seed, rank, ranks).request(position) for rank in range(ranks)]
    epochs = (position + np.arange(batch)) // size
    indices, keys = (np.concatenate([getattr(part, name) for part in parts]) for name in ("indices", "keys"))
    expected = [sample_keys(seed, int(epoch), np.array([i]))[0] for epoch, i in zip(epochs, indices, strict=True)]
    assert keys.tolist() == expected


@settings(max_examples=20)
@given(SEEDS)
def test_seed_epoch_and_sample_all_change_the_key(seed: int) -> None:
    everything = [sample_keys(s, epoch, np.arange(50)) for s in (seed, seed + 1) for epoch in range(3)]
    assert len(set(np.concatenate(everything).tolist())) == 300


def test_keys_are_pinned() -> None:
    """Runs in the field resume by drawing again from these: a change here changes their augmentation."""
    assert sample_keys(1234, 5, np.array([0, 1, 10**12])).tolist() == [
        10697701664207576610, 9479663906235799193, 5953752465961544626,
    ]  # fmt: skip


def test_validation_draws_the_same_every_time() -> None:
    loader = Loader(Drawn(6), 4, seed=7, shuffle=False)
    inputs, keys = loader.batch(8)  # two samples into its second epoch
    assert inputs.tolist() == [2, 3, 4, 5]
    assert torch.equal(keys, loader.batch(2)[1]) and torch.equal(loader.sample(2)[1], keys[:1])


def test_a_dataset_that_does_not_draw_is_given_no_keys() -> None:
    assert Loader(Numbers(6), 4, seed=7).request(0).keys is None
    assert Loader(Numbers(6), 4, seed=7).sample(3)[0].tolist() == [3]


def test_the_order_takes_four_bytes_a_sample() -> None:
    loader = Loader(Numbers(1000), 7, seed=0)
    assert loader.indices(0).dtype == np.int64
    assert loader._order(0).nbytes == 4000


def test_a_sample_without_a_target_is_named() -> None:
    class Holes(Numbers):
        masked = True

        def batch(self, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
            targets = torch.full((len(indices), 4), 1)
            targets[torch.from_numpy(indices == 5)] = -100
            return targets, targets

    loader = Loader(Holes(10), 4, seed=0, shuffle=False)
    assert len(loader.batch(0)[0]) == 4
    with pytest.raises(ValueError, match="sample 5 has no target"):
        loader.batch(4)
