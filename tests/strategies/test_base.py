"""One step, looked at closely: accumulation, clipping, non-finite values, loss scaling, initial weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dtrain.checkpoint import store
from dtrain.checkpoint.initial_weights import Drawn
from dtrain.config.build import build
from dtrain.config.run_file import load
from dtrain.optim.precision import Precision
from dtrain.strategies.grad_norm import clip_factor, scale_gradients, total_norm
from tests.world import (
    STRATEGIES,
    layouts,
    losses,
    make_run,
    metrics,
    sizes_of,
    skip_without_fp16,
    spawn,
    summary,
    train,
)

BROKEN = """
import numpy as np
from dtrain.data.loader import permutation
from dtrain.data.synthetic import Synthetic
from dtrain.models.gpt2 import GPT2

class Broken(GPT2):
    '''Its loss is {value} where all targets are 0.'''
    def forward(self, inputs, targets=None):
        out = super().forward(inputs, targets)
        return out * float("{value}") if self.is_last and targets is not None and not targets.any() else out

class Data(Synthetic):
    '''All targets of step {step} are 0: the samples say it, however they are cut into micro-batches and stages.'''
    def dataset(self, split):
        dataset = super().dataset(split)
        whole = dataset.batch
        poisoned = permutation(0, 0, len(dataset))[{step} * 8 - 8 : {step} * 8]
        def batch(indices):
            inputs, targets = whole(indices)
            targets[np.isin(indices, poisoned)] = 0
            return inputs, targets
        dataset.batch = batch
        return dataset
"""


def broken_run(tmp_path: Path, value: str, *overrides: str, step: int = 6) -> Path:
    (tmp_path / "broken_model.py").write_text(BROKEN.format(value=value, step=step))
    targets = ["model._target_=broken_model.Broken", "data._target_=broken_model.Data", "trust=[broken_model]"]
    return make_run(tmp_path / "run", *targets, *overrides)


@pytest.fixture(autouse=True)
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)


def same_weights_everywhere(run_dir: Path) -> None:
    cfg = load(run_dir)
    with torch.device("meta"):
        model = build(cfg.model)
    strategy = build(cfg.strategy).for_world(dist.get_world_size())
    strategy.setup(
        model,
        build(cfg.optim),
        precision=build(cfg.precision),
        device=torch.device("cpu"),
        first=Drawn(5),
        micro_batch_size=1,
    )
    store.save(run_dir / "checkpoints", 0, strategy.state_dict(), {"extra": strategy.extra_state()}, keep=1)


def test_first_weights_are_the_same_whatever_the_layout(tmp_path: Path) -> None:
    hashes = {}
    # 3 divides neither the vocabulary nor the sequence: uneven shards; 6 heads can be shared by 2 and by 3 ranks
    for strategy, size in layouts(1, 2, 3):
        sizes = ["model.num_heads=6", "model.dim=30", f"train.global_batch_size={4 * size}"]
        run = make_run(tmp_path / f"{strategy}-{size}", f"strategy={strategy}", f"cluster.processes={size}", *sizes)
        spawn(size, same_weights_everywhere, run)
        hashes[strategy, size] = store.weights_sha256(run / "checkpoints" / "step-00000000")
    assert len(set(hashes.values())) == 1, hashes


@pytest.mark.parametrize(("value", "strategy"), [("inf", "ddp"), *(("nan", strategy) for strategy in STRATEGIES)])
def test_nonfinite_stops_before_the_update_and_is_never_saved(value: str, strategy: str, tmp_path: Path) -> None:
    size = sizes_of(strategy)[0]
    run = broken_run(
        tmp_path,
        value,
        f"strategy={strategy}",
        f"cluster.processes={size}",
        "checkpoint.every=1",
        "checkpoint.keep=99",
    )
    assert train(run, size, {"PYTHONPATH": str(tmp_path)}) == [3] * size
    note = json.loads((run / "logs" / "failure-0.json").read_text())
    assert note["type"] == "NonFiniteError" and "step 6" in note["message"] and "\n  fix: " in note["message"]
    assert store.checkpoints(run / "checkpoints")[0].name == "step-00000005"
    for path in store.checkpoints(run / "checkpoints"):
        assert all(t.isfinite().all() for _, t in store.weights(path))


def test_nonfinite_skip_leaves_weights_alone_and_goes_on(tmp_path: Path) -> None:
    run = broken_run(
        tmp_path, "nan", "cluster.processes=2", "checkpoint.every=1", "checkpoint.keep=99", "train.nonfinite=skip"
    )
    assert train(run, 2) == [0, 0]
    assert summary(run)["skipped_steps"] == 1 and summary(run)["steps"] == 20
    folder = run / "checkpoints"
    assert store.weights_sha256(folder / "step-00000005") == store.weights_sha256(folder / "step-00000006")
    assert store.weights_sha256(folder / "step-00000006") != store.weights_sha256(folder / "step-00000007")
    skipped = next(m for m in metrics(run) if m["step"] == 6)
    assert skipped["loss"] is None, "NaN is not JSON"
    assert losses(run)[20] < losses(run)[1]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fp16_scale_falls_at_an_overflow_and_training_goes_on(strategy: str, tmp_path: Path) -> None:
    skip_without_fp16(strategy)
    # a loss of 4 × 2^24 has fp16 gradients past 65504; the scale must halve until they fit
    size = sizes_of(strategy)[0]
    run = make_run(
        tmp_path / "run",
        f"strategy={strategy}",
        "precision=fp16",
        "precision.init_scale=16777216",
        f"cluster.processes={size}",
        "train.stop_after=12",
        "precision.growth_interval=3",
    )
    assert train(run, size) == [0] * size
    content = store.read_manifest(run / "checkpoints" / "step-00000012")
    state = content["extra"]["precision"]
    assert 0 < summary(run)["skipped_steps"] < 12 and state["scale"] < 16777216
    counts = {count["step"] for count in content["extra"]["optimizer"].values()}
    assert counts == {12 - summary(run)["skipped_steps"]}
    assert losses(run)[12] < losses(run)[1]


def test_scale_grows_back_and_gives_up_at_the_floor() -> None:
    precision = Precision("float16", init_scale=8.0, growth_interval=2)
    assert precision.update(finite=False) and precision.scale == 4.0
    assert not precision.update(finite=True) and not precision.update(finite=True)
    assert precision.scale == 8.0
    while precision.update(finite=False):
        assert precision.scale > 0
    assert precision.scale < 2.0**-14, "a loss that is broken at any scale is not called an overflow"
    restored = Precision("float16")
    restored.load_state_dict({"scale": 32.0, "good_steps": 1})
    assert restored.scale == 32.0
    restored.load_state_dict(Precision("float32").state_dict())
    assert restored.scale == 32.0, "a checkpoint of an fp32 run has no scale to give"


def test_clipping_scales_all_gradients_by_one_norm() -> None:
    weights = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))]
    for weight, gradient in zip(weights, ([3.0, 0.0], [0.0, 4.0]), strict=True):
        weight.grad = torch.tensor(gradient)
    norm = total_norm(weights)
    assert norm.item() == 5.0 and clip_factor(norm, None) is None
    scale_gradients(weights, clip_factor(norm, 100.0))
    assert weights[1].grad is not None and weights[1].grad.tolist() == [0.0, 4.0], "nothing to clip"
    scale_gradients(weights, clip_factor(norm, 1.0))
    gradients = torch.cat([w.grad for w in weights if w.grad is not None])
    torch.testing.assert_close(gradients, torch.tensor([0.6, 0.0, 0.0, 0.8]))


def test_fp8_says_that_it_is_slow_only_if_nothing_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("dtrain.optim.precision.check_float8", lambda device: None)  # without a GPU
    monkeypatch.setattr("dtrain.optim.precision.to_float8", lambda model, scaling: None)
    cfg = load(make_run(tmp_path / "run", "cluster.processes=1"))
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for compile, warnings in (("whole", 0), ("blocks", 0), ("none", 1)):
            with torch.device("meta"):
                model = build(cfg.model)
            build(cfg.strategy).setup(
                model, build(cfg.optim), precision=Precision("bfloat16", float8="tensorwise"), first=Drawn(5),
                device=torch.device("cpu"), micro_batch_size=1, compile=compile,
            )  # fmt: skip
            assert caplog.text.count("precision=fp8 is slower than bf16") == warnings, compile
    finally:
        dist.destroy_process_group()


@pytest.mark.timeout(600)  # a minute for all of them on a quiet machine
@pytest.mark.parametrize("strategies", [("fsdp", "3d"), pytest.param(STRATEGIES, marks=pytest.mark.slow)])
def test_compile_keeps_the_maths(strategies: Sequence[str], tmp_path: Path) -> None:
    options = ["train.steps=4", "model.num_layers=2"]
    reference = make_run(tmp_path / "reference", *options, "cluster.processes=1")
    assert train(reference, 1) == [0]
    apart = {}
    for strategy in strategies:
        size = sizes_of(strategy)[0]
        where = [f"strategy={strategy}", f"cluster.processes={size}", "compile=true"]
        try:
            run = make_run(tmp_path / strategy, *options, *where)
        except ValueError as refusal:
            assert strategy == "zero3" and "compile" in str(refusal)
            continue
        if not build(load(run).strategy).tolerance:  # with other maths there is nothing to compare with
            assert train(run, size) == [0] * size
            apart[strategy] = max(abs(losses(run)[s] - losses(reference)[s]) for s in range(1, 5))
    print(apart)
    assert max(apart.values()) < 1e-5
