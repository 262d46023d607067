"""The model card of an export: what Hugging Face reads of it, and that a run folder cannot write into it."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dtrain.checkpoint import store
from dtrain.cli import main
from dtrain.config import run_file
from dtrain.inference.model_card import public, shortened
from tests.hf import load, make, save


def cards(run: Path, out: Path, *options: str) -> str:
    assert main(["export", str(run), str(out), *options]) == 0
    return (out / "README.md" if out.is_dir() else out.with_name(f"{out.name}.md")).read_text()


def rows_of(text: str) -> dict[str, str]:
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {row[0]: row[1] for row in cells if len(row) == 2}


def saved(run: Path, step: int, metrics: dict[str, float], **more: str) -> str:
    """A checkpoint as training writes it, with averages; return the hash of its weights."""
    model = load(run)
    state = {f"model.{name}": p.detach() + step for name, p in model.named_parameters()}
    state |= {f"optim.{name}.ema": p.detach() - 1.0 for name, p in model.named_parameters()}
    choices = dict(run_file.load(run).choices)
    meta = {"samples": 8 * step, "data": "9 samples 12ab", "extra": {}, "mesh": {"dp": 2}, "world_size": 2}
    meta |= {"choices": choices, "metrics": metrics} | more
    return store.weights_sha256(store.save(run / "checkpoints", step, state, meta, keep=2))


def test_what_a_card_says(tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    run = make(tmp_path / "run", "gpt2", "ema.decay=0.5")
    origin = {"run": "/home/someone/outputs/parent", "id": "abc", "step": 40}
    code = {"commit": "1234567", "branch": "main"}
    launch = {
        "id": "me", "forked_from": origin | {"forked_from": {"run": "/x/first", "id": "def", "step": 7}},
        "launches": [{"environment": {"code": code, "versions": {"dtrain": "0.0.9"}}}],
    }  # fmt: skip
    (run / "launch.json").write_text(json.dumps(launch))
    (run / "metrics.jsonl").write_text('{"step": 2, "loss": 3.5}\n{"step": 4, "loss": 3.25}\n')
    hashes = [saved(run, step, {"val_loss": 3.0 - step / 4, "val_perplexity": 8.0}) for step in (2, 4)]
    text = cards(run, tmp_path / "hf", "--format", "hf")
    card = hub.ModelCard(text).data
    assert (card.library_name, card.pipeline_tag, card.model_name) == ("transformers", "text-generation", "run")
    assert card.tags == ["dtrain", "gpt2-tiny"]
    metrics = {result.metric_name: result.metric_value for result in card.eval_results}
    assert metrics == {"val_loss": 2.0, "val_perplexity": 8.0}
    found = rows_of(text)
    assert found["checkpoint"] == "step 4, 32 samples" and found["run"] == "run, id me"
    assert found["SHA-256 of the weights"].startswith(hashes[1])
    assert found["forked from"] == "parent@40 (id abc), that from first@7 (id def)" and "/home" not in text
    assert found["git commit"] == "1234567 on main" and found["trained with"] == "dtrain 0.0.9"
    assert found["strategy"] == "ddp on 2 ranks (dp 2)" and found["loss of the last training step"] == "3.25"
    weights = tmp_path / "hf" / "model.safetensors"
    assert found["model.safetensors"] == hashlib.sha256(weights.read_bytes()).hexdigest()
    assert "      global_batch_size: " in text and str(tmp_path) not in text
    # another step, and averages, which this run does not evaluate
    assert main(["export", f"{run}@2", str(tmp_path / "two.safetensors")]) == 0
    two = rows_of((tmp_path / "two.safetensors.md").read_text())
    assert two["checkpoint"] == "step 2, 16 samples" and two["SHA-256 of the weights"].startswith(hashes[0])
    assert two["val_loss"] == "2.5"
    averages = rows_of(cards(run, tmp_path / "average.safetensors", "--ema"))
    assert averages["checkpoint"].endswith("the moving average of its weights") and "val_loss" not in averages
    assert not averages["SHA-256 of the weights"].startswith(hashes[1])


def test_a_run_folder_writes_no_markup_and_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "hunter2hunter2")
    run = make(tmp_path / "run", "llama")
    save(run, load(run))
    cfg = run_file.load(run)
    evil = "x`](http://e.x) | <script>\n---\n```\n# hunter2hunter2"
    run_file.save(run, {**cfg, "choices": {**cfg.choices, "data": evil, "model": evil}, "init_from": "/home/me/base"})
    (run / "launch.json").write_text(
        json.dumps({"launches": [], "id": evil, "forked_from": {"run": evil, "step": evil}})
    )
    text = cards(run, tmp_path / "out.safetensors")
    assert "hunter2" not in text and "/home" not in text
    assert rows_of(text)["began with"] == "base"
    front, _, body = text.removeprefix("---\n").partition("\n---\n")
    assert yaml.safe_load(front)["library_name"] == "dtrain"
    plain = [line for line in body.splitlines() if not line.startswith("    ")]
    assert sum(line.startswith("```") for line in plain) == 2 and "<script" not in "".join(plain).replace("\\<", "")
    titles = [line for line in plain if line.startswith("#")]
    assert titles == ["# run", "## Origin", "## Files", "## Configuration"]


# ---- settings of a checkpoint ------------------------------------------------------------------------------------


def test_the_settings_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    run = make(tmp_path / "run", "gpt2", "optim.lr=0.5")
    codes = [{"environment": {"code": {"commit": name}, "versions": {"torch": name}}} for name in ("first", "second")]
    (run / "launch.json").write_text(json.dumps({"id": "me", "launches": codes}))
    saved(run, 2, {"val_loss": 2.0}, config_sha256=run_file.fingerprint(run))
    (run / "config.yaml").rename(run / "config-1.yaml")  # a resume with another rate
    cfg = run_file.load(make(tmp_path / "other", "gpt2", "optim.lr=0.25"))
    run_file.save(run, cfg)
    saved(run, 4, {"val_loss": 1.0}, config_sha256=run_file.fingerprint(run))
    for step, rate, commit in ((2, "0.5", "first"), (4, "0.25", "second")):
        out = tmp_path / f"{step}.safetensors"
        assert main(["export", f"{run}@{step}", str(out)]) == 0
        text = out.with_name(f"{out.name}.md").read_text()
        found = rows_of(text)
        assert found["optimizer"] == f"adamw, learning rate {rate}" and f"      lr: {rate}\n" in text
        assert found["git commit"] == commit and found["trained with"] == f"torch {commit}"
    (run / "config-1.yaml").unlink()
    assert main(["export", f"{run}@2", str(tmp_path / "2.safetensors")]) == 0
    text = (tmp_path / "2.safetensors.md").read_text()
    found = rows_of(text)
    assert found["optimizer"] == "adamw" and not {"began with", "git commit", "trained with"} & set(found)
    assert "## Configuration\n\nNot in the run folder" in text and "lr:" not in text


# ---- paths -------------------------------------------------------------------------------------------------------

FOLDERS = st.lists(st.text("ab c.-_é1", min_size=1, max_size=5).map(lambda name: f"secret{name}0"), max_size=4)
ROOTS = (
    "/", "~/", "~me/", "../", "../../", "./", "", "//", "file:///", "s3://", "https://me@host.org:80/", "host:/",
    "C:\\", "\\\\host\\", "..\\",
)  # fmt: skip


@given(st.sampled_from(ROOTS), FOLDERS, st.sampled_from(["x.txt", "corpus", "lr=0.1,seed=2"]), st.booleans())
def test_of_a_path_only_the_last_part_is_left(root: str, folders: list[str], name: str, closed: bool) -> None:
    sign = "\\" if "\\" in root else "/"
    path = root + sign.join([*folders, name]) + sign * closed
    if not root and not folders and not closed:
        return  # no path
    assert shortened(path) == name
    if root not in ("", "host:/"):  # they show where they begin
        assert shortened(f"train={path}") == f"train={name}"
        assert shortened(f"it reads '{path}'") == ("it reads '" + (f"{name}'" if not closed else "'"))
    for node in ({path: 1}, {"a": [path]}, {"a": {"b": {path: [path]}}}, {"x": f"k={path},{path}"}):
        text = str(public(node))
        assert not any(part in text for part in ("secret", "host", "me", "/", "\\", "C:", "file", "s3"))


def test_texts_that_are_no_paths_stay() -> None:
    values = {"lr": 0.1, "optim": "adamw", 3: None, "targets": ["q", "v"], "note": "9 samples, a=b: c", "flag": True}
    assert public(values) == values
    both = public({"/a/x": 1, "/b/x": 2})
    assert both == {"x": 1, "x (another)": 2}


def test_no_part_of_a_card_shows_folders(tmp_path: Path) -> None:
    run = make(tmp_path / "run", "llama")
    model = load(run)
    cfg = run_file.load(run)
    paths = ["../../home/alice/corpus", "file:///home/alice/f", "train=/home/alice/x.txt", "s3://alice/y"]
    data = {**cfg.data, "files": [*paths, "C:\\Users\\alice\\z"], "/home/alice/key": {"alice/key": 1}}
    choices = {**cfg.choices, "data": "../alice/data", "model": "/home/alice/net"}
    run_file.save(run, {**cfg, "data": data, "choices": choices, "init_from": "../../alice/llama", "model": cfg.model})
    code = {"commit": "1234567", "branch": "alice/topic", "problem": "no space in /home/alice/x"}
    launch = {"id": "/home/alice/i", "forked_from": {"run": "..\\alice\\p", "id": "../alice/q", "step": "/alice/3"}}
    save(run, model)
    (run / "launch.json").write_text(json.dumps(launch | {"launches": [{"environment": {"code": code}}]}))
    text = cards(run, tmp_path / "out.safetensors")
    assert not any(word in text for word in ("alice", "/home", "Users"))
    found = rows_of(text)
    assert found["began with"] == "llama" and "init_from: llama" in text and "train=x.txt" in text
    assert found["git commit"] == "1234567 on topic, no space in x" and found["forked from"] == "p@3 (id q)"


def test_a_file_of_the_user_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(tmp_path / "run", "gpt2")
    save(run, load(run))
    out = tmp_path / "w.safetensors"
    for _ in range(2):  # a card of ours is replaced
        assert main(["export", str(run), str(out)]) == 0
    before = out.read_bytes()
    (tmp_path / "w.safetensors.md").write_text("my notes")
    assert main(["export", str(run), str(out)]) == 2
    assert "would replace a file of yours" in capsys.readouterr().err
    assert (tmp_path / "w.safetensors.md").read_text() == "my notes" and out.read_bytes() == before


@pytest.mark.parametrize("form", ["hf", "gguf", "onnx", "safetensors"])
def test_a_place_that_cannot_be_written(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(tmp_path / "run", "gpt2")
    save(run, load(run))
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "config.json").write_text("{broken")
    places = [tmp_path / "file" / "out", tmp_path / "full"]
    for place in places:
        assert main(["export", str(run), str(place), "--format", form]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and "fix: " in error and "Traceback" not in error
    assert sorted(os.listdir(tmp_path)) == ["file", "full", "run"] and os.listdir(tmp_path / "full") == ["config.json"]
    # nor is anything written of a checkpoint that is damaged
    weights = next((run / "checkpoints").glob("step-*/*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert main(["export", f"{run}@1", str(tmp_path / "out"), "--format", form]) == 2
    assert "is damaged" in capsys.readouterr().err and not (tmp_path / "out").exists()
