"""The mesh: the axes multiply to the ranks, or a message says which change would make them."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.config.mesh import MeshSizes, resolve

AXES = ("pp", "dp", "tp")
sizes = st.integers(-3, 9)
good_sizes = st.integers(1, 9)
world_sizes = st.integers(1, 48)


def product(values: dict[str, int]) -> int:
    return values["pp"] * values["dp"] * values["tp"]


@given(world_sizes, sizes, sizes, sizes)
def test_resolve_gives_a_mesh_of_that_size_or_refuses(world: int, pp: int, dp: int, tp: int) -> None:
    asked = {"pp": pp, "dp": dp, "tp": tp}
    fits = [
        MeshSizes(p, d, t)
        for p in (range(1, world + 1) if pp == -1 else [pp])
        for t in (range(1, world + 1) if tp == -1 else [tp])
        for d in (range(1, world + 1) if dp == -1 else [dp])
        if min(p, d, t) >= 1 and p * d * t == world
    ]
    if fits:  # of several -1, tp is filled first, then pp
        assert resolve(world, **asked) == max(fits, key=lambda m: (m.tp if tp == -1 else 0, m.pp if pp == -1 else 0))
    else:
        with pytest.raises(ValueError, match="fix: ") as error:
            resolve(world, **asked)
        for axis, size in asked.items():
            assert f"strategy.{axis}={size}" in str(error.value)


@given(good_sizes, st.integers(1, 6), st.sampled_from([-1, 1, 2, 3, 4]))
def test_tensor_ranks_share_a_node(node_size: int, nodes: int, tp: int) -> None:
    try:
        sizes = resolve(nodes * node_size, node_size, tp=tp)
    except ValueError as error:
        assert nodes * node_size % tp or node_size % tp
        assert "\n  fix: " in str(error)
    else:
        assert node_size % sizes.tp == 0
        assert tp != -1 or sizes.tp == node_size, "-1 fills the node"


@given(good_sizes, good_sizes, good_sizes, st.sampled_from(AXES))
def test_the_fill_is_what_is_left(pp: int, dp: int, tp: int, axis: str) -> None:
    want = {"pp": pp, "dp": dp, "tp": tp}
    assert resolve(product(want), **(want | {axis: -1})).as_dict() == want


@given(world_sizes, good_sizes, st.one_of(st.just(-1), good_sizes), good_sizes)
def test_the_number_of_ranks_that_a_refusal_proposes_is_accepted(world: int, pp: int, dp: int, tp: int) -> None:
    try:
        resolve(world, None, pp, dp, tp)
    except ValueError as error:
        assert f"the number of ranks, {world}\n" in str(error)
        found = re.search(r"cluster\.processes=(\d+)", str(error))
        assert found
        assert resolve(int(found[1]), None, pp, dp, tp).world_size == int(found[1])


@given(sizes, sizes, sizes)
def test_following_the_fixes_leads_to_a_mesh(pp: int, dp: int, tp: int) -> None:
    """A user who does what the message says, and only that, ends with a mesh after at most four messages."""
    asked, world = {"pp": pp, "dp": dp, "tp": tp}, 12
    for _ in range(5):
        try:
            assert resolve(world, **asked).world_size == world
            return
        except ValueError as error:
            fix = str(error).split("fix: ")[1]
            ranks = re.search(r"cluster\.processes=(\d+)", fix)
            axis = re.match(r"strategy\.(\w+)=(-?\d+)$", fix)
            assert (ranks is None) != (axis is None), fix
            if ranks:
                world = int(ranks[1])
            elif axis:
                assert asked[axis[1]] != int(axis[2]), "the fix is what was asked already"
                asked[axis[1]] = int(axis[2])
    pytest.fail(f"still refused: {asked} with {world} ranks")


@given(world_sizes, good_sizes, st.one_of(st.just(-1), good_sizes), good_sizes, st.integers(2, 9))
def test_a_refusal_proposes_a_cp_that_is_accepted(world: int, pp: int, dp: int, tp: int, cp: int) -> None:
    try:
        assert resolve(world, None, pp, dp, tp, cp).cp == cp
    except ValueError as error:
        degrees = re.search(r"strategy\.(cp=(\d+) strategy\.)?dp=-1(?! with)", str(error).split("fix: ")[1])
        if world % (pp * tp):
            assert "pp, tp and cp whose product divides" in str(error)
        else:
            assert degrees and resolve(world, None, pp, -1, tp, int(degrees[2] or cp)).pp == pp
    with pytest.raises(ValueError, match=r"fix: strategy\.cp=2 strategy\.dp=-1, or cluster\.processes=3"):
        resolve(4, cp=3)


@pytest.mark.parametrize(("world", "node", "most"), [(8, 8, 8), (16, 8, 8), (16, 8, None)])
def test_more_tensor_ranks_than_a_node_has_are_refused_at_once(world: int, node: int, most: int | None) -> None:
    with pytest.raises(ValueError, match=r"the 8 ranks of a node\n  fix: strategy\.tp=8 cluster\.nodes=4$"):
        resolve(world, node, pp=4, tp=16, most=most)
    assert resolve(32, 8, pp=4, tp=8, most=most).dp == 1
    with pytest.raises(ValueError, match=r"fix: cluster\.nodes=4, or "):
        resolve(8, 8, pp=4, tp=8, most=8)  # not 32 ranks on the 8 GPUs


def test_a_mesh_in_words() -> None:
    assert str(MeshSizes(pp=2, dp=3, tp=4)) == "pp 2 × dp 3 × tp 4"
    assert MeshSizes(pp=2, dp=3, tp=4).as_dict() == {"pp": 2, "dp": 3, "tp": 4}


@pytest.mark.parametrize(
    ("batch_size", "fix"),
    [
        (32, "cluster.processes=3 train.global_batch_size=33"),
        (33, "cluster.processes=3"),
        (None, "cluster.processes=3"),
    ],
)
def test_the_ranks_that_a_refusal_proposes_divide_the_batch(batch_size: int | None, fix: str) -> None:
    with pytest.raises(ValueError, match=rf"or {fix}$"):
        resolve(2, dp=3, batch_size=batch_size)
