"""Models that Hugging Face knows, too: what their weights and settings are called there. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

# How a weight there becomes ours. Conv1D has its matrices the other way round; HEADS is a Conv1D of queries, keys and
# values one after the other, which GPT-2 of ours has head by head.
SAME, TRANSPOSED, HEADS = "same", "transposed", "heads"
VOCABULARY = ("embed.weight", "output.weight", "output_bias")  # one row a token; ours have more, to a round number
POSITIONS = "positions.weight"  # one row a position
NEW = ("lora_a", "lora_b")  # ends of the names of weights that no file has: they are drawn
NEW_MODULES = ("classifier", "pooler")  # a new task brings its own
CLASSES = ("classifier", "head")  # one row a class


@dataclass(frozen=True)
class Family:
    """One architecture under both names."""

    model_type: str  # in config.json
    target: str  # our class
    prefix: str  # before the names of all but the head; a bare model's file lacks it
    layers: str  # the name of layer {}
    in_layer: dict[str, str]  # our module → theirs, inside a layer
    outside: dict[str, str]  # and outside of the layers
    heads: dict[str, str]  # what belongs to a task, and has no prefix
    settings: Callable[[Mapping[str, Any]], dict[str, Any]]  # config.json → settings of our model
    config: Callable[[Mapping[str, Any]], dict[str, Any]]  # settings of our model → config.json
    only: dict[str, tuple[Any, ...]]  # in config.json: the values that our model can do, the default first
    changes: dict[str, str] = field(default_factory=dict)  # our module → TRANSPOSED or HEADS

    def theirs(self, name: str) -> str | None:
        """The name in a Hugging Face file, without the prefix, of a weight of ours."""
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
        """Their name with the prefix, as their model with a head has it."""
        theirs = self.theirs(name)
        assert theirs is not None, name
        has_none = theirs in self.heads.values() or theirs.rpartition(".")[0] in self.heads.values()
        return theirs if has_none else self.prefix + theirs

    def bare(self, name: str) -> str:
        """A name of theirs without the prefix, as it is today: old files say gamma and beta."""
        name = re.sub(r"LayerNorm\.(gamma|beta)$", lambda m: f"LayerNorm.{BETTER[m[1]]}", name)
        return name.removeprefix(self.prefix)

    def layer_of(self, bare: str) -> int | None:
        found = re.match(re.escape(self.layers).replace(r"\{\}", r"(\d+)") + r"\.", bare)
        return int(found[1]) if found else None

    def change(self, name: str) -> str:
        """How their weight becomes ours. Vectors have no other way round."""
        change = self.changes.get(re.sub(r"layers\.\d+\.", "", name.rpartition(".")[0]), SAME)
        return SAME if change == TRANSPOSED and name.endswith("bias") else change

    def needed(self, settings: Mapping[str, Any]) -> list[str]:
        """Of the weights that a file must have for such a model, one of each module: for a look before a launch."""
        modules = [m for m in self.outside if not m.startswith(NEW_MODULES)]
        modules += [f"layers.{i}.{m}" for i in range(settings["num_layers"]) for m in self.in_layer]
        if settings.get("task") != "classify" and not settings.get("tied"):
            modules += [m for m in self.heads if not m.startswith(NEW_MODULES) and m != "output_bias"]
        return [f"{m}.weight" for m in modules]

    def names(self, num_layers: int) -> list[str]:
        """Every name that a weight of such a model may have."""
        modules = [*self.outside, *self.heads, *(f"layers.{i}.{m}" for i in range(num_layers) for m in self.in_layer)]
        return [n for m in modules for n in ([m] if m == "output_bias" else [f"{m}.weight", f"{m}.bias"])]


BETTER = {"gamma": "weight", "beta": "bias"}


def is_new(name: str) -> bool:
    """Is it no wonder that a file lacks this weight? Adapters, and what belongs to a new task."""
    return name.endswith(NEW) or name.split(".")[0] in NEW_MODULES


def other_classes(name: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Does a weight differ only because the model is for other classes than the file's?"""
    return name.split(".")[0] in CLASSES and shape[1:] == wanted[1:]


def shape_of(name: str, settings: Mapping[str, Any]) -> tuple[int, ...]:
    """Our weight's shape in a model with these settings, before the vocabulary is padded. Not of a classifier."""
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
    shape = matrices.get(module.rpartition(".")[2], (dim,))  # a norm
    return shape[:1] if kind == "bias" else shape


def of_target(target: str) -> Family | None:
    return next((f for f in FAMILIES.values() if f.target == target), None)


# ---- GPT-2 ---------------------------------------------------------------------------------------------------


def _gpt2_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_layers": config.get("n_layer", 12), "dim": config.get("n_embd", 768),
        "num_heads": config.get("n_head", 12), "vocab_size": config.get("vocab_size", 50257),
        "seq_len": config.get("n_positions", 1024),
    }  # fmt: skip


def _gpt2_config(model: Mapping[str, Any]) -> dict[str, Any]:
    dropout = model.get("dropout", 0.0)
    return {
        "architectures": ["GPT2LMHeadModel"], "n_layer": model["num_layers"], "n_embd": model["dim"],
        "n_head": model["num_heads"], "vocab_size": model["vocab_size"], "n_positions": model["seq_len"],
        "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
        "resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout,
        "bos_token_id": None, "eos_token_id": None,  # theirs would be 50256
    }  # fmt: skip


GPT2 = Family(
    model_type="gpt2",
    target="dtrain.models.gpt2.GPT2",
    prefix="transformer.",
    layers="h.{}",
    in_layer={
        "norm1": "ln_1", "attention.qkv": "attn.c_attn", "attention.proj": "attn.c_proj", "norm2": "ln_2",
        "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj",
    },
    outside={"embed": "wte", "positions": "wpe", "norm": "ln_f"},
    heads={},
    changes={"attention.qkv": HEADS, "attention.proj": TRANSPOSED, "mlp.up": TRANSPOSED, "mlp.down": TRANSPOSED},
    settings=_gpt2_settings,
    config=_gpt2_config,
    only={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"), "n_inner": (None, "4 × n_embd"),
        "layer_norm_epsilon": (1e-5,), "tie_word_embeddings": (True,), "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,),
    },
)  # fmt: skip


# ---- Llama ---------------------------------------------------------------------------------------------------


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Two spellings: rope_theta and rope_scaling, or both in rope_parameters."""
    rope: dict[str, Any] = {"rope_theta": config.get("rope_theta", 10000.0)}
    rope |= config.get("rope_scaling") or {}
    rope |= config.get("rope_parameters") or {}
    rope["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    return rope


def _llama_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    heads, rope = config.get("num_attention_heads", 32), _rope(config)
    settings = {
        "num_layers": config.get("num_hidden_layers", 32), "dim": config.get("hidden_size", 4096),
        "num_heads": heads, "num_kv_heads": config.get("num_key_value_heads") or heads,
        "hidden_dim": config.get("intermediate_size", 11008), "vocab_size": config.get("vocab_size", 32000),
        "rope_theta": rope["rope_theta"], "norm_eps": config.get("rms_norm_eps", 1e-6),
        "tied": config.get("tie_word_embeddings", False), "rope_factor": 1.0,  # 1: off
    }  # fmt: skip
    if rope["rope_type"] == "llama3":
        length = config.get("max_position_embeddings", 2048)
        settings |= {
            "rope_factor": rope["factor"], "rope_low_freq_factor": rope["low_freq_factor"],
            "rope_high_freq_factor": rope["high_freq_factor"],
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
    target="dtrain.models.llama.Llama",
    prefix="model.",
    layers="layers.{}",
    in_layer={
        "norm1": "input_layernorm", "attention.q": "self_attn.q_proj", "attention.k": "self_attn.k_proj",
        "attention.v": "self_attn.v_proj", "attention.proj": "self_attn.o_proj", "norm2": "post_attention_layernorm",
        "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj",
    },
    outside={"embed": "embed_tokens", "norm": "norm"},
    heads={"output": "lm_head"},
    settings=_llama_settings,
    config=_llama_config,
    only={
        "hidden_act": ("silu", "swish"), "attention_bias": (False,), "mlp_bias": (False,),
        "head_dim": (None, "hidden_size / num_attention_heads"), "rope_type": ("default", "llama3"),
    },
)  # fmt: skip


# ---- BERT ----------------------------------------------------------------------------------------------------


def _bert_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_layers": config.get("num_hidden_layers", 12), "dim": config.get("hidden_size", 768),
        "num_heads": config.get("num_attention_heads", 12), "vocab_size": config.get("vocab_size", 30522),
        "seq_len": config.get("max_position_embeddings", 512),
    }  # fmt: skip


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
    settings=_bert_settings,
    config=_bert_config,
    only={
        "hidden_act": ("gelu",), "is_decoder": (False,), "add_cross_attention": (False,),
        "position_embedding_type": ("absolute",), "tie_word_embeddings": (True,), "layer_norm_eps": (1e-12,),
        "type_vocab_size": (2,), "intermediate_size": (None, "4 × hidden_size"),
    },
)  # fmt: skip

FAMILIES = {family.model_type: family for family in (GPT2, LLAMA, BERT)}


def cannot(family: Family, config: Mapping[str, Any]) -> str:
    """What config.json asks for that our model does not do, in words, or ""."""
    values, ours = dict(config), family.settings(config)
    if family is LLAMA:
        values |= _rope(config)
    # sizes that follow from others, and are often said again
    follow = {"n_inner": 4 * ours["dim"], "head_dim": ours["dim"] // ours["num_heads"]}
    follow |= {"intermediate_size": 4 * ours["dim"]} if family is BERT else {}
    values |= {key: None for key, usual in follow.items() if values.get(key) == usual}
    for key, can in family.only.items():
        if values.get(key, can[0]) not in can:
            return f"{key}={values[key]} there, and ours does {' or '.join(map(str, can))} only"
    if values.get("quantization_config"):
        return "its weights are quantized"
    return ""
