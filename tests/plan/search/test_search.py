"""The search: what it proposes is what the launcher accepts, what is typed stays, and the best comes first."""

import functools
import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.checks.validate import validate
from dtrain.config.files import CONF
from dtrain.config.mesh import MeshSizes
from dtrain.plan.layout import Layout, layout_of
from dtrain.plan.memory.activations import GIB
from dtrain.plan.predict import Prediction, Task, least_time_of, predict_layout, task_of
from dtrain.plan.report import faster_tight
from dtrain.plan.search import search as module
from dtrain.plan.search.candidates import STRATEGIES, Frame, divisors, frames
from dtrain.plan.search.search import (
    LEAD,
    UNCLOCKED,
    Limits,
    accepted,
    accepts,
    base_layout,
    candidates,
    complexity,
    fitting,
    idle,
    in_mode,
    modes_of,
    overrides_of,
    rank,
    search,
)
from tests.commands.plan.capacity import applied, question
from tests.plan.test_predict import made

SEVEN_B = ("model=llama-7b", "hardware=h100", "data=synthetic", "train.global_batch_size=64")
LARGE = ("model=llama-70b", "hardware=a100-80gb", "cluster.nodes=8", "data=synthetic", "train.global_batch_size=128")
PICTURES = ("model=resnet50", "hardware=v100", "train.global_batch_size=256")
GROUPED = ("model=llama-1b", "hardware=l4", "cluster.processes=4", "data=synthetic", "train.global_batch_size=24")
MASKED = ("model=bert-large", "hardware=h100", "cluster.nodes=3", "train.global_batch_size=48")
LONG = ("model=llama-8b", "hardware=h100", "data=synthetic", "train.global_batch_size=16", "model.seq_len=65536")
DIVIDED = [
    (*LONG, "strategy.cp=8", "strategy=fsdp"), (*LONG, "strategy.cp=4", "strategy.cp_kind=allgather"),
    (*LONG, "strategy.cp=2", "strategy.cp_kind=ulysses"), (*LONG, "strategy.cp=2", "strategy=3d"),
]  # fmt: skip


@pytest.mark.parametrize(
    "asked", [SEVEN_B, LARGE, PICTURES, GROUPED, MASKED, *DIVIDED],
    ids=lambda asked: " ".join(w for w in asked if w.startswith(("model=", "strategy"))),
)  # fmt: skip
def test_the_launcher_accepts_what_is_proposed_and_means_the_same(
    asked: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTRAIN_CPU_FP16", "1")  # the plan is for GPUs, whatever this CPU can do
    config = question(*asked).config
    found = candidates(config, {word.partition("=")[0] for word in asked if word.startswith("strategy")})
    assert len(found) > 5
    for prediction in found[:: max(1, len(found) // 40)]:
        typed = overrides_of(prediction, config)
        composed = applied(typed, config)
        sizes = validate(composed)  # a ValueError here is a layout that must not have been proposed
        layout = prediction.layout
        assert sizes == MeshSizes(layout.pp, layout.dp, layout.tp, layout.cp), typed
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
        ("strategy=ps", lambda p: (p.strategy, p.data) == ("ps", "sync")),
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
    groups: dict[tuple[bool, bool], list[float]] = {}
    for p in found:
        if p.fits:
            groups.setdefault((p.layout.strategy in UNCLOCKED, p.tight), []).append(p.step_s or 0.0)
    assert len(groups) > 2
    for times in groups.values():
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
        seen.append(args[3])
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


@pytest.mark.parametrize(
    "asked",
    [
        SEVEN_B,
        PICTURES,
        GROUPED,
        MASKED,
        (*SEVEN_B[:3], "train.global_batch_size=1024", "cluster.nodes=3"),
        (*SEVEN_B, "cluster.processes=1"),
        (*SEVEN_B, "strategy=3d", "cluster.nodes=2"),
        (*SEVEN_B, "activation_checkpointing=full", "cluster.nodes=4"),
        ("model=gpt2-tiny", "hardware=h100", "train.global_batch_size=32"),
        (*SEVEN_B[:3], "train.global_batch_size=96", "cluster.nodes=3"),
    ],
    ids=lambda asked: "-".join(asked[:1] + asked[3:]),
)
def test_a_search_for_the_best_alone_finds_the_same(asked: tuple[str, ...]) -> None:
    typed = {word.partition("=")[0] for word in asked} & {"strategy", "activation_checkpointing"}
    config = question(*asked).config
    task = task_of(config)
    every, best = (search(config, typed, task, time_unfit=False, only_best=only) for only in (False, True))
    assert best[0] == every[0] and len(best) <= len(every)


DIVIDED = (*SEVEN_B, "strategy=3d", "strategy.cp=2")


@pytest.mark.parametrize("asked", [SEVEN_B, GROUPED, MASKED, DIVIDED], ids=["7b", "grouped", "masked", "divided"])
def test_a_step_takes_at_least_its_lower_bound(asked: tuple[str, ...]) -> None:
    config = question(*asked).config
    task = task_of(config)
    assert task is not None
    for p in search(config, everything=True):
        assert 0 < least_time_of(p.layout, task) <= (p.step_s or 0.0), p.layout


def test_an_unknown_model_or_hardware_has_no_layouts() -> None:
    config = question(*SEVEN_B).config
    assert search({**config, "model": {"_target_": "my.Net"}}) == []
    assert search({**config, "hardware": {"_target_": "dtrain.config.hardware.Hardware"}}) == []


def test_a_batch_that_nobody_can_share_has_no_layouts() -> None:
    config = question(*SEVEN_B, "strategy=ddp", "train.global_batch_size=63").config
    assert search(config, {"strategy"}) == []


def test_how_long_pipelines_wait() -> None:
    assert idle(1, 1, 1) == 0
    assert idle(4, 1, 8) == pytest.approx(3 / 8)  # 1f1b
    assert idle(4, 2, 8) == pytest.approx(3 / 16)  # interleaved
    assert idle(2, 4, 1) == 1  # one micro-batch: one rank works at a time, however many stages it has


# ---- the layouts of a frame ----------------------------------------------------------------------------------


def layouts_of(frame: Frame, config: dict[str, Any], task: Task) -> list[Layout]:
    """Every micro-batch that the launcher takes, and gpipe only where 1f1b is refused."""
    per_rank, base = task.global_batch_size // frame.sizes.dp, base_layout(frame, config)
    assert accepted(frame, config)
    sizes = [size for size in divisors(per_rank) if accepts(frame, config, per_rank // size)]
    if base.schedule == "gpipe" and base.pp > 1:
        sizes = [size for size in sizes if per_rank // size < base.pp]
    return [replace(base, micro_batch_size=size, micro_batches=per_rank // size) for size in sizes]


def needed(prediction: Prediction) -> float:
    return prediction.memory_bytes + prediction.reserve


@functools.cache
def frames_of(asked: tuple[str, ...], strategy: str) -> tuple[dict[str, Any], Task, list[Frame]]:
    config = question(*asked).config
    config["cluster"]["processes"] = 8
    task = task_of(config)
    assert task is not None
    return config, task, [frame for frame in frames(config, ()) if frame.name == strategy]


@settings(max_examples=80, deadline=None)
@given(st.data(), st.sampled_from([SEVEN_B, MASKED]), st.sampled_from(["fairscale", "fsdp", "zero1", "pipeline", "3d"]))
def test_no_layout_of_a_frame_is_missed_nor_computes_again_what_would_fit(
    data: st.DataObject, asked: tuple[str, ...], strategy: str
) -> None:
    """Against every micro-batch with every checkpointing, on GPUs that have just enough for one of them."""
    config, task, several = frames_of(asked, strategy)
    frame = data.draw(st.sampled_from(several))
    every = [
        predict_layout(in_mode(layout, mode, frame, config), task, timed=False)
        for layout in layouts_of(frame, config, task)
        for mode in modes_of(frame)
    ]
    if not every:
        return
    limit = needed(data.draw(st.sampled_from(every))) / GIB * (1 + 1e-9)
    limited = task_of({**config, "hardware": {**config["hardware"], "usable_memory_gib": limit}})
    assert limited is not None
    expected: set[Layout] = set()
    roomy: set[int] = set()
    for p in (replace(p, task=limited) for p in every):
        if p.fits and p.layout.micro_batch_size not in roomy:  # a tight one comes with more checkpointing, too
            expected.add(p.layout)
            roomy |= set() if p.tight else {p.layout.micro_batch_size}
    assert {p.layout for p in fitting(frame, config, (), limited, Limits()) if p.fits} == expected


@pytest.mark.parametrize("name", sorted({path.stem for path in Path(CONF, "model").glob("*.yaml")} - {"hf"}))
def test_every_model_that_is_shipped_can_be_planned_for(name: str) -> None:
    config = question(f"model={name}", "hardware=h200", "cluster.processes=8", "train.global_batch_size=16").config
    found = search(config)
    assert found
    for p in found:
        items = [*p.memory, *(p.time or ())]
        assert all(math.isfinite(item.value) and item.value >= 0 for item in items), p.layout
        assert p.memory_bytes > 0 and (p.step_s or 0) > 0
        assert not p.layout.loss_parallel or not ("classify" in name or name.startswith("vit"))


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
    fancy = made(step_s=0.500, strategy="zero3", data="zero3")
    plain = made(step_s=0.504, strategy="ddp", data="ddp")
    late = made(step_s=0.52, strategy="ddp", data="ddp")
    assert rank([fancy, late, plain]) == [plain, fancy, late]


@pytest.mark.parametrize("strategy", UNCLOCKED)
def test_a_strategy_that_was_never_clocked_needs_a_lead(strategy: str) -> None:
    known = made(step_s=0.5, strategy="ddp", data="ddp")
    near = made(step_s=0.5 / LEAD * 1.001, strategy=strategy)
    ahead = made(step_s=0.5 / LEAD * 0.98, strategy=strategy)
    assert rank([near, known]) == [known, near]
    assert rank([ahead, known]) == [ahead, known]
    too_large = replace(known, reserve=1e15)
    assert rank([near, too_large]) == [near, too_large]


@pytest.mark.parametrize("tight", [{}, {"micro_batch_size": 4}, {"strategy": "ddp", "data": "ddp"}], ids=str)
def test_a_tight_layout_needs_a_lead(tight: dict[str, Any]) -> None:
    roomy = made(20.0, 0.5)
    near, ahead = made(37.5, 0.5 / LEAD * 1.001, **tight), made(37.5, 0.5 / LEAD * 0.98, **tight)
    assert rank([near, roomy]) == [roomy, near] and faster_tight([roomy, near]) is near
    assert rank([ahead, roomy]) == [ahead, roomy] and faster_tight([ahead, roomy]) is None
    assert rank([made(37.5, 0.5, **tight), made(37.4, 0.51)])[0].step_s == 0.5, "if all are tight, the fastest"


@pytest.mark.parametrize(
    "asked", [("model=bert-large", "train.global_batch_size=64"), ("model=gpt2-124m",)], ids=lambda asked: asked[0]
)
def test_a_model_that_fits_easily_is_not_put_into_a_pipeline(asked: tuple[str, ...]) -> None:
    best = search(question(*asked, "hardware=h200", "cluster=slurm", "cluster.nodes=1").config)[0]
    assert best.layout.world_size == 8 and best.layout.strategy == "ddp"


def test_what_lacks_least_is_closest_whichever_memory_it_is() -> None:
    card, host = made(50.0), made(1.0, offload="cpu", hardware={"host_memory_gib": 1e-6})
    assert card.fits is host.fits is False and (host.host_room or 0) > -GIB
    assert rank([card, host]) == [host, card]
    both = replace(host, memory=card.memory, reserve=20 * GIB)
    assert rank([both, card]) == [card, both]


def test_offload_to_a_host_of_unknown_memory_is_no_plain_yes() -> None:
    unknown, known = made(step_s=0.1, offload="cpu"), made(step_s=0.5)
    too_large = made(memory=100.0, step_s=0.1)
    assert rank([too_large, unknown, known]) == [known, unknown, too_large]


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
    assert overrides_of(plain, asked.config) == ["strategy=fsdp"]
    assert overrides_of(plain, question(*SEVEN_B).config) == ["strategy=fsdp", "train.micro_batch_size=1"]
