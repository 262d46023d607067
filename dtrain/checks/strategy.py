"""The rules of strategies and the arithmetic of pipeline stages: checked before the launch, without torch."""

from __future__ import annotations

import importlib.util
import math
import re
from itertools import pairwise
from typing import Any

from dtrain.config.hardware import cpu_has_fp16, gpus_per_node, no_cpu_fp16
from dtrain.config.mesh import MeshSizes
from dtrain.config.source import has_method
from dtrain.errors import bad
from dtrain.kernels import BLOCK, fits_int8
from dtrain.strategies import deepspeed_config
from dtrain.strategies.stage_layout import stages_of_rank

WITH_EVERY_PRECISION = ("dtrain.strategies.ddp.DDP", "dtrain.strategies.fsdp.FSDP")
WITH_OWN_STATE = {  # strategies whose moments are in fp32 only
    "dtrain.strategies.deepspeed": "DeepSpeed updates ranges of all weights as one, whose moments are float32",
    "dtrain.strategies.fairscale": "FairScale makes an optimizer of its own for each rank, with float32 moments",
    "dtrain.strategies.local_sgd": "local_sgd averages the moments of all ranks, in float32",
    "dtrain.strategies.diloco": "diloco averages the moments of all ranks at a save, in float32",
}
CONVOLUTIONAL = ("dtrain.models.resnet", "dtrain.models.convnet")
WITHOUT_FLOAT8 = r"\b(P100|V100|T4|A100|A40|A30|A10|A10G)\b"  # GPUs older than Ada and Hopper
FLOAT8_MULTIPLE = 16
BETWEEN_LAYERS = tuple(  # strategies with collectives between layers
    f"dtrain.strategies.{name}" for name in ("fsdp.FSDP", "zero.Zero", "tensor.TensorParallel", "pipeline.Pipeline")
)
PACKAGES = {  # of a strategy: the package that it needs, and how to get it
    "dtrain.strategies.deepspeed": ("deepspeed", "pip install 'dtrain[deepspeed]'"),
    "dtrain.strategies.fairscale": ("fairscale", "pip install 'dtrain[fairscale]'"),
    "dtrain.strategies.horovod": ("horovod", "make horovod, which builds it"),
}


def check(config: dict[str, Any], sizes: MeshSizes, num_micro_batches: int) -> None:
    """Raise a ValueError for an invalid combination: which part, why, and what works."""
    strategy, model = config["strategy"], config["model"]
    package, how_to_get = PACKAGES.get(strategy["_target_"].rpartition(".")[0], ("", ""))
    if package and importlib.util.find_spec(package) is None:
        other = "ddp" if package == "horovod" else "fsdp"
        fix = f"{how_to_get}, or strategy={other}"
        raise bad("strategy", config["choices"]["strategy"], f"{package} is not installed", fix)
    if package == "horovod" and gpus_per_node(config["cluster"]):
        rule = "was only tried with ranks on CPUs, over gloo"
        raise bad("strategy", config["choices"]["strategy"], rule, "strategy=ddp")
    if package == "deepspeed":
        deepspeed_config.check(config, sizes)
        check_cpu_fp16(config, sizes)
    check_average(config, package)
    check_plans(config, sizes)
    check_tensor(strategy, model, config["data"], config["cluster"], sizes)
    if "schedule" in strategy:
        check_pipeline(config, sizes, num_micro_batches)
    if strategy.get("mode") == "fsdp" and package == "fairscale":
        rule = "FairScale's own FSDP needs NCCL, so a GPU for every rank; torch's FSDP is its successor"
        raise bad("strategy.mode", "fsdp", rule, "strategy=fsdp, or strategy.mode=sharded_ddp")
    if strategy["_target_"] == "dtrain.strategies.ps.ParameterServer":
        check_parameter_server(config, sizes)
    if strategy.get("bucket_mb") == "auto" and config["deterministic"]:
        rule = "is measured, so two runs may differ in it, and with three or more ranks in the bits of their sums"
        raise bad("strategy.bucket_mb", "auto", f"{rule}; deterministic=true", "strategy.bucket_mb=25")
    if strategy.get("fragments", 1) > (every := strategy.get("every", math.inf)):
        rule = f"each fragment is exchanged at a step of its own, and there are strategy.every={every} of them"
        raise bad("strategy.fragments", strategy["fragments"], rule, f"strategy.fragments={every}")
    if "replica_size" in strategy:
        check_replicas(strategy, config["cluster"]["processes"], sizes)
        check_compression(strategy)
    if config["compile"] == "whole" and strategy["_target_"] in BETWEEN_LAYERS and sizes.world_size > 1:
        name = config["choices"]["strategy"]
        rule = f"strategy={name} runs collectives between the layers, which a graph cannot contain"
        raise bad("compile", "whole", rule, "compile=blocks, or strategy=ddp")
    per_rank = config["train"]["global_batch_size"] // sizes.dp
    check_precision(config, per_rank // num_micro_batches, sizes.cp)
    check_state_of(config, sizes.tp)


def check_average(config: dict[str, Any], package: str) -> None:
    """Refuse a moving average of the weights where a rank cannot keep or use it."""
    ema, strategy, name = config["ema"], config["strategy"], config["choices"]["strategy"]
    if ema["evaluate"] and not ema["decay"]:
        raise bad("ema.evaluate", "true", "there is no average: ema.decay=0", "ema.decay=0.999, or ema.evaluate=false")
    if not ema["decay"]:
        return
    if "nvme" in (strategy.get("offload"), strategy.get("offload_params")):
        rule = "the weights are on a disk, and an average would move all of them in every step"
        raise bad("ema.decay", ema["decay"], rule, "ema.decay=0, or strategy.offload=cpu")
    if config["precision"].get("parameters", "float32") != "float32":
        rule = "most steps of an average are too small to change a bfloat16"
        raise bad("ema.decay", ema["decay"], rule, "ema.decay=0, or precision=bf16")
    apart = package in ("deepspeed", "fairscale") or strategy["_target_"] == "dtrain.strategies.ps.ParameterServer"
    if ema["evaluate"] and apart:
        rule = f"under strategy={name} no rank has the average of all weights"
        raise bad("ema.evaluate", "true", rule, "ema.evaluate=false, and dtrain evaluate RUN --ema; or strategy=fsdp")


def check_cpu_fp16(config: dict[str, Any], sizes: MeshSizes) -> None:
    """Check only ranks on this machine. Ranks of a SLURM job run on other CPUs, and each checks for itself."""
    cluster, strategy = config["cluster"], config["strategy"]
    is_here = cluster["_target_"] == "dtrain.launch.local.Local" or cluster.get("launcher") == "torchrun"
    if not is_here or gpus_per_node(cluster) or config["precision"].get("dtype") != "float16":
        return
    user_config = deepspeed_config.read(path) if (path := strategy.get("deepspeed_config")) else {}
    if deepspeed_config.needs_engine(strategy, user_config, sizes.world_size) and not cpu_has_fp16():
        raise no_cpu_fp16(config["choices"]["strategy"])


def check_precision(config: dict[str, Any], num_samples: int, cp: int = 1) -> None:
    """`num_samples`: samples per forward pass, of whose tokens a rank has one part of `cp`."""
    precision, name = config["precision"], config["choices"]["precision"]
    dtype, stream = precision.get("dtype", "float32"), precision.get("stream", "float32")
    if stream not in ("float32", dtype):
        rule = f"the residual stream must be float32 or the matmuls' dtype, precision.dtype={dtype}"
        raise bad("precision.stream", stream, rule, "precision.stream=float32")
    pure, float8 = precision.get("parameters", "float32") != "float32", precision.get("float8", "none") != "none"
    if not pure and not float8:
        return
    setting = "precision.parameters" if pure else "precision.float8"
    if dtype != "bfloat16":
        raise bad(setting, precision[setting.partition(".")[2]], "needs matmuls in bfloat16", f"precision={name}")
    check_precision_of(config)
    if pure:
        check_pure(config, name)
    if float8:
        check_float8(config, name, num_samples, cp)


def check_precision_of(config: dict[str, Any]) -> None:
    """Can the strategy train in this precision? The planner also asks this for every layout."""
    precision, target = config["precision"], config["strategy"]["_target_"]
    usual = precision.get("parameters", "float32") == "float32" and precision.get("float8", "none") == "none"
    if not usual and target.startswith("dtrain.") and target not in WITH_EVERY_PRECISION:
        why = (
            " (DeepSpeed keeps its own float32 master weights)" if target == "dtrain.strategies.deepspeed.Zero" else ""
        )
        rule = f"works under ddp and fsdp, and not under {config['choices']['strategy']}{why}"
        raise bad("precision", config["choices"]["precision"], rule, "strategy=fsdp, or precision=bf16")


def check_state_of(config: dict[str, Any], tp: int) -> None:
    """Can the strategy hold AdamW's moments in this dtype? The planner also asks this for every layout."""
    state, strategy, model = config["optim"].get("state"), config["strategy"], config["model"]
    if config["optim"]["_target_"] != "dtrain.optim.build.adamw" or state in (None, "fp32"):
        return
    if why := WITH_OWN_STATE.get(strategy["_target_"].rpartition(".")[0]):
        raise bad("optim.state", state, why, "strategy=fsdp, or optim.state=null")
    if strategy.get("offload", "none") != "none":
        rule = "stochastic rounding on the host would take seconds per step"
        raise bad("strategy.offload", strategy["offload"], rule, "strategy.offload=none, or optim.state=null")
    if state == "int8" and model["_target_"].rpartition(".")[0] in CONVOLUTIONAL:
        rule = (
            f"blocks of {BLOCK} values lie in rows of matrices, and nearly all of this model's weights are convolutions"
        )
        raise bad("optim.state", state, rule, "optim.state=bf16, or optim.state=null")
    if state != "int8" or tp == 1 or not model["_target_"].startswith("dtrain."):
        return  # a user's own matrices are checked by the ranks
    dim = model.get("dim") or 0
    for columns in (dim, model.get("hidden_dim") or 4 * dim):  # of the matrices whose columns are sharded
        if fits_int8((dim, columns)) and columns // tp % BLOCK:
            rule = f"{BLOCK} values of a row share a scale, and a tensor rank would have {columns} / {tp} of a row"
            fits = max(n for n in range(1, tp) if tp % n == 0 and columns // n % BLOCK == 0)
            raise bad("optim.state", state, rule, f"strategy.tp={fits} strategy.dp=-1, or optim.state=bf16")


def check_pure(config: dict[str, Any], name: str) -> None:
    optimizer = config["optim"]["_target_"]
    if optimizer.startswith("dtrain.") and optimizer != "dtrain.optim.build.adamw":
        rule = "only adamw has stochastic rounding; without it most updates are too small to change a bfloat16"
        raise bad("precision", name, rule, "optim=adamw, or precision=bf16")
    if config["strategy"].get("offload", "none") != "none":
        rule = "stochastic rounding on the host would take seconds per step"
        raise bad("strategy.offload", config["strategy"]["offload"], rule, "strategy.offload=none, or precision=bf16")


def check_float8(config: dict[str, Any], name: str, num_samples: int, cp: int) -> None:
    gpu, model = config["hardware"].get("gpu") or "", config["model"]
    if gpus_per_node(config["cluster"]) == 0:
        raise bad("precision", name, "needs GPUs, and there are none", "precision=bf16")
    if re.search(WITHOUT_FLOAT8, gpu):
        raise bad("precision", name, f"{gpu} has no float8 matmuls (Ada, Hopper and later do)", "precision=bf16")
    if importlib.util.find_spec("torchao") is None:
        raise bad("precision", name, "torchao is not installed", "pip install 'dtrain[fp8]', or precision=bf16")
    if config["lora"]["rank"]:
        raise bad("lora.rank", config["lora"]["rank"], "LoRA adapters do not work with float8 layers", "precision=bf16")
    tokens = num_samples * (config["data"].get("seq_len") or model.get("seq_len") or FLOAT8_MULTIPLE) // cp
    if tokens % FLOAT8_MULTIPLE:
        rule = f"a forward pass of {num_samples} samples has {tokens} tokens, and float8 matmuls need multiples of 16"
        raise bad("precision", name, rule, "train.micro_batch_size=16, or precision=bf16")


def check_plans(config: dict[str, Any], sizes: MeshSizes) -> None:
    """Check that a model defines the sharding plan that the strategy needs."""
    target = config["model"]["_target_"]
    for axis, size, plan in (("tp", sizes.tp, "tp_plan"), ("pp", sizes.pp, "pipeline_split")):
        if size > 1 and has_method(target, plan) is False:
            rule = f"{target.rpartition('.')[2]} has no {plan}(), so dtrain cannot split it"
            raise bad(f"strategy.{axis}", size, rule, "strategy=ddp, fsdp or zero3, or add the plan (docs/your-own.md)")


def shared_gpus(cluster: dict[str, Any]) -> bool:
    return 0 < gpus_per_node(cluster) < int(cluster["processes"])


def check_tensor(
    strategy: dict[str, Any], model: dict[str, Any], data: dict[str, Any], cluster: dict[str, Any], sizes: MeshSizes
) -> None:
    tp, vocab_size = sizes.tp, model.get("vocab_size")
    for setting in ("sequence_parallel", "loss_parallel"):
        if strategy.get(setting) and tp > 1 and model["_target_"] == "dtrain.models.vit.ViT":
            rule = "a ViT's patches and class token cannot be divided evenly over ranks, and it has few classes"
            raise bad(f"strategy.{setting}", "true", rule, f"strategy.{setting}=false")
    seq_len, where = (data["seq_len"], "data") if data.get("seq_len") else (model.get("seq_len"), "model")
    if strategy.get("sequence_parallel") and tp > 1 and shared_gpus(cluster):
        rule = "ranks that share a GPU communicate over gloo, where this setting crashed (SIGSEGV, torch 2.11)"
        raise bad("strategy.sequence_parallel", "true", rule, f"cluster.processes={gpus_per_node(cluster)}, or false")
    if strategy.get("sequence_parallel") and seq_len and seq_len % (tp * sizes.cp):
        ranks = f"{tp} tensor-parallel" + (f" × {sizes.cp} context-parallel" if sizes.cp > 1 else "")
        rule = f"{where}.seq_len={seq_len} must be a multiple of the {ranks} ranks"
        raise bad("strategy.sequence_parallel", "true", rule, "strategy.sequence_parallel=false")
    multiple = model.get("vocab_multiple", 1)
    if strategy.get("loss_parallel") and vocab_size and -(-vocab_size // multiple) * multiple % tp:
        rule = (
            f"the vocabulary, padded to a multiple of {multiple}, must be a multiple of the {tp} tensor-parallel ranks"
        )
        raise bad("strategy.loss_parallel", "true", rule, f"model.vocab_multiple={math.lcm(multiple, tp)}")


def check_pipeline(config: dict[str, Any], sizes: MeshSizes, num_micro_batches: int) -> None:
    strategy, layers, pp = config["strategy"], config["model"].get("num_layers"), sizes.pp
    schedule = strategy["schedule"]
    stages = stages_of_rank(0, pp, schedule, strategy.get("stages_per_rank", 2))[1]
    if layers and layers < stages:
        rule = f"{pp} ranks have {stages} stages, and there are only model.num_layers={layers} layers"
        raise bad("strategy.schedule", schedule, rule, f"strategy.schedule=1f1b, or model.num_layers={stages}")
    if pp > 1 and shared_gpus(config["cluster"]):
        gpus = gpus_per_node(config["cluster"])
        rule = f"ranks that share one of {gpus} GPUs communicate over gloo, which cannot send GPU tensors between ranks"
        raise bad("strategy.pp", pp, rule, f"cluster.processes={gpus}, or strategy=fsdp or tensor")
    split = strategy.get("split")
    if split is not None:
        ends = [0, *split, layers or math.inf]
        if len(split) != stages - 1 or any(low >= high for low, high in pairwise(ends)):
            rule = (
                f"must be the {stages - 1} layers, ascending, at which stages 2 to {stages} begin, of {layers} layers"
            )
            raise bad("strategy.split", split, rule, "strategy.split=null")
    if schedule == "1f1b" and num_micro_batches < pp:
        rule = f"needs at least as many micro-batches as pipeline ranks ({pp}), but there are {num_micro_batches}"
        size = config["train"]["global_batch_size"] // num_micro_batches  # of a micro-batch, all data ranks
        fix = f"a smaller train.micro_batch_size, train.global_batch_size={size * pp}, or strategy.schedule=gpipe"
        raise bad("strategy.schedule", schedule, rule, fix)
    rounds = max(1, num_micro_batches // pp)
    if schedule == "interleaved_1f1b" and num_micro_batches % rounds:
        rule = f"needs a multiple of strategy.pp={pp} micro-batches, but there are {num_micro_batches}"
        raise bad("strategy.schedule", schedule, rule, "another train.micro_batch_size, or strategy.schedule=1f1b")
    if schedule == "zbv" and config["compile"] not in ("auto", "none", False):
        rule = "splits the backward pass in two, which torch.compile does not support"
        raise bad("strategy.schedule", schedule, rule, "compile=none, or strategy.schedule=interleaved_1f1b")
    if schedule == "zbv" and config["activation_checkpointing"] == "ops":
        rule = "splits the backward pass in two, but the saved operations can be used only once"
        fix = "activation_checkpointing=full, or strategy.schedule=interleaved_1f1b"
        raise bad("strategy.schedule", schedule, rule, fix)


def check_parameter_server(config: dict[str, Any], sizes: MeshSizes) -> None:
    strategy, cluster = config["strategy"], config["cluster"]
    mode, staleness, slow = strategy["mode"], strategy["staleness"], strategy["slow_rank"]
    if staleness is not None and mode != "bounded":
        rule = "is only for strategy.mode=bounded"
        raise bad("strategy.staleness", staleness, rule, "strategy.mode=bounded, or strategy.staleness=null")
    if staleness is None and mode == "bounded":
        rule = "needs strategy.staleness, the updates by which a gradient may be too old"
        raise bad("strategy.mode", mode, rule, f"strategy.staleness={4 * sizes.dp}, or strategy.mode=async")
    if slow is not None and slow >= sizes.world_size:
        rule = f"there are only the ranks 0 to {sizes.world_size - 1}"
        raise bad("strategy.slow_rank", slow, rule, f"strategy.slow_rank={sizes.world_size - 1}, or null")
    if mode == "sync":
        return
    fix = "strategy.mode=sync"
    if gpus_per_node(cluster):
        rule = "its servers are threads that send host memory over gloo, which was only tried with ranks on CPUs"
        raise bad("strategy.mode", mode, rule, fix)
    if config["deterministic"]:
        rule = f"which rank computes what depends on timing under strategy.mode={mode}, so two runs differ"
        raise bad("deterministic", "true", rule, f"{fix}, or deterministic=false")
    if config["precision"].get("dtype") == "float16":
        rule = f"under strategy.mode={mode} each rank would have a loss scale of its own"
        raise bad("precision", config["choices"]["precision"], rule, f"precision=bf16, or {fix}")
    if "batch_norm" in config["model"]:
        rule = f"its batch norm all-reduces in every pass, and under strategy.mode={mode} ranks run different passes"
        raise bad("model", config["choices"]["model"], rule, fix)
    for section, key in (("guard", "replay_every"), ("train", "spike")):
        if config[section][key]:
            rule = f"compares all ranks in a step, and under strategy.mode={mode} they are at different steps"
            neutral = f"{section}.{key}={'0' if key == 'replay_every' else 'null'}"
            raise bad(f"{section}.{key}", config[section][key], rule, f"{fix}, or {neutral}")


def check_compression(strategy: dict[str, Any]) -> None:
    """Under fsdp only the replicas' exchange is compressed: weights and shards of gradients travel as they are."""
    word = strategy.get("compress", "none")
    if word != "none" and strategy["sharding"] != "hybrid":
        rule = f"is for replicas of the model, and sharding={strategy['sharding']} has none"
        raise bad("strategy.compress", word, rule, "strategy.sharding=hybrid, strategy=ddp, or strategy.compress=none")
    if word == "powersgd":
        rule = "factors whole matrices, and a rank of fsdp holds only some of their rows"
        raise bad("strategy.compress", word, rule, "strategy.compress=int8, or strategy=ddp")


def check_replicas(strategy: dict[str, Any], node_size: int, sizes: MeshSizes) -> None:
    size, hybrid = strategy["replica_size"], strategy["sharding"] == "hybrid"
    if size is not None and not hybrid:
        raise bad("strategy.replica_size", size, "is only for strategy.sharding=hybrid", "strategy.sharding=hybrid")
    if hybrid and sizes.token_ranks > 1 and (size or node_size) == sizes.token_ranks:
        rule = f"shards one copy over all {sizes.token_ranks} data-parallel ranks, the same as strategy.sharding=full"
        raise bad("strategy.replica_size", size, rule, "strategy.sharding=full, or a smaller strategy.replica_size")
    if hybrid and sizes.token_ranks % (size or node_size):
        rule = f"must divide the {sizes.token_ranks} data-parallel ranks"
        raise bad(
            "strategy.replica_size",
            size or node_size,
            rule,
            f"strategy.replica_size={math.gcd(sizes.token_ranks, size or node_size)}",
        )
