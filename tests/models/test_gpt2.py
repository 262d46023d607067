"""GPT-2: the published sizes, causality, and the plans that strategies use."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from dtrain.checkpoint.initial_weights import Drawn
from dtrain.config.build import build
from dtrain.config.files import CONF
from dtrain.models.gpt2 import GPT2
from dtrain.strategies.materialize import init_weights
from tests.world import spawn

PUBLISHED = {
    "gpt2-124m": 124_439_808, "gpt2-350m": 354_823_168, "gpt2-774m": 774_030_080, "gpt2-1.5b": 1_557_611_200,
}  # fmt: skip


def small(**changes: object) -> GPT2:
    settings = {"num_layers": 4, "dim": 32, "num_heads": 4, "vocab_size": 50, "seq_len": 12, "vocab_multiple": 16}
    model = GPT2(**(settings | changes))  # type: ignore[arg-type]
    init_weights(model, Drawn(0))
    return model


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_number_of_parameters(name: str) -> None:
    with torch.device("meta"):
        model = build(OmegaConf.load(CONF / "model" / f"{name}.yaml"))
    assert model.num_parameters == PUBLISHED[name]
    assert model.embed.weight.shape[0] == 50304, "50257 padded to a multiple of 128"
    per_token = model.flops_per_sample() / model.seq_len
    assert per_token == pytest.approx(6 * PUBLISHED[name] + 12 * model.num_layers * model.dim * 1024)


def test_logits_do_not_see_the_future_nor_the_padding() -> None:
    model = small()
    tokens = torch.randint(0, 50, (2, 12))
    changed = tokens.clone()
    changed[:, 7:] = 0
    first, second = model(tokens), model(changed)
    assert first.shape == (2, 12, 50)
    torch.testing.assert_close(first[:, :7], second[:, :7])
    assert not torch.allclose(first[:, 7:], second[:, 7:])


def test_loss_is_the_cross_entropy_of_the_logits() -> None:
    model = small(vocab_multiple=1)  # no padding, so that both see the same vocabulary
    x, y = torch.randint(0, 50, (2, 2, 12))
    expected = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    torch.testing.assert_close(model(x, y), expected)
    assert abs(model(x, y).item() - torch.log(torch.tensor(50.0)).item()) < 0.1, "fresh weights know nothing"


def test_initial_weights_depend_on_seed_and_name_only() -> None:
    a, b, other = small(), small(num_layers=4), small()
    init_weights(other, Drawn(1))
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.layers["0"].mlp.up.weight, other.layers["0"].mlp.up.weight)
    assert not torch.equal(a.layers["0"].mlp.up.weight, a.layers["1"].mlp.up.weight)
    assert a.layers["0"].mlp.down.weight.std().item() == pytest.approx(0.02 / 8**0.5, rel=0.05)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_pipeline_stages_in_a_row_are_the_whole_model(num_stages: int) -> None:
    whole = small()
    x, y = torch.randint(0, 50, (2, 2, 12))
    bounds = [4 * i // num_stages for i in range(num_stages + 1)]
    stages = [small().pipeline_split(low, high) for low, high in pairwise(bounds)]
    value = x
    for stage in stages[:-1]:
        value = stage(value)
    torch.testing.assert_close(stages[-1](value, y), whole(x, y), rtol=0, atol=0)
    names = [set(dict(s.named_parameters())) for s in stages]
    assert set().union(*names) == set(dict(whole.named_parameters())), "names survive the cut"
    assert sum(map(len, names)) == len(set().union(*names)) + (num_stages > 1), "only the tied weight is there twice"


def _tensor_parallel() -> None:
    x, y = torch.randint(0, 50, (2, 2, 12), generator=torch.Generator().manual_seed(0))
    whole, cut = small(), small()
    parallelize_module(cut, init_device_mesh("cpu", (dist.get_world_size(),)), cut.tp_plan())
    assert cut.layers["0"].attention.qkv.weight.to_local().shape[0] == 96 // dist.get_world_size()
    for model in (whole, cut):
        model(x, y).backward()
    torch.testing.assert_close(cut(x, y), whole(x, y))
    torch.testing.assert_close(cut.layers["3"].mlp.up.weight.grad.full_tensor(), whole.layers["3"].mlp.up.weight.grad)
    torch.testing.assert_close(cut.embed.weight.grad, whole.embed.weight.grad)


def test_tensor_parallel_plan_keeps_loss_and_gradients() -> None:
    spawn(2, _tensor_parallel)
