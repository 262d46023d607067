"""The metrics of runs for Prometheus, read from their folders alone: nothing here talks to a rank.

`python -m dtrain.report.prometheus RUN_DIR HOST PORT PARENT` serves one run until the process PARENT, its supervisor,
ends; cluster.metrics_port asks for it. `dtrain metrics serve` serves all live runs of a folder. A run
folder is untrusted: a file that is damaged, huge or no file at all leaves its metrics out.
"""

from __future__ import annotations

import math
import os
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dtrain.runs.folder import file_clock, last_launch, last_lines, latest_checkpoint, parse_line, predicted, read_json
from dtrain.runs.metrics import gpus_of, system_files
from dtrain.runs.nvml import THROTTLE
from dtrain.runs.protocol import ATTEMPTS_FILE, HANG_FILE, POSITION_FILE, die_with_parent
from dtrain.runs.record import Record, load, run_folders
from dtrain.util.format import as_dict, clean, number

SCAN_S = 30.0  # between two searches for new and ended runs
KEEP_S = 600.0  # for this long an ended run is still served, so that its end is seen
SILENT_S = 86400.0  # a run that claims to be running and wrote nothing for a day: its machine is gone
FRESH_S = 60.0  # a node whose newest line is older than this is not served
END = 2**18  # bytes read from the end of a file of lines: a thousand steps
MOST_BYTES = 2**24  # of a JSON file
MOST_RUNS, MOST_NODES, MOST_RANKS, MOST_GPUS = 200, 1024, 64, 64  # limits on labels
GIB, MIB = 2.0**30, 2.0**20

# name: (source, factor, help). Metrics of a step are in metrics.jsonl, of a node and a GPU in logs/system-NODE.jsonl.
STEP = {
    "dtrain_step": ("step", 1, "Newest optimizer step in metrics.jsonl"),
    "dtrain_loss": ("loss", 1, "Training loss; NaN if it is not finite"),
    "dtrain_validation_loss": ("val_loss", 1, "Loss of the newest evaluation"),
    "dtrain_learning_rate": ("lr", 1, "Learning rate"),
    "dtrain_gradient_norm": ("grad_norm", 1, "Norm of the gradient before clipping"),
    "dtrain_tokens_per_second": ("tokens_per_s", 1, "Tokens, or samples, per second over all ranks"),
    "dtrain_mfu_ratio": ("mfu", 1, "Model FLOPs utilization, 0 to 1"),
    "dtrain_step_seconds": ("step_s", 1, "Duration of a step"),
    "dtrain_data_wait_seconds": ("data_s", 1, "Time that a step waited for its batch"),
    "dtrain_exposed_communication_seconds": ("exposed_comm_s", 1, "Time of a step that only communicated, estimated"),
    "dtrain_memory_bytes": ("mem_gib", GIB, "Peak memory of rank 0: of its GPU, or of its process on a CPU"),
    "dtrain_save_stall_seconds": ("save_stall_s", 1, "Time for which the newest save stopped the training"),
}
PLANNED = {
    "dtrain_planned_step_seconds": ("step_s", 1, "Duration of a step by the plan"),
    "dtrain_planned_tokens_per_second": ("tokens_per_s", 1, "Tokens, or samples, per second by the plan"),
    "dtrain_planned_mfu_ratio": ("mfu", 1, "Model FLOPs utilization by the plan"),
    "dtrain_planned_memory_bytes": ("memory_gib", GIB, "Peak memory of a rank by the plan"),
}
RUN = {
    "dtrain_running": "1 while the run is starting or training; 0 while it waits in a queue, and after its end",
    "dtrain_failed": "1 if the run has failed",
    "dtrain_stands_still": "1 while the supervisor sees that no rank makes progress (logs/hang.json)",
    "dtrain_loss_not_finite": "1 if the newest loss is NaN or infinite, or the run failed for that reason",
    "dtrain_target_steps": "Step at which the run ends",
    "dtrain_ranks": "Number of ranks",
    "dtrain_last_progress_timestamp_seconds": "When rank 0 last entered a step, an evaluation or a save",
    "dtrain_attempt_start_timestamp_seconds": "When the newest attempt started",
    "dtrain_last_checkpoint_timestamp_seconds": "When the newest checkpoint was complete",
    "dtrain_last_checkpoint_step": "Step of the newest checkpoint",
    "dtrain_rank_work_seconds": "Time of a step that a rank did not wait for other ranks",
}
NODE = {
    "dtrain_node_cpu_ratio": ("cpu_percent", 0.01, "Use of all CPUs of the node, 0 to 1"),
    "dtrain_node_memory_used_bytes": ("memory_gib", GIB, "Host memory in use"),
    "dtrain_node_memory_size_bytes": ("memory_total_gib", GIB, "Host memory that the run may use"),
    "dtrain_node_disk_read_bytes_per_second": ("disk_read_mib_s", MIB, "Read from the node's disks"),
    "dtrain_node_disk_write_bytes_per_second": ("disk_write_mib_s", MIB, "Written to the node's disks"),
    "dtrain_node_network_receive_bytes_per_second": ("net_in_mib_s", MIB, "Received through network interfaces"),
    "dtrain_node_network_transmit_bytes_per_second": ("net_out_mib_s", MIB, "Sent through network interfaces"),
    "dtrain_node_disk_free_bytes": ("disk_free_gib", GIB, "Free space where the run folder is"),
}
GPU = {
    "dtrain_gpu_utilization_ratio": ("utilization_percent", 0.01, "Share of time in which a kernel ran, 0 to 1"),
    "dtrain_gpu_memory_used_bytes": ("memory_gib", GIB, "GPU memory in use"),
    "dtrain_gpu_memory_size_bytes": ("memory_total_gib", GIB, "GPU memory"),
    "dtrain_gpu_power_watts": ("power_w", 1, "Power draw"),
    "dtrain_gpu_power_limit_watts": ("power_limit_w", 1, "Power limit"),
    "dtrain_gpu_sm_clock_hertz": ("sm_clock_mhz", 1e6, "Clock of the streaming multiprocessors"),
    "dtrain_gpu_temperature_celsius": ("temperature_c", 1, "Temperature"),
    "dtrain_gpu_ecc_errors": ("ecc_errors", 1, "Uncorrected memory errors since the driver was loaded"),
}
GPU_STATE = {
    "dtrain_gpu_throttled": "1 while this reason lowers the clock",
    "dtrain_gpu_last_xid": "Number of the newest XID error that the driver reported; 0 = none was seen",
}
INFO, RESTARTS = "dtrain_run_info", "dtrain_restarts"
HELP = {
    **{name: text for table in (STEP, PLANNED, NODE, GPU) for name, (_, _, text) in table.items()},
    **RUN,
    **GPU_STATE,
    INFO: "Always 1; the labels describe the run",
}
LABELS = ("run", "strategy")

Sample = tuple[str, dict[str, str], float]  # name, labels, value


def value_of(values: dict[str, Any], key: str, factor: float = 1.0) -> float | None:
    """Return a number of an untrusted file in base units."""
    try:
        found = number(values.get(key))
    except OverflowError:  # an integer with hundreds of digits
        return None
    return None if found is None else found * factor


def label_of(value: object) -> str:
    """Return untrusted text as a label: short, without control characters, valid UTF-8."""
    return clean(str(value))[:200].encode(errors="replace").decode() if isinstance(value, (str, int)) else ""


def is_file(path: Path, most_bytes: float = math.inf) -> bool:
    """Whether it is a plain file: opening a pipe would wait forever."""
    try:
        found = path.stat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size <= most_bytes


def small_json(path: Path) -> dict[str, Any]:
    return read_json(path) if is_file(path, MOST_BYTES) else {}


def last_rows(path: Path) -> list[dict[str, Any]]:
    """Read the lines at the end of a file of JSON lines."""
    return [row for row in map(parse_line, last_lines(path, END)) if row]


@dataclass
class RunFiles:
    """One run. Values that stand rarely in metrics.jsonl, such as the validation loss, are kept between two reads."""

    run_dir: Path
    name: str
    is_live: bool = True  # its ranks run, or are being started
    newest: dict[str, Any] = field(default_factory=dict)  # of metrics.jsonl
    file_id: int = 0
    xids: dict[tuple[str, str], int] = field(default_factory=dict)  # (node, gpu) -> newest XID
    skew: float = 0.0  # of the clock that stamps files, against ours

    def samples(self) -> Iterator[Sample]:
        """Yield the run's metrics without the labels that all of them have."""
        record = Record(self.run_dir, small_json(self.run_dir / "launch.json"), self._summary())
        self._read_metrics()
        summary, newest = record.summary, self.newest
        for name, (key, factor, _) in STEP.items():
            if (value := value_of(newest, key, factor)) is not None:
                yield name, {}, value
        failure = small_json(self.run_dir / "failure.json")
        has_failed = summary.get("status") == "failed"
        loss = newest.get("loss", 0.0)
        not_finite = loss is None or not math.isfinite(value_of(newest, "loss") or 0.0)
        if loss is None:  # how metrics.jsonl writes NaN
            yield "dtrain_loss", {}, math.nan
        not_finite = not_finite or (has_failed and failure.get("type") == "NonFiniteError")
        yield "dtrain_loss_not_finite", {}, float(not_finite)
        yield "dtrain_running", {}, float(self.is_live)
        yield "dtrain_failed", {}, float(has_failed)
        yield "dtrain_stands_still", {}, float(self.is_live and is_file(self.run_dir / HANG_FILE))
        for name, key in (("dtrain_target_steps", "total_steps"), ("dtrain_ranks", "world_size")):
            if (value := value_of(summary, key)) is not None:
                yield name, {}, value
        plan = predicted(self.run_dir) if is_file(self.run_dir / "plan.json", MOST_BYTES) else None
        for name, (key, factor, _) in PLANNED.items():
            if (value := value_of(plan or {}, key, factor)) is not None:
                yield name, {}, value
        yield from self._times(record)
        ranks = newest.get("rank_own_s")
        for rank, seconds in enumerate(ranks if isinstance(ranks, list) and len(ranks) <= MOST_RANKS else []):
            if (value := value_of({"s": seconds}, "s")) is not None:
                yield "dtrain_rank_work_seconds", {"rank": str(rank)}, value
        labels = {key: label_of(summary.get(key)) for key in ("model", "precision")}
        yield INFO, labels | {"folder": label_of(str(self.run_dir))}, 1.0
        yield from self._nodes()

    def _summary(self) -> dict[str, Any]:
        return small_json(self.run_dir / "summary.json")

    @property
    def strategy(self) -> str:
        """By the launcher, so that the label does not change when the ranks have started."""
        choices = as_dict(last_launch(small_json(self.run_dir / "launch.json")).get("choices"))
        return label_of(choices.get("strategy") or self._summary().get("strategy") or "")

    def _read_metrics(self) -> None:
        path = self.run_dir / "metrics.jsonl"
        try:
            file_id = path.stat().st_ino
        except OSError:
            return
        if file_id != self.file_id:  # a resume has dropped the lines after its checkpoint
            self.newest, self.file_id = {}, file_id
        for row in last_rows(path):
            self.newest.update(row)

    def _times(self, record: Record) -> Iterator[Sample]:
        starts = record.attempts if is_file(self.run_dir / ATTEMPTS_FILE, MOST_BYTES) else []
        yield RESTARTS, {}, float(max(0, len(starts) - 1))
        if starts and (began := value_of(starts[-1], "started")) is not None:
            yield "dtrain_attempt_start_timestamp_seconds", {}, began
        progress = self._progress()
        if progress is not None:
            yield "dtrain_last_progress_timestamp_seconds", {}, progress
        checkpoint = latest_checkpoint(self.run_dir)
        if checkpoint and (written := self._written(checkpoint / "manifest.json")) is not None:
            yield "dtrain_last_checkpoint_timestamp_seconds", {}, written
            yield "dtrain_last_checkpoint_step", {}, float(int(checkpoint.name.removeprefix("step-")))

    def _written(self, path: Path) -> float | None:
        try:
            return path.stat().st_mtime - self.skew
        except OSError:
            return None

    def _progress(self) -> float | None:
        """When rank 0 entered its phase: once a second it writes for how long it has been in it."""
        path = self.run_dir / POSITION_FILE.format(0)
        position, written = small_json(path), self._written(path)
        still = value_of(position, "still_s")
        if written is None or still is None or not 0 <= still < math.inf:
            return self._written(self.run_dir / "metrics.jsonl")
        return written - still

    def _nodes(self) -> Iterator[Sample]:
        for node, path in list(system_files(self.run_dir).items())[:MOST_NODES]:
            written = self._written(path)
            lines = last_rows(path) if written is not None and time.time() - written < FRESH_S else []
            if not lines:
                continue
            labels = {"node": label_of(node)}
            for name, (key, factor, _) in NODE.items():
                if (value := value_of(lines[-1], key, factor)) is not None:
                    yield name, labels, value
            for line in lines:
                for gpu, values in self._gpus(line):
                    codes = values.get("xid")
                    for code in codes if isinstance(codes, list) else []:
                        if isinstance(code, int) and 0 < code < 10_000:
                            self.xids[node, gpu] = code
            for gpu, values in self._gpus(lines[-1]):
                yield from self._gpu(labels | {"gpu": gpu}, values, self.xids.get((node, gpu), 0))

    @staticmethod
    def _gpus(line: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        for values in gpus_of(line)[:MOST_GPUS]:
            if isinstance(index := values.get("index"), int) and 0 <= index < 1000:
                yield str(index), values

    @staticmethod
    def _gpu(labels: dict[str, str], values: dict[str, Any], xid: int) -> Iterator[Sample]:
        for name, (key, factor, _) in GPU.items():
            if (value := value_of(values, key, factor)) is not None:
                yield name, labels, value
        if isinstance(reasons := values.get("throttle"), list):
            for word in THROTTLE.values():  # all of them, so that an alert sees when one ends
                yield "dtrain_gpu_throttled", labels | {"reason": word}, float(word in reasons)
        yield "dtrain_gpu_last_xid", labels, float(xid)


class Collector:
    """A collector of prometheus-client: asks the files at each scrape. `scan` looks for runs, and is called apart."""

    def __init__(self, folder: Path, ask_slurm: bool = True, keep_s: float = KEEP_S) -> None:
        self.folder, self.ask_slurm, self.keep_s = folder, ask_slurm, keep_s
        self.runs: dict[Path, RunFiles] = {}
        self.lock = threading.Lock()  # two scrapes at the same time

    def scan(self) -> None:
        """Find the runs that are live, or ended a short time ago."""
        folders = [path for path in run_folders(self.folder) if self._may_be_live(path)]
        records = load(folders)[0] if self.ask_slurm else [Record.read(path) for path in folders]
        found: dict[Path, RunFiles] = {}
        for record in sorted(records, key=lambda record: -record.last_sign)[:MOST_RUNS]:
            path, quiet = record.run_dir, record.quiet_s
            if not (record.is_live and quiet < SILENT_S) and quiet > self.keep_s:
                continue
            relative = os.path.relpath(path, self.folder)
            name = label_of(path.absolute().name if relative == "." else relative)
            run = self.runs.get(path) or RunFiles(path, name)
            run.is_live = record.is_live and record.status.rstrip("?") in ("starting", "running")
            run.skew = file_clock(path) - time.time()
            found[path] = run
        self.runs = found

    def _may_be_live(self, path: Path) -> bool:
        """Whether a file changed in the last days: of thousands of old runs nothing else is read."""
        files = [path / name for name in ("launch.json", "summary.json", "metrics.jsonl", ATTEMPTS_FILE)]
        if any(file.exists() and not is_file(file) for file in files):
            return False
        return time.time() - Record(path, {}, {}).last_sign < 2 * SILENT_S  # clocks differ

    def samples(self) -> Iterator[Sample]:
        with self.lock:
            for run in list(self.runs.values()):
                common = {"run": run.name, "strategy": run.strategy}
                try:
                    found = list(run.samples())
                except (OSError, ValueError, TypeError, AttributeError, OverflowError):
                    continue  # a damaged folder must not take the other runs away
                for name, labels, value in found:
                    yield name, common | labels, value

    def collect(self) -> Iterable[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families: dict[str, Any] = {}
        for name, labels, value in self.samples():
            if name not in families:
                families[name] = (
                    CounterMetricFamily(name, "Starts of the run after the first", labels=[*labels])
                    if name == RESTARTS
                    else GaugeMetricFamily(name, HELP[name], labels=[*labels])
                )
            families[name].add_metric([*labels.values()], value)
        return families.values()


def serve(collector: Collector, host: str, port: int, ready: Callable[[], None] = lambda: None) -> None:
    """Serve /metrics until this process ends. Raises OSError if the port cannot be bound."""
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry(auto_describe=False)
    collector.scan()
    registry.register(collector)
    start_http_server(port, host, registry)
    ready()
    while True:
        time.sleep(SCAN_S)
        try:
            collector.scan()
        except OSError:
            pass  # the file system is away for a moment


if __name__ == "__main__":
    die_with_parent()
    if os.getppid() == int(sys.argv[4]):  # else it ended before that took effect
        serve(Collector(Path(sys.argv[1]), ask_slurm=False), sys.argv[2], int(sys.argv[3]))
