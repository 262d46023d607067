"""What cannot be divided over ranks is said before the launch, with a fix that works."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest

from tests.world import make_run

CP = ["strategy=fsdp", "strategy.cp=2"]
TENSOR = ["strategy=tensor", "strategy.tp=2", "strategy.cp=2", "strategy.sequence_parallel=true"]
ZBV = ["strategy=pipeline", "strategy.pp=2", "strategy.cp=2", "strategy.schedule=zbv"]
REFUSED = [
    ([*CP, "model=bert-tiny"], "strategy.cp=2: model=bert-tiny is bidirectional"),
    ([*CP, "model.dropout=0.1"], "model.dropout=0.1: dropout of attention"),
    ([*CP, "model.seq_len=18"], "data.seq_len=18 must be a multiple of 4\n  fix: data.seq_len=16"),
    ([*CP, "strategy.cp_kind=ulysses", "data.seq_len=15"], "data.seq_len=15 must be a multiple of 2"),
    ([*CP, "strategy.cp_kind=ulysses", "model.num_heads=1"], "model.num_heads=1\n  fix: strategy.cp_kind=ring"),
    ([*CP, "activation_checkpointing=ops"], "activation_checkpointing=ops: would keep the attention"),
    ([*CP, "compile=whole"], "compile=whole: "),
    (
        [*CP, "trust=[mine]", "loss._target_=mine.of_sequences"],
        "means over tokens\n  fix: loss=own, loss=cross_entropy",
    ),
    ([*TENSOR, "strategy.cp_kind=ulysses", "model.seq_len=6"], "a multiple of the 2 tensor-parallel × 2 context"),
    ([*CP, "cluster.processes=3"], "fix: strategy.cp=1 strategy.dp=-1, or cluster.processes=2"),
]


@pytest.fixture(autouse=True)
def own_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("def of_sequences(outputs, targets): ...\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(("overrides", "message"), REFUSED, ids=[" ".join(o) for o, _ in REFUSED])
def test_refused_before_the_launch(overrides: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make_run(tmp_path / "run", "cluster.processes=4", *overrides)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("overrides", [[*CP, "loss=cross_entropy"], TENSOR, [*CP, "strategy.cp_kind=ulysses"]])
def test_accepted(overrides: list[str], tmp_path: Path) -> None:
    make_run(tmp_path / "run", "cluster.processes=4", *overrides)


def test_zbv_needs_a_torch_that_splits_autograd_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version, is_refused in (("2.11.0+cpu", True), ("2.13.0", False)):
        monkeypatch.setattr(importlib.metadata, "version", lambda name, version=version: version)
        if not is_refused:
            make_run(tmp_path / version, "cluster.processes=4", *ZBV)
            continue
        with pytest.raises(ValueError, match=r"schedule=zbv: .*torch before 2.13.*\n  fix: strategy.schedule=inter"):
            make_run(tmp_path / version, "cluster.processes=4", *ZBV)


def test_ranks_that_share_a_gpu_gather(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtrain.config.hardware.count_gpus", lambda: 1)
    with pytest.raises(ValueError, match=r"share a GPU.*\n  fix: strategy.cp_kind=allgather"):
        make_run(tmp_path / "run", "cluster.processes=2", *CP)
