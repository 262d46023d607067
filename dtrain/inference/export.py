"""Export a checkpoint's weights: one safetensors file, or a folder that Hugging Face's transformers loads."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import sys
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.checkpoint import shards, store
from dtrain.checkpoint.initial_weights import by_part
from dtrain.config import run_file
from dtrain.config.build import build
from dtrain.config.run_file import Settings
from dtrain.config.schema import check_run
from dtrain.data import text
from dtrain.errors import bad
from dtrain.formats import huggingface
from dtrain.formats.bounded import read_json
from dtrain.formats.huggingface_folder import INDEX, SINGLE, read_config
from dtrain.models import lora
from dtrain.runs.folder import read_summary
from dtrain.strategies import lora_base
from dtrain.train import build as models
from dtrain.util import disk_space
from dtrain.util.format import clean
from dtrain.util.host_memory import free_bytes

log = logging.getLogger("dtrain")
MERGE_BYTES = 4 + 3 * 8  # bytes per element while adapters are merged: the element itself, and three 64-bit temporaries
SHARD_BYTES = 5 * 10**9  # per file of a Hugging Face folder: save_pretrained's default for years


def checkpoint_of(run_dir: Path, step: int | None = None) -> Path:
    """Return the checkpoint of a step, verified; without a step, the newest good one."""
    if step is not None:
        path = run_dir / "checkpoints" / f"step-{step:08d}"
        if problem := store.verify(path, step=step):
            raise ValueError(f"{path} is damaged ({problem})\n  fix: another checkpoint of the run")
        if store.is_foreign(path, store.run_id(path.parent)):
            raise ValueError(f"{path} was saved by another run\n  fix: another checkpoint of the run")
        return path
    found = store.newest_good(run_dir / "checkpoints", say=warn, quarantine=False)  # a reader changes nothing
    if found is None:
        raise no_checkpoint(run_dir)
    return found[0]


def no_checkpoint(run_dir: Path) -> ValueError:
    """Return the error of a run without a checkpoint: it will have one only if it saves some, and trains."""
    if not run_file.load(run_dir).get("checkpoint", {}).get("save", True):
        rule, fix = "saves no checkpoint (checkpoint.save=false)", "a run that saves some; dtrain runs lists the runs"
    elif read_summary(run_dir).get("status") in (None, "running"):
        rule, fix = "has no checkpoint yet", "wait until it has saved its first one (checkpoint.every)"
    else:
        rule, fix = "ended without a checkpoint", "a run that has saved one; dtrain runs lists the runs"
    return ValueError(f"{run_dir} {rule}\n  fix: {fix}")


def warn(text: str) -> None:
    """On stderr: stdout has the result, perhaps as JSON."""
    print(f"warning: {clean(text)}", file=sys.stderr, flush=True)


class Final:
    """The model weights of a run's checkpoint, by canonical name: `empty` returns their shapes, iteration the weights.

    step: None for the newest good checkpoint. ema: the moving average of the weights.
    """

    def __init__(self, run_dir: Path, trust: Iterable[str] = (), step: int | None = None, ema: bool = False) -> None:
        self.ema = ema
        self.path, self.cfg, self.trust = checkpoint_of(run_dir, step), run_file.load(run_dir), trust
        self.manifest = store.read_manifest(self.path)
        check_run(self.cfg, trust, ())
        self.adapted = bool(self.cfg.get("lora", {}).get("rank"))

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield full weights, one at a time, with adapters merged.

        Discard what was yielded if an error follows at the end (adapters on a base that they were not trained on).
        """
        if not self.adapted:
            yield from store.weights(self.path, self.ema)
            return
        cfg, saved = self.cfg, dict(store.weights(self.path, self.ema))
        model = models.make(cfg, self.trust)
        check_shapes(self.path, model, saved, [name for name, p in model.named_parameters() if p.requires_grad])
        check_memory(self.path, max(map(math.prod, lora.base_of(model).values()), default=0) * MERGE_BYTES)
        first = lora_base.First(models.original_weights(cfg, self.trust), model)
        yield from lora.merged(base_weights(model, first), saved, cfg.lora.alpha / cfg.lora.rank)
        lora_base.check(self.manifest.meta.get("extra", {}).get("base"), first.fingerprint())
        yield from ((name, buffer) for name, buffer in saved.items() if not lora.is_adapter(name))

    def empty(self) -> dict[str, Tensor]:
        """Return the weights, in order, as meta tensors."""
        saved = {
            name.removeprefix("model."): torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")
            for name, spec in sorted(self.manifest.tensors.items()) if name.startswith("model.")
        }  # fmt: skip
        if not self.adapted:
            return saved
        base = sorted(lora.base_of(models.make(self.cfg, self.trust)).items())
        rest = {name: buffer for name, buffer in saved.items() if not lora.is_adapter(name)}
        return {name: torch.empty(shape, device="meta") for name, shape in base} | rest


def check_shapes(path: Path, model: nn.Module, saved: Mapping[str, Tensor], names: Iterable[str]) -> None:
    """Refuse a checkpoint that does not match the model: merging adapters of any shape could make any matrix."""
    shapes = {name: tuple(values.shape) for name, values in model.state_dict().items()}
    odd = [f"{name} is missing" for name in names if name not in saved]
    for name, values in saved.items():
        if shapes.get(name) != tuple(values.shape):
            there = list(shapes[name]) if name in shapes else "no such weight"
            odd.append(f"{name} has shape {list(values.shape)}, and {there} in the model")
    if odd:
        raise ValueError(
            f"{path}: its weights are not those of the model in config.yaml: {odd[0]}; {len(odd)} differences in all\n"
            "  fix: use the config.yaml and the checkpoint of the same run"
        )


def check_memory(path: Path, num_bytes: int) -> None:
    """Refuse what this host cannot hold, before the kernel's OOM killer acts."""
    free = free_bytes()
    if free is not None and num_bytes > free:
        raise ValueError(
            f"{path}: needs {num_bytes / 2**30:.1f} GiB of memory, and {free / 2**30:.1f} are free here\n"
            "  fix: check that config.yaml is as the run wrote it, then use a host with more memory"
        )


def final_weights(
    run_dir: Path, trust: Iterable[str] = (), step: int | None = None, ema: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Return a run's weights: the only way to get them, for export, sampling and evaluation. See `Final`."""
    return iter(Final(run_dir, trust, step, ema))


def base_weights(model: nn.Module, first: lora_base.First) -> Iterator[tuple[str, Tensor]]:
    """Yield every frozen weight as it was when the run began, in full, one at a time."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # the device on which a run here draws
    for name, shape in first.base.items():
        weight = torch.empty(shape)
        first.fill(model, name, weight, device)
        yield name, weight


# ---- one file ------------------------------------------------------------------------------------------------


def export_file(
    run_dir: Path,
    path: Path,
    dtype: torch.dtype | None = None,
    trust: Iterable[str] = (),
    step: int | None = None,
    ema: bool = False,
) -> Path:
    """Write a checkpoint's weights as one safetensors file that any reader of the format loads."""
    path = path.resolve()  # keeps a link
    if path.is_dir():
        raise bad("OUT", path, "is a folder, but this format is one file", f"{path / SINGLE}, or --format hf")
    final = Final(run_dir, trust, step, ema)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        write_stream(temporary, final, dtype, {"format": "pt", "model": json.dumps(final.cfg.model)})
        temporary.replace(path)
    except BaseException:  # Ctrl-C too
        temporary.unlink(missing_ok=True)
        raise
    return path


def write_stream(path: Path, final: Final, dtype: torch.dtype | None, metadata: dict[str, str]) -> None:
    """Write one safetensors file, weight by weight: 70 B parameters take 282 GB, more than a host's memory."""
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, empty in final.empty().items():
        weight = as_dtype(empty, dtype)
        begin, end = end, end + weight.nbytes
        header[name] = {"dtype": shards.DTYPES[weight.dtype], "shape": list(weight.shape), "data_offsets": [begin, end]}
    start = json.dumps(header).encode()
    start += b" " * (-len(start) % 8)  # the format requires aligned tensors
    names = iter(header)
    next(names)
    try:
        with open(path, "wb") as file:
            file.write(len(start).to_bytes(8, "little") + start)
            for name, weight in final:
                weight = as_dtype(weight, dtype)
                written = (next(names, None), header.get(name, {}).get("shape"))
                assert written == (name, list(weight.shape)), f"{name} differs from its header: {written}"
                if weight.numel():
                    file.write(weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            assert next(names, None) is None and file.tell() == 8 + len(start) + end, "the header says more"
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise disk_space.describe(error, path, 8 + len(start) + end) from error


def as_dtype(weight: Tensor, dtype: torch.dtype | None) -> Tensor:
    return weight if dtype is None or not weight.is_floating_point() else weight.to(dtype)


# ---- a Hugging Face folder -----------------------------------------------------------------------------------


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
    family = huggingface.of_target(cfg.model["_target_"])
    if family is None:
        known = ", ".join(f"{f.target} ({f.model_type})" for f in huggingface.FAMILIES.values())
        rule = f"transformers has no counterpart of {cfg.model['_target_']}; it has counterparts of {known}"
        raise bad("--format", "hf", rule, "--format safetensors")
    folder = folder.resolve()  # keeps a link
    there = folder.exists()
    if there and (not folder.is_dir() or any(folder.iterdir())):
        raise bad("OUT", folder, "already exists, and is not overwritten", "use another folder, or remove it")
    # an existing empty folder is kept: it may be a mount, or a shell's working directory
    partial = (folder / "x" if there else folder).with_name(f".{folder.name}.partial-{uuid.uuid4().hex[:8]}")
    partial.mkdir(parents=True)
    try:
        weights = final_weights(run_dir, trust, step, ema)
        write_shards(partial, translated(weights, family, cfg.model, dtype), shard_bytes)
        values = config_of(cfg, family, trust)
        values["dtype"] = str(dtype or torch.float32).removeprefix("torch.")  # masters are fp32
        (partial / "config.json").write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
        tokenizer = tokenizer_of(cfg.data)
        if tokenizer is not None and is_tokenizer(tokenizer):
            shutil.copyfile(tokenizer, partial / "tokenizer.json")
        if there:
            for file in sorted(partial.iterdir(), reverse=True):  # config.json comes last: without it there is no model
                file.replace(folder / file.name)
            partial.rmdir()
        else:
            partial.replace(folder)
    except BaseException:  # Ctrl-C too
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return folder


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


def config_of(cfg: Settings, family: huggingface.Family, trust: Iterable[str]) -> dict[str, Any]:
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
        names = class_names(cfg, trust)
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


def class_names(cfg: Settings, trust: Iterable[str]) -> list[str]:
    """Return the data's class names; LABEL_0, ... as in transformers if they are unknown."""
    number, labels = cfg.model["num_classes"], []
    try:
        labels = [str(label) for label in getattr(build(cfg.data, trust), "labels", [])]
    except (ValueError, OSError) as error:
        log.warning("the names of the classes are not known: %s", error)
    return labels if len(labels) == number else [f"LABEL_{i}" for i in range(number)]


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
