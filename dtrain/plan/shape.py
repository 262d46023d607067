"""What a model is made of: the sizes that memory and time follow from. No torch; the counts are exact.

`shape_of` reads the `model` section of a configuration. Every transformer of ours (GPT-2, Llama, BERT, ViT) is one
`Transformer`; ResNet and ConvNet are a list of convolutions.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Transformer:
    """A stack of equal blocks: attention and MLP, each after a norm, added to a residual stream."""

    num_layers: int
    dim: int
    num_heads: int
    num_kv_heads: int  # heads of keys and values; fewer than num_heads where neighbours share them
    hidden_dim: int  # of the MLP
    seq_len: int  # tokens of a sample; for a picture its patches and one more
    vocab_size: int  # rows of the head (and embedding), padded; for a classifier its classes
    gated: bool = False  # a third matrix in the MLP (SwiGLU)
    biased: bool = True  # linear layers have biases, norms too
    causal: bool = True
    tied: bool = True  # the head is the embedding
    rotary: bool = False  # positions turn queries and keys; else they are learned and added
    dropout: float = 0.0
    asked: float = 1.0  # share of a sample's tokens whose logits are computed: BERT 0.15, a classifier 1 / seq_len


@dataclass(frozen=True)
class Convolution:
    """One convolution with its batch norm and activation, for one picture."""

    in_channels: int
    out_channels: int
    kernel: int
    stride: int
    out_size: int  # pixels a side that come out


@dataclass(frozen=True)
class Convolutions:
    """A convolutional network: its convolutions in order, and the linear layers at its end as (in, out)."""

    layers: tuple[Convolution, ...]
    linear: tuple[tuple[int, int], ...]
    image_size: int
    channels: int


Shape = Transformer | Convolutions
