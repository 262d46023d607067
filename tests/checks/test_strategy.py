"""What a strategy cannot do is said before the launch, with a fix that works; and how layers become stages."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.checks import strategy as rules
from dtrain.config.hardware import CPU_FP16
from dtrain.strategies import stage_layout
from tests.world import make_run

REFUSED = [
    (["strategy=3d", "cluster.processes=2"], "pp × dp × tp must equal the number of ranks"),
    (["strategy=tensor", "cluster.processes=3"], "must divide model.num_heads"),
    (["strategy=tensor", "strategy.sequence_parallel=true", "model.seq_len=15"], "must be a multiple of the 2 tensor"),
    (["strategy=tensor", "strategy.sequence_parallel=true", "data.seq_len=15"], "data.seq_len=15 must be a multiple"),
    (["strategy=tensor", "strategy.loss_parallel=true", "model.vocab_multiple=1"], "vocabulary, padded"),
    (["strategy=tensor", "model._target_=plain.Plain", "trust=[plain]"], r"Plain has no tp_plan\(\)"),
    (["strategy=pipeline", "model._target_=plain.Plain", "trust=[plain]"], r"Plain has no pipeline_split\(\)"),
    (["strategy=pipeline", "cluster.processes=5", "train.global_batch_size=20"], "only model.num_layers=4"),
    (["strategy=pipeline", "cluster.processes=4", "strategy.schedule=zbv"], "8 stages, and there are only"),
    (["strategy=pipeline", "strategy.schedule=zbv", "compile=true"], "torch.compile does not support"),
    (["strategy=fsdp", "compile=whole"], "collectives between the layers"),
    (["strategy=pipeline", "cluster.processes=4", "train.global_batch_size=2"], "at least as many micro-batches"),
    (["strategy=pipeline", "train.micro_batch_size=8"], "at least as many micro-batches"),
    (["strategy=pipeline", "strategy.schedule=interleaved_1f1b", "train.global_batch_size=5"], "a multiple of"),
    (["strategy=pipeline", "strategy.split=[1,2]"], "must be the 1 layers"),
    (["strategy=pipeline", "strategy.split=[4]"], "must be the 1 layers"),
    (["strategy=pipeline", "strategy.split=[0]"], "must be the 1 layers"),
    (["strategy=pipeline", "strategy.stages_per_rank=1"], "must be at least 2"),
    (["strategy=fsdp", "strategy.replica_size=2"], "only for strategy.sharding=hybrid"),
    (["strategy=fsdp", "strategy.sharding=hybrid", "strategy.replica_size=3"], "must divide the 2 data-parallel"),
    (["strategy=fsdp", "strategy.sharding=hybrid"], "one copy over all 2"),
    (["strategy=fsdp", "strategy.compress=int8"], "is for replicas of the model, and sharding=full has none"),
    (
        ["strategy=fsdp", "strategy.sharding=hybrid", "strategy.replica_size=1", "strategy.compress=powersgd"],
        "factors whole matrices",
    ),
    (["strategy=ddp", "strategy.compress=int4"], "one of none, fp16"),
    (["strategy=ddp", "strategy.compress_ratio=0"], "must be more than 0"),
    (["strategy=ddp", "strategy.compress_ratio=1.5"], "must be at most 1"),
    (["strategy=ddp", "strategy.compress_rank=0"], "must be at least 1"),
    (["strategy=zero3", "strategy.nvme_path=/tmp"], "only for offload to nvme"),
    (["strategy=zero3", "optim.state=int8"], "DeepSpeed updates ranges of all weights as one"),
    (["strategy=fairscale", "optim.state=bf16"], "FairScale makes an optimizer of its own"),
    (["strategy=local_sgd", "optim.state=int8"], "averages the moments of all ranks"),
    (["strategy=diloco", "optim.state=int8"], "averages the moments of all ranks"),
    (["strategy=fsdp", "strategy.offload=cpu", "optim.state=int8"], "rounding on the host"),
    (["strategy=tensor", "model.dim=64", "cluster.processes=4", "optim.state=int8"], "would have 64 / 4 of a row"),
    (["optim.state=fp8"], "one of fp32, bf16, int8"),
    (["strategy=fsdp", "strategy.sharding=some"], "one of full, grad_op, hybrid"),
    (["strategy=fsdp", "strategy.offload=disk"], "one of none, cpu"),
    (["strategy=fairscale", "strategy.mode=fsdp"], "needs NCCL"),
    (["strategy=local_sgd", "strategy.every=0"], "must be at least 1"),
    (["strategy=ps", "strategy.mode=some"], "one of sync, async, bounded"),
    (["strategy=ps", "strategy.staleness=4"], "only for strategy.mode=bounded"),
    (["strategy=ps", "strategy.mode=bounded"], "needs strategy.staleness"),
    (["strategy=ps", "strategy.mode=bounded", "strategy.staleness=-1"], "must be at least 0"),
    (["strategy=ps", "strategy.slow_rank=2"], "only the ranks 0 to 1"),
    (["strategy=ps", "strategy.slow_rank=1", "strategy.slow_factor=0.5"], "must be at least 1"),
    (["strategy=ps", "strategy.mode=async", "deterministic=true"], "two runs differ"),
    (["strategy=ps", "strategy.mode=async", "precision=fp16"], "a loss scale of its own"),
    (["strategy=ps", "strategy.mode=async", "guard.replay_every=5"], "at different steps"),
    (["strategy=ps", "strategy.mode=async", "train.spike=skip"], "at different steps"),
    (["strategy=ps", "strategy.mode=async", "cluster=slurm", "cluster.gpus_per_node=2"], "only tried with ranks on"),
    (["strategy=ps", "strategy.mode=async", "+model.batch_norm=sync"], "batch norm all-reduces|batch_norm"),
    (["strategy=diloco", "strategy.outer_lr=0"], "must be more than 0"),
    (["strategy=diloco", "strategy.outer_momentum=1"], "must be less than 1"),
    (["strategy=diloco", "strategy.exchange=int4"], "one of fp32, int8"),
    (["strategy=diloco", "strategy.every=4", "strategy.fragments=5"], "at a step of its own"),
    (["strategy=ring", "strategy.trace=-1"], "must be at least 0"),
]


@pytest.fixture(autouse=True)
def plain_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plain.py").write_text(
        "from torch import nn\n\nclass Plain(nn.Module):\n    def __init__(self, **sizes: int) -> None: ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(("overrides", "message"), REFUSED, ids=[" ".join(o) for o, _ in REFUSED])
def test_refused_before_the_launch(overrides: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message) as error:
        make_run(tmp_path / "run", "model.num_layers=4", "cluster.processes=2", *overrides)
    assert "\n  fix: " in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("overrides", "refused_with"),
    [
        ("strategy=zero1", "0"),
        ("strategy=zero2 cluster=slurm cluster.gpus_per_node=0 cluster.launcher=torchrun cluster.node_rank=0", "0"),
        ("strategy=zero3 cluster.processes=1 strategy.offload=cpu", "0"),
        ("strategy=zero3 cluster.processes=1", ""),  # one rank trains without DeepSpeed
        ("strategy=zero1 precision=bf16", ""),
        ("strategy=fsdp", ""),
        ("strategy=zero1 cluster=slurm cluster.gpus_per_node=0", ""),  # the nodes' CPUs are not this one
        ("strategy=zero1 cluster=slurm cluster.gpus_per_node=8", ""),
    ],
)
def test_deepspeed_in_fp16_needs_a_cpu_for_it(
    overrides: str, refused_with: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for fake in ("1", "0"):
        monkeypatch.setenv(CPU_FP16, fake)
        words = ["cluster.processes=2", "precision=fp16", "preflight=off", *overrides.split()]
        if fake != refused_with:
            make_run(tmp_path / fake, *words)
            continue
        with pytest.raises(ValueError, match=r"^precision=fp16: .*AVX512-FP16.*\n  fix: precision=bf16, or strategy"):
            make_run(tmp_path / fake, *words)


def test_float8_needs_gpus_before_it_needs_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtrain.config.hardware.count_gpus", lambda: 0)
    with pytest.raises(ValueError, match=r"needs GPUs, and there are none\n  fix: precision=bf16$"):
        make_run(tmp_path / "run", "precision=fp8")


def test_a_pipeline_needs_a_gpu_for_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtrain.config.hardware.count_gpus", lambda: 1)
    with pytest.raises(ValueError, match="gloo, which cannot send GPU tensors"):
        make_run(tmp_path / "run", "model.num_layers=4", "cluster.processes=2", "strategy=pipeline")
    with pytest.raises(ValueError, match="where this setting crashed"):
        make_run(tmp_path / "run", "cluster.processes=2", "strategy=tensor", "strategy.sequence_parallel=true")


def test_what_is_not_installed_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules.importlib.util, "find_spec", lambda name: None)
    pip = "pip install 'dtrain[{}]', or strategy=fsdp"
    horovod = "make horovod, which builds it, or strategy=ddp"
    for strategy, package, how in (
        ("zero2", "deepspeed", pip), ("fairscale", "fairscale", pip), ("horovod", "horovod", horovod),
    ):  # fmt: skip
        section = {"_target_": f"dtrain.strategies.{package}.X"}
        config = {"strategy": section, "model": {}, "choices": {"strategy": strategy}}
        fix = re.escape(how.format(package))
        with pytest.raises(ValueError, match=f"strategy={strategy}: {package} is not installed\n  fix: {fix}"):
            rules.check(config, rules.MeshSizes(), 1)


def test_horovod_is_for_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules.importlib.util, "find_spec", lambda name: name)
    section = {"_target_": "dtrain.strategies.horovod.Horovod"}
    config = {"strategy": section, "model": {}, "choices": {"strategy": "horovod"}, "cluster": {"gpus_per_node": 8}}
    with pytest.raises(ValueError, match=r"strategy=horovod: was only tried .*\n  fix: strategy=ddp"):
        rules.check(config, rules.MeshSizes(), 1)


# ---- stages --------------------------------------------------------------------------------------------------


@given(st.integers(1, 8), st.sampled_from(["gpipe", "1f1b", "interleaved_1f1b", "zbv"]), st.integers(2, 4))
def test_every_stage_is_on_one_rank(pp: int, schedule: str, stages_per_rank: int) -> None:
    held = [stage_layout.stages_of_rank(rank, pp, schedule, stages_per_rank) for rank in range(pp)]
    assert len({total for _, total in held}) == 1
    assert sorted(i for stages, _ in held for i in stages) == list(range(held[0][1]))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(0, 30), st.integers(0, 30), st.data())
def test_balance_makes_the_largest_stage_as_small_as_it_can_be(
    layers: list[int], first: int, last: int, data: st.DataObject
) -> None:
    num_stages = data.draw(st.integers(1, len(layers)))

    def largest(bounds: list[tuple[int, int]]) -> int:
        return max(sum(layers[a:b]) + (first if a == 0 else 0) + (last if b == len(layers) else 0) for a, b in bounds)

    bounds = stage_layout.balance(layers, first, last, num_stages)
    assert [a for a, _ in bounds] == [0, *(b for _, b in bounds[:-1])] and bounds[-1][1] == len(layers)
    assert len(bounds) == num_stages and all(a < b for a, b in bounds)
    cuts = itertools.combinations(range(1, len(layers)), num_stages - 1)
    assert largest(bounds) == min(largest(list(itertools.pairwise([0, *c, len(layers)]))) for c in cuts)
