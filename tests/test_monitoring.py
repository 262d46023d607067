"""monitoring/: the rules, the scrape example and the dashboard, in a real Prometheus (Debian's package)."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from dtrain.report import prometheus
from dtrain.runs.protocol import free_port
from dtrain.runs.system import is_installed
from tests.patience import patience, until
from tests.report.test_prometheus import GPU, LINE, SYSTEM, append, make, write
from tests.world import ROOT, SMALL, metrics

FOLDER = ROOT / "monitoring"
ALERTS = (
    "DtrainStalled",
    "DtrainSlowerThanPlanned",
    "DtrainLossNotFinite",
    "DtrainCheckpointTooOld",
    "DtrainGpuThrottled",
)
DASHBOARD = json.loads((FOLDER / "grafana-dashboard.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]
# the committed rules with shorter times; each must be in them
SHORTER = {
    "> 900": "> 4",
    "> 7200": "> 6",
    "[10m]": "[10s]",
    "for: 1m": "for: 1s",
    "for: 10m": "for: 1s",
    "for: 5m": "for: 1s",
}
SCHEMA = "DTRAIN_GRAFANA_SCHEMA"  # grafana-foundation-sdk's dashboard.jsonschema.json, which is not kept here


def tool(name: str) -> str:
    if (path := shutil.which(name)) is None:
        pytest.skip(f"no {name} here (Debian's package prometheus)")
    return path


# ---- the files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command", ["check rules alerts.yml", "check config prometheus.yml", "test rules alerts_test.yml"]
)
def test_promtool_accepts(command: str) -> None:
    ran = subprocess.run([tool("promtool"), *command.split()], cwd=FOLDER, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.slow
def test_each_alert_has_a_test_that_can_fail(tmp_path: Path) -> None:
    """A rule that never fires, or always, fails monitoring/alerts_test.yml."""
    promtool = tool("promtool")
    rules = yaml.safe_load((FOLDER / "alerts.yml").read_text())
    assert tuple(rule["alert"] for rule in rules["groups"][0]["rules"]) == ALERTS
    shutil.copy(FOLDER / "alerts_test.yml", tmp_path)
    for i, name in enumerate(ALERTS):
        for expression in ("vector(1) == 0", "dtrain_running >= 0 or dtrain_gpu_throttled >= 0"):
            changed = json.loads(json.dumps(rules))
            changed["groups"][0]["rules"][i]["expr"] = expression
            (tmp_path / "alerts.yml").write_text(yaml.safe_dump(changed))
            ran = subprocess.run([promtool, "test", "rules", "alerts_test.yml"], cwd=tmp_path, capture_output=True)
            assert ran.returncode, f"{name}: {expression}"


def test_every_metric_that_is_used_exists() -> None:
    known = {*prometheus.HELP, f"{prometheus.RESTARTS}_total"}
    text = (FOLDER / "alerts.yml").read_text() + "".join(query for _, query in QUERIES)
    used = set(re.findall(r"\bdtrain_\w+", text))
    assert used <= known
    assert known - used <= {
        "dtrain_run_info",
        "dtrain_last_checkpoint_step",
        "dtrain_ranks",
        "dtrain_exposed_communication_seconds",
    }  # all others are shown


def test_the_fields_that_grafana_s_schema_asks_for() -> None:
    """Of the published schema, what this dashboard uses; the test below has the schema itself."""
    assert {"schemaVersion", "templating", "annotations", "title", "uid", "panels", "time"} <= DASHBOARD.keys()
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    places = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place.keys() == {"h", "w", "x", "y"} and place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & places, f"{panel['title']} lies on another panel"
        places |= cells
        if panel["type"] == "row":
            assert panel["collapsed"] is False and panel["panels"] == []
            continue
        assert panel["type"] in ("timeseries", "stat") and panel["fieldConfig"].keys() == {"defaults", "overrides"}
        assert [target["refId"] for target in panel["targets"]] == list("ABCD"[: len(panel["targets"])])
        assert all(target["datasource"] == panel["datasource"] for target in panel["targets"])
    assert [(v["name"], v["type"]) for v in DASHBOARD["templating"]["list"]] == [
        ("datasource", "datasource"),
        ("run", "query"),
    ]


def test_grafana_s_published_schema() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    if not os.environ.get(SCHEMA):
        pytest.skip(f"{SCHEMA} does not name a dashboard.jsonschema.json of grafana-foundation-sdk")
    schema = json.loads(Path(os.environ[SCHEMA]).read_text())
    jsonschema.validators.validator_for(schema)(schema).validate(DASHBOARD)


# ---- a real Prometheus ---------------------------------------------------------------------------------------

# What NVIDIA documents that its exporter serves by default; there is no GPU here to serve it.
DCGM = (
    "DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_SM_CLOCK",
    "DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "DCGM_FI_DEV_XID_ERRORS",
)  # fmt: skip


class FakeDcgm(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        labels = 'gpu="0",UUID="GPU-1",device="nvidia0",modelName="NVIDIA H200",Hostname="n1"'
        text = "".join(f"# HELP {name} A field.\n# TYPE {name} gauge\n{name}{{{labels}}} 1\n" for name in DCGM)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def fake_dcgm() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), FakeDcgm) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@contextmanager
def running(*command: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with open(log, "wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(patience(60))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Prometheus:
    """A real one, with the committed rules at shorter times and the jobs of the committed example."""

    def __init__(self, folder: Path, **targets: int) -> None:
        folder.mkdir()
        rules, config = (FOLDER / "alerts.yml").read_text(), yaml.safe_load((FOLDER / "prometheus.yml").read_text())
        for long, short in SHORTER.items():
            assert long in rules, f"alerts.yml no longer has {long!r}"
            rules = rules.replace(long, short)
        (folder / "alerts.yml").write_text(rules)
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        for job in config["scrape_configs"]:
            job.pop("file_sd_configs", None)
            port = targets.get(job["job_name"].replace("-", "_"))
            job["static_configs"] = [{"targets": [f"127.0.0.1:{port}"]}] if port else []
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self.folder, self.port = folder, free_port()

    def command(self) -> list[str]:
        return [
            tool("prometheus"), f"--config.file={self.folder}/prometheus.yml",
            f"--storage.tsdb.path={self.folder}/data", f"--web.listen-address=127.0.0.1:{self.port}",
            "--log.level=warn",
        ]  # fmt: skip

    def ask(self, path: str, **query: str) -> Any:
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.loads(answer.read())["data"]
        except OSError:
            return {}

    def values(self, query: str) -> list[dict[str, Any]]:
        return list(self.ask("query", query=query).get("result", []))

    def firing(self) -> set[tuple[str, str]]:
        """(alert, run)"""
        alerts = self.ask("alerts").get("alerts", [])
        return {(a["labels"]["alertname"], a["labels"]["run"]) for a in alerts if a["state"] == "firing"}

    def empty_panels(self) -> list[str]:
        """The queries of the dashboard, for all runs, that have no data."""
        return [f"{title}: {query}" for title, query in QUERIES if not self.values(query.replace("$run", ".*"))]


@contextmanager
def growing(*runs: Path, **system: Any) -> Iterator[None]:
    """Replayed runs: twice a second each has a new step and a new line of system metrics."""
    ended = threading.Event()

    def grow() -> None:
        step = 41
        while not ended.wait(0.5):
            step += 1
            for run in runs:
                append(run / "metrics.jsonl", LINE | {"step": step})
                write(run / "logs" / "position-0.json", {"still_s": 0.1})
                append(run / "logs" / "system-n1.jsonl", SYSTEM | system)

    thread = threading.Thread(target=grow)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def replayed(run: Path, planned_s: float, saved: float) -> Path:
    """A run on GPUs: what a machine without GPUs cannot cause."""
    extra = {"step": 40, "val_loss": 3.0}, {"step": 40, "save_stall_s": 0.1}, {"step": 40, "rank_own_s": [0.2, 0.25]}
    make(run, *extra, LINE)
    plan = {"step_s": planned_s, "tokens_per_s": 2000, "mfu": 0.5, "memory_gib": {"total": 1.5, "limit": 80}}
    write(run / "plan.json", plan)
    append(run / "attempts.jsonl", {"event": "start", "time": time.time() - saved})
    return run


def serve(folder: Path, port: int) -> list[str]:
    return [sys.executable, "-m", "dtrain", "metrics", "serve", str(folder), f"--port={port}"]


def test_each_alert_fires_and_each_panel_has_data(tmp_path: Path) -> None:
    """Replayed runs: one is fine, one has all faults of a living run, one stands still with a loss of NaN."""
    pytest.importorskip("prometheus_client")
    runs = tmp_path / "runs"
    good, bad = replayed(runs / "good", 0.25, 0), replayed(runs / "bad", 0.1, 100)
    write(good / "checkpoints" / "step-00000040" / "manifest.json", {})
    stuck = replayed(runs / "stuck", 0.25, 0)
    append(stuck / "metrics.jsonl", LINE | {"loss": None})
    write(stuck / "logs" / "hang.json", {"text": "rank 1"})
    write(stuck / "checkpoints" / "step-00000040" / "manifest.json", {})
    os.utime(stuck / "checkpoints" / "step-00000040" / "manifest.json", (time.time() + 3600,) * 2)
    os.utime(good / "checkpoints" / "step-00000040" / "manifest.json", (time.time() + 3600,) * 2)
    hot = GPU | {"throttle": ["power cap", "hardware thermal slowdown"]}
    port = free_port()
    with ExitStack() as stack:
        server = Prometheus(tmp_path / "prometheus", dtrain=port, dcgm=stack.enter_context(fake_dcgm()))
        stack.enter_context(growing(good))
        stack.enter_context(growing(bad, gpus=[hot]))
        stack.enter_context(running(*serve(runs, port), log=tmp_path / "serve.log"))
        stack.enter_context(running(*server.command(), log=tmp_path / "prometheus.log"))
        wanted = {(name, "bad") for name in ALERTS[1:] if name != "DtrainLossNotFinite"}
        wanted |= {("DtrainStalled", "stuck"), ("DtrainLossNotFinite", "stuck")}
        until(lambda: server.firing() >= wanted, "the alerts", 60, lambda: str(server.firing()))
        until(lambda: not server.empty_panels(), "data of all panels", 30, lambda: "\n".join(server.empty_panels()))
        assert server.firing() == wanted
        assert server.values('label_replace(dtrain_loss{run="good"}, "x", "", "", "")')[0]["value"][1] == "2.5"


# ---- live runs -----------------------------------------------------------------------------------------------


def launch(run: Path, *overrides: str) -> list[str]:
    return [sys.executable, str(ROOT / "launch.py"), *SMALL, f"run_dir={run}", "train.steps=1000000", *overrides]


def of_run(run: Path) -> list[int]:
    """The ranks, by their rank."""
    files = [run / "logs" / f"position-{rank}.json" for rank in range(2)]
    return [json.loads(file.read_text())["pid"] for file in files]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_minutes_of_live_runs(tmp_path: Path) -> None:
    """A run with a server of its own and one below `dtrain metrics serve`; their faults are real, except a GPU's."""
    pytest.importorskip("prometheus_client")
    if not is_installed():
        pytest.skip("no psutil here: the panels of nodes would be empty")
    runs, run, own, port = tmp_path / "runs", tmp_path / "slow", free_port(), free_port()
    runs.mkdir()
    replay = replayed(runs / "gpus", 0.25, 0)  # mfu, planned memory, GPUs
    write(replay / "checkpoints" / "step-00000040" / "manifest.json", {})
    os.utime(replay / "checkpoints" / "step-00000040" / "manifest.json", (time.time() + 3600,) * 2)
    hot = GPU | {"throttle": ["hardware thermal slowdown"]}
    sampled = "cluster.system_metrics_every=1"
    # no saves; the plan is written below, because the planner has none for a CPU
    slow = launch(run, f"cluster.metrics_port={own}", "cluster.processes=2", sampled, "train.eval_every=200")
    # the loss overflows at once; the update is skipped, so that the run lives on
    nan = launch(
        runs / "nan", "optim.lr=1e30", "schedule.warmup_steps=0", "train.nonfinite=skip", "cluster.processes=1"
    )
    with ExitStack() as stack:
        server = Prometheus(tmp_path / "prometheus", dtrain=port, dtrain_run=own, dcgm=stack.enter_context(fake_dcgm()))
        stack.enter_context(growing(replay, gpus=[hot]))
        stack.enter_context(running(*serve(runs, port), log=tmp_path / "serve.log"))
        stack.enter_context(running(*server.command(), log=tmp_path / "prometheus.log"))
        began = time.time()
        process = stack.enter_context(running(*slow, log=tmp_path / "slow.log"))
        other = stack.enter_context(running(*nan, log=tmp_path / "nan.log"))

        def fires(name: str, of: str) -> Callable[[], bool]:
            def check() -> bool:
                for child, log in ((process, "slow.log"), (other, "nan.log")):
                    assert child.poll() is None, (tmp_path / log).read_text()
                return (name, of) in server.firing()

            return check

        until(lambda: metrics(run), "the first step", 60, (tmp_path / "slow.log").read_text)
        write(run / "plan.json", {"step_s": 1e-4, "tokens_per_s": 1e6})
        for name, of in (
            ("DtrainSlowerThanPlanned", "slow"), ("DtrainCheckpointTooOld", "slow"), ("DtrainLossNotFinite", "nan"),
            ("DtrainGpuThrottled", "gpus"),
        ):  # fmt: skip
            until(fires(name, of), f"{name} of {of}", 60, lambda: str(server.firing()))
        assert ("DtrainStalled", "slow") not in server.firing()
        until(lambda: not server.empty_panels(), "data of all panels", 60, lambda: "\n".join(server.empty_panels()))
        time.sleep(max(0.0, began + 120 - time.time()))
        assert fires("DtrainSlowerThanPlanned", "slow")()
        gaps = server.values('min_over_time(up{job="dtrain-run"}[60s])')
        assert [value["value"][1] for value in gaps] == ["1"]  # each scrape of the last minute was answered
        steps = server.values('dtrain_step{run="slow"}')
        assert abs(float(steps[0]["value"][1]) - metrics(run)[-1]["step"]) < 10_000
        stopped = of_run(run)[1]
        os.kill(stopped, signal.SIGSTOP)  # the other rank waits for it
        try:
            until(fires("DtrainStalled", "slow"), "DtrainStalled", 60, lambda: str(server.firing()))
        finally:
            os.kill(stopped, signal.SIGCONT)
        until(lambda: ("DtrainStalled", "slow") not in server.firing(), "the end of the stall", 60)
