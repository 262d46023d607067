"""Choose a token per row of logits, with settings of its own for each row: in one batch, on the device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

COLDEST = 1e-6  # a lower temperature is greedy: dividing by it would overflow fp32
PARTS = 128  # of a row's logits, each a reduction of its own


def greedy(logits: Tensor) -> Tensor:
    return logits.argmax(dim=-1)


def greedy_in_parts(logits: Tensor) -> Tensor:
    """The same in two passes: on a GPU one row is too little work for one."""
    parts = F.pad(logits, (0, -logits.shape[-1] % PARTS), value=float("-inf")).unflatten(-1, (PARTS, -1))
    values, places = parts.max(dim=-1)
    part = values.argmax(dim=-1, keepdim=True)
    return (part * parts.shape[-1] + places.gather(-1, part)).squeeze(-1)


def choose(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, draws: Tensor) -> Tensor:
    """Return one token per row of logits [batch, vocabulary]: the likeliest at temperature 0, else a random one.

    `top_k` likeliest tokens take part, and of them the fewest that have `top_p` of the probability. `draws`, one number
    in [0, 1) per row, is all the randomness: a row's token depends on nothing outside of the row.
    """
    ordered, tokens = logits.sort(dim=-1, descending=True, stable=True)
    shares = (ordered / temperature.clamp(min=COLDEST)[:, None]).softmax(dim=-1)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    shares = shares * (rank < top_k[:, None])
    before = shares.cumsum(dim=-1) - shares
    shares = shares * (before < top_p[:, None] * shares.sum(dim=-1, keepdim=True))
    shares[:, 0].clamp_(min=1e-30)  # top_p = 0 still leaves the likeliest
    reached = shares.cumsum(dim=-1)
    taken = (shares > 0).sum(dim=-1, keepdim=True) - 1
    place = (reached <= draws[:, None] * reached[:, -1:]).sum(dim=-1, keepdim=True).clamp(max=taken)
    return torch.where(temperature < COLDEST, logits.argmax(dim=-1), tokens.gather(1, place)[:, 0])


def log_probabilities(logits: Tensor, chosen: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the chosen tokens' log probabilities, and those of the `most` likeliest tokens, with the tokens."""
    logs = logits.log_softmax(dim=-1)
    values, tokens = logs.topk(min(most, logs.shape[-1]), dim=-1)
    return logs.gather(1, chosen[:, None])[:, 0], values, tokens
