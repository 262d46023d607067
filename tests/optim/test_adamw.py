"""AdamW's moments in fp32, bf16 and int8: what is held how, and that all layouts round alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtrain.optim import adamw as module
from dtrain.optim.adamw import AdamW, Moments
from dtrain.optim.build import adamw
from dtrain.strategies.optimizer_state import init_optimizer_state
from dtrain.util.dtensor import whole
from tests.world import losses, make_run, spawn, train

SHAPES = {"matrix": (64, 96), "odd": (100, 60), "bias": (5000,), "kernel": (64, 16, 3, 3), "small": (8, 32)}
HELD = {  # dtype of each first moment
    None: dict.fromkeys(SHAPES, None),
    "fp32": dict.fromkeys(SHAPES, torch.float32),
    "bf16": dict.fromkeys(SHAPES, torch.float32) | dict.fromkeys(("matrix", "odd", "kernel"), torch.bfloat16),
    "int8": dict.fromkeys(SHAPES, torch.float32) | {"matrix": torch.int8},
}


def parameters(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for name, s in shapes.items()}


def gradient(name: str, step: int, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + len(name))
    return torch.randn(shape, generator=generator) * torch.logspace(-3, 0, shape[-1])


def make(named: dict[str, nn.Parameter], state: Moments | None) -> AdamW:
    optimizer = adamw(named.items(), lr=1e-2, betas=[0.9, 0.99], state=state)
    optimizer.seed = 2**33 + 5
    return optimizer


def stepped(named: dict[str, nn.Parameter], state: Moments | None, steps: int = 3) -> AdamW:
    optimizer = make(named, state)
    for step in range(steps):
        for name, p in named.items():
            p.grad = gradient(name, step, tuple(p.shape)).to(p.dtype)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state", HELD)
def test_which_moments_are_held_how(state: Moments | None, dtype: torch.dtype) -> None:
    named = parameters(SHAPES, dtype)
    optimizer = stepped(named, state)
    for name, p in named.items():
        slots = optimizer.state[p]
        assert slots["exp_avg"].dtype == (HELD[state][name] or dtype)
        second = {torch.int8: torch.uint8}.get(slots["exp_avg"].dtype, slots["exp_avg"].dtype)
        assert slots["exp_avg_sq"].dtype == second
        assert ("exp_avg_scale" in slots) == ("exp_avg_sq_scale" in slots) == (second == torch.uint8)
        assert slots["step"].item() == 3 and slots["step"].dtype == torch.float32
    if state == "int8":
        assert optimizer.state[named["matrix"]]["exp_avg_scale"].shape == (64, 3)


def test_fp32_beside_fp32_is_torchs_own_step() -> None:
    ours, theirs = (parameters(SHAPES) for _ in range(2))
    stepped(ours, "fp32")
    stepped(theirs, None)
    assert all(torch.equal(ours[name], theirs[name]) for name in SHAPES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_are_near_those_of_fp32(dtype: torch.dtype) -> None:
    exact, *others = (parameters(SHAPES, dtype) for _ in range(3))
    stepped(exact, "fp32", 20)
    for state, named in zip(("bf16", "int8"), others, strict=True):
        stepped(named, state, 20)  # type: ignore[arg-type]
        moved = (exact["matrix"].float() - parameters(SHAPES, dtype)["matrix"].float()).norm()
        apart = (exact["matrix"].float() - named["matrix"].float()).norm() / moved
        assert apart < (0.06 if dtype == torch.float32 else 0.2), state


@pytest.mark.parametrize("state", ["bf16", "int8"])
def test_an_update_in_pieces_has_the_same_bits(state: Moments, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for piece in (64, module.PIECE):
        monkeypatch.setattr(module, "PIECE", piece)
        named = parameters(SHAPES)
        named["strided"] = nn.Parameter(parameters({"s": (96, 64)})["s"].detach().t())  # not contiguous
        optimizer = stepped(named, state)
        results.append([t for p in named.values() for t in (p.detach(), *optimizer.state[p].values())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_state_that_is_created_early_is_that_of_the_first_step() -> None:
    early, late = parameters(SHAPES), parameters(SHAPES)
    optimizer = make(early, "int8")
    init_optimizer_state(optimizer)
    slots = optimizer.state[early["matrix"]]
    assert not any(t.any() for t in slots.values()) and slots["exp_avg"].dtype == torch.int8
    for name, p in early.items():
        p.grad = gradient(name, 0, tuple(p.shape))
    optimizer.step()
    other = stepped(late, "int8", 1)
    for name in SHAPES:
        pairs = [(early[name], late[name]), *((t, other.state[late[name]][k])
                                              for k, t in optimizer.state[early[name]].items())]  # fmt: skip
        assert all(torch.equal(a, b) for a, b in pairs)


def dtypes_in(run: Path) -> set[str]:
    newest = max((run / "checkpoints").glob("step-*"))
    tensors = json.loads((newest / "manifest.json").read_text())["tensors"]
    return {spec["dtype"] for name, spec in tensors.items() if name.endswith("up.weight.exp_avg")}


def test_a_run_may_change_how_its_moments_are_held(tmp_path: Path) -> None:
    words = ("cluster.processes=1", "train.steps=20", "train.log_every=1")
    for stop, state in ((5, "int8"), (10, "fp32"), (15, "int8")):
        run = make_run(tmp_path / "run", *words, f"optim.state={state}", f"train.stop_after={stop}")
        assert train(run, 1) == [0]
        assert dtypes_in(run) == {{"int8": "int8", "fp32": "float32"}[state]}
    one = make_run(tmp_path / "one", *words, "train.stop_after=15")
    assert train(one, 1) == [0]
    passed, straight = losses(tmp_path / "run"), losses(one)
    assert passed.keys() == straight.keys() and passed != straight
    assert max(abs(passed[s] - straight[s]) for s in straight) < 2e-3


# ---- parts of weights ----------------------------------------------------------------------------------------

WEIGHTS = {"rows": (65, 64), "columns": (64, 128), "both": (130, 128), "plain": (64, 64)}


def shards(state: Moments) -> None:
    """Each weight is sharded in a way of its own, over 2 × 2 ranks; the update of all parts is that of the whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    places: dict[str, list[Any]] = {
        "rows": [Shard(0), Replicate()], "columns": [Replicate(), Shard(1)], "both": [Shard(0), Shard(1)],
        "plain": [Replicate(), Replicate()],
    }  # fmt: skip
    ours, theirs = parameters(WEIGHTS), parameters(WEIGHTS)
    held = {name: nn.Parameter(distribute_tensor(p.detach(), mesh, places[name])) for name, p in ours.items()}
    # a pipeline's rank has some of the weights only
    mine = {name: p for name, p in held.items() if name != "plain" or dist.get_rank() > 1}
    optimizer, reference = make(mine, state), stepped(theirs, state)
    for step in range(3):
        for name, p in mine.items():
            p.grad = distribute_tensor(gradient(name, step, WEIGHTS[name]), mesh, places[name], src_data_rank=None)
        optimizer.step()
    for name, p in mine.items():
        slots = optimizer.state[p]
        assert all(isinstance(t, DTensor) for key, t in slots.items() if key != "step")
        if name == "plain":
            pairs = [(p.to_local(), theirs[name])]  # type: ignore[attr-defined]
        else:
            pairs = [(whole(p), theirs[name])]
            pairs += [(whole(t), reference.state[theirs[name]][key]) for key, t in slots.items()]
        for a, b in pairs:
            assert a.dtype == b.dtype and torch.equal(a, b), name


def every_state() -> None:
    for state in ("bf16", "int8"):
        shards(state)  # type: ignore[arg-type]


def test_parts_are_updated_as_the_whole_is() -> None:
    spawn(4, every_state)


def cut_blocks() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    weight = nn.Parameter(distribute_tensor(torch.zeros(128, 96), mesh, [Shard(1)]))
    with pytest.raises(ValueError, match=r"optim\.state=int8: a rank has 48 of the 96 columns.*\n  fix: a smaller"):
        init_optimizer_state(make({"weight": weight}, "int8"))


def test_a_rank_refuses_to_cut_a_block() -> None:
    spawn(2, cut_blocks)


def test_numbers_are_those_of_the_names() -> None:
    """A stage that begins with another weight rounds each as the whole model does."""
    named = parameters({"a": (64, 64), "b": (64, 64)})
    both, one = stepped(named, "int8"), {"b": parameters({"a": (64, 64), "b": (64, 64)})["b"]}
    stepped(one, "int8")
    assert torch.equal(one["b"], named["b"]) and len(set(both.numbers.values())) == 2
