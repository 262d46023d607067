"""Generate DeepSpeed's configuration from our settings, for deepspeed.py and for the launcher, without torch.

A user's own DeepSpeed file may tune what dtrain has no setting for. Any value that dtrain also sets must match, be left
out, or be "auto": a run never has two conflicting values.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import shlex
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dtrain.config.files import flatten
from dtrain.config.mesh import MeshSizes
from dtrain.errors import bad
from dtrain.runs.folder import file_clock

TUNING = (
    "overlap_comm", "reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold", "max_in_cpu", "steps_per_print",
)  # fmt: skip
OURS_ALONE = ("optimizer", "scheduler", "fp16", "bf16")  # a user's file may only repeat our values in these sections
ABANDONED_S = 1800.0
NVME_OPS = ("async_io", "pin_memory")  # ops that DeepSpeed builds, or checks under a lock, for offload to nvme
SCHEDULES = {"constant": "WarmupLR", "linear": "WarmupDecayLR", "cosine": "WarmupCosineLR"}

# Sections and switches that would change the math, the parallelism or where the masters are. False or {} is allowed.
REFUSED = (
    "gradient_allreduce_op", "gradient_predivide_factor", "prescale_gradients", "managed_gradient_accumulation",
    "torch_autocast", "tensor_parallel", "sequence_parallel_size", "expert_parallel", "data_efficiency", "pipeline",
    "hybrid_engine", "compile", "checkpoint", "amp", "elasticity", "curriculum_learning", "compression_training",
    "fp16.auto_cast", "fp16.fp16_master_weights_and_grads", "bf16.bf16_master_weights_and_grads",
    "bf16.bf16_optimizer_states", "bf16.immediate_grad_update", "data_types.param_dtype", "data_types.buffer_dtype",
    "zero_optimization.zenflow", "zero_optimization.zero_quantized_weights",
    "zero_optimization.zero_quantized_nontrainable_weights", "zero_optimization.zero_quantized_gradients",
    "zero_optimization.zero_hpz_partition_size", "zero_optimization.round_robin_gradients",
    "zero_optimization.offload_optimizer.ratio", "zero_optimization.offload_optimizer.super_offload",
    "zero_optimization.cpu_offload", "zero_optimization.cpu_offload_param", "zero_optimization.legacy_stage1",
)  # fmt: skip


def generate(
    strategy: Mapping[str, Any], dtype: str, dp: int, micro_batch_size: int, accumulation: int, max_grad_norm: Any
) -> dict[str, Any]:
    """The engine's configuration for these settings of conf/strategy/zero*.yaml."""
    megabyte = 2**20 // 4  # DeepSpeed counts elements; ours are communicated in fp32
    zero: dict[str, Any] = {
        "stage": strategy["stage"],
        "overlap_comm": strategy["overlap_comm"],
        "reduce_bucket_size": strategy["bucket_mb"] * megabyte,
    }
    if strategy["stage"] == 3:
        zero["stage3_prefetch_bucket_size"] = strategy["gather_mb"] * megabyte
        zero["stage3_param_persistence_threshold"] = strategy["whole_below"]
    else:
        zero["allgather_bucket_size"] = strategy["gather_mb"] * megabyte
    for section, device in (("offload_optimizer", strategy["offload"]), ("offload_param", strategy["offload_params"])):
        if device != "none":
            zero[section] = {"device": device} | ({"nvme_path": strategy["nvme_path"]} if device == "nvme" else {})
    if strategy["offload_params"] == "nvme":
        zero["offload_param"]["max_in_cpu"] = 0  # otherwise up to 1e9 elements would silently stay in host memory
    config: dict[str, Any] = {
        "train_batch_size": micro_batch_size * accumulation * dp,
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": max_grad_norm or 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,  # torch's AdamW, as under every strategy
        "zero_force_ds_cpu_optimizer": False,  # not DeepSpeed's own CPU optimizer, which has to be compiled
        "steps_per_print": None,
        "timers": {"throughput": {"enabled": False}},  # it synchronizes with the GPU at every forward pass
    }
    if dtype == "bfloat16":
        config["bf16"] = {"enabled": True, "check_grad_overflow": True}
    elif dtype == "float16":
        config["fp16"] = {"enabled": True, "loss_scale": 1.0}  # static: Precision manages the loss scale
    if dtype != "float32":  # gradients are reduced and accumulated in fp32, as under fsdp
        config |= {"communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"}}
    return config


def needs_engine(strategy: Mapping[str, Any], user_config: Mapping[str, Any], world_size: int) -> bool:
    """Return whether DeepSpeed is used at all. One rank has nothing to shard, and DeepSpeed's hooks on every gradient
    take as long as the rest of a step of gpt2-1.5b. With offload, or with a user's own configuration, the user asked
    for DeepSpeed.
    """
    offloads = {strategy.get("offload", "none"), strategy.get("offload_params", "none")} != {"none"}
    return world_size > 1 or offloads or bool(user_config)


def merged(ours: dict[str, Any], user: Mapping[str, Any]) -> dict[str, Any]:
    """Return our values, overridden by the user's where we have none or only a default."""
    out = dict(ours)
    for key, value in user.items():
        mine = ours.get(key, {})
        if isinstance(value, Mapping):
            if isinstance(mine, dict) and key not in OURS_ALONE and (inner := merged(mine, value)):
                out[key] = inner
        elif value != "auto" and (key not in ours or key in TUNING) and key != "zero_optimization":
            out[key] = value
    return out


def read(path: str) -> dict[str, Any]:
    """A user's DeepSpeed file."""
    try:
        content = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise bad("strategy.deepspeed_config", path, f"cannot be read ({error.strerror})", "check the path") from error
    except ValueError as error:
        raise bad("strategy.deepspeed_config", path, f"is not valid JSON: {error}", "correct the file") from error
    if not isinstance(content, dict):
        raise bad("strategy.deepspeed_config", path, "must be a JSON object", 'begin it with {"zero_optimization": …')
    return content


# ---- before the launch ---------------------------------------------------------------------------------------


def check(config: Mapping[str, Any], sizes: MeshSizes) -> dict[str, Any]:
    """Raise a ValueError for the first rule that a zero1, zero2 or zero3 run breaks; return DeepSpeed's config."""
    # only zero3's yaml has these keys
    strategy: dict[str, Any] = {"offload_params": "none", "nvme_path": None, "whole_below": 0} | config["strategy"]
    check_offload(strategy)
    if strategy["offload_params"] == "nvme" and config.get("lora", {}).get("rank"):
        rule = "frozen weights are initialized in place, which is not possible on disk"
        raise bad("strategy.offload_params", "nvme", rule, "strategy.offload_params=cpu, or strategy=fsdp")
    if config["compile"] not in ("auto", "none", False) and strategy["stage"] == 3:
        # Hooks gather each layer's weights inside the graph. On an H200 (torch 2.11, DeepSpeed 0.19.8) the loss was off
        # by 0.5 after 12 steps, without an error; on a CPU it was right.
        rule = "strategy=zero3 computes wrong gradients under torch.compile on a GPU"
        raise bad("compile", str(config["compile"]).lower(), rule, "compile=none, or strategy=fsdp")
    per_rank = config["train"]["global_batch_size"] // sizes.dp
    micro = min(config["train"]["micro_batch_size"] or per_rank, per_rank)
    precision = config["precision"]
    dtype = precision.get("dtype", "float32")
    ours = generate(strategy, dtype, sizes.dp, micro, per_rank // micro, config["train"]["max_grad_norm"])
    path = strategy.get("deepspeed_config")
    if path is None:
        return ours
    user = read(path)
    check_agreement(flatten(user), wanted(config, ours), path)
    return merged(ours, user)


def check_offload(strategy: Mapping[str, Any]) -> None:
    stage, path = strategy["stage"], strategy["nvme_path"]
    for key in ("offload", "offload_params"):
        if strategy[key] != "none" and stage < 3 and (key == "offload_params" or strategy[key] == "nvme"):
            what = "keeps whole weights on every rank" if key == "offload_params" else "would use host memory instead"
            raise bad(
                f"strategy.{key}",
                strategy[key],
                f"is for zero3: zero{stage} {what}",
                f"strategy=zero3, or strategy.{key}=none",
            )
    if "nvme" not in (strategy["offload"], strategy["offload_params"]):
        if path:
            fix = "strategy.offload=nvme, or strategy.nvme_path=null"
            raise bad("strategy.nvme_path", path, "is only for offload to nvme", fix)
        return
    if not path:
        raise bad("strategy.nvme_path", path, "offload to nvme needs a folder on a fast disk", "strategy.nvme_path=/…")
    try:
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise bad(
            "strategy.nvme_path",
            path,
            f"cannot be written to ({error.strerror})",
            "use an existing folder that you can write to",
        ) from error
    import ctypes.util  # 4 ms that no other setting needs

    if ctypes.util.find_library("aio") is None:
        rule = "offload to nvme needs libaio, which is not installed"
        raise bad("strategy.nvme_path", path, rule, "apt-get install libaio-dev, or offload to cpu")
    if not (shutil.which("c++") and shutil.which("ninja")):
        rule = "DeepSpeed compiles its async_io on first use (minutes), and there is no c++ with ninja"
        raise bad("strategy.nvme_path", path, rule, "apt-get install g++ ninja-build, or offload to cpu")
    if lock := abandoned_lock():
        name = lock.parent.name
        rule = f"a build of DeepSpeed's {name} was interrupted and left {lock}, for which every rank would wait"
        raise bad("strategy.nvme_path", path, rule, f"rm {shlex.quote(str(lock))}")


def abandoned_lock() -> Path | None:
    """Return a stale lock of torch's extension builds, which nothing removes; running builds take 2 to 5 minutes."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path(cache) / "torch_extensions")
    for lock in (path for name in NVME_OPS for path in (*root.glob(f"{name}/lock"), *root.glob(f"*/{name}/lock"))):
        with contextlib.suppress(OSError):
            if file_clock(lock.parent) - lock.stat().st_mtime > ABANDONED_S:
                return lock
    return None


def wanted(config: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """Return, for each DeepSpeed key that our settings determine, our value and our setting's name."""
    train, optim, schedule, precision = (config[section] for section in ("train", "optim", "schedule", "precision"))
    dtype, zero = precision.get("dtype", "float32"), ours["zero_optimization"]
    out = {
        "train_batch_size": (ours["train_batch_size"], "train.global_batch_size"),
        "train_micro_batch_size_per_gpu": (ours["train_micro_batch_size_per_gpu"], "train.micro_batch_size"),
        "gradient_accumulation_steps": (ours["gradient_accumulation_steps"], "train.micro_batch_size"),
        "gradient_clipping": (ours["gradient_clipping"], "train.max_grad_norm"),
        "zero_optimization.stage": (zero["stage"], "strategy"),
        "zero_optimization.compute_grad_norm": (True, ""),
        "zero_allow_untested_optimizer": (True, ""),
        "zero_force_ds_cpu_optimizer": (False, ""),
        "bf16.enabled": (dtype == "bfloat16", "precision"),
        "bf16.check_grad_overflow": (True, ""),
        "fp16.enabled": (dtype == "float16", "precision"),
        "communication_data_type": ("fp32", ""),
        "data_types.grad_accum_dtype": ("fp32", ""),
        "optimizer.type": ("AdamW", "optim"),
        "scheduler.type": (SCHEDULES.get(schedule["_target_"].rpartition(".")[2], "?"), "schedule"),
        "scheduler.params.warmup_num_steps": (schedule.get("warmup_steps"), "schedule.warmup_steps"),
        "scheduler.params.total_num_steps": (train["steps"], "train.steps"),
        "scheduler.params.warmup_max_lr": (optim.get("lr"), "optim.lr"),
        "scheduler.params.warmup_min_lr": (0, ""),
        "scheduler.params.warmup_type": ("linear", ""),
    }
    for name in ("lr", "betas", "eps", "weight_decay"):
        out[f"optimizer.params.{name}"] = (optim.get(name), f"optim.{name}")
    for section, key in (("offload_optimizer", "offload"), ("offload_param", "offload_params")):
        out[f"zero_optimization.{section}.device"] = (zero.get(section, {}).get("device", "none"), f"strategy.{key}")
        out[f"zero_optimization.{section}.nvme_path"] = (config["strategy"].get("nvme_path"), "strategy.nvme_path")
    if dtype == "float16":  # in a disabled section these keys have no effect
        out |= {
            "fp16.loss_scale": (0, ""),  # DeepSpeed's value for dynamic scaling
            "fp16.initial_scale_power": (math.log2(precision["init_scale"]), "precision.init_scale"),
            "fp16.loss_scale_window": (precision["growth_interval"], "precision.growth_interval"),
            "fp16.hysteresis": (1, ""),
        }
    for key in TUNING:
        if key in zero:
            out[f"zero_optimization.{key}"] = ("auto", "")  # any value is fine
    return out


def check_agreement(user: Mapping[str, Any], wanted: Mapping[str, tuple[Any, str]], path: str) -> None:
    """Raise one ValueError that names every key of a user's file that contradicts our settings."""
    conflicts, changes = {}, []
    for key, value in user.items():
        rival, setting = wanted.get(key, (None, ""))
        if any(key == name or key.startswith(f"{name}.") for name in REFUSED):
            if value is True or value not in (False, None, {}, 1, "mean"):  # 1 is a neutral factor or size
                conflicts[key] = f"{value}: it changes the computation or the layout that dtrain relies on"
        elif key not in wanted and (value == "auto" or key.split(".")[0] in ("optimizer", "scheduler")):
            conflicts[key] = f"{value}: dtrain has no value for it"
        elif key in wanted and "auto" not in (value, rival) and value != rival:
            conflicts[key] = f"{value}: {setting} is {rival}" if setting else f"{value}: dtrain needs {rival}"
            changes += [f"{setting}={setting_value(key, value)}"] if setting else []
    if conflicts:
        lines = "".join(f"\n    {key}={why}" for key, why in conflicts.items())
        fix = f"remove {', '.join(conflicts)} from the file" + (f"; or {' '.join(changes)}" if changes else "")
        raise bad("strategy.deepspeed_config", path, f"contradicts dtrain's settings{lines}", fix)


def setting_value(key: str, value: Any) -> Any:
    values = {
        "zero_optimization.stage": f"zero{value}",
        "bf16.enabled": "bf16" if value else "fp32",
        "fp16.enabled": "fp16" if value else "fp32",
        "gradient_clipping": value or "null",
        "fp16.initial_scale_power": 2.0**value if isinstance(value, (int, float)) else value,
        "scheduler.type": {v: k for k, v in SCHEDULES.items()}.get(str(value), "…"),
    }
    return values.get(key, value)


# ---- on each rank: the swap folder ---------------------------------------------------------------------------


def swap_folder(nvme_path: str) -> Path:
    """Create a new folder for this rank's swap files, locked while the rank lives; remove those of dead ranks.

    DeepSpeed names its files by rank only, so two runs would overwrite each other, and a killed run leaves its files.
    """
    for old in Path(nvme_path).glob("dtrain-swap-*"):
        with contextlib.suppress(OSError), open(old / "lock") as lock:  # another rank may also be removing it
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(old, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f".new-{os.getpid()}-", dir=nvme_path))
    mine = os.open(folder / "lock", os.O_CREAT | os.O_RDWR)  # held until the process ends for any reason
    fcntl.flock(mine, fcntl.LOCK_EX)
    return folder.rename(folder.with_name(f"dtrain-swap{folder.name.removeprefix('.new')}"))
