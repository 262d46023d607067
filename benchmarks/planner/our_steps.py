"""Our own measured steps as rows, beside the published ones: benchmarks/results/planner-h200.json.

Only steps of one real rank: those of a fake process group say nothing, and so take no time to say it. And only of
hosts whose launch cost was measured, beside the row or for all of them (calibrate-h200.json): it differs by a third
between hosts, and decides small steps.
"""

from __future__ import annotations

import json
from pathlib import Path

from compare import compiled, layout_for, name_of, shape_for
from rows import ROOT, Row

RESULTS = ROOT / "benchmarks" / "results" / "planner-h200.json"
SOURCE = "dtrain_h200"


def read_own(path: Path = RESULTS) -> list[Row]:
    """Every measured step, as one row of its own group: other layouts of the same batch are compared with it."""
    rows = []
    for record in json.loads(path.read_text())["rows"]:
        if not record.get("step_s") or record["world_size"] > 1:
            continue
        if record.get("superseded") or (record.get("step_aside") and not record.get("launch_us")):
            continue
        layout = layout_for(record)
        batch, how = f"batch {layout.global_batch_size}", f"compile={compiled(record)}{' fast' * ('layout' in record)}"
        rows.append(
            Row(
                source=SOURCE,
                label=name_of(record),
                shape=shape_for(record["model"], record.get("words", [])),
                layout=layout,
                hardware="h200",
                nodes=1,
                gpus=1,
                stack="dtrain",
                step_s=record["step_s"],
                group=f"{SOURCE} {record['model']} {record['precision']} {how} x1 {batch}",
                launch_us=record.get("launch_us"),
            )
        )
    return rows
