"""The weights of a checkpoint for other programs, and as one safetensors file. Other formats: export_*.py beside."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.checkpoint import integrity, ownership, resume_point, shards, store
from dtrain.config import run_file
from dtrain.config.redaction import redact
from dtrain.config.schema import check_run
from dtrain.errors import bad
from dtrain.formats.huggingface_folder import SINGLE
from dtrain.inference import model_card
from dtrain.models import lora
from dtrain.runs.folder import read_summary
from dtrain.runs.source_lines import has_changed
from dtrain.strategies import lora_base
from dtrain.train import build as models
from dtrain.util import disk_space
from dtrain.util.format import clean
from dtrain.util.host_memory import free_bytes

MERGE_BYTES = 4 + 3 * 8  # bytes per element while adapters are merged: the element itself, and three 64-bit temporaries


def checkpoint_of(run_dir: Path, step: int | None = None) -> Path:
    """Return the checkpoint of a step, verified; without a step, the newest good one."""
    if step is not None:
        path = run_dir / "checkpoints" / f"step-{step:08d}"
        if problem := integrity.verify(path, step=step):
            raise ValueError(f"{path} is damaged ({problem})\n  fix: another checkpoint of the run")
        if ownership.is_foreign(path, ownership.run_id(path.parent)):
            raise ValueError(f"{path} was saved by another run\n  fix: another checkpoint of the run")
        return path
    found = resume_point.newest_good(run_dir / "checkpoints", say=warn, quarantine=False)  # a reader changes nothing
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
        self.run_dir, self.ema = run_dir, ema
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

    @property
    def source(self) -> model_card.Source:
        return model_card.Source(self.run_dir, self.path, self.cfg, self.ema)

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

    def with_own_names(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield what the model's own state_dict() has: a tied weight under each of its names, no transient buffers.

        So a strict load_state_dict() takes it. A checkpoint from before these names were saved stays as it is.
        """
        others: dict[str, list[str]] = {}
        for other, name in self.manifest.meta.get("tied", {}).items():
            others.setdefault(name, []).append(other)
        transient = set(self.manifest.meta.get("transient", ()))
        for name, weight in weights:
            if name not in transient:
                yield name, weight
                yield from ((other, weight) for other in others.get(name, ()))


def check_shapes(
    path: Path,
    model: nn.Module,
    saved: Mapping[str, Tensor],
    names: Iterable[str],
    made_by: tuple[str, Any] = ("", None),
) -> None:
    """Refuse a checkpoint that does not match the model: merging adapters of any shape could make any matrix.

    made_by: the name of the class or function that has made the model, and itself, for messages.
    """
    known = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    shapes = {name: tuple(values.shape) for name, values in known}
    odd = [f"{name} is missing" for name in names if name not in saved]
    for name, values in saved.items():
        if shapes.get(name) != tuple(values.shape):
            there = list(shapes[name]) if name in shapes else "no such weight"
            odd.append(f"{name} has shape {list(values.shape)}, and {there} in the model")
    odd = sorted(odd, key=lambda text: text.endswith("is missing"))
    if odd and (rule := has_changed(*made_by, path, odd)):
        raise ValueError(f"{rule}\n  fix: put the old code of {made_by[0]} back")
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
    """Write a checkpoint's weights as one safetensors file that any reader of the format loads, and a model card."""
    path = one_file(path, SINGLE)
    final = Final(run_dir, trust, step, ema)
    weights = model_card.Hashed(final)
    with replacing(path) as temporary:
        model = json.dumps(model_card.public(redact(final.cfg.model)))
        shapes = dict(final.with_own_names(final.empty().items()))
        write_stream(temporary, shapes, final.with_own_names(weights), dtype, {"format": "pt", "model": model})
    write_card(path, final, "safetensors", weights.hexdigest())
    return path


def one_file(path: Path, name: str) -> Path:
    """Return where one file is written, with links followed; refuse a folder. name: for the fix."""
    path = path.resolve()
    if path.is_dir():
        raise bad("OUT", path, "is a folder, but this format is one file", f"{path / name}, or --format hf")
    model_card.beside(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a name beside `path`, which replaces it at the end: the file is complete, or as before."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:  # Ctrl-C too
        temporary.unlink(missing_ok=True)
        raise


def write_card(path: Path, final: Final, form: str, digest: str, notes: Iterable[str] = ()) -> None:
    """Write the model card of a single file beside it."""
    text = model_card.make(final.source, form, digest, {path.name: model_card.file_sha256(path)}, list(notes))
    with replacing(model_card.beside(path)) as temporary:
        temporary.write_text(text)


def write_stream(
    path: Path,
    shapes: Mapping[str, Tensor],
    weights: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype | None,
    metadata: dict[str, str],
) -> None:
    """Write one safetensors file, weight by weight: 70 B parameters take 282 GB, more than a host's memory."""
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, empty in shapes.items():
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
            for name, weight in weights:
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


# ---- a folder ------------------------------------------------------------------------------------------------


@contextmanager
def new_folder(folder: Path, last: str = "config.json") -> Iterator[Path]:
    """Yield an empty folder whose files are moved to `folder` at the end: it is complete or missing.

    An existing empty folder is kept, as it may be a mount or a shell's working directory. Then the file `last` is moved
    last: without it, there is no model.
    """
    folder = folder.resolve()  # keeps a link
    there = folder.exists()
    if there and (not folder.is_dir() or any(folder.iterdir())):
        raise bad("OUT", folder, "already exists, and is not overwritten", "use another folder, or remove it")
    partial = (folder / "x" if there else folder).with_name(f".{folder.name}.partial-{uuid.uuid4().hex[:8]}")
    partial.mkdir(parents=True)
    try:
        yield partial
        if there:
            for file in sorted(partial.iterdir(), key=lambda file: file.name == last):
                file.replace(folder / file.name)
            partial.rmdir()
        else:
            partial.replace(folder)
    except BaseException:  # Ctrl-C too
        shutil.rmtree(partial, ignore_errors=True)
        raise


def add_card(
    folder: Path, final: Final, form: str, digest: str, main: str, notes: Iterable[str] = (), kind: str | None = None
) -> None:
    """Write README.md of an exported folder. main: its most important file. kind: the class that loads it."""
    names = sorted((file.name for file in folder.iterdir()), key=lambda name: (name != main, name))
    files = {name: model_card.file_sha256(folder / name) for name in names}
    (folder / model_card.README).write_text(model_card.make(final.source, form, digest, files, list(notes), kind))
