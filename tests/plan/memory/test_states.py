"""The bytes of AdamW's moments under optim.state are those of the models."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dtrain.commands.verify import compare
from dtrain.kernels import fits_bf16, fits_int8
from dtrain.launch.resolve import resolve
from dtrain.plan.layout import layout_of
from dtrain.plan.memory.states import held_whole, optimizer_bytes
from dtrain.plan.model_shape import shape_of
from dtrain.plan.peer_memory import checkpoint_bytes
from dtrain.plan.predict import predict
from dtrain.train.build import make

FITS = {"fp32": lambda shape: False, "bf16": fits_bf16, "int8": fits_int8}
BYTES = {"fp32": 4, "bf16": 2, "int8": 1.125}
MODELS = [["model=gpt2-tiny"], ["model=llama-tiny"], ["model=llama-tiny", "lora.rank=32"], ["model=bert-tiny"],
          ["model=bert-tiny-classify"], ["model=vit-tiny"], ["model=llama-8b"]]  # fmt: skip


def config(*overrides: str) -> dict[str, Any]:
    return resolve(compare.compose(["cluster.processes=1", "force=true", *overrides]))


@pytest.mark.parametrize("model", MODELS, ids=" ".join)
@pytest.mark.parametrize("state", FITS)
def test_moments_are_those_of_the_model(model: list[str], state: str) -> None:
    with torch.device("meta"):
        trained = [p for p in make(compare.compose(["cluster.processes=1", *model])).parameters() if p.requires_grad]
    few = sum(p.numel() for p in trained if FITS[state](p.shape))
    count = sum(p.numel() for p in trained)
    wanted = 2 * (4 * (count - few) + BYTES[state] * few)
    cfg = config(*model, f"optim.state={state}")
    shape = shape_of(cfg)
    assert shape is not None
    layout = layout_of(cfg)
    assert optimizer_bytes(held_whole(shape, layout), layout) == pytest.approx(wanted, rel=1e-9)
    assert checkpoint_bytes(cfg) == pytest.approx(wanted + 4 * count, rel=1e-9)


def test_convolutions_are_held_in_bf16_and_int8_is_refused() -> None:
    with pytest.raises(ValueError, match=r"optim\.state=int8: .* are convolutions\n  fix: optim.state=bf16"):
        config("model=resnet18", "optim=adamw", "optim.state=int8")
    cfg = config("model=resnet18", "optim=adamw", "optim.state=bf16")
    with torch.device("meta"):
        trained = list(make(compare.compose(["cluster.processes=1", "model=resnet18"])).parameters())
    few, count = (sum(p.numel() for p in some) for some in ([p for p in trained if fits_bf16(p.shape)], trained))
    shape = shape_of(cfg)
    assert shape is not None
    assert optimizer_bytes(held_whole(shape, layout_of(cfg)), layout_of(cfg)) == pytest.approx(8 * count - 4 * few)


@pytest.mark.parametrize(("state", "batch", "states_gib"), [("bf16", 4, 29.9), ("int8", 8, 16.8), ("fp32", 4, 59.8)])
def test_all_weights_of_llama_8b_train_on_one_h200(state: str, batch: int, states_gib: float) -> None:
    words = ["model=llama-8b", "model.seq_len=2048", "hardware=h200", "precision=bf16-pure", f"optim.state={state}"]
    found = predict(config(*words, f"train.global_batch_size={batch}", f"train.micro_batch_size={batch}"))
    assert found is not None and found.room is not None and found.room > 0
    of_optimizer = sum(item.value for item in found.memory if item.part == "optimizer") / 2**30
    assert of_optimizer == pytest.approx(states_gib, abs=0.1)


@pytest.mark.parametrize("parallel", [[], ["strategy.loss_parallel=true"]])
def test_tensor_ranks_share_them(parallel: list[str]) -> None:
    """Norms are whole on every rank, and stay in fp32."""
    words = ["model=llama-tiny", "strategy=tensor", "cluster.processes=2", *parallel]
    whole, half = (config("model=llama-tiny", "optim.state=int8"), config(*words, "optim.state=int8"))
    counts = [held_whole(shape, layout_of(cfg)).compressed for cfg in (whole, half) if (shape := shape_of(cfg))]
    tables = 2 * 256 * 128
    assert 2 * counts[1] == counts[0] + (0 if parallel else tables)
