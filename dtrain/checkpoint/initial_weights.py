"""A run's initial weights, by canonical name: the same under every strategy and world size."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor, nn

from dtrain.checkpoint import integrity, resume_point, shards, store
from dtrain.errors import bad
from dtrain.formats import huggingface, huggingface_folder
from dtrain.util.dtensor import Chunk, Held, chunks_of

log = logging.getLogger("dtrain")


class Drawn:
    """Random initial weights: every weight and buffer depends only on (seed, name).

    Each is drawn in full, one at a time, and each rank keeps its shard, so no rank ever holds the full model. A CPU and
    a GPU draw different numbers, so `device` draws offloaded weights, too.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    @torch.no_grad()
    def fill(self, model: nn.Module, name: str, held: Held, device: torch.device) -> None:
        chunks = chunks_of(held)
        if not chunks:
            return
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7]))
        whole = torch.empty(chunks[0].whole_shape, dtype=chunks[0].values.dtype, device=device)
        model.init_weights(name, whole, generator)  # type: ignore[operator]
        for chunk in chunks:
            chunk.values.copy_(whole[chunk.box])


class Source(Protocol):
    """A source of stored weights, by our names."""

    path: Path

    def shape(self, name: str, wanted: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the shape that it can provide for a weight: `wanted` if possible; None if it has no such weight."""

    def read(self, name: str, chunk: Chunk) -> None:
        """Fill a rank's part of a weight, reading no more than necessary."""

    def unasked(self, names: Iterable[str]) -> list[str]:
        """Return the model's own weights that the source has beyond these names."""


class Loaded(Drawn):
    """Initial weights from a source; weights that are new in the model are drawn."""

    def __init__(self, seed: int, source: Source, model: nn.Module) -> None:
        """`model`: the full model, on any device, to compare names and shapes before reading anything."""
        super().__init__(seed)
        self.source = source
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        buffers = {name: tuple(b.shape) for name, b in model.named_buffers()}
        self.names: set[str] = set()  # read from the source; all others are drawn
        self.drawn: list[str] = []
        wrong = []
        for name, wanted in (shapes | buffers).items():
            shape = source.shape(name, wanted)
            if shape == wanted:
                self.names.add(name)
            elif huggingface.is_new(name) if shape is None else huggingface.other_classes(name, shape, wanted):
                self.drawn.append(name)
            elif shape is not None:
                wrong.append(f"{name} has shape {list(shape)} in init_from, {list(wanted)} in the model")
            elif name in shapes:  # a buffer that is not saved is computed
                wrong.append(f"{name} is missing in init_from")
        wrong += [f"{n} is not in the model" for n in source.unasked(shapes | buffers)]
        if wrong:
            rule = f"its weights do not match the model: {wrong[0]}; {len(wrong)} differences in all"
            raise bad("init_from", source.path, rule, "use the model settings that it was saved with")

    @torch.no_grad()
    def fill(self, model: nn.Module, name: str, held: Held, device: torch.device) -> None:
        if name not in self.names:
            super().fill(model, name, held, device)
            return
        for chunk in chunks_of(held):
            if chunk.values.numel():
                self.source.read(name, chunk)


class Saved:
    """The weights of a run's checkpoint, whatever layout they were saved under."""

    def __init__(self, path: Path) -> None:
        """Collective: all ranks share the work of verifying every byte."""
        self.path = path
        if not (path / "manifest.json").is_file():
            found = resume_point.newest_good(path / "checkpoints", say=log.warning, quarantine=False)
            if found is None:
                raise bad("init_from", path, "the run has no checkpoint", "choose another run; dtrain runs lists them")
            path = found[0]
        elif problem := integrity.verify(path):
            raise bad(
                "init_from", path, f"the checkpoint is damaged ({problem})", "use an older checkpoint of the same run"
            )
        self.folder = path
        self.saved = store.read_manifest(path)

    def shape(self, name: str, wanted: tuple[int, ...]) -> tuple[int, ...] | None:
        spec = self.saved.tensors.get(f"model.{name}")
        return None if spec is None else cut(name, spec.shape, wanted)

    def read(self, name: str, chunk: Chunk) -> None:
        with shards.Reader(self.folder, self.saved) as reader:  # opened per weight: mapped pages count as memory
            reader.fill(f"model.{name}", chunk)

    def unasked(self, names: Iterable[str]) -> list[str]:
        known = set(names)
        ours = [n.removeprefix("model.") for n in self.saved.tensors if n.startswith("model.")]
        # another task's head may be left out; a layer may not
        return [n for n in ours if n.startswith("layers.") and n not in known]


class HuggingFace:
    """The weights of a Hugging Face folder, read from its safetensors files piece by piece."""

    def __init__(self, path: Path, model: Mapping[str, Any]) -> None:
        self.path, self.num_heads = path, model.get("num_heads", 1)
        huggingface_folder.check_folder(path, model)
        self.family = huggingface_folder.family_of(path, huggingface_folder.read_config(path))
        self.entries = huggingface_folder.read_entries(path, self.family)
        self.means: dict[str, Tensor] = {}

    def shape(self, name: str, wanted: tuple[int, ...]) -> tuple[int, ...] | None:
        entry = self.entries.get(self.family.theirs(name) or "")
        if entry is None:
            return None
        turned = self.family.change(name) != huggingface.SAME
        shape = cut(name, entry.shape[::-1] if turned else entry.shape, wanted)
        more_rows = name in huggingface.VOCABULARY and shape[:1] < wanted[:1] and shape[1:] == wanted[1:]
        return wanted if more_rows else shape

    def unasked(self, names: Iterable[str]) -> list[str]:
        """Return layers that the model lacks. Anything else is another task's head, or a table that is not a weight."""
        asked = {self.family.theirs(name) for name in names}
        layers = {self.family.layer_of(theirs) for theirs in asked if theirs}
        return [e.name for bare, e in self.entries.items() if self.family.layer_of(bare) not in layers | {None}]

    def read(self, name: str, chunk: Chunk) -> None:
        entry = self.entries[self.family.theirs(name) or ""]
        change = self.family.change(name)
        # opened per weight: the file is mapped, and pages that were read count as this process's memory
        with safe_open(self.path / entry.file, framework="pt") as file:
            if change == huggingface.HEADS:  # the full tensor: a head's rows are in three places
                chunk.values.copy_(by_head(file.get_tensor(entry.name), self.num_heads)[chunk.box])
            elif change == huggingface.TRANSPOSED:
                chunk.values.copy_(file.get_slice(entry.name)[chunk.box[::-1]].T)
            else:
                rows, *rest = chunk.box
                there = min(max(entry.shape[0] - rows.start, 0), chunk.shape[0])
                if there:
                    values = file.get_slice(entry.name)[(slice(rows.start, rows.start + there), *rest)]
                    chunk.values[:there].copy_(values)
                if there < chunk.shape[0]:
                    chunk.values[there:].copy_(self.mean(file, entry)[tuple(rest)])

    def mean(self, file: Any, entry: huggingface_folder.Entry) -> Tensor:
        """Return the mean of all rows, for tokens that the file lacks and that only pad the vocabulary.

        Their logit is then the mean of all others, so by Jensen's inequality each is at most as likely as the average
        of the others. Zeros would fail: GPT-2's logits are near -100, so a logit of 0 would take all the probability.
        """
        if entry.name not in self.means:
            values = file.get_slice(entry.name)
            blocks = [values[i : i + 4096].double().numpy().sum(axis=0) for i in range(0, entry.shape[0], 4096)]
            # numpy's sum has the same bits for any number of threads, so all ranks and layouts get the same rows
            self.means[entry.name] = torch.as_tensor(sum(blocks) / entry.shape[0])
        return self.means[entry.name]


def cut(name: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[int, ...]:
    """Return the resulting shape: a model for shorter texts takes the first positions."""
    shorter = name == huggingface.POSITIONS and wanted[:1] < shape[:1] and wanted[1:] == shape[1:]
    return wanted if shorter else shape


def by_head(weight: Tensor, num_heads: int) -> Tensor:
    """Reorder Conv1D's [in, queries | keys | values], or its bias, to rows of q, k, v of head 0, then of head 1, ..."""
    rows = weight.t() if weight.dim() == 2 else weight
    return rows.unflatten(0, (3, num_heads, -1)).transpose(0, 1).flatten(0, 2)


def by_part(weight: Tensor, num_heads: int) -> Tensor:
    """The inverse of `by_head`."""
    rows = weight.unflatten(0, (num_heads, 3, -1)).transpose(0, 1).flatten(0, 2)
    return rows.t() if weight.dim() == 2 else rows


def source_of(path: Path, model: Mapping[str, Any]) -> Source:
    """Return the weights that `init_from=PATH` refers to, for a model with these settings."""
    if not path.is_dir():
        raise bad("init_from", path, "is not a folder on this node", "use a path that every node can read")
    return Saved(path) if huggingface_folder.is_run(path) else HuggingFace(path, model)
