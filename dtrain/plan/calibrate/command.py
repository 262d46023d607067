"""`dtrain plan calibrate`: measure this machine and write a hardware file for the planner.

    dtrain plan calibrate [out=NAME|FILE.yaml] [seconds=40] [json=FILE]
    dtrain plan calibrate from=RUN [out=NAME|FILE.yaml]

The first measures, in about a minute: matmuls by shape, a large copy, the cost of a kernel on the host and the GPU,
Adam on the CPU, copies to the GPU, and collectives by size over this machine's GPUs (without one: two processes).
The second uses one run that was predicted and measured: its compute time divided by the predicted one becomes
`calibration`, a factor on every later prediction of compute time.

A NAME is written to conf/hardware/NAME.yaml and chosen with hardware=NAME. A FILE.yaml may be anywhere; the launcher
finds it only in conf/hardware, or in DIR/hardware with `--config-dir DIR`. What cannot be measured here
(the network, peak rates, a price) is taken from the file of this GPU in conf/hardware.
"""

from __future__ import annotations

import difflib
import inspect
import json
import os
import platform
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dtrain.config.files import CONF, CONTROL, section
from dtrain.config.hardware import Hardware, detect
from dtrain.config.untrusted import read_text
from dtrain.errors import bad
from dtrain.runs.folder import read_json
from dtrain.util.format import as_dict, finite

MARK = "# Written by `dtrain plan calibrate`"
OPTIONS = {"out": "NAME", "from": "RUN", "seconds": "40", "json": "FILE"}


def main(argv: list[str]) -> int:
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return 0
    options = parse(argv)
    seconds = positive(options.get("seconds", "40"))
    if "from" in options:
        from dtrain.runs.find import find_run

        name, values, comments, source = from_run(find_run(options["from"]))
        path = place(options.get("out") or f"{name}-calibrated")
        title = f"a run's step against its prediction with hardware={name}"
    else:
        name = detect() or "unknown"
        path = place(options.get("out") or f"my-{name}")
        measured = measure(seconds)
        base = section("hardware", name)
        values, comments, source = base | measured["figures"], measured_comments(measured, name), "measured"
        if base["peak_bf16_tflops"] is None:  # MFU is then relative to the measured rate
            values["peak_bf16_tflops"] = values["matmul_tflops"]
            comments["peak_bf16_tflops"] = "as measured: conf/hardware has no data sheet rate for this machine"
        title = f"measured with {measured['versions']}; values without a comment are from conf/hardware/{name}"
        if options.get("json"):
            Path(options["json"]).write_text(json.dumps(measured, indent=1) + "\n")
        print("\n".join(table(measured)))
    text = as_yaml(values | {"source": f"{source} on {time.strftime('%Y-%m-%d')}"}, comments, title)
    Hardware(**{k: v for k, v in values.items() if k not in ("_target_", "source")})  # raises if a value is invalid
    path.write_text(text)
    print(f"wrote {path}")
    found = path.parent.resolve() == (CONF / "hardware").resolve()
    print(f"next: hardware={path.stem}" if found else f"next: cp {path} {CONF / 'hardware'}/ and hardware={path.stem}")
    return 0


# ---- the command line ---------------------------------------------------------------------------------------


def parse(argv: list[str]) -> dict[str, str]:
    """Parse options; out=NAME, --out=NAME and --out NAME are equivalent."""
    options, rest = {}, list(argv)
    while rest:
        word = rest.pop(0)
        key, equals, value = word.lstrip("-").partition("=")
        if key not in OPTIONS or not (equals or word.startswith("--")):
            near = difflib.get_close_matches(key, OPTIONS, 1)
            known = ", ".join(f"{name}={example}" for name, example in OPTIONS.items())
            fix = f"did you mean {near[0]}={value or OPTIONS[near[0]]}?" if near else f"use one of {known}"
            raise ValueError(f"{word}: is not an option of dtrain plan calibrate\n  fix: {fix}")
        if not equals:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else ""
        if not value:
            raise bad(key, "", "needs a value", f"{key}={OPTIONS[key]}")
        options[key] = value
    return options


def positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 3600:
        raise bad("seconds", text, "must be a number of seconds, up to 3600", "seconds=40")
    return value


def place(out: str) -> Path:
    """Return where to write: conf/hardware/NAME.yaml, or the given file. Never replaces a hand-written file."""
    if os.sep in out and not out.endswith((".yaml", ".yml")):
        raise bad("out", out, "must be a name, or a file that ends in .yaml", f"out={out}.yaml")
    path = Path(out).expanduser() if out.endswith((".yaml", ".yml")) else CONF / "hardware" / f"{out}.yaml"
    if not path.parent.is_dir():
        raise bad("out", out, f"there is no folder {path.parent}", "create it first, or use out=NAME")
    if path.is_file() and not path.read_text(encoding="utf-8").startswith(MARK):
        raise bad("out", out, "would replace a file that this command did not write", f"out=my-{path.stem}")
    return path


# ---- measuring ----------------------------------------------------------------------------------------------


def measure(seconds: float) -> dict[str, Any]:
    """Run all measurements: {"figures": settings, "matmul": rows, "collectives": rows, "more": …, "versions": …}."""
    from dtrain.plan.calibrate import link_fit, measure

    import torch  # isort: skip

    began, gpus = time.monotonic(), torch.cuda.device_count()
    ranks = gpus if gpus else 2
    share = 0.7 if ranks > 1 else 1.0
    found = measure.device_rates(seconds * share)
    rows = measure.collective_rows(ranks, seconds * (1 - share)) if ranks > 1 else []
    values: dict[str, Any] = {**found["figures"], **link_fit.link_values(rows)}
    if gpus:
        values |= {"gpus_per_node": gpus, "gpu": found["more"]["gpu"].removeprefix("NVIDIA ")}
    else:  # what one of two ranks may hold
        values |= {key: values["host_memory_gib"] / 2 for key in ("gpu_memory_gib", "usable_memory_gib")}
        values["gpus_per_node"] = 2
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    versions += f", CUDA {torch.version.cuda}" if gpus else f", {os.cpu_count()} cores, half of them a rank"
    return {
        "figures": {key: rounded(value, 5 if key.endswith("_gib") else 3) for key, value in values.items()},
        "matmul": found["matmul"],
        "collectives": rows,
        "more": found["more"],
        "versions": versions,
        "seconds": round(time.monotonic() - began, 1),
    }


def rounded(value: Any, digits: int = 3) -> Any:
    """Round to three digits: no time here is more repeatable. A card's memory is exact."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.{digits}g}") if value < 1000 else round(value)


def measured_comments(measured: Mapping[str, Any], name: str) -> dict[str, str]:
    """Describe how each value was measured; values from conf/hardware have no comment."""
    how = {
        "gpu": "this machine's",
        "gpus_per_node": "of this machine" if measured["more"] else "default number of ranks on this machine",
        "matmul_tflops": "the best shape above, sustained for some seconds, bf16"
        if measured["more"]
        else "bf16, 512 × 512 × 512",
        "peak_fp32_tflops": "measured, without TF32: 4096 × 4096 × 4096"
        if measured["more"]
        else "the best shape above",
        "stream_gb_s": "a large copy",
        "launch_us": "host time per kernel, small layers forward and backward" if measured["more"] else "x.add_(1)",
        "kernel_us": "replayed one after another from a CUDA graph" if measured["more"] else "x.add_(1)",
        "cpu_adam_gb_s": "torch's fused AdamW in fp32 on all cores",
        "pcie_gb_s": "from pinned memory",
        "nvlink_max_gb_s": "a line fitted to the collectives above",
        "gpu_memory_gib": f"as in {name}" if measured["more"] else "half of the host's: a run has two ranks here",
    }
    return {key: how.get(key, "measured") for key in measured["figures"]} | {"": "\n".join(rows_of(measured))}


def table(measured: Mapping[str, Any]) -> list[str]:
    """Format the result: the measurements by shape and by size, then the values."""
    values = {**measured["figures"], **measured["more"]}
    lines = [f"{key:>20}  {value if isinstance(value, str) else f'{value:g}'}" for key, value in values.items()]
    return [*rows_of(measured), *lines]


def rows_of(measured: Mapping[str, Any]) -> list[str]:
    """Format the measurements by shape and by size; also the head of the file."""
    best = max(row["tflops"] for row in measured["matmul"])
    lines = [
        f"{'rows':>8}{'inner':>8}{'cols':>8}{'us':>12}{'TFLOP/s':>10}{'of best':>9}  ({measured['matmul'][0]['dtype']})"
    ]
    for row in measured["matmul"]:
        sizes = f"{row['rows']:>8}{row['inner']:>8}{row['cols']:>8}"
        lines.append(f"{sizes}{row['us']:>12.1f}{row['tflops']:>10.4g}{row['tflops'] / best:>9.0%}")
    if measured["collectives"]:
        lines.append(f"{'collective':>16}{'ranks':>6}{'KiB':>10}{'us':>12}{'GB/s bus':>10}")
    for row in measured["collectives"]:
        head = f"{row['collective']:>16}{row['ranks']:>6}{row['bytes'] // 1024:>10}"
        lines.append(f"{head}{row['us']:>12.1f}{row['busbw_gb_s']:>10.3g}")
    return lines


# ---- one run calibrates a stack -----------------------------------------------------------------------------


def from_run(run_dir: Path) -> tuple[str, dict[str, Any], dict[str, str], str]:
    """(hardware's name, its section with `calibration`, comments, source) from a run's plan.json and summary.json.

    The whole difference between the measured and the predicted step is attributed to compute.
    """
    plan, summary = read_json(run_dir / "plan.json"), read_json(run_dir / "summary.json")
    step, measured = as_dict(plan.get("step_s")), finite(summary.get("tokens_per_s"))
    total, compute, rate = (finite(v) for v in (step.get("total"), step.get("compute"), plan.get("tokens_per_s")))
    if not total or not compute or not rate:
        reason = plan.get("reason") or "its plan.json has no step time"
        raise bad(
            "from",
            run_dir,
            f"nothing was predicted for this run ({reason})",
            "choose a run of a known model and hardware",
        )
    if not measured:
        raise bad("from", run_dir, "its summary.json has no tokens_per_s", "choose a run that has done some steps")
    step_s = total * rate / measured
    left = step_s - (total - compute)
    if left <= 0:
        rule = (
            f"its step took {step_s:.3g} s, less than the {total - compute:.3g} s predicted for everything but compute"
        )
        raise bad("from", run_dir, rule, "choose a run on one GPU, where nearly all time is compute")
    name, base = hardware_of(run_dir, plan.get("hardware"))
    factor = left / compute * (finite(base.get("calibration")) or 1.0)
    how = f"compute took {left:.4g} s of a step of {step_s:.4g} s; the prediction was {compute:.4g} s of {total:.4g} s"
    print(f"calibration {factor:.3f}: {how}")
    return name, {**base, "calibration": rounded(factor)}, {"calibration": how}, f"{base.get('source', '')}; calibrated"


def hardware_of(run_dir: Path, name: object) -> tuple[str, dict[str, Any]]:
    """Return the hardware's name and values that a run was predicted with. The run folder is untrusted, and both are
    written into a file that the launcher reads: so the name must be a plain word, and each value one of Hardware's."""
    if not isinstance(name, str) or not re.fullmatch(r"\w[\w.-]*", name, re.ASCII):
        fix = "choose a run on known hardware; dtrain runs lists them"
        raise bad("from", run_dir, f"its plan.json names no hardware file ({json.dumps(name)})", fix)
    known = inspect.signature(Hardware).parameters
    chosen = {k: v for k, v in as_dict(read_config(run_dir).get("hardware")).items() if k in known}
    if not chosen.get("gpu_memory_gib"):  # detected by the launcher, not typed
        if not (CONF / "hardware" / f"{name}.yaml").is_file():
            raise bad(
                "from",
                run_dir,
                f"there is no hardware={name} any more",
                "choose a run on hardware that is in conf/hardware",
            )
        return name, dict(section("hardware", name))
    for key, value in chosen.items():
        text = key in ("gpu", "source") and isinstance(value, str) and not CONTROL.search(value)
        if value is not None and not text and (finite(value) is None or key in ("gpu", "source")):
            rule = f"its config.yaml has hardware.{key}={json.dumps(value, default=str)}, which is not a valid value"
            raise bad("from", run_dir, rule, "choose another run; dtrain runs lists them")
    return name, chosen


def read_config(run_dir: Path) -> dict[str, Any]:
    import yaml

    try:
        return as_dict(yaml.safe_load(read_text(run_dir / "config.yaml")))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise bad(
            "from", run_dir, "its config.yaml cannot be read", "choose another run; dtrain runs lists them"
        ) from error


# ---- the file -----------------------------------------------------------------------------------------------


def as_yaml(values: Mapping[str, Any], comments: Mapping[str, str], title: str) -> str:
    """Return a complete hardware file: every setting, in the order of Hardware, each with its origin as a comment."""
    lines = [f"{MARK} on {time.strftime('%Y-%m-%d')}: {title}."]
    lines += [f"# {line}".rstrip() for line in comments.get("", "").splitlines()]
    lines += ["# What a setting means is in unknown.yaml.", "_target_: dtrain.config.hardware.Hardware"]
    for key in inspect.signature(Hardware).parameters:
        value = values.get(key)
        text = json.dumps(value, ensure_ascii=False)
        lines.append(f"{key}: {text}" + (f" # {comments[key]}" if comments.get(key) else ""))
    return "\n".join(lines) + "\n"
