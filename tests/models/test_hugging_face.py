"""Hugging Face models as they are: tied weights, their own losses, dict batches, folders."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dtrain.cli import main
from dtrain.commands.verify.compare import compare
from dtrain.data.loader import permutation
from dtrain.inference.sample import load_model
from dtrain.models import calling, user_model
from dtrain.models.hf_folder import from_folder
from dtrain.strategies.materialize import materialize, ties
from tests.models import own_models as mine
from tests.own_runs import own_run
from tests.world import losses, metrics

transformers = pytest.importorskip("transformers")
ME = "tests.models.own_models"
WORDS = (f"model={ME}.gpt2", f"data={ME}.Tokens", "train.micro_batch_size=2", "train.max_grad_norm=null")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return own_run(tmp_path_factory.mktemp("tied") / "one", 1, *WORDS)


def test_a_tied_weight_stays_one_from_the_meta_device_to_memory() -> None:
    model: Any = user_model.construct(mine.gpt2, 0)
    assert len(ties(model)) == 1 and next(model.parameters()).is_meta
    materialize(model, torch.device("cpu"))
    assert model.lm_head.weight is model.transformer.wte.weight and not model.lm_head.weight.is_meta
    assert [len(places) for places in ties(model)] == [2]


def test_one_process_is_plain_torch(alone: Path) -> None:
    model = user_model.on_cpu(mine.gpt2, 0)
    rows = [mine.Tokens()[int(i)] for i in permutation(0, 0, 48)[:8]]
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    loss = model(**batch).loss  # a mean over all targets of the batch: dtrain had four micro-batches
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    first = metrics(alone)[0]
    assert first["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert first["grad_norm"] == pytest.approx(float(norm), rel=1e-4)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1", "zero2", "zero3"])
def test_every_strategy_follows_and_a_resume_is_exact(strategy: str, alone: Path, tmp_path: Path) -> None:
    cut = ["strategy.whole_below=0"] if strategy == "zero3" else []  # it keeps small weights whole, and all are small
    words = (*WORDS, f"strategy={strategy}", *cut)
    whole = own_run(tmp_path / "whole", 2, *words)
    apart = compare(whole, alone)
    # 1e-4: the loss does not depend on the keys' bias, whose gradient is rounding that AdamW scales up
    assert apart.loss <= 1e-5 and apart.weight <= 1e-4
    if strategy not in ("zero1", "zero2"):
        parts = own_run(own_run(tmp_path / "parts", 2, *words, "train.stop_after=3"), 2, *words)
        assert losses(parts) == losses(whole), "every bit"
        model, _ = load_model(parts, [ME])
        assert model.lm_head.weight is model.transformer.wte.weight  # type: ignore[union-attr]


def test_a_folder_with_its_weights_and_no_code(tmp_path: Path) -> None:
    source: Any = mine.gpt2()
    source.save_pretrained(tmp_path / "saved")
    run = own_run(tmp_path / "run", 1, f"model=hf:{tmp_path / 'saved'}", f"data={ME}.Tokens", "optim.lr=1e-12")
    model, _ = load_model(run, [ME])
    for name, p in source.named_parameters():
        assert torch.allclose(p, model.state_dict()[name], atol=1e-7), name
    (tmp_path / "saved" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no \*\.safetensors files.*\n  fix: model\.random=true"):
        from_folder(str(tmp_path / "saved"))
    with pytest.raises(ValueError, match=r"is not a model of transformers"):
        from_folder(str(tmp_path / "saved"), architecture="AutoConfig")


def test_a_folder_is_looked_at_before_anything_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for word, rule in {"nowhere": "is not a folder here", "": "has no config.json"}.items():
        assert main(["launch", f"model=hf:{tmp_path / word}"]) == 2
        error = capsys.readouterr().err
        assert f"error: model=hf:{tmp_path / word}: {rule}" in error and "fix: the folder that save_pretrained" in error
    mine.gpt2().save_pretrained(tmp_path)
    assert main(["launch", f"model=hf:{tmp_path}"]) == 2
    assert f"fix: data.seq_len={mine.gpt2().config.n_positions}, or" in capsys.readouterr().err


def test_a_batch_without_labels() -> None:
    model = mine.gpt2()
    inputs = torch.zeros(2, 4, dtype=torch.long)
    with pytest.raises(ValueError, match=r"without a loss, which it computes only from labels\n  fix: samples with a "):
        calling.loss_in(model, model(inputs), "model", "GPT2", type(model).forward)


def test_what_a_model_returns() -> None:
    one, two = torch.tensor(1.0), torch.tensor(2.0)
    model = nn.Linear(1, 1)
    for outputs in ({"loss": one, "logits": two}, (one, two), one):
        assert calling.loss_in(model, outputs, "model", "m") == 1
    parts = {"a": one, "b": two}
    assert calling.loss_in(model, parts, "model", "m") == 3
    model.eval()
    assert calling.loss_in(model, parts, "model", "m").tolist() == [3, 1, 2] and model.eval_metrics == ("a", "b")
    with pytest.raises(ValueError, match=r"returned a dict with logits, without a loss.*\n  fix: "):
        calling.loss_in(model, {"logits": torch.ones(2, 2)}, "model", "m")


def test_pairs_are_next_tokens_and_dicts_are_shifted_by_the_model() -> None:
    model: Any = mine.gpt2().eval()
    ids = torch.randint(31, (2, 8))
    forward = calling.own_loss(model)
    assert calling.shifts_labels(model) and not calling.shifts_labels(mine.bert())
    pair = forward(model, ids[:, :-1], ids[:, 1:])
    assert pair.item() == pytest.approx(model(ids, labels=ids).loss.item(), rel=1e-5)
