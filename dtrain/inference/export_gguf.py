"""Export GPT-2 and Llama as one GGUF file, for llama.cpp and the programs built on it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import dtrain
from dtrain.checkpoint.initial_weights import by_part
from dtrain.config import run_file
from dtrain.errors import bad
from dtrain.formats import huggingface
from dtrain.inference import gguf_vocabulary
from dtrain.inference.export import Final, one_file, replacing, write_card
from dtrain.inference.model_card import Hashed
from dtrain.runs import environment
from dtrain.runs.folder import read_json
from dtrain.runs.record import run_name
from dtrain.util import disk_space

# our module → GGUF's; {} is the layer
OUTSIDE = {"embed": "token_embd", "positions": "position_embd", "norm": "output_norm", "output": "output"}
IN_LAYER = {
    "norm1": "attn_norm", "norm2": "ffn_norm", "attention.qkv": "attn_qkv", "attention.q": "attn_q",
    "attention.k": "attn_k", "attention.v": "attn_v", "attention.proj": "attn_output", "mlp.gate": "ffn_gate",
    "mlp.up": "ffn_up", "mlp.down": "ffn_down",
}  # fmt: skip
FAMILIES = {family.target: family.model_type for family in (huggingface.GPT2, huggingface.LLAMA)}


def export_gguf(
    run_dir: Path,
    path: Path,
    dtype: torch.dtype | None = None,
    trust: Iterable[str] = (),
    step: int | None = None,
    ema: bool = False,
) -> tuple[Path, str]:
    """Write the file and its model card. Return its path and why it has no tokenizer, or an empty text."""
    cfg = run_file.load(run_dir)
    arch = FAMILIES.get(cfg.model["_target_"])
    if arch is None:
        rule = f"is for models of {', '.join(FAMILIES.values())}, and this is {cfg.model['_target_']}"
        others = "onnx, hf or safetensors" if cfg.model["_target_"].startswith("dtrain.") else "safetensors"
        raise bad("--format", "gguf", rule, f"--format {others}")
    if find_spec("gguf") is None:
        raise bad("--format", "gguf", "needs the gguf package, which is not installed", "pip install 'dtrain[gguf]'")
    path = one_file(path, "model.gguf")
    final = Final(run_dir, trust, step, ema)
    vocabulary, missing = gguf_vocabulary.of_run(cfg, trust)
    weights = Hashed(final)
    with replacing(path) as temporary:
        write(temporary, final, weights, arch, vocabulary, dtype or torch.float32)
    notes = [f"The file has no tokenizer: {missing}. Give and take token ids."] if missing else []
    write_card(path, final, "gguf", weights.hexdigest(), notes)
    return path, missing


def write(
    path: Path, final: Final, weights: Hashed, arch: str, vocabulary: gguf_vocabulary.Vocabulary | None,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """Write the file weight by weight: only one of them is in memory."""
    import gguf

    model = final.cfg.model
    writer = gguf.GGUFWriter(path, arch)
    kinds = {
        torch.float32: (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
        torch.float16: (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
        torch.bfloat16: (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    }
    writer.add_file_type(kinds[dtype][1])
    add_settings(writer, arch, model)
    add_origin(writer, final)
    gguf_vocabulary.add(writer, vocabulary, model["vocab_size"])

    written = []
    for name, tensor in translated(final.empty().items(), model):
        kept = stored(name, dtype)
        size = torch.empty(0, dtype=kept).element_size()
        in_bytes = (*tensor.shape[:-1], tensor.shape[-1] * size)  # numpy has no bfloat16
        writer.add_tensor_info(name, in_bytes, np.dtype(np.uint8), tensor.numel() * size, kinds[kept][0])
        written.append(name)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        names = iter(written)
        for name, tensor in translated(weights, model):
            assert next(names, None) == name, f"{name} differs from its header"
            raw = tensor.to(stored(name, dtype)).cpu().contiguous().view(torch.uint8).numpy()
            writer.write_tensor_data(raw)
        assert next(names, None) is None, "the header says more"
        writer.flush()
    except OSError as error:
        raise disk_space.describe(error, path) from error
    finally:
        writer.close()


def add_settings(writer: Any, arch: str, model: Mapping[str, Any]) -> None:
    writer.add_context_length(model["seq_len"])
    writer.add_embedding_length(model["dim"])
    writer.add_block_count(model["num_layers"])
    writer.add_head_count(model["num_heads"])
    writer.add_vocab_size(model["vocab_size"])
    if arch == "gpt2":
        writer.add_feed_forward_length(4 * model["dim"])
        writer.add_layer_norm_eps(1e-5)
        return
    writer.add_feed_forward_length(model["hidden_dim"])
    writer.add_head_count_kv(model["num_kv_heads"])
    writer.add_layer_norm_rms_eps(model.get("norm_eps", 1e-5))
    writer.add_rope_dimension_count(model["dim"] // model["num_heads"])
    writer.add_rope_freq_base(model.get("rope_theta", 10000.0))


def add_origin(writer: Any, final: Final) -> None:
    """Add where the weights come from; the model card says more."""
    launches = read_json(final.run_dir / "launch.json")
    writer.add_name(run_name(final.run_dir.resolve()))
    writer.add_string("dtrain.version", dtrain.__version__)
    writer.add_string("dtrain.run", str(launches.get("id") or final.run_dir.resolve().name))
    writer.add_uint64("dtrain.step", final.source.step)
    if commit := environment.commit(launches):
        writer.add_string("dtrain.git_commit", commit)


def stored(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a tensor in the file: llama.cpp needs fp32 for what it adds or multiplies elementwise."""
    small = name.endswith(".bias") or "norm" in name or name.startswith(("position_embd", "rope_freqs"))
    return torch.float32 if small else dtype


def translated(weights: Iterable[tuple[str, Tensor]], model: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield weights with GGUF's names and layout, without the rows that only pad the vocabulary."""
    if model.get("rope_factor", 1.0) != 1.0:
        yield "rope_freqs.weight", rope_factors(model)
    for name, weight in weights:
        if name in huggingface.VOCABULARY:
            weight = weight[: model["vocab_size"]]
        module, _, kind = name.rpartition(".")
        if module in OUTSIDE:
            yield f"{OUTSIDE[module]}.{kind}", weight
            continue
        _, layer, inside = module.split(".", 2)
        if inside == "attention.qkv":
            weight = by_part(weight, model["num_heads"])
            weight = weight.t() if weight.dim() == 2 else weight
        elif inside in ("attention.q", "attention.k"):
            weight = interleaved(weight, model["num_heads" if inside.endswith("q") else "num_kv_heads"])
        yield f"blk.{layer}.{IN_LAYER[inside]}.{kind}", weight


def interleaved(weight: Tensor, num_heads: int) -> Tensor:
    """Reorder the rows of each head: llama.cpp rotates neighbours, our models element i and i + half."""
    return weight.unflatten(0, (num_heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def rope_factors(model: Mapping[str, Any]) -> Tensor:
    """Return by how much each pair turns slower than without `rope_factor` (Llama.rotary)."""
    head_dim = model["dim"] // model["num_heads"]
    frequency = 1.0 / model["rope_theta"] ** (torch.arange(0, head_dim, 2).float() / head_dim)
    turns = model["rope_original_len"] * frequency / (2 * math.pi)
    low, high = model["rope_low_freq_factor"], model["rope_high_freq_factor"]
    stays = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return 1.0 / (stays + (1.0 - stays) / model["rope_factor"])
