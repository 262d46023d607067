"""The prediction for every run: made before it starts, and compared with its measurements afterwards.

The launcher calls `plan_of` and `check` and stores the prediction as RUN/plan.json; the ranks copy it to their
summary. A planner bug never stops a launch: it is logged as a warning. DTRAIN_STRICT=1 (our tests) raises it.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from dtrain import __version__
from dtrain.checks.strategy import shared_gpus
from dtrain.config.files import is_script
from dtrain.config.hardware import count_cores, count_gpus, gpus_per_node, ranks_per_node
from dtrain.config.run_length import last_step
from dtrain.plan.model_shape import shape_of
from dtrain.plan.parameters import flops_per_sample
from dtrain.plan.predict import hardware_of, predict, why_not
from dtrain.plan.sections import strategy_section, with_detected
from dtrain.plan.time.collectives import STEPS, Group, collective_s, rate
from dtrain.runs.folder import latest_checkpoint, read_summary
from dtrain.util.format import as_dict, counted, duration, gib, percent, si, step_time, without_nan

FAULT = "the planner failed"
# Of a core in float32 where nothing is measured: what gpt2-124m reached on a server's core with AVX-512.
CPU_FLOPS = 60e9
SLOW_STEP_S, SLOW_RUN_S = 10.0, 1800.0  # both: a run that is meant to be slow has few steps
TINY = {
    "dtrain.models.gpt2.GPT2": "gpt2-tiny",
    "dtrain.models.llama.Llama": "llama-tiny",
    "dtrain.models.bert.Bert": "bert-tiny",
    "dtrain.models.vit.ViT": "vit-tiny",
    "dtrain.models.resnet.ResNet": "convnet",
}
STATES = ("parameters", "gradients", "optimizer")  # exact; all other parts are estimates
CERTAIN = 1.08  # estimates may be too large by this factor: the bound for measured peaks (benchmarks/planner)
NO_GPU = "and there is no GPU here"

log = logging.getLogger("dtrain")


def plan_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return plan.json: the `dtrain plan` row for this configuration, or the `reason` why there is none."""
    plan: dict[str, Any] = {"version": __version__, "hardware": config["choices"].get("hardware")}
    if is_script(config):
        return plan | {"reason": "the program is not dtrain's, so nothing is predicted"}
    if why := config["choices"].get("auto"):
        plan["chosen"] = why
    try:
        config = with_detected(dict(config))
        plan["hardware"] = config["choices"].get("hardware")
        plan["calibrated"] = config["hardware"].get("calibration") is not None
        plan["measured"] = str(config["hardware"].get("source")).startswith("measured")  # by dtrain plan calibrate
        row = without_nan(row_of(config))
        return {**plan, **row} | ({} if "reason" in row else {"collectives": collectives_of(config)})
    except Exception as error:  # a planner bug must not stop training
        if strict():
            raise
        return plan | {"reason": f"{FAULT} ({type(error).__name__}: {error})"}


def row_of(config: Mapping[str, Any]) -> dict[str, Any]:
    if shared_gpus(dict(config["cluster"])):
        return {"reason": "ranks share a GPU, so the memory and speed of each is not known"}
    if elsewhere(config):
        return {"reason": f"hardware={config['choices'].get('hardware')} has GPUs, {NO_GPU}"}
    if group := foreign(config):
        return {"reason": f"{group}={config['choices'].get(group)} is not one of dtrain's"}
    prediction = predict(config)
    if prediction is None:
        return {"reason": why_not(config)}
    step_s = prediction.step_s
    return prediction.row() | {"wall_s": None if step_s is None else step_s * steps_to_do(config)}


def collectives_of(config: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return what the hardware file expects of collectives over all ranks; {} if it has no rates. For a profile."""
    hardware = hardware_of(config)
    nodes, per_node = int(config["cluster"]["nodes"]), ranks_per_node(config["cluster"])
    if hardware is None or nodes * per_node < 2 or not hardware.gpus_per_node:
        return {}
    links = hardware.nvlink_max_gb_s or hardware.gather_max_gb_s or hardware.pcie_gb_s
    if not links or (nodes > 1 and not (hardware.network_max_gb_s or hardware.network_busbw_gb_s)):
        return {}
    group = Group(nodes * per_node, per_node)
    return {
        kind: {
            "ranks": group.size,
            "latency_us": 1e6 * collective_s(hardware, kind, group, 0),
            "bus_gb_s": rate(hardware, kind, group) / 1e9,
        }
        for kind in STEPS
    }


def foreign(config: Mapping[str, Any]) -> str | None:
    """Return which of strategy and optimizer is the user's own, so that its memory is unknown."""
    return next((g for g in ("strategy", "optim") if not str(config[g]["_target_"]).startswith("dtrain.")), None)


def is_for_elsewhere(config: Mapping[str, Any]) -> bool:
    """Is it a preview for a machine with GPUs?"""
    return bool(config.get("dry_run") and config["hardware"].get("gpu"))


def elsewhere(config: Mapping[str, Any]) -> bool:
    """Does it run on this machine without a GPU, but with a GPU's hardware settings? A dry run is exempt."""
    local = "gpus_per_node" not in config["cluster"] and not config.get("dry_run")
    return bool(local and config["hardware"].get("gpu") and not gpus_per_node(config["cluster"]))


def strict() -> bool:
    return os.environ.get("DTRAIN_STRICT") == "1"


def steps_to_do(config: Mapping[str, Any]) -> float:
    """Count the steps of this launch, over which its wall time is measured; nan: not known yet."""
    newest = latest_checkpoint(Path(config["run_dir"])) if config["resume"] else None
    done = int(newest.name.removeprefix("step-")) if newest else 0
    last = last_step(config["train"], read_summary(Path(config["run_dir"])) if config["resume"] else {})
    return math.nan if last is None else max(0, last - done)


def asked_for(config: Mapping[str, Any], start: str) -> bool:
    """Did the user type overrides that start like this? The settings of a recipe or a resumed run count as typed."""
    return bool(config["resume"] or config["choices"].get("recipe") or any(w.startswith(start) for w in typed_words()))


def typed_words() -> list[str]:
    from hydra.core.hydra_config import HydraConfig

    return [str(w).lstrip("+~") for w in HydraConfig.get().overrides.task] if HydraConfig.initialized() else []


def left_out(config: Mapping[str, Any], overrides: list[str]) -> str:
    """List the user's strategy settings that the replacement strategy does not have."""
    new = next((word.partition("=")[2] for word in overrides if word.startswith("strategy=")), None)
    if new is None:
        return ""
    before, after = strategy_section(config["choices"]["strategy"]), strategy_section(new)
    given = [k for k, value in config["strategy"].items() if k not in after and value != before.get(k)]
    return f" without {' '.join(f'strategy.{key}' for key in given)}" if given else ""


def slow_cpu(config: Mapping[str, Any], plan: Mapping[str, Any]) -> Iterator[str]:
    """Warn of a run that would take hours on this machine's CPUs, by the planner's step time or else by its FLOPs."""
    if is_script(config) or "gpus_per_node" in config["cluster"] or config["cluster"].get("launcher") or count_gpus():
        return
    if is_for_elsewhere(config):
        return
    shape, step_s = shape_of(config), as_dict(plan.get("step_s")).get("total")
    if shape is None:
        return
    flops, cores = flops_per_sample(shape) * config["train"]["global_batch_size"], count_cores()
    guess = "" if step_s else f", at {CPU_FLOPS / 1e9:.0f} GFLOP/s a core"
    step_s = step_s or flops / (CPU_FLOPS * cores)
    steps = steps_to_do(config)
    whole = step_s * steps if math.isfinite(steps) else math.inf
    if step_s < SLOW_STEP_S or whole < SLOW_RUN_S:
        return
    run = f", and {counted(round(steps), 'step')} {duration(whole)}" if math.isfinite(whole) else ""
    family, choices = TINY.get(config["model"]["_target_"]), config["choices"]
    grown = [word for word in typed_words() if re.match(r"model\.|train\.(global_batch_size|steps|epochs)=", word)]
    fixes = [] if choices.get("recipe") == "cpu-tiny" else ["recipe=cpu-tiny"]
    fixes += [f"model={family}"] if family and choices.get("model") != family else []
    if not fixes:  # these are given: what else made it large
        fixes = [f"leave out {' '.join(grown)}" if grown else f"train.steps={max(1, int(SLOW_RUN_S / step_s))}"]
    where = f"on {counted(cores, 'core')} without a GPU{guess}"
    yield (
        f"a step of {flops / 1e12:.1f} TFLOP takes about {duration(step_s)} {where}{run}; fix: {', or '.join(fixes)}"
    )


# ---- output --------------------------------------------------------------------------------------------------


def show(plan: Mapping[str, Any], stream: TextIO) -> None:
    for line in lines(plan):
        print(line, file=stream, flush=True)


def lines(plan: Mapping[str, Any]) -> list[str]:
    """Return the lines printed before a run: the choice of strategy=auto, and the prediction. Empty if unknown."""
    lines = [f"{'auto':<10}{plan['chosen']}"] if plan.get("chosen") else []
    memory, step_s = as_dict(plan.get("memory_gib")), as_dict(plan.get("step_s")).get("total")
    parts = [memory_text(memory) if memory.get("limit") else ""]  # CPU processes use more than their tensors
    if step_s is not None:
        whole = plan.get("wall_s")
        parts += [f"{step_time(step_s)} a step", f"{si(plan['tokens_per_s'])} {plan.get('unit', 'tokens')}/s"]
        parts += [f"MFU {percent(plan['mfu'])}"] if plan.get("mfu") is not None else []
        parts += [f"{duration(whole)} of steps"] if whole is not None else []
    text = " · ".join(part for part in parts if part)
    rates = "rates measured; no run compared yet" if plan.get("measured") else "not calibrated"
    certain = "calibrated by a measured step" if plan.get("calibrated") else rates
    return [*lines, f"{'predicted':<10}{text} (hardware={plan['hardware']}, {certain})"] if text else lines


def memory_text(memory: Mapping[str, Any]) -> str:
    return f"{gib(memory.get('total'))} of {gib(memory.get('limit'))} a GPU"
