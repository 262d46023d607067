"""For your own training script under `dtrain verify script=FILE`: what the loss and the gradients of a step were.

    import dtrain.check

    loss.backward()
    dtrain.check.step(loss, model)      # where the gradients are complete, before they are clipped and used
    optimizer.step()

Each rank calls it once for each update. It needs nothing but torch, and does nothing where dtrain does not verify.
DTensor (FSDP2) and DeepSpeed gradients are gathered, one parameter at a time. With `batch`, samples are compared, too.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from dtrain.runs.protocol import CHECK_FOLDER

SAMPLED = 512  # elements of each gradient that are compared one by one; all of them count in its norm
MOST_STEPS = 50  # later ones are not noted
WRAPPERS = re.compile(r"(^|\.)(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)(?=\.)")
_steps = 0


def step(loss: Any = None, model: Any = None, batch: Any = None) -> None:
    """Note this step: this rank's mean loss, the gradients of the model, and which samples the batch has."""
    global _steps
    folder = os.environ.get(CHECK_FOLDER)
    _steps += 1
    if not folder or _steps > MOST_STEPS:
        return
    import torch
    import torch.distributed as dist

    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else int(os.environ.get("RANK", "0"))
    note: dict[str, Any] = {"step": _steps, "rank": rank}
    if loss is not None:
        note["loss"] = float(loss.detach()) if isinstance(loss, torch.Tensor) else float(loss)
    if model is not None:
        note["gradients"] = {
            canonical(name): described(gradient)
            for name, p in model.named_parameters()
            if (gradient := whole_gradient(p)) is not None
        }
    if batch is not None:
        from dtrain.util.fingerprints import fingerprints

        note["samples"] = fingerprints(batch)
    with open(Path(folder) / f"rank-{rank}.jsonl", "a") as file:
        file.write(json.dumps(note) + "\n")


def canonical(name: str) -> str:
    """Return a parameter's name without what wrappers add to it."""
    return WRAPPERS.sub(r"\1", name).replace("..", ".").strip(".")


def whole_gradient(p: Any) -> Any:
    """Return a parameter's whole gradient; None if it has none. Collective where the gradient is sharded."""
    import torch

    if hasattr(p, "ds_id") or hasattr(p, "_hp_mapping"):
        from deepspeed.utils import safe_get_full_grad

        return safe_get_full_grad(p)
    gradient = p.grad
    full = getattr(gradient, "full_tensor", None)
    return full() if full is not None and not isinstance(gradient, torch.nn.Parameter) else gradient


def described(gradient: Any) -> list[Any]:
    """Return the norm, and some elements at equal distances."""
    flat = gradient.detach().reshape(-1)
    chosen = flat[:: max(1, flat.numel() // SAMPLED)][:SAMPLED]
    return [float(flat.double().norm()), *chosen.double().tolist()]
