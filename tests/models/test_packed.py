"""Documents packed into one row see only themselves, as if each were alone: both language models, in every layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dtrain.checkpoint.initial_weights import Drawn
from dtrain.commands.verify import compare
from dtrain.commands.verify.command import judge
from dtrain.commands.verify.compare import SMALL, Case, compose, make_case
from dtrain.models.gpt2 import GPT2
from dtrain.models.layers import places
from dtrain.models.llama import Llama
from dtrain.strategies.materialize import init_weights
from tests.models.packed import PackedDataset
from tests.world import losses, start_server

LLAMA = ["model=llama-tiny", "model.num_kv_heads=2", "model.hidden_dim=48"]
PACKED = [
    "trust=[tests]", "data._target_=tests.models.packed.Packed", "train.steps=4", "train.global_batch_size=4",
    "train.eval_batches=1", "schedule.warmup_steps=1",
]  # fmt: skip


def filled(model: nn.Module) -> nn.Module:
    init_weights(model, Drawn(0))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4.0)  # so that a token that is seen or not makes a difference
    return model.eval()


MODELS = {
    "gpt2": filled(GPT2(2, 32, 4, vocab_size=50, seq_len=32, vocab_multiple=16)),
    "llama": filled(Llama(2, 32, 4, 2, 48, vocab_size=50, seq_len=32, vocab_multiple=16)),
}


def pack(tokens: Tensor, lengths: list[int]) -> Tensor:
    return torch.stack([tokens, torch.cat([torch.arange(n) for n in lengths]).expand_as(tokens)], dim=-1)


@pytest.mark.parametrize("name", MODELS)
@given(lengths=st.lists(st.integers(1, 7), min_size=1, max_size=4), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=25)
def test_a_packed_document_has_the_logits_that_it_has_alone(name: str, lengths: list[int], seed: int) -> None:
    model = MODELS[name]
    tokens = torch.randint(0, 50, (2, sum(lengths)), generator=torch.Generator().manual_seed(seed))
    alone = torch.cat([model(part) for part in tokens.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(model(pack(tokens, lengths)), alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_rows_may_be_cut_differently_and_cuts_matter(name: str) -> None:
    model = MODELS[name]
    tokens = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(0))
    cuts = [[5, 7], [1, 3, 8]]
    together = model(torch.cat([pack(row[None], lengths) for row, lengths in zip(tokens, cuts, strict=True)]))
    for i, lengths in enumerate(cuts):
        torch.testing.assert_close(together[i : i + 1], model(pack(tokens[i : i + 1], lengths)))
    whole = model(tokens)
    torch.testing.assert_close(together[0, :5], whole[0, :5], rtol=0, atol=1e-5)
    assert (together[0, 5:] - whole[0, 5:]).abs().amax(dim=-1).min() > 1e-2, "each later token is another one's"
    one = pack(tokens, [12])
    torch.testing.assert_close(model(one), whole, rtol=0, atol=1e-5)


def test_the_mask_is_none_where_the_fast_kernel_does() -> None:
    positions, mask = places(torch.zeros(2, 5, dtype=torch.int64))
    assert mask is None and positions.tolist() == [0, 1, 2, 3, 4]
    positions, mask = places(pack(torch.zeros(1, 4, dtype=torch.int64), [1, 3]))
    assert positions.tolist() == [[0, 0, 1, 2]] and mask is not None
    assert mask[0, 0].int().tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]]
    assert places(torch.zeros(2, 5, 2))[1] is None, "hidden states of an earlier stage are no documents"


def test_the_data_of_these_tests_is_packed_and_masked() -> None:
    inputs, targets = PackedDataset(16, 61, 100, seed=0, first=0).batch(torch.arange(50).numpy())
    assert inputs.shape == (50, 16, 2) and targets.shape == (50, 16)
    counts = (targets != -100).sum(dim=1)
    assert counts.min() >= 1 and counts.unique().numel() > 2, "rows weigh differently"
    ends = torch.cat([inputs[:, 1:, 1] == 0, torch.ones(50, 1, dtype=torch.bool)], dim=1)
    assert torch.equal(targets == -100, ends)


# ---- every layout --------------------------------------------------------------------------------------------


def trained(run_dir: Path, strategy: str, size: int, *overrides: str) -> Case:
    cfg = compose([*SMALL, f"strategy={strategy}", *overrides, *PACKED])
    case = make_case(strategy, size, "fp32", cfg, run_dir)
    assert not case.refused, case.refused
    start_server()
    error = compare.run(case, timeout=120)
    assert not error, error
    return case


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    folder = tmp_path_factory.mktemp("one")
    return {"gpt2": trained(folder / "gpt2", "ddp", 1), "llama": trained(folder / "llama", "ddp", 1, *LLAMA)}


ONE_ROW = "train.micro_batch_size=1"
SP_LP = ["strategy.sequence_parallel=true", "strategy.loss_parallel=true"]
LAYOUTS = [(model, strategy, 2, []) for model in MODELS for strategy in ("ddp", "fsdp", "tensor", "pipeline")]
LAYOUTS += [("llama", "tensor", 2, SP_LP), ("llama", "3d", 4, SP_LP)]


@pytest.mark.parametrize(
    ("model", "strategy", "size", "options"), LAYOUTS, ids=[f"{m}-{s}{'-sp-lp' if o else ''}" for m, s, _, o in LAYOUTS]
)
def test_packed_runs_follow_one_process(
    model: str, strategy: str, size: int, options: list[str], references: dict[str, Case], tmp_path: Path
) -> None:
    """Each micro-batch has one row, so its targets are as many as that row happens to have."""
    own = LLAMA if model == "llama" else []
    row = judge(trained(tmp_path / "run", strategy, size, *own, ONE_ROW, *options), references[model], "", 0.0)
    assert row.passed, row.reason
    curve = losses(references[model].run_dir)
    assert len(curve) == 4 and curve[4] < curve[1]
