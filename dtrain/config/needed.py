"""Which settings the chosen options still need: a fix that names an option names these, too."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dtrain.config.files import CONF, GROUPS, SEVERAL, default_options, options_of, read_yaml
from dtrain.config.source_hints import data_beside

REFERENCE = re.compile(r"\$\{(\w+)\.\w+\}")


def needed(typed: Iterable[str]) -> list[str]:
    """Return the settings without a value: required ones, and references to a section of the user's own code.

    typed: the overrides of the command line. The user's own model has the settings that are typed, and no others.
    """
    words = (word.partition("=") for word in typed if "=" in word)
    given = {key.lstrip("+"): value for key, _, value in words}
    chosen = default_options() | {group: given[group] for group in GROUPS if group in given}
    own = {group for group, option in chosen.items() if option not in options_of(group)}
    found = []
    for group, option in chosen.items():
        if group in own or group in SEVERAL:
            continue
        for name, value in read_yaml(CONF / group / f"{option}.yaml").items():
            refers = REFERENCE.fullmatch(str(value))
            absent = refers and refers[1] in own and refers[0][2:-1] not in given
            if (value == "???" or absent) and f"{group}.{name}" not in given:
                found.append(f"{group}.{name}")
    return found


def data_of(model: str) -> str:
    """Return the data that an option of model= chooses unless they are given: digits for convnet."""
    text = (CONF / "model" / f"{model}.yaml").read_text(encoding="utf-8")
    found = re.search(r"override /data\S*: ([\w-]+)", text)
    return found[1] if found else default_options()["data"]


def sequence_length(folder: str) -> int | None:
    """Return a sequence length that the Hugging Face model in this folder accepts; None: not known."""
    try:
        config = json.loads((Path(folder) / "config.json").read_text())
        sizes = [config.get(name) for name in ("max_position_embeddings", "n_positions")]
    except (OSError, ValueError, AttributeError):
        return None
    return next((min(size, 1024) for size in sizes if type(size) is int and size > 0), None)


def missing(error: Exception, choices: Mapping[str, Any], cfg: Any, typed: Iterable[str]) -> str | None:
    """Explain a reference to a setting that another option does not have, as data=mnist's to the size of images.

    None: the error is of another kind. choices: the chosen option of each group; cfg: the composed configuration.
    """
    asked, key = re.search(r"'([\w.]+)' not found", str(error)), getattr(error, "full_key", None)
    if asked is None or not key:
        return None
    key, group = str(key), asked[1].partition(".")[0]
    section, chosen = key.partition(".")[0], choices.get(group)
    is_length = chosen == "hf" and key == "data.seq_len"  # its folder knows the length
    usual = 128 if key == "data.seq_len" else "…"  # text data for a user's model that defines no sequence length
    value = (sequence_length(str(cfg["model"].get("path"))) if is_length else None) or usual
    typed = list(typed)
    values = " ".join([f"{key}={value}", *(f"{name}=…" for name in needed(typed) if name != key)])
    fix = f"{values}, or your own {section}: {section}=MODULE.NAME (docs/your-own.md), or one of dtrain's models"
    rule = f"refers to {asked[1]}, which {group}={chosen} does not have"
    is_default = key == "data.seq_len" and not any(re.match(r"\+*data=", word) for word in typed)
    if group == "model" and is_default and chosen not in options_of(group):  # forgotten: who has token data says so
        rule += f"; data= is not given, and {choices.get('data')} gives tokens"
        fix = (
            f"data={data_beside(str(chosen)) or 'MODULE.NAME'}, your own data (docs/your-own.md); for tokens, {values}"
        )
    if group == "model" and chosen in options_of(group) and not is_length:  # it cannot take such samples
        fix = f"data={data_of(str(chosen))}, or another model"
    return f"{key}: {rule}\n  fix: {fix}"


def with_needed(error: ValueError, typed: Iterable[str]) -> ValueError:
    """Complete a fix that names the option that was probably meant."""
    meant = re.fullmatch(r"(.*\n  fix: )did you mean (\S+)\?", str(error), re.DOTALL)
    more = " ".join(f"{name}={'128' if name == 'data.seq_len' else '…'}" for name in needed(typed)) if meant else ""
    return ValueError(f"{meant[1]}{meant[2]} {more}") if meant and more else error
