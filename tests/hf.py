"""Small random models of transformers, and the settings that make ours of the same shape."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dtrain.checkpoint import store
from dtrain.config import run_file
from dtrain.train import build as models
from tests.world import make_run

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")
transformers.utils.logging.disable_progress_bar()

VOCAB = 269  # at least what BERT's data needs; padded to 272
SIZES = ["model.num_layers=2", "model.dim=32", "model.num_heads=4", f"model.vocab_size={VOCAB}", "model.seq_len=16"]
SCALED = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}  # fmt: skip
COMMON = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCAB}


@dataclass(frozen=True)
class Case:
    """One architecture: their class and configuration, and our overrides beyond SIZES."""

    kind: str
    auto: str
    values: dict[str, Any]
    overrides: list[str] = field(default_factory=list)

    def make(self, folder: Path, **save: Any) -> nn.Module:
        """Their model with random weights that are no small matter, written to a folder."""
        torch.manual_seed(1)
        made = getattr(transformers, self.kind)(getattr(transformers, self.kind).config_class(**self.values))
        with torch.no_grad():
            for p in made.parameters():  # biases and norms too, which begin as zeros and ones
                p.normal_(0.0, 0.3)
        made.save_pretrained(folder, **save)
        return made.eval()  # type: ignore[no-any-return]


LLAMA = {"num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 16, "rms_norm_eps": 1e-5}
LLAMA_OVERRIDES = ["model=llama-tiny", "model.num_kv_heads=2", "model.hidden_dim=48"]
BERT = {"intermediate_size": 128, "max_position_embeddings": 16}
SCALED_OVERRIDES = ["model.rope_factor=8", "model.rope_original_len=8", "model.rope_theta=500.0", "model.tied=true"]

CASES = {
    "gpt2": Case(
        "GPT2LMHeadModel",
        "AutoModelForCausalLM",
        {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": VOCAB, "n_positions": 16, "bos_token_id": 0}
        | {"eos_token_id": 0},
    ),
    "llama": Case("LlamaForCausalLM", "AutoModelForCausalLM", COMMON | LLAMA, LLAMA_OVERRIDES),
    "llama-scaled-tied": Case(
        "LlamaForCausalLM",
        "AutoModelForCausalLM",
        COMMON | LLAMA | {"rope_scaling": SCALED, "rope_theta": 500.0, "tie_word_embeddings": True},
        [*LLAMA_OVERRIDES, *SCALED_OVERRIDES],
    ),
    "bert": Case("BertForMaskedLM", "AutoModelForMaskedLM", COMMON | BERT, ["model=bert-tiny", "data=stdlib-mlm"]),
    "bert-classify": Case(
        "BertForSequenceClassification",
        "AutoModelForSequenceClassification",
        COMMON | BERT | {"num_labels": 3},
        ["model=bert-tiny-classify", "data=stdlib-lines"],
    ),
}


def make(run_dir: Path, name: str, *overrides: str) -> Path:
    """A run folder of our model of the same shape."""
    return make_run(run_dir, *CASES[name].overrides, *SIZES, "cluster.processes=1", *overrides)


def load(run_dir: Path) -> nn.Module:
    """Our model with the run's first weights, in one process."""
    cfg = run_file.load(run_dir)
    model = models.make(cfg)
    first = models.first_weights(cfg)
    model.to_empty(device="cpu")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        first.fill(model, name, tensor, torch.device("cpu"))
    return model.eval()


def save(run_dir: Path, model: nn.Module) -> Path:
    """A checkpoint of the run as if it had been trained."""
    meta = {"samples": 0, "data": "", "extra": {}}
    # what adapters leave as it was is in no checkpoint
    state = {f"model.{name}": p.detach() for name, p in model.named_parameters() if p.requires_grad}
    state |= {f"model.{name}": buffer for name, buffer in model.named_buffers()}
    (run_dir / "launch.json").write_text('{"launches": []}')
    return store.save(run_dir / "checkpoints", 1, state, meta, keep=1)


def tokens(seed: int = 0) -> torch.Tensor:
    """No 0, which pads BERT's texts."""
    return torch.randint(1, VOCAB, (2, 16), generator=torch.Generator().manual_seed(seed))


def apart(ours: nn.Module, theirs: nn.Module) -> float:
    """The largest difference of their logits."""
    with torch.inference_mode():
        a, b = ours(tokens()), theirs(tokens()).logits
    assert a.shape == b.shape and b.abs().max() > 0.1, "logits near 0 would be near anything"
    return float((a - b).abs().max())
