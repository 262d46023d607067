"""The planner beside every run: a prediction before it, held against what it measured; and no launch that cannot fit.

The launcher calls `plan_of` and `check`, and keeps the answer as RUN/plan.json; the ranks copy it to their summary.
A fault of the planner itself never stops a launch: it is a warning. DTRAIN_STRICT=1 (our tests) lets it through.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from dtrain import __version__
from dtrain.config import bad, gpus_per_node, section
from dtrain.hardware import half_precision
from dtrain.plan.predict import Prediction, predict, why_not
from dtrain.plan.sections import strategy_section, with_detected
from dtrain.rundir import latest_checkpoint, read_json
from dtrain.strategies.rules import shared_gpus
from dtrain.words import as_dict, duration, finite, gib, percent, si, step_time, without_nan

PLAN = "plan.json"
FAULT = "the planner failed"
STATES = ("parameters", "gradients", "optimizer")  # arithmetic; all other parts are estimates
CERTAIN = 1.08  # they may be so much too large: the bound that measured peaks are held to (benchmarks/planner)
NO_GPU = "and there is no GPU here"
FIGURES = ("tokens_per_s", "step_s", "mfu", "memory_gib")  # no wall time: starting, saving and evaluating are not told

log = logging.getLogger("dtrain")


def plan_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """plan.json: the row of `dtrain plan` for this very configuration, or the `reason` why there is none."""
    plan: dict[str, Any] = {"version": __version__, "hardware": config["choices"].get("hardware")}
    if why := config["choices"].get("auto"):
        plan["chosen"] = why
    try:
        config = with_detected(dict(config))
        plan["hardware"] = config["choices"].get("hardware")
        plan["calibrated"] = config["hardware"].get("calibration") is not None
        plan["measured"] = str(config["hardware"].get("source")).startswith("measured")  # by dtrain plan calibrate
        return {**plan, **without_nan(row_of(config))}
    except Exception as error:  # whatever it is, it is ours, and no reason not to train
        if strict():
            raise
        return plan | {"reason": f"{FAULT} ({type(error).__name__}: {error})"}


def row_of(config: Mapping[str, Any]) -> dict[str, Any]:
    if shared_gpus(dict(config["cluster"])):
        return {"reason": "ranks share a GPU, and what one has to itself is not known"}
    if elsewhere(config):
        return {"reason": f"hardware={config['choices'].get('hardware')} has GPUs, {NO_GPU}"}
    if group := foreign(config):
        return {"reason": f"{group}={config['choices'].get(group)} is not one of dtrain's"}
    prediction = predict(config)
    if prediction is None:
        return {"reason": why_not(config)}
    step_s = prediction.step_s
    return prediction.row() | {"wall_s": None if step_s is None else step_s * steps_to_do(config)}


def foreign(config: Mapping[str, Any]) -> str | None:
    """Which of strategy and optimizer is somebody's own, so that nothing is known of what it holds."""
    return next((g for g in ("strategy", "optim") if not str(config[g]["_target_"]).startswith("dtrain.")), None)


def elsewhere(config: Mapping[str, Any]) -> bool:
    """Is it to run on this machine, which has no GPU, with the figures of one? A dry run only looks."""
    local = "gpus_per_node" not in config["cluster"] and not config.get("dry_run")
    return bool(local and config["hardware"].get("gpu") and not gpus_per_node(config["cluster"]))


def strict() -> bool:
    return os.environ.get("DTRAIN_STRICT") == "1"


def steps_to_do(config: Mapping[str, Any]) -> int:
    """Steps of this launch: what its wall time will be measured over."""
    newest = latest_checkpoint(Path(config["run_dir"])) if config["resume"] else None
    done = int(newest.name.removeprefix("step-")) if newest else 0
    steps = config["train"]["steps"]
    return max(0, min(steps, config["train"]["stop_after"] or steps) - done)


def check(config: Mapping[str, Any], plan: Mapping[str, Any]) -> None:
    """Refuse what cannot fit, with the numbers and the nearest layout that does; warn of what may not."""
    from dtrain.plan.host import check_host  # not above: it needs this file

    check_host(config)
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
        raise bad("strategy", plan["strategy"], rule, f"{way_out(config)}; or force=true, if you know better")
    if needs + (finite(memory.get("reserve")) or 0.0) > limit:
        log.warning("memory is tight: %s, and it may run out. Safer: %s", memory_text(memory), way_out(config))
    else:
        host = f"the memory of hardware={plan['hardware']}'s hosts (hardware.host_memory_gib)"
        log.warning("what is offloaded may not fit in %s. Safer: %s", host, way_out(config))


def way_out(config: Mapping[str, Any]) -> str:
    """The smallest change that makes it fit, as words to type."""
    from dtrain.plan.fit import nearest  # 10 ms of imports that a launch that fits does not need

    try:
        asked = with_detected(dict(config))
        found = in_half(asked) or nearest(asked)
    except Exception:  # the refusal is right also without a way out
        if strict():
            raise
        found = None
    if found is None:
        return "more GPUs, or a smaller model: no layout of these GPUs holds it"
    words, prediction = found
    return f"{' '.join(words)}{left_out(config, words)} ({gib(prediction.row()['memory_gib']['total'])})"


def in_half(config: Mapping[str, Any]) -> tuple[list[str], Prediction] | None:
    """The same in 16 bits, where nobody asked for the 32 that are the default; None: somebody did, or it is no help."""
    from dtrain.plan.fit import nearest

    name = half_precision(config["hardware"].get("gpu"))
    if name is None or asked_for(config, "precision") or config["precision"].get("dtype", "float32") != "float32":
        return None
    choices = {**config["choices"], "precision": name}
    half = {**config, "precision": dict(section("precision", name)), "choices": choices}
    prediction = predict(half)
    words, best = ([], prediction) if prediction and prediction.fits else nearest(half) or ([], None)
    return ([f"precision={name}", *words], best) if best else None


def asked_for(config: Mapping[str, Any], start: str) -> bool:
    """Did somebody type words that begin so? What a recipe or a run that goes on says is as good as typed."""
    from hydra.core.hydra_config import HydraConfig

    typed = [str(w).lstrip("+~") for w in HydraConfig.get().overrides.task] if HydraConfig.initialized() else []
    return bool(config["resume"] or config["choices"].get("recipe") or any(w.startswith(start) for w in typed))


def left_out(config: Mapping[str, Any], words: list[str]) -> str:
    """Settings that somebody gave the strategy, and that the one which takes its place has not."""
    new = next((word.partition("=")[2] for word in words if word.startswith("strategy=")), None)
    if new is None:
        return ""
    before, after = strategy_section(config["choices"]["strategy"]), strategy_section(new)
    given = [k for k, value in config["strategy"].items() if k not in after and value != before.get(k)]
    return f" without {' '.join(f'strategy.{key}' for key in given)}" if given else ""


# ---- what a person and a summary see of it -------------------------------------------------------------------


def show(plan: Mapping[str, Any], stream: TextIO) -> None:
    for line in lines(plan):
        print(line, file=stream, flush=True)


def lines(plan: Mapping[str, Any]) -> list[str]:
    """What is said before a run: what strategy=auto chose, and what is expected. Nothing where nothing is known."""
    said = [f"{'auto':<10}{plan['chosen']}"] if plan.get("chosen") else []
    memory, step_s = as_dict(plan.get("memory_gib")), as_dict(plan.get("step_s")).get("total")
    parts = [memory_text(memory) if memory.get("limit") else ""]  # a CPU's processes are more than their tensors
    if step_s is not None:
        parts += [f"{step_time(step_s)} a step", f"{si(plan['tokens_per_s'])} {plan.get('unit', 'tokens')}/s"]
        parts += [f"MFU {percent(plan['mfu'])}"] if plan.get("mfu") is not None else []
        parts += [f"{duration(plan['wall_s'])} of steps"]
    text = " · ".join(part for part in parts if part)
    rates = "rates measured; no run compared yet" if plan.get("measured") else "not calibrated"
    certain = "calibrated by a measured step" if plan.get("calibrated") else rates
    return [*said, f"{'predicted':<10}{text} (hardware={plan['hardware']}, {certain})"] if text else said


def memory_text(memory: Mapping[str, Any]) -> str:
    return f"{gib(memory.get('total'))} of {gib(memory.get('limit'))} a GPU"


def predicted(run_dir: Path) -> dict[str, float] | None:
    """The figures of plan.json that a summary has, too, by name; None: there was no prediction."""
    plan = read_json(run_dir / PLAN)
    if as_dict(plan.get("memory_gib")).get("limit") is None:  # on a CPU the whole process is measured, not its tensors
        plan.pop("memory_gib", None)
    values = {key: as_dict(plan.get(key)).get("total", plan.get(key)) for key in FIGURES}
    return {key: figure for key, value in values.items() if (figure := finite(value)) is not None} or None
