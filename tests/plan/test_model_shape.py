"""Counts of the planner against the modules themselves, built on the meta device, for every model that is shipped."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from omegaconf import OmegaConf
from torch import nn
from torch.distributed.tensor import parallel as tensor_parallel

from dtrain.config.build import build
from dtrain.config.files import CONF
from dtrain.models import lora
from dtrain.plan import parameters
from dtrain.plan.layout import Layout
from dtrain.plan.memory.states import held_whole
from dtrain.plan.model_shape import Convolutions, Transformer, shape_of
from dtrain.strategies.pipeline_stages import split_points, stage_of
from dtrain.strategies.tensor import parallelize_layers
from dtrain.util.dtensor import local

MODELS = sorted({path.stem for path in Path(CONF, "model").glob("*.yaml")} - {"hf"})  # hf: what a folder holds
CUT = [name for name in MODELS if not name.startswith(("resnet", "convnet")) and "70b" not in name]


def settings_of(name: str, **changed: Any) -> dict[str, Any]:
    settings = yaml.safe_load(Path(CONF, "model", f"{name}.yaml").read_text())
    settings.pop("defaults", None)
    return {**settings, **changed}


def module_of(settings: dict[str, Any]) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = build(OmegaConf.create(settings))
    return model


def numel(module: nn.Module) -> int:
    return sum(local(p).numel() for p in module.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_counts_and_operations_are_the_models_own(name: str) -> None:
    settings = settings_of(name)
    model: Any = module_of(settings)
    shape = shape_of({"model": settings})
    assert shape is not None
    assert parameters.num_parameters(shape) == model.num_parameters
    assert parameters.held_parameters(shape) == numel(model)
    assert parameters.trained_parameters(shape) == numel(model)
    assert parameters.flops_per_sample(shape) == model.flops_per_sample()


def test_a_model_of_ones_own_has_no_shape() -> None:
    assert shape_of({"model": {"_target_": "mine.Net"}, "data": {}}) is None


def test_the_data_says_how_long_a_sample_is_and_whether_documents_are_packed() -> None:
    shape = shape_of({"model": settings_of("gpt2-124m"), "data": {"seq_len": 256, "packed": True}})
    assert isinstance(shape, Transformer)
    assert (shape.seq_len, shape.learned_positions, shape.packed) == (256, 1024, True)


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "convnet"])
def test_convolutions_are_those_of_the_model(name: str) -> None:
    settings = settings_of(name)
    model: Any = module_of(settings)
    shape = shape_of({"model": settings})
    assert isinstance(shape, Convolutions)
    real = [(c.in_channels, c.out_channels, c.kernel_size[0], c.stride[0], side) for c, side in model.convolutions()]
    assert [(c.in_channels, c.out_channels, c.kernel, c.stride, c.out_size) for c in shape.layers] == real
    units = {unit: sum(c.parameters for c in shape.layers if c.unit == unit) for unit in range(len(model.layers))}
    assert list(units.values()) == [numel(layer) for layer in model.fsdp_units()]


@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize("num_stages", [2, 4])
def test_stages_are_those_of_the_pipeline(name: str, num_stages: int) -> None:
    settings = settings_of(name)
    model = module_of(settings)
    shape = shape_of({"model": settings})
    assert isinstance(shape, Transformer)
    bounds = split_points(model, num_stages, None)
    assert list(parameters.stage_bounds(shape, num_stages)) == bounds
    held = [numel(stage_of(model, *bound)) for bound in bounds]
    assert [stage.parameters for stage in parameters.stages(shape, num_stages)] == held


@pytest.fixture
def two_ranks() -> Iterator[Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))["tp"]
    dist.destroy_process_group()


@pytest.mark.parametrize("loss_parallel", [False, True])
@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny", "llama-1b", "bert-tiny", "bert-tiny-classify", "vit-tiny"])
def test_a_tensor_rank_holds_what_the_models_plan_gives_it(name: str, loss_parallel: bool, two_ranks: Any) -> None:
    if loss_parallel and name in ("bert-tiny-classify", "vit-tiny"):
        pytest.skip("refused: its classes are not cut")
    settings = settings_of(name)
    shape = shape_of({"model": settings})
    assert isinstance(shape, Transformer)
    model = module_of(settings)
    parallelize_layers(model, two_ranks, False, loss_parallel)
    (stage,) = parameters.stages(shape, 1, tp=2, loss_parallel=loss_parallel)
    assert stage.parameters == numel(model)


@pytest.mark.parametrize("loss_parallel", [False, True])
@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny"])
def test_a_tensor_ranks_gradients_are_as_large_as_said(name: str, loss_parallel: bool, two_ranks: Any) -> None:
    """A table that is cut by its rows and only looked up has a whole gradient on every rank."""
    settings = settings_of(name)
    shape = shape_of({"model": settings})
    assert isinstance(shape, Transformer)
    numbers = {key: float(value) if value == "1e-5" else value for key, value in settings.items()}  # yaml reads text
    model = build(OmegaConf.create(numbers))
    parallelize_layers(model, two_ranks, False, loss_parallel)
    tokens = torch.zeros(1, shape.seq_len, dtype=torch.long)
    with tensor_parallel.loss_parallel() if loss_parallel else contextlib.nullcontext():
        model(tokens, tokens).backward()
    layout = Layout("tensor", tp=2, data="fsdp", loss_parallel=loss_parallel)
    held = held_whole(shape, layout)
    assert held.trained + held.uncut == sum(local(p.grad).numel() for p in model.parameters())
    assert bool(held.uncut) == (loss_parallel and not shape.tied)


@pytest.mark.parametrize("targets", [[], ["q", "v"], ["qkv", "mlp.down"], ["layers.0.attention.proj"]])
@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny", "bert-tiny-classify", "vit-tiny"])
def test_adapters_are_those_that_lora_makes(name: str, targets: list[str], two_ranks: Any) -> None:
    settings = settings_of(name)
    model: Any = module_of(settings)
    known = {linear.rpartition(".")[2] for linear in lora.choose(model, [])}
    if not all(target.rpartition(".")[2] in known for target in targets):
        pytest.skip("the model has no such layer")
    with torch.device("meta"):
        lora.apply(model, rank=4, alpha=8.0, targets=targets)
    shape = shape_of({"model": settings, "lora": {"rank": 4, "targets": targets}})
    assert isinstance(shape, Transformer)
    if any(target.startswith("layers.") for target in targets):  # one block only: the planner counts it in all
        assert parameters.trained_parameters(shape) >= model.num_trained
        return
    assert parameters.trained_parameters(shape) == model.num_trained
    assert parameters.held_parameters(shape) == numel(model)
    assert parameters.flops_per_sample(shape) == model.flops_per_sample()
    parallelize_layers(model, two_ranks, False, False)
    assert parameters.stages(shape, 1, tp=2)[0].parameters == numel(model)
