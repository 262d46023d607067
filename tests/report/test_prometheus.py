"""What Prometheus is told about a run: the right values in base units, and nothing about damaged files."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.report import prometheus
from dtrain.report.prometheus import Collector
from tests.rundirs import HERE, LOCAL

client = pytest.importorskip("prometheus_client")
LINE = {
    "step": 40, "loss": 2.5, "lr": 1e-3, "grad_norm": 0.5, "tokens_per_s": 1000.0, "mfu": 0.4, "step_s": 0.25,
    "data_s": 0.01, "mem_gib": 2.0,
}  # fmt: skip
GPU = {
    "index": 3, "utilization_percent": 95, "memory_gib": 70.0, "memory_total_gib": 139.8, "power_w": 690.5,
    "power_limit_w": 700.0, "sm_clock_mhz": 1755, "temperature_c": 66, "throttle": ["power cap"], "ecc_errors": 0,
}  # fmt: skip
SYSTEM = {
    "time": 1.0, "cpu_percent": 50.0, "memory_gib": 4.0, "memory_total_gib": 16.0, "disk_read_mib_s": 1.0,
    "disk_write_mib_s": 2.0, "net_in_mib_s": 3.0, "net_out_mib_s": 4.0, "disk_free_gib": 100.0, "gpus": [GPU],
}  # fmt: skip


def make(run_dir: Path, *lines: dict[str, Any], status: str = "running") -> Path:
    """The folder of a run that this process has launched."""
    (run_dir / "logs").mkdir(parents=True)
    launch = {"cluster": LOCAL, "choices": {"strategy": "fsdp"}}
    write(run_dir / "launch.json", {"pid": os.getpid(), "host": HERE, "launches": [launch]})
    write(
        run_dir / "summary.json",
        {"status": status, "model": "gpt2", "precision": "bf16", "total_steps": 100, "world_size": 2},
    )
    append(run_dir / "metrics.jsonl", *(lines or [LINE]))
    return run_dir


def write(path: Path, values: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values))


def append(path: Path, *lines: Any) -> None:
    with open(path, "a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def text_of(collector: Collector) -> str:
    registry = client.CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return str(client.generate_latest(registry).decode())


def values_of(collector: Collector, scan: bool = True) -> dict[str, float]:
    """Value by `name` and its labels apart from run and strategy, as Prometheus would read them."""
    from prometheus_client.parser import text_string_to_metric_families

    if scan:
        collector.scan()
    found = {}
    for family in text_string_to_metric_families(text_of(collector)):
        for sample in family.samples:
            labels = [f"{k}={v}" for k, v in sorted(sample.labels.items()) if k not in ("run", "strategy")]
            found[" ".join([sample.name, *labels])] = sample.value
    return found


def test_values_in_base_units(tmp_path: Path) -> None:
    run = make(tmp_path / "run", {"step": 39, "val_loss": 3.0}, LINE, {"step": 40, "rank_own_s": [0.2, 0.25]})
    write(
        run / "plan.json", {"step_s": {"total": 0.2}, "tokens_per_s": 1250, "memory_gib": {"total": 1.5, "limit": 80}}
    )
    append(run / "attempts.jsonl", *({"event": "start", "time": 1000 + i, "step": 0} for i in range(3)))
    write(run / "checkpoints" / "step-00000030" / "manifest.json", {})
    os.utime(run / "checkpoints" / "step-00000030" / "manifest.json", (5000, 5000))
    write(run / "logs" / "position-0.json", {"still_s": 100})
    append(run / "logs" / "system-n1.jsonl", SYSTEM)
    got = values_of(Collector(run))
    expected = {
        "dtrain_step": 40, "dtrain_loss": 2.5, "dtrain_validation_loss": 3.0, "dtrain_learning_rate": 1e-3,
        "dtrain_gradient_norm": 0.5, "dtrain_tokens_per_second": 1000, "dtrain_mfu_ratio": 0.4,
        "dtrain_step_seconds": 0.25, "dtrain_data_wait_seconds": 0.01, "dtrain_memory_bytes": 2 * 2**30,
        "dtrain_planned_step_seconds": 0.2, "dtrain_planned_memory_bytes": 1.5 * 2**30,
        "dtrain_planned_tokens_per_second": 1250, "dtrain_restarts_total": 2, "dtrain_target_steps": 100,
        "dtrain_ranks": 2, "dtrain_running": 1, "dtrain_failed": 0, "dtrain_loss_not_finite": 0,
        "dtrain_stands_still": 0,
        "dtrain_attempt_start_timestamp_seconds": 1002, "dtrain_last_checkpoint_step": 30,
        "dtrain_rank_work_seconds rank=0": 0.2, "dtrain_rank_work_seconds rank=1": 0.25,
        "dtrain_node_cpu_ratio node=n1": 0.5, "dtrain_node_memory_used_bytes node=n1": 4 * 2**30,
        "dtrain_node_network_transmit_bytes_per_second node=n1": 4 * 2**20,
        "dtrain_gpu_utilization_ratio gpu=3 node=n1": 0.95, "dtrain_gpu_power_watts gpu=3 node=n1": 690.5,
        "dtrain_gpu_sm_clock_hertz gpu=3 node=n1": 1.755e9,
        "dtrain_gpu_throttled gpu=3 node=n1 reason=power cap": 1,
        "dtrain_gpu_throttled gpu=3 node=n1 reason=hardware thermal slowdown": 0,
        "dtrain_gpu_last_xid gpu=3 node=n1": 0,
    }  # fmt: skip
    assert {name: got.get(name) for name in expected} == pytest.approx(expected)
    assert got["dtrain_last_checkpoint_timestamp_seconds"] == pytest.approx(5000, abs=5)
    assert got["dtrain_last_progress_timestamp_seconds"] == pytest.approx(time.time() - 100, abs=10)
    assert [name for name in got if name.startswith("dtrain_run_info")] == [
        f"dtrain_run_info folder={run} model=gpt2 precision=bf16"
    ]


def test_every_metric_has_help_and_passes_promtool(tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("no promtool here (Debian's package prometheus)")
    run = make(tmp_path / 'a "run"\n\\ü')
    append(run / "logs" / "system-n1.jsonl", SYSTEM | {"gpus": [GPU | {"xid": [79]}]})
    append(run / "attempts.jsonl", {"event": "start", "time": 1.0})
    collector = Collector(tmp_path)
    collector.scan()
    text = text_of(collector)
    assert text.count("# HELP") == text.count("# TYPE") > 35
    ran = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


def test_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    skipped = values_of(Collector(make(tmp_path / "skip", LINE | {"loss": None})))
    assert math.isnan(skipped["dtrain_loss"]) and skipped["dtrain_loss_not_finite"] == 1
    run = make(tmp_path / "stop", status="failed")
    write(run / "failure.json", {"type": "NonFiniteError"})
    stopped = values_of(Collector(run))
    assert stopped["dtrain_loss"] == 2.5 and stopped["dtrain_loss_not_finite"] == stopped["dtrain_failed"] == 1
    write(run / "failure.json", {"type": "SIGKILL"})
    assert values_of(Collector(run))["dtrain_loss_not_finite"] == 0


def test_a_rare_value_is_kept_until_a_resume_drops_it(tmp_path: Path) -> None:
    run = make(tmp_path / "run", {"step": 1, "val_loss": 3.0})
    collector = Collector(run)
    assert values_of(collector)["dtrain_validation_loss"] == 3.0
    append(run / "metrics.jsonl", *[LINE | {"step": i} for i in range(3000)])  # more than the end that is read
    again = values_of(collector)
    assert again["dtrain_validation_loss"] == 3.0 and again["dtrain_step"] == 2999
    append(run / "new", LINE | {"step": 2})
    os.replace(run / "new", run / "metrics.jsonl")
    resumed = values_of(collector)
    assert "dtrain_validation_loss" not in resumed and resumed["dtrain_step"] == 2


def test_an_xid_is_remembered_and_old_lines_are_not_served(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    path, collector = run / "logs" / "system-n1.jsonl", Collector(run)
    append(path, SYSTEM | {"gpus": [GPU | {"xid": [13, 79]}]}, SYSTEM)
    assert values_of(collector)["dtrain_gpu_last_xid gpu=3 node=n1"] == 79
    path.unlink()
    append(path, SYSTEM)
    assert values_of(collector)["dtrain_gpu_last_xid gpu=3 node=n1"] == 79
    os.utime(path, (time.time() - 120,) * 2)
    assert not [name for name in values_of(collector) if "node" in name]


def test_live_runs_are_found_and_ended_ones_disappear(tmp_path: Path) -> None:
    over = subprocess.Popen(["true"])
    over.wait()
    collector = Collector(tmp_path, keep_s=300)
    collector.scan()
    assert text_of(collector) == ""
    run = make(tmp_path / "2026-11-18" / "a")
    ended, dead = make(tmp_path / "b", status="done"), make(tmp_path / "c")
    write(dead / "launch.json", {"pid": over.pid, "host": HERE, "launches": [{"cluster": LOCAL}]})
    collector.scan()
    assert sorted((r.name, r.is_live) for r in collector.runs.values()) == [
        ("2026-11-18/a", True), ("b", False), ("c", False),
    ]  # fmt: skip
    for path in (*ended.iterdir(), *dead.iterdir(), *run.iterdir()):
        os.utime(path, (time.time() - 1000,) * 2)
    collector.scan()
    assert [r.name for r in collector.runs.values()] == ["2026-11-18/a"]  # it may be stalled, and must be seen
    for path in run.iterdir():
        os.utime(path, (time.time() - 90_000,) * 2)
    collector.scan()
    assert not collector.runs


DAMAGED: dict[str, Any] = {
    "binary": b"\xff\x00\xfe" * 100,
    "empty": b"",
    "list": b"[1, 2]\n",
    "nested": b"[" * 100_000 + b"\n",
    "nested objects": b'{"step": ' * 50_000 + b"\n",
    "huge integer": b'{"step": 1' + b"0" * 500 + b', "loss": 1e999, "still_s": 1' + b"0" * 400 + b"}\n",
    "wrong types": json.dumps({
        "step": "x", "loss": [], "rank_own_s": {"a": 1}, "gpus": {"index": 0}, "still_s": "long", "launches": 3,
        "status": ["running"], "strategy": {"a": 1}, "model": None, "total_steps": {}, "time": "now", "event": "start",
    }).encode() + b"\n",
    "odd text": b'{"strategy": "\\ud800\\u0000\\n", "model": "\\"}{=,", "choices": {"strategy": "\\ud800"}}\n',
    "odd gpus": b'{"gpus": [1, null, {"index": true}, {"index": 1, "throttle": "hot", "xid": 5}, {"index": -1}]}\n',
}  # fmt: skip
FILES = (
    "launch.json", "summary.json", "plan.json", "metrics.jsonl", "attempts.jsonl", "failure.json", "logs/hang.json",
    "logs/position-0.json", "logs/system-n1.jsonl", "checkpoints/step-00000001/manifest.json",
)  # fmt: skip


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_folder_leaves_the_others_alone(what: str, tmp_path: Path) -> None:
    make(tmp_path / "good")
    for name in FILES:
        bad = make(tmp_path / f"bad-{name.replace('/', '-')}")
        (bad / name).parent.mkdir(parents=True, exist_ok=True)
        (bad / name).write_bytes(DAMAGED[what])
    collector = Collector(tmp_path)
    assert values_of(collector)  # Prometheus' own reader takes it
    assert 'dtrain_loss{run="good",strategy="fsdp"} 2.5' in text_of(collector)
    assert len(collector.runs) >= len(FILES)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", FILES)
def test_no_plain_file(name: str, tmp_path: Path) -> None:
    """A pipe would make its reader wait forever, a folder cannot be read."""
    make(tmp_path / "good")
    for kind, place in (("pipe", os.mkfifo), ("folder", os.mkdir)):
        path = make(tmp_path / kind) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        place(path)
    collector = Collector(tmp_path)
    assert values_of(collector)["dtrain_loss"] == 2.5


@settings(max_examples=30)
@given(st.data())
def test_anything_in_the_files(data: Any) -> None:
    leaf = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    keys = st.sampled_from(
        ["step", "loss", "gpus", "index", "throttle", "xid", "status", "launches", "cluster", "time", "event"]
    )
    value = st.recursive(leaf, lambda v: st.lists(v, max_size=3) | st.dictionaries(keys, v, max_size=3), max_leaves=8)
    with tempfile.TemporaryDirectory() as folder:
        run = make(Path(folder) / "run")
        for name in data.draw(st.lists(st.sampled_from(FILES[:9]), unique=True, max_size=4)):
            (run / name).write_text(json.dumps(data.draw(value)) + "\n")
        values_of(Collector(Path(folder)))


def test_labels_are_bounded(tmp_path: Path) -> None:
    run = make(tmp_path / ("x" * 250), LINE | {"rank_own_s": [0.1] * 1000})
    append(
        run / "logs" / "system-n1.jsonl",
        SYSTEM | {"gpus": [GPU | {"index": i, "throttle": ["magic"]} for i in range(900)]},
    )
    got = values_of(Collector(tmp_path))
    assert not [name for name in got if "rank=" in name]
    assert len([name for name in got if "dtrain_gpu_power_watts" in name]) == prometheus.MOST_GPUS
    assert not [name for name in got if "magic" in name]
