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
    "train.log_every": "log_interval logging_steps log_every_n_steps print_every print_freq steps_per_print",
    "train.stop_after": "limit_train_batches overfit_batches max_train_batches",
    "train.seed": "seed random_seed manual_seed seed_everything",
    "cluster.processes": "gpus num_gpus ngpus n_gpus nproc_per_node nproc devices num_devices world_size num_processes "
    "ranks num_ranks",
    "cluster.partition": "queue",
    "cluster.max_restarts": "max_restarts restarts",
    "optim": "optimizer opt optimizer.type optimizer.name optim_name optimizer_type",
    "optim.lr": "lr learning_rate max_lr peak_lr base_lr",
    "optim.weight_decay": "wd",
    "optim.eps": "adam_epsilon adam_eps epsilon",
    "optim.betas": "adam_beta1 adam_beta2 beta1 beta2",
    "data.val_fraction": "val_split validation_split val_ratio test_size",
    "schedule": "scheduler lr_scheduler lr_schedule lr_scheduler_type scheduler.type scheduler.name scheduler_type",
    "schedule.warmup_steps": "warmup num_warmup_steps warmup_iters lr_warmup_steps",
    "precision": "dtype mixed_precision torch_dtype",
    "strategy": "distributed_strategy fsdp_sharding_strategy sharding_strategy parallelism parallel distributed "
    "backend",
    "strategy.tp": "tensor_parallel_size tensor_model_parallel_size tp_size",
    "strategy.pp": "pipeline_parallel_size pipeline_model_parallel_size pp_size",
    "checkpoint.every": "save_every save_steps save_interval checkpoint_every checkpoint_interval every_n_train_steps",
    "checkpoint.save": "enable_checkpointing save_checkpoints save_model",
    "checkpoint.keep": "save_total_limit save_top_k",
    "hardware.price_per_gpu_hour": "price cost gpu_price gpu_cost hourly_price hourly_cost price_per_hour "
    "cost_per_hour price_per_gpu cost_per_gpu gpu_hour_price price_per_gpu_hour cost_per_gpu_hour",
    "lora.rank": "lora_r lora_rank",
    "lora.alpha": "lora_alpha",
    "logger": "report_to tracker",
    "run_dir": "output_dir out_dir save_dir log_dir default_root_dir output logging_dir checkpoint_dir ckpt_dir "
    "checkpoint.dir checkpoint.folder",
    "name": "run_name experiment_name exp_name",
    "resume": "resume_from_checkpoint resume_from load_checkpoint checkpoint.load checkpoint.path checkpoint.resume",
    "init_from": "pretrained pretrained_model_name_or_path checkpoint_path ckpt_path ckpt load_from",
    "model.num_layers": "n_layer n_layers num_hidden_layers",
    "model.num_heads": "n_head n_heads num_attention_heads",
    "model.dim": "n_embd hidden_size d_model embed_dim",
    "model.seq_len": "block_size max_length max_seq_len context_length sequence_length seq_length",
    "data": "dataset dataset_name train_dataset train_data training_data train_dataloader train_dataloaders "
    "train_loader trainloader dataloader data_loader datamodule",
    "hooks": "callbacks callback",
    "hooks.early_stop.patience": "patience early_stopping_patience early_stop_patience",
    "loss": "criterion loss_fn loss_function objective",
    "checkpoint.keep_best": "monitor metric_for_best_model",
    "model": "arch architecture net model_name model_type model_name_or_path",
}
# The same for what dtrain measures in another way: what to type, the names, and how to get from one to the other.
OTHERWISE = {
    "strategy=zero3 strategy.offload=cpu": (
        "cpu_offload offload_optimizer zero_optimization.offload_optimizer.device offload_param",
        "or strategy=fsdp strategy.offload=cpu",
    ),
    "train.eval_every=100": (
        "check_val_every_n_epoch eval_strategy evaluation_strategy eval_every_n_epochs val_every_n_epochs",
        "in steps; 0: only at the end",
    ),
    "checkpoint.every=100": ("save_strategy save_every_n_epochs every_n_epochs", "in steps; 0: only at the end"),
    "checkpoint.keep_best=val_loss": (
        "load_best_model_at_end save_best save_best_only",
        "then RUN@best is that checkpoint: dtrain evaluate RUN@best",
    ),
    "ema.decay=0.999": ("use_ema ema_decay", "0, the default, keeps no average"),
    "train.micro_batch_size=4": (
        "gradient_accumulation_steps gradient_accumulation accumulate_grad_batches grad_accum grad_accumulation "
        "grad_accum_steps accumulation accumulation_steps",
        "the samples that a rank takes at once; it accumulates gradients up to train.global_batch_size",
    ),
    "cluster=slurm cluster.nodes=2": ("num_nodes nnodes n_nodes num_machines", "cluster=local is one machine"),
    "precision=bf16": ("amp use_amp autocast half", "precision=fp16 has loss scaling"),
    "schedule.warmup_steps=30": ("warmup_ratio", "in steps: a tenth of train.steps=300"),
    "activation_checkpointing=full": (
        "gradient_checkpointing activation_checkpoint use_checkpoint recompute",
        "or ops, or selective, which recompute less",
    ),
    "compile=auto": (
        "torch_compile use_compile compile_model dynamo_backend torch_compile_backend",
        "the default on a GPU; compile=none turns it off",
    ),
    "hooks=early_stop": ("early_stopping", "dtrain explain hooks=early_stop"),
    "strategy=fsdp": (
        "deepspeed use_deepspeed use_fsdp sharded fsdp_config",
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
# What other programs call an option of a group: what to type here, and their names.
OPTIONS_ELSEWHERE = {
    "strategy": {
        "strategy=ddp": "dp data_parallel dataparallel distributed_data_parallel distributeddataparallel distributed "
        "ddp_spawn ddp_fork ddp_notebook ddp_find_unused_parameters_true ddp_find_unused_parameters_false multi_gpu "
        "nccl gloo",
        "strategy=ddp cluster.processes=1": "none no single single_device single_gpu",
        "strategy=fsdp": "fsdp2 fsdp1 fully_sharded fully_shard full_shard fullyshardeddataparallel "
        "fully_sharded_data_parallel fsdp_native sharded zero zero_dp",
        "strategy=fsdp strategy.sharding=grad_op": "shard_grad_op",
        "strategy=fsdp strategy.sharding=hybrid strategy.replica_size=2 cluster.processes=4": "hybrid_shard hsdp",
        "strategy=fsdp strategy.offload=cpu": "fsdp_offload fsdp_cpu_offload",
        "strategy=zero1": "1 deepspeed_stage_1 zero_1 zero_stage_1 zeroredundancyoptimizer",
        "strategy=zero2": "2 deepspeed_stage_2 zero_2 zero_stage_2",
        "strategy=zero3": "3 deepspeed ds deepspeed_stage_3 zero_3 zero_stage_3",
        "strategy=zero2 strategy.offload=cpu": "deepspeed_stage_2_offload",
        "strategy=zero3 strategy.offload=cpu": "deepspeed_stage_3_offload zero_offload",
        "strategy=tensor": "tp tensor_parallel tensorparallel model_parallel modelparallel mp",
        "strategy=pipeline": "pp pipeline_parallel pipelineparallel gpipe 1f1b pipe",
        "strategy=3d cluster.processes=4": "megatron megatron_lm nd hybrid_parallel",
        "strategy=fsdp strategy.cp=2": "cp context_parallel sequence_parallel ring_attention ulysses",
        "strategy=ps": "parameter_server parameterserver",
        "strategy=local_sgd": "localsgd fedavg",
    },
    "precision": {
        "precision=fp32": "float32 float 32 32-true 32-mixed full no none fp64 float64 double 64 64-true tf32",
        "precision=bf16": "bfloat16 bf16-mixed mixed amp autocast",
        "precision=bf16-pure": "bf16-true bf16_true 16-true fp16-true",
        "precision=fp16": "float16 16-mixed fp16-mixed 16 half",
        "precision=fp8": "8 float8 transformer-engine",
    },
    "schedule": {
        "schedule=cosine": "cosine_with_warmup cosine_with_restarts cosine_with_hard_restarts cosine_annealing "
        "cosineannealing cosineannealinglr cosineannealingwarmrestarts warmup_cosine warmupcosinelr onecycle "
        "onecyclelr one_cycle cosine_schedule_with_warmup get_cosine_schedule_with_warmup cosine_decay",
        "schedule=linear": "linear_with_warmup linearlr warmup_linear get_linear_schedule_with_warmup warmupdecaylr "
        "linear_decay linear_warmup",
        "schedule=constant": "constant_with_warmup constantlr none no warmup warmuplr fixed "
        "get_constant_schedule_with_warmup",
        "schedule=step": "steplr multisteplr step_lr exponentiallr exponential step_decay",
        "schedule=polynomial": "polynomiallr poly polynomial_decay",
        "schedule=wsd": "warmup_stable_decay trapezoidal",
    },
    "optim": {
        "optim=adamw": "adamw_torch adamw_torch_fused adamw_hf fusedadam fused_adam cpuadam adamw_fused",
        "optim=adamw optim.state=int8": "adamw8bit adamw_8bit adamw_bnb_8bit paged_adamw_8bit bnb adam8bit",
        "optim=lion": "lion_32bit",
        "optim=sgd": "momentum sgd_momentum nesterov",
    },
    "loss": {
        "loss=cross_entropy": "ce xent nll crossentropy cross-entropy crossentropyloss softmax_cross_entropy "
        "categorical_crossentropy sparse_categorical_crossentropy",
        "loss=mse": "mseloss l2 mean_squared_error mse_loss",
        "loss=torch.nn.L1Loss": "mae l1 l1loss l1_loss maeloss mae_loss mean_absolute_error",
        "loss=torch.nn.SmoothL1Loss": "smoothl1 smooth-l1",
        "loss=torch.nn.BCEWithLogitsLoss": "bce bceloss bce_loss bcewithlogits bce_with_logits sigmoid_cross_entropy "
        "binary_cross_entropy binary_crossentropy binarycrossentropy binary_cross_entropy_with_logits binary",
        "loss=torch.nn.KLDivLoss": "kl kldiv kl_div kl_divergence",
        "loss=torch.nn.MultiMarginLoss": "hinge hinge_loss",
        "loss=own": "none model",
    },
    "model": {
        "model=gpt2-124m": "gpt2 gpt-2 gpt gpt2-small gpt2-base nanogpt openai-community/gpt2",
        "model=gpt2-350m": "gpt2-medium openai-community/gpt2-medium",
        "model=gpt2-774m": "gpt2-large openai-community/gpt2-large",
        "model=gpt2-1.5b": "gpt2-xl openai-community/gpt2-xl",
        "model=llama-7b": "llama2-7b llama-2-7b llama2 meta-llama/llama-2-7b meta-llama/llama-2-7b-hf",
        "model=llama-8b": "llama3 llama3-8b llama-3-8b llama-3.1-8b meta-llama/meta-llama-3-8b meta-llama/llama-3.1-8b",
        "model=bert-base": "bert bert-base-uncased bert-base-cased google-bert/bert-base-uncased",
        "model=bert-large": "bert-large-uncased bert-large-cased google-bert/bert-large-uncased",
        "model=resnet50": "resnet resnet-50 microsoft/resnet-50",
        "model=vit-b16": "vit vit-base vit_b_16 vit-base-patch16-224 google/vit-base-patch16-224",
    },
    "data": {
        "data=cifar10": "cifar cifar-10",
        "data=images data.path=FOLDER": "imagenet imagefolder imagenet1k image",
        "data=text data.path=FOLDER": "wikitext openwebtext tinyshakespeare shakespeare txt",
        "data=tokens data.path=FOLDER": "memmap bin",
        "data=synthetic": "random fake dummy",
    },
    "logger": {
        "logger=tensorboard": "tb tensorboardlogger",
        "logger=wandb": "wb wandblogger weights_and_biases",
        "logger=csv": "csvlogger",
        "logger=mlflow": "mlflowlogger",
        "logger=none": "console stdout no false",
    },
    "hooks": {"hooks=early_stop": "earlystopping early_stopping earlystoppingcallback"},
    "cluster": {
        "cluster=local": "localhost single none cpu gpu torchrun",
        "cluster=slurm": "sbatch srun submitit",
        "cluster=kubernetes": "k8s",
    },
}
# What dtrain decides itself: nothing to type.
OURS = {
    "rank local_rank global_rank node_rank init_method dist_url dist_backend ddp_backend master_addr master_port "
    "rdzv_backend rdzv_endpoint": "dtrain starts the ranks and connects them",
    "accelerator device cuda gpu use_gpu use_cuda no_cuda use_cpu": "a GPU is used wherever there is one "
    "(CUDA_VISIBLE_DEVICES= hides them)",
    "find_unused_parameters ddp_find_unused_parameters": "every weight must get a gradient (docs/your-own.md)",
    "sync_batchnorm sync_bn": "your model may use dtrain.models.batchnorm.BatchNorm(channels, 'sync')",
    "push_to_hub hub_model_id": "dtrain export RUN OUT --format hf writes a folder to upload",
    "do_train do_eval do_predict": "dtrain launch trains, dtrain evaluate evaluates",
    "eval_dataset eval_data val_dataset val_data valid_dataset validation_data test_dataset test_data eval_dataloader "
    "val_dataloader val_dataloaders val_loader valloader": "data= gives both splits (docs/your-own.md#data)",
    "per_device_eval_batch_size eval_batch_size": "an evaluation takes train.eval_batches global batches",
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
        if {leaf.lower(), key.lower()} & {*theirs.split()} and {word.partition("=")[0] for word in fix.split()} <= set(
            known
        ):
            return ValueError(f"{key}: there is no such setting\n  fix: {fix}   ({note})")
    for names, note in OURS.items():
        if leaf.lower() in names.split():
            return ValueError(f"{key}: there is no such setting\n  fix: leave out {key}; {note}")
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
    ours, typed = known.rpartition(".")[2], key.rpartition(".")[2]
    return likeness(ours, typed) >= 0.7 or sorted(ours) == sorted(typed)  # dmi is dim


def likeness(known: str, typed: str) -> float:
    return difflib.SequenceMatcher(None, known, typed).ratio()


def foreign(key: str) -> str | None:
    """Return the setting, or the group, that other programs give this name."""
    names = {key.lower(), key.rpartition(".")[2].lower()}
    return next((ours for ours, theirs in ELSEWHERE.items() if names & {*theirs.split()}), None)


def foreign_option(group: str, option: str) -> str | None:
    """Return what to type for an option that other programs call so, if it has one meaning here."""
    names, option = OPTIONS_ELSEWHERE.get(group, {}), option.lower()
    option = option.removesuffix("strategy") if group == "strategy" else option  # DDPStrategy
    if f"{group}={option}" in names:
        return f"{group}={option}"
    return next((ours for ours, theirs in names.items() if option in theirs.split()), None)


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or used; the message says which, why, and how to fix it."""


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and its causes."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
