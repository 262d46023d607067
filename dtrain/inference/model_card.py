"""A model card: what exported weights are and where they come from. Markdown with Hugging Face's front matter.

A run folder may come from elsewhere, and a card is published: texts of the folder are bounded and escaped, secrets are
redacted, and of a path only the last part is shown: its folders name users and machines.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

import dtrain
from dtrain.checkpoint import ownership, store
from dtrain.config import run_file
from dtrain.config.models import LANGUAGE_MODELS
from dtrain.config.redaction import hide, redact
from dtrain.errors import bad
from dtrain.runs import environment
from dtrain.runs.folder import read_json
from dtrain.runs.metrics import rows
from dtrain.runs.record import run_name
from dtrain.util.format import as_dict, clean, counted, finite

README = "README.md"
MARK = "tags:\n- dtrain\n"  # in the front matter of every card; a file without it is not replaced
SECTIONS = (
    "model", "data", "loss", "optim", "schedule", "train", "precision", "strategy", "lora", "ema", "init_from",
)  # fmt: skip
LIBRARIES = {"hf": "transformers", "gguf": "gguf", "onnx": "onnx", "safetensors": "dtrain"}
TASKS = dict.fromkeys(LANGUAGE_MODELS, "text-generation") | {
    "dtrain.models.vit.ViT": "image-classification", "dtrain.models.resnet.ResNet": "image-classification",
    "dtrain.models.convnet.ConvNet": "image-classification",
}  # fmt: skip
USE = {
    "hf": 'from transformers import {auto}\n\nmodel = {auto}.from_pretrained("FOLDER")',
    "gguf": 'from llama_cpp import Llama\n\nmodel = Llama("{file}")',
    "onnx": 'import onnxruntime\n\nsession = onnxruntime.InferenceSession("{file}")',
    "safetensors": 'from safetensors.torch import load_file\n\nweights = load_file("{file}")',
    "own": 'from safetensors.torch import load_file\n\nmodel.load_state_dict(load_file("{file}"))  # model: a {kind}',
}
AUTOS = {
    "text-generation": "AutoModelForCausalLM", "fill-mask": "AutoModelForMaskedLM",
    "text-classification": "AutoModelForSequenceClassification",
}  # fmt: skip
PACKAGES = ("dtrain", "torch", "python")
MOST_ANCESTORS = 20
LONGEST = 200  # characters of one value
# where a path begins within a text: at /, ~, ./, ../, \\, C:\\ or scheme://
PATH_BEGINS = re.compile(r"(?<=[\s=,;|'\"(\[{<])(?=[/\\~]|\.{1,2}[/\\]|[A-Za-z][\w+.-]*:[/\\])")


@dataclass(frozen=True)
class Source:
    """The checkpoint that was exported."""

    run_dir: Path
    checkpoint: Path
    cfg: Mapping[str, Any]
    ema: bool = False

    @cached_property
    def manifest(self) -> Mapping[str, Any]:
        return store.read_manifest(self.checkpoint).meta

    @cached_property
    def saved_under(self) -> run_file.Version | None:
        """The configuration that the checkpoint was saved under; None: it is not in the run folder."""
        saved = self.manifest.get("config_sha256")
        return run_file.version(self.run_dir, saved) if saved else run_file.Version(self.cfg)

    @cached_property
    def launches(self) -> dict[str, Any]:
        """launch.json, without the launches after the one that saved the checkpoint."""
        found, saved_under = read_json(self.run_dir / "launch.json"), self.saved_under
        if saved_under and saved_under.launch and isinstance(found.get("launches"), list):
            found["launches"] = found["launches"][: saved_under.launch]
        return found

    @property
    def step(self) -> int:
        return int(self.checkpoint.name[5:])

    @property
    def choices(self) -> Mapping[str, Any]:
        return as_dict(public(as_dict(self.manifest.get("choices")) or as_dict(self.cfg.get("choices"))))


def make(
    source: Source,
    form: str,
    weights_sha256: str,
    files: Mapping[str, str],
    notes: Sequence[str] = (),
    kind: str | None = None,
) -> str:
    """Return the card. files: the name and the SHA-256 of each exported file. notes: what a user of them must know.

    kind: the class of transformers that loads them; None: the one for the task.
    """
    choices = source.choices
    name, task = run_name(source.run_dir.resolve()), task_of(source.cfg)
    metrics, loss = metrics_of(source)
    lines = [*front_matter(source, name, form, task, metrics), f"# {cell(name)}", ""]
    model, data = cell(choices.get("model")), cell(choices.get("data"))
    lines += [f"A {model} that dtrain trained on the data set {data}.", ""]
    lines += [f"- {shortened(note)}" for note in notes] + [""] * bool(notes)
    main = next(iter(files))
    auto = kind or AUTOS.get(task or "", "AutoModel")
    target = source.cfg["model"]["_target_"]
    use = USE["own" if form == "safetensors" and not target.startswith("dtrain.") else form]
    lines += ["```python", use.format(file=main, auto=auto, kind=cell(target)), "```", ""]
    lines += ["## Origin", "", *table(("what", "value"), origin(source, weights_sha256)), ""]
    if metrics or loss is not None:
        values = [(key, f"{value:.6g}") for key, value in metrics.items()]
        values += [("loss of the last training step", f"{loss:.6g}")] if loss is not None else []
        lines += [f"## Metrics at step {source.step}", "", *table(("metric", "value"), values), ""]
    lines += ["## Files", "", *table(("file", "SHA-256"), list(files.items())), ""]
    return hide("\n".join([*lines, "## Configuration", "", *configuration(source), ""]))


def front_matter(source: Source, name: str, form: str, task: str | None, metrics: Mapping[str, float]) -> list[str]:
    import yaml

    values: dict[str, Any] = {"library_name": LIBRARIES[form], "tags": ["dtrain", cell(source.choices.get("model"))]}
    values |= {"pipeline_tag": task} if task else {}
    if metrics:
        data = cell(source.choices.get("data"))
        found = [{"type": key.removeprefix("val_"), "name": key, "value": value} for key, value in metrics.items()]
        result = {"task": {"type": task or "other"}, "dataset": {"name": data, "type": data}, "metrics": found}
        values["model-index"] = [{"name": clean(name)[:LONGEST], "results": [result]}]
    return ["---", yaml.safe_dump(values, sort_keys=False, allow_unicode=True).rstrip(), "---", ""]


def task_of(cfg: Mapping[str, Any]) -> str | None:
    """Return Hugging Face's name of what the model does; None: not known."""
    kind = cfg["model"].get("task")
    if kind:
        return "fill-mask" if kind == "mlm" else "text-classification"
    return TASKS.get(cfg["model"]["_target_"])


def origin(source: Source, weights_sha256: str) -> list[tuple[str, str]]:
    """Return (label, value) of where the weights come from."""
    meta, choices, cfg, launches = source.manifest, source.choices, source.cfg, source.launches
    settings, summary = source.saved_under, read_json(source.run_dir / "summary.json")
    versions = environment.versions(launches)
    if settings and not settings.launch:
        of_ranks = as_dict(summary.get("versions"))
        versions |= {key: str(value) for key, value in of_ranks.items() if isinstance(value, str)}
    mesh = " × ".join(f"{name} {size}" for name, size in as_dict(meta.get("mesh")).items())
    ranks = f" on {counted(meta['world_size'], 'rank')} ({mesh})" if meta.get("world_size") else ""
    code = as_dict(environment.recorded(launches.get("launches")).get("code")) if settings else {}
    here = f"dtrain {dtrain.__version__}, torch {torch.__version__}"
    averages = ", the moving average of its weights" if source.ema else ""
    rate = f", learning rate {as_dict(settings.cfg.get('optim')).get('lr')}" if settings else ""
    values = {
        "run": f"{source.run_dir.resolve().name}, id {launches.get('id') or 'unknown'}",
        "checkpoint": f"step {source.step}, {meta.get('samples', 0)} samples{averages}",
        "data": f"{choices.get('data')}: {meta.get('data') or 'not known'}",
        "model": f"{choices.get('model')} ({cfg['model']['_target_']})",
        "parameters": f"{found:,.0f}" if (found := finite(summary.get("parameters"))) else "",
        "optimizer": f"{choices.get('optim')}{rate}",
        "strategy": f"{choices.get('strategy')}{ranks}",
        "precision": choices.get("precision"),
        "began with": beginning(settings.cfg) if settings else "",
        "forked from": lineage(launches),
        "git commit": environment.commit_text(environment.commit(launches), as_dict(public(code))) if code else "",
        "trained with": ", ".join(f"{key} {versions[key]}" for key in PACKAGES if key in versions) if settings else "",
        "exported with": here,
        "SHA-256 of the weights": f"{weights_sha256} (in fp32, with dtrain's names)",
        "SHA-256 of config.yaml": meta.get("config_sha256"),
    }
    return [(label, shortened(str(value))) for label, value in values.items() if value not in (None, "")]


def beginning(cfg: Mapping[str, Any]) -> str:
    return cfg.get("init_from") or f"random weights, seed {cfg['train']['seed']}"


def lineage(launches: Mapping[str, Any]) -> str:
    """Return the checkpoints that a run was forked from, the nearest first."""
    found: list[str] = []
    at = launches.get("forked_from")
    while isinstance(at, dict) and len(found) < MOST_ANCESTORS:
        run, step, name = (shortened(str(at.get(key) or "unknown")) for key in ("run", "step", "id"))
        found.append(f"{run}@{step} (id {name})")
        at = at.get("forked_from")
    return ", that from ".join(found)


def metrics_of(source: Source) -> tuple[dict[str, float], float | None]:
    """Return the metrics of the evaluation at the checkpoint's step, and the loss of that training step.

    {} for metrics of other weights: with averages, evaluations use the plain weights or the averages, as the run says.
    """
    cfg = source.saved_under.cfg if source.saved_under else source.cfg
    evaluates_averages = bool(as_dict(cfg.get("ema")).get("evaluate"))
    found = ownership.metrics_of(source.checkpoint) if evaluates_averages == source.ema else {}
    metrics = {key: value for key in sorted(found) if (value := finite(found[key])) is not None}
    losses = [row.get("loss") for row in rows(source.run_dir / "metrics.jsonl") if row.get("step") == source.step]
    return metrics, next((loss for loss in map(finite, losses) if loss is not None), None)


def configuration(source: Source) -> list[str]:
    """Return the settings that the weights depend on, as an indented block of YAML."""
    import yaml

    if source.saved_under is None:
        return ["Not in the run folder: it was changed after this step, or is that of the run that was forked."]
    cfg = source.saved_under.cfg
    values = {key: public(redact(cfg[key])) for key in SECTIONS if cfg.get(key) is not None}
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    return [f"    {line}" for line in text.splitlines()]  # indented: no text can end the block


def table(head: tuple[str, str], values: Sequence[tuple[str, str]]) -> list[str]:
    lines = [f"| {cell(label)} | {cell(value)} |" for label, value in values]
    return [f"| {head[0]} | {head[1]} |", "|---|---|", *lines]


def cell(value: object) -> str:
    """Return one line of text in which nothing is markup."""
    text = " ".join(clean(hide(str(value))).split())[:LONGEST]
    for character in "\\`*[]<>|#":
        text = text.replace(character, f"\\{character}")
    return text


# ---- paths ---------------------------------------------------------------------------------------------------


def public(node: Any) -> Any:
    """Shorten the paths in all texts and keys."""
    if isinstance(node, Mapping):
        found: dict[Any, Any] = {}
        for key, value in node.items():
            short = shortened(key) if isinstance(key, str) else key
            while short in found:  # /a/x and /b/x
                short = f"{short} (another)"
            found[short] = public(value)
        return found
    if isinstance(node, (list, tuple)):
        return [public(value) for value in node]
    return shortened(node) if isinstance(node, str) else node


def shortened(text: str) -> str:
    """Leave only the last part of each path: /a/b, ../a/b, a/b, file:///a/b, s3://a/b, C:\\a\\b.

    A folder's name may have spaces: from a path's beginning, everything before its last separator is left out.
    """
    return "".join(map(last_part, PATH_BEGINS.split(text)))


def last_part(text: str) -> str:
    parts = re.split(r"[/\\]", text)
    return next((part for part in reversed(parts) if part.strip()), "")


# ---- hashes and files --------------------------------------------------------------------------------------------


class Hashed:
    """Weights on their way into a file; `hexdigest` after the last one, as store.weights_sha256 computes it."""

    def __init__(self, weights: Any) -> None:
        self.weights, self.digest = weights, hashlib.sha256()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in self.weights:
            self.digest.update(f"{name}{list(weight.shape)}".encode())
            self.digest.update(weight.detach().float().cpu().contiguous().reshape(-1).numpy().data)
            yield name, weight

    def hexdigest(self) -> str:
        return self.digest.hexdigest()


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def beside(path: Path) -> Path:
    """Return where the card of a single file is: model.gguf.md for model.gguf. Refuse to replace another text."""
    card = path.with_name(f"{path.name}.md")
    if card.exists():
        try:
            with open(card, encoding="utf-8", errors="replace") as file:
                ours = MARK in file.read(4096)
        except OSError:  # a folder
            ours = False
        if not ours:
            raise bad("OUT", path, f"its model card {card.name} would replace a file of yours", "another name")
    return card
