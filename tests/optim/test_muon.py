"""Muon is torch.optim.Muon on one rank, and so it is where ranks hold parts of a matrix."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dtrain.optim.build import adamw, muon
from dtrain.optim.groups import hidden_matrices
from dtrain.optim.muon import Muon, lr_factor
from dtrain.optim.newton_schulz import orthogonalize
from dtrain.optim.owners import Owners, Piece
from dtrain.strategies.optimizer_state import init_optimizer_state
from tests.world import spawn

SHAPES = ((64, 64), (192, 64), (64, 256))


def matrices(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(0.1 * torch.randn(shape, generator=generator)) for shape in SHAPES]


def named(parameters: list[nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    return [(f"layers.{i}.weight", p) for i, p in enumerate(parameters)]


@pytest.mark.parametrize("adjust_lr", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_it_is_torchs(adjust_lr: str, nesterov: bool) -> None:
    ours, theirs = matrices(), matrices()
    settings = {"lr": 2e-2, "weight_decay": 0.2, "momentum": 0.9, "nesterov": nesterov}
    optimizer = muon(named(ours), adamw_betas=[0.9, 0.95], ns_dtype="bfloat16", adjust_lr=adjust_lr, **settings)  # type: ignore[arg-type]
    reference = torch.optim.Muon(theirs, adjust_lr_fn=adjust_lr, **settings)
    for _ in range(10):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        optimizer.step()
        reference.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=0)
        momenta = optimizer.state[p]["momentum_buffer"], reference.state[q]["momentum_buffer"]
        torch.testing.assert_close(*momenta, atol=1e-6, rtol=0)


def test_a_stack_is_its_matrices_and_singular_values_are_near_one() -> None:
    x = torch.randn(3, 40, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    stack = orthogonalize(x, 5)
    for i in range(3):
        torch.testing.assert_close(stack[i], orthogonalize(x[i], 5))
    values = torch.linalg.svdvals(stack)
    assert values.max() < 1.3 and values.min() > 0.5
    assert torch.equal(orthogonalize(torch.zeros(4, 3), 5), torch.zeros(4, 3))


def test_everything_else_is_adamws_to_the_bit() -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = {"embed.weight": (10, 4), "layers.0.up.weight": (8, 4), "layers.0.up.bias": (8,), "norm.weight": (4,)}
    first = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    models = [{name: nn.Parameter(values.clone()) for name, values in first.items()} for _ in range(2)]
    ours = muon(models[0].items(), lr=1e-3, adamw_lr=1e-2, adamw_betas=[0.8, 0.9], adamw_weight_decay=0.3)
    theirs = adamw(models[1].items(), lr=1e-2, betas=[0.8, 0.9], weight_decay=0.3)
    assert {group["peak_lr"] for group in ours.param_groups} == {1e-3, 1e-2}
    for _ in range(3):
        for name, p in models[0].items():
            p.grad = torch.randn(p.shape, generator=generator)
            models[1][name].grad = p.grad.clone()
        ours.step_if(torch.tensor(True), torch.tensor(0.5))
        theirs.step_if(torch.tensor(True), torch.tensor(0.5))
    for name, p in models[0].items():
        assert torch.equal(p, models[1][name]) == (name != "layers.0.up.weight"), name


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    parameters = matrices()
    optimizer = muon(named(parameters), lr=1e-2, adamw_betas=[0.9, 0.95])
    before = [p.detach().clone() for p in parameters]
    for p in parameters:
        p.grad = torch.full_like(p, torch.nan)
    optimizer.step_if(torch.tensor(False), torch.tensor(torch.nan))
    assert all(torch.equal(p, q) for p, q in zip(parameters, before, strict=True))
    assert not any(state["momentum_buffer"].any() for state in optimizer.state.values())


def test_state_that_is_created_early_is_zero_and_moves_nothing() -> None:
    parameters = matrices()
    before = [p.detach().clone() for p in parameters]
    optimizer = muon(named(parameters), lr=1e-2, adamw_betas=[0.9, 0.95])
    init_optimizer_state(optimizer)
    assert all(torch.equal(p, q) for p, q in zip(parameters, before, strict=True))
    assert [list(optimizer.state[p]) for p in parameters] == [["momentum_buffer"]] * 3


def test_which_matrices() -> None:
    shapes = {
        "embed.weight": (10, 4),
        "layers.0.up.weight": (8, 4),
        "layers.0.conv.weight": (2, 2, 2, 2),
        "head": (4, 4),
    }
    parameters = [(name, nn.Parameter(torch.zeros(shape))) for name, shape in shapes.items()]
    assert hidden_matrices(parameters, None) == {"layers.0.up.weight"}
    assert hidden_matrices(parameters, ["head"]) == {"head"}
    with pytest.raises(ValueError, match="no trained weight"):
        hidden_matrices(parameters, ["*.conv.*"])  # not a matrix
    assert lr_factor("original", (8, 2)) == 2 and lr_factor("original", (2, 8)) == 1 == lr_factor("none", (8, 2))


# ---- together ------------------------------------------------------------------------------------------------


def halves(rank: int, whole: torch.Tensor, axis: int) -> tuple[torch.Tensor, Piece, int]:
    part = whole.tensor_split(2, axis)[rank]
    offset = [0, 0]
    offset[axis] = rank * whole.tensor_split(2, axis)[0].shape[axis]
    return part, Piece("", tuple(whole.shape), (offset[0], offset[1]), tuple(part.shape)), axis


def compute_together(out: Path) -> None:
    """One matrix is cut by rows, one by columns, one is a copy on each rank, one is only on rank 1."""
    rank = dist.get_rank()
    held: dict[str, tuple[torch.Tensor, Piece]] = {}
    wholes = [p.detach() for p in (*matrices(), *matrices(1))]
    for i, axis in enumerate((0, 1)):
        part, piece, _ = halves(rank, wholes[i], axis)
        held[str(i)] = part, Piece(str(i), piece.whole, piece.offset, piece.shape)
    held["2"] = wholes[2], Piece("2", tuple(wholes[2].shape), (0, 0), tuple(wholes[2].shape))
    if rank == 1:
        held["3"] = wholes[3], Piece("3", tuple(wholes[3].shape), (0, 0), tuple(wholes[3].shape))
    owners = Owners([piece for _, piece in held.values()], torch.device("cpu"), torch.float32)
    found = owners.compute(
        {name: [part] for name, (part, _) in held.items()}, lambda many: [orthogonalize(one, 5) for one in many]
    )
    for name, (_, piece) in held.items():
        whole = orthogonalize(wholes[int(name)], 5)
        expected = whole[tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape, strict=True))]
        assert torch.equal(found[name][0], expected), (rank, name)
    assert set(owners.owner.values()) == {0, 1}, "the work is spread"
    (out / f"{rank}").touch()


def test_parts_meet_at_one_owner_and_return(tmp_path: Path) -> None:
    spawn(2, compute_together, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} >= {"0", "1"}


def test_a_whole_matrix_needs_no_other_rank() -> None:
    optimizer = muon(named(matrices()), lr=1e-2, adamw_betas=[0.9, 0.95])
    assert isinstance(optimizer, Muon) and optimizer.pieces is None
