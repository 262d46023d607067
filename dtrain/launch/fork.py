"""Fork a run: a new run that continues from a checkpoint of another one. For fork=RUN, and for the exploit of PBT.

The new run begins with the weights, optimizer state, data position and step of the checkpoint. The other run is only
read: the checkpoint's files are hard links where the file system has them, because a checkpoint is never written to.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import uuid
from pathlib import Path
from typing import Any

from dtrain.checks import init_from
from dtrain.config.files import TARGET, flatten, is_script
from dtrain.config.schema import own_defaults
from dtrain.errors import bad
from dtrain.runs.find import At
from dtrain.runs.folder import checkpoints, parse_line, read_json
from dtrain.util.format import argument, as_dict, number, short_path

MOST_ANCESTORS = 100  # in launch.json
FREE_IN_MODEL = ("dropout",)  # settings of a model that no weight depends on
# settings of an optimizer whose 0 means that it has no such state
STATE_IF_NOT_0 = ("momentum",)


def parse(text: str) -> At:
    """Return the checkpoint in the setting `fork`, as prepare_arguments writes it: an absolute path, @ and the step."""
    path, at, step = text.rpartition("@")
    if not at or not step.isdecimal() or not Path(path).is_absolute():
        raise bad("fork", text, "must name a checkpoint of a run", "fork=RUN, fork=RUN@100 or fork=RUN@best")
    return At(Path(path), int(step))


# ---- what may differ ---------------------------------------------------------------------------------------------


def check(old: dict[str, Any], config: dict[str, Any]) -> None:
    """Reject what the checkpoint's weights cannot be used for."""
    at = parse(config["fork"])
    if is_script(old):
        raise bad("fork", config["fork"], "is a run of your own program", "resume= it, or start a new run with script=")
    if config["cluster"].get("run_root") is not None:
        rule = "the run folder is on a volume of the cluster, where this machine cannot place the checkpoint"
        raise bad("fork", config["fork"], rule, "init_from=FOLDER with a folder that the pods see")
    if config.get("init_from") != old.get("init_from"):
        rule = "the weights come from the checkpoint of the fork"
        raise bad("init_from", config["init_from"], rule, "leave out init_from=, or fork=")
    for section in ("model", "lora"):
        before, after = flatten(as_dict(old.get(section))), flatten(as_dict(config.get(section)))
        is_own = section == "model" and not str(after.get(TARGET)).startswith("dtrain.")
        if is_own and before.get(TARGET) == after.get(TARGET):
            defaults = {key.partition(".")[2]: value for key, value in own_defaults({section: old[section]}).items()}
            before = {key: defaults[key] for key in after if key in defaults} | before
            after = {key: defaults[key] for key in before if key in defaults} | after
        for key in sorted({*before, *after}):
            is_rate = is_own and isinstance(before.get(key), float) and isinstance(after.get(key), (int, float))
            is_free = section == "model" and (key in FREE_IN_MODEL or is_rate)
            if before.get(key) != after.get(key) and not is_free:
                rule = f"a fork keeps the weights, and so the model: {before.get(key)} there"
                name = f"{section}.{key}" if key != TARGET else section
                raise bad(name, after.get(key), rule, way_out(at, old, config, name, before.get(key)))
    average, past = (as_dict(part.get("ema")).get("decay") or 0 for part in (config, old))
    if bool(average) != bool(past):
        rule = f"a fork keeps the optimizer's state, of which the average is a part: ema.decay={past} there"
        raise bad("ema.decay", average, rule, f"ema.decay={past or 0}, or {weights_of(at)} instead of fork=")
    if average and "optimizer" in anew(old, config):
        rule = "the average is a part of the old optimizer's state, and another optimizer starts anew"
        raise bad("ema.decay", average, rule, f"ema.decay=0, or {weights_of(at)} instead of fork=")
    frozen = config["lora"]["rank"] and not config.get("init_from")
    if frozen and as_dict(old.get("train")).get("seed") != config["train"]["seed"]:
        rule = "the frozen weights below the adapters are drawn from the seed"
        raise bad("train.seed", config["train"]["seed"], rule, f"train.seed={as_dict(old.get('train')).get('seed')}")
    step = at.step or 0
    for key in ("steps", "stop_after"):
        if (config["train"][key] or step + 1) <= step:
            raise bad(
                f"train.{key}", config["train"][key], f"the fork begins at step {step}", f"train.{key}={2 * step}"
            )


def way_out(at: At, old: dict[str, Any], config: dict[str, Any], name: str, before: object) -> str:
    """Return the fix for a setting on which the weights depend. init_from is one only where it takes the weights."""
    if not str(config["model"][TARGET]).startswith("dtrain.") and name.startswith("model."):  # shapes of the user's own
        return f"leave out {name}, or leave out fork= and train the other model from its start"
    chosen = as_dict(old.get("choices")).get("model") if name == "model" else before
    keep = f"{name}={json.dumps(chosen) if not isinstance(chosen, str) else chosen}"
    try:
        init_from.check_run(at.run_dir, config["model"])
    except ValueError:
        return f"{keep}, or leave out fork= and train the other model from its start"
    return f"{keep}, or start from the weights alone: {weights_of(at)} instead of fork="


def weights_of(at: At) -> str:
    return argument("init_from", str(at.run_dir / "checkpoints" / f"step-{at.step or 0:08d}"))


def anew(old: dict[str, Any], config: dict[str, Any]) -> list[str]:
    """Return what the new run does not take over: the state of another optimizer, the position in other data."""
    optim, past = config["optim"], as_dict(old.get("optim"))
    other = optim[TARGET] != past.get(TARGET)
    other = other or any(bool(optim.get(key)) != bool(past.get(key)) for key in STATE_IF_NOT_0)
    return ["optimizer"] * other + ["data"] * (config["data"] != old.get("data"))


def say(at: At, parts: list[str], warmup_steps: int) -> str:
    """Describe what a fork takes over, and where the learning-rate schedule continues."""
    kept = [name for name, part in (("optimizer state", "optimizer"), ("data position", "data")) if part not in parts]
    text = f"forked from {short_path(at.run_dir)}@{at.step}, with its {', '.join(['weights', *kept, 'step'])}"
    why = {"optimizer": "another optimizer starts anew", "data": "other data is read from its start"}
    warmup = f"its warm-up ends at step {warmup_steps}" if warmup_steps > (at.step or 0) else "without a new warm-up"
    schedule = f"the learning-rate schedule continues at step {(at.step or 0) + 1}, {warmup}"
    return "; ".join([text, *(why[part] for part in parts), schedule])


# ---- the folder --------------------------------------------------------------------------------------------------


def lineage(at: At, parts: list[str]) -> dict[str, Any]:
    """Return what launch.json of the new run says about its origin: parent, step, and the parent's own origin."""
    parent = read_json(at.run_dir / "launch.json")
    found = {"run": str(at.run_dir), "id": parent.get("id"), "step": at.step} | ({"anew": parts} if parts else {})
    if isinstance(parent.get("forked_from"), dict):
        found["forked_from"] = _shortened(parent["forked_from"], MOST_ANCESTORS)
    return found


def _shortened(origin: dict[str, Any], most: int) -> dict[str, Any]:
    if most and isinstance(origin.get("forked_from"), dict):
        return origin | {"forked_from": _shortened(origin["forked_from"], most - 1)}
    return {key: value for key, value in origin.items() if key != "forked_from"}


def place(at: At, run_dir: Path) -> None:
    """Give a run folder the checkpoint, and the metrics up to its step. The checkpoint appears whole, by one rename."""
    assert at.step is not None
    name, folder = f"step-{at.step:08d}", run_dir / "checkpoints"
    unfinished = folder / f".attempt-{at.step}-{uuid.uuid4().hex[:8]}"  # a save removes what a killed launcher leaves
    folder.mkdir(exist_ok=True)
    rows = []
    if (at.run_dir / "metrics.jsonl").exists():
        with open(at.run_dir / "metrics.jsonl", "rb") as file:
            rows = [line for line in file if (number(parse_line(line).get("step")) or math.inf) <= at.step]
    (run_dir / "metrics.jsonl").write_bytes(b"".join(rows))
    try:
        shutil.copytree(at.run_dir / "checkpoints" / name, unfinished, copy_function=link_or_copy)
    except (OSError, shutil.Error) as error:  # pruned by the run, which still trains
        shutil.rmtree(unfinished, ignore_errors=True)
        raise bad("fork", at, f"its checkpoint cannot be read ({error})", argument("fork", str(at.run_dir))) from error
    os.rename(unfinished, folder / name)
    (folder / "latest").write_text(name + "\n")


def make_run(at: At, target: Path) -> None:
    """Make `target` a run folder that a resume continues from the checkpoint, with the settings of the donor.

    It appears whole, by one rename, so it can be made again after a kill at any time.
    """
    if target.exists():
        return
    unfinished = target.with_name(f".{target.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(mode=0o700)
    place(at, unfinished)
    shutil.copy2(at.run_dir / "config.yaml", unfinished / "config.yaml")
    # an id of its own: trackers and copies in memory tell runs apart by it
    launch = {"id": uuid.uuid4().hex, "forked_from": lineage(at, []) | {"by": "search"}, "launches": []}
    (unfinished / "launch.json").write_text(json.dumps(launch, indent=1) + "\n")
    os.rename(unfinished, target)


def link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def is_placed(run_dir: Path) -> bool:
    return bool(checkpoints(run_dir / "checkpoints"))
