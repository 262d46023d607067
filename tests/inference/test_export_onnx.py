"""onnxruntime's outputs beside torch's, for each family, at sizes that the export has not seen."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dtrain.checkpoint import store
from dtrain.cli import main
from dtrain.config import run_file
from dtrain.config.build import build
from dtrain.inference import export_onnx
from dtrain.inference.sample import load_model
from tests.hf import SIZES, load, save
from tests.models.vision import make_run as make_images
from tests.world import make_run

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
ort = pytest.importorskip("onnxruntime")
ROOT = Path(export_onnx.__file__).parent.parent.parent
TEXT = [*SIZES, "cluster.processes=1"]
RUNS = {
    "gpt2": ["model=gpt2-tiny", *TEXT],
    "llama": ["model=llama-tiny", "model.num_kv_heads=2", "model.hidden_dim=48", "model.rope_factor=8", *TEXT],
    "bert": ["model=bert-tiny", "data=stdlib-mlm", *TEXT],
    "bert-classify": ["model=bert-tiny-classify", "data=stdlib-lines", *TEXT],
    "vit": ["model=vit-tiny", "model.patch_size=4", "cluster.processes=1"],
    "resnet": ["model=resnet18", "model.width=8", "model.image_size=16", "cluster.processes=1"],
}

IMAGES = ("vit", "resnet")


def drawn(folder: Path, name: str) -> Path:
    run = (make_images if name in IMAGES else make_run)(folder, *RUNS[name])
    model = load(run)
    with torch.no_grad():
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            tensor.normal_(0.0, 0.2, generator=torch.Generator().manual_seed(len(key)))
            if key.endswith("running_var"):
                tensor.abs_().add_(0.5)
    save(run, model)
    return run


def compared(run: Path, folder: Path) -> float:
    """Return the largest difference over several batches and lengths."""
    session = ort.InferenceSession(folder / "model.onnx")
    model, cfg = load_model(run, [])
    names = [i.name for i in session.get_inputs()]
    apart, generator = 0.0, np.random.default_rng(0)
    lengths = (1, 5, cfg.model.seq_len) if "input_ids" in names else (0,)
    for batch in (1, 4, 7):
        for length in lengths:
            if length:
                given = {"input_ids": generator.integers(1, cfg.model.vocab_size, (batch, length))}
                inputs = torch.from_numpy(given["input_ids"])
                if len(names) > 1:
                    given["token_type_ids"] = generator.integers(0, 2, (batch, length))
                    inputs = torch.stack([inputs, torch.from_numpy(given["token_type_ids"])], dim=-1)
            else:
                size = cfg.model.image_size
                given = {"pixel_values": generator.normal(size=(batch, cfg.model.channels, size, size)).astype("f4")}
                inputs = torch.from_numpy(given["pixel_values"])
            with torch.no_grad():
                expected = model.cpu()(inputs).numpy()
            found = session.run(None, given)[0]
            assert found.shape == expected.shape and expected.std() > 0.01, "outputs near 0 would be near anything"
            apart = max(apart, float(np.abs(found - expected).max()))
    return apart


@pytest.mark.parametrize("name", RUNS)
def test_onnxruntime_computes_the_same(name: str, tmp_path: Path) -> None:
    run = drawn(tmp_path / "run", name)
    out = tmp_path / "out"
    assert main(["export", str(run), str(out), "--format", "onnx"]) == 0
    assert sorted(os.listdir(out)) == ["README.md", "config.json", "model.onnx"]
    assert compared(run, out) < 1e-4
    data = (out / "model.onnx").read_bytes()
    assert b"site-packages" not in data and str(ROOT).encode() not in data, "no folder of this machine"
    values = json.loads((out / "config.json").read_text())
    cfg = run_file.load(run)
    if name in IMAGES:  # from pixels to inputs as config.json says
        dataset: Any = build(cfg.data).dataset("val")
        pixels = dataset.pictures[:3].astype(np.float32) * np.float32(values["rescale_factor"])
        inputs = torch.nn.functional.interpolate(torch.from_numpy(pixels), (values["image_size"],) * 2, mode="bilinear")
        mean, std = (torch.tensor(values[key])[:, None, None] for key in ("image_mean", "image_std"))
        inputs = ((inputs - mean) / std).expand(-1, values["channels"], -1, -1)
        torch.testing.assert_close(inputs, dataset.batch(np.arange(3))[0], rtol=0, atol=1e-5)
        assert values["id2label"]["3"] == "LABEL_3"
    if name == "bert-classify":
        assert sorted(values["id2label"].values()) == ["code", "comment", "docstring"]
    card = (out / "README.md").read_text()
    assert "library_name: onnx" in card and "outputs and torch's differ by at most" in card


def test_how_an_image_file_becomes_an_input(tmp_path: Path) -> None:
    """Also where the folder of images is gone: the checkpoint has the names of the classes."""
    image = pytest.importorskip("PIL.Image")
    for name in ("cat", "dog"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for i in range(2):
            pixels = np.random.default_rng(i).integers(0, 256, (30, 40, 3), dtype=np.uint8)
            image.fromarray(pixels).save(tmp_path / "data" / name / f"{i}.png")
    settings = ["model=vit-tiny", "model.patch_size=4", "model.num_classes=2", "model.channels=3", "data=images"]
    run = make_images(
        tmp_path / "run", *settings, "cluster.processes=1", f"data.path={tmp_path / 'data'}", "data.val_crop=0.6"
    )
    (run / "launch.json").write_text('{"launches": []}')
    model = load(run)
    state = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    meta = {"samples": 0, "data": "", "extra": {}, "classes": ["cat", "dog"]}
    store.save(run / "checkpoints", 1, state, meta, keep=1)
    dataset: Any = build(run_file.load(run).data).dataset("val")
    expected = dataset.batch(np.arange(1))[0]
    picture = image.open(dataset.root / dataset.names[0]).convert("RGB")
    picture.load()
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    assert main(["export", str(run), str(tmp_path / "out"), "--format", "onnx"]) == 0
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert values["id2label"] == {"0": "cat", "1": "dog"} and values["crop_mode"] == "center"
    side = values["crop_pct"] * min(picture.size)
    left, top = ((length - side) / 2 for length in picture.size)
    size = (values["size"]["width"], values["size"]["height"])
    cropped = picture.resize(
        size, getattr(image.Resampling, values["interpolation"].upper()), (left, top, left + side, top + side)
    )
    pixels = np.asarray(cropped).astype(np.float32) * values["rescale_factor"]
    inputs = ((pixels - values["image_mean"]) / values["image_std"]).transpose(2, 0, 1)
    np.testing.assert_allclose(inputs[None], expected.numpy(), atol=1e-5)


def test_a_file_that_computes_something_else_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = drawn(tmp_path / "run", "vit")
    whole = export_onnx.write

    def wrong(form: Any, path: Path) -> None:
        with torch.no_grad():
            head = form.module.model.head.bias
            kept = head.clone()
            head.add_(0.01)
            whole(form, path)
            head.copy_(kept)

    monkeypatch.setattr(export_onnx, "write", wrong)
    assert main(["export", str(run), str(tmp_path / "out"), "--format", "onnx"]) == 2
    assert "differ from torch's by 0.01" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["run"]


def test_what_cannot_be_exported_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_images(tmp_path / "run", "model=convnet", "cluster.processes=1")
    (run / "launch.json").write_text('{"launches": []}')
    for options, error in (
        ([], "is for models of gpt2, llama, bert, resnet, vit"), (["--dtype", "bfloat16"], "has fp32 weights"),
    ):  # fmt: skip
        assert main(["export", str(run), str(tmp_path / "out"), "--format", "onnx", *options]) == 2
        assert error in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["run"]
