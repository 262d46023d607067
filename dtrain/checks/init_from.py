"""`init_from=PATH`: check what the path contains and whether the model can load it. Before a launch, without torch.

PATH is a Hugging Face folder with safetensors, a run folder of dtrain, or one of its checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dtrain.config.run_file import load
from dtrain.formats import huggingface
from dtrain.formats.huggingface_folder import (
    check_folder,
    compare,
    is_run,
    wrong,
)
from dtrain.runs.folder import latest_checkpoint

# model settings that no weight depends on, or only weights that a new task adds
WITHOUT_WEIGHTS = ("dropout", "task", "num_classes", "pad_id")


def check(config: Mapping[str, Any]) -> None:
    """Raise a ValueError if the weights are unavailable or belong to another model. A resume no longer needs them."""
    if config.get("init_from") is None:
        return
    if (config.get("resume") or config.get("fork")) and not config.get("lora", {}).get(
        "rank"
    ):  # LoRA: the base is in no checkpoint
        return
    path = Path(config["init_from"])
    if not config["init_from"].strip():
        raise wrong("", "must name a folder", "init_from=null to start from random weights")
    if not path.is_dir():
        if path.exists():
            folder = path.parent
            if is_run(folder) or (folder / "config.json").is_file():
                raise wrong(path, "is a file, not a folder", f"init_from={folder}")
            own = f"your own model can load {path.name} itself, in its __init__"
            raise wrong(path, "is a file, not a folder", f"a run, or a folder that save_pretrained() wrote; {own}")
        hint = "for a model on the Hub: hf download OWNER/NAME --local-dir ./NAME, and init_from=./NAME"
        raise wrong(path, "is not a folder here, and dtrain downloads nothing", f"check the path; {hint}")
    if is_run(path):
        check_run(path, config["model"])
    else:
        check_folder(path, config["model"], config.get("choices", {}).get("model"))


# ---- a run of dtrain -----------------------------------------------------------------------------------------


def check_run(path: Path, model: Mapping[str, Any]) -> None:
    """Check that a run folder, or a checkpoint in one, has the same model."""
    run_dir = path.parent.parent if (path / "manifest.json").is_file() else path
    if run_dir == path and latest_checkpoint(path) is None:
        raise wrong(path, "the run has no checkpoint yet", "wait until it has saved its first one (checkpoint.every)")
    if not (run_dir / "config.yaml").is_file():
        return  # a checkpoint copied out of its run: the ranks compare every name and shape
    cfg = load(run_dir)
    if cfg.get("lora", {}).get("rank"):
        fix = f"dtrain export {run_dir} OUT --format hf, and init_from=OUT"
        raise wrong(path, "the run trained LoRA adapters, and its checkpoints contain nothing else", fix)
    if cfg.model["_target_"] != model["_target_"]:
        fix = f"model={cfg.get('choices', {}).get('model')}"
        raise wrong(path, f"is a {cfg.model['_target_']}, the model is a {model['_target_']}", fix)
    theirs = {k: v for k, v in cfg.model.items() if k in model and k not in WITHOUT_WEIGHTS and k != "_target_"}
    compare(path, model, theirs)
    tokens = theirs.get("vocab_size")
    if tokens != model.get("vocab_size"):  # a larger vocab: the checkpoint's padding rows were trained as padding
        fix = f"dtrain export {run_dir} OUT --format hf, and init_from=OUT, where new tokens start as the mean of all"
        rule = f"model.vocab_size is {model['vocab_size']} here and {tokens} there"
        raise wrong(path, rule, fix if huggingface.of_target(model["_target_"]) else f"model.vocab_size={tokens}")
