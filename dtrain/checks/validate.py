"""Check every rule of a configuration before anything starts, without importing torch."""

from __future__ import annotations

import importlib
import importlib.util
import math
from typing import Any

from dtrain.checks import checkpoint, context, guard, hooks, loggers, network, script, strategy
from dtrain.checks import profile as profiling
from dtrain.config import elastic, mesh
from dtrain.config.files import CONTROL, flatten, is_script
from dtrain.config.hardware import world_size
from dtrain.config.mesh import batch_sizes
from dtrain.config.models import GPT2, LANGUAGE_MODELS, LLAMA
from dtrain.config.ranges import check_ranges
from dtrain.config.schema import check_keys_and_types
from dtrain.errors import bad
from dtrain.runs import tags

TASKS = {
    "next": "the next tokens",
    "mlm": "masked tokens",
    "classify": "classes of texts",
    "images": "classes of images",
}
IMAGE_MODELS = ("dtrain.models.convnet.ConvNet", "dtrain.models.resnet.ResNet", "dtrain.models.vit.ViT")
TASK_OF = dict.fromkeys(LANGUAGE_MODELS, "next") | dict.fromkeys(IMAGE_MODELS, "images")  # others have model.task
# The linear layers of our models, by the last part of their names; a test compares them with the models.
LINEAR_LAYERS = {
    "dtrain.models.bert.Bert": ("q", "k", "v", "proj", "up", "down", "transform", "pooler", "classifier"),
    "dtrain.models.convnet.ConvNet": ("hidden", "head"),
    GPT2: ("qkv", "proj", "up", "down"),
    LLAMA: ("q", "k", "v", "proj", "gate", "up", "down", "output"),
    "dtrain.models.resnet.ResNet": ("head",),
    "dtrain.models.vit.ViT": ("qkv", "proj", "up", "down", "head"),
}


def validate(config: dict[str, Any]) -> mesh.MeshSizes:
    """Raise a ValueError for the first broken rule; return the mesh of the configuration, of the largest number of
    ranks if it has a range. A user's own program has no mesh: all its ranks are data ranks."""
    if is_script(config):
        return validate_script(config)
    if isinstance(config.get("cluster"), dict) and elastic.range_of(config):
        return validate(largest(config))
    check_keys_and_types(config)
    flat = flatten(config)
    check_ranges(flat)
    check_text(flat)
    tags.check(config["tags"])
    check_cluster(config)
    ranks = world_size(config), config["cluster"]["processes"]
    batch = config["train"]["global_batch_size"], config["train"]["micro_batch_size"]
    ours, tp = config["model"]["_target_"].startswith("dtrain."), config["strategy"].get("tp", 1)
    if ours and tp > 1:  # before the mesh: its fix is a number of ranks for this tp
        check_heads(config["model"], tp, config["cluster"]["processes"])
    if ours and (pp := config["strategy"].get("pp", 1)) > 1:  # likewise
        check_layers(config["model"], pp, max(1, ranks[0] // max(1, tp * config["strategy"].get("cp", 1))))
    most = config["cluster"].get("gpus_per_node") or None  # of a local run, ranks may share a GPU
    sizes = mesh.of_strategy(config["strategy"], *ranks, *batch, most)
    if ours:  # in a user's own model `dim` may mean something else
        check_model(config["model"], sizes)
    _, _, num_micro_batches = batch_sizes(config, sizes)
    strategy.check(config, sizes, num_micro_batches)
    context.check(config, sizes)
    guard.check(config, sizes)
    from dtrain.checks import (
        init_from,
        own_code,
        own_data,  # imported late, like the modules below: `dtrain plan` does not need them and must start fast
    )

    init_from.check(config)
    check_adapters(config)
    checkpoint.check(config)
    check_data(config)
    own_data.check(config)
    own_code.check(config)
    profiling.check(config)
    loggers.check(config)
    hooks.check(config)
    return sizes


def validate_script(config: dict[str, Any]) -> mesh.MeshSizes:
    check_keys_and_types(config)
    flat = flatten(config)
    check_ranges(flat)
    check_text(flat)
    tags.check(config["tags"])
    script.check(config)
    check_cluster(config)
    return mesh.resolve(world_size(config), config["cluster"]["processes"], pp=1, dp=-1, tp=1)


def usable_sizes(config: dict[str, Any]) -> list[int]:
    """The numbers of ranks or nodes in a range that all other settings allow, ascending; [] without a range.

    Not all have to be usable: 2 of the numbers are enough, so that a batch of 32 can have 1:4 ranks, without 3.
    """
    found = elastic.range_of(config)
    if found is None:
        return []
    usable, refused = [], {}
    for number in range(found.high, found.low - 1, -1):
        try:
            validate(elastic.sized(config, number))
            usable.append(number)
        except ValueError as error:
            refused[number] = error
    if not usable:
        raise refused[found.high]
    check_elastic(config, found)
    if len(usable) == 1:
        number, why = next(iter(refused.items()))
        rule, _, fix = str(why).partition("\n  fix: ")
        if rule.startswith("train.global_batch_size"):
            fix = "a train.global_batch_size that more of these numbers divide"
        rule = f"only {usable[0]} of these numbers can be used; with {number}: {rule}"
        raise bad(f"cluster.{found.setting}", config["cluster"][found.setting], rule, fix)
    return usable[::-1]


def largest(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with the largest usable number of ranks; one without a range stays as it is."""
    usable = usable_sizes(config)
    return elastic.sized(config, usable[-1]) if usable else config


def check_elastic(config: dict[str, Any], found: elastic.Range) -> None:
    """Reject what needs a fixed number of ranks."""
    cluster, value = config["cluster"], config["cluster"][found.setting]
    setting = f"cluster.{found.setting}"
    if "launcher" in cluster and found.setting == "processes":
        rule = "the ranks of a node are fixed on a cluster; whole nodes leave and join"
        raise bad(setting, value, rule, f"{setting}={found.high} cluster.nodes={value}")
    if cluster.get("launcher") == "torchrun":
        rule = "nodes that are started by hand cannot be started again by a supervisor"
        raise bad(setting, value, rule, f"{setting}={found.high}, or cluster.launcher=submitit")
    if not config["checkpoint"]["save"]:
        rule = "ranks that leave or join need a checkpoint, and checkpoint.save=false (checkpoint=none) saves none"
        raise bad(setting, value, rule, f"checkpoint.save=true, or {setting}={found.high}")
    if config["nsys"] or config["profile"].get("kind", "your own") != "none":
        name, typed = ("nsys", "true") if config["nsys"] else ("profile", config["choices"].get("profile"))
        rule = f"a profile is of one number of ranks, and {found} is several"
        raise bad(name, typed, rule, f"{setting}={found.high}")


def check_text(flat: dict[str, Any]) -> None:
    """Reject control characters in text that may reach a script or SLURM: a newline would start a new script line."""
    for key, value in flat.items():
        if not key.startswith("cluster.") and key not in ("name", "run_dir"):
            continue
        for text in [key, *(value if isinstance(value, list) else [value])]:
            if isinstance(text, str) and (found := CONTROL.search(text)):
                rule = f"has a control character ({found[0]!r}), which would end up in a shell script"
                more = "; each item is one line" if key == "cluster.setup" else ""
                raise bad(repr(key)[1:-1], repr(value), rule, f"leave it out{more}")


def check_cluster(config: dict[str, Any]) -> None:
    cluster = config["cluster"]
    if cluster.get("launcher") == "submitit" and importlib.util.find_spec("submitit") is None:
        fix = "pip install 'dtrain[slurm]', or cluster.launcher=torchrun"
        raise bad("cluster", config["choices"]["cluster"], "submitit is not installed", fix)
    if cluster.get("launcher") == "torchrun" and config["preflight"]["level"] == "full" and cluster["nodes"] > 1:
        rule = "nodes that are started by hand cannot be measured together"
        raise bad("preflight", "full", rule, "preflight=quick, or srun/ssh `dtrain preflight` on each")
    if cluster.get("metrics_port") is not None and importlib.util.find_spec("prometheus_client") is None:
        fix = "pip install 'dtrain[prometheus]', or cluster.metrics_port=null"
        raise bad("cluster.metrics_port", cluster["metrics_port"], "prometheus-client is not installed", fix)
    network.check(config)


def check_model(model: dict[str, Any], sizes: mesh.MeshSizes) -> None:
    """Check the model's sizes against the mesh. A model without these settings has no such rules."""
    dim = model.get("dim")
    heads: int = model.get("num_heads") or 0
    kv_heads: int = model.get("num_kv_heads") or heads
    if dim and heads and dim % heads:
        step = math.lcm(model.get("num_kv_heads") or 1, sizes.tp)
        pairs = 2 if "rope_theta" in model else 1  # rotary embeddings need an even number of elements in a head
        fits = [n for n in range(step, dim + 1, step) if dim % (n * pairs) == 0]
        around = [*[n for n in fits if n < heads][-1:], *[n for n in fits if n > heads][:1]]
        own_kv = model.get("num_kv_heads") or 1
        fix = f"model.dim={-(-dim // (heads * pairs)) * heads * pairs}"
        fix += f" model.num_kv_heads={math.gcd(heads, own_kv)}" if heads % own_kv else ""
        fix += f", or model.num_heads={' or '.join(map(str, around))}" if around else ""
        raise bad("model.dim", dim, f"must be a multiple of model.num_heads={heads}", fix)
    if heads and heads % kv_heads:
        rule, fix = f"must divide model.num_heads={heads}", f"model.num_kv_heads={math.gcd(heads, kv_heads)}"
        raise bad("model.num_kv_heads", kv_heads, rule, fix)
    if dim and heads and "rope_theta" in model and dim // heads % 2:
        rule = f"a head has {dim // heads} elements, an odd number, and rotary embeddings rotate pairs"
        raise bad("model.dim", dim, rule, f"model.dim={(dim // heads + 1) * heads}")
    low, high = model.get("rope_low_freq_factor", 0.0), model.get("rope_high_freq_factor", math.inf)
    if not low < high:
        fix = "model.rope_low_freq_factor=1.0 model.rope_high_freq_factor=4.0"
        raise bad("model.rope_low_freq_factor", low, f"must be less than model.rope_high_freq_factor={high}", fix)
    size, patch = model.get("image_size"), model.get("patch_size")
    if size and patch and size % patch:
        raise bad(
            "model.patch_size",
            patch,
            f"must divide model.image_size={size}",
            f"model.patch_size={math.gcd(size, patch)}",
        )
    check_heads(model, sizes.tp, sizes.world_size)
    check_layers(model, sizes.pp, sizes.pp * sizes.dp)


def check_layers(model: dict[str, Any], pp: int, ranks: int) -> None:
    """Check that each stage of a pipeline has a layer. ranks: those that share the stages and the replicas of them."""
    layers = model.get("num_layers")
    if layers and layers < pp:
        fix = f"strategy.pp={max(d for d in range(1, layers + 1) if ranks % d == 0)} strategy.dp=-1"
        raise bad("strategy.pp", pp, f"there are only model.num_layers={layers} layers", fix)


def check_heads(model: dict[str, Any], tp: int, world_size: int) -> None:
    """Check that each tensor-parallel rank gets whole attention heads."""
    heads: int = model.get("num_heads") or 0
    kv_heads: int = model.get("num_kv_heads") or heads
    for setting, count in (("num_heads", heads), ("num_kv_heads", kv_heads)):
        if count and count % tp:
            shared = math.gcd(heads, kv_heads, world_size)
            fits = max(d for d in range(1, tp) if shared % d == 0)
            fix = f"strategy.tp={fits} strategy.dp=-1" if fits > 1 else "strategy=fsdp, without strategy.tp"
            raise bad("strategy.tp", tp, f"must divide model.{setting}={count}", fix)


def check_adapters(config: dict[str, Any]) -> None:
    """Reject lora.targets that match no layer of our models; the ranks check a user's own model when they build it."""
    known = LINEAR_LAYERS.get(config["model"]["_target_"])
    if not config["lora"]["rank"] or known is None:
        return
    for target in config["lora"]["targets"]:
        if target.rpartition(".")[2] not in known:
            rule = f"model={config['choices'].get('model')} has no linear layer that ends in {target!r}"
            raise bad("lora.targets", config["lora"]["targets"], rule, f"choose from {', '.join(known)}; or [] for all")


def check_data(config: dict[str, Any]) -> None:
    model, data = config["model"], config["data"]
    if data.get("seq_len") and model.get("seq_len") and data["seq_len"] > model["seq_len"]:
        raise bad(
            "data.seq_len",
            data["seq_len"],
            f"the model takes at most model.seq_len={model['seq_len']} tokens",
            f"data.seq_len={model['seq_len']}",
        )
    needs = {"vocab_size": data.get("vocab_size")}
    if data["_target_"].startswith("dtrain."):  # a user's own module may import torch: the ranks check it
        module = importlib.import_module(data["_target_"].rpartition(".")[0])
        check_task(config, getattr(module, "TASK", None))
        # e.g. the path exists and is readable and complete; if the volumes are not mounted here, the pods check it
        if hasattr(module, "check") and config["cluster"].get("run_root") is None:
            needs = module.check(**{k: v for k, v in data.items() if not k.startswith("_")})
    for key, what in (("vocab_size", "tokens"), ("num_classes", "classes")):
        if needs.get(key) and model.get(key) and needs[key] > model[key]:
            rule = f"the data has {needs[key]} different {what}"
            raise bad(f"model.{key}", model[key], rule, f"model.{key}={needs[key]}, or a model that has as many")


def check_task(config: dict[str, Any], given: str | None) -> None:
    """Reject data whose targets the model would train on without an error, but without meaning."""
    model, data = config["choices"].get("model"), config["choices"].get("data")
    learns = config["model"].get("task") or TASK_OF.get(config["model"]["_target_"])
    if given and learns and given != learns:
        fitting = {"next": "stdlib, text or tokens", "mlm": "stdlib-mlm or mlm", "classify": "stdlib-lines or labelled"}
        fitting["images"] = "digits, cifar10 or images"
        rule = f"its targets are {TASKS[given]}, but model={model} predicts {TASKS[learns]}"
        raise bad("data", data, rule, f"data={fitting[learns]}, or another model")
