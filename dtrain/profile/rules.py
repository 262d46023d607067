"""What a profile needs, checked before anything starts and without importing torch."""

from __future__ import annotations

from typing import Any

from dtrain.config import bad, gpus_per_node, world_size
from dtrain.profile import memory


def check(config: dict[str, Any]) -> None:
    """Steps and ranks that are there, and one recorder at a time."""
    profile, nsys = config["profile"], config["nsys"]
    kind = profile.get("kind")
    if kind == "none" and not nsys:
        return
    if nsys and kind != "none":
        rule = f"profile={kind} records the same steps, and of two recorders each slows the other or is refused"
        raise bad("nsys", "true", rule, "profile=none nsys=true, or leave nsys out")
    size = world_size(config)
    ranks = profile["ranks"] = list(range(size)) if profile["ranks"] is None else profile["ranks"]
    wrong = [rank for rank in ranks if not 0 <= rank < size]
    if not ranks or wrong:
        rule = f"there is no rank {wrong[0]} among {size}" if wrong else "no rank would be recorded"
        raise bad("profile.ranks", ranks, rule, f"'profile.ranks=[{','.join(map(str, range(min(size, 2))))}]'")
    train = config["train"]
    steps = min(train["steps"], train["stop_after"] or train["steps"])
    needed = profile["start"] + profile["num_steps"] - 1
    if needed > steps:
        rule = f"the run ends after {steps} steps, and step {needed} is the last to be recorded"
        last = steps - profile["num_steps"] + 1
        earlier = f"profile.start={last}" if last >= 3 else "profile.start=3 profile.num_steps=1"
        longer = f"train.steps={needed}" if steps == train["steps"] else f"train.stop_after={needed}"
        raise bad("profile.start", profile["start"], rule, f"{earlier}, or {longer}")


def check_machine(config: dict[str, Any]) -> None:
    """Where the ranks will run: is there a GPU for what needs one?"""
    if config["profile"].get("kind") == "memory" and not gpus_per_node(config["cluster"]):
        raise memory.no_gpu()
