"""Why the first was chosen: the tree that users know, with the numbers of this plan."""

import pytest

from dtrain.plan.predict import Prediction, predict
from dtrain.plan.search.explain_choice import DOES, faster_micro_batch, name, order_notes, simpler_than, tight_note, why
from dtrain.plan.search.search import STRATEGIES, rank
from tests.commands.plan.capacity import question
from tests.plan.test_predict import made

CONFIG = {"train": {"global_batch_size": 8}, "cluster": {"nodes": 1, "processes": 4}}
DDP = {"strategy": "ddp", "data": "ddp"}


def told(*predictions: Prediction) -> str:
    return why(rank(list(predictions)), CONFIG)


def test_what_fits_on_one_gpu_is_held_by_every_gpu() -> None:
    text = told(made(20.0, 0.5, **DDP), made(8.0, 0.6))
    assert text == "ddp: with the whole model on every GPU it needs 21.0 GiB of 39.0 GiB a GPU."


def test_little_room_is_said() -> None:
    assert told(made(37.5, 0.5, **DDP)).endswith(
        "it needs 38.5 GiB of 39.0 GiB a GPU, which is tight: 0.50 GiB is left."
    )


def test_a_tight_layout_that_is_a_little_faster_is_named() -> None:
    found = rank(
        [made(20.0, 0.5), made(37.5, 0.49, data="grad_op"), made(37.4, 0.47, micro_batch_size=4, micro_batches=1)]
    )
    note = "fsdp, micro-batch 4 is 6% faster but would use 98% of the memory; a tight layout is first only if it is "
    assert tight_note(found) == [f"{note}more than 9% faster: the planner is 9% off on average"] == order_notes(found)
    text = why([*found, made(21.0, 0.6)], CONFIG, one_strategy=True)
    assert text.endswith("It is the fastest of 2 layouts that fit with room to spare; the next is 20% slower.")
    assert not order_notes(rank([made(20.0, 0.5), made(37.5, 0.4), made(30.0, 0.51)])), "first, as it should be"
    assert not order_notes(rank([made(20.0, 0.5), made(37.5, 0.6)])), "slower anyway"


def test_an_order_that_is_not_by_time_is_explained() -> None:
    first, next_, late = made(20.0, 0.5), made(20.0, 0.55), made(37.5, 0.53)
    assert order_notes(rank([first, next_, late])) == [
        "the order counts steps of tight layouts as 9% longer: the planner is 9% off on average"
    ]
    sharded = made(20.0, 0.53, strategy="tensor", tp=2, dp=2)
    assert order_notes(rank([first, next_, sharded])) == [
        "the order counts steps of tensor, pipeline, 3d, of which no run of ours has timed a step, as 9% longer: the "
        "planner is 9% off on average"
    ]


def test_one_gpu_is_one() -> None:
    text = told(made(8.0, 0.6, dp=1))
    assert "on one GPU it needs" in text


@pytest.mark.parametrize(("micro", "said"), [(1, True), (16, False)])
def test_another_micro_batch_that_is_faster_is_named(micro: int, said: bool) -> None:
    asked = question("model=gpt2-124m", "hardware=h100", "train.global_batch_size=128", "strategy=ddp")
    asked.config["train"]["micro_batch_size"] = micro
    best = predict(asked.config)
    assert best is not None
    notes = faster_micro_batch(best)
    assert bool(notes) == said
    if notes:
        size = int(notes[0].split("=")[1].split()[0])
        asked.config["train"]["micro_batch_size"] = size
        other = predict(asked.config)
        assert other is not None and other.fits and best.step_s and other.step_s
        assert notes == [f"train.micro_batch_size={size} would be {best.step_s / other.step_s - 1:.0%} faster"]


def test_optimizer_state_that_does_not_fit_is_cut() -> None:
    text = told(made(60.0, 0.5, **DDP), made(30.0, 0.4, strategy="zero1", data="zero1"), made(8.0, 0.6))
    assert text.startswith("zero1: ddp would need 61.0 GiB a GPU; with optimizer state sharded over 4 GPUs it needs")


def test_a_model_that_does_not_fit_is_cut() -> None:
    text = told(made(60.0, 0.5, **DDP), made(8.0, 0.6))
    assert text == (
        "fsdp: ddp would need 61.0 GiB a GPU; "
        "with weights, gradients and optimizer state sharded over 4 GPUs it needs 9.00 GiB of 39.0 GiB a GPU."
    )


def test_a_faster_strategy_says_how_much_slower_the_simpler_ones_are() -> None:
    text = told(made(60.0, 0.5, **DDP), made(8.0, 0.6), made(9.0, 0.5, strategy="tensor", tp=2, dp=2))
    assert "ddp would need 61.0 GiB a GPU; fsdp fits, but is 20% slower (600 ms a step); " in text
    assert text.startswith("tensor, tp 2 × dp 2: ") and "sharded over 2 GPUs of a node" in text


def test_a_batch_too_small_for_data_parallel_is_said() -> None:
    config = {"train": {"global_batch_size": 2}, "cluster": {"nodes": 1, "processes": 4}}
    text = why([made(8.0, 0.6, strategy="3d", tp=2, pp=2, dp=1)], config)
    assert text.startswith(
        "3d, tp 2 × pp 2: ddp and fsdp need a batch that divides over 4 GPUs, but it has 2 samples; "
    )


def test_what_was_needed_to_make_it_fit_is_said() -> None:
    text = told(made(8.0, 0.6, activation_checkpointing="full", offload="cpu", strategy="zero3", data="zero3"))
    assert text.endswith("with full activation checkpointing and offload to cpu.")


def test_when_nothing_fits_what_is_lacking_is_said() -> None:
    text = told(made(60.0, 0.5, **DDP), made(50.0, 0.6))
    assert text.startswith(
        "Nothing fits: fsdp comes closest, but it lacks 12.0 GiB. Try activation_checkpointing=full."
    )
    hopeless = told(made(50.0, 0.6, activation_checkpointing="full"))
    assert "More GPUs" in hopeless


def test_one_strategy_is_compared_with_its_own_layouts() -> None:
    found = rank([made(8.0, 0.6), made(9.0, 0.8, micro_batch_size=1, micro_batches=2)])
    text = why(found, CONFIG, one_strategy=True)
    assert text.endswith("It is the fastest of 2 layouts that fit; the next is 33% slower.")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_has_its_words_and_its_place(strategy: str) -> None:
    assert strategy in DOES
    assert strategy not in simpler_than(strategy)
    assert name(made(strategy=strategy).layout).startswith(strategy)
