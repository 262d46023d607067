"""A model of the transformers package from a folder: `model=hf:FOLDER`. No download, and no code from the folder."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dtrain.errors import bad


def from_folder(path: str, architecture: str | None = None, random: bool = False) -> nn.Module:
    """Return the model that FOLDER/config.json names, with the weights of its safetensors files unless `random`.

    On the meta device it has no values: dtrain builds it there first, and again on the CPU for its weights.
    """
    folder = Path(path).expanduser()
    transformers = package()
    name = architecture or named_in(folder)
    kind: Any = getattr(transformers, name, None)
    is_model = inspect.isclass(kind) and issubclass(kind, transformers.PreTrainedModel)
    if not is_model:
        rule = f"{name} is not a model of transformers {transformers.__version__}, and code of a folder is never run"
        raise bad("model.architecture", name, rule, "another version of transformers, or model.architecture=CLASS")
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if random or torch.get_default_device().type == "meta":
        model: nn.Module = kind(config)
        return model
    if not any(folder.glob("*.safetensors")):
        rule = "has no *.safetensors files (other formats can run code when they are read)"
        raise bad("model.path", path, rule, "model.random=true for random weights, or save_pretrained() it again")
    options: dict[str, Any] = {"local_files_only": True, "use_safetensors": True, "trust_remote_code": False}
    loaded: nn.Module = kind.from_pretrained(folder, config=config, dtype=torch.float32, **options)
    return loaded


def package() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise bad("model", "hf", "needs the transformers package", "pip install transformers") from error
    return transformers


def named_in(folder: Path) -> str:
    """Return the class that a folder's config.json names."""
    try:
        found = json.loads((folder / "config.json").read_text())
        names = found.get("architectures") or []
    except (OSError, ValueError, AttributeError) as error:
        fix = "the folder that save_pretrained() wrote"
        raise bad("model.path", folder, f"its config.json cannot be read ({error})", fix) from error
    if not names or not isinstance(names[0], str):
        fix = "model.architecture=CLASS, e.g. GPT2LMHeadModel"
        raise bad("model.path", folder, "its config.json names no architecture", fix)
    return names[0]
