"""Check the requirements of a profile before anything starts, without importing torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dtrain.config.hardware import gpus_per_node, world_size
from dtrain.config.run_length import last_step
from dtrain.errors import bad
from dtrain.profile import memory
from dtrain.util.format import counted


def records(config: dict[str, Any]) -> bool:
    """Are steps recorded as conf/profile defines? A user's own profile class has its own settings."""
    profile = config["profile"]
    ours = all(key in profile for key in ("kind", "ranks", "start", "num_steps"))
    return ours and (profile["kind"] != "none" or config["nsys"])


def check(config: dict[str, Any]) -> None:
    """Check that the recorded steps and ranks exist, and that only one recorder is active."""
    profile, kind = config["profile"], config["profile"].get("kind", "your own")
    if config["nsys"] and kind != "none":
        rule = f"profile={kind} already records these steps, and two profilers slow each other down or fail"
        raise bad("nsys", "true", rule, "profile=none nsys=true, or leave nsys out")
    if not records(config):
        return
    size = world_size(config)
    ranks = profile["ranks"] = list(range(size)) if profile["ranks"] is None else profile["ranks"]
    wrong = [rank for rank in ranks if not 0 <= rank < size]
    if not ranks or wrong:
        rule = (
            f"there is no rank {wrong[0]} in a run of {counted(size, 'rank')}" if wrong else "no rank would be recorded"
        )
        raise bad("profile.ranks", ranks, rule, f"'profile.ranks=[{','.join(map(str, range(min(size, 2))))}]'")
    check_steps(config)


def check_steps(config: dict[str, Any], num_done: int = 0, summary: Mapping[str, Any] | None = None) -> None:
    """Does the run reach the last recorded step? For a resumed run: the steps before this launch, and its summary."""
    if not records(config):
        return
    profile, train = config["profile"], config["train"]
    last = last_step(train, summary or {})
    if last is None:
        return  # the ranks know the steps of train.epochs
    left, needed = last - num_done, profile["start"] + profile["num_steps"] - 1
    if needed <= left:
        return
    rule = f"the run ends after {counted(last, 'step')}, and step {num_done + needed} is the last one to record"
    if num_done:
        rule += f" (counted from the resume, after step {num_done})"
    start = left - profile["num_steps"] + 1
    earlier = f"profile.start={start}, or " if start >= 3 else "profile.start=3 profile.num_steps=1, or "
    longer = f"train.stop_after={num_done + needed}"
    if last == train["steps"]:
        longer = f"train.steps={num_done + needed}" + (" 'resume_allow=[train.steps]'" if num_done else "")
    raise bad("profile.start", profile["start"], rule, (earlier if left >= 3 else "") + longer)


def check_typed(config: dict[str, Any], typed: Iterable[str]) -> None:
    """Reject typed profile settings while no profile is chosen. A recipe may set them for a profile chosen later."""
    if config["profile"].get("kind") != "none" or config["nsys"]:
        return
    for key in ("start", "num_steps", "ranks"):
        if f"profile.{key}" in typed:
            value = config["profile"][key]
            fix = f"add profile=torch (or profile=memory, nsys=true), or leave out profile.{key}"
            raise bad(f"profile.{key}", value, "profile=none records nothing", fix)


def check_machine(config: dict[str, Any]) -> None:
    """Check that the ranks' machine has a GPU if the profile needs one."""
    if config.get("profile", {}).get("kind") == "memory" and not gpus_per_node(config["cluster"]):
        raise memory.no_gpu()
