"""What ranks must have in common before the first step, and how a rank that has something else is named."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
import torch.distributed as dist

from dtrain.commands.verify.world import World, train_rank
from dtrain.util.collective import all_problems, collect, require_same
from tests.world import make_run, spawn, start_server


def refuses_what_differs() -> None:
    facts = {"config.yaml": ("abc", "share it"), "data": ("5 samples", "copy it to {host}")}
    require_same(facts)
    if dist.get_rank() == 1:
        facts["data"] = ("6 samples", "copy it to {host}")
    with pytest.raises(ValueError) as refused:
        require_same(facts)
    host = socket.gethostname()
    assert str(refused.value) == (
        f"data=…: must be the same on all ranks: rank 1 ({host}) has 6 samples, and rank 0 ({host}) has 5 samples\n"
        f"  fix: copy it to {host}"
    )


def collects_values_and_problems() -> None:
    rank = dist.get_rank()
    value = {"rank": rank, "long": "é" * 100 * rank}  # one is longer than the other
    expected = [{"rank": r, "long": "é" * 100 * r} for r in range(2)] if rank == 0 else []
    assert collect(value) == expected
    assert all_problems("") == []
    assert all_problems("full disk" if rank == 1 else "") == ["full disk"]
    assert all_problems(f"rank {rank}") == ["rank 0", "rank 1"]


def test_values_reach_rank_0_and_problems_all_ranks() -> None:
    spawn(2, collects_values_and_problems)


def test_a_rank_with_something_else_is_named() -> None:
    spawn(3, refuses_what_differs)


def rank_with_its_own_data(run_dir: Path) -> int:
    """What a node with a disk of its own may do: the same path, another file."""
    os.chdir(run_dir.parent / f"node-{os.environ['RANK']}")
    return train_rank(run_dir)


@pytest.mark.parametrize("split", ["train", "val"])
def test_other_data_on_one_rank_is_refused_before_the_first_step(
    split: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "the same text on every node. " * 400
    for rank in (0, 1):
        node = tmp_path / f"node-{rank}"
        node.mkdir()
        # as long, but with another word: in the middle, or at the end that is held out
        other = text[:6000] + "!" * 40 + text[6040:] if split == "train" else text[:-80] + "!" * 40 + text[-40:]
        (node / "text.txt").write_text(other if rank == 1 else text)
    monkeypatch.chdir(tmp_path / "node-0")
    sizes = ["model.vocab_size=256", "model.num_layers=1", "train.eval_batches=1", "train.steps=2"]
    run = make_run(tmp_path / "run", "data=text", "data.path=/proc/self/cwd/text.txt", "cluster.processes=2", *sizes)
    start_server()
    assert World(2, rank_with_its_own_data, run).join() == [2, 2]
    messages = {json.loads((run / "logs" / f"failure-{rank}.json").read_text())["message"] for rank in (0, 1)}
    (message,) = messages
    name = "data=…" if split == "train" else "data (validation)=…"
    assert message.startswith(f"{name}: must be the same on all ranks: rank ") and "copy the same files" in message
    assert not (run / "checkpoints").exists() and not (run / "metrics.jsonl").exists()
