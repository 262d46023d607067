"""verify as a mutation test: published bugs are caught and named, clean layouts pass."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtrain.cli import main
from dtrain.commands.verify import mutation_test
from dtrain.commands.verify.command import judged, plan_one
from dtrain.commands.verify.mutants import MUTANTS, Mutant, chosen
from dtrain.commands.verify.mutation_test import Runs, draw_layout, draw_settings, of_clean, of_mutants
from tests.world import start_server

# one each for the gradients, the mean, the data and a resume; and what must be named
OFTEN = {
    "parameter-not-reduced": "norm.bias",
    "mean-of-rank-means": "layers.",
    "same-data": "sample ",
    "moments-lost": "layers.",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """References are trained once for all mutants."""
    start_server()
    yield Runs(tmp_path_factory.mktemp("mutants"), 300, plan_one, judged)


@pytest.mark.parametrize(
    "mutant", [pytest.param(m, id=m.name, marks=() if m.name in OFTEN else pytest.mark.slow) for m in MUTANTS]
)
def test_is_killed_by_name(mutant: Mutant, runs: Runs) -> None:
    (outcome,) = of_mutants([mutant], runs)
    assert outcome.right, outcome
    assert outcome.named.startswith(OFTEN.get(mutant.name, "")), outcome


def test_a_clean_layout_passes(runs: Runs) -> None:
    (outcome,) = of_clean(1, runs)
    assert outcome.right, outcome


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_20_clean_layouts_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "clean=20", "--json", "--keep", str(tmp_path / "kept")]) == 0
    assert [row["right"] for row in json.loads(capsys.readouterr().out)] == [True] * 20


def test_the_table_of_mutants() -> None:
    from dtrain.commands.verify.mutations import MUTATIONS

    assert {m.name for m in MUTANTS} == MUTATIONS.keys() and len(MUTANTS) >= 24
    assert all("#" in m.source or m.source.startswith("arXiv:") for m in MUTANTS)
    assert len({m.what for m in MUTANTS}) == len(MUTANTS)
    assert chosen(["all"]) == list(MUTANTS)


def test_draws_are_the_same_each_time() -> None:
    import random

    first, second = (random.Random(0) for _ in range(2))
    assert draw_settings(first) == draw_settings(second) and draw_layout(first) == draw_layout(second)


@pytest.mark.parametrize(
    ("words", "message", "fix"),
    [
        (["mutants=same-dat"], "mutants=same-dat: there is no such mutant", "mutants=same-data"),
        (["clean=many"], "clean=many: must be a whole number of configurations", "clean=20"),
        (
            ["mutants=all", "train.steps=3"],
            "train.steps=3: mutants=… and clean=… choose their settings",
            "leave it out",
        ),
    ],
)
def test_bad_input(words: list[str], message: str, fix: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and fix in error.partition("\n  fix: ")[2]


def test_a_survivor_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = mutation_test.Outcome("x", "y", "z#1", "ddp", False, "", "", 1.0)
    assert not mutation_test.show(iter([outcome]), 1, "mutants killed", False)
    assert "SURVIVED" in capsys.readouterr().out
