"""What a finished run is for: text from a trained language model, and its weights in one plain file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dtrain import checkpoint, config, shards
from dtrain.models import build as models
from dtrain.schema import check_section


def newest_checkpoint(run_dir: Path) -> Path:
    found = checkpoint.newest_good(run_dir / "checkpoints", quarantine=False)  # a reader changes nothing
    if found is None:
        raise ValueError(f"{run_dir} has no checkpoint yet\n  fix: let it train up to its first one (checkpoint.every)")
    return found[0]


def load_model(run_dir: Path, trust: list[str]) -> tuple[nn.Module, Any]:
    """The run's model with its newest weights, on one device, and the configuration it was trained with.

    The modules to trust come from the caller, not from the file: a run folder may come from elsewhere.
    """
    cfg = config.load(run_dir)
    for section in ("model", "data"):
        check_section(section, cfg[section], trust)
    model = models.make(cfg, trust)
    state = dict(checkpoint.weights(newest_checkpoint(run_dir)))
    model.load_state_dict(state, assign=True)
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


def export(run_dir: Path, path: Path) -> Path:
    """Write the newest weights as one safetensors file that any reader of the format loads."""
    cfg = config.load(run_dir)
    state = dict(checkpoint.weights(newest_checkpoint(run_dir)))
    path.parent.mkdir(parents=True, exist_ok=True)
    model = json.dumps(cfg.model)
    temporary = path.with_name(f".{path.name}.tmp")
    shards.write(temporary, state, {"format": "pt", "model": model})
    temporary.replace(path)
    return path
