"""What transformers makes of an exported run: the same logits, and nothing missing or left over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from dtrain import config
from dtrain.cli import main
from dtrain.export import export_hf, final_weights
from dtrain.models import build as models
from dtrain.sample import load_model
from tests.hf import CASES, VOCAB, apart, load, make, save, transformers


def reloaded(folder: Path, name: str, **options: Any) -> nn.Module:
    """By transformers' own way, with nothing missing, unexpected or of another shape."""
    auto = getattr(transformers, CASES[name].auto)
    model, info = auto.from_pretrained(folder, output_loading_info=True, **options)
    assert type(model).__name__ == CASES[name].kind
    assert not any(info.values()), info
    return model.eval()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", CASES)
def test_a_run_goes_to_transformers_and_back(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    run = make(tmp_path / "run", name)
    ours = load(run)
    with torch.no_grad():
        for p in ours.parameters():
            p.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(len(p)))
    save(run, ours)
    assert main(["export", str(run), str(tmp_path / "out"), "--format", "hf"]) == 0
    assert f"wrote {tmp_path / 'out'}" in capsys.readouterr().out
    transformers.utils.logging.get_logger("transformers").propagate = True
    theirs = reloaded(tmp_path / "out", name)
    assert not caplog.records, caplog.text
    assert apart(ours, theirs) < 1e-5
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    # and back, also by way of what transformers writes itself
    theirs.save_pretrained(tmp_path / "again")
    for folder in ("out", "again"):
        back = dict(load(make(tmp_path / f"from-{folder}", name, f"init_from={tmp_path / folder}")).named_parameters())
        for key, weight in ours.named_parameters():
            rows = VOCAB if key in ("embed.weight", "output.weight", "output_bias") else len(weight)
            assert torch.equal(back[key][:rows], weight[:rows]), key


def test_large_models_are_written_in_parts(tmp_path: Path) -> None:
    run = make(tmp_path / "run", "llama")
    ours = load(run)
    save(run, ours)
    export_hf(run, tmp_path / "out", shard_bytes=30_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2 and files == sorted(set(index["weight_map"].values()))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    largest = max(p.numel() for p in ours.parameters()) * 4
    assert all((tmp_path / "out" / f).stat().st_size < max(30_000, largest) + 4096 for f in files)
    weights = [load_file(tmp_path / "out" / f) for f in files]
    assert index["metadata"]["total_size"] == sum(t.nbytes for w in weights for t in w.values())
    assert apart(ours, reloaded(tmp_path / "out", "llama")) < 1e-5


@pytest.mark.parametrize("form", ["hf", "safetensors"])
def test_16_bits(form: str, tmp_path: Path) -> None:
    run = make(tmp_path / "run", "gpt2")
    save(run, load(run))
    assert main(["export", str(run), "--format", form, "--dtype", "bfloat16"]) == 0
    file = run / "hf" / "model.safetensors" if form == "hf" else run / "model.safetensors"
    assert {t.dtype for t in load_file(file).values()} == {torch.bfloat16}
    if form == "hf":
        assert reloaded(run / "hf", "gpt2", dtype="auto").dtype == torch.bfloat16


def test_what_the_first_model_said_of_its_tokens_is_kept(tmp_path: Path) -> None:
    CASES["llama"].make(tmp_path / "hf")
    values = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(values | {"bos_token_id": 7, "eos_token_id": [8, 9]}))
    run = make(tmp_path / "run", "llama", f"init_from={tmp_path / 'hf'}")
    save(run, load(run))
    written = json.loads((export_hf(run, tmp_path / "out") / "config.json").read_text())
    assert (written["bos_token_id"], written["eos_token_id"]) == (7, [8, 9])


def test_the_tokenizer_travels_along(tmp_path: Path) -> None:
    run = make(tmp_path / "run", "gpt2")
    save(run, load(run))
    cfg = config.load(run)
    for data in ({"path": str(tmp_path / "tokens")}, {"path": "text.txt", "tokenizer": str(tmp_path / "mine.json")}):
        (tmp_path / "tokens").mkdir(exist_ok=True)
        for file in (tmp_path / "tokens" / "tokenizer.json", tmp_path / "mine.json"):
            file.write_text(f'{{"of": "{file.name}"}}')
        config.save(run, {**cfg, "data": {**cfg.data, **data}})
        out = export_hf(run, tmp_path / f"out-{len(data)}")
        source = Path(data["tokenizer"]) if "tokenizer" in data else tmp_path / "tokens" / "tokenizer.json"
        assert (out / "tokenizer.json").read_text() == source.read_text()


def test_refused_exports_leave_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(tmp_path / "run", "gpt2")
    (run / "launch.json").write_text('{"launches": []}')
    assert main(["export", str(run), "--format", "hf"]) == 2
    assert "has no checkpoint yet" in capsys.readouterr().err
    save(run, load(run))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    assert main(["export", str(run), str(tmp_path / "full"), "--format", "hf"]) == 2
    assert "is not overwritten" in capsys.readouterr().err
    cfg = config.load(run)
    config.save(run, {**cfg, "model": {**cfg.model, "_target_": "my.Model"}})
    assert main(["export", str(run), str(tmp_path / "out"), "--format", "hf"]) == 2
    message = capsys.readouterr().err
    assert "no counterpart of my.Model" in message and "--format safetensors" in message
    assert sorted(p.name for p in tmp_path.iterdir()) == ["full", "run"]
    assert not list(run.glob(".*partial*"))


def test_final_weights_and_the_original_ones(tmp_path: Path) -> None:
    """What a run began with can be had again when it has a checkpoint: adapters are merged into that."""
    CASES["gpt2"].make(tmp_path / "hf")
    run = make(tmp_path / "run", "gpt2", f"init_from={tmp_path / 'hf'}")
    first = load(run)
    began = {name: p.detach().clone() for name, p in first.named_parameters()}
    with torch.no_grad():
        for p in first.parameters():
            p.add_(1.0)
    save(run, first)
    now = dict(final_weights(run))
    assert now.keys() == began.keys() and all(torch.equal(w, began[n] + 1.0) for n, w in now.items())
    assert all(torch.equal(p.cpu(), began[n] + 1.0) for n, p in load_model(run, [])[0].named_parameters())
    cfg = config.load(run)
    model, source = models.make(cfg), models.original_weights(cfg, [])
    for name, weight in began.items():
        again = torch.empty_like(weight)
        source.fill(model, name, again, torch.device("cpu"))
        assert torch.equal(again, weight)
