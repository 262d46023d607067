"""The published figures are read as they were published, and the errors that are reported of them are what they say."""

from __future__ import annotations

import sys
import xml.etree.ElementTree
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.plan.layout import Layout
from dtrain.plan.model_shape import Transformer
from dtrain.plan.parameters import num_parameters

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "planner"))

import choose
import figure
import our_steps
import rows
import score


@pytest.mark.parametrize("source", rows.SOURCES)
def test_every_row_uses_all_its_gpus_and_names_hardware_that_there_is(source: str) -> None:
    for row in rows.read(source):
        assert row.layout.world_size == row.gpus
        assert row.step_s > 0
        assert score.hardware(row.hardware).gpu


def test_the_sources_are_those_that_the_page_has_titles_for() -> None:
    from page import TITLES

    assert {*rows.SOURCES, our_steps.SOURCE} == set(TITLES)


def test_llm_foundry_models_have_the_published_number_of_parameters() -> None:
    for record in rows.records(rows.DATA / "llm_foundry.csv"):
        shape = rows.row_of("llm_foundry", record).shape
        assert num_parameters(shape) == int(record["num_params"]), record["label"]


def test_megatron_models_have_about_as_many_parameters_as_their_names_say() -> None:
    published = [1.7, 3.6, 7.5, 18.4, 39.1, 76.1, 145.6, 310.1, 529.6, 1008.0]  # table 1, in billions
    counted = [num_parameters(row.shape) / 1e9 for row in rows.read("megatron_sc21_table1")]
    assert counted == pytest.approx(published, abs=0.051)  # rounded to 0.1


def test_zero_steps_agree_with_the_days_that_the_paper_gives_beside_them() -> None:
    days = [90, 74, 74, 169, 137, 140, 84, 43, 23, 156, 80, 42]  # for 300 billion tokens: table 2's last column
    for row, published in zip(rows.read("megatron_sc21_table2"), days, strict=True):
        assert isinstance(row.shape, Transformer)
        steps = 300e9 / (row.layout.global_batch_size * row.shape.seq_len)
        assert abs(row.step_s * steps / 86400 - published) < 0.5 + 0.012 * published  # both are rounded


def test_steps_of_2020_agree_with_the_rates_given_beside_them() -> None:
    rates = [71.9, 64.2, 58.5, 52.2, 149.8, 136.8, 124.7, 109.3, 139.8, 127.5, 116.7, 106.5]  # TFLOP/s a GPU
    for row, published in zip(rows.read("megatron_2020"), rates, strict=True):
        assert isinstance(row.shape, Transformer)
        flops = rows.megatron_flops(row.shape, row.layout.global_batch_size)
        assert flops / row.step_s / row.gpus / 1e12 == pytest.approx(published, rel=0.002)


def test_megatron_operations_are_four_thirds_of_the_models_own_but_for_the_head() -> None:
    shape = Transformer(24, 2304, 24, 24, 9216, seq_len=2048, vocab_size=51200)
    head = 6 * 512 * 2048 * 2304 * 51200
    assert rows.megatron_flops(shape, 512) - head == pytest.approx((rows.model_flops(shape, 512) - head) * 4 / 3)


def test_a_source_whose_steps_are_exactly_linear_in_the_passes_carries_a_caution() -> None:
    """A clock has noise: slopes that agree to 1e-12 were computed, and whoever reads the errors must be told."""
    for source in rows.SOURCES:
        series: dict[object, dict[int, float]] = defaultdict(dict)
        for row in rows.read(source):
            series[row.shape, replace(row.layout, micro_batches=1), row.hardware][row.layout.micro_batches] = row.step_s
        exact = 0
        for found in map(sorted, (steps.items() for steps in series.values() if len(steps) > 2)):
            slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(found)]
            exact += max(slopes) / min(slopes) - 1 < 1e-12
        assert bool(rows.caution(source)) == (exact > 2), source


def test_a_column_that_nobody_reads_is_refused() -> None:
    record = rows.records(rows.DATA / "megatron_2020.csv")[0]
    with pytest.raises(ValueError, match="column micro_batch is not known"):
        rows.row_of("mine", record | {"micro_batch": "8"})


def test_degrees_that_do_not_multiply_to_the_gpus_are_refused() -> None:
    record = rows.records(rows.DATA / "megatron_2020.csv")[0]
    with pytest.raises(ValueError, match="gpus must be tp × pp × dp"):
        rows.row_of("mine", record | {"tp": "3", "gpus": "8"})


def test_a_second_measured_quantity_is_refused() -> None:
    record = rows.records(rows.DATA / "megatron_2020.csv")[0]
    with pytest.raises(ValueError, match="one measured quantity"):
        rows.row_of("mine", record | {"step_s": "1.0"})


def scored(step_s: float, compute: float, other: float, group: str = "a batch 8", **layout: int) -> score.Scored:
    """A row that was measured to take step_s, and is predicted to compute and to do other things for so long."""
    shape = Transformer(2, 64, 2, 2, 256, seq_len=16, vocab_size=128)
    row = rows.Row("mine", "row", shape, Layout("3d", **layout), "a100-80gb", 1, 1, "llm.c", step_s, group)
    return score.Scored(row, {"total": compute + other, "compute": compute, "communication": other})


seconds = st.floats(0.01, 100)


@given(st.lists(st.tuples(seconds, seconds), min_size=2, max_size=6), st.floats(0.3, 3))
def test_one_measured_row_mends_computing_that_is_wrong_everywhere_by_the_same_factor(
    parts: list[tuple[float, float]], factor: float
) -> None:
    every = [scored(factor * compute + other, compute, other) for compute, other in parts]
    assert score.with_one_point(every).worst < 1e-6


@given(st.lists(st.tuples(seconds, seconds), min_size=2, max_size=6))
def test_a_choice_is_never_faster_than_the_best_and_perfect_predictions_choose_it(
    pairs: list[tuple[float, float]],
) -> None:
    (choice,) = choose.choices([scored(measured, predicted, 0.0) for measured, predicted in pairs])
    assert choice.slowdown >= 0
    (perfect,) = choose.choices([scored(measured, measured, 0.0) for measured, _ in pairs])
    assert perfect.slowdown == 0


def test_with_any_batch_the_time_of_a_sample_decides() -> None:
    small, large = scored(1.0, 1.0, 0.0, "a batch 1"), scored(3.0, 3.0, 0.0, "a batch 8", micro_batch_size=8)
    assert choose.choices([small, large]) == []
    (choice,) = choose.choices([small, large], choose.any_batch)
    assert choice.best is large and choice.slowdown == 0


def test_errors_have_the_sign_of_the_prediction() -> None:
    errors = score.Errors.of(one.error for one in [scored(1.0, 1.1, 0.0), scored(1.0, 0.7, 0.0), scored(1.0, 1.0, 0.0)])
    assert (errors.mean, errors.median, errors.worst, errors.bias) == pytest.approx((0.4 / 3, 0.1, 0.3, -0.2 / 3))


def test_hardware_files_take_over_what_their_defaults_say() -> None:
    base, cluster = score.hardware("a100-80gb"), score.hardware("selene")
    assert cluster.memory_gb_s == base.memory_gb_s
    assert cluster.network_max_gb_s and not base.network_max_gb_s


def test_a_figure_is_an_svg_with_a_point_for_each_row() -> None:
    every = [scored(1.0, 1.1, 0.0), scored(20.0, 17.0, 1.0, tp=2), scored(3.0, 4.0, 0.0, tp=2, pp=2)]
    tree = xml.etree.ElementTree.fromstring(figure.draw("a < b & c", every))
    space = "{http://www.w3.org/2000/svg}"
    labels = [path.findtext(f"{space}title") for path in tree.findall(f"{space}path")]
    assert sum(label is not None and "measured" in label for label in labels) == 3
    kinds = {text.text for text in tree.findall(f"{space}text")}
    assert {"data parallel", "tensor", "tensor and pipeline"} <= kinds and "pipeline" not in kinds
