"""Export a checkpoint's weights as a folder that Hugging Face's transformers loads."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtrain.checkpoint import shards
from dtrain.checkpoint.initial_weights import by_part
from dtrain.config import run_file
from dtrain.config.build import build
from dtrain.config.run_file import Settings
from dtrain.data import check, text
from dtrain.errors import bad
from dtrain.formats import huggingface
from dtrain.formats.bounded import read_json
from dtrain.formats.huggingface_folder import INDEX, SINGLE, read_config
from dtrain.inference.export import Final, add_card, new_folder
from dtrain.inference.model_card import Hashed
from dtrain.inference.sample import checked_config, filled
from dtrain.train import build as models

log = logging.getLogger("dtrain")
FROM_FOLDER = "dtrain.models.hf_folder.from_folder"  # model=hf:FOLDER
SHARD_BYTES = 5 * 10**9  # per file: save_pretrained's default for years


def export_hf(
    run_dir: Path,
    folder: Path,
    dtype: torch.dtype | None = None,
    trust: Iterable[str] = (),
    shard_bytes: int = SHARD_BYTES,
    step: int | None = None,
    ema: bool = False,
) -> Path:
    """Write a folder that transformers' from_pretrained loads; it is complete or missing."""
    cfg = run_file.load(run_dir)
    family, folder = huggingface.of_target(cfg.model["_target_"]), folder.resolve()
    if family is None:
        return export_own(run_dir, folder, dtype, list(trust), shard_bytes, step, ema)
    with new_folder(folder) as partial:
        final = Final(run_dir, trust, step, ema)
        weights = Hashed(final)
        write_shards(partial, translated(weights, family, cfg.model, dtype), shard_bytes)
        values = config_of(cfg, family, class_names(final, trust))
        values["dtype"] = str(dtype or torch.float32).removeprefix("torch.")  # masters are fp32
        (partial / "config.json").write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
        add_tokenizer(partial, cfg)
        add_card(partial, final, "hf", weights.hexdigest(), "config.json")
    return folder


def export_own(
    run_dir: Path,
    folder: Path,
    dtype: torch.dtype | None,
    trust: list[str],
    shard_bytes: int,
    step: int | None,
    ema: bool,
) -> Path:
    """Write a model of transformers, from the user's code or a folder, by its own save_pretrained()."""
    target = run_file.load(run_dir).model["_target_"]
    if target.startswith("dtrain.") and target != FROM_FOLDER:
        known = ", ".join(f"{f.target} ({f.model_type})" for f in huggingface.FAMILIES.values())
        rule = f"transformers has no counterpart of {target}; it has counterparts of {known}"
        raise bad("--format", "hf", rule, "--format safetensors")
    cfg = checked_config(run_dir, trust, ("model",))
    model = models.plain(cfg, trust)
    if not is_of_transformers(model):
        rule = f"{target} gives a {type(model).__name__}, which is not a model of transformers"
        raise bad("--format", "hf", rule, "--format safetensors, which its load_state_dict() takes")
    with new_folder(folder) as partial:
        final = Final(run_dir, trust, step, ema)
        weights = Hashed(final)
        saved: Any = filled(model, final, torch.device("cpu"), weights)
        saved.to(dtype or torch.float32).save_pretrained(partial, max_shard_size=shard_bytes)
        add_tokenizer(partial, cfg)
        add_card(partial, final, "hf", weights.hexdigest(), "config.json", kind=type(model).__name__)
    return folder


def is_of_transformers(model: Any) -> bool:
    """Return whether it is a model of the transformers package, which then has been imported."""
    package = sys.modules.get("transformers")
    return package is not None and isinstance(model, package.PreTrainedModel)


def add_tokenizer(folder: Path, cfg: Settings) -> None:
    """Copy the data's tokenizer file, if it has one."""
    tokenizer = tokenizer_of(cfg.data) or tokenizer_of(cfg.model)  # of model=hf:FOLDER
    if tokenizer is not None and is_tokenizer(tokenizer):
        shutil.copyfile(tokenizer, folder / "tokenizer.json")


def translated(
    weights: Iterable[tuple[str, Tensor]],
    family: huggingface.Family,
    model: Mapping[str, Any],
    dtype: torch.dtype | None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield weights with Hugging Face's names and layout, without the rows that only pad the vocabulary."""
    for name, weight in weights:
        if family.theirs(name) is None:
            raise bad("--format", "hf", f"{name} has no counterpart in {family.model_type}", "--format safetensors")
        if name in huggingface.VOCABULARY:
            weight = weight[: model["vocab_size"]]
        change = family.change(name)
        if change == huggingface.HEADS:
            weight = by_part(weight, model["num_heads"])
        elif change == huggingface.TRANSPOSED:
            weight = weight.t()
        yield family.full(name), weight.to(dtype or torch.float32).contiguous()


def write_shards(folder: Path, weights: Iterable[tuple[str, Tensor]], shard_bytes: int) -> None:
    """Write one file, or several with an index; at most one of them is in memory."""
    shard: dict[str, Tensor] = {}
    written: list[tuple[Path, list[str]]] = []
    size = total = 0

    def flush() -> None:
        path = folder / f"part-{len(written)}"
        shards.write(path, shard, {"format": "pt"})
        written.append((path, list(shard)))
        shard.clear()

    for name, weight in weights:
        if shard and size + weight.nbytes > shard_bytes:
            flush()
            size = 0
        shard[name] = weight
        size, total = size + weight.nbytes, total + weight.nbytes
    flush()
    if len(written) == 1:
        written[0][0].rename(folder / SINGLE)
        return
    places: dict[str, str] = {}
    for i, (path, names) in enumerate(written, 1):
        file = f"model-{i:05d}-of-{len(written):05d}.safetensors"
        path.rename(folder / file)
        places |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def config_of(cfg: Settings, family: huggingface.Family, names: list[str]) -> dict[str, Any]:
    """Return config.json: the model's settings, plus values from the init_from folder and from the data."""
    values = {"model_type": family.model_type, **family.config(cfg.model)}
    began = first_config(Path(cfg.init_from)) if cfg.get("init_from") else {}
    tokens = ("bos_token_id", "eos_token_id", "pad_token_id")
    values |= {k: began[k] for k in tokens if k in began and _is_token(began[k])}
    if "positions" not in family.outside:  # rotary: training on short texts does not remove long positions
        length = began.get("max_position_embeddings")
        if type(length) is int and length <= huggingface.LARGEST["seq_len"]:
            values["max_position_embeddings"] = max(values["max_position_embeddings"], length)
    if "eos_token_id" in values and values["eos_token_id"] is None:
        values["eos_token_id"] = end_token(tokenizer_of(cfg.data))
    if "id2label" in values:
        values |= {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
    return values


def first_config(folder: Path) -> dict[str, Any]:
    """Return config.json of the init_from folder; {} if it is gone or unreadable."""
    try:
        return read_config(folder)
    except ValueError:
        return {}


def _is_token(value: Any) -> bool:
    """Return whether it is an id, a list of ids (Llama 3 has three end tokens), or None."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    return len(ids) <= 64 and all(type(i) is int and 0 <= i < huggingface.LARGEST["vocab_size"] for i in ids)


def end_token(tokenizer: Path | None) -> int | None:
    """Return the token that the data has between two documents."""
    if tokenizer is None:
        return None
    try:
        return text.FileTokenizer(str(tokenizer)).separator
    except ValueError as error:
        log.warning("the end token is not known: %s", error)
        return None


def class_names(final: Final, trust: Iterable[str]) -> list[str]:
    """Return the names of a classifier's classes; LABEL_0, ... as in transformers if they are unknown."""
    number = final.cfg.model.get("num_classes")
    if not number or final.cfg.model.get("task", "classify") != "classify":
        return []
    saved = list(final.manifest.meta.get("classes", ()))
    if len(saved) == number:
        return saved
    try:
        names = check.class_names(build(final.cfg.data, trust), number)
    except (ValueError, OSError) as error:
        names = []
        log.warning("the names of the classes are not known: %s", error)
    return names or [f"LABEL_{i}" for i in range(number)]


def is_tokenizer(path: Path) -> bool:
    """Return whether it is a tokenizer: an untrusted run folder may name a file that must not be published."""
    try:
        model = read_json(path, text.LARGEST_TOKENIZER).get("model")
    except (OSError, ValueError, AttributeError) as error:
        log.warning("%s is not a tokenizer, so it is not exported: %s", path, error)
        return False
    if not isinstance(model, dict) or "vocab" not in model:
        log.warning("%s is not a tokenizer, so it is not exported", path)
        return False
    return True


def tokenizer_of(data: Mapping[str, Any]) -> Path | None:
    """Return the tokenizer file that the data names, or that is in its token folder; None: the data has bytes."""
    named, path = data.get("tokenizer"), data.get("path")
    candidates = [Path(named)] if isinstance(named, str) else []
    candidates += [Path(path) / "tokenizer.json"] if isinstance(path, str) else []
    return next((p for p in candidates if p.is_file()), None)
