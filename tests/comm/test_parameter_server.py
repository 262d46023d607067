"""Which rank owns which weight, and which worker gets which piece of a step."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.comm.parameter_server import NOTHING, Pieces, owners


@given(st.dictionaries(st.text(min_size=1), st.integers(1, 1000), max_size=30), st.integers(1, 8))
def test_every_weight_has_one_owner_and_no_rank_owns_much_more_than_another(sizes: dict[str, int], ranks: int) -> None:
    found = owners(sizes, ranks)
    assert found.keys() == sizes.keys() and set(found.values()) <= set(range(ranks))
    owned = [sum(size for name, size in sizes.items() if found[name] == rank) for rank in range(ranks)]
    assert max(owned) - min(owned) <= max(sizes.values(), default=0)
    assert found == owners(dict(sorted(sizes.items())), ranks) or len(set(sizes.values())) < len(sizes)


class Workers:
    """Workers of different speed without processes: each takes a piece, works on it for some time, and pushes."""

    def __init__(self, slowness: list[float], staleness: int | None, steps: int, count: int, seed: int) -> None:
        self.pieces = Pieces(self.reply, staleness)
        self.slowness, self.steps, self.count, self.random = slowness, steps, count, random.Random(seed)
        self.now, self.updates = 0.0, 0
        self.step = [1] * len(slowness)
        self.busy: dict[int, tuple[float, int]] = {}  # worker → when it is finished, updates in its weights
        self.staleness: Counter[int] = Counter()
        self.taken: Counter[tuple[int, int]] = Counter()
        self.of_worker: Counter[int] = Counter()
        self.told: list[int] = []  # who asks for a piece of the next step, once the one who answers is done

    def reply(self, worker: int, answer: float) -> None:
        if answer == NOTHING:
            self.step[worker] += 1
            self.told.append(worker)
            return
        self.taken[self.step[worker], int(answer)] += 1
        self.of_worker[worker] += 1
        self.busy[worker] = (self.now + self.slowness[worker] * self.random.uniform(0.8, 1.2), self.updates)

    def run(self) -> None:
        self.told = list(range(len(self.slowness)))
        while True:
            while self.told:
                worker = self.told.pop(0)
                if self.step[worker] <= self.steps:
                    self.pieces.take(worker, self.step[worker], self.count, 0.0, 0.0)
            if not self.busy:
                return
            worker = min(self.busy, key=lambda worker: self.busy[worker])
            self.now, pulled = self.busy.pop(worker)
            self.staleness[self.updates - pulled] += 1
            self.updates += 1
            self.pieces.take(worker, self.step[worker], self.count, 0.0, 0.0)


@pytest.mark.parametrize(("staleness", "reached"), [(0, 0), (1, 1), (4, 4), (16, 16), (None, 19)])
def test_1000_updates_with_a_worker_that_is_5_times_as_slow(staleness: int | None, reached: int) -> None:
    workers = Workers([1.0, 1.0, 1.0, 5.0], staleness, steps=125, count=8, seed=0)
    workers.run()
    assert workers.taken == Counter({(step, piece): 1 for step in range(1, 126) for piece in range(8)})
    assert workers.updates == 1000 and sum(workers.pieces.results[0]) == 0.0
    assert len(workers.pieces.new_results()) == 1000 and not workers.pieces.new_results()
    assert max(workers.staleness) == reached, "the limit is reached, and never exceeded"
    if staleness is None:  # it computed about a fifth of what the others did, and held nobody up
        assert 4 <= workers.of_worker[0] / workers.of_worker[3] <= 6
        assert workers.now < 1.05 * 1000 / (3 + 1 / 5)


@given(
    st.lists(st.floats(0.1, 10.0), min_size=1, max_size=6), st.integers(0, 9), st.integers(1, 5), st.integers(0, 1000)
)
def test_whatever_the_speeds_no_gradient_is_too_old_and_all_ends(
    slowness: list[float], staleness: int, steps: int, seed: int
) -> None:
    count = 2 * len(slowness)
    workers = Workers(slowness, staleness, steps, count, seed)
    workers.run()
    assert workers.updates == steps * count == sum(workers.taken.values()) == len(workers.taken)
    assert max(workers.staleness) <= min(staleness, workers.updates)
