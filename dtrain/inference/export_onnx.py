"""Export a model as ONNX: a folder with model.onnx, compared with torch before it is kept."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dtrain.config import run_file
from dtrain.config.build import build
from dtrain.config.files import TARGET
from dtrain.config.models import LANGUAGE_MODELS
from dtrain.config.run_file import Settings
from dtrain.data import images
from dtrain.errors import bad
from dtrain.inference.export import Final, add_card, new_folder
from dtrain.inference.export_hf import add_tokenizer, class_names
from dtrain.inference.model_card import Hashed
from dtrain.inference.sample import load_model
from dtrain.kernels.block_attention import repeat_heads
from dtrain.models.layers import Attend

log = logging.getLogger("dtrain")
FILE = "model.onnx"
TARGETS = dict.fromkeys(LANGUAGE_MODELS, "tokens") | {
    "dtrain.models.bert.Bert": "segments", "dtrain.models.resnet.ResNet": "image", "dtrain.models.vit.ViT": "image",
}  # fmt: skip
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
TOLERANCE = 1e-4  # between onnxruntime's and torch's outputs, of the largest output or of 1
IN_ONE_FILE = 2**30  # bytes of weights; protobuf allows 2 GiB, more goes into model.onnx.data
LONGEST_TEXT = 64  # of those that are compared


class Whole:
    """In the place of a KV cache: plain causal attention, which does not ask whether the text has one token."""

    def tokens(self, tokens: Tensor) -> Tensor:
        return tokens

    def places(self, inputs: Tensor) -> tuple[Tensor, None]:
        return torch.arange(inputs.shape[1], device=inputs.device), None

    def of(self, layer: str) -> Attend:
        return self.attend

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        k, v = repeat_heads(k, q), repeat_heads(v, q)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    def advance(self, count: int) -> None:
        pass


class OfTokens(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        out: Tensor = self.model(input_ids, cache=Whole())
        return out


class OfSegments(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, token_type_ids: Tensor) -> Tensor:
        out: Tensor = self.model(torch.stack([input_ids, token_type_ids], dim=-1))
        return out


class OfImages(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> Tensor:
        out: Tensor = self.model(pixel_values)
        return out


@dataclass(frozen=True)
class Form:
    """The inputs of a family: a module that takes them, their names, and examples of any size."""

    module: nn.Module
    names: tuple[str, ...]
    cfg: Settings

    @property
    def is_text(self) -> bool:
        return self.names[0] == "input_ids"

    def inputs(self, batch: int, length: int) -> tuple[Tensor, ...]:
        """Return random inputs. length: of texts, in tokens."""
        generator = torch.Generator().manual_seed(batch * 1000 + length)
        model = self.cfg.model
        if not self.is_text:
            size = (batch, model["channels"], model["image_size"], model["image_size"])
            return (torch.randn(size, generator=generator),)
        # token 0 may be padding, and a text of padding alone has no defined output
        tokens = torch.randint(1, model["vocab_size"], (batch, length), generator=generator)
        segments = torch.randint(0, 2, (batch, length), generator=generator)
        return (tokens, segments)[: len(self.names)]

    def dynamic(self) -> dict[str, Any]:
        axes: dict[int, Any] = {0: torch.export.Dim("batch", min=1)}
        if self.is_text:
            axes[1] = torch.export.Dim("sequence", min=1, max=self.cfg.model["seq_len"])
        return dict.fromkeys(self.names, axes)


def form_of(model: nn.Module, cfg: Settings) -> Form:
    kind = TARGETS[cfg.model["_target_"]]
    if kind == "image":
        return Form(OfImages(model), ("pixel_values",), cfg)
    if kind == "segments":
        return Form(OfSegments(model), ("input_ids", "token_type_ids"), cfg)
    return Form(OfTokens(model), ("input_ids",), cfg)


def export_onnx(
    run_dir: Path, folder: Path, trust: Iterable[str] = (), step: int | None = None, ema: bool = False
) -> Path:
    """Write a folder with model.onnx, config.json, the tokenizer and a model card; it is complete or missing."""
    cfg, trust = run_file.load(run_dir), list(trust)
    if cfg.model["_target_"] not in TARGETS:
        known = ", ".join(target.split(".")[2] for target in TARGETS)
        rule = f"is for models of {known}, and this is {cfg.model['_target_']}"
        raise bad("--format", "onnx", rule, "--format safetensors")
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        rule = f"needs {', '.join(missing)}, not installed here"
        raise bad("--format", "onnx", rule, "pip install 'dtrain[onnx]'")
    folder = folder.resolve()
    with new_folder(folder) as partial:
        final = Final(run_dir, trust, step, ema)
        weights = Hashed(final)
        for _ in weights:  # before the model: then both are not in memory
            pass
        model, _ = load_model(run_dir, trust, final.source.step, ema)
        form = form_of(model.cpu(), cfg)
        write(form, partial / FILE)
        apart = compare(form, partial / FILE)
        (partial / "config.json").write_text(json.dumps(description(form, final, trust), indent=2) + "\n")
        if form.is_text:
            add_tokenizer(partial, cfg)
        note = f"onnxruntime's outputs and torch's differ by at most {apart:.1e} (compared when it was exported)."
        add_card(partial, final, "onnx", weights.hexdigest(), FILE, [note])
    return folder


def write(form: Form, path: Path) -> None:
    num_bytes = sum(p.numel() * p.element_size() for p in form.module.parameters())
    with quiet():
        program = torch.onnx.export(
            form.module, form.inputs(2, min(16, form.cfg.model.get("seq_len", 16))), dynamo=True, verbose=False,
            input_names=list(form.names), output_names=["logits"], dynamic_shapes=form.dynamic(),
        )  # fmt: skip
        assert program is not None
        for node in program.model.graph.all_nodes():
            node.metadata_props.clear()  # stack traces with lines of code, and the folders of this machine
        program.save(path, external_data=num_bytes > IN_ONE_FILE)


@contextmanager
def quiet() -> Iterator[None]:
    """Hide what torch's exporter says of itself: deprecations, and torchvision's operators."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@torch.inference_mode()
def compare(form: Form, path: Path) -> float:
    """Return the largest difference between onnxruntime's and torch's outputs, at several sizes; refuse a large one."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    longest = min(form.cfg.model.get("seq_len", 1), LONGEST_TEXT)
    worst = 0.0
    for batch, length in ((1, longest), (3, max(1, longest // 2)), (2, 1)):
        inputs = form.inputs(batch, length)
        expected = form.module(*inputs)
        given = {name: value.numpy() for name, value in zip(form.names, inputs, strict=True)}
        found = torch.from_numpy(session.run(None, given)[0])
        assert found.shape == expected.shape, (found.shape, expected.shape)
        apart = float((found - expected).abs().max())
        worst = max(worst, apart)
        if not apart <= TOLERANCE * max(1.0, float(expected.abs().max())):  # also NaN
            rule = f"onnxruntime's outputs differ from torch's by {apart:.2g}, so nothing is written"
            raise bad("--format", "onnx", rule, "--format safetensors, or other versions of torch and onnxruntime")
    return worst


def description(form: Form, final: Final, trust: Iterable[str]) -> dict[str, Any]:
    """Return config.json: what goes in and comes out."""
    cfg = form.cfg
    values: dict[str, Any] = {"model": cfg.choices.model, "inputs": list(form.names), "outputs": ["logits"]}
    if form.is_text:
        values |= {"max_length": cfg.model["seq_len"], "vocab_size": cfg.model["vocab_size"]}
        values |= {"pad_token_id": cfg.model["pad_id"]} if "pad_id" in cfg.model else {}
    else:
        values |= {key: cfg.model[key] for key in ("image_size", "channels")} | preprocessing(cfg, trust)
    if names := class_names(final, trust):
        values["id2label"] = dict(enumerate(names))
    return values


def preprocessing(cfg: Settings, trust: Iterable[str]) -> dict[str, Any]:
    """Return how pixels become inputs: (pixel × rescale_factor - mean) / std per channel; {} if it is not known.

    Image files are first cropped: crop_pct is the share of the shorter side that the centred square has.
    """
    if cfg.data[TARGET] == images.TARGET:
        files = images.Decoding.of(cfg.data)
        cropped = {"crop_mode": "center", "crop_pct": files.val_crop, "interpolation": "bilinear"}
        size = {"size": {"height": files.size, "width": files.size}}
        colours = {"image_mean": files.mean.tolist(), "image_std": files.std.tolist()}
        return {**cropped, **size, "rescale_factor": 1 / 255, **colours}
    try:
        data = build(cfg.data, trust).dataset("val")
        mean, std = (getattr(data, name).reshape(-1).tolist() for name in ("mean", "std"))
    except (ValueError, OSError, AttributeError) as error:  # the files are gone, or it is the user's own data set
        log.warning("how pixels become inputs is not known: %s", str(error).splitlines()[0])
        return {}
    return {"rescale_factor": 1 / getattr(data, "largest", 255), "image_mean": mean, "image_std": std}
