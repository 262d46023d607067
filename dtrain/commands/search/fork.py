"""Fork a run: a new run folder that continues from a checkpoint of another run, for PBT's exploit."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from pathlib import Path

from dtrain.runs.folder import write_json


def fork(donor: Path, steps: int, target: Path) -> None:
    """Make `target` a run folder with the donor's checkpoint of this step, its settings and its metrics.

    A resume of `target` starts with the donor's weights, optimizer state, random state and data position. The files of
    tensors are hard links where the file system has them: a checkpoint is never written to again. The folder appears
    whole, by one rename, so it can be made again after a kill at any time.
    """
    from dtrain.checkpoint import manifest  # imports numpy, which no other search needs

    if target.exists():
        return
    unfinished, name = target.with_name(f".{target.name}"), f"step-{steps:08d}"
    shutil.rmtree(unfinished, ignore_errors=True)
    checkpoint = unfinished / "checkpoints" / name
    shutil.copytree(donor / "checkpoints" / name, checkpoint, copy_function=link_or_copy)
    # an id of its own: trackers and copies in memory tell runs apart by it, and a checkpoint must have its run's
    own_id = uuid.uuid4().hex
    values = json.loads((checkpoint / "manifest.json").read_text())
    (checkpoint / "manifest.json").unlink()  # a hard link: writing to it would change the donor's
    manifest.write(checkpoint, values | {"run": own_id})
    (unfinished / "checkpoints" / "latest").write_text(name + "\n")
    for file in ("config.yaml", "metrics.jsonl"):
        shutil.copy2(donor / file, unfinished / file)
    forked = {"run": donor.name, "steps": steps}
    write_json(unfinished / "launch.json", {"id": own_id, "forked_from": forked, "launches": []})
    unfinished.chmod(0o700)
    os.rename(unfinished, target)


def link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
