"""BERT: the published sizes, the same numbers as transformers' own, and the plans that strategies use."""

from __future__ import annotations

import functools
import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from torch.nn import functional as F

from dtrain.checkpoint.initial_weights import Drawn
from dtrain.config.build import build
from dtrain.config.files import CONF
from dtrain.data.stdlib import Stdlib
from dtrain.data.stdlib_lines import Lines
from dtrain.models.bert import Bert
from dtrain.models.layers import IGNORED
from dtrain.strategies.materialize import init_weights
from dtrain.strategies.tensor import finish_sums
from tests.world import make_run, spawn, summary, train

PUBLISHED = {
    ("bert-base", "mlm"): 109_514_298, ("bert-base", "classify"): 109_483_778,
    ("bert-large", "mlm"): 335_174_458, ("bert-large", "classify"): 335_143_938,
}  # fmt: skip
PAD = 0
THEIRS = {  # for one comparison; dtrain.formats.huggingface is tested by itself
    "embed": "embeddings.word_embeddings", "positions": "embeddings.position_embeddings",
    "segments": "embeddings.token_type_embeddings", "embed_norm": "embeddings.LayerNorm",
    "attention.q": "attention.self.query", "attention.k": "attention.self.key", "attention.v": "attention.self.value",
    "attention.proj": "attention.output.dense", "norm1": "attention.output.LayerNorm",
    "mlp.up": "intermediate.dense", "mlp.down": "output.dense", "norm2": "output.LayerNorm", "pooler": "pooler.dense",
}  # fmt: skip
HEADS = {
    "transform": "cls.predictions.transform.dense", "transform_norm": "cls.predictions.transform.LayerNorm",
    "classifier": "classifier",
}  # fmt: skip


def small(task: str = "mlm", **changes: object) -> Bert:
    settings = {
        "num_layers": 4, "dim": 32, "num_heads": 4, "vocab_size": 50, "seq_len": 12, "vocab_multiple": 16,
        "task": task, "num_classes": 3, "pad_id": PAD, "dropout": 0.0,
    }  # fmt: skip
    model = Bert(**(settings | changes))  # type: ignore[arg-type]
    init_weights(model, Drawn(0))
    return model


def sample(task: str, pairs: bool = False) -> tuple[Tensor, Tensor]:
    """Two samples: with two asked-for tokens each, or the second one padded from its eighth token on."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 50, (2, 12), generator=generator)
    if task == "classify":
        tokens[1, 7:] = PAD
        targets = torch.tensor([2, 0])
    else:
        targets = torch.full_like(tokens, IGNORED)
        targets[:, [3, 8]] = tokens[:, [3, 8]]
        tokens[:, [3, 8]] = 49
    if pairs:
        tokens = torch.stack([tokens, (torch.arange(12) >= 4).expand(2, 12).long()], dim=-1)
    return tokens, targets


def their_name(name: str) -> str:
    if name == "output_bias":
        return "cls.predictions.bias"
    module, _, kind = name.rpartition(".")
    if module in HEADS:
        return f"{HEADS[module]}.{kind}"
    layer, inside = re.fullmatch(r"(?:layers\.(\d+)\.)?(.+)", module).groups()
    return f"bert.{f'encoder.layer.{layer}.' if layer else ''}{THEIRS[inside]}.{kind}"


@functools.cache
def transformers_model(task: str, layers: int, dim: int, heads: int, device: str, **more: int) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification

    kind = BertForMaskedLM if task == "mlm" else BertForSequenceClassification
    config = BertConfig(
        num_hidden_layers=layers, hidden_size=dim, num_attention_heads=heads, intermediate_size=4 * dim, **more
    )
    with torch.device(device):
        return kind(config).eval()


@pytest.mark.parametrize(("name", "task"), PUBLISHED)
def test_published_number_of_parameters(name: str, task: str) -> None:
    section: Any = OmegaConf.load(CONF / "model" / f"{name}.yaml")
    del section["defaults"]
    section.task = task
    with torch.device("meta"):
        model = build(section)
    assert model.num_parameters == PUBLISHED[name, task]
    theirs = transformers_model(task, section.num_layers, section.dim, section.num_heads, "meta")
    assert model.num_parameters == sum(p.numel() for p in theirs.parameters())
    assert model.embed.weight.shape[0] == 30592, "30522 padded to a multiple of 128"


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("task", ["mlm", "classify"])
def test_logits_are_those_of_transformers(task: str, pairs: bool) -> None:
    model = small(task).eval()
    for p in model.parameters():  # also biases and norms, which begin as 0 and 1
        p.data += 0.1 * torch.randn_like(p)
    more = {"vocab_size": 50, "max_position_embeddings": 12, "num_labels": 3}
    theirs: Any = transformers_model(task, 4, 32, 4, "cpu", **more)
    state = theirs.state_dict()
    for name, p in model.named_parameters():
        state[their_name(name)].copy_(p.data[:50] if name in ("embed.weight", "output_bias") else p.data)
    inputs, _ = sample(task, pairs)
    tokens, segments = (inputs[..., 0], inputs[..., 1]) if pairs else (inputs, torch.zeros_like(inputs))
    mask = tokens != PAD if task == "classify" else torch.ones_like(tokens)
    expected = theirs(tokens, attention_mask=mask.long(), token_type_ids=segments).logits
    torch.testing.assert_close(model(inputs), expected, rtol=1e-4, atol=1e-5)


def test_the_loss_is_that_of_the_tokens_asked_for() -> None:
    model = small(vocab_multiple=1)
    tokens, targets = sample("mlm")
    logits = model(tokens)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(model(tokens, targets), expected)
    assert abs(expected.item() - torch.tensor(50.0).log().item()) < 0.1, "fresh weights know nothing"
    model.output_bias.data[targets[0, 3]] = 1e3
    figures = model.eval()(tokens, targets)
    right = (targets == targets[0, 3]).sum().item() / 4
    assert figures.shape == (3,) and figures[1].item() == right, "loss, accuracy, top5"
    torch.testing.assert_close(figures[0], F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()))


def step_of(model: Bert, tokens: Tensor, targets: Tensor) -> list[Tensor]:
    """Loss and gradients."""
    model.zero_grad()
    loss = model(tokens, targets)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("fused", [False, True])
def test_a_known_number_of_targets_gives_the_same_bits_without_a_wait(fused: bool) -> None:
    """The shape of `nonzero` depends on values: a GPU would have to be waited for, and fake tensors have no values."""
    tokens, targets = sample("mlm")
    usual, known = small(), small()
    usual.head.fused = known.head.fused = fused
    known.num_targets = 2
    for a, b in zip(step_of(usual, tokens, targets), step_of(known, tokens, targets), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(usual.eval()(tokens, targets), known.eval()(tokens, targets))

    def in_fake(num_targets: int | None) -> None:
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = Bert(2, 32, 4, 50, 12, dropout=0.1)
            model.head.fused, model.num_targets = fused, num_targets
            step_of(model, torch.zeros(2, 12, dtype=torch.int64), torch.zeros(2, 12, dtype=torch.int64))

    in_fake(2)
    with pytest.raises(DynamicOutputShapeException):
        in_fake(None)


def test_padding_is_not_seen_and_the_whole_text_is() -> None:
    model = small("classify")
    tokens, _ = sample("classify")
    expected = model(tokens)
    torch.testing.assert_close(model(tokens[1:, :7]), expected[1:])
    changed = tokens.clone()
    changed[0, 11] = 7
    assert not torch.allclose(model(changed)[0], expected[0], atol=1e-6)
    blind = small("classify", pad_id=None)
    assert not torch.allclose(blind(tokens)[1], expected[1], atol=1e-6), "then padding is a token like others"


@pytest.mark.parametrize(("task", "text"), [("mlm", "data=stdlib-mlm"), ("classify", "data=stdlib-lines")])
def test_data_of_the_other_task_is_refused(task: str, text: str) -> None:
    tokens, targets = sample({"mlm": "classify", "classify": "mlm"}[task])
    with pytest.raises(ValueError, match=rf"(?s)model.task={task}: .*fix: {text}"):
        small(task)(tokens, targets)


def test_data_for_models_that_read_forwards_is_refused() -> None:
    tokens, _ = sample("mlm")
    with pytest.raises(ValueError, match=r"(?s)model.task=mlm: .*asks it to predict\n  fix: data=stdlib-mlm"):
        small()(tokens[:, :-1], tokens[:, 1:])


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"(?s)model.pad_id=50: .*model.vocab_size=50"):
        small("classify", pad_id=50)
    with pytest.raises(ValueError, match=r"(?s)model.num_classes=1: .*fix: model.num_classes=2"):
        small("classify", num_classes=1)
    with pytest.raises(ValueError, match=r"(?s)strategy.loss_parallel=true: .*fix: strategy.loss_parallel=false"):
        small("classify").tp_plan(loss_parallel=True)


def test_first_weights_are_drawn_as_published() -> None:
    model = small(dim=128)
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            assert not p.any(), name
        elif "norm" in name:
            assert (p == 1).all(), name
        else:  # cut at two standard deviations, which leaves 0.88 of one
            assert p.abs().max() <= 0.04 and p.std().item() == pytest.approx(0.0176, rel=0.1), name


def test_operations_count_the_head_only_where_it_is_used() -> None:
    mlm, classes = small(seq_len=20), small("classify", seq_len=20)
    layers = sum(p.numel() for p in mlm.layers.parameters()) - 4 * 4 * 32  # without the norms
    encoder = 20 * (6 * layers + 12 * 4 * 32 * 20)
    assert mlm.flops_per_sample() == encoder + 6 * 3 * (32 * 32 + 32 * 50), "3 tokens of 20 are asked for"
    assert classes.flops_per_sample() == encoder + 6 * (32 * 32 + 32 * 3)


@pytest.mark.parametrize("task", ["mlm", "classify"])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_pipeline_stages_in_a_row_are_the_whole_model(num_stages: int, task: str) -> None:
    whole = small(task)
    x, y = sample(task, pairs=True)
    bounds = [4 * i // num_stages for i in range(num_stages + 1)]
    stages = [small(task).pipeline_split(low, high) for low, high in pairwise(bounds)]
    value = x
    for stage in stages[:-1]:
        value = stage(value, source=x)
    torch.testing.assert_close(stages[-1](value, y, source=x), whole(x, y), rtol=0, atol=0)
    names = [set(dict(s.named_parameters())) for s in stages]
    assert set().union(*names) == set(dict(whole.named_parameters())), "names survive the cut"
    twice = sum(map(len, names)) - len(set().union(*names))
    assert twice == (num_stages > 1 and task == "mlm"), "only the tied weight is there twice"


def _tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for task, sequence, vocabulary in [
        ("mlm", False, False), ("mlm", True, False), ("mlm", False, True), ("mlm", True, True),
        ("classify", False, False), ("classify", True, False),
    ]:  # fmt: skip
        x, y = sample(task)
        whole, cut = small(task), small(task)
        parallelize_module(cut, mesh, cut.tp_plan(sequence, vocabulary))
        assert cut.layers["0"].attention.q.weight.to_local().shape[0] == 32 // dist.get_world_size()
        with loss_parallel():
            for model in (whole, cut):
                model(x, y).backward()
            finish_sums(cut)
            torch.testing.assert_close(cut(x, y), whole(x, y))
            torch.testing.assert_close(cut.eval()(x, y), whole.eval()(x, y), equal_nan=True)  # top 5 of 3 classes
        expected = dict(whole.named_parameters())
        for name, p in cut.named_parameters():
            gradient: Any = p.grad
            gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            torch.testing.assert_close(gradient, expected[name].grad, msg=f"{task} {sequence} {vocabulary} {name}")


def test_tensor_parallel_plan_keeps_loss_and_gradients() -> None:
    spawn(2, _tensor_parallel)


# ---- it learns -----------------------------------------------------------------------------------------------


def test_learns_to_fill_in_masked_bytes(tmp_path: Path) -> None:
    """Beyond how often each byte occurs: 2.40 nats and 39% right, where that alone gives 3.03 nats and 30%."""
    run_dir = make_run(
        tmp_path, "model=bert-tiny", "data=stdlib-mlm", "model.num_layers=1", "model.dim=64", "model.seq_len=16",
        "model.vocab_size=259", "train.global_batch_size=128", "train.steps=350", "train.eval_batches=16",
        "optim.lr=6e-3", "schedule.warmup_steps=35",
    )  # fmt: skip
    assert train(run_dir) == [0]
    tokens = Stdlib(16).dataset("val").tokens[: 16 * 128 * 16]
    shares = np.bincount(tokens) / len(tokens)
    unigram = -(shares[shares > 0] * np.log(shares[shares > 0])).sum()
    found = summary(run_dir)
    print(unigram, shares.max(), found)
    assert found["val_loss"] < unigram - 0.4
    assert found["val_accuracy"] > shares.max() + 0.05
    assert found["val_perplexity"] == pytest.approx(math.exp(found["val_loss"]))


def test_learns_to_tell_code_comments_and_docstrings_apart(tmp_path: Path) -> None:
    """61% are right; 35% would be by always naming the class that is most frequent among those looked at."""
    run_dir = make_run(
        tmp_path, "model=bert-tiny-classify", "data=stdlib-lines", "model.num_layers=1", "model.dim=64",
        "model.seq_len=48", "model.vocab_size=259", "train.global_batch_size=32", "train.steps=160",
        "train.eval_batches=16", "optim.lr=3e-3", "schedule.warmup_steps=16", "strategy=ddp", "cluster.processes=2",
    )  # fmt: skip
    assert train(run_dir, 2) == [0, 0]
    targets = Lines(48, 0).dataset("val").targets[: 16 * 32]
    found = summary(run_dir)
    print(np.bincount(targets) / len(targets), found)
    assert found["val_accuracy"] > np.bincount(targets).max() / len(targets) + 0.15
    assert found["val_loss"] < math.log(3) - 0.25 and "val_top5" not in found and "val_perplexity" not in found
