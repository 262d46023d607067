"""What NCCL's log says about the network it took."""

from __future__ import annotations

from typing import Any

import pytest

from dtrain.preflight.nccl_log import chosen, direct, inside, mismatch

HEAD = "node1:4711:4790 [0] NCCL INFO "
IB = f"""\
{HEAD}NCCL_IB_HCA set to =mlx5_0,mlx5_1
{HEAD}NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB ib0:10.0.0.1<0>
{HEAD}Using network IB
{HEAD}Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
{HEAD}Channel 00/0 : 15[7] -> 0[0] [receive] via NET/IB/0/GDRDMA
{HEAD}Channel 00/0 : 7[7] -> 8[0] [send] via NET/IB/1/GDRDMA
"""
FELL_BACK = f"""\
{HEAD}NET/IB : No device found.
{HEAD}NET/Socket : Using [0]eth0:10.128.0.2<0>
{HEAD}Using network Socket
{HEAD}Channel 00/0 : 0[0] -> 8[0] [send] via NET/Socket/0
{HEAD}Channel 01 : 0[0] -> 1[1] via SHM/direct/direct
"""
EFA = f"""\
{HEAD}NET/OFI Initializing aws-ofi-nccl 1.14.0
{HEAD}NET/OFI Selected provider is efa, fabric is efa (found 4 nics)
{HEAD}Using network AWS Libfabric
{HEAD}Channel 03/0 : 0[0] -> 8[0] [send] via NET/AWS Libfabric/3/GDRDMA
"""
NEWER = f"{HEAD}Initialized NET plugin Socket\n{HEAD}Assigned NET plugin Socket to comm\n"
GIB = f"{HEAD}NET/gIB : Initializing gIB v1.0.5\n{HEAD}Using network gIB\n"
ONE_NODE = f"{HEAD}Using network IB\n{HEAD}Channel 00/0 : 0[0] -> 1[1] via P2P/IPC\n"


def config(transport: str | None) -> dict[str, Any]:
    return {"cluster": {"fabric": {"transport": transport}}}


@pytest.mark.parametrize(
    ("text", "network"),
    [(IB, "ib"), (FELL_BACK, "socket"), (EFA, "efa"), (NEWER, "socket"), (GIB, "gib"), (ONE_NODE, "ib"), ("", None),
     ("loss 3.2\nvia NET/IB in a sentence", None), (IB + FELL_BACK, "socket")],
)  # fmt: skip
def test_the_chosen_network(text: str, network: str | None) -> None:
    assert chosen(text) == network


def test_the_way_inside_a_node() -> None:
    assert inside(IB) == "P2P" and inside(FELL_BACK) == "SHM" and inside(EFA) is None
    assert direct(IB) and direct(EFA) and not direct(FELL_BACK)


def test_what_was_asked_for_and_not_used() -> None:
    said = mismatch(config("ib"), FELL_BACK)
    assert said and said.startswith("InfiniBand requested (cluster.fabric.transport=ib), sockets used")
    assert "NET/IB : No device found." in said and "\n  fix: " in said
    said = mismatch(config("efa"), FELL_BACK)
    assert said and said.startswith("EFA requested") and "aws-ofi-nccl" in said
    assert "InfiniBand used" in (mismatch(config("socket"), IB) or "")


@pytest.mark.parametrize(
    ("asked", "text"), [("ib", IB), ("ib", GIB), ("efa", EFA), ("socket", NEWER), (None, FELL_BACK), ("ib", "")]
)
def test_nothing_is_said_when_all_is_well_or_unknown(asked: str | None, text: str) -> None:
    assert mismatch(config(asked), text) is None
    assert mismatch({"cluster": {}}, text) is None
