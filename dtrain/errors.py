"""User-facing errors in one format: the setting, its value, the rule, a fix. Imports nothing from dtrain."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

RENAMED = {"train.check_replicas_every": "guard.replicas_every"}
# What other programs call a setting, by its last word. A value that fits is kept: lr=0.1 is optim.lr=0.1.
ELSEWHERE = {
    "train.global_batch_size": "batch_size train_batch_size global_batch total_batch_size batch bs batchsize",
    "train.micro_batch_size": "per_device_train_batch_size train_micro_batch_size_per_gpu device_batch_size "
    "micro_batch microbatch_size",
    "train.steps": "max_steps num_steps total_steps iterations max_iters num_iterations train_steps steps",
    "train.epochs": "epochs epoch num_epochs n_epochs max_epochs num_train_epochs",
    "train.max_grad_norm": "grad_clip clip clip_grad clip_grad_norm gradient_clip_val gradient_clipping max_norm",
    "train.loader_workers": "num_workers workers dataloader_num_workers n_workers",
    "train.eval_every": "eval_steps eval_interval val_every val_check_interval",
    "train.eval_batches": "eval_iters limit_val_batches max_eval_batches",
    "train.log_every": "log_interval logging_steps log_every_n_steps print_every print_freq",
    "train.seed": "seed random_seed manual_seed seed_everything",
    "cluster.processes": "gpus num_gpus ngpus n_gpus nproc_per_node nproc devices num_devices world_size num_processes "
    "ranks num_ranks",
    "cluster.partition": "queue",
    "cluster.max_restarts": "max_restarts restarts",
    "optim": "optimizer opt",
    "optim.lr": "lr learning_rate max_lr peak_lr base_lr",
    "optim.weight_decay": "wd",
    "schedule": "scheduler lr_scheduler lr_schedule lr_scheduler_type",
    "schedule.warmup_steps": "warmup num_warmup_steps warmup_iters lr_warmup_steps",
    "precision": "dtype mixed_precision torch_dtype",
    "strategy": "distributed_strategy parallelism parallel distributed backend",
    "strategy.tp": "tensor_parallel_size tensor_model_parallel_size tp_size",
    "strategy.pp": "pipeline_parallel_size pipeline_model_parallel_size pp_size",
    "checkpoint.every": "save_every save_steps save_interval checkpoint_every checkpoint_interval",
    "checkpoint.keep": "save_total_limit save_top_k",
    "hardware.price_per_gpu_hour": "price cost gpu_price gpu_cost hourly_price hourly_cost price_per_hour "
    "cost_per_hour price_per_gpu cost_per_gpu gpu_hour_price price_per_gpu_hour cost_per_gpu_hour",
    "lora.rank": "lora_r lora_rank",
    "lora.alpha": "lora_alpha",
    "logger": "report_to tracker",
    "run_dir": "output_dir out_dir save_dir log_dir default_root_dir output logging_dir checkpoint_dir ckpt_dir",
    "name": "run_name experiment_name exp_name",
    "resume": "resume_from_checkpoint resume_from",
    "init_from": "pretrained pretrained_model_name_or_path checkpoint_path ckpt_path ckpt load_from",
    "model.num_layers": "n_layer n_layers num_hidden_layers",
    "model.num_heads": "n_head n_heads num_attention_heads",
    "model.dim": "n_embd hidden_size d_model embed_dim",
    "model.seq_len": "block_size max_length max_seq_len context_length sequence_length seq_length",
    "data": "dataset dataset_name",
    "model": "arch net model_name model_name_or_path",
}
# The same for what dtrain measures in another way: what to type, the names, and how to get from one to the other.
OTHERWISE = {
    "train.micro_batch_size=4": (
        "gradient_accumulation_steps gradient_accumulation accumulate_grad_batches grad_accum grad_accumulation "
        "grad_accum_steps accumulation accumulation_steps",
        "the samples that a rank takes at once; it accumulates gradients up to train.global_batch_size",
    ),
    "cluster.processes=2": (
        "accelerator device cuda gpu use_gpu use_cuda no_cuda",
        "the number of ranks; a GPU is used wherever there is one, CUDA_VISIBLE_DEVICES= hides them",
    ),
    "cluster=slurm cluster.nodes=2": ("num_nodes nnodes n_nodes num_machines", "cluster=local is one machine"),
    "precision=bf16": ("amp use_amp autocast half", "precision=fp16 has loss scaling"),
    "schedule.warmup_steps=30": ("warmup_ratio", "in steps: a tenth of train.steps=300"),
    "activation_checkpointing=full": (
        "gradient_checkpointing activation_checkpoint use_checkpoint recompute",
        "or ops, or selective, which recompute less",
    ),
    "compile=auto": ("torch_compile use_compile compile_model", "the default on a GPU; compile=none turns it off"),
    "hooks=early_stop": ("early_stopping early_stopping_patience patience", "dtrain explain hooks=early_stop"),
    "strategy=fsdp": (
        "zero zero_stage zero_optimization deepspeed use_fsdp sharded",
        "it shards as ZeRO does; DeepSpeed's own are zero1, zero2 and zero3",
    ),
    "lora.rank=8": ("use_lora peft use_peft", "low-rank adapters; 0 trains all weights"),
    "profile=torch": ("profiler use_profiler torch_profiler", "dtrain profile RUN shows the result"),
    "dry_run=true": (
        "debug dryrun fast_dev_run",
        "shows the command and starts nothing; for full tracebacks: export HYDRA_FULL_ERROR=1",
    ),
    "checkpoint.save=false": ("no_save", "no checkpoint at all"),
}
MOST_LISTED = 20  # settings of a section that a message lists
LONGEST = 400  # longest value, in characters, that a message repeats


def bad(key: str, value: Any, rule: str, fix: str) -> ValueError:
    """Format every message about a setting: the setting, its value, the rule, a fix."""
    text = "null" if value is None else str(value)
    return ValueError(f"{key}={text if len(text) <= LONGEST else text[:LONGEST] + '…'}: {rule}\n  fix: {fix}")


def unknown(
    key: str, known: Iterable[str], value: str | None = None, takes: Callable[[str], bool] | None = None
) -> ValueError:
    """Name what was probably meant. value: what was typed, if the setting of ours in `foreign` accepts it.

    takes: whether a setting accepts the typed value; if only some of those with a near name do, the others are not
    meant.
    """
    if key in RENAMED:
        return ValueError(f"{key}: has another name now\n  fix: {RENAMED[key]}={value or '…'}")
    known = sorted(known)
    leaf = key.rpartition(".")[2]
    ours = foreign(key)
    if ours in known:
        return ValueError(f"{key}: there is no such setting\n  fix: {ours}={value or '…'}   (dtrain explain {ours})")
    for fix, (theirs, note) in OTHERWISE.items():
        if leaf.lower() in theirs.split() and {word.partition("=")[0] for word in fix.split()} <= set(known):
            return ValueError(f"{key}: there is no such setting\n  fix: {fix}   ({note})")
    near = [k for k in known if k.rpartition(".")[2] == leaf]  # lr is meant as optim.lr, not as logger
    near += [k for k in difflib.get_close_matches(key, known, 3, 0.5) if k not in near and are_alike(k, key)]
    near = [k for k in near if likeness(k, key) > likeness(near[0], key) - 0.05]  # train.stpes is not train.spike
    near = [k for k in near if takes(k)] or near if takes else near
    if near:
        return ValueError(f"{key}: there is no such setting\n  fix: did you mean {' or '.join(near)}?")
    section = key.rpartition(".")[0]
    siblings = [k for k in known if k.startswith(f"{section}.") or (not section and "." not in k)]
    if not siblings or len(siblings) > MOST_LISTED:
        fix = f"leave out {key}; docs/configuration.md lists all settings"
    else:
        fix = f"leave out {key}, or use one of {', '.join(siblings)}"
    return ValueError(f"{key}: there is no such setting\n  fix: {fix}")


def are_alike(known: str, key: str) -> bool:
    """Whether the last words of two settings are, too: logger.mlflow.uri is not meant by logger.colour."""
    return likeness(known.rpartition(".")[2], key.rpartition(".")[2]) >= 0.6


def likeness(known: str, typed: str) -> float:
    return difflib.SequenceMatcher(None, known, typed).ratio()


def foreign(key: str) -> str | None:
    """Return the setting, or the group, that other programs give this name."""
    leaf = key.rpartition(".")[2].lower()
    return next((ours for ours, theirs in ELSEWHERE.items() if leaf in theirs.split()), None)


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or used; the message says which, why, and how to fix it."""


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and its causes."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
