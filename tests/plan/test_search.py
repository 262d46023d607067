"""The search: what it proposes is what the launcher accepts, what is typed stays, and the best comes first."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.mesh import MeshSizes
from dtrain.plan import search as module
from dtrain.plan.frames import STRATEGIES, divisors
from dtrain.plan.layout import layout_of
from dtrain.plan.predict import Prediction
from dtrain.plan.search import candidates, complexity, idle, rank, search, words
from dtrain.validate import validate
from tests.plan.questions import applied, question
from tests.plan.test_predict import made

SEVEN_B = ("model=llama-7b", "hardware=h100", "data=synthetic", "train.global_batch_size=64")
LARGE = ("model=llama-70b", "hardware=a100-80gb", "cluster.nodes=8", "data=synthetic", "train.global_batch_size=128")
PICTURES = ("model=resnet50", "hardware=v100", "train.global_batch_size=256")
GROUPED = ("model=llama-1b", "hardware=l4", "cluster.processes=4", "data=synthetic", "train.global_batch_size=24")
MASKED = ("model=bert-large", "hardware=h100", "cluster.nodes=3", "train.global_batch_size=48")


@pytest.mark.parametrize("asked", [SEVEN_B, LARGE, PICTURES, GROUPED, MASKED], ids=lambda words: words[0])
def test_the_launcher_accepts_what_is_proposed_and_means_the_same(asked: tuple[str, ...]) -> None:
    config = question(*asked).config
    found = candidates(config)
    assert len(found) > 10
    for prediction in found[:: max(1, len(found) // 40)]:
        typed = words(prediction, config)
        composed = applied(typed, config)
        sizes = validate(composed)  # a ValueError here is a layout that must not have been proposed
        assert sizes == MeshSizes(prediction.layout.pp, prediction.layout.dp, prediction.layout.tp), typed
        assert layout_of(composed) == prediction.layout, typed


def test_all_strategies_are_looked_at_and_each_layout_once() -> None:
    found = search(question(*SEVEN_B).config)
    assert {p.layout.strategy for p in found} == set(STRATEGIES)
    assert len({p.layout for p in found}) == len(found)
    assert {p.layout.tp for p in found} == {1, 2, 4, 8}


def test_convolutions_are_only_shared_by_data_parallel_strategies() -> None:
    found = candidates(question(*PICTURES).config)
    assert {p.layout.strategy for p in found} <= {"ddp", "fsdp", "zero1", "zero2", "zero3", "fairscale"}
    assert found


@pytest.mark.parametrize(
    ("typed", "holds"),
    [
        ("strategy=pipeline", lambda p: p.strategy == "pipeline"),
        ("strategy.tp=4", lambda p: p.tp == 4),
        ("strategy.pp=2", lambda p: p.pp == 2),
        ("strategy.sequence_parallel=true", lambda p: p.sequence_parallel),
        ("strategy.schedule=gpipe", lambda p: p.schedule == "gpipe" and p.pp > 1),
        ("strategy.data=ddp", lambda p: p.data == "ddp" and p.strategy in ("tensor", "pipeline", "3d")),
        ("strategy.sharding=grad_op", lambda p: p.data == "grad_op"),
        ("strategy.offload=cpu", lambda p: p.offload == "cpu"),
        ("train.micro_batch_size=2", lambda p: p.micro_batch_size == 2),
        ("activation_checkpointing=selective", lambda p: p.activation_checkpointing == "selective"),
    ],
)
def test_what_is_typed_stays(typed: str, holds) -> None:  # type: ignore[no-untyped-def]
    asked = question(*SEVEN_B, typed)
    found = candidates(asked.config, asked.typed)
    assert found and all(holds(p.layout) for p in found)


def test_fitting_ones_come_first_and_faster_ones_before_them() -> None:
    found = search(question(*LARGE).config)
    fits = [p.fits for p in found]
    assert fits == sorted(fits, reverse=True) and fits[0] is True
    times = [p.step_s or 0.0 for p in found if p.fits]
    assert all(later >= 0.99 * earlier for earlier, later in itertools.pairwise(times))


def test_checkpointing_is_only_used_where_it_is_needed() -> None:
    for p in candidates(question("model=gpt2-124m", "hardware=h100", "data=synthetic").config):
        assert p.layout.activation_checkpointing == "none" and p.layout.offload == "none"


def test_offload_is_tried_where_nothing_fits_on_the_gpus() -> None:
    asked = question(
        "model=llama-7b", "hardware=h100", "cluster.processes=1", "strategy=fsdp", "train.global_batch_size=1"
    )
    found = search(asked.config, asked.typed)
    assert found[0].layout.offload == "cpu" and found[0].fits
    assert any(p.layout.offload == "none" and p.fits is False for p in found)


def test_pipelines_that_mostly_wait_are_looked_at_only_when_nothing_else_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    config = question(*SEVEN_B).config

    def waits(p: Prediction) -> bool:
        return idle(p.layout.pp, p.layout.stages_per_rank, p.layout.micro_batches) > 1

    assert not any(waits(p) for p in candidates(config))
    config["hardware"] = {**config["hardware"], "gpu_memory_gib": 4.0, "usable_memory_gib": 4.0}
    seen: list[bool] = []
    real = module.predicted

    def watched(*args: Any) -> list[Prediction]:
        seen.append(args[-1])
        return real(*args)

    monkeypatch.setattr(module, "predicted", watched)
    assert not any(p.fits for p in candidates(config))
    assert seen == [False, True]


def test_slow_pipelines_are_left_out_unless_all_are_asked_for() -> None:
    config = question(*SEVEN_B).config
    few, every = search(config), search(config, everything=True)
    assert {p.layout for p in few} < {p.layout for p in every}
    assert every[0].step_s == pytest.approx(few[0].step_s, rel=0.011)  # none of them is better
    left_out = {p.layout for p in every} - {p.layout for p in few}
    assert all(layout.pp > 1 for layout in left_out)


def test_an_unknown_model_or_hardware_has_no_layouts() -> None:
    config = question(*SEVEN_B).config
    assert search({**config, "model": {"_target_": "my.Net"}}) == []
    assert search({**config, "hardware": {"_target_": "dtrain.hardware.Hardware"}}) == []


def test_a_batch_that_nobody_can_share_has_no_layouts() -> None:
    config = question(*SEVEN_B, "strategy=ddp", "train.global_batch_size=63").config
    assert search(config, {"strategy"}) == []


def test_how_long_pipelines_wait() -> None:
    assert idle(1, 1, 1) == 0
    assert idle(4, 1, 8) == pytest.approx(3 / 8)  # 1f1b
    assert idle(4, 2, 8) == pytest.approx(3 / 16)  # interleaved
    assert idle(2, 4, 1) == 1  # one micro-batch: one rank works at a time, however many stages it has


# ---- the order -----------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.floats(1, 80), st.floats(0.01, 10)), min_size=1, max_size=12))
def test_ranking_loses_nothing_and_puts_what_fits_first(figures: list[tuple[float, float]]) -> None:
    given_ones = [made(memory, step_s) for memory, step_s in figures]
    ranked = rank(given_ones)
    assert sorted(map(id, ranked)) == sorted(map(id, given_ones))
    fits = [bool(p.fits) for p in ranked]
    assert fits == sorted(fits, reverse=True)
    if fits[0]:
        assert (ranked[0].step_s or 0) <= 1.01 * min(p.step_s or 0 for p in given_ones if p.fits)


def test_of_equally_fast_layouts_the_simplest_is_first() -> None:
    fancy = made(step_s=0.500, strategy="3d", tp=2, pp=2, dp=1)
    plain = made(step_s=0.504, strategy="ddp", data="ddp")
    late = made(step_s=0.52, strategy="ddp", data="ddp")
    assert rank([fancy, late, plain]) == [plain, fancy, late]


def test_simpler_is_less_of_everything() -> None:
    plain = made().layout
    for more in (
        {"offload": "cpu"}, {"activation_checkpointing": "full"}, {"data": "grad_op"}, {"strategy": "zero3"},
        {"strategy": "tensor", "tp": 2, "dp": 2}, {"replica_size": 2},
    ):  # fmt: skip
        assert complexity(made(**more).layout) > complexity(plain), more


@given(st.integers(1, 5000))
def test_divisors_are_all_and_rising(number: int) -> None:
    found = divisors(number)
    assert found == [d for d in range(1, number + 1) if number % d == 0]


def test_words_say_only_what_differs() -> None:
    asked = question(*SEVEN_B, "strategy=fsdp", "train.micro_batch_size=1")
    plain = next(p for p in candidates(asked.config, asked.typed) if p.layout.data == "fsdp")
    assert words(plain, asked.config) == ["strategy=fsdp"]
    assert words(plain, question(*SEVEN_B).config) == ["strategy=fsdp", "train.micro_batch_size=1"]
