"""A traced run: each message is sent by one rank and received by the next, and the bytes are those of the formula."""

from __future__ import annotations

import json
from pathlib import Path

from dtrain.checkpoint import store
from dtrain.runs.folder import latest_checkpoint
from tests.world import make_run, train


def test_a_trace_has_every_message(tmp_path: Path) -> None:
    options = ("strategy=ring", "strategy.trace=2", "cluster.processes=3", "train.global_batch_size=6")
    run = make_run(tmp_path / "run", *options, "train.steps=3", "train.micro_batch_size=1")
    assert train(run, 3) == [0, 0, 0]
    lines = [(run / f"logs/ring-trace-{rank}.jsonl").read_text().splitlines() for rank in range(3)]
    traces = [[json.loads(line) for line in some] for some in lines]
    assert [[m["step"] for m in trace] for trace in traces] == [[1] * 4 + [2] * 4] * 3, (
        "two steps of 2 (3 - 1) messages"
    )
    for rank, trace in enumerate(traces):
        for message, next_one in zip(trace, traces[(rank + 1) % 3], strict=True):
            assert message["to"] == next_one["rank"] and next_one["from"] == message["rank"] == rank
    sent = sum(m["bytes"] for trace in traces for m in trace if m["step"] == 1)
    checkpoint = latest_checkpoint(run)
    assert checkpoint is not None
    values = sum(tensor.numel() for _, tensor in store.weights(checkpoint))
    assert sent == 3 * 2 * (3 - 1) / 3 * 4 * values
