"""ZeRO under DeepSpeed: its configuration against ours, offload, non-finite steps, and state that moves."""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dtrain.checkpoint import store
from dtrain.checkpoint.initial_weights import Drawn
from dtrain.config.build import build
from dtrain.config.files import flatten
from dtrain.config.hardware import CPU_FP16, no_cpu_fp16
from dtrain.config.mesh import MeshSizes
from dtrain.config.run_file import load
from dtrain.strategies import deepspeed_config
from tests.world import losses, make_run, metrics, skip_without_fp16, spawn, summary, train

pytest.importorskip("deepspeed", reason="deepspeed is not installed: pip install 'dtrain[deepspeed]'")

# Small weights stay whole under zero3, and all of these are small; so that it has something to gather
CUT = "strategy.whole_below=0"
HUGGINGFACE = {  # as its documentation says to write it
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": "auto", "total_num_steps": "auto"}},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_max_live_parameters": 1e9},
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto", "steps_per_print": 2000,
}  # fmt: skip


@pytest.fixture(scope="module")
def composed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """strategy=zero3 for two ranks, as the launcher composes it."""
    return load(make_run(tmp_path_factory.mktemp("composed"), "strategy=zero3", "cluster.processes=2"))


@pytest.fixture
def check(composed: dict[str, Any], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """What the launcher would give DeepSpeed, or its refusal: check(**{"strategy.stage": 2}, user=…)."""

    def check(user: Any = None, **settings: Any) -> dict[str, Any]:
        config = copy.deepcopy(composed)
        if user is not None:
            settings["strategy.deepspeed_config"] = str(tmp_path / "ds.json")
            (tmp_path / "ds.json").write_text(user if isinstance(user, str) else json.dumps(user))
        for key, value in settings.items():
            section, _, name = key.rpartition(".")
            (config[section] if section else config)[name] = value
        return deepspeed_config.check(config, MeshSizes(dp=2))

    return check


Check = Callable[..., dict[str, Any]]
BF16 = {"precision.dtype": "bfloat16"}


# ---- the configuration, without torch ------------------------------------------------------------------------


def test_settings_become_deepspeeds_configuration(check: Check) -> None:
    config = check(**{"strategy.offload": "cpu", "train.micro_batch_size": 2}, **BF16)
    assert (config["train_batch_size"], config["gradient_accumulation_steps"]) == (8, 2)
    assert config["gradient_clipping"] == 1.0 and config["bf16"]["enabled"] and "fp16" not in config
    assert config["zero_optimization"]["stage"] == 3
    assert config["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}
    assert "offload_param" not in config["zero_optimization"]
    config = check(**{"strategy.stage": 1, "train.max_grad_norm": None})
    assert config["gradient_clipping"] == 0.0 and not {"bf16", "fp16", "communication_data_type"} & set(config)


def test_a_file_of_huggingface_is_filled_and_its_tuning_kept(check: Check) -> None:
    config = check(HUGGINGFACE, **BF16)
    assert config["bf16"]["enabled"] and not {"fp16", "optimizer", "scheduler"} & set(config)
    assert config["zero_optimization"]["stage3_max_live_parameters"] == 1e9
    assert config["train_batch_size"] == 8 and config["steps_per_print"] == 2000
    assert "auto" not in flatten(config).values()


@pytest.mark.parametrize(
    ("user", "words"),
    [
        ({"train_batch_size": 64}, ["train_batch_size=64", "train.global_batch_size is 8", "global_batch_size=64"]),
        ({"zero_optimization": {"stage": 2}}, ["zero_optimization.stage=2", "strategy=zero2"]),
        ({"fp16": {"enabled": True}}, ["fp16.enabled=True", "precision=fp16"]),
        ({"gradient_clipping": 0.5, "optimizer": {"type": "Lamb"}}, ["gradient_clipping=0.5", "optimizer.type=Lamb"]),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 5.0}}}, ["optimizer.params.lr=5.0", "optim.lr=5.0"]),
        ({"scheduler": {"type": "WarmupLR"}}, ["scheduler.type=WarmupLR", "schedule=constant"]),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, ["offload_optimizer.device=cpu"]),
        (
            {"zero_optimization": {"zero_quantized_weights": True}},
            ["zero_quantized_weights=True", "remove zero_optimization."],
        ),
        ({"communication_data_type": "fp16"}, ["communication_data_type=fp16", "fp32"]),
        ({"aio": {"block_size": "auto"}}, ["aio.block_size=auto", "no value"]),
    ],
)
def test_a_file_that_contradicts_the_settings_is_refused(user: Any, words: list[str], check: Check) -> None:
    with pytest.raises(ValueError, match=r"(?s)strategy\.deepspeed_config=.*\n  fix: remove ") as error:
        check(user)
    assert [w for w in words if w not in str(error.value)] == []


SCALARS = st.booleans() | st.integers(-9, 9) | st.just("auto") | st.text(max_size=3)
OWNED = ["train_batch_size", "gradient_clipping", "steps_per_print", "zero_optimization", "bf16", "my_key"]


@given(
    st.dictionaries(st.sampled_from(OWNED), SCALARS | st.dictionaries(st.sampled_from(["enabled", "stage"]), SCALARS))
)
def test_no_file_ever_changes_what_our_settings_say(user: dict[str, Any]) -> None:
    strategy = {
        "stage": 2, "overlap_comm": True, "bucket_mb": 1, "gather_mb": 1, "offload": "none", "offload_params": "none",
    }  # fmt: skip
    ours = deepspeed_config.generate(strategy, "bfloat16", 2, 4, 3, None)
    merged = flatten(deepspeed_config.merged(ours, user))
    assert all(merged[k] == v for k, v in flatten(ours).items() if k.rpartition(".")[2] not in deepspeed_config.TUNING)
    assert "auto" not in merged.values()


def test_bad_files_and_settings_are_refused_with_a_fix(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(what: str, user: Any = None, **settings: Any) -> None:
        with pytest.raises(ValueError, match=what) as error:
            check(user, **settings)
        assert "\n  fix: " in str(error.value)

    nvme = {"strategy.offload": "nvme", "strategy.nvme_path": str(tmp_path)}
    refused("is not valid JSON", "{")
    refused("must be a JSON object", "[]")
    refused("cannot be read", **{"strategy.deepspeed_config": f"{tmp_path}/none.json"})
    refused("offload=nvme: is for zero3", **nvme, **{"strategy.stage": 2})
    refused("offload_params=cpu: is for zero3", **{"strategy.stage": 1, "strategy.offload_params": "cpu"})
    refused("nvme_path=null", **{"strategy.offload": "nvme"})
    refused("cannot be written to", **nvme | {"strategy.nvme_path": f"{tmp_path}/none"})
    refused("compile=true", compile=True)
    with monkeypatch.context() as patch:
        patch.setattr("ctypes.util.find_library", lambda name: None)
        refused("libaio", **nvme)
    # a build that was interrupted
    monkeypatch.setattr("ctypes.util.find_library", lambda name: "libaio.so.1")
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    for operation in ("async_io", "pin_memory"):
        lock = tmp_path / "torch_extensions" / "py311_cpu" / operation / "lock"
        lock.parent.mkdir(parents=True)
        lock.touch()
        check(None, **nvme)  # it may be going on
        os.utime(lock, (0, 0))
        refused(f"DeepSpeed's {operation} was interrupted and left {lock}", **nvme)
        lock.unlink()


def test_swap_folders_of_the_dead_are_removed_and_of_the_living_kept(tmp_path: Path) -> None:
    living = deepspeed_config.swap_folder(str(tmp_path))
    dead = tmp_path / "dtrain-swap-1-dead"
    dead.mkdir()
    (dead / "lock").touch()
    (tmp_path / "mine").touch()
    other = deepspeed_config.swap_folder(str(tmp_path))
    assert living.exists() and other.exists() and not dead.exists() and (tmp_path / "mine").exists()


# ---- training ------------------------------------------------------------------------------------------------


def same_curve(run: Path, reference: Path, steps: int) -> None:
    ours, expected = losses(run), losses(reference)
    assert sorted(ours) == list(range(1, steps + 1))
    assert max(abs(ours[s] - expected[s]) for s in ours) < 1e-5
    norms = [[m["grad_norm"] for m in metrics(r) if "grad_norm" in m] for r in (run, reference)]
    assert max(abs(a - b) for a, b in zip(*norms, strict=False)) < 1e-4


def state_of(run: Path, step: int) -> dict[str, Any]:
    """Every tensor of a checkpoint, whole."""
    from dtrain.checkpoint.shards import Reader

    path = run / "checkpoints" / f"step-{step:08d}"
    content = store.read_manifest(path)
    with Reader(path, content) as reader:
        return {name: reader.whole(name) for name in content.tensors} | {"extra": content["extra"]["optimizer"]}


def test_a_run_moves_through_the_stages(tmp_path: Path) -> None:
    """One run in legs, each under another layout: the curve of one process, and the counts of its optimizer."""
    legs = [
        ("ddp", 2, []),
        ("zero3", 3, [CUT, "strategy.offload=cpu", "strategy.offload_params=cpu", "train.micro_batch_size=1"]),
        ("zero1", 2, ["train.micro_batch_size=1"]),
        ("ddp", 1, []),
    ]
    options = ["train.steps=8", "train.global_batch_size=6", "train.max_grad_norm=0.5"]
    reference = make_run(tmp_path / "reference", *options, "cluster.processes=1")
    assert train(reference, 1) == [0]
    for i, (strategy, size, more) in enumerate(legs):
        stop = [f"train.stop_after={2 * i + 2}", f"cluster.processes={size}", f"strategy={strategy}"]
        run = make_run(tmp_path / "moving", *options, *stop, *more)
        assert train(run, size) == [0] * size
        same_curve(run, reference, 2 * i + 2)
    moved, expected = state_of(run, 8), state_of(reference, 8)
    assert moved.pop("extra") == expected.pop("extra")
    assert sorted(moved) == sorted(expected)
    assert max(float((moved[name] - expected[name]).abs().max()) for name in expected) < 1e-5


def load_and_save(saved: Path, runs: list[Path]) -> None:
    """Take a checkpoint over under each run's layout, and save it again, without a step."""
    for run in runs:
        cfg = load(run)
        with torch.device("meta"):
            model = build(cfg.model)
        strategy, device = build(cfg.strategy), torch.device("cpu")
        strategy.setup(
            model, build(cfg.optim), precision=build(cfg.precision), device=device, first=Drawn(5), micro_batch_size=1
        )
        content = store.read_manifest(saved)
        state = strategy.state_dict()
        store.load(saved, content, state)
        strategy.load_state_dict(state, content["extra"])
        store.save(run / "checkpoints", 3, strategy.state_dict(), {"extra": strategy.extra_state()}, keep=1)
        strategy.close()


LAYOUTS = [
    ["strategy=zero1", "precision=bf16"],
    ["strategy=zero1", "strategy.offload=cpu"],
    ["strategy=zero2", "strategy.offload=cpu", "precision=bf16"],
    ["strategy=zero3", CUT, "precision=bf16"],
    ["strategy=zero3", "strategy.offload=cpu", "strategy.offload_params=cpu"],
]
IN_FP16 = ["strategy=zero2", "precision=fp16"]


@pytest.mark.parametrize("layouts", [LAYOUTS, [IN_FP16]], ids=["all", "fp16"])
def test_state_survives_a_move_bit_for_bit(layouts: list[list[str]], tmp_path: Path) -> None:
    """Three ranks shard no weight evenly, and in 16 bits the weights that compute are not the ones that are saved."""
    skip_without_fp16("zero2", "fp16" if IN_FP16 in layouts else "bf16")
    first = make_run(tmp_path / "first", "cluster.processes=1", "train.stop_after=3")
    assert train(first, 1) == [0]
    options = ["cluster.processes=3", "train.global_batch_size=6"]
    runs = [make_run(tmp_path / str(i), *options, *layout) for i, layout in enumerate(layouts)]
    spawn(3, load_and_save, first / "checkpoints" / "step-00000003", runs)
    expected = state_of(first, 3)
    counts = expected.pop("extra")
    for run in runs:
        moved = state_of(run, 3)
        assert moved.pop("extra") == counts
        assert sorted(moved) == sorted(expected)
        assert all(moved[name].equal(tensor) for name, tensor in expected.items())


def test_a_rank_whose_cpu_lacks_fp16_ends_with_our_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a SLURM node with another CPU than the login node's. With the other answer the same run trains."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv(CPU_FP16, "1")
    run = make_run(tmp_path / "run", *IN_FP16, "cluster.processes=2", "train.stop_after=1")
    no_gpu = {"CUDA_VISIBLE_DEVICES": ""}
    assert train(run, 2, no_gpu | {CPU_FP16: "0"}) == [2, 2]
    for rank in (0, 1):
        note = json.loads((run / "logs" / f"failure-{rank}.json").read_text())
        assert note["message"] == str(no_cpu_fp16("zero2")) and note["exit_code"] == 2
    assert train(run, 2, no_gpu | {CPU_FP16: "1"}) == [0, 0] and len(losses(run)) == 1


INFINITE = """
from dtrain.models.gpt2 import GPT2

class Infinite(GPT2):
    '''Its loss is infinite in the 12th forward pass, and its gradients are not.'''
    calls = 0
    def forward(self, inputs, targets=None):
        self.calls += 1
        loss = super().forward(inputs, targets)
        return loss + float("inf") if self.calls == 12 else loss
"""


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_a_step_that_is_not_finite_leaves_everything_alone(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "infinite_model.py").write_text(INFINITE)
    monkeypatch.syspath_prepend(tmp_path)
    run = make_run(  # the two micro-batches of step 6 are the calls 11 and 12
        tmp_path / "run", "model._target_=infinite_model.Infinite", "trust=[infinite_model]", f"strategy={strategy}",
        "cluster.processes=2", "checkpoint.every=1", "checkpoint.keep=99", "train.nonfinite=skip",
        "train.micro_batch_size=2", "train.stop_after=8",
        *([CUT, "strategy.offload=cpu"] if strategy == "zero3" else []),
    )  # fmt: skip
    assert train(run, 2) == [0, 0]
    assert summary(run)["skipped_steps"] == 1
    before, after, later = (state_of(run, step) for step in (5, 6, 7))
    assert all(after[name].equal(t) for name, t in before.items() if name != "extra")
    assert before["extra"] == after["extra"] != later["extra"]
    assert all(t.isfinite().all() for name, t in later.items() if name != "extra")
    assert losses(run)[8] < losses(run)[1]


EXTENSIONS = Path(sys.prefix) / "torch_extensions"  # a build is good for one environment only


def aio_is_there() -> str:
    try:
        deepspeed_config.check_offload({"stage": 3, "offload": "nvme", "offload_params": "none", "nvme_path": "/tmp"})
    except ValueError as error:
        return str(error)
    if locks := list(EXTENSIONS.glob("*/lock")):
        return f"DeepSpeed's operation for it is being built, or that was interrupted: {locks[0]}"
    folder, package = EXTENSIONS / "async_io", find_spec("deepspeed")
    # a build of the same package under another path (a linked .venv) would be made again, in the middle of the test
    built = (
        folder.is_dir() and package and str(Path(str(package.origin)).parent) in (folder / "build.ninja").read_text()
    )
    if built and (folder / "async_io.so").exists():
        return ""
    return "DeepSpeed's operation for it is not built, which takes minutes: make nvme"


@pytest.mark.timeout(300)
def test_nvme_keeps_the_maths_and_the_state(tmp_path: Path) -> None:
    if why := aio_is_there():
        pytest.skip(why)
    # less than 1 MiB a rank is not worth a file to DeepSpeed
    options = ["model.dim=256", "model.num_layers=2", "train.steps=6", "cluster.processes=2"]
    swap = ["strategy=zero3", CUT, f"strategy.nvme_path={tmp_path}", "train.micro_batch_size=2"]
    reference = make_run(tmp_path / "reference", *options)
    assert train(reference, 2) == [0, 0]
    run = make_run(tmp_path / "run", *options, *swap, "strategy.offload=nvme", "train.stop_after=2")
    env = {"TORCH_EXTENSIONS_DIR": str(EXTENSIONS)}
    assert train(run, 2, env) == [0, 0]
    make_run(run, *options, *swap, "strategy.offload=nvme", "strategy.offload_params=nvme", "train.stop_after=4")
    assert train(run, 2, env) == [0, 0]
    make_run(run, *options, "strategy=zero1")
    assert train(run, 2) == [0, 0]
    same_curve(run, reference, 6)
