"""`dtrain.load`, and `dtrain.fit` in a cell, in a real Jupyter kernel."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import dtrain
from dtrain.notebook import LoadedRun, LoadedRuns
from dtrain.runs.metrics import SYSTEM_FILE
from tests import patience
from tests.rundirs import in_tmp_path, make, sweep  # noqa: F401
from tests.screens import RUNNING, append, metric
from tests.world import ROOT

EVIL = "<script>alert(1)</script>"
CONFIG = "train: {steps: 1000}\nmodel: {_target_: dtrain.models.gpt2.GPT2}\n"


def recorded(name: str = "run", **summary: Any) -> LoadedRun:
    run_dir = make(name, config=CONFIG, **{**RUNNING, "status": "done", "val_loss": 3.5, "steps": 30} | summary)
    (run_dir / "logs").mkdir()
    append(run_dir, *(metric(step) for step in range(1, 31)))
    append(run_dir, metric(31, loss=None), '{"step": 30, "val_loss": 3.5}\n', '{"step": 30, "rank_own_s": [1, 2]}\n')
    sample = {"time": 1e9, "cpu_percent": 5.0, "gpus": [{"index": 0, "power_w": 650.0, "throttle": ["power cap"]}]}
    (run_dir / SYSTEM_FILE.format("node1")).write_text(json.dumps(sample) + "\n")
    run = dtrain.load(run_dir)
    assert isinstance(run, LoadedRun)
    return run


def test_a_run_and_its_frames() -> None:
    pytest.importorskip("pandas")
    run = recorded()
    assert (run.status, run.config.train.steps, run.summary["model"], run.plan) == ("done", 1000, "gpt2-tiny", {})
    frame = run.metrics
    assert list(frame.index) == list(range(1, 32)) and frame.index.name == "step"
    assert frame.loc[30, "loss"] == 5 - 30 / 1000 and frame.loc[30, "val_loss"] == 3.5, "one row for both lines"
    assert frame.loc[31].isna()["loss"] and "rank_own_s" not in frame
    system = run.system
    assert system.iloc[0].to_dict() == {
        "node": "node1", "cpu_percent": 5.0, "gpu0_index": 0, "gpu0_power_w": 650.0, "gpu0_throttle": "power cap",
    }  # fmt: skip
    assert str(system.index[0]) == "2001-09-09 01:46:40+00:00"
    assert run.why() == "The run ended well."


def test_a_sweep() -> None:
    pytest.importorskip("pandas")
    dirs = sweep((3.0, 2.5), (3.5, 2.0), (4.0, None))
    for i, run_dir in enumerate(dirs):
        (run_dir / "config.yaml").write_text(f"optim: {{lr: {i}}}\ntrain: {{steps: 5}}\n")
    runs = dtrain.load("multirun/d")
    assert isinstance(runs, LoadedRuns) and len(runs) == 3 and runs[1].run_dir == dirs[1].absolute()
    table = runs.table()
    assert list(table.index) == [path.name for path in dirs]
    assert list(table["optim.lr"]) == [0, 1, 2] and list(table["train_loss"]) == [3.0, 3.5, 4.0]
    assert "train.steps" not in table and table.sort_values("val_loss").index[0] == dirs[1].name
    with pytest.raises(ValueError, match="has that in its name"):
        dtrain.load("nothing-like-it")


def test_plots() -> None:
    pytest.importorskip("matplotlib")
    figure = recorded("first$run$").plot("loss", "tokens_per_s", log=True)
    assert [axis.get_ylabel() for axis in figure.axes] == ["loss", "tokens_per_s"]
    assert [len(line.get_xdata()) for line in figure.axes[0].lines] == [30, 1]
    figure.savefig("plot.png")  # draws the text: a `$` in a name is no formula
    with pytest.raises(ValueError, match="no such metric\n  fix: use one of loss, lr"):
        dtrain.load("first$run$").plot("los")


def test_html_is_escaped() -> None:
    run = recorded(f"a {EVIL[1:8]}", model=EVIL, strategy=f'"{EVIL}')
    shown = run._repr_html_() + LoadedRuns([run])._repr_html_()
    assert "<script" not in shown and "&lt;script&gt;" in shown and "<svg" in shown


@pytest.mark.parametrize("damage", ["", "{", "\x00", "[]", '{"step": "x"}\n{"step": 1, "loss": {}}\n{"step": 1}'])
def test_damaged_files(damage: str) -> None:
    pytest.importorskip("pandas")
    run = recorded()
    for name in ("metrics.jsonl", "summary.json", "plan.json", str(SYSTEM_FILE.format("node1"))):
        (run.run_dir / name).write_text(damage)
    assert len(run.metrics) <= 1 and len(run.system) == 0
    assert run.summary is not None and run.plan is not None and run.status and run.why() and run._repr_html_()


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    run = recorded()
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ModuleNotFoundError, match=r"pandas is not installed\n  fix: pip install 'dtrain\[notebook\]'"):
        _ = run.metrics
    assert run._repr_html_() and run.status == "done", "the rest needs no extra"


# ---- in a kernel ---------------------------------------------------------------------------------------------

CELLS = [
    "import dtrain\nrun = dtrain.load('run')\nrun",
    "run.metrics.tail(3)",
    "run.plot('loss')",
    "print(run.config.train.steps, run.status)",
]


def test_a_notebook() -> None:
    """Executed by nbclient in a real kernel; the outputs are what a browser would get."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    recorded()
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    client = nbclient.NotebookClient(notebook, timeout=int(patience.patience(60)), kernel_name="python3")
    client.execute(env={**os.environ, "PYTHONPATH": str(ROOT)})
    outputs = [cell.outputs[0] for cell in notebook.cells]
    assert [len(cell.outputs) for cell in notebook.cells] == [1, 1, 1, 1], "a figure is shown once"
    assert "<table>" in outputs[0].data["text/html"] and "<run run: done" in outputs[0].data["text/plain"]
    assert "grad_norm" in outputs[1].data["text/html"]
    assert outputs[2].data["image/png"].startswith("iVBOR")
    assert outputs[3].text == "1000 done\n"


FIT = """
import dtrain
dtrain.fit("gpt2-tiny", "synthetic", processes=2, run_dir="run",
           train={"steps": 100000, "global_batch_size": 4, "eval_every": 5, "eval_batches": 1})
"""


def ends(message: dict[str, Any], asked: str) -> bool:
    is_idle = message["content"].get("execution_state") == "idle"
    return bool(is_idle and message["parent_header"].get("msg_id") == asked)


@pytest.mark.slow
def test_a_cell_that_trains_is_one_line_and_can_be_stopped(tmp_path: Path) -> None:
    manager = pytest.importorskip("jupyter_client.manager")
    pytest.importorskip("ipykernel")
    kernel, client = manager.start_new_kernel(kernel_name="python3", cwd=str(tmp_path))
    try:
        asked = client.execute(FIT)
        metrics = tmp_path / "run" / "metrics.jsonl"
        patience.until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") > 20, "20 lines of metrics", 120)
        kernel.interrupt_kernel()  # the stop button
        reply = client._recv_reply(asked, timeout=patience.patience(60))["content"]
        assert (reply["ename"], "resume=./run" in reply["evalue"]) == ("Preempted", True), reply
        messages = []
        while not messages or not ends(messages[-1], asked):
            messages.append(client.get_iopub_msg(timeout=patience.patience(10)))
        kinds = [message["msg_type"] for message in messages]
        assert kinds.count("display_data") == 1 and kinds.count("update_display_data") >= 2, kinds
        last = [m for m in messages if m["msg_type"] == "update_display_data"][-1]["content"]["data"]
        assert "/100000  loss" in last["text/plain"] and "validation loss" in last["text/plain"]
        text = "".join(m["content"]["text"] for m in messages if m["msg_type"] == "stream")
        assert "stop requested" in text and len(text.splitlines()) < 30 and "\x1b" not in text, text
        summary = json.loads((tmp_path / "run" / "summary.json").read_text())
        assert summary["status"] == "preempted" and list((tmp_path / "run" / "checkpoints").glob("step-*"))
        again = client.execute_interactive("print(dtrain.load('run').status)", timeout=60, output_hook=messages.append)
        assert again["content"]["status"] == "ok", "the kernel lives"
        assert any(m["content"].get("text") == "preempted\n" for m in messages)
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)
        time.sleep(0.1)
