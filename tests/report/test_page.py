"""What the page of `dtrain report` contains: complete for a good run, harmless for a damaged or hostile one."""

from __future__ import annotations

import base64
import json
import re
import shutil
import tempfile
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.report_page import make_run
from dtrain.report.page import collect, render, write

EVIL = '</script><script>window.evil=1</script><img src=x onerror="window.evil=1">'


def data_of(page: str) -> dict[str, Any]:
    """The data as the browser reads it."""
    packed = re.search(r'<script type="text/plain" id="data">([^<]*)</script>', page)
    assert packed
    found: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(packed[1])))
    return found


def test_a_run_is_complete(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=400)
    (found,) = data_of(render(collect([run]), "title"))["runs"]
    assert (found["name"], found["status"]) == ("gpt2-124m-fsdp", "done")
    assert {"loss", "val_loss", "lr", "grad_norm", "tokens_per_s", "mem_gib"} <= set(found["curves"])
    assert found["plan"]["tokens_per_s"] == 1.32e6 and found["plan"]["memory_gib"] == 61.2
    assert [part["title"] for part in found["step_parts"]] == ["profiled, rank 0", "planned"]
    assert found["ranks"]["count"] == 8 and len(found["ranks"]["own"]) == len(found["ranks"]["steps"]) > 10
    assert [a["code"] for a in found["attempts"]] == [75, 3, 0]
    assert {chart["title"] for chart in found["system"]["charts"]} >= {"GPU power", "CPU"}
    assert dict(found["environment"])["device"] == "NVIDIA H200"
    commands = dict(found["commands"])
    assert "optim.lr=" in commands["repeat from the start"] and "resume=" in commands["train longer"]


def test_the_command_to_resume_names_the_trackers_server(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=20, status="preempted")
    (run / "checkpoints" / "step-00000010").mkdir(parents=True, exist_ok=True)
    (run / "checkpoints" / "step-00000010" / "manifest.json").write_text("{}")
    (run / "config.yaml").write_text("logger:\n  trackio:\n    server_url: https://host/x\n")
    commands = dict(collect([run])["runs"][0]["commands"])
    assert commands["resume"].endswith("/run logger.trackio.server_url=https://host/x")


def test_what_differs_between_runs_is_apart_from_what_they_share(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, seed=seed, steps=20) for seed, name in enumerate("ab")]
    found = data_of(render(collect(runs), "t"))
    assert found["settings"]["differ"]["train.seed"] == [0, 1]
    assert found["settings"]["same"]["model.dim"] == 768 and "model.dim" not in found["settings"]["differ"]
    assert [run["name"] for run in found["runs"]] == ["a", "b"]


def test_a_failed_run_says_why(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=20, status="failed")
    failure = {"rank": 1, "type": "RuntimeError", "message": "shapes do not fit", "where": "/home/u/net.py:12, in f"}
    (run / "failure.json").write_text(json.dumps(failure | {"exit_code": 3, "log": "logs/rank-1.log"}))
    (found,) = collect([run])["runs"]
    assert found["why"]["cause"] == "code" and "net.py:12" in found["why"]["text"]


def test_no_text_of_a_run_reaches_the_html(tmp_path: Path) -> None:
    run = make_run(tmp_path / "<script>window.evil=1", steps=20)
    change(run / "summary.json", model=EVIL, device=EVIL, status=EVIL)
    (run / "config.yaml").write_text(json.dumps({"name": EVIL, EVIL: EVIL}))
    page = render(collect([run]), f"{EVIL} · dtrain report")
    assert "<title>&lt;/script&gt;" in page
    page = re.sub(r"<title>.*</title>", "", page)
    assert "evil" not in page
    # only what the file itself holds: its own script, its own style, and no address
    assert page.count("<script") == 2 and not re.search(r"https?://(?!www\.w3\.org/2000/svg)|src=|url\(|@import", page)


def test_secrets_are_redacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "abcd1234efgh")
    run = make_run(tmp_path / "abcd1234efgh", steps=20)
    change(run / "summary.json", device="abcd1234efgh")
    config = {"logger": {"password": "hunter2hunter2", "url": "https://abcd1234efgh@host"}}
    (run / "config.yaml").write_text(json.dumps(config))
    text = json.dumps(collect([run]))
    assert "abcd1234efgh" not in text and "hunter2" not in text


def test_a_link_in_a_run_folder_is_not_written_through(tmp_path: Path) -> None:
    run, outside = make_run(tmp_path / "run", 20), tmp_path / "outside"
    outside.write_text("mine")
    (run / "report.html").symlink_to(outside)
    write([run], run / "report.html", "run")
    assert outside.read_text() == "mine" and "<html" in (run / "report.html").read_text()


def test_a_single_run_of_ten_thousand_steps_is_small(tmp_path: Path) -> None:
    assert write([make_run(tmp_path / "run")], tmp_path / "a.html", "t") < 500_000


@pytest.mark.slow
def test_fifty_runs_of_ten_thousand_steps_are_small(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"{i}", seed=i) for i in range(50)]
    assert write(runs, tmp_path / "a.html", "t") < 3_000_000


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


# ---- damaged and hostile folders ------------------------------------------------------------------------------------

LEAF = st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(max_size=6)
JSON = st.recursive(LEAF, lambda c: st.lists(c, max_size=3) | st.dictionaries(st.text(max_size=4), c, max_size=3))
FILES = ("metrics.jsonl", "summary.json", "launch.json", "plan.json", "attempts.jsonl", "config.yaml", "failure.json")
FILES += ("profiles/rank-0.json", "logs/system-node1.jsonl")


@pytest.fixture(scope="module")
def good_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("good") / "run", steps=30, ranks=2)


def damaged(good_run: Path, folder: str) -> Path:
    return Path(shutil.copytree(good_run, Path(folder) / "run"))


@settings(max_examples=25)
@given(st.sampled_from(FILES), st.binary(max_size=40), st.integers(0, 400))
def test_damaged_bytes_are_no_error(good_run: Path, name: str, junk: bytes, at: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = damaged(good_run, folder)
        before = (run / name).read_bytes() if (run / name).exists() else b""
        (run / name).write_bytes(before[:at] + junk + before[at + len(junk) :])
        data_of(render(collect([run]), "t"))


@settings(max_examples=50)
@given(st.data())
def test_values_of_any_type_are_no_error(good_run: Path, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = damaged(good_run, folder)
        name = data.draw(st.sampled_from(FILES))
        lines = [json.loads(line) for line in (run / name).read_text().splitlines()] if (run / name).exists() else [{}]
        keys = st.sampled_from(sorted({key for line in lines for key in line} | {"status", "type", "rank", "message"}))
        for line in lines[-3:]:
            line.update(data.draw(st.dictionaries(keys, JSON, max_size=4)))
        (run / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
        data_of(render(collect([run]), "t"))


def test_a_folder_with_nothing_but_a_launch_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "launch.json").write_text("{}")
    (found,) = data_of(render(collect([tmp_path]), "t"))["runs"]
    assert found["curves"] == {} and found["system"] is None
