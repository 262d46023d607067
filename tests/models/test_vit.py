"""ViT: the published sizes, the plans that strategies use, what it refuses; it learns."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dtrain.checkpoint.initial_weights import Drawn
from dtrain.commands.verify import compare
from dtrain.config.build import build
from dtrain.models.vit import ViT
from dtrain.strategies.materialize import init_weights
from tests.models.vision import make_run
from tests.world import spawn, summary, train

PUBLISHED = {"vit-b16": (86_567_656, 17.56), "vit-l16": (304_326_632, 61.55)}  # parameters, billion multiplications


def small(**changes: object) -> ViT:
    chosen = {"num_layers": 4, "dim": 32, "num_heads": 4, "patch_size": 2, "image_size": 8, "channels": 1}
    model = ViT(**(chosen | {"num_classes": 10} | changes))  # type: ignore[arg-type]
    init_weights(model, Drawn(0))
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(1))  # type: ignore[union-attr]
    return model


def pictures() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([1, 5, 9])


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_numbers_of_parameters_and_multiplications(name: str) -> None:
    with torch.device("meta"):
        model = build(compare.compose([f"model={name}"]).model)
        images = torch.empty(1, 3, 224, 224)
    parameters, multiplications = PUBLISHED[name]
    assert model.num_parameters == parameters
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(images)
    assert counter.get_total_flops() / 2e9 == pytest.approx(multiplications, rel=1e-3)


def test_flops_are_those_of_a_step() -> None:
    model, (x, y) = small(), pictures()
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(x, y).backward()
    assert counter.get_total_flops() == 3 * model.flops_per_sample()


def test_a_patch_is_projected_as_a_convolution_with_its_stride_would() -> None:
    model, (x, _) = small(), pictures()
    assert model.patches is not None
    tokens = model.patches(x) - model.patches.positions
    weight = model.patches.proj.weight.view(32, 1, 2, 2)
    expected = torch.nn.functional.conv2d(x, weight, model.patches.proj.bias, stride=2).flatten(2).transpose(1, 2)
    torch.testing.assert_close(tokens[:, 1:], expected)
    assert torch.equal(tokens[:, 0].abs(), torch.zeros(3, 32)), "the class token begins at zero"


def test_fresh_weights_know_nothing() -> None:
    model = ViT(2, 32, 4, 2, 8, 1, 10)
    init_weights(model, Drawn(0))
    loss, accuracy, top5 = model.eval()(*pictures()).tolist()
    assert loss == pytest.approx(torch.log(torch.tensor(10.0)).item()) and 0 <= accuracy <= top5 <= 1
    assert model.train()(*pictures()).shape == ()


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_pipeline_stages_in_a_row_are_the_whole_model(num_stages: int) -> None:
    whole, (x, y) = small(), pictures()
    bounds = [4 * i // num_stages for i in range(num_stages + 1)]
    stages = [small().pipeline_split(low, high) for low, high in pairwise(bounds)]
    value = x
    for stage in stages[:-1]:
        value = stage(value)
    torch.testing.assert_close(stages[-1](value, y), whole(x, y), rtol=0, atol=0)
    names = [set(dict(s.named_parameters())) for s in stages]
    assert set().union(*names) == set(dict(whole.named_parameters())), "names survive the cut"
    assert sum(map(len, names)) == len(set().union(*names)), "no weight is there twice"


def _tensor_parallel() -> None:
    whole, cut, (x, y) = small(), small(), pictures()
    parallelize_module(cut, init_device_mesh("cpu", (dist.get_world_size(),)), cut.tp_plan())
    assert cut.layers["0"].attention.qkv.weight.to_local().shape[0] == 96 // dist.get_world_size()
    for model in (whole, cut):
        model(x, y).backward()
    torch.testing.assert_close(cut(x, y), whole(x, y))
    torch.testing.assert_close(cut.layers["3"].mlp.up.weight.grad.full_tensor(), whole.layers["3"].mlp.up.weight.grad)
    torch.testing.assert_close(cut.patches.positions.grad, whole.patches.positions.grad)


def test_tensor_parallel_plan_keeps_loss_and_gradients() -> None:
    spawn(2, _tensor_parallel)


@pytest.mark.parametrize("setting", ["sequence_parallel", "loss_parallel"])
def test_what_it_cannot_be_cut_by_is_refused_with_a_fix(setting: str) -> None:
    with pytest.raises(ValueError, match=f"^strategy.{setting}=true: (?s:.)*\n  fix: strategy.{setting}=false$"):
        small().tp_plan(**{setting: True})


def test_a_patch_must_divide_the_picture() -> None:
    with pytest.raises(ValueError, match=r"model.patch_size=3: must divide model.image_size=8\n  fix: .*image_size=9"):
        small(patch_size=3)


def test_it_learns_the_digits(tmp_path: Path) -> None:
    """vit-tiny with four patches a picture, for speed: it came to 98.1% of the held-out digits."""
    settings = ["train.steps=150", "optim.lr=3e-3", "train.global_batch_size=60", "train.eval_batches=6"]
    run_dir = make_run(tmp_path / "run", "model=vit-tiny", "model.patch_size=4", "schedule.warmup_steps=20", *settings)
    assert train(run_dir) == [0]
    assert summary(run_dir)["val_accuracy"] >= 0.95
