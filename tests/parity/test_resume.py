"""A run is a function of (config, step): killed and resumed equals never interrupted."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from dtrain.comm.compress import TOLERANCES
from dtrain.commands.verify.compare import CONTEXT, STATES, VARIANTS
from tests.world import layouts, losses, make_run, start, summary, train, wait_for

STEPS = 20
WIDE = ("ddp", "zero3", "3d")  # at 4 ranks; the other strategies there with --all
COMPRESSED = [  # errors and factors are state, too; ddp+powersgd is in `make test`, the others with --all
    pytest.param("ddp+powersgd", 2),
    *(pytest.param(f"ddp+{word}", size, marks=pytest.mark.slow) for word, size in [
        ("powersgd", 4), ("topk", 2), ("topk", 4), ("int8", 4), ("onebit", 4),
    ]),
    *(pytest.param(f"fsdp+{word}", 4, marks=pytest.mark.slow) for word in ("int8", "onebit", "topk")),
]  # fmt: skip

WHOLE_MATRICES = {  # and with an average of the weights, which is state, too
    "muon": ["optim=muon", "optim.lr=3e-3", "ema.decay=0.9"],
    "adafactor": ["optim=adafactor", "ema.decay=0.9"],
}
OPTIMIZERS = [
    pytest.param(f"{strategy}+{optim}", size, marks=pytest.mark.slow)
    for optim in WHOLE_MATRICES
    for strategy, size in [("ddp", 4), ("fsdp", 2), ("zero1", 2), ("zero3", 2), ("tensor", 2), ("3d", 4)]
]


def asked_for(path: Path, rank: int) -> list[list[int]]:
    """The sample ids that a rank asked for, step by step. The first of each life is a look at the shape."""
    return [json.loads(line) for line in Path(f"{path}-{rank}").read_text().splitlines()]


# with two ranks a sum has one order only; with three or more it could depend on DDP's buckets
@pytest.mark.timeout(300)  # 20 s on a quiet machine
@pytest.mark.parametrize(
    ("strategy", "size"),
    [pytest.param(*at, marks=[] if at[1] == 2 or at[0] in WIDE else pytest.mark.slow) for at in layouts(2, 4)]
    + COMPRESSED
    + OPTIMIZERS
    + [
        pytest.param(name, size, marks=[] if name == "fsdp+state-int8" else pytest.mark.slow)
        for name, size in [
            ("fsdp+state-int8", 2),
            ("ddp+state-bf16", 2),
            ("tensor+state-int8", 2),
            ("3d+state-int8", 4),
        ]
    ]
    + [pytest.param(name, CONTEXT[name].size, marks=pytest.mark.slow) for name in ("fsdp+ring", "fsdp+ulysses")],
)
def test_sigkill_and_resume_is_bit_exact(strategy: str, size: int, tmp_path: Path) -> None:
    variants = VARIANTS | CONTEXT | STATES

    def run(name: str) -> Path:
        return make_run(
            tmp_path / name,
            *(variants[strategy].overrides if strategy in variants else [f"strategy={strategy.partition('+')[0]}"]),
            *(variants[strategy].shared if strategy in variants else ()),
            *WHOLE_MATRICES.get(strategy.partition("+")[2], []),
            f"cluster.processes={size}",
            f"train.steps={STEPS}",
            "checkpoint.every=5",
            f"model.dropout={0 if strategy in CONTEXT else 0.1}",
            "train.micro_batch_size=2",
            "+data.path=" + str(tmp_path / f"{name}-ids"),
            "data._target_=tests.recording.Recorder",
            "trust=[tests]",
            "data.num_samples=80",  # an epoch of 10 steps
        )

    whole, broken = run("whole"), run("broken")
    assert train(whole, size) == [0] * size

    rng = random.Random()
    kill_at = rng.randint(6, STEPS - 6)  # after the first checkpoint; printed, so that a failure can be repeated
    print(f"killed when step {kill_at} was seen")
    world = start(broken, size)
    wait_for(world, broken, kill_at)
    world.kill()
    first_life = [asked_for(tmp_path / "broken-ids", r) for r in range(size)]
    assert train(broken, size) == [0] * size

    resumed_at = summary(broken)["start_step"]
    assert 0 < resumed_at < STEPS and resumed_at % 5 == 0
    hex_losses = [[(s, x.hex()) for s, x in losses(r).items()] for r in (whole, broken)]
    assert hex_losses[0] == hex_losses[1] and len(hex_losses[0]) == STEPS
    assert summary(whole)["weights_sha256"] == summary(broken)["weights_sha256"]
    for r in range(size):
        # the batch after the last step is read ahead, or not, before the process ends
        uninterrupted = asked_for(tmp_path / "whole-ids", r)[1 : STEPS + 1]
        second_life = asked_for(tmp_path / "broken-ids", r)[len(first_life[r]) + 1 :][: STEPS - resumed_at]
        assert first_life[r][1:] == uninterrupted[: len(first_life[r]) - 1]
        assert second_life == uninterrupted[resumed_at:]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("word", ["powersgd", "topk", "int8", "onebit"])
def test_compression_resumes_on_another_number_of_ranks(word: str, tmp_path: Path) -> None:
    """Each new rank takes the mean of what the old ones still owed: the losses stay within what the word promises."""
    options = [*VARIANTS[f"ddp+{word}"].overrides, "train.steps=20", "train.micro_batch_size=2"]
    whole = make_run(tmp_path / "whole", *options, "cluster.processes=2")
    assert train(whole, 2) == [0, 0]
    moved = make_run(tmp_path / "moved", *options, "cluster.processes=2", "train.stop_after=10")
    assert train(moved, 2) == [0, 0]
    make_run(moved, *options, "cluster.processes=4")
    assert train(moved, 4) == [0] * 4
    assert summary(moved)["start_step"] == 10
    distance = max(abs(losses(whole)[step] - losses(moved)[step]) for step in range(11, 21))
    print(word, distance)
    assert 0 < distance < TOLERANCES[word]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_compression_moves_between_strategies(tmp_path: Path) -> None:
    """A run whose every part has another strategy, with and without compression, follows one that has none."""
    options = ["train.steps=20", "train.micro_batch_size=1"]
    one = make_run(tmp_path / "one", *options, "cluster.processes=1")
    assert train(one, 1) == [0]
    moved = tmp_path / "moved"
    for i, (name, size) in enumerate([("ddp+int8", 2), ("fsdp+int8", 4), ("fsdp", 2), ("ddp+int8", 4)]):
        chosen = VARIANTS[name].overrides if name in VARIANTS else [f"strategy={name}"]
        make_run(moved, *options, *chosen, f"cluster.processes={size}", f"train.stop_after={5 * i + 5}")
        assert train(moved, size) == [0] * size
        assert summary(moved)["start_step"] == 5 * i
    assert max(abs(losses(one)[step] - losses(moved)[step]) for step in losses(one)) < TOLERANCES["int8"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_checks_leave_compression_as_it_is(tmp_path: Path) -> None:
    """Replicas are compared, and passes are replayed: the errors take no notice."""
    options = [*VARIANTS["ddp+topk"].overrides, "cluster.processes=2", "train.steps=12"]
    plain = make_run(tmp_path / "plain", *options)
    checked = make_run(tmp_path / "checked", *options, "guard.replicas_every=2", "guard.replay_every=3")
    assert train(plain, 2) == train(checked, 2) == [0, 0]
    assert losses(plain) == losses(checked) and len(losses(plain)) == 12
