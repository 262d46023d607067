"""What differs between two runs is named: the sample, the rank, the parameter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dtrain.commands.verify import compare, evidence, probe
from dtrain.commands.verify.command import Request, judge, plan
from dtrain.commands.verify.compare import OTHER_DATA
from dtrain.commands.verify.likely_cause import likely_cause
from tests.world import make_run, start_server


def note(step: int, rank: int, samples: list[int], random: int, place: tuple[int, int, int]) -> dict[str, Any]:
    return {
        "step": step, "rank": rank, "place": list(place), "data_rank": place[1], "random": random,
        "samples": samples, "ids": [sample % 100 for sample in samples],
    }  # fmt: skip


ONE = {step: [note(step, 0, [101 + 4 * step, 102 + 4 * step], step, (0, 0, 0))] for step in (1, 2)}


def two_ranks(second: list[int], random: int = 77) -> evidence.Notes:
    first = [note(1, 0, [105], 1, (0, 0, 0)), note(1, 1, [106], 70, (0, 1, 0))]
    return {1: first, 2: [note(2, 0, [109], 2, (0, 0, 0)), note(2, 1, second, random, (0, 1, 0))]}


@pytest.mark.parametrize(
    ("second", "named", "text"),
    [
        ([110], "", ""),
        ([109], "sample 10", "step 2: 1 of 2 samples differ; sample 10 is not read, sample 9 is read 2 times"),
        ([105], "sample 10", "sample 10 is not read, sample 5 of step 1 is read in its place"),
        ([999], "sample 10", "a sample is read in its place that one process never reads"),
        ([], "sample 10", "sample 10 is not read"),
    ],
)
def test_samples(second: list[int], named: str, text: str) -> None:
    found = evidence.compare_samples(two_ranks(second), ONE)
    assert (found.named if found else "") == named and text in (found.text if found else "")


@pytest.mark.parametrize(
    ("random", "text"),
    [
        (77, ""),
        (2, "step 2: rank 1 draws the random numbers of rank 0, for other activations"),
        (70, "step 2: rank 1 draws the random numbers of step 1 again"),
    ],
)
def test_random_numbers(random: int, text: str) -> None:
    found = evidence.compare_random(two_ranks([110], random), ONE)
    assert text == (found.text if found else "")


def test_tensor_ranks_draw_alike() -> None:
    pair = [note(1, rank, [105, 106], random, (0, 0, rank)) for rank, random in ((0, 1), (1, 5))]
    found = evidence.compare_random({1: pair}, ONE)
    assert found and found.named == "rank 1" and "the rank that holds the same activations" in found.text
    assert evidence.compare_random({1: [pair[0], pair[1] | {"random": 1}]}, ONE) is None
    unequal = evidence.compare_samples({1: [pair[0], pair[1] | {"samples": [105]}]}, ONE)
    assert unequal and "got different samples" in unequal.text


@pytest.mark.parametrize(
    ("factor", "text"),
    [
        (4.0, ": it is 4 times as large, as if summed over the 4 ranks, not averaged"),
        (0.25, ": it is 0.25 times as large, as if averaged twice over the 4 ranks"),
        (3.0, ": it is 3 times as large"),
        (1.001, ""),
        (0.0, ": it is 0"),
    ],
)
def test_a_factor_has_a_likely_cause(factor: float, text: str) -> None:
    right = torch.randn(8, generator=torch.Generator().manual_seed(0))
    assert likely_cause(factor * right, right, size=4) == text
    assert likely_cause(factor * right + torch.arange(8.0), right, size=4) == "", "it is no factor"


@pytest.mark.parametrize(
    ("norm_step", "weight", "loss", "named"),
    [(1, 1.0, 1.0, "gradient norm"), (2, 1.0, 1.0, "norm.weight"), (0, 0.0, 1.0, "loss"), (0, 0.0, 0.0, "")],
)
def test_a_difference_without_a_finding_has_a_name(norm_step: int, weight: float, loss: float, named: str) -> None:
    """A wrong norm shows at the first step; one that follows from a wrong update shows later."""
    norm = float(norm_step > 0)
    found = compare.Differences(loss, norm, weight, way=1.0, steps=(2, norm_step), at="norm.weight")
    assert found.named(compare.TOLERANCES["float32"]) == named


def test_weights_in_bf16_may_differ_by_a_few_of_their_steps(tmp_path: Path) -> None:
    """A norm's weight of 1 has a neighbour at 1 + 2^-7, farther away than a short run's learning rates reach."""
    allowed = compare.TOLERANCES["bfloat16"].weight
    for precision, few, many in (("bf16", 0, 0), ("bf16-pure", 3, 5)):
        run = make_run(tmp_path / precision, f"precision={precision}")
        assert few * 2**-7 <= allowed * compare.rounded_by(run) <= many * 2**-7


def test_a_sample_is_its_inputs_and_its_targets() -> None:
    inputs, targets = torch.arange(6).view(2, 3), torch.tensor([4, 5])
    found = probe.fingerprints((inputs, targets))
    assert found == probe.fingerprints((inputs.clone(), targets.clone())) and len(set(found)) == 2
    assert probe.fingerprints((inputs, targets.flip(0)))[0] != found[0]
    assert probe.fingerprints(({"a": inputs[1:]}, targets[1:])) == found[1:]


OFTEN = ("fsdp+resume", "ddp+uneven")
RESUMED = [f"{name}+resume" for name in ("zero1", "tensor", "pipeline", "fairscale", "ps")]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in OFTEN else pytest.mark.slow) for n in (OFTEN[0], *OTHER_DATA, *RESUMED)]
)
def test_rows_that_begin_in_the_middle_or_have_other_data_pass(name: str, tmp_path: Path) -> None:
    references, (case,) = plan(Request([name], True, [], ["fp32"], ["train.stop_after=4"]), tmp_path)
    one = references[case.reference or "fp32"]
    start_server()
    for run in (one, case):
        error = compare.run(run, timeout=150)
        assert not error, error
    row = judge(case, one, "", 0.0)
    assert row.passed and row.max_gradient_diff is not None, row
    assert row.max_gradient_diff < 1e-5
    steps = compare.steps_of(case.run_dir)
    assert sorted(steps) == ([3, 4] if name.endswith("+resume") else [1, 2, 3, 4])


def test_weights_in_16_bits_may_be_rounded_to_either_neighbour() -> None:
    one = torch.tensor([0.125, 1.0], dtype=torch.bfloat16)
    apart = torch.tensor([0.127, 1.016], dtype=torch.bfloat16)  # two spacings at 0.125, two at 1
    far = evidence.far
    assert not far(one, apart, 0.0) and far(one.float(), apart.float(), 0.0)
    assert far(one, torch.tensor([0.131, 1.0], dtype=torch.bfloat16), 0.0) and far(one, one[:1], 0.0)
