"""Each kind of fault in a real launch: `dtrain why` gives its cause and its rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dtrain.commands import chaos
from dtrain.commands.chaos import inject
from dtrain.faults.inject import FAULTS
from dtrain.faults.kinds import KINDS, Fault, memory_cgroup
from dtrain.runs.record import Record
from tests.world import SMALL

LAYOUTS = {"ddp": 3, "fsdp": 3, "tensor": 4, "pipeline": 2}
GRID = [(kind, strategy) for kind, of in KINDS.items() for strategy in of.strategies or LAYOUTS]


@pytest.mark.parametrize("kind, strategy", GRID, ids=lambda value: str(value))
def test_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, strategy: str) -> None:
    if KINDS[kind].needs_cgroup and not memory_cgroup():
        pytest.skip("no cgroup can be written to here")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(chaos, "LONGEST_S", 240.0)
    settings = [f"strategy={strategy}", f"cluster.processes={LAYOUTS[strategy]}", "train.global_batch_size=24"]
    settings += ["train.steps=30", "checkpoint.every=5", "guard.replicas_every=5"]
    fault = Fault(kind, LAYOUTS[strategy] - 1, 11)
    result = inject(fault, tmp_path / "run", [*SMALL, *settings], tmp_path)
    assert result.right, (result, (tmp_path / "run.txt").read_text())


def test_every_kind_has_an_injector() -> None:
    assert FAULTS.keys() == KINDS.keys()
    assert len(KINDS) >= 24


def test_what_cannot_be_injected_is_refused(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    for target, size, words in (("slurm.Slurm", 2, "cluster=local"), ("local.Local", 1, "at least 2 ranks")):
        cluster = {"_target_": f"dtrain.launch.{target}"}
        (run_dir / "launch.json").write_text(json.dumps({"launches": [{"cluster": cluster}]}))
        (run_dir / "summary.json").write_text(json.dumps({"status": "done", "world_size": size}))
        with pytest.raises(ValueError, match=words):
            chaos.main([str(run_dir)])
    with pytest.raises(ValueError, match="there is no such fault"):
        chaos.main([str(run_dir), "--kinds", "earthquake"])


def test_a_run_folder_chooses_no_code(tmp_path: Path) -> None:
    """Overrides of launch.json become a command line, so modules that they name must be named by the user."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    words = ["strategy=ddp", "model=evil.Net", "train.steps=9", "trust=[evil]", "--config-dir=/tmp/x", "optim.lr=1"]
    cluster = {"_target_": "dtrain.launch.local.Local"}
    (run_dir / "launch.json").write_text(json.dumps({"launches": [{"cluster": cluster, "overrides": words}]}))
    record = Record.read(run_dir)
    with pytest.raises(ValueError, match=r"'trust=\[evil\]'"):
        chaos.own_overrides(record, [])
    kept = ["strategy=ddp", "model=evil.Net", "optim.lr=1"]
    assert chaos.own_overrides(record, ["evil"]) == [*kept, "trust=[evil]"]
    record.launch["overrides"] = ["model._target_=os.system"]
    with pytest.raises(ValueError, match=r"'trust=\[os\]'"):
        chaos.own_overrides(record, [])
