"""The collectives of a trace: their kind, bytes and ranks; and on real ranks, who waits for whom."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dtrain.cli import main
from dtrain.config.build import build
from dtrain.config.run_file import load
from dtrain.profile import comm
from dtrain.report.run_data import communication
from dtrain.runs import comm_profile
from tests.world import make_run, metrics, summary, train


def gloo(kind: str, ts: float, shape: list[int], dtype: str = "float") -> dict[str, Any]:
    args = {"Input Dims": [shape], "Input type": [dtype]}
    return {"ph": "X", "name": f"gloo:{kind}", "ts": ts, "dur": 5.0, "args": args}


def nccl(name: str, ts: float, count: tuple[int, int], ranks: str) -> dict[str, Any]:
    args = {"Collective name": name, "In msg nelems": count[0], "Out msg nelems": count[1], "dtype": "BFloat16"}
    args["Process Group Ranks"] = ranks
    return {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_x", "ts": ts, "dur": 5.0, "args": args}


def rows(*events: dict[str, Any], groups: tuple[list[int], ...] = ([0, 1], [0])) -> list[tuple[str, int, list[int]]]:
    info = {"pg_config": [{"ranks": ranks} for ranks in groups]}
    found = comm.calls({"traceEvents": list(events), "distributedInfo": info}, 10.0, 20.0)
    return [(kind, size, list(found["groups"][group])) for kind, size, group, _, _ in found["calls"]]


def test_calls_of_gloo() -> None:
    inside = [gloo("all_gather", 12, [6]), gloo("all_reduce", 11, [3, 5])]
    vote = gloo("all_reduce", 13, [2], "double")
    outside = [gloo("all_reduce", 9, [3]), gloo("all_reduce", 20, [3])]
    assert rows(*inside, vote, *outside) == [("all_reduce", 60, [0, 1]), ("all_gather", 48, [0, 1])]
    several = rows(inside[1], groups=([0, 1, 2, 3], [0, 1]))
    assert several == [("all_reduce", 60, [])]  # of one of two groups: of which is not known


def test_calls_of_nccl() -> None:
    events = [
        nccl("allreduce", 11, (8, 8), "[0, 1, 2, 3]"),
        nccl("_allgather_base", 12, (8, 16), "[0, 2]"),
        nccl("_reduce_scatter_base", 13, (16, 8), "[1, 3]"),
    ]
    expected = [("all_reduce", 16, [0, 1, 2, 3]), ("all_gather", 32, [0, 2]), ("reduce_scatter", 32, [1, 3])]
    assert rows(*events) == expected


def test_two_ranks_one_of_them_late(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model._target_=tests.profile.slow_model.Slow", "trust=[tests]", "cluster.processes=2", "train.steps=14"]
    words += ["profile=torch", "profile.start=5", "profile.num_steps=2", "profile.ranks=[0,1]"]
    run = make_run(tmp_path / "run", *words)
    assert train(run, 2) == [0, 0]
    found = comm_profile.profile(run)
    assert found is not None and found["ranks"] == [0, 1] and found["num_steps"] == 2 and not found["problem"]
    row = max(found["messages"], key=lambda m: m["bytes"])
    weights = sum(
        p.numel() for p in build(load(run).model, ["tests"]).parameters()
    )  # with the padding of the vocabulary
    assert {"kind": "all_reduce", "bytes": 4 * weights, "ranks": 2, "per_step": 1.0}.items() <= row.items()
    assert 0 < row["own_ms"] < row["ms_per_step"] and row["bus_gb_s"] > 0
    longest = found["waits"][0]
    assert (longest["rank"], longest["for"]) == (0, 1) and longest["ms_per_step"] > 100
    assert sum((run / f"profiles/communication-rank-{r}.json").stat().st_size for r in (0, 1)) < 10_000

    (profiled,) = [m for m in metrics(run) if "profiled_comm_s" in m]
    assert profiled["step"] == 6 and 0 < profiled["profiled_exposed_comm_s"] <= profiled["profiled_comm_s"] + 1e-9
    assert summary(run)["profiled_comm_s"] == profiled["profiled_comm_s"]
    known = summary(run)["exposed_comm_s"]  # None on a busy machine
    assert known is None or 0 <= known < summary(run)["ranks"][0]["wait_s"]  # without the wait for rank 1
    assert all(m["exposed_comm_s"] >= 0 for m in metrics(run) if "exposed_comm_s" in m)

    (run / "launch.json").write_text("{}")
    assert main(["profile", str(run)]) == 0
    assert "rank 0 waits for rank 1: " in capsys.readouterr().out
    assert main(["profile", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["communication"] == found
    page = communication(run)
    assert page is not None and page["waits"][0].startswith("rank 0 waits for rank 1: ")
