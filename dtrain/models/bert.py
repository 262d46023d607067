"""BERT (Devlin et al., 2018): post-norm encoder with learned positions and segments, for masked LM or classification.

`model(tokens)` returns logits. `model(tokens, targets)` returns the mean loss over the targets that count, in
evaluation followed by accuracy and top-5 accuracy. Tokens are [batch, length], or [batch, length, 2] with segments.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dtrain.errors import bad
from dtrain.kernels.cross_entropy import linear_cross_entropy
from dtrain.models.layers import CLASSIFY_METRICS, IGNORED, MLP, Head, LayerNorm, classify
from dtrain.util.dtensor import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

EPS = 1e-12  # of all norms, as published
MASKED = 0.15  # share of tokens to predict, as published: only for the FLOP count


class Attention(nn.Module):
    def __init__(self, dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.head_dim = dim // num_heads
        self.dropout = dropout
        self.q, self.k, self.v = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (m(x).view(batch, length, -1, self.head_dim).transpose(1, 2) for m in (self.q, self.k, self.v))
        dropout = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        return self.proj(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(dim, num_heads, dropout)
        self.norm1 = LayerNorm(dim, eps=EPS)
        self.mlp = MLP(dim)
        self.norm2 = LayerNorm(dim, eps=EPS)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.norm1(x + self.dropout(self.attention(x, mask=mask)))
        return self.norm2(x + self.dropout(self.mlp(x)))


class MaskedHead(Head):
    """Logits over the vocabulary, or loss and metrics. A module, so that a plan can name it."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor | None = None) -> Tensor:  # type: ignore[override]
        if targets is not None and self.training and self.is_fused(x):
            return linear_cross_entropy(x, weight, targets, bias)
        logits: Any = F.linear(x, weight, bias)
        if targets is None:
            return logits
        if not self.training and is_dtensor(logits):  # top 5 needs all logits; only of the predicted tokens
            logits = logits.full_tensor()
        return classify(logits, targets, self.training)


def places_of(asked: Tensor, count: int | None) -> Tensor:
    """Return the places where `asked` is true, in their order; `count`: how many these are.

    With a count, all shapes are known, so the CPU does not wait for the GPU to count them.
    """
    if count is None:
        return asked.nonzero()[:, 0]
    return torch.searchsorted(asked.cumsum(0), torch.arange(1, count + 1, device=asked.device))


class Bert(nn.Module):
    eval_metrics = CLASSIFY_METRICS
    stream = torch.float32  # dtype of the residual stream between blocks (precision.stream)
    num_targets: int | None = None  # of each sample, if the data has the same number in all: a step waits for no count

    def __init__(
        self,
        num_layers: int,
        dim: int,
        num_heads: int,
        vocab_size: int,
        seq_len: int,
        task: Literal["mlm", "classify"] = "mlm",
        num_classes: int = 2,
        pad_id: int | None = 0,
        vocab_multiple: int = 128,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        if task == "classify" and num_classes < 2:
            raise bad("model.num_classes", num_classes, "must be at least 2", "model.num_classes=2")
        if pad_id is not None and not 0 <= pad_id < vocab_size:
            rule = f"must be one of the model.vocab_size={vocab_size} tokens"
            raise bad("model.pad_id", pad_id, rule, "model.pad_id=null where nothing is padded, or a larger vocabulary")
        self.num_layers, self.dim, self.seq_len, self.vocab_size = num_layers, dim, seq_len, vocab_size
        self.task, self.num_classes, self.pad_id = task, num_classes, pad_id
        self.perplexity = task == "mlm"  # whether exp(loss) means something
        padded = math.ceil(vocab_size / vocab_multiple) * vocab_multiple
        self.is_first = self.is_last = True  # of the pipeline; an unsplit model is both
        self.embed: nn.Embedding | None = nn.Embedding(padded, dim)
        self.positions: nn.Embedding | None = nn.Embedding(seq_len, dim)
        self.segments: nn.Embedding | None = nn.Embedding(2, dim)
        self.embed_norm: LayerNorm | None = LayerNorm(dim, eps=EPS)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleDict({str(i): Block(dim, num_heads, dropout) for i in range(num_layers)})
        self.encoded = nn.Identity()  # the layers' output, for a plan to name: the heads need the full sequence
        num_padding = (padded - vocab_size) * dim
        if task == "mlm":
            self.transform: nn.Linear | None = nn.Linear(dim, dim)
            self.transform_norm: LayerNorm | None = LayerNorm(dim, eps=EPS)
            self.output_bias: nn.Parameter | None = nn.Parameter(torch.empty(padded))
            self.head = MaskedHead()
            num_padding += padded - vocab_size
        else:
            self.pooler: nn.Linear | None = nn.Linear(dim, dim)
            self.classifier: nn.Linear | None = nn.Linear(dim, num_classes)
            self.task_head = ("pooler", "classifier")  # trained beside adapters, too
        # as published: vocabulary padding is not counted
        self.num_parameters = sum(p.numel() for p in self.parameters()) - num_padding

    def forward(self, inputs: Tensor, targets: Tensor | None = None, source: Tensor | None = None) -> Tensor:
        """`source`: the tokens, if `inputs` are an earlier stage's hidden states."""
        source = inputs if source is None else source
        tokens = source[..., 0] if source.dim() == 3 else source
        mask = None  # the fastest kernel: masked LM uses full windows, without padding
        if self.task == "classify" and self.pad_id is not None:
            mask = (tokens != self.pad_id)[:, None, None, :]
        x = self.embedded(tokens, source) if self.is_first else inputs
        for layer in self.layers.values():
            x = layer(x, mask=mask)
        if not self.is_last:
            return x
        x = self.encoded(x)
        return self.masked_tokens(x, targets) if self.task == "mlm" else self.classes(x, targets)

    def embedded(self, tokens: Tensor, source: Tensor) -> Tensor:
        assert self.embed is not None and self.positions is not None
        assert self.segments is not None and self.embed_norm is not None
        position = torch.arange(tokens.shape[1], device=tokens.device)
        segment = source[..., 1] if source.dim() == 3 else torch.zeros_like(position)
        x = self.embed(tokens).float() + self.positions(position).float() + self.segments(segment).float()
        return self.dropout(self.embed_norm(x).to(self.stream))

    def masked_tokens(self, x: Tensor, targets: Tensor | None) -> Tensor:
        assert self.transform is not None and self.transform_norm is not None
        assert self.embed is not None and self.output_bias is not None
        if targets is not None:
            if targets.dim() != 2:
                rule = f"needs a target or {IGNORED} for each token, but the targets have shape {list(targets.shape)}"
                raise bad("model.task", self.task, rule, "data=stdlib-mlm or mlm, or model.task=classify")
            # a seventh of the tokens: computes that much less
            asked = places_of(targets.flatten() != IGNORED, self.num_targets and self.num_targets * len(targets))
            if len(asked) == targets.numel():
                rule = "is bidirectional, so it would copy the next token that this data asks it to predict"
                raise bad("model.task", self.task, rule, "data=stdlib-mlm or mlm, or a causal model: gpt2")
            x, targets = x.flatten(0, 1)[asked], targets.flatten()[asked]
        x = self.transform_norm(F.gelu(self.transform(x)))
        # tied: no second matrix, and no tie for a wrapper to break
        out: Tensor = self.head(x, self.embed.weight, self.output_bias, targets)
        return out if targets is not None else out[..., : self.vocab_size]

    def classes(self, x: Tensor, targets: Tensor | None) -> Tensor:
        assert self.pooler is not None and self.classifier is not None
        logits: Tensor = self.classifier(self.dropout(torch.tanh(self.pooler(x[:, 0]))))
        if targets is None:
            return logits
        if targets.dim() != 1:
            rule = f"needs one target per sample, but the targets have shape {list(targets.shape)}"
            raise bad("model.task", self.task, rule, "data=stdlib-lines or labelled, or model.task=mlm")
        return classify(logits, targets, self.training)

    # ---- the plans -------------------------------------------------------------------------------------------

    def init_weights(self, name: str, weight: Tensor, generator: torch.Generator) -> None:
        """Fill one full weight. Called per name with its own generator, so order and sharding do not matter."""
        if name.endswith("bias"):
            weight.zero_()
        elif "norm" in name:
            weight.fill_(1.0)
        else:  # as published: a normal distribution with std 0.02, truncated at two std
            nn.init.trunc_normal_(weight, std=0.02, a=-0.04, b=0.04, generator=generator)

    def fsdp_units(self) -> list[nn.Module]:
        """Return the modules gathered one at a time under fsdp; also the units of activation checkpointing."""
        return list(self.layers.values())

    def tp_plan(self, sequence_parallel: bool = False, loss_parallel: bool = False) -> dict[str, ParallelStyle]:
        """Return the tensor-parallel style of each module that this (stage of the) model has.

        Each block's matrices are sharded. Sequence parallel also shards the activations between them along the
        sequence, and gathers the sequence before the head. Loss parallel shards embedding, output bias and logits by
        the vocabulary.
        """
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            PrepareModuleInput,
            PrepareModuleInputOutput,
            PrepareModuleOutput,
            RowwiseParallel,
            SequenceParallel,
        )

        if loss_parallel and self.task == "classify":
            rule = f"shards the logits over the vocabulary, but model.task=classify has {self.num_classes} classes"
            raise bad("strategy.loss_parallel", "true", rule, "strategy.loss_parallel=false")
        between = Shard(1) if sequence_parallel else Replicate()
        # q, k and v get one DTensor, so its gradient needs one all-reduce instead of three
        whole: dict[str, Any] = {"input_layouts": between, "desired_input_layouts": Replicate()}
        plan: dict[str, ParallelStyle] = {}
        for i in self.layers:
            block = f"layers.{i}"
            plan[f"{block}.attention"] = PrepareModuleInput(**whole)
            plan[f"{block}.mlp"] = PrepareModuleInput(**whole)
            for matrix in ("attention.q", "attention.k", "attention.v", "mlp.up"):
                plan[f"{block}.{matrix}"] = ColwiseParallel()
            for matrix in ("attention.proj", "mlp.down"):
                plan[f"{block}.{matrix}"] = RowwiseParallel(output_layouts=between)
            if sequence_parallel:
                for norm in ("norm1", "norm2"):
                    plan[f"{block}.{norm}"] = SequenceParallel(use_local_output=True)
        if self.is_first and sequence_parallel:
            plan["embed_norm"] = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))
        if self.is_last and sequence_parallel:
            plan["encoded"] = PrepareModuleInput(**whole, use_local_output=True)
        if loss_parallel and self.embed is not None:
            plan["embed"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
        if loss_parallel and self.is_last:
            plan["head"] = PrepareModuleInputOutput(
                input_layouts=(Replicate(), None, Replicate(), None),
                desired_input_layouts=(Replicate(), None, Shard(0), None),
                output_layouts=Replicate(),
                desired_output_layouts=Replicate(),
            )
        return plan

    def pipeline_split(self, low: int, high: int) -> Bert:
        """Keep the layers from `low` to before `high`, with the ends that belong to them, and drop the rest.

        Names stay. The tied weight is on both ends; a stage that is not the last ignores the targets.
        """
        for i in list(self.layers):
            if not low <= int(i) < high:
                del self.layers[i]
        self.is_first, self.is_last = low == 0, high == self.num_layers
        if not self.is_first:
            self.positions = self.segments = self.embed_norm = None
        if not self.is_last:
            if self.task == "mlm":
                self.transform = self.transform_norm = self.output_bias = None
            else:
                self.pooler = self.classifier = None
        if not (self.is_first or (self.is_last and self.task == "mlm")):
            self.embed = None
        return self

    def flops_per_sample(self) -> float:
        """FLOPs (forward, backward) of one sequence: 6 per GEMM weight, 12·layers·dim·length per token for attention.

        The head is computed only for predicted tokens (15%, as published), or once per sample.
        """
        layers = self.num_layers * (12 * self.dim**2 + 9 * self.dim)  # with their 9·dim biases
        tokens = self.seq_len * (6.0 * layers + 12.0 * self.num_layers * self.dim * self.seq_len)
        if self.task == "mlm":
            return tokens + 6.0 * round(MASKED * self.seq_len) * (self.dim**2 + self.dim * self.vocab_size)
        return tokens + 6.0 * (self.dim**2 + self.dim * self.num_classes)
