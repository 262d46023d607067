"""A run's final weights for others: one safetensors file, or a folder that Hugging Face's transformers loads."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dtrain import checkpoint, config, shards
from dtrain.config import Settings, bad
from dtrain.init_from import INDEX, SINGLE
from dtrain.models import build as models
from dtrain.models import hf, lora
from dtrain.rundir import read_json
from dtrain.strategies import frozen
from dtrain.weights import by_part

SHARD_BYTES = 5 * 10**9  # of a file of a Hugging Face folder: what save_pretrained made for years


def newest_checkpoint(run_dir: Path) -> Path:
    found = checkpoint.newest_good(run_dir / "checkpoints", quarantine=False)  # a reader changes nothing
    if found is None:
        raise ValueError(f"{run_dir} has no checkpoint yet\n  fix: let it train up to its first one (checkpoint.every)")
    return found[0]


def final_weights(run_dir: Path, trust: Iterable[str] = ()) -> Iterator[tuple[str, Tensor]]:
    """Every weight of the run's model as it is now, whole, one at a time, by canonical name; adapters are merged in.

    The one way from a run to its weights: for export, sampling and evaluation. What comes before an error at its end
    (adapters whose base is not the one they were trained on) is not to be used.
    """
    path, cfg = newest_checkpoint(run_dir), config.load(run_dir)
    if not cfg.get("lora", {}).get("rank"):
        yield from checkpoint.weights(path)
        return
    model, saved = models.make(cfg, trust), dict(checkpoint.weights(path))
    first = frozen.First(models.original_weights(cfg, trust), model)
    yield from lora.merged(base_weights(model, first), saved, cfg.lora.alpha / cfg.lora.rank)
    frozen.check(checkpoint.read_manifest(path)["extra"].get("base"), first.fingerprint())
    yield from ((name, buffer) for name, buffer in saved.items() if not lora.is_adapter(name))


def base_weights(model: nn.Module, first: frozen.First) -> Iterator[tuple[str, Tensor]]:
    """Every weight that adapters left as it was when the run began, whole, one at a time."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # where a run here draws
    for name, shape in first.base.items():
        weight = torch.empty(shape)
        first.fill(model, name, weight, device)
        yield name, weight


# ---- one file ------------------------------------------------------------------------------------------------


def export_file(run_dir: Path, path: Path, dtype: torch.dtype | None = None, trust: Iterable[str] = ()) -> Path:
    """Write the newest weights as one safetensors file that any reader of the format loads."""
    cfg = config.load(run_dir)
    state = {name: as_dtype(weight, dtype) for name, weight in final_weights(run_dir, trust)}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    shards.write(temporary, state, {"format": "pt", "model": json.dumps(cfg.model)})
    temporary.replace(path)
    return path


def as_dtype(weight: Tensor, dtype: torch.dtype | None) -> Tensor:
    return weight if dtype is None or not weight.is_floating_point() else weight.to(dtype)


# ---- a Hugging Face folder -----------------------------------------------------------------------------------


def export_hf(
    run_dir: Path,
    folder: Path,
    dtype: torch.dtype | None = None,
    trust: Iterable[str] = (),
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write a folder that transformers' from_pretrained loads; it is complete, or not there."""
    cfg = config.load(run_dir)
    family = hf.of_target(cfg.model["_target_"])
    if family is None:
        known = ", ".join(f"{f.target} ({f.model_type})" for f in hf.FAMILIES.values())
        rule = f"transformers has no counterpart of {cfg.model['_target_']}; it has those of {known}"
        raise bad("--format", "hf", rule, "--format safetensors")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise bad("OUT", folder, "is there already, and is not overwritten", "another folder, or remove it")
    partial = folder.with_name(f".{folder.name}.partial-{uuid.uuid4().hex[:8]}")
    partial.mkdir(parents=True)
    try:
        write_shards(partial, translated(final_weights(run_dir, trust), family, cfg.model, dtype), shard_bytes)
        values = {"model_type": family.model_type, **family.config(cfg.model), **special_tokens(cfg)}
        values["dtype"] = str(dtype or torch.float32).removeprefix("torch.")  # masters are float32
        (partial / "config.json").write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
        tokenizer = tokenizer_of(cfg.data)
        if tokenizer is not None:
            shutil.copyfile(tokenizer, partial / "tokenizer.json")
        partial.replace(folder)  # also onto an empty folder
    except BaseException:  # Ctrl-C too
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return folder


def translated(
    weights: Iterable[tuple[str, Tensor]], family: hf.Family, model: Mapping[str, Any], dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    """Weights under Hugging Face's names and in its layout, without the rows that only pad the vocabulary."""
    for name, weight in weights:
        if family.theirs(name) is None:
            raise bad("--format", "hf", f"{name} has no counterpart in {family.model_type}", "--format safetensors")
        if name in hf.VOCABULARY:
            weight = weight[: model["vocab_size"]]
        change = family.change(name)
        if change == hf.HEADS:
            weight = by_part(weight, model["num_heads"])
        elif change == hf.TRANSPOSED:
            weight = weight.t()
        yield family.full(name), weight.to(dtype or torch.float32).contiguous()


def write_shards(folder: Path, weights: Iterable[tuple[str, Tensor]], shard_bytes: int) -> None:
    """One file, or several with an index; never more than one of them in memory."""
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


def special_tokens(cfg: Settings) -> dict[str, Any]:
    """Which tokens begin and end a text: what the folder says that the run began with, if it is still there."""
    began = read_json(Path(cfg.get("init_from") or "") / "config.json")
    return {k: began[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id") if k in began}


def tokenizer_of(data: Mapping[str, Any]) -> Path | None:
    """The tokenizer's file that the run's data names, or that lies in its folder of tokens; None: it has bytes."""
    named, path = data.get("tokenizer"), data.get("path")
    candidates = [Path(named)] if isinstance(named, str) else []
    candidates += [Path(path) / "tokenizer.json"] if isinstance(path, str) else []
    return next((p for p in candidates if p.is_file()), None)
