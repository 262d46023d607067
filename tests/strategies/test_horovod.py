"""strategy=horovod: ddp's maths through Horovod's all-reduce. Where it is built, tests/parity resumes it, too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.world import losses, make_run, start, summary, train, wait_for

pytest.importorskip("horovod", reason="Horovod is not built: make horovod")
TWO = ("cluster.processes=2", "train.micro_batch_size=1", "train.steps=6")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same steps under ddp."""
    run = make_run(tmp_path_factory.mktemp("ddp") / "run", "strategy=ddp", *TWO)
    assert train(run, 2) == [0, 0]
    return run


def test_it_computes_what_ddp_does(reference: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "strategy=horovod", "strategy.bucket_mb=1", *TWO)
    assert train(run, 2) == [0, 0]
    assert losses(run) == losses(reference), "two values have one sum, in any order"
    assert summary(run)["weights_sha256"] == summary(reference)["weights_sha256"]


def test_fp16_rounds_what_is_sent(reference: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "strategy=horovod", "strategy.compress=fp16", *TWO)
    assert train(run, 2) == [0, 0]
    apart = max(abs(losses(run)[step] - loss) for step, loss in losses(reference).items())
    assert 0 < apart < 2e-4


def test_a_killed_peer_is_not_mistaken_for_an_error_of_this_rank(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "strategy=horovod", *TWO, "train.steps=100000", "checkpoint.every=2")
    world = start(run, 2)
    wait_for(world, run, 3)
    world.ranks[1].kill()
    assert world.join()[0] == 3
    note = json.loads((run / "logs/failure-0.json").read_text())
    assert note["lost_peer"] and "Horovod has been shut down" in note["message"]
