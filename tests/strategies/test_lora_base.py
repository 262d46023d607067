"""LoRA in real worlds: the same maths under every strategy, small checkpoints that move between them, one base."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dtrain.checkpoint import store
from dtrain.commands.verify import compare
from dtrain.config.build import build
from dtrain.config.run_file import load
from dtrain.inference.export import final_weights
from dtrain.inference.export_hf import export_hf
from dtrain.inference.sample import load_model
from dtrain.models import lora
from dtrain.train import build as models
from tests.world import losses, make_run, spawn, summary, train

LLAMA = ["model=llama-tiny", "model.num_kv_heads=2", "model.hidden_dim=48", "lora.rank=4"]
LLAMA += ["train.steps=8", "schedule.warmup_steps=2"]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process, which takes each batch whole."""
    run = make_run(tmp_path_factory.mktemp("one"), *LLAMA, "cluster.processes=1")
    assert train(run, 1) == [0]
    return run


@pytest.mark.parametrize(
    ("strategy", "size", "options"),
    [
        # gradients that are parts of a sum: finished by fsdp, and by us, with a pipeline around them
        ("tensor", 4, ["strategy.tp=2", "strategy.dp=2", "strategy.sequence_parallel=true"]),
        ("3d", 4, ["strategy.sequence_parallel=true", "strategy.loss_parallel=true"]),
        ("pipeline", 2, ["strategy.schedule=zbv"]),
        ("zero3", 2, ["strategy.whole_below=2000"]),  # some frozen weights, and all adapters, stay whole
        ("zero3", 2, ["strategy.offload_params=cpu", "strategy.offload=cpu"]),
        ("fsdp", 2, ["strategy.offload=cpu", "activation_checkpointing=full"]),
    ],
)
def test_the_same_maths(strategy: str, size: int, options: list[str], one: Path, tmp_path: Path) -> None:
    """`dtrain verify lora.rank=4` does it for every strategy as it is; these are the ways to set them."""
    where = [f"strategy={strategy}", f"cluster.processes={size}", "train.micro_batch_size=1"]
    run = make_run(tmp_path / "run", *LLAMA, *where, *options)
    assert train(run, size) == [0] * size
    found = compare.compare(run, one)
    assert not found.beyond(compare.TOLERANCES["float32"]), found


def test_adapters_move_between_strategies_and_are_all_that_is_saved(one: Path, tmp_path: Path) -> None:
    expected = losses(one)
    run = tmp_path / "run"
    for i, strategy in enumerate(("ddp", "fsdp", "zero3", "tensor"), 1):
        make_run(run, *LLAMA, f"strategy={strategy}", "cluster.processes=2", f"train.stop_after={2 * i}")
        assert train(run, 2) == [0, 0]
        found = losses(run)
        assert len(found) == 2 * i and max(abs(found[s] - expected[s]) for s in found) < 1e-5, strategy
        manifest = store.read_manifest(run / "checkpoints" / f"step-{2 * i:08d}")
        assert len(manifest.tensors) == 4 * 7 * 2 * 3, "A and B of 7 layers in 4 blocks, and their moments"
        assert all(".lora_" in name for name in manifest.tensors)
        assert set(manifest["extra"]["optimizer"]) == {n[6:] for n in manifest.tensors if n.startswith("model.")}


def num_bytes(run: Path) -> int:
    return sum(p.stat().st_size for p in (run / "checkpoints" / "step-00000001").iterdir())


def test_a_checkpoint_of_adapters_is_under_2_percent(tmp_path: Path) -> None:
    sizes = {}
    for name, options in {"full": [], "lora": ["lora.rank=4", "lora.targets=[q,v]"]}.items():
        # llama-tiny as it is: its blocks are in the proportions of the large ones
        own = ["model.dim=128", "model.num_heads=8", "model.num_kv_heads=4", "model.vocab_size=256", "train.steps=1"]
        run = make_run(tmp_path / name, "model=llama-tiny", *own, *options, "cluster.processes=1")
        assert train(run, 1) == [0]
        sizes[name] = num_bytes(run)
    print(sizes, sizes["lora"] / sizes["full"])
    assert sizes["lora"] < 0.02 * sizes["full"]


def test_another_base_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", *LLAMA, "cluster.processes=2", "train.stop_after=2")
    assert train(run, 2) == [0, 0]
    make_run(run, *LLAMA, "strategy=fsdp", "cluster.processes=2", "train.seed=1")
    assert train(run, 2) == [2, 2], "a bad setting, and not a failure"
    note = json.loads((run / "logs" / "failure-0.json").read_text())
    assert "not those that this run's adapters were trained on" in note["message"]
    with pytest.raises(ValueError, match="not those that this run's adapters were trained on"):
        dict(final_weights(run))


def test_a_target_that_is_not_there_is_told_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"lora.targets=\['q_proj'\]: .*\n  fix: choose from q, k, v"):
        make_run(tmp_path / "none", *LLAMA, "lora.targets=[q_proj]", "cluster.processes=1")
    # the head is there, but in no block: that the model itself must say
    run = make_run(tmp_path / "run", *LLAMA, "lora.targets=[output]", "cluster.processes=1")
    assert train(run, 1) == [2]
    assert "choose from q, k, v" in json.loads((run / "logs" / "failure-0.json").read_text())["message"]


def test_frozen_weights_on_a_disk_are_refused_before_the_launch(tmp_path: Path) -> None:
    options = ["strategy=zero3", "strategy.offload_params=nvme", f"strategy.nvme_path={tmp_path}"]
    with pytest.raises(ValueError, match=r"strategy.offload_params=nvme.*\n  fix: strategy.offload_params=cpu"):
        make_run(tmp_path / "run", *LLAMA, *options)


# ---- 16 bits -------------------------------------------------------------------------------------------------


def two_ways(run_dir: Path) -> None:
    """On each rank: the first losses with frozen weights held in 16 bits, and held in 32 and rounded at every use."""
    cfg = load(run_dir)
    found: dict[str, list[float]] = {}
    types: dict[str, Any] = {}
    hold = lora.hold
    for way in ("16", "32"):
        lora.hold = hold if way == "16" else lambda model, dtype: None
        strategy: Any = build(cfg.strategy)
        options = {"precision": build(cfg.precision), "device": torch.device("cpu"), "micro_batch_size": 2}
        strategy.setup(models.make(cfg), build(cfg.optim), first=models.first_weights(cfg), **options)
        types[way] = {p.dtype for n, p in strategy.module.named_parameters() if n.endswith("q.weight")}
        batches = [torch.randint(61, (2, 4, 17), generator=torch.Generator().manual_seed(i)) for i in range(3)]
        rows = [b[strategy.data_rank] for b in batches]
        found[way] = [strategy.train_step(r[:, :-1], r[:, 1:]).read().loss for r in rows]
        found[way] += [p.double().sum().item() for p in strategy.module.parameters() if p.requires_grad]
    assert types == {"16": {strategy.precision.dtype}, "32": {torch.float32}}
    assert found["16"] == found["32"], "the same bits"
    assert found["16"][0] != found["16"][2]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_holding_frozen_weights_in_16_bits_keeps_every_bit(precision: str, tmp_path: Path) -> None:
    options = ["model.num_layers=2", "cluster.processes=2", f"precision={precision}", "precision.init_scale=8"]
    run = make_run(tmp_path / "run", *LLAMA, *options[: 3 if precision == "bf16" else 4])
    spawn(2, two_ways, run)


def test_fsdp_gathers_weights_of_two_types(tmp_path: Path) -> None:
    runs = []
    for strategy in ("ddp", "fsdp"):
        options = ["precision=bf16", f"strategy={strategy}", "cluster.processes=2", "train.stop_after=4"]
        runs.append(make_run(tmp_path / strategy, *LLAMA, *options))
        assert train(runs[-1], 2) == [0, 0]
    apart = [abs(losses(runs[0])[s] - losses(runs[1])[s]) for s in range(1, 5)]
    assert max(apart) < compare.TOLERANCES["bfloat16"].loss, apart


# ---- what comes out ------------------------------------------------------------------------------------------


def test_merged_weights_are_what_sampling_and_transformers_load(one: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    cfg = load(one)
    model = models.make(cfg)
    model.to_empty(device="cpu")
    first = models.original_weights(cfg, [])
    for name, p in model.named_parameters():
        first.fill(model, name, p, torch.device("cpu"))
    base = model(tokens := torch.randint(61, (2, 16), generator=torch.Generator().manual_seed(0)))
    path = one / "checkpoints" / f"step-{summary(one)['steps']:08d}"
    model.load_state_dict(dict(store.weights(path)), strict=False)
    trained = model(tokens)
    assert (trained - base).abs().max() > 0.01, "training did something"
    merged, _ = load_model(one, [])
    assert not any(lora.is_adapter(name) for name, _ in merged.named_parameters())
    assert (merged.to("cpu")(tokens) - trained).abs().max() < 1e-5
    theirs = transformers.AutoModelForCausalLM.from_pretrained(export_hf(one, tmp_path / "hf"))
    assert (theirs.eval()(tokens).logits - trained).abs().max() < 1e-5


def test_adapters_begin_beside_the_weights_of_another_run(tmp_path: Path) -> None:
    whole, sizes = tmp_path / "whole", [o for o in LLAMA if not o.startswith("lora.")]
    make_run(whole, *sizes, "cluster.processes=1", "train.stop_after=2")
    assert train(whole, 1) == [0]
    first = dict(final_weights(whole))
    run = tmp_path / "run"
    options = [*LLAMA, "lora.targets=[q]", f"init_from={whole}", "strategy=fsdp", "cluster.processes=2"]
    make_run(run, *options, "train.stop_after=2")
    assert train(run, 2) == [0, 0]
    merged = dict(final_weights(run))
    changed = {name for name, weight in merged.items() if not torch.equal(weight, first[name])}
    assert merged.keys() == first.keys() and changed == {f"layers.{i}.attention.q.weight" for i in range(4)}
    make_run(whole, *sizes, "cluster.processes=1", "train.stop_after=4")  # it goes on, and its weights change
    assert train(whole, 1) == [0]
    with pytest.raises(ValueError, match="init_from: the frozen weights are not those"):
        dict(final_weights(run))
