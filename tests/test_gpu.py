"""The same promises on a CUDA device: `pytest -m gpu` on a machine that has one."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import socket
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from dtrain.commands.verify.world import World
from dtrain.config.build import build
from dtrain.config.run_file import load
from tests.strategies.test_replicas import is_last_rank, saved
from tests.train.test_spikes import BAD, run_with, weights, written
from tests.world import STRATEGIES, losses, make_run, sizes_of, start, start_server, summary, train, wait_for

pytestmark = pytest.mark.gpu
# Ranks share the GPU, over gloo. With one rank fsdp, zero and fairscale would train as plain ddp.
SIZE = {strategy: sizes_of(strategy, (2, 4))[0] for strategy in STRATEGIES}
# (strategy, setting) -> how the launcher refuses it; any other refusal is a failure
REFUSED = {("zero3", "compile=true"): "strategy=zero3 computes wrong gradients under torch.compile on a GPU"}


def allowed(run: Path, usual: float) -> float:
    return build(load(run).strategy).tolerance or usual


def made(run_dir: Path, strategy: str, *options: str) -> tuple[Path, int]:
    """A run of a strategy as itself, and its number of ranks. What must be refused is, and ends the test."""
    if strategy == "fairscale":
        pytest.importorskip("fairscale")
    size = SIZE[strategy]
    expected = [REFUSED[key] for key in ((strategy, option) for option in options) if key in REFUSED]
    if strategy in ("pipeline", "3d") and torch.cuda.device_count() < size:
        expected.append("gloo, which cannot send GPU tensors between ranks")
    overrides = [f"strategy={strategy}", f"cluster.processes={size}", *options]
    if expected:
        with pytest.raises(ValueError) as refusal:
            make_run(run_dir, *overrides)
        assert any(message in str(refusal.value) for message in expected), refusal.value
        pytest.skip(f"refused, as it should be: {str(refusal.value).splitlines()[0]}")
    return make_run(run_dir, *overrides), size


def trained(run: Path, size: int, strategy: str) -> dict[int, float]:
    assert train(run, size) == [0] * size
    assert summary(run)["device"] != "cpu" and summary(run)["effective_strategy"] == strategy
    return losses(run)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    run = make_run(tmp_path_factory.mktemp("one"), "cluster.processes=1")
    return trained(run, 1, "ddp")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_follows_one_process(strategy: str, reference: dict[int, float], tmp_path: Path) -> None:
    run, size = made(tmp_path, strategy, "train.micro_batch_size=1")
    curve = trained(run, size, strategy)
    assert max(abs(curve[s] - reference[s]) for s in reference) < allowed(run, 1e-5)


@pytest.mark.parametrize("compile", ["false", "true"])
@pytest.mark.parametrize("precision, tolerance", [("bf16", 0.02), ("fp16", 0.01)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_half_precision(
    strategy: str, precision: str, tolerance: float, compile: str, reference: dict[int, float], tmp_path: Path
) -> None:
    run, size = made(tmp_path, strategy, f"precision={precision}", f"compile={compile}")
    curve = trained(run, size, strategy)
    skipped = summary(run)["skipped_steps"]
    assert skipped <= 3
    if not skipped:  # a skipped step shifts the curve
        assert max(abs(curve[s] - reference[s]) for s in reference) < allowed(run, tolerance)
    assert curve[20] < curve[1]


# 64 a head and 1024 tokens: the shapes at which flash attention is chosen
@pytest.mark.parametrize("shape", [[], ["model.dim=256", "model.seq_len=1024"]], ids=["small", "flash"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sigkill_and_resume_is_bit_exact(strategy: str, shape: list[str], tmp_path: Path) -> None:
    options = ["train.steps=60", "checkpoint.every=7", "model.dropout=0.1", "precision=bf16", "deterministic=true"]
    (whole, size), (broken, _) = (made(tmp_path / name, strategy, *options, *shape) for name in ("whole", "broken"))
    assert len(trained(whole, size, strategy)) == 60
    world = start(broken, size)
    wait_for(world, broken, random.randint(8, 45))
    world.kill()
    assert trained(broken, size, strategy) == losses(whole)
    assert summary(broken)["start_step"] > 0
    assert summary(whole)["weights_sha256"] == summary(broken)["weights_sha256"]


@pytest.mark.parametrize("attempt", range(3))
def test_tensor_ranks_compile_to_the_same_bits(attempt: int, tmp_path: Path) -> None:
    """With an empty cache, ranks that chose kernels by timing drifted apart in most runs."""
    run, size = made(tmp_path, "tensor", "compile=blocks", "train.steps=6", "guard.replicas_every=1")
    assert train(run, size, {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}) == [0] * size


def test_a_checkpoint_moves_between_cpu_and_gpu(tmp_path: Path) -> None:
    options = ("cluster.processes=1", "train.steps=8")
    no_gpu = {"CUDA_VISIBLE_DEVICES": ""}
    assert train(make_run(tmp_path / "cpu", *options, "strategy=fsdp", "train.stop_after=4"), 1, no_gpu) == [0]
    shutil.copytree(tmp_path / "cpu", tmp_path / "moved")
    assert train(make_run(tmp_path / "cpu", *options), 1, no_gpu) == [0]
    assert train(make_run(tmp_path / "moved", *options, "strategy=ddp"), 1) == [0]
    cpu, moved = losses(tmp_path / "cpu"), losses(tmp_path / "moved")
    assert summary(tmp_path / "cpu")["device"] == "cpu" != summary(tmp_path / "moved")["device"]
    assert max(abs(cpu[s] - moved[s]) for s in range(5, 9)) < 1e-5


@pytest.mark.parametrize("size", [1, 2])
def test_replays_and_replica_checks_change_no_bit(size: int, tmp_path: Path) -> None:
    options = [f"cluster.processes={size}", "precision=bf16", "deterministic=true", "model.dropout=0.1"]
    checks = {"off": (0, 0), "on": (2, 3)}
    for name, (replicas, replay) in checks.items():
        settings = [f"guard.replicas_every={replicas}", f"guard.replay_every={replay}"]
        assert train(make_run(tmp_path / name, *options, *settings), size) == [0] * size
    assert losses(tmp_path / "off") == losses(tmp_path / "on")
    assert summary(tmp_path / "off")["weights_sha256"] == summary(tmp_path / "on")["weights_sha256"]


def flipping_rank(run_dir: Path) -> int:
    """Train; in step 9, a bit of a gradient flips after the first of the two passes."""
    from dtrain.strategies import base
    from dtrain.train import loop, process

    process.redirect_output(run_dir, 0)
    calls, patched = [], cast(Any, base)
    compute = patched.Strategy.forward_backward

    def forward_backward(self: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = compute(self, inputs, targets)
        calls.append(loss)
        if len(calls) == 9:
            parameter = next(self.module.parameters())
            parameter.grad.view(torch.int32).view(-1)[3] ^= 1 << 20
        return cast(torch.Tensor, loss)

    patched.Strategy.forward_backward = forward_backward
    return loop.main(run_dir)


def test_a_replay_finds_a_flipped_bit_of_a_gradient(tmp_path: Path) -> None:
    run = make_run(tmp_path, "cluster.processes=1", "deterministic=true", "guard.replay_every=9")
    assert World(1, flipping_rank, run).join() == [3]
    assert "rank 0" in (message := (run / "logs" / "failure-0.json").read_text()) and "gradient" in message, message
    assert not (run / "checkpoints").exists() or not list((run / "checkpoints").glob("step-*"))


@pytest.mark.parametrize("action", ["skip", "rollback"])
def test_a_spike_is_found_on_the_gpu(action: str, tmp_path: Path) -> None:
    """The GPU decides by itself; the run learns of it one step later."""
    # a graph would not call the patched method
    one = ("cluster.processes=1", "deterministic=true", "cuda_graphs=none", "guard.replicas_every=1")
    run, codes = run_with(tmp_path / "run", f"train.spike={action}", *one, size=1)
    assert codes == [0] and summary(run)["skipped_steps"] == 1 and summary(run)["device"] != "cpu"
    assert [(spike["step"], spike["action"]) for spike in written(run)] == [(25, action)]
    if action == "rollback":
        expected, codes = run_with(tmp_path / "expected", *one, positions=(), passed=(BAD,), size=1)
        assert codes == [0] and losses(run) == losses(expected) and weights(run) == weights(expected)


# ---- checksums that AdamW's kernel keeps ---------------------------------------------------------------------

FLIPPED = "layers.1.mlp.up.weight"
# strategy and settings; whether the step is a CUDA graph
WATCHED: list[tuple[str, list[str], bool]] = [
    ("ddp", ["cluster.processes=1", "cuda_graphs=none"], False),
    ("ddp", ["cluster.processes=1", "compile=true"], True),
    ("ddp", ["cluster.processes=1", "precision=bf16-pure", "cuda_graphs=none"], False),
    ("ddp", ["cluster.processes=2"], False),
    ("fsdp", ["cluster.processes=2"], False),
    ("tensor", ["cluster.processes=2", "strategy.tp=2"], False),
    ("ddp", ["cluster.processes=1", "optim.state=int8", "model.dim=64", "cuda_graphs=none"], False),
]


def watched_rank(run_dir: Path, kind: str, captured: bool) -> int:
    """Train. Before step 16, a bit flips on the last rank: in a weight, or a kind of its optimizer state."""
    from dtrain.strategies import cuda_graph
    from dtrain.train import guard, loop, process
    from dtrain.util.dtensor import local

    process.redirect_output(run_dir, int(os.environ["RANK"]))
    patched = cast(Any, guard)
    before_step = patched.Guard.before_step

    def flipping(self: Any, step: int) -> None:
        before_step(self, step)
        if kind and step == 16 and is_last_rank():
            p = dict(self.strategy.module.named_parameters())[FLIPPED]
            with torch.no_grad():
                held = local({"weight": p, **self.strategy.optimizer.state[p]}[kind])
            held.data.view(-1).view(torch.uint8)[0] ^= (
                1 << 5
            )  # small enough that the loss stays finite; torch does not count what .data writes

    patched.Guard.before_step = flipping
    if captured:
        cast(Any, cuda_graph).STEPS_WATCHED = 0  # also where the step is not launch-bound
    return loop.main(run_dir)


@pytest.mark.parametrize(
    "layout, kind",
    [(0, "weight"), (0, "exp_avg"), (0, "exp_avg_sq"), (0, "step"), (1, "weight"), (1, "exp_avg"), (2, "weight"),
     (2, "exp_avg_sq"), (3, "weight"), (4, "weight"), (4, "exp_avg"), (5, "weight"), (6, "exp_avg"),
     (6, "exp_avg_sq"), (6, "exp_avg_scale")],
)  # fmt: skip
def test_a_bit_that_flips_between_two_updates_is_found_before_a_save(layout: int, kind: str, tmp_path: Path) -> None:
    strategy, options, captured = WATCHED[layout]
    start_server()
    common = [f"strategy={strategy}", "train.steps=30", "guard.replicas_every=10", "model.num_layers=2"]
    saves = ["checkpoint.every=7", "checkpoint.keep=99"]
    run = make_run(tmp_path, *common, *saves, *options)
    size = load(run).cluster.processes
    assert World(size, watched_rank, run, kind, captured).join() == [3] * size
    notes = [json.loads((run / "logs" / f"failure-{rank}.json").read_text()) for rank in range(size)]
    assert {note["type"] for note in notes} == {"CorruptionError"}
    (message,) = {note["message"] for note in notes}
    who = rf"rank {size - 1} \({re.escape(socket.gethostname())}\)"
    assert re.match(rf"step 2[01]: {who} held model.{FLIPPED}, which changed in memory", message), message
    assert saved(run)[-1] == "step-00000014"
    if captured:
        assert "replaying it as a CUDA graph" in (run / "logs" / "rank-0.log").read_text()


@pytest.mark.parametrize("strategy, options, captured", WATCHED)
def test_watching_updates_changes_no_bit_and_accuses_nobody(
    strategy: str, options: list[str], captured: bool, tmp_path: Path
) -> None:
    """50 steps with clipping, with a resume after 25 of them."""
    start_server()
    common = [f"strategy={strategy}", "train.steps=50", "deterministic=true", "checkpoint.every=10", *options]
    runs = []
    for every in (0, 1):
        for last in (25, "null"):
            settings = [f"guard.replicas_every={every}", f"train.stop_after={last}", "train.max_grad_norm=0.5"]
            run = make_run(tmp_path / f"{every}", *common, *settings)
            size = load(run).cluster.processes
            assert World(size, watched_rank, run, "", captured).join() == [0] * size
        assert summary(run)["start_step"] == 25 and summary(run)["cuda_graph"] == captured
        runs.append(run)
    assert losses(runs[0]) == losses(runs[1]) and len(losses(runs[0])) == 50
    assert weights(runs[0]) == weights(runs[1])
