"""checkpoint.peer=true is refused before the start where /dev/shm has no room."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dtrain.commands.verify import compare
from dtrain.launch.resolve import resolve
from dtrain.plan import peer_memory
from dtrain.train.build import make


def config(*overrides: str) -> dict[str, Any]:
    return resolve(compare.compose(["cluster.processes=1", *overrides]))


CASES = {"gpt2-tiny": [[], ["optim=sgd"], ["precision=bf16-pure"]], "llama-tiny": [["lora.rank=4"]]}


@pytest.mark.parametrize("model, more", [(model, more) for model, all_of in CASES.items() for more in all_of])
def test_the_bytes_are_those_of_the_state(model: str, more: list[str]) -> None:
    cfg = compare.compose(["cluster.processes=1", f"model={model}", *more])
    trained = sum(p.numel() for p in make(cfg).parameters() if p.requires_grad)
    size = torch.bfloat16.itemsize if "precision=bf16-pure" in more else 4
    assert peer_memory.checkpoint_bytes(config(f"model={model}", *more)) == trained * size * (
        2 if more == ["optim=sgd"] else 3
    )


def test_a_full_memory_is_refused_with_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    large = config("model=llama-70b", "checkpoint.peer=true")
    with pytest.raises(ValueError, match=r"checkpoint.peer.*need .* GiB, and /dev/shm has") as raised:
        peer_memory.check_copies(large)
    assert "fix: " in str(raised.value) and "checkpoint.peer=false" in str(raised.value)
    peer_memory.check_copies(config("model=llama-70b"))
    peer_memory.check_copies(config("checkpoint.peer=true"))
    monkeypatch.setattr(peer_memory, "SHARED_MEMORY", Path("/no/such/place"))
    with pytest.raises(ValueError, match=r"checkpoint.peer=True"):
        peer_memory.check_copies(config("checkpoint.peer=true"))


def test_copies_between_saves_need_copies() -> None:
    with pytest.raises(ValueError, match=r"checkpoint.peer_every=5: copies in memory are off"):
        from dtrain.checks.validate import validate

        validate(config("checkpoint.peer_every=5"))
