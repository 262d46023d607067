"""strategy.bucket_mb=auto: which sizes are tried, that measuring changes no bit, and that a resume keeps the choice."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dtrain.cli import main
from dtrain.strategies import buckets
from tests.world import losses, make_run, summary, train

WIDE = ["model.dim=128", "model.seq_len=4", "train.global_batch_size=12", "checkpoint.every=3", "train.steps=6"]


@pytest.mark.parametrize("mib, sizes", [(0.5, {1}), (4, {1, 5}), (20, {1, 5, 25}), (999, set(buckets.SIZES_MB))])
def test_sizes_that_would_be_one_bucket_are_tried_once(mib: float, sizes: set[int]) -> None:
    assert set(buckets.sizes_to_try(int(mib * buckets.MIB))) == sizes


def test_slow_sizes_are_visited_once_and_the_best_is_chosen() -> None:
    visits: list[int] = []

    def visit(mb: int) -> list[float]:
        visits.append(mb)
        return [0.1 + 0.015 * abs(mb - 10)]

    best, passes = buckets.best_of(buckets.measure([25, 5, 1, 10, 11], visit))
    assert best == 10 and passes == {"1": 235.0, "5": 175.0, "10": 100.0, "11": 115.0, "25": 325.0}
    assert visits == [25, 5, 1, 10, 11, *[10, 11] * (buckets.ROUNDS - 1)]


def test_on_a_slow_link_only_some_sizes_are_tried() -> None:
    times = buckets.measure([25, 5, 100, 10, 1], lambda mb: [20.0 + mb])
    assert list(times) == [25, 5, 100] and buckets.best_of(times)[0] == 5


def test_measuring_changes_no_bit(tmp_path: Path) -> None:
    """Two ranks add in one order whatever the buckets; dropout would show a random draw that is not put back."""
    fixed, auto = (
        make_run(tmp_path / name, *WIDE, "model.dropout=0.1", f"strategy.bucket_mb={name}", "cluster.processes=2")
        for name in ("25", "auto")
    )
    assert train(fixed, 2) == train(auto, 2) == [0, 0]
    assert losses(auto) == losses(fixed)
    assert summary(auto)["weights_sha256"] == summary(fixed)["weights_sha256"]
    choice = summary(auto)["buckets"]
    assert set(choice["pass_ms"]) == {"1", "5"} and str(choice["bucket_mb"]) in choice["pass_ms"]
    assert f"strategy.bucket_mb=auto: buckets of {choice['bucket_mb']} MiB" in (auto / "logs/rank-1.log").read_text()
    assert "buckets" not in summary(fixed)


def test_a_resume_keeps_the_choice_and_other_ranks_measure_again(tmp_path: Path) -> None:
    """With three ranks the buckets decide the order of the sums."""
    whole = make_run(tmp_path / "whole", *WIDE, "strategy.bucket_mb=auto", "checkpoint.keep=2", "cluster.processes=3")
    assert train(whole, 3) == [0] * 3
    resumed = tmp_path / "resumed"
    for run in (resumed, tmp_path / "fewer"):
        shutil.copytree(whole, run)
        (run / "checkpoints" / "latest").write_text("step-00000003")
        shutil.rmtree(run / "checkpoints" / "step-00000006")
    assert train(resumed, 3) == [0] * 3
    assert summary(resumed)["start_step"] == 3
    assert summary(resumed)["buckets"] == summary(whole)["buckets"]  # with its times: nothing was measured
    assert losses(resumed) == losses(whole)
    fewer = make_run(tmp_path / "fewer", *WIDE, "strategy.bucket_mb=auto", "cluster.processes=2")
    assert train(fewer, 2) == [0] * 2
    assert summary(fewer)["start_step"] == 3 and summary(fewer)["buckets"]["for"]["data_ranks"] == 2


@pytest.mark.parametrize(
    "words, message",
    [
        (["strategy.bucket_mb=auto", "deterministic=true"], "is measured"),
        (["strategy.bucket_mb=fast"], "must be a whole number or one of auto"),
        (["strategy.bucket_mb=0"], "must be at least 1"),
    ],
)
def test_what_is_refused(words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", *words, "cluster.processes=2", f"run_dir={tmp_path}/run"]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "run").exists()
