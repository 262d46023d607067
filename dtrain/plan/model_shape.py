"""The sizes of a model that determine memory and time. No torch; the counts are exact.

`shape_of` reads the `model` section of a configuration. Each of our transformers (GPT-2, Llama, BERT, ViT) is one
`Transformer`; ResNet and ConvNet are a list of convolutions. parameters.py counts the parameters of each part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

MASKED = 0.15  # share of BERT's tokens that are masked, as published (dtrain/models/bert.py)
CONVNET_LAYERS = 3  # dtrain/models/convnet.py


@dataclass(frozen=True)
class Transformer:
    """A stack of equal blocks: attention and MLP, each with a norm, added to a residual stream."""

    num_layers: int
    dim: int
    num_heads: int
    num_kv_heads: int  # KV heads; fewer than num_heads with grouped-query attention
    hidden_dim: int  # of the MLP
    seq_len: int  # tokens per sample; for an image its patches plus one
    vocab_size: int  # rows of the head (and embedding), with padding; for a classifier its classes
    gated: bool = False  # a third matrix in the MLP (SwiGLU)
    biased: bool = True  # linear layers have biases, norms too
    causal: bool = True
    tied: bool = True  # the head is the embedding
    rotary: bool = False  # rotary positions; otherwise learned positions are added
    dropout: float = 0.0
    asked: float = 1.0  # share of a sample's tokens whose logits are computed: BERT 0.15, a classifier 1 / seq_len
    # ---- the defaults below are enough for a plain GPT or Llama -------------------------------------------------
    kind: str = "language"  # language | bert (post-norm, segments) | vit (patches)
    task: str = "next"  # next (token) | mlm | classify
    fused_qkv: bool = True  # one matrix computes q, k and v, and casts its input once
    padding: int = 0  # rows of embedding (and head) that only pad the vocabulary: in memory, not in num_parameters
    embed_rows: int | None = None  # rows of the embedding, if different from the head's; 0: no embedding table
    num_positions: int | None = None  # learned positions; None: seq_len
    patch_inputs: int = 0  # numbers per image patch
    packed: bool = False  # documents in a sample attend only to themselves: attention reads a mask
    lora_rank: int = 0  # rank of adapters beside frozen weights; 0: all weights are trained
    lora_targets: tuple[str, ...] = ()  # name suffixes of the linear layers with adapters; (): all

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    @property
    def kv_dim(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def rows(self) -> int:
        """Rows of the embedding table."""
        return self.vocab_size if self.embed_rows is None else self.embed_rows

    @property
    def learned_positions(self) -> int:
        if self.rotary:
            return 0
        return self.seq_len if self.num_positions is None else self.num_positions

    def divided(self, ways: int) -> Transformer:
        """The same model on one of `ways` parts of each sequence."""
        if ways == 1:
            return self
        return replace(self, seq_len=self.seq_len // ways, num_positions=self.learned_positions)


@dataclass(frozen=True)
class Convolution:
    """One convolution with its batch norm and activation, for one image."""

    in_channels: int
    out_channels: int
    kernel: int
    stride: int
    out_size: int  # output pixels per side
    unit: int = -1  # its block: the unit of fsdp's all-gather and of recomputation; -1: none
    norm: bool = True  # a batch norm follows; otherwise the convolution has a bias
    shortcut: bool = False  # parallel to a block's other convolutions
    last: bool = False  # last of its block: the residual is added after its norm

    @property
    def parameters(self) -> int:
        weights = self.in_channels * self.out_channels * self.kernel**2
        return weights + self.out_channels * (2 if self.norm else 1)

    @property
    def multiplications(self) -> int:
        return self.out_size**2 * self.out_channels * self.in_channels * self.kernel**2

    @property
    def outputs(self) -> int:
        """Output elements for one image."""
        return self.out_size**2 * self.out_channels


@dataclass(frozen=True)
class Convolutions:
    """A convolutional network: its convolutions in order, and its final linear layers as (in, out)."""

    layers: tuple[Convolution, ...]
    linear: tuple[tuple[int, int], ...]
    image_size: int
    channels: int
    pooled: str = "stem"  # where pooling halves a side: stem (3x3, after the first) | each (2x2) | none
    dropout: float = 0.0


Shape = Transformer | Convolutions


# ---- from a configuration ------------------------------------------------------------------------------------


def shape_of(config: Mapping[str, Any]) -> Shape | None:
    """Return the shape of the configured model; None for a user's own model, which would have to be built."""
    model, data = config["model"], config.get("data") or {}
    readers: dict[str, Callable[..., Shape]] = {
        "dtrain.models.gpt2.GPT2": gpt2,
        "dtrain.models.llama.Llama": llama,
        "dtrain.models.bert.Bert": bert,
        "dtrain.models.vit.ViT": vit,
        "dtrain.models.resnet.ResNet": resnet,
        "dtrain.models.convnet.ConvNet": convnet,
    }
    reader = readers.get(model["_target_"])
    if reader is None:
        return None
    lora = config.get("lora") or {}
    return reader(model, data, {"lora_rank": lora.get("rank", 0), "lora_targets": tuple(lora.get("targets", ()))})


def padded_vocabulary(model: Mapping[str, Any]) -> int:
    """Rows of the embedding: the vocabulary, rounded up to a multiple of vocab_multiple."""
    multiple = int(model.get("vocab_multiple", 128))
    return -(-int(model["vocab_size"]) // multiple) * multiple


def text(model: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes that every token model has."""
    rows = padded_vocabulary(model)
    return {
        "num_layers": model["num_layers"],
        "dim": model["dim"],
        "num_heads": model["num_heads"],
        "seq_len": data.get("seq_len") or model["seq_len"],
        "vocab_size": rows,
        "padding": rows - model["vocab_size"],
        "num_positions": model["seq_len"],
        "packed": bool(data.get("packed", False)),
    }


def gpt2(model: Mapping[str, Any], data: Mapping[str, Any], lora: dict[str, Any]) -> Transformer:
    return Transformer(
        **text(model, data),
        num_kv_heads=model["num_heads"],
        hidden_dim=4 * model["dim"],
        dropout=model.get("dropout", 0.0),
        **lora,
    )


def llama(model: Mapping[str, Any], data: Mapping[str, Any], lora: dict[str, Any]) -> Transformer:
    return Transformer(
        **text(model, data),
        num_kv_heads=model["num_kv_heads"],
        hidden_dim=model["hidden_dim"],
        gated=True,
        biased=False,
        tied=model.get("tied", False),
        rotary=True,
        fused_qkv=False,
        dropout=model.get("dropout", 0.0),
        **lora,
    )


def bert(model: Mapping[str, Any], data: Mapping[str, Any], lora: dict[str, Any]) -> Transformer:
    sizes = text(model, data)
    task, rows, length = model.get("task", "mlm"), sizes["vocab_size"], sizes["seq_len"]
    asked = round(MASKED * length) / length if task == "mlm" else 1 / length
    sizes |= {"vocab_size": rows if task == "mlm" else model.get("num_classes", 2), "embed_rows": rows}
    return Transformer(
        **sizes,
        num_kv_heads=model["num_heads"],
        hidden_dim=4 * model["dim"],
        causal=False,
        fused_qkv=False,
        tied=task == "mlm",
        dropout=model.get("dropout", 0.1),
        asked=asked,
        kind="bert",
        task=task,
        **lora,
    )


def vit(model: Mapping[str, Any], data: Mapping[str, Any], lora: dict[str, Any]) -> Transformer:
    length = (model.get("image_size", 224) // model["patch_size"]) ** 2 + 1
    return Transformer(
        num_layers=model["num_layers"],
        dim=model["dim"],
        num_heads=model["num_heads"],
        num_kv_heads=model["num_heads"],
        hidden_dim=4 * model["dim"],
        seq_len=length,
        vocab_size=model.get("num_classes", 1000),
        causal=False,
        tied=False,
        dropout=model.get("dropout", 0.0),
        asked=1 / length,
        kind="vit",
        task="classify",
        embed_rows=0,
        num_positions=length,
        patch_inputs=model.get("channels", 3) * model["patch_size"] ** 2,
        **lora,
    )


def resnet(model: Mapping[str, Any], data: Mapping[str, Any], lora: dict[str, Any]) -> Convolutions:
    size, channels, width = model.get("image_size", 224), model.get("channels", 3), model.get("width", 64)
    stem = model.get("stem", "auto")
    large = size >= 64 if stem == "auto" else stem == "large"
    side = -(-size // 2) if large else size
    layers = [Convolution(channels, width, 7 if large else 3, 2 if large else 1, side)]
    side, ins, unit = -(-side // 2) if large else side, width, 0
    for stage, num_blocks in enumerate(model["blocks"]):
        inner = width << stage
        outs = 4 * inner if model["bottleneck"] else inner
        for i in range(num_blocks):
            stride, after = (2, -(-side // 2)) if stage and i == 0 else (1, side)
            if model["bottleneck"]:
                chain = [(ins, inner, 1, 1, side), (inner, inner, 3, stride, after), (inner, outs, 1, 1, after)]
            else:
                chain = [(ins, inner, 3, stride, after), (inner, inner, 3, 1, after)]
            layers += [Convolution(*sizes, unit=unit, last=sizes is chain[-1]) for sizes in chain]
            if stride > 1 or ins != outs:
                layers.append(Convolution(ins, outs, 1, stride, after, unit=unit, shortcut=True))
            side, ins, unit = after, outs, unit + 1
    pooled = "stem" if large else "none"
    return Convolutions(tuple(layers), ((ins, model.get("num_classes", 1000)),), size, channels, pooled)


def convnet(model: Mapping[str, Any], data: Mapping[str, Any], lora: dict[str, Any]) -> Convolutions:
    size, channels, width = model["image_size"], model.get("channels", 1), model.get("width", 32)
    widths = [channels, *(width << i for i in range(CONVNET_LAYERS))]
    layers = tuple(
        Convolution(widths[i], widths[i + 1], 3, 1, size >> i, unit=i, norm=False) for i in range(CONVNET_LAYERS)
    )
    side, last = size >> CONVNET_LAYERS, widths[-1]
    linear = ((last * side**2, last), (last, model.get("num_classes", 10)))
    return Convolutions(layers, linear, size, channels, "each", model.get("dropout", 0.0))
