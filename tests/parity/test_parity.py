"""Same maths: every strategy of conf/strategy, at every number of ranks that suits it, follows one process.

With the functions of `dtrain verify`, and its tolerances (dtrain/commands/verify/compare.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dtrain.commands.verify import compare
from dtrain.commands.verify.command import Row, judge
from dtrain.commands.verify.compare import CONTEXT, FEWER_STEPS, SMALL, STATES, VARIANTS, Case, compose, make_case
from tests.world import STRATEGIES, layouts, losses, sizes_of, skip_without_fp16, start_server, summary


def trained(strategy: str, size: int, precision: str, run_dir: Path, *overrides: str, accumulate: bool = False) -> Case:
    cfg = compose([*SMALL, f"strategy={strategy}", f"precision={precision}", *overrides])
    case = make_case(strategy, size, precision, cfg, run_dir, accumulate)
    assert not case.refused
    start_server()
    error = compare.run(case, timeout=150)
    assert not error, error
    return case


def row_of(case: Case, reference: Case) -> Row:
    row = judge(case, reference, "", 0.0)
    print(row)
    return row


def distance(case: Case, reference: Case) -> float:
    ours, theirs = losses(case.run_dir), losses(reference.run_dir)
    return max(abs(ours[s] - theirs[s]) for s in ours)


@pytest.fixture(scope="module")
def fewer(request: pytest.FixtureRequest) -> list[str]:
    """8 steps in `make test`, all 20 in `make test-all`; the schedule of the learning rate is the same."""
    return [] if request.config.getoption("--all") else [FEWER_STEPS]


@pytest.fixture(scope="module")
def references(fewer: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    folder = tmp_path_factory.mktemp("one")
    return {
        "fp32": trained("ddp", 1, "fp32", folder / "fp32", *fewer),
        "bf16": trained("ddp", 1, "bf16", folder / "bf16", FEWER_STEPS),
        "fp16": trained("ddp", 1, "fp16", folder / "fp16", FEWER_STEPS),
    }


@pytest.fixture(scope="module")
def reference(references: dict[str, Case]) -> Case:
    return references["fp32"]


def test_the_reference_learns(reference: Case, fewer: list[str]) -> None:
    curve = losses(reference.run_dir)
    assert len(curve) == (8 if fewer else 20)
    assert curve[len(curve)] < curve[1] - (0.05 if fewer else 0.1), "or equality means little"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "ddp+int8" else pytest.mark.slow) for name in VARIANTS]
)
def test_compression_follows_one_process(name: str, reference: Case, fewer: list[str], tmp_path: Path) -> None:
    strategy, size = name.partition("+")[0], VARIANTS[name].size
    case = trained(strategy, size, "fp32", tmp_path / "run", *VARIANTS[name].overrides, *fewer, accumulate=True)
    row = row_of(case, reference)
    assert row.passed, row.reason
    assert row.tolerance and row.max_loss_diff and row.max_loss_diff > 1e-6, "it had an effect"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "fsdp+ring" else pytest.mark.slow) for name in CONTEXT]
)
def test_divided_sequences_follow_one_process(name: str, reference: Case, fewer: list[str], tmp_path: Path) -> None:
    variant = CONTEXT[name]
    options = [*variant.overrides, *variant.shared, *fewer]
    one = trained("ddp", 1, "fp32", tmp_path / "one", *variant.shared, *fewer) if variant.shared else reference
    case = trained(name.partition("+")[0], variant.size or 2, "fp32", tmp_path / "run", *options, accumulate=True)
    assert "cp" in case.mesh
    row = row_of(case, one)
    assert row.passed, row.reason
    assert row.tolerance == 1e-5 and row.max_gradient_diff and row.max_gradient_diff < 1e-5


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "3d+state-int8" else pytest.mark.slow) for name in STATES]
)
def test_moments_in_other_dtypes_follow_one_process(name: str, fewer: list[str], tmp_path: Path) -> None:
    strategy, options = name.partition("+")[0], [*STATES[name].shared, *fewer]
    exact = trained("ddp", 1, "fp32", tmp_path / "exact", *options, "optim.state=null")
    one = trained("ddp", 1, "fp32", tmp_path / "one", *options)
    case = trained(strategy, sizes_of(strategy)[0], "fp32", tmp_path / "run", *options, accumulate=True)
    row = row_of(case, one)
    assert row.passed, row.reason
    assert row.tolerance == 1e-4 and 1e-6 < distance(one, exact) < 2e-3, "it had an effect, and a small one"


# 8 ranks are for those that need two axes to be larger than 1; `dtrain verify` runs them, too
@pytest.mark.parametrize(("strategy", "size"), layouts(1, 2, 4))
def test_follows_one_process(strategy: str, size: int, reference: Case, fewer: list[str], tmp_path: Path) -> None:
    case = trained(strategy, size, "fp32", tmp_path / "run", *fewer, accumulate=True)
    assert summary(case.run_dir)["accumulation"] > 1
    row = row_of(case, reference)
    assert row.passed, row.reason
    stated = compare.stated_tolerance(case.run_dir)
    assert row.tolerance == stated or (stated is None and row.tolerance == 1e-5)
    last = 8 if fewer else 20
    assert "val_loss" in compare.steps_of(case.run_dir)[last] and len(losses(case.run_dir)) == last


@pytest.mark.parametrize(
    "options",
    [
        ["activation_checkpointing=full"],
        ["activation_checkpointing=selective", "activation_checkpointing_every=2"],
        ["strategy.sharding=grad_op"],
    ],
)
def test_memory_settings_do_not_change_the_maths(
    options: list[str], reference: Case, fewer: list[str], tmp_path: Path
) -> None:
    row = row_of(trained("fsdp", 2, "fp32", tmp_path / "run", *options, *fewer), reference)
    assert row.passed, row.reason


CHEAP = [("lion", "fsdp"), ("muon", "fsdp"), ("adafactor", "fsdp")]


@pytest.mark.parametrize(
    ("optim", "strategy"),
    [
        pytest.param(optim, strategy, marks=[] if (optim, strategy) in CHEAP else pytest.mark.slow)
        for optim in ("lion", "rmsprop", "torch.optim.NAdam", "muon", "adafactor")
        for strategy in ("ddp", "fsdp", "zero1", "zero2", "zero3", "tensor", "pipeline", "fairscale", "ring", "ps")
    ],
)
def test_other_optimizers(optim: str, strategy: str, fewer: list[str], tmp_path: Path) -> None:
    rate = 0.1 if optim == "adafactor" else 1e-3  # Adafactor's is relative to a weight's size
    overrides = [f"optim={optim}", f"optim.lr={rate}", *fewer]
    if "." in optim:
        overrides = [f"optim._target_={optim}", "trust=[torch.optim]", "~optim.betas", "~optim.lr_scaling",
                     "~optim.base_batch_size", *overrides[1:]]  # fmt: skip
    one = trained("ddp", 1, "fp32", tmp_path / "one", *overrides)
    row = row_of(trained(strategy, 2, "fp32", tmp_path / "two", *overrides), one)
    assert row.passed, row.reason


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_half_precision(strategy: str, precision: str, references: dict[str, Case], tmp_path: Path) -> None:
    """Near one process in the same precision; near one in fp32, too, and yet not the same."""
    skip_without_fp16(strategy, precision)
    case = trained(strategy, sizes_of(strategy)[0], precision, tmp_path / "run", FEWER_STEPS, accumulate=True)
    row = row_of(case, references[precision])
    assert row.passed, row.reason
    # bf16 keeps 8 bits: a relative error of 4e-3 a product; 0.02 on a loss of 4 is little more than one of them
    assert distance(case, references["fp32"]) < (compare.stated_tolerance(case.run_dir) or 0.02)
    full = losses(references["fp32"].run_dir)
    assert losses(case.run_dir) != {s: full[s] for s in losses(case.run_dir)}, "the precision had no effect at all"


def test_bf16_means_the_same_under_every_strategy(reference: Case, fewer: list[str], tmp_path: Path) -> None:
    """Products in bf16, norms and the residual stream in fp32: then the curves lie as near to each other as to fp32."""
    alone = [strategy for strategy, size in layouts(1) if size == 1]  # where maths of their own make no difference
    assert {"ddp", "fsdp"} <= set(alone)
    cases = {strategy: trained(strategy, 1, "bf16", tmp_path / strategy, *fewer) for strategy in alone}
    distances = {strategy: distance(case, reference) for strategy, case in cases.items()}
    print(distances)
    assert max(distances.values()) < 1.5e-3
