"""Reject a run that cannot fit, and suggest the nearest settings that fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dtrain.config.files import section
from dtrain.config.hardware import half_precision
from dtrain.errors import bad
from dtrain.plan.peer_memory import check_copies
from dtrain.plan.predict import Prediction, predict
from dtrain.plan.run_prediction import CERTAIN, FAULT, NO_GPU, STATES, asked_for, left_out, log, memory_text, strict
from dtrain.plan.sections import with_detected
from dtrain.util.format import as_dict, finite, gib


def check(config: Mapping[str, Any], plan: Mapping[str, Any]) -> None:
    """Reject what cannot fit, with the numbers and the nearest layout that fits; warn about what may not fit."""
    from dtrain.plan.host_memory import check_host  # not at the top: host_memory imports this module

    check_host(config)
    check_copies(config)
    if str(plan.get("reason")).startswith(FAULT):
        log.warning("%s, so there is no prediction for this run", plan["reason"])
    elif str(plan.get("reason")).endswith(NO_GPU):
        log.warning("%s: this run is on the CPU, and nothing is predicted for it", plan["reason"])
    elif plan.get("precision") == "bf16" and half_precision(gpu := config["hardware"].get("gpu")) == "fp16":
        log.warning("%s has no tensor cores for bf16, which is slow there: precision=fp16", gpu)
    memory = as_dict(plan.get("memory_gib"))
    limit, needs = finite(memory.get("limit")), finite(memory.get("total"))
    if limit is None or needs is None or plan.get("fits") is not False or config["force"]:
        return
    parts = {k: v for k, v in memory.items() if k not in ("total", "limit", "reserve", "fragmentation") and v}
    states = sum(parts.get(name, 0.0) for name in STATES)
    least = states + (sum(parts.values()) - states) / CERTAIN
    if least > limit:
        most = " + ".join(f"{name} {gib(parts[name])}" for name in sorted(parts, key=lambda k: -parts[k])[:3])
        rule = f"needs {gib(needs)} on each GPU ({most} …), and hardware={plan['hardware']} has {gib(limit)}"
        raise bad("strategy", plan["strategy"], rule, f"{way_out(config)}; or force=true to start anyway")
    if needs > limit:
        rule = f"it is started all the same, as estimates may be {CERTAIN - 1:.0%} too high"
        log.warning("memory: predicted not to fit, %s; %s. Safer: %s", memory_text(memory), rule, way_out(config))
    elif needs + (finite(memory.get("reserve")) or 0.0) > limit:
        log.warning("memory is tight: %s, and it may run out. Safer: %s", memory_text(memory), way_out(config))
    else:
        host = f"the memory of hardware={plan['hardware']}'s hosts (hardware.host_memory_gib)"
        log.warning("what is offloaded may not fit in %s. Safer: %s", host, way_out(config))


def way_out(config: Mapping[str, Any]) -> str:
    """Return the smallest change that makes it fit, as overrides."""
    from dtrain.plan.search.nearest_fit import nearest  # 10 ms of imports that a fitting launch does not need

    try:
        asked = with_detected(dict(config))
        found = in_half(asked) or nearest(asked)
    except Exception:  # the rejection is right even without a suggestion
        if strict():
            raise
        found = None
    if found is None:
        return "more GPUs, or a smaller model: no layout of these GPUs holds it"
    overrides, prediction = found
    return f"{' '.join(overrides)}{left_out(config, overrides)} ({gib(prediction.row()['memory_gib']['total'])})"


def in_half(config: Mapping[str, Any]) -> tuple[list[str], Prediction] | None:
    """Try 16 bits if fp32 is only the default; None: fp32 was requested, or 16 bits do not help."""
    from dtrain.plan.search.nearest_fit import nearest

    name = half_precision(config["hardware"].get("gpu"))
    if name is None or asked_for(config, "precision") or config["precision"].get("dtype", "float32") != "float32":
        return None
    choices = {**config["choices"], "precision": name}
    half = {**config, "precision": dict(section("precision", name)), "choices": choices}
    prediction = predict(half)
    overrides, best = ([], prediction) if prediction and prediction.fits else nearest(half) or ([], None)
    return ([f"precision={name}", *overrides], best) if best else None
