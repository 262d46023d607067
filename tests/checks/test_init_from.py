"""Hugging Face folders from anywhere: refused with a fix, or the weights that they hold; nothing else is allocated."""

from __future__ import annotations

import copy
import json
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from dtrain.checkpoint.initial_weights import HuggingFace
from dtrain.formats import huggingface, huggingface_folder
from dtrain.util.dtensor import Chunk

CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 16, "n_positions": 4},
    "llama": {
        "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1,
        "intermediate_size": 12, "vocab_size": 16, "max_position_embeddings": 4, "tie_word_embeddings": False,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 4,
        },
    },
    "bert": {
        "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 16,
        "max_position_embeddings": 4,
    },
}  # fmt: skip


def make(folder: Path, kind: str) -> dict[str, Any]:
    """A whole folder in two files; the settings of our model for it."""
    family, config = huggingface.FAMILIES[kind], {"model_type": kind, **CONFIGS[kind]}
    settings = family.settings(config)
    state = {}
    for i, name in enumerate(family.needed(settings)):
        shape = huggingface.shape_of(name, settings)
        shape = shape if family.change(name) == huggingface.SAME else shape[::-1]
        state[family.full(name)] = np.full(shape, i + 0.5, np.float32)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names, places = list(state), {}
    for i, part in enumerate((names[::2], names[1::2]), 1):
        save_file({name: state[name] for name in part}, folder / f"model-{i}.safetensors")
        places |= dict.fromkeys(part, f"model-{i}.safetensors")
    (folder / huggingface_folder.INDEX).write_text(json.dumps({"weight_map": places}))
    return {"_target_": family.target, "dropout": 0.0, "seq_len": 4, "task": "mlm", **settings}


def refused(folder: Path, model: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as caught:
        huggingface_folder.check_folder(folder, model)
    message = str(caught.value)
    assert message.startswith("init_from=") and "\n  fix: " in message and words in message, message[:500]
    assert len(message) < 1500


ODD = (0, -1, True, "8", None, [8], {}, 1.5, 1e30, 10**30, float("nan"))


@pytest.mark.parametrize("kind", CONFIGS)
def test_sizes_that_no_model_has(kind: str, tmp_path: Path) -> None:
    model = make(tmp_path, kind)
    huggingface_folder.check_folder(tmp_path, model)
    config = json.loads((tmp_path / "config.json").read_text())
    for key in [key for key, _ in huggingface.FAMILIES[kind].sizes.values()]:
        for value in ODD:
            if (key, value) in (("num_key_value_heads", None), ("tie_word_embeddings", True), ("rms_norm_eps", 1.5)):
                continue  # as many as there are heads; other models
            (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
            refused(tmp_path, model, f"its config.json says {key}=")
    (tmp_path / "config.json").write_text(json.dumps(config | {huggingface.FAMILIES[kind].sizes["num_heads"][0]: 3}))
    refused(tmp_path, model, "3 attention heads")


def test_rope_that_is_none(tmp_path: Path) -> None:
    model = make(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    scaling = config["rope_scaling"]
    for odd in ([], "llama3", 8, scaling | {"factor": None}, scaling | {"factor": 0}, {"rope_type": "llama3"}):
        (tmp_path / "config.json").write_text(json.dumps(config | {"rope_scaling": odd or [1]}))
        refused(tmp_path, model, "its config.json says")
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_theta": -1.0}))
    refused(tmp_path, model, "rope_theta=-1.0")


def sparse(path: Path, start: bytes, size: int) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(start)
    os.truncate(path, size)


def test_files_that_are_none(tmp_path: Path) -> None:
    """Deep, large, doubled, elsewhere, a FIFO: each is said at once."""
    folder = tmp_path / "hf"
    model = make(folder, "gpt2")
    (tmp_path / "outside.safetensors").write_bytes((folder / "model-1.safetensors").read_bytes())
    index = json.loads((folder / huggingface_folder.INDEX).read_text())
    one = next(iter(index["weight_map"]))

    def with_index(value: Any, words: str) -> None:
        (folder / huggingface_folder.INDEX).write_text(value if isinstance(value, str) else json.dumps(value))
        refused(folder, model, words)

    for odd in ("../outside.safetensors", str(tmp_path / "outside.safetensors"), 1, None, ["model-1.safetensors"]):
        with_index({"weight_map": index["weight_map"] | {one: odd}}, "no weight_map of names and files")
    for odd in ("..", "", ".", "none.safetensors", "a\0b", "x" * 300):
        with_index({"weight_map": index["weight_map"] | {one: odd}}, "")
    for text in ("[" * 10**5, '{"weight_map": ' * 10**4, '{"a": 1, "a": 2}', "[]", "{}", '{"weight_map": [1]}'):
        with_index(text, "model.safetensors.index.json")
    sparse(folder / huggingface_folder.INDEX, b"{", 20 * 2**30)
    refused(folder, model, "has more than")
    with_index(index["weight_map"] and {"weight_map": index["weight_map"] | {one: "model-2.safetensors"}}, "in no file")

    for text in ("[" * 10**5, '{"model_type": "gpt2", "model_type": "bert"}', "{", "\xff", "NaN"):
        (folder / "config.json").write_text(text)
        refused(folder, model, "config.json")
    sparse(folder / "config.json", b"{", 20 * 2**30)
    refused(folder, model, "has more than")
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    refused(folder, model, "no config.json")

    model = make(tmp_path / "again", "gpt2")
    part = tmp_path / "again" / "model-1.safetensors"
    whole = part.read_bytes()
    part.unlink()
    part.symlink_to(tmp_path / "outside.safetensors")  # as in a cache of the Hub
    huggingface_folder.check_folder(tmp_path / "again", model)
    part.unlink()
    sparse(part, whole[:8], 20 * 2**30)
    refused(tmp_path / "again", model, "model-1.safetensors is not a safetensors file")
    part.unlink()
    os.mkfifo(part)
    refused(tmp_path / "again", model, "model-1.safetensors is missing")


def test_one_weight_under_two_names(tmp_path: Path) -> None:
    model = make(tmp_path, "gpt2")
    part = tmp_path / "model-1.safetensors"
    save_file(load_file(part) | {"wte.weight": np.zeros((16, 8), np.float32)}, part)
    refused(tmp_path, model, "which are the same weight")


# ---- mutated folders -----------------------------------------------------------------------------------------

VALUES = [*ODD, "", "../x", 2**40, [[]], {"a": 1}, "llama3", "model-2.safetensors", [0, 8], [2**40, 8], "F32", "BF16"]


def mutate(tree: Any, draw: random.Random) -> None:
    """One value, at any depth, becomes another one or goes away."""
    place, key = tree, draw.choice(list(tree))
    while isinstance(place[key], (dict, list)) and place[key] and draw.random() < 0.8:
        place = place[key]
        key = draw.choice(list(place)) if isinstance(place, dict) else draw.randrange(len(place))
    if isinstance(place, dict) and draw.random() < 0.3:
        place[draw.choice([str(key) + "x", "__metadata__", *place])] = place.pop(key)
    else:
        place[key] = copy.deepcopy(draw.choice(VALUES))


def mutated(files: dict[str, bytes], draw: random.Random) -> dict[str, bytes]:
    """The folder's files, one to three of them changed: by value, or by byte."""
    files = dict(files)
    for _ in range(draw.randrange(1, 3)):
        name = draw.choice(list(files))
        data = files[name]
        if draw.random() < 0.25:
            at = draw.randrange(min(len(data), 2000) or 1)
            files[name] = data[:at] + bytes([draw.randrange(256)]) * draw.randrange(2) + data[at + 1 :]
            continue
        start = 8 + int.from_bytes(data[:8], "little") if name.endswith(".safetensors") else len(data)
        try:
            tree = json.loads(data[8:start] if start < len(data) else data)
            mutate(tree, draw)
        except (ValueError, TypeError, IndexError, KeyError):  # changed before
            continue
        text = json.dumps(tree).encode()
        files[name] = text if start == len(data) else struct.pack("<Q", len(text)) + text + data[start:]
    return files


def loaded(folder: Path, model: dict[str, Any]) -> dict[str, np.ndarray]:
    """What a rank makes of the folder, for every weight that it looks for."""
    source = HuggingFace(folder, model)
    made = {}
    for name in source.family.needed(model):
        wanted = huggingface.shape_of(name, model)
        if source.shape(name, wanted) == wanted:
            values = torch.empty(wanted)
            source.read(name, Chunk(values, wanted, (0,) * len(wanted)))
            made[source.family.full(name)] = values.numpy()
    return made


def test_a_mutated_folder_is_refused_or_gives_what_it_holds(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty: Callable[..., torch.Tensor] = torch.empty

    def small(*shape: Any, **options: Any) -> torch.Tensor:
        assert empty(*shape, device="meta").numel() <= 2**16, f"{shape} would have been allocated"
        return empty(*shape, **options)

    monkeypatch.setattr(torch, "empty", small)
    accepted = 0
    for kind in CONFIGS:
        folder = tmp_path / kind
        model = make(folder, kind)
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        for seed in range(20_000 if request.config.getoption("--all") else 800):
            changed = mutated(files, random.Random(f"{kind}/{seed}"))
            for name, data in changed.items():
                with open(folder / name, "r+b") as out:  # not from nothing: ext4 flushes what is emptied and written
                    out.write(data)
                    out.truncate()
            try:
                made = loaded(folder, model)
            except ValueError as error:
                message = str(error)
                assert message.startswith("init_from=") and "\n  fix: " in message and len(message) < 2000, message
                continue
            accepted += 1
            held = {k: v for part in (1, 2) for k, v in load_file(folder / f"model-{part}.safetensors").items()}
            family = huggingface.FAMILIES[kind]
            held = {family.bare(name): values for name, values in held.items()}
            for name, values in made.items():
                there = held[family.bare(name)]
                assert values.size == there.size and np.array_equal(np.sort(values.ravel()), np.sort(there.ravel()))
    assert accepted > 30, "the faults hide each other"
