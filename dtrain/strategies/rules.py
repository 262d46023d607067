"""The rules of strategies and the arithmetic of pipeline stages: known before the launch, without torch."""

from __future__ import annotations


def stages_of_rank(rank: int, pp: int, schedule: str, stages_per_rank: int) -> tuple[list[int], int]:
    """The stages that a pipeline rank holds, and how many there are in all.

    interleaved_1f1b deals them out in turns; zbv goes down the ranks and up again, so that a micro-batch ends where it
    began.
    """
    if schedule == "zbv":
        return [rank, 2 * pp - 1 - rank], 2 * pp
    if schedule == "interleaved_1f1b":
        return [rank + i * pp for i in range(stages_per_rank)], stages_per_rank * pp
    return [rank], pp


def balance(layers: list[int], first: int, last: int, num_stages: int) -> list[tuple[int, int]]:
    """Cut layers of these sizes into stages such that the largest is smallest; the ends weigh something beside them."""
    costs = [*layers]
    costs[0] += first
    costs[-1] += last
    # best[n][i]: the smallest possible largest stage when the first i layers make n stages, and where the last begins
    best: list[list[tuple[float, int]]] = [[(0.0 if i == 0 else float("inf"), 0) for i in range(len(costs) + 1)]]
    for n in range(1, num_stages + 1):
        row = []
        for i in range(len(costs) + 1):
            cuts = [(max(best[n - 1][j][0], sum(costs[j:i])), j) for j in range(n - 1, i)]
            row.append(min(cuts, default=(float("inf"), 0)))
        best.append(row)
    bounds, end = [], len(costs)
    for n in range(num_stages, 0, -1):
        begin = best[n][end][1]
        bounds.append((begin, end))
        end = begin
    return bounds[::-1]
