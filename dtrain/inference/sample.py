"""Generate text with a trained language model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.config import run_file
from dtrain.config.build import build, locate
from dtrain.config.files import TARGET, is_script
from dtrain.config.run_file import Settings
from dtrain.config.schema import check_run
from dtrain.errors import bad
from dtrain.inference.export import Final, check_memory, check_shapes
from dtrain.inference.model_card import Hashed
from dtrain.models.layers import Cache
from dtrain.models.user_model import buffers_of
from dtrain.strategies.materialize import materialize
from dtrain.train import build as models

BUILT = ("model", "data", "loss", "precision")


def checked_config(run_dir: Path, trust: list[str], groups: tuple[str, ...] = BUILT) -> Any:
    """Return the configuration of a run, of which these groups may be built."""
    cfg = run_file.load(run_dir)
    if is_script(cfg):
        raise bad(
            "RUN", run_dir, "is a run of your own program, whose model dtrain does not know", "choose another run"
        )
    check_run(cfg, trust, groups)
    return cfg


def load_model(run_dir: Path, trust: list[str], step: int | None = None, ema: bool = False) -> tuple[nn.Module, Any]:
    """Return the run's model with a checkpoint's weights, on one device, and the configuration it was trained with.

    step: None for the newest good checkpoint. The caller, not the file, says which modules to trust: a run folder may
    come from elsewhere.
    """
    cfg = checked_config(run_dir, trust)
    model = models.make(Settings({**cfg, "lora": {}}), trust)  # adapters are merged into the final weights
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return filled(model, Final(run_dir, trust, step, ema), device), cfg


def load_plain(run_dir: Path, trust: list[str], step: int | None = None, ema: bool = False) -> nn.Module:
    """Return a user's model with a checkpoint's weights, on the CPU, for use without dtrain.

    It is as its class or function makes it: load_model's has another forward(), and more attributes.
    """
    model = models.plain(checked_config(run_dir, trust, ("model",)), trust)
    return filled(model, Final(run_dir, trust, step, ema), torch.device("cpu"))


@torch.no_grad()
def filled(model: nn.Module, final: Final, device: torch.device, weights: Hashed | None = None) -> nn.Module:
    """Fill a model, perhaps on the meta device; a weight under two names stays one. Return it in evaluation mode.

    weights: those of `final`, if they are hashed on their way.
    """
    own = dict(model.named_parameters()) | buffers_of(model)
    target = final.cfg.model[TARGET]
    check_shapes(final.path, model, final.empty(), own, (target, locate(target, final.trust)))
    if final.adapted:  # the checkpoint's tensors were compared with the model; drawn weights are not
        check_memory(final.run_dir, 4 * sum(values.numel() for values in own.values()))
    if any(values.is_meta for values in own.values()):
        materialize(model, device)
        own = dict(model.named_parameters()) | buffers_of(model)
    for name, values in weights or final:
        own[name].copy_(values)
    return model.eval()


def check_generates(cfg: Any) -> None:
    """Reject a model of the user's: how it continues a text is not known."""
    if not (cfg.model.get("vocab_size") and cfg.model.get("seq_len")):
        rule = "dtrain generates text with its own gpt2 and llama"
        fix = "dtrain export RUN FOLDER --format hf, and transformers' generate(); or RUN of one of these"
        raise bad("model", cfg.choices.model, rule, fix)


def sample(
    run_dir: Path,
    prompt: str,
    num_tokens: int,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    trust: list[str] | None = None,
    step: int | None = None,
    ema: bool = False,
) -> str:
    """Return the prompt and the model's continuation."""
    model, cfg = load_model(run_dir, trust or [], step, ema)
    data = build(cfg.data, trust or [])
    if cfg.model.get("task"):
        raise ValueError(
            f"model={cfg.choices.model}: is bidirectional and cannot generate text\n"
            "  fix: use dtrain evaluate, or a run of gpt2 or llama"
        )
    if not hasattr(data, "encode"):
        raise ValueError(
            f"data={cfg.choices.data}: is not text, so the model cannot generate text\n"
            "  fix: use the run of a language model"
        )
    check_generates(cfg)
    device = next(model.parameters()).device
    tokens = torch.tensor([list(data.encode(prompt or "\n"))], dtype=torch.int64, device=device)
    if not tokens.numel():
        raise ValueError(f"prompt {prompt!r}: the tokenizer makes no tokens of it\n  fix: another prompt")
    if int(tokens.max()) >= cfg.model.vocab_size:
        raise ValueError(
            f"prompt {prompt!r}: it has tokens that the model does not know (it has {cfg.model.vocab_size})\n"
            "  fix: another prompt"
        )
    choose = partial(pick, temperature=temperature, top_k=top_k, generator=torch.Generator(device).manual_seed(seed))
    return str(data.decode(generate(model, tokens, num_tokens, cfg.model.seq_len, choose)[0].tolist()))


@torch.inference_mode()
def generate(
    model: nn.Module,
    tokens: Tensor,
    num_tokens: int,
    seq_len: int,
    choose: Callable[[Tensor], Tensor],
    cached: bool = True,
) -> Tensor:
    """Return the tokens [batch, length] and `num_tokens` more, each chosen from the logits after all before it.

    The model sees at most `seq_len` tokens. Beyond that, it continues from the last half: the rest is dropped, and the
    half is recomputed, because its positions change. So on a long text a model with a cache computes each token about
    twice. A model whose forward takes no cache recomputes all that it sees for every token; the rule, and so the text,
    is the same.
    """
    cached = cached and "cache" in inspect.signature(model.forward).parameters
    cache = Cache(seq_len) if cached else None
    begin = 0
    for _ in range(num_tokens):
        if tokens.shape[1] - begin > seq_len:
            begin = tokens.shape[1] - max(1, seq_len // 2)
            if cache:
                cache.clear()
        logits = model(tokens[:, begin + cache.length :], cache=cache) if cache else model(tokens[:, begin:])
        tokens = torch.cat([tokens, choose(logits[:, -1].float())], dim=1)
    return tokens


def pick(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> Tensor:
    """Return one token per row: the likeliest at temperature 0, else drawn among the k likeliest."""
    if temperature < 1e-6:  # dividing by less would overflow fp32
        return logits.argmax(dim=-1, keepdim=True)
    if top_k:
        worst = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < worst, float("-inf"))
    return torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator)
