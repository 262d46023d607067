"""What a finished run is for: text from a trained language model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dtrain import config
from dtrain.config import Settings
from dtrain.export import final_weights
from dtrain.models import build as models
from dtrain.schema import check_section


def load_model(run_dir: Path, trust: list[str]) -> tuple[nn.Module, Any]:
    """The run's model with its newest weights, on one device, and the configuration it was trained with.

    The modules to trust come from the caller, not from the file: a run folder may come from elsewhere.
    """
    cfg = config.load(run_dir)
    for section in ("model", "data"):
        check_section(section, cfg[section], trust)
    model = models.make(Settings({**cfg, "lora": {}}), trust)  # adapters are merged into the final weights
    model.load_state_dict(dict(final_weights(run_dir, trust)), assign=True)
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), cfg


@torch.inference_mode()
def sample(
    run_dir: Path,
    prompt: str,
    num_tokens: int,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    trust: list[str] | None = None,
) -> str:
    """The prompt, and what the model writes after it."""
    model, cfg = load_model(run_dir, trust or [])
    data = config.build(cfg.data, trust or [])
    device = next(model.parameters()).device
    tokens = torch.tensor([list(data.encode(prompt or "\n"))], dtype=torch.int64, device=device)
    if int(tokens.max()) >= cfg.model.vocab_size:
        raise ValueError(
            f"prompt {prompt!r}: it has tokens that the model does not know (it has {cfg.model.vocab_size})\n"
            "  fix: another prompt"
        )
    generator = torch.Generator(device).manual_seed(seed)
    for _ in range(num_tokens):
        logits = model(tokens[:, -cfg.model.seq_len :])[:, -1].float()
        tokens = torch.cat([tokens, pick(logits, temperature, top_k, generator)], dim=1)
    return str(data.decode(tokens[0].tolist()))


def pick(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> Tensor:
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    if top_k:
        worst = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < worst, float("-inf"))
    return torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator)
