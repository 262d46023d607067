"""The collectives in a trace: kind, bytes, ranks, begin and end. dtrain.runs.comm_profile compares those of all ranks.

gloo's events are of its own threads, and NCCL's of the GPU's streams: both begin when the rank is ready for its part
and end when it has its result, so the time includes waiting for ranks that come later.
"""

from __future__ import annotations

import math
import re
from typing import Any

MOST_VOTE = 10_000  # elements of the loop's own all-reduce, the vote on stopping, which is float64
MOST_CALLS = 3000  # of a rank: about 150 kB
BYTES = {
    "double": 8, "long": 8, "int64": 8, "float": 4, "int": 4, "int32": 4, "half": 2, "bfloat16": 2, "c10::half": 2,
    "c10::bfloat16": 2,
}  # fmt: skip  # of a number; all others have 1
# names in NCCL's events → ours; gloo's are ours already
KINDS = {
    "allreduce": "all_reduce", "allgather": "all_gather", "_allgather_base": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather", "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter", "alltoall_base": "all_to_all",
}  # fmt: skip


def calls(trace: dict[str, Any], first: float, last: float) -> dict[str, Any]:
    """Return the collectives that begin between two times of a trace, by their begin: rows of kind, bytes, group, µs.

    Bytes are of the whole tensor: before a reduce-scatter, after an all-gather. gloo does not name the group of a call;
    it is known if all groups of this rank are the same.
    """
    info = trace.get("distributedInfo", {})
    known = {tuple(group["ranks"]) for group in info.get("pg_config", []) if len(group["ranks"]) > 1}
    only = next(iter(known)) if len(known) == 1 else ()
    base = trace.get("baseTimeNanoseconds", 0) / 1000
    groups: list[tuple[int, ...]] = []
    rows = []
    for event in trace["traceEvents"]:
        found = event.get("ph") == "X" and first <= event["ts"] < last and (_gloo(event) or _nccl(event))
        if not found:
            continue
        kind, count, dtype, group = found
        group = group or only
        if group not in groups:
            groups.append(group)
        if kind == "all_gather":
            count *= max(1, len(group))  # the event has this rank's part
        size = count * BYTES.get(dtype.lower(), 1)
        begin = base + event["ts"]
        rows.append([kind, size, groups.index(group), round(begin, 1), round(begin + event.get("dur", 0), 1)])
    rows.sort(key=lambda row: row[3])
    return {"host": trace.get("host_name", ""), "groups": groups, "calls": rows[:MOST_CALLS], "num_calls": len(rows)}


Found = tuple[str, int, str, tuple[int, ...]]  # kind, number of elements, dtype, ranks


def _gloo(event: dict[str, Any]) -> Found | None:
    if not event["name"].startswith("gloo:"):
        return None
    args = event.get("args", {})
    shapes, dtypes = args.get("Input Dims") or [[0]], args.get("Input type") or ["float"]
    count = sum(math.prod(shape) for shape in shapes)
    if dtypes[0] == "double" and count <= MOST_VOTE:
        return None
    return event["name"].removeprefix("gloo:"), count, dtypes[0], ()


def _nccl(event: dict[str, Any]) -> Found | None:
    args = event.get("args", {})
    if event.get("cat") != "kernel" or "nccl" not in event["name"] or "Collective name" not in args:
        return None
    kind = str(args["Collective name"])
    count = max(int(args.get("In msg nelems", 0)), 0 if "gather" in kind else int(args.get("Out msg nelems", 0)))
    ranks = tuple(int(rank) for rank in re.findall(r"\d+", str(args.get("Process Group Ranks", ""))))
    return KINDS.get(kind, kind), count, str(args.get("dtype", "")), ranks
