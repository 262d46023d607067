"""No launch on CPUs of a model that the machine's memory cannot hold; and nothing is refused that it might."""

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.cli import main
from dtrain.config.build import build
from dtrain.config.files import section
from dtrain.plan import host_memory
from dtrain.plan.layout import layout_of
from dtrain.plan.ledger import total
from dtrain.plan.memory.peak import memory
from dtrain.plan.model_shape import shape_of
from dtrain.plan.parameters import held_parameters
from dtrain.plan.sections import strategy_section
from tests.config.test_files import compose
from tests.plan import test_run_prediction as test_trust

started = test_trust.started


@pytest.fixture
def box(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has 24 GiB."""
    monkeypatch.setattr(host_memory, "machine_bytes", lambda: 24 * 2**30)


def fix_of(capsys: pytest.CaptureFixture[str]) -> str:
    """What the only message on the screen proposes."""
    captured = capsys.readouterr()
    err = captured.err
    assert captured.out == "" and err.startswith("error: model=") and err.count("\n") == 2
    return err.partition("  fix: ")[2].partition("; or force=true, if swap is enough")[0]


@pytest.mark.usefixtures("box")
@pytest.mark.parametrize("hardware", [[], ["hardware=l4"], ["hardware=cpu"]], ids=str)
def test_a_model_that_this_machine_cannot_hold_is_refused_and_the_fix_works(
    hardware: list[str], started: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """1,557,686,400 parameters with those that pad the vocabulary, 16 bytes each, on both ranks."""
    words = ["launch", "model=gpt2-1.5b", *hardware]
    assert main(words) == 2
    captured = capsys.readouterr()
    sums = "weights, gradients and optimizer state alone need 46.4 GiB of memory (2 ranks × 23.2 GiB)"
    assert f"error: model=gpt2-1.5b: {sums}, this machine has 24.0 GiB, and there is no GPU here\n" in captured.err
    assert captured.out == "" and captured.err.count("\n") == 2, "a message and its fix, no warning beside them"
    assert not started and not list(tmp_path.iterdir())
    fix = captured.err.partition("  fix: ")[2].partition(" (")[0].split()
    assert fix == ["model=gpt2-774m", "strategy=fsdp", "train.micro_batch_size=1"], "larger ones do not fit, either"
    assert main([*words, *fix]) == 0 and len(started) == 1


@pytest.mark.usefixtures("box")
def test_a_smaller_llama_is_named(started: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Its norm_eps of 1e-5 is a number, also where no configuration is composed."""
    words = ["launch", "model=llama-8b", "data=synthetic"]
    assert main(words) == 2
    assert fix_of(capsys).startswith("model=llama-tiny ("), "llama-1b needs 18.4 GiB without its activations"
    assert main([*words, "model=llama-tiny"]) == 0 and len(started) == 1


def test_a_model_is_named_whose_data_take_its_sizes(
    started: list[Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "machine_bytes", lambda: 8 * 2**30)
    words = ["launch", "model=llama-7b"]
    assert main(words) == 2
    fix = fix_of(capsys)
    assert fix.startswith("model=llama-tiny (") and "data.seq_len" not in fix
    assert main([*words, "model=llama-tiny"]) == 0 and len(started) == 1
    assert main([*words, "data.seq_len=1024"]) == 2
    assert "a smaller model" in fix_of(capsys), "the small one takes no samples of that length"


@pytest.mark.usefixtures("box")
def test_another_mistake_is_told_first(capsys: pytest.CaptureFixture[str], started: list[Path]) -> None:
    assert main(["launch", "model=gpt2-1.5b", "cluster.nodes=2"]) == 2
    assert "cluster=local is one machine" in capsys.readouterr().err and not started


@pytest.mark.usefixtures("box")
@pytest.mark.parametrize(("word", "runs"), [("force=true", 1), ("dry_run=true", 0)])
def test_who_insists_or_only_looks_is_not_refused(word: str, runs: int, started: list[Path]) -> None:
    assert main(["launch", "model=gpt2-1.5b", word]) == 0
    assert len(started) == runs


@pytest.mark.usefixtures("box")
def test_shards_are_counted_once_and_copies_on_every_rank(
    started: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["launch", "model=gpt2-350m", "train.micro_batch_size=1"]
    assert main([*words, "cluster.processes=4", "train.global_batch_size=4"]) == 2
    assert "4 ranks × " in (error := capsys.readouterr().err) and "fix: strategy=fsdp (" in error
    assert main([*words, "cluster.processes=4", "train.global_batch_size=4", "strategy=fsdp"]) == 0
    assert len(started) == 1 and "a step of 10.0 TFLOP takes about" in capsys.readouterr().err
    words = ["launch", "model=gpt2-774m", "cluster.processes=4", "compile=whole"]  # one graph is not for fsdp
    assert main(words) == 2
    assert fix_of(capsys) == "cluster.processes=1 train.micro_batch_size=2 (18.3 GiB)", "two copies leave no room"
    assert main([*words, "cluster.processes=1", "train.micro_batch_size=2"]) == 0


@pytest.mark.usefixtures("box")
def test_each_point_of_a_sweep_must_fit_in_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], started: list[Path]
) -> None:
    assert main(["launch", "-m", "model=gpt2-124m,gpt2-1.5b"]) == 2
    assert fix_of(capsys).startswith("train.micro_batch_size=4 (") and not started and not list(tmp_path.iterdir())


def test_where_sizes_are_typed_no_other_model_is_named() -> None:
    """In a process of its own, with the memory that this machine has: ten thousand layers."""
    sizes = ["model.num_layers=10000", "model.dim=2304"]
    words = ["launch", "model=gpt2-124m", *sizes, "cluster.processes=1"]
    code = "import sys; from dtrain.cli import main; from dtrain.launch.local import Local; Local.launch = None; "
    code += f"code = main({words}); assert 'torch' not in sys.modules; sys.exit(code)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "optimizer state alone need 9498.4 GiB of memory, this machine has " in done.stderr
    assert "fix: a machine with GPUs or more memory, or a smaller model; or force=true" in done.stderr


def test_only_what_runs_on_these_cpus_and_is_known_is_judged(
    started: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "machine_bytes", lambda: 1)
    config = compose()
    assert host_memory.shortage(config) is not None
    assert host_memory.shortage(compose("cluster=slurm", "cluster.gpus_per_node=0")) is None, "other machines"
    for group in ("strategy", "optim"):
        assert host_memory.shortage({**config, group: {**config[group], "_target_": "mine.Thing"}}) is None, group
    (tmp_path / "my_net_h.py").write_text("from torch import nn\n\n\nclass Net(nn.Linear):\n    pass\n")
    sizes = ["model.in_features=64", "model.out_features=10"]
    assert main(["launch", "model=my_net_h.Net", *sizes, "data=digits", "data.image_size=8", "data.channels=1"]) == 0
    assert len(started) == 1
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr("dtrain.config.hardware.count_gpus", lambda: 0)
    monkeypatch.setattr(host_memory, "OTHER_GPUS", (tmp_path / "dxg",))
    assert host_memory.shortage(config) is not None
    (tmp_path / "dxg").touch()
    assert host_memory.shortage(config) is None, "torch may find a GPU there"
    monkeypatch.setattr(host_memory, "OTHER_GPUS", ())
    monkeypatch.setattr("dtrain.config.hardware.count_gpus", lambda: 2)
    assert host_memory.shortage(config) is None


def test_a_fault_while_looking_at_this_machine_does_not_stop_a_launch(
    started: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(config: object) -> None:
        raise ValueError("oops")

    with monkeypatch.context() as patch:
        patch.setattr(host_memory, "states_of", broken)
        assert main(["launch"]) == 2 and "oops" in capsys.readouterr().err  # in tests it is heard
        patch.delenv("DTRAIN_STRICT")
        assert main(["launch", "run_dir=run"]) == 0 and len(started) == 1
    said = capsys.readouterr().err
    assert said.startswith("the planner failed (ValueError: oops), so whether this machine's memory can hold")
    monkeypatch.setattr(host_memory, "machine_bytes", lambda: 1)
    monkeypatch.setattr(host_memory, "smaller_models", broken)
    monkeypatch.delenv("DTRAIN_STRICT")
    assert main(["launch"]) == 2, "a refusal needs no way out to be right"
    logged = capsys.readouterr().err
    assert logged.startswith("the planner failed (ValueError: oops), so no layout") and "a smaller model" in logged


@functools.cache
def small(*words: str) -> dict[str, Any]:
    return compose(*words)


def with_ranks(config: dict[str, Any], strategy: str, ranks: int, **given: Any) -> dict[str, Any]:
    """The same under another strategy, on so many ranks."""
    choices, cluster = {**config["choices"], "strategy": strategy}, {**config["cluster"], "processes": ranks}
    return {**config, "strategy": strategy_section(strategy) | given, "choices": choices, "cluster": cluster}


def states(config: dict[str, Any]) -> float:
    found = host_memory.states_of(config)
    assert found is not None
    return found


def test_what_waits_on_a_disk_is_not_in_memory() -> None:
    config = small()
    one = states(with_ranks(config, "ddp", 1)) / 16
    zero3 = functools.partial(with_ranks, config, "zero3", 4)
    assert states(zero3()) == states(zero3(offload="cpu", offload_params="cpu")) == 20 * one
    assert states(zero3(offload="nvme")) == 4 * one
    assert states(zero3(offload="nvme", offload_params="nvme")) == 0


def test_weights_that_fairscale_deals_out_whole_are_there_once() -> None:
    """Of 16 ranks one has the state of the largest weight, 1/12 of all, and others have less than 1/16."""
    config = small()
    one = states(with_ranks(config, "ddp", 1)) / 16
    assert states(with_ranks(config, "fairscale", 16)) == pytest.approx((16 * 4 + 4 + 8) * one)
    assert states(with_ranks(config, "fairscale", 16, mode="oss")) == pytest.approx((16 * 8 + 8) * one)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(
        [
            "ddp",
            "local_sgd",
            "ring",
            "horovod",
            "diloco",
            "fsdp",
            "fairscale",
            "ps",
            "zero1",
            "zero2",
            "zero3",
            "tensor",
            "pipeline",
            "3d",
        ]
    ),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["fp32", "bf16", "bf16-pure"]),
    st.sampled_from(["adamw", "sgd"]),
    st.sampled_from([0, 8]),
    st.sampled_from(["gpt2-124m", "llama-tiny", "gpt2-tiny"]),
)
def test_the_states_are_a_part_of_what_is_predicted(
    strategy: str, ranks: int, precision: str, optim: str, lora: int, model: str
) -> None:
    """So what is refused would not fit either by the whole prediction, which is held against measured peaks."""
    if strategy == "3d" and ranks < 4:
        return
    config = with_ranks(small(f"model={model}"), strategy, ranks)
    config |= {group: dict(section(group, name)) for group, name in (("precision", precision), ("optim", optim))}
    config |= {"lora": {"rank": lora, "alpha": 16.0, "targets": []}}
    shape = shape_of(config)
    assert shape is not None
    found = states(config)
    assert 0 < found <= ranks * total(memory(shape, layout_of(config)))
    alone = states(with_ranks(config, "ddp", 1))
    if strategy in ("ddp", "local_sgd", "ring", "horovod"):
        assert found == ranks * alone
    if strategy == "diloco" and ranks > 1 and not lora:
        assert found == ranks * (alone + 8 * held_parameters(shape)), "outer weights and their momentum, in float32"
    if strategy == "fsdp":
        assert found == pytest.approx(alone)
    assert states({**config, "optim": dict(section("optim", "sgd")) | {"momentum": 0.0}}) < found


@pytest.mark.parametrize(
    "words", [(), ("optim=sgd",), ("optim=sgd", "optim.momentum=0"), ("model=resnet18", "optim=sgd")]
)
def test_the_states_are_what_torch_holds_after_a_step(words: tuple[str, ...]) -> None:
    import torch

    config = compose(*words, "cluster.processes=1")
    model = build(config["model"])
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = build(config["optim"])(model.named_parameters())
    optimizer.step()
    kept = [v for slots in optimizer.state.values() for v in slots.values() if isinstance(v, torch.Tensor) and v.dim()]
    tensors = [*model.parameters(), *(p.grad for p in model.parameters()), *kept]
    assert states(config) == sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.usefixtures("box")
def test_activations_that_do_not_fit_are_refused_and_the_fix_works(
    started: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["launch", "model=gpt2-124m", "cluster.processes=2"]
    assert main(words) == 2
    rule = "training needs 41.3 GiB of memory (2 ranks × 20.6 GiB), this machine has 24.0 GiB"
    assert f"error: model=gpt2-124m: {rule}" in capsys.readouterr().err and not started
    assert main(words) == 2
    fix = fix_of(capsys).partition(" (")[0]
    assert fix.startswith("train.micro_batch_size=")
    assert main([*words, fix]) == 0 and len(started) == 1
    assert capsys.readouterr().err.startswith("warning: a step of 28.2 TFLOP takes about")
    assert main([*words, "dry_run=true", "run_dir=preview"]) == 0 and len(started) == 1
    assert rule in capsys.readouterr().err, "a preview warns: the run may be for another machine"
    assert main([*words, "force=true", "run_dir=forced"]) == 0 and len(started) == 2


def test_activations_that_may_not_fit_are_warned_of(
    started: list[Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = host_memory.cpu_bytes(compose("model=gpt2-124m", "cluster.processes=2"))
    monkeypatch.setattr(host_memory, "machine_bytes", lambda: int(needs * 0.95))
    assert main(["launch", "model=gpt2-124m", "cluster.processes=2"]) == 0 and len(started) == 1
    found = capsys.readouterr().err
    assert "and there is no GPU here: the ranks may be killed\n  fix: train.micro_batch_size=" in found
    assert host_memory.shortage(compose("model=gpt2-tiny")) is None
