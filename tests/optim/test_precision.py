"""What each option of conf/precision holds in which type, where it is refused, how checkpoints pass between them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dtrain.config.build import build
from dtrain.config.files import options_of
from dtrain.optim import precision as module
from dtrain.optim.precision import Precision, check_float8, suits_float8, to_float8
from dtrain.train import build as models
from tests.world import losses, make_run, spawn, summary, train

FINDS = importlib.util.find_spec
META = torch.device("meta")


def with_torchao(monkeypatch: pytest.MonkeyPatch, gpus: int = 8) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: name == "torchao" or FINDS(name, *rest))
    monkeypatch.setattr("dtrain.config.hardware.count_gpus", lambda: gpus)


# ---- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, message",
    [
        (["precision=bf16", "precision.stream=float16"], "precision.stream=float16: the residual stream must be"),
        (["precision=fp32", "precision.stream=bfloat16"], "precision.stream=bfloat16: the residual stream must be"),
        (
            ["precision=bf16-pure", "strategy=zero2"],
            "precision=bf16-pure: works under ddp and fsdp, and not under zero",
        ),
        (["precision=bf16-pure", "strategy=tensor"], "precision=bf16-pure: works under ddp and fsdp"),
        (["precision=bf16-pure", "optim=sgd"], "precision=bf16-pure: only adamw has stochastic rounding"),
        (
            ["precision=bf16-pure", "strategy=fsdp", "strategy.offload=cpu"],
            "strategy.offload=cpu: stochastic rounding on the host",
        ),
        (["precision=fp32", "+precision.parameters=bfloat16"], "precision.parameters=bfloat16: needs matmuls in bf"),
        (["precision=fp8"], "precision=fp8: torchao is not installed"),
        (
            ["precision=fp8", "precision.float8=blockwise"],
            "precision.float8=blockwise: must be one of none, tensorwise",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_the_launch(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "torchao" else FINDS(name, *rest)
    )
    monkeypatch.setattr("dtrain.config.hardware.count_gpus", lambda: 8)  # without GPUs, fp8 asks for them first
    with pytest.raises(ValueError, match="\n  fix: ") as error:
        make_run(tmp_path, "cluster.processes=2", *words)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    "words, gpus, message",
    [
        ([], 8, ""),
        ([], 0, "precision=fp8: needs GPUs"),
        (["hardware=a100-80gb"], 8, "precision=fp8: A100 has no float8 matmuls"),
        (["lora.rank=8"], 8, "lora.rank=8: LoRA adapters do not work with float8"),
        (["strategy=pipeline"], 8, "precision=fp8: works under ddp and fsdp, and not under pipeline"),
        (["model.seq_len=5", "train.micro_batch_size=1"], 8, "precision=fp8: a forward pass of 1 samples has 5 tokens"),
    ],
)
def test_where_fp8_works(
    words: list[str], gpus: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_torchao(monkeypatch, gpus)
    try:
        make_run(tmp_path, "precision=fp8", "cluster.processes=2", "preflight=off", *words)
        found = ""
    except ValueError as error:
        found = str(error)
    assert found.startswith(message) and bool(found) == bool(message), found


def test_a_rank_on_a_cpu_says_that_fp8_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with_torchao(monkeypatch)
    with pytest.raises(ValueError, match="precision=fp8: needs a GPU, and there is none here\n  fix: precision=bf16"):
        check_float8(torch.device("cpu"))


def test_an_old_gpu_is_refused_by_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    with_torchao(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(ValueError, match="precision=fp8: NVIDIA A100 has no float8 matmuls"):
        check_float8(torch.device("cuda"))


# ---- types ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted({*options_of("precision")} - {"fp8"}))
def test_parameters_have_the_type_that_the_option_states(name: str, tmp_path: Path) -> None:
    from dtrain.config.run_file import load

    cfg = load(make_run(tmp_path, f"precision={name}", "cluster.processes=1"))
    precision, model = build(cfg.precision), models.make(cfg)
    precision.apply(model, torch.device("cpu"))
    wanted = torch.bfloat16 if name == "bf16-pure" else torch.float32
    assert {p.dtype for p in model.parameters()} == {wanted}
    assert precision.stream == (torch.bfloat16 if name.startswith("bf16") else torch.float32)


def test_only_plain_linear_layers_of_whole_multiples_take_float8() -> None:
    class Own(nn.Linear):
        pass

    made = {(32, 16): True, (32, 24): False, (8, 16): False}
    assert {sides: suits_float8(nn.Linear(*sides, device=META)) for sides in made} == made
    assert not suits_float8(Own(32, 16, device=META)) and not suits_float8(nn.LayerNorm(16))


def test_torchao_replaces_the_layers_of_blocks_and_no_name(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    from dtrain.config.run_file import load

    cfg = load(make_run(tmp_path, "precision=bf16", "cluster.processes=1"))
    plain, model = models.make(cfg), models.make(cfg)
    to_float8(model, "tensorwise", emulate=True)
    assert [(n, p.shape) for n, p in plain.named_parameters()] == [(n, p.shape) for n, p in model.named_parameters()]
    kinds = {type(m).__name__ for unit in model.fsdp_units() for m in unit.modules() if isinstance(m, nn.Linear)}
    assert kinds == {"Float8Linear"}


def test_torchaos_product_is_near_the_exact_one() -> None:
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32))
    x = torch.randn(16, 64)
    exact = model(x)
    to_float8(model, "rowwise", emulate=True)
    near = model(x)
    assert 0 < (near - exact).norm() / exact.norm() < 0.1
    near.sum().backward()
    assert model[0].weight.grad.dtype == torch.float32  # type: ignore[union-attr]


def test_without_compiling_fp8_says_that_it_is_slow(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(module, "check_float8", lambda device: None)
    monkeypatch.setattr(module, "to_float8", lambda model, scaling: None)
    fp8 = Precision("bfloat16", float8="tensorwise")
    fp8.apply(nn.Linear(2, 2), torch.device("cuda"), compiled=True)
    assert not caplog.records
    fp8.apply(nn.Linear(2, 2), torch.device("cuda"), compiled=False)
    assert "slower than bf16" in caplog.text


# ---- bf16-pure in training -----------------------------------------------------------------------------------


def types_in(run: Path) -> set[str]:
    newest = max((run / "checkpoints").glob("step-*"))
    return {spec["dtype"] for spec in json.loads((newest / "manifest.json").read_text())["tensors"].values()}


def test_bf16_pure_follows_bf16_and_is_one_under_ddp_and_fsdp(tmp_path: Path) -> None:
    curves = {}
    for name, words, size in (
        ("bf16", ["precision=bf16"], 1),
        ("one", ["precision=bf16-pure"], 1),
        ("ddp", ["precision=bf16-pure", "train.micro_batch_size=2"], 2),
        ("fsdp", ["precision=bf16-pure", "strategy=fsdp", "train.micro_batch_size=2"], 2),
    ):
        run = make_run(tmp_path / name, f"cluster.processes={size}", "train.log_every=1", *words)
        assert train(run, size) == [0] * size
        curves[name] = losses(run)
        assert types_in(run) == ({"float32"} if name == "bf16" else {"bfloat16"})
    learned = curves["bf16"][1] - curves["bf16"][20]
    assert learned > 0.3
    for name in ("one", "ddp", "fsdp"):
        assert max(abs(curves[name][s] - curves["bf16"][s]) for s in curves["bf16"]) < 0.1 * learned, name


def test_a_run_in_bf16_pure_goes_on_with_the_same_bits_after_a_resume(tmp_path: Path) -> None:
    words = ("precision=bf16-pure", "cluster.processes=1", "train.steps=8", "train.log_every=1")
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    assert train(make_run(whole, *words), 1) == [0]
    assert train(make_run(halves, *words, "train.stop_after=4"), 1) == [0]
    assert train(make_run(halves, *words, "strategy=fsdp"), 1) == [0]
    assert losses(whole) == losses(halves) and len(losses(whole)) == 8


def test_checkpoints_pass_between_bf16_and_bf16_pure(tmp_path: Path) -> None:
    words = ("cluster.processes=1", "train.steps=12", "train.log_every=1")
    for stop, name, strategy in ((4, "bf16-pure", "ddp"), (8, "bf16", "fsdp"), (12, "bf16-pure", "fsdp")):
        run = make_run(
            tmp_path / "run", *words, f"precision={name}", f"strategy={strategy}", f"train.stop_after={stop}"
        )
        assert train(run, 1) == [0]
        assert types_in(run) == ({"float32"} if name == "bf16" else {"bfloat16"})
    one = make_run(tmp_path / "one", *words, "precision=bf16")
    assert train(one, 1) == [0]
    passed, straight = losses(tmp_path / "run"), losses(one)
    assert passed.keys() == straight.keys()
    assert max(abs(passed[s] - straight[s]) for s in straight) < 0.05


def replicas(folder: str) -> None:
    import torch.distributed as dist

    from dtrain.optim.adamw import AdamW

    p = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    optimizer = AdamW([p], lr=1e-3)
    for step in range(3):
        p.grad = torch.full_like(p, 0.1 * (step + 1))
        optimizer.step()
    both = [torch.empty_like(p) for _ in range(dist.get_world_size())]
    dist.all_gather(both, p.detach())
    assert torch.equal(both[0], both[1]) and len(both[0].unique()) > 1


def test_replicas_round_alike(tmp_path: Path) -> None:
    spawn(2, replicas, str(tmp_path))


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", ["bf16-pure", "fp8"])
def test_on_a_gpu_it_follows_bf16(name: str, strategy: str, tmp_path: Path) -> None:
    if name == "fp8":
        pytest.importorskip("torchao")
    size = 2 if strategy == "fsdp" else 1  # with one rank fsdp would train as ddp
    overrides = (f"cluster.processes={size}", f"strategy={strategy}", "train.log_every=1", "compile=blocks")
    runs = [make_run(tmp_path / option, *overrides, f"precision={option}") for option in ("bf16", name)]
    assert [train(run, size) for run in runs] == [[0] * size] * 2
    assert [summary(run)["effective_strategy"] for run in runs] == [strategy] * 2
    plain, other = map(losses, runs)
    assert plain.keys() == other.keys() and plain[1] - plain[20] > 0.3
    assert max(abs(plain[s] - other[s]) for s in plain) < 0.05
