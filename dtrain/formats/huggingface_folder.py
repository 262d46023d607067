"""A folder saved by Hugging Face's transformers: config.json and the weights' headers, read with size limits."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from omegaconf import OmegaConf

from dtrain.config.files import CONF
from dtrain.errors import bad
from dtrain.formats import huggingface
from dtrain.formats.bounded import read_json, short
from dtrain.formats.huggingface import Family
from dtrain.formats.safetensors_header import HeaderError, read_header

AGAIN = "copy or download the folder again"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def wrong(path: Path | str, rule: str, fix: str) -> ValueError:
    return bad("init_from", path, rule, fix)


@dataclass(frozen=True)
class Entry:
    """One tensor of a safetensors folder."""

    file: str
    name: str
    shape: tuple[int, ...]
    dtype: str


def read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    if not file.is_file():
        what = "adapters only (adapter_config.json)" if (path / "adapter_config.json").is_file() else "no config.json"
        rule = f"it has {what}: neither a Hugging Face model nor a run of dtrain"
        raise wrong(path, rule, "use the folder that save_pretrained wrote, or a run folder (dtrain runs)")
    config = _json(path, file, LARGEST_CONFIG)
    if not isinstance(config, dict):
        raise wrong(path, "its config.json is not an object", AGAIN)
    return config


def _json(path: Path, file: Path, most: int) -> Any:
    try:
        return read_json(file, most)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise wrong(path, f"its {file.name} cannot be read ({why})", AGAIN) from error


def family_of(path: Path, config: Mapping[str, Any]) -> Family:
    kind = config.get("model_type")
    family = huggingface.FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        rule = f"its config.json says model_type={short(kind)}, but dtrain supports {', '.join(huggingface.FAMILIES)}"
        raise wrong(path, rule, "use a model of one of these families")
    return family


def read_entries(path: Path, family: Family) -> dict[str, Entry]:
    """Return every tensor of the folder by its bare name, from the files' headers; refuse an incomplete folder.

    The files may be links, as in a Hub cache.
    """
    if (path / INDEX).is_file():
        index = _json(path, path / INDEX, LARGEST_INDEX)
        places = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(places, dict) or not all(isinstance(f, str) and Path(f).name == f for f in places.values()):
            raise wrong(path, f"its {INDEX} has no weight_map of names and files", AGAIN)
        files = sorted(set(places.values()))
        gone = [f for f in files if not os.path.isfile(path / f)]  # Path.is_file raises for a name that is too long
        if gone:
            raise wrong(path, f"{short(gone[0])} is missing; {len(gone)} of its {len(files)} files in all", AGAIN)
    elif (path / SINGLE).is_file():
        places, files = {}, [SINGLE]
    else:
        _refuse_without_weights(path)
    entries: dict[str, Entry] = {}
    for file in files:
        try:
            header = read_header(path / file, follow_symlinks=True)
        except HeaderError as error:
            raise wrong(path, str(error), AGAIN) from None
        for name, found in header.items():
            bare = family.bare(name)
            if places.get(name, file) != file:  # the index assigns it to another file
                continue
            if bare in entries:
                raise wrong(
                    path, f"it has {short(entries[bare].name)} and {short(name)}, which are the same weight", AGAIN
                )
            entries[bare] = Entry(file, name, found.shape, found.dtype)
    whole = {entry.name for entry in entries.values()}
    gone = [name for name in places if name not in whole]
    if gone:
        raise wrong(path, f"{short(gone[0])} is in {INDEX} but in no file; {len(gone)} such in all", AGAIN)
    return entries


def _refuse_without_weights(path: Path) -> NoReturn:
    pickled = sorted(p.name for p in path.glob("*.bin")) + sorted(p.name for p in path.glob("*.pt*"))
    if not pickled:
        raise wrong(path, f"it has no {SINGLE}, nor {INDEX}", AGAIN)
    named = read_config(path).get("architectures")  # AutoModel would drop the head
    kind = str(named[0]) if isinstance(named, list) and named else ""
    save = f"transformers.{kind if kind.isidentifier() else 'AutoModel'}.from_pretrained({str(path)!r})"
    fix = f"python -c \"import transformers; {save}.save_pretrained('NEW')\" where you trust the file"
    raise wrong(
        path,
        f"it has pickled weights only ({pickled[0]}), and loading those may run any code",
        f"{fix}, and init_from=NEW",
    )


LARGEST_CONFIG, LARGEST_INDEX = 2**22, 2**26  # bytes; an index of 100,000 weights has 2**23
FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


def is_run(path: Path) -> bool:
    return (path / "manifest.json").is_file() or (path / "config.yaml").is_file()


def _takes_length(model: Mapping[str, Any], positions: int) -> bool:
    """Return whether the model may be shorter: learned positions are truncated; rotary ones have no weights."""
    family = huggingface.of_target(model["_target_"])
    return family is not None and ("positions" not in family.outside or model["seq_len"] <= positions)


def compare(path: Path, model: Mapping[str, Any], theirs: Mapping[str, Any], fix: str = "") -> None:
    """Refuse a model of other sizes, and list all overrides to type."""
    differ = differing(model, theirs)
    if differ:
        pairs = ", ".join(f"model.{k} is {_text(model[k])} and {_text(v)} in init_from" for k, v in differ.items())
        raise wrong(path, f"its sizes differ from the model's: {pairs}", fix or typed(differ))


def differing(model: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that differ. A larger vocabulary is allowed: new tokens, or padding to a round number."""
    differ = {k: v for k, v in theirs.items() if k in model and not _same(model[k], v)}
    if "vocab_size" in differ and model["vocab_size"] > differ["vocab_size"]:
        del differ["vocab_size"]
    if "seq_len" in differ and _takes_length(model, differ["seq_len"]):
        del differ["seq_len"]
    return differ


def typed(settings: Mapping[str, Any]) -> str:
    return " ".join(f"model.{k}={_text(v)}" for k, v in settings.items())


@functools.cache
def known_models() -> dict[str, Any]:
    """Return the options of conf/model."""
    files = sorted((CONF / "model").glob("*.yaml"))
    return {file.stem: OmegaConf.to_container(OmegaConf.load(file)) for file in files}


def nearest(family: Family, settings: Mapping[str, Any]) -> str:
    """Return the overrides for a model of these sizes: the nearest option of conf/model, and what differs."""
    models = {name: option for name, option in known_models().items() if option.get("_target_") == family.target}
    options = {name: differing(option, settings) for name, option in models.items()}
    name = min(options, key=lambda n: (len(options[n]), len(n)))
    return f"model={name} {typed(options[name])}".strip()


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, float) or isinstance(theirs, float):
        return ours is not None and theirs is not None and abs(ours - theirs) <= 1e-9 * abs(theirs)
    return bool(ours == theirs)


def _text(value: Any) -> str:
    return json.dumps(value)  # null, true and 1e-05 as Hydra reads them


def check_folder(path: Path, model: Mapping[str, Any], choice: str | None = None) -> None:
    """Check everything about a Hugging Face folder that does not need the model itself."""
    config = read_config(path)
    family = family_of(path, config)
    if problem := huggingface.invalid(family, config):
        raise wrong(path, f"its config.json says {problem}", AGAIN)
    settings = family.settings(config)
    if model["_target_"] != family.target:
        what = (
            "has no counterpart in Hugging Face"
            if huggingface.of_target(model["_target_"]) is None
            else "is a different one"
        )
        rule = f"it is a {family.model_type}, and model={choice} ({model['_target_']}) {what}"
        raise wrong(path, rule, nearest(family, settings))
    problem = huggingface.cannot(family, config)
    if problem:
        raise wrong(path, f"its config.json says {problem}", "use another model, or one of your own (trust=[…])")
    entries = read_entries(path, family)
    named = nearest(family, settings)
    compare(path, model, settings, fix="" if " " in named else named)  # just the option's name if nothing else differs
    check_names(path, family, entries, family.needed(model), model["num_layers"])
    check_headers(path, family, entries, settings)


def check_names(path: Path, family: Family, entries: Mapping[str, Entry], names: list[str], num_layers: int) -> None:
    """Check that the file has all that the model needs, and no layer that the model lacks."""
    missing = [n for n in names if not huggingface.is_new(n) and family.theirs(n) not in entries]
    if missing:
        text = f"{family.theirs(missing[0])} ({missing[0]} in dtrain) is missing; {len(missing)} missing in all"
        raise wrong(path, f"its weights are not complete: {text}", AGAIN)
    extra = [e.name for bare, e in entries.items() if (family.layer_of(bare) or 0) >= num_layers]
    if extra:
        layers = 1 + max(family.layer_of(bare) or 0 for bare in entries)
        rule = f"it has {layers} layers, the model {num_layers}: {extra[0]}; {len(extra)} extra weights in all"
        raise wrong(path, rule, f"model.num_layers={layers}, if its config.json says so, too")


def check_headers(path: Path, family: Family, entries: Mapping[str, Entry], settings: Mapping[str, Any]) -> None:
    """Check that the tensors of our weights have the shapes in config.json, and a readable dtype."""
    named = ((name, entries.get(family.theirs(name) or "")) for name in family.names(settings["num_layers"]))
    found = {name: entry for name, entry in named if entry is not None}
    odd = [e for e in found.values() if e.dtype not in FLOATS]
    if odd:
        rule = f"{odd[0].name} is of type {odd[0].dtype}; {len(odd)} such in all"
        raise wrong(path, rule, "use weights in 16, 32 or 64 bits that are not quantized")
    odd, wanted = [], {}
    for name, entry in found.items():
        shape = huggingface.shape_of(name, settings)
        wanted[entry] = shape if family.change(name) == huggingface.SAME else shape[::-1]
        if entry.shape != wanted[entry] and not name.startswith(huggingface.CLASSES):  # a new head is drawn
            odd.append(entry)
    if odd:
        text = f"{odd[0].name} has shape {list(odd[0].shape)}, but {list(wanted[odd[0]])} by its config.json"
        raise wrong(path, f"{text}; {len(odd)} such in all", AGAIN)
