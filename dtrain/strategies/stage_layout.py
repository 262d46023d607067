"""Which layers and stages a pipeline rank has. The planner and the checks use it, so it does not import torch."""

from __future__ import annotations

import itertools

MOST_PASSES = 8  # micro-batches in a captured step: a graph of more has many thousand kernels and gains less


def stages_of_rank(rank: int, pp: int, schedule: str, stages_per_rank: int) -> tuple[list[int], int]:
    """Return the stages that a pipeline rank holds, and the total number of stages.

    interleaved_1f1b assigns them round-robin. zbv goes down the ranks and back up, so a micro-batch ends on the rank
    where it began.
    """
    if schedule == "zbv":
        return [rank, 2 * pp - 1 - rank], 2 * pp
    if schedule == "interleaved_1f1b":
        return [rank + i * pp for i in range(stages_per_rank)], stages_per_rank * pp
    return [rank], pp


def balance(layers: list[int], first: int, last: int, num_stages: int) -> list[tuple[int, int]]:
    """Split layers of these sizes to minimize the largest stage; `first` and `last` are extra sizes at the ends."""
    costs = [*layers]
    costs[0] += first
    costs[-1] += last
    before = [0, *itertools.accumulate(costs)]  # prefix sums: a stage's cost is one subtraction
    # best[n][i]: smallest possible largest stage if the first i layers make n stages, and where the last one begins
    best: list[list[tuple[float, int]]] = [[(0.0 if i == 0 else float("inf"), 0) for i in range(len(costs) + 1)]]
    for n in range(1, num_stages + 1):
        row = []
        for i in range(len(costs) + 1):
            cuts = [(max(best[n - 1][j][0], before[i] - before[j]), j) for j in range(n - 1, i)]
            row.append(min(cuts, default=(float("inf"), 0)))
        best.append(row)
    bounds, end = [], len(costs)
    for n in range(num_stages, 0, -1):
        begin = best[n][end][1]
        bounds.append((begin, end))
        end = begin
    return bounds[::-1]
