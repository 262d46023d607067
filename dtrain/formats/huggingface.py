"""Models that also exist in Hugging Face: the names of their weights and settings there. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dtrain.config import models
from dtrain.formats.bounded import short

# How a Hugging Face weight becomes ours. Conv1D stores its matrices transposed; HEADS is a Conv1D of queries, keys and
# values one after the other, which our GPT-2 stores head by head.
SAME, TRANSPOSED, HEADS = "same", "transposed", "heads"
VOCABULARY = ("embed.weight", "output.weight", "output_bias")  # one row per token; ours have more, up to a round number
POSITIONS = "positions.weight"  # one row per position
NEW = ("lora_a", "lora_b")  # name endings of weights that no file has: they are drawn
NEW_MODULES = ("classifier", "pooler")  # a new task needs new ones
CLASSES = ("classifier", "head")  # one row per class


@dataclass(frozen=True)
class Family:
    """One architecture, with its names here and in Hugging Face."""

    model_type: str  # in config.json
    target: str  # our class
    prefix: str  # before the names of all but the head; a bare model's file lacks it
    layers: str  # the name of layer {}
    in_layer: dict[str, str]  # our module → theirs, inside a layer
    outside: dict[str, str]  # the same outside of the layers
    heads: dict[str, str]  # belong to a task, and have no prefix
    sizes: dict[str, tuple[str, Any]]  # our setting → its name in config.json, and its default there
    config: Callable[[Mapping[str, Any]], dict[str, Any]]  # settings of our model → config.json
    only: dict[str, tuple[Any, ...]]  # in config.json: the values that our model supports, the default first
    changes: dict[str, str] = field(default_factory=dict)  # our module → TRANSPOSED or HEADS

    def settings(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Convert config.json to our model's settings. Call `invalid` first to check that they are possible."""
        settings = {ours: config.get(theirs, default) for ours, (theirs, default) in self.sizes.items()}
        return settings | (_llama_settings(settings, config) if self is LLAMA else {})

    def theirs(self, name: str) -> str | None:
        """Return our weight's name in a Hugging Face file, without the prefix."""
        if name in self.heads:
            return self.heads[name]
        module, _, kind = name.rpartition(".")
        found = re.fullmatch(r"layers\.(\d+)\.(.+)", module)
        if found:
            inside = self.in_layer.get(found[2])
            return inside and f"{self.layers.format(found[1])}.{inside}.{kind}"
        their_module = self.outside.get(module) or self.heads.get(module)
        return their_module and f"{their_module}.{kind}"

    def full(self, name: str) -> str:
        """Return the Hugging Face name with the prefix, as in a model with a head."""
        theirs = self.theirs(name)
        assert theirs is not None, name
        has_none = theirs in self.heads.values() or theirs.rpartition(".")[0] in self.heads.values()
        return theirs if has_none else self.prefix + theirs

    def bare(self, name: str) -> str:
        """Return a Hugging Face name without the prefix, in its current form: old files say gamma and beta."""
        name = re.sub(r"LayerNorm\.(gamma|beta)$", lambda m: f"LayerNorm.{BETTER[m[1]]}", name)
        return name.removeprefix(self.prefix)

    def layer_of(self, bare: str) -> int | None:
        found = re.match(re.escape(self.layers).replace(r"\{\}", r"(\d{1,9})") + r"\.", bare)
        return int(found[1]) if found else None

    def change(self, name: str) -> str:
        """Return how a Hugging Face weight becomes ours. Vectors are not transposed."""
        change = self.changes.get(re.sub(r"layers\.\d+\.", "", name.rpartition(".")[0]), SAME)
        return SAME if change == TRANSPOSED and name.endswith("bias") else change

    def needed(self, settings: Mapping[str, Any]) -> list[str]:
        """Return one required weight per module of such a model: for a check before the launch."""
        modules = [m for m in self.outside if not m.startswith(NEW_MODULES)]
        modules += [f"layers.{i}.{m}" for i in range(settings["num_layers"]) for m in self.in_layer]
        if settings.get("task") != "classify" and not settings.get("tied"):
            modules += [m for m in self.heads if not m.startswith(NEW_MODULES) and m != "output_bias"]
        return [f"{m}.weight" for m in modules]

    def names(self, num_layers: int) -> list[str]:
        """Return every name that a weight of such a model may have."""
        modules = [*self.outside, *self.heads, *(f"layers.{i}.{m}" for i in range(num_layers) for m in self.in_layer)]
        return [n for m in modules for n in ([m] if m == "output_bias" else [f"{m}.weight", f"{m}.bias"])]


BETTER = {"gamma": "weight", "beta": "bias"}


def is_new(name: str) -> bool:
    """Return whether a file may lack this weight: adapters, and modules of a new task."""
    return name.endswith(NEW) or name.split(".")[0] in NEW_MODULES


def other_classes(name: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Return whether a weight differs only because the model has other classes than the file."""
    return name.split(".")[0] in CLASSES and shape[1:] == wanted[1:]


def shape_of(name: str, settings: Mapping[str, Any]) -> tuple[int, ...]:
    """Return our weight's shape for these settings, before the vocabulary is padded. Not for a classifier."""
    dim, vocab = settings["dim"], settings["vocab_size"]
    hidden = settings.get("hidden_dim") or 4 * dim
    keys = dim // settings["num_heads"] * (settings.get("num_kv_heads") or settings["num_heads"])
    square, tokens = (dim, dim), (vocab, dim)
    matrices = {
        "qkv": (3 * dim, dim), "q": square, "k": (keys, dim), "v": (keys, dim), "proj": square, "gate": (hidden, dim),
        "up": (hidden, dim), "down": (dim, hidden), "embed": tokens, "output": tokens, "segments": (2, dim),
        "positions": (settings.get("seq_len"), dim), "transform": square, "pooler": square,
    }  # fmt: skip
    module, _, kind = name.rpartition(".")
    if name == "output_bias":
        return (vocab,)
    shape = matrices.get(module.rpartition(".")[2], (dim,))  # default: a norm
    return shape[:1] if kind == "bias" else shape


def of_target(target: str) -> Family | None:
    return next((f for f in FAMILIES.values() if f.target == target), None)


# ---- GPT-2 ---------------------------------------------------------------------------------------------------


def _gpt2_config(model: Mapping[str, Any]) -> dict[str, Any]:
    dropout = model.get("dropout", 0.0)
    return {
        "architectures": ["GPT2LMHeadModel"], "n_layer": model["num_layers"], "n_embd": model["dim"],
        "n_head": model["num_heads"], "vocab_size": model["vocab_size"], "n_positions": model["seq_len"],
        "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
        "resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout,
        "bos_token_id": None, "eos_token_id": None,  # their default would be 50256
    }  # fmt: skip


GPT2 = Family(
    model_type="gpt2",
    target=models.GPT2,
    prefix="transformer.",
    layers="h.{}",
    in_layer={
        "norm1": "ln_1", "attention.qkv": "attn.c_attn", "attention.proj": "attn.c_proj", "norm2": "ln_2",
        "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj",
    },
    outside={"embed": "wte", "positions": "wpe", "norm": "ln_f"},
    heads={},
    changes={"attention.qkv": HEADS, "attention.proj": TRANSPOSED, "mlp.up": TRANSPOSED, "mlp.down": TRANSPOSED},
    sizes={
        "num_layers": ("n_layer", 12), "dim": ("n_embd", 768), "num_heads": ("n_head", 12),
        "vocab_size": ("vocab_size", 50257), "seq_len": ("n_positions", 1024),
    },
    config=_gpt2_config,
    only={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"), "n_inner": (None, "4 × n_embd"),
        "layer_norm_epsilon": (1e-5,), "tie_word_embeddings": (True,), "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,),
    },
)  # fmt: skip


# ---- Llama ---------------------------------------------------------------------------------------------------


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two spellings: rope_theta and rope_scaling, or both in rope_parameters."""
    rope: dict[str, Any] = {"rope_theta": config.get("rope_theta", 10000.0)}
    rope |= config.get("rope_scaling") or {}
    rope |= config.get("rope_parameters") or {}
    rope["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    return rope


def _llama_settings(sizes: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    rope = _rope(config)
    settings = {
        "num_kv_heads": sizes["num_heads" if sizes["num_kv_heads"] is None else "num_kv_heads"],
        "rope_theta": rope["rope_theta"], "rope_factor": 1.0,  # 1: off
    }  # fmt: skip
    if rope["rope_type"] == "llama3":
        length = config.get("max_position_embeddings", 2048)
        settings |= {
            "rope_factor": rope.get("factor"), "rope_low_freq_factor": rope.get("low_freq_factor"),
            "rope_high_freq_factor": rope.get("high_freq_factor"),
            "rope_original_len": rope.get("original_max_position_embeddings", length),
        }  # fmt: skip
    return settings


def _llama_config(model: Mapping[str, Any]) -> dict[str, Any]:
    config = {
        "architectures": ["LlamaForCausalLM"], "num_hidden_layers": model["num_layers"], "hidden_size": model["dim"],
        "num_attention_heads": model["num_heads"], "num_key_value_heads": model["num_kv_heads"] or model["num_heads"],
        "intermediate_size": model["hidden_dim"], "vocab_size": model["vocab_size"],
        "max_position_embeddings": model["seq_len"], "rope_theta": model["rope_theta"],
        "rms_norm_eps": model["norm_eps"], "tie_word_embeddings": model["tied"], "hidden_act": "silu",
        "attention_bias": False, "mlp_bias": False, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    if model.get("rope_factor", 1.0) != 1.0:
        config["rope_scaling"] = {
            "rope_type": "llama3", "factor": model["rope_factor"], "low_freq_factor": model["rope_low_freq_factor"],
            "high_freq_factor": model["rope_high_freq_factor"],
            "original_max_position_embeddings": model["rope_original_len"],
        }  # fmt: skip
    return config


LLAMA = Family(
    model_type="llama",
    target=models.LLAMA,
    prefix="model.",
    layers="layers.{}",
    in_layer={
        "norm1": "input_layernorm", "attention.q": "self_attn.q_proj", "attention.k": "self_attn.k_proj",
        "attention.v": "self_attn.v_proj", "attention.proj": "self_attn.o_proj", "norm2": "post_attention_layernorm",
        "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj",
    },
    outside={"embed": "embed_tokens", "norm": "norm"},
    heads={"output": "lm_head"},
    sizes={
        "num_layers": ("num_hidden_layers", 32), "dim": ("hidden_size", 4096),
        "num_heads": ("num_attention_heads", 32), "num_kv_heads": ("num_key_value_heads", None),
        "hidden_dim": ("intermediate_size", 11008), "vocab_size": ("vocab_size", 32000),
        "norm_eps": ("rms_norm_eps", 1e-6), "tied": ("tie_word_embeddings", False),
    },
    config=_llama_config,
    only={
        "hidden_act": ("silu", "swish"), "attention_bias": (False,), "mlp_bias": (False,),
        "head_dim": (None, "hidden_size / num_attention_heads"), "rope_type": ("default", "llama3"),
    },
)  # fmt: skip


# ---- BERT ----------------------------------------------------------------------------------------------------


def _bert_config(model: Mapping[str, Any]) -> dict[str, Any]:
    dropout = model.get("dropout", 0.0)
    config = {
        "architectures": ["BertForMaskedLM"], "num_hidden_layers": model["num_layers"], "hidden_size": model["dim"],
        "num_attention_heads": model["num_heads"], "intermediate_size": 4 * model["dim"],
        "vocab_size": model["vocab_size"], "max_position_embeddings": model["seq_len"], "hidden_act": "gelu",
        "type_vocab_size": 2, "layer_norm_eps": 1e-12, "pad_token_id": model.get("pad_id"),
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout, "tie_word_embeddings": True,
    }  # fmt: skip
    if model.get("task") == "classify":
        labels = [f"LABEL_{i}" for i in range(model["num_classes"])]
        config |= {
            "architectures": ["BertForSequenceClassification"], "id2label": dict(enumerate(labels)),
            "label2id": {label: i for i, label in enumerate(labels)},
        }  # fmt: skip
    return config


BERT = Family(
    model_type="bert",
    target="dtrain.models.bert.Bert",
    prefix="bert.",
    layers="encoder.layer.{}",
    in_layer={
        "attention.q": "attention.self.query", "attention.k": "attention.self.key",
        "attention.v": "attention.self.value", "attention.proj": "attention.output.dense",
        "norm1": "attention.output.LayerNorm", "mlp.up": "intermediate.dense", "mlp.down": "output.dense",
        "norm2": "output.LayerNorm",
    },
    outside={
        "embed": "embeddings.word_embeddings", "positions": "embeddings.position_embeddings",
        "segments": "embeddings.token_type_embeddings", "embed_norm": "embeddings.LayerNorm",
        "pooler": "pooler.dense",
    },
    heads={
        "transform": "cls.predictions.transform.dense", "transform_norm": "cls.predictions.transform.LayerNorm",
        "output_bias": "cls.predictions.bias", "classifier": "classifier",
    },
    sizes={
        "num_layers": ("num_hidden_layers", 12), "dim": ("hidden_size", 768), "num_heads": ("num_attention_heads", 12),
        "vocab_size": ("vocab_size", 30522), "seq_len": ("max_position_embeddings", 512),
    },
    config=_bert_config,
    only={
        "hidden_act": ("gelu",), "is_decoder": (False,), "add_cross_attention": (False,),
        "position_embedding_type": ("absolute",), "tie_word_embeddings": (True,), "layer_norm_eps": (1e-12,),
        "type_vocab_size": (2,), "intermediate_size": (None, "4 × hidden_size"),
    },
)  # fmt: skip

FAMILIES = {family.model_type: family for family in (GPT2, LLAMA, BERT)}


# The largest sizes that a config.json may name, many times those of any model: they keep sums small and lists short.
# The sizes that such a model needs are compared with the file itself (dtrain/checks/init_from.py).
LARGEST = {
    "num_layers": 10_000, "dim": 2**20, "num_heads": 2**15, "num_kv_heads": 2**15, "hidden_dim": 2**22,
    "vocab_size": 2**26, "seq_len": 2**31, "rope_original_len": 2**31,
}  # fmt: skip


def invalid(family: Family, config: Mapping[str, Any]) -> str:
    """Describe a value in config.json that no model can have, or return "". Call it before `settings` and `cannot`."""
    for key in ("rope_scaling", "rope_parameters") if family is LLAMA else ():
        if not isinstance(config.get(key), (dict, type(None))):
            return f"{key}={short(config[key])}, which is not an object"
    settings = family.settings(config)
    for ours, value in settings.items():
        theirs = family.sizes.get(ours, (ours, None))[0]
        most = LARGEST.get(ours)
        if ours == "tied":
            right, rule = type(value) is bool, "true or false"
        elif most is not None:
            right, rule = type(value) is int and 1 <= value <= most, f"a whole number from 1 to {most:,}"
        else:
            right, rule = type(value) in (int, float) and 0 < value < 1e12, "a number above 0"
        if not right:
            return f"{theirs}={short(value)}, which must be {rule}"
    dim, heads, groups = settings["dim"], settings["num_heads"], settings.get("num_kv_heads", 1)
    if dim % heads or heads % groups:
        return f"{heads} attention heads, which do not divide {dim}, or are not a multiple of {groups} key heads"
    return ""


def cannot(family: Family, config: Mapping[str, Any]) -> str:
    """Describe what config.json requires that our model does not support, or return an empty string."""
    values, ours = dict(config), family.settings(config)
    if family is LLAMA:
        values |= _rope(config)
    # sizes that follow from others, and are often repeated
    follow = {"n_inner": 4 * ours["dim"], "head_dim": ours["dim"] // ours["num_heads"]}
    follow |= {"intermediate_size": 4 * ours["dim"]} if family is BERT else {}
    values |= {key: None for key, usual in follow.items() if values.get(key) == usual}
    for key, can in family.only.items():
        if values.get(key, can[0]) not in can:
            return f"{key}={short(values[key])} there, but dtrain supports {' or '.join(map(str, can))} only"
    if values.get("quantization_config"):
        return "its weights are quantized"
    return ""
