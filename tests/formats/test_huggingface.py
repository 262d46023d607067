"""Names and settings of models that Hugging Face knows: both ways, and the same logits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dtrain.checkpoint.initial_weights import by_head, by_part
from dtrain.config import run_file
from dtrain.formats import huggingface
from dtrain.train import build as models
from tests.hf import CASES, VOCAB, apart, load, make


@pytest.mark.parametrize("name", CASES)
def test_logits_are_theirs(name: str, tmp_path: Path) -> None:
    theirs = CASES[name].make(tmp_path / "hf")
    ours = load(make(tmp_path / "run", name, f"init_from={tmp_path / 'hf'}"))
    assert apart(ours, theirs) < 1e-5


@pytest.mark.parametrize("name", CASES)
def test_every_weight_has_one_name_there(name: str, tmp_path: Path) -> None:
    theirs = CASES[name].make(tmp_path / "hf")
    cfg = run_file.load(make(tmp_path / "run", name))
    family = huggingface.of_target(cfg.model["_target_"])
    assert family is not None
    shapes = {n: tuple(p.shape) for n, p in models.make(cfg).named_parameters()}
    ours = list(shapes)
    named = [n for n, _ in theirs.named_parameters()]  # a tied weight is there once
    assert sorted(family.full(n) for n in ours) == sorted(named)
    assert all(family.bare(family.full(n)) == family.theirs(n) for n in ours)
    assert set(family.needed(cfg.model)) <= set(ours), "what a launch asks for is what the model has"
    assert family.theirs("layers.0.attention.lora_a") is None
    assert set(ours) <= set(family.names(2)), "and what it looks at is all of that"
    for n, shape in shapes.items():
        rows = VOCAB if n in huggingface.VOCABULARY else shape[0]
        assert n.startswith("classifier") or huggingface.shape_of(n, cfg.model) == (rows, *shape[1:]), n


@pytest.mark.parametrize("name", CASES)
def test_settings_and_config_are_inverse(name: str, tmp_path: Path) -> None:
    model = run_file.load(make(tmp_path / "run", name)).model
    family = huggingface.of_target(model["_target_"])
    assert family is not None
    back = family.settings(family.config(model))
    assert back == {k: model[k] for k in back}
    assert huggingface.cannot(family, family.config(model)) == ""


def test_both_spellings_of_rope() -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192}  # fmt: skip
    old = {"rope_theta": 5e5, "rope_scaling": scaling}
    new = {"rope_parameters": scaling | {"rope_theta": 5e5}}
    assert huggingface.LLAMA.settings(old) == huggingface.LLAMA.settings(new)
    assert (
        huggingface.LLAMA.settings(old)["rope_factor"] == 8.0
        and huggingface.LLAMA.settings(old)["rope_original_len"] == 8192
    )
    assert huggingface.LLAMA.settings({"rope_scaling": None})["rope_factor"] == 1.0


@pytest.mark.parametrize(
    ("family", "values", "word"),
    [
        ("gpt2", {"activation_function": "relu"}, "activation_function=relu"),
        ("gpt2", {"n_embd": 32, "n_inner": 100}, "n_inner=100"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type=yarn"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type=linear"),
        ("llama", {"attention_bias": True}, "attention_bias=True"),
        ("llama", {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 32}, "head_dim=32"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantized"),
        ("bert", {"hidden_act": "relu"}, "hidden_act=relu"),
        ("bert", {"hidden_size": 32, "intermediate_size": 100}, "intermediate_size=100"),
    ],
)
def test_what_ours_does_not_do_is_told(family: str, values: dict[str, object], word: str) -> None:
    assert word in huggingface.cannot(huggingface.FAMILIES[family], values)


@given(heads=st.integers(1, 5), width=st.integers(1, 4), columns=st.integers(0, 4))
def test_heads_and_parts_are_inverse(heads: int, width: int, columns: int) -> None:
    shape = (columns, 3 * heads * width) if columns else (3 * heads * width,)
    theirs = torch.arange(3 * heads * width * max(columns, 1)).reshape(shape)
    ours = by_head(theirs, heads)
    assert ours.shape == shape[::-1] and torch.equal(by_part(ours, heads), theirs)
    # head h of part p (queries, keys, values), element e, lies at row (3 h + p) width + e
    columns_of = theirs.reshape(max(columns, 1), 3, heads, width)
    rows = ours.reshape(heads, 3, width, max(columns, 1))
    assert torch.equal(rows.permute(3, 1, 0, 2), columns_of)


def test_old_names_are_known() -> None:
    assert huggingface.BERT.bare("bert.embeddings.LayerNorm.gamma") == huggingface.BERT.theirs("embed_norm.weight")
    assert huggingface.BERT.bare("embeddings.LayerNorm.beta") == huggingface.BERT.theirs("embed_norm.bias")
    assert huggingface.GPT2.layer_of("h.11.ln_1.weight") == 11 and huggingface.GPT2.layer_of("wte.weight") is None


def test_no_torch_is_imported_for_a_check(tmp_path: Path) -> None:
    CASES["gpt2"].make(tmp_path / "hf")
    model = dict(run_file.load(make(tmp_path / "run", "gpt2")).model)
    script = (
        "import sys, json; from dtrain.checks import init_from\n"
        f"init_from.check({{'init_from': {str(tmp_path / 'hf')!r}, 'model': json.loads({json.dumps(model)!r})}})\n"
        "assert 'torch' not in sys.modules and 'safetensors' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
