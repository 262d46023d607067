"""The mutants of `dtrain verify mutants=all`: bugs that were published, and the row of verify that must catch each.

What a mutant changes in the ranks is in mutations/, by the same name. No torch here.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from dtrain.errors import bad


@dataclass(frozen=True)
class Mutant:
    """`row`: what it runs under, as in `strategies=…`; `settings`: for the reference, too, but for strategy.…"""

    name: str
    what: str
    source: str  # where such a bug was reported: project#number, or a paper
    row: str
    settings: tuple[str, ...] = ()
    size: int = 2
    precision: str = "fp32"


# 24 samples: with 8 in a step, the fourth step begins a new epoch; they are too few for an evaluation
FEW = ("data=synthetic", "data.num_samples=24", "train.eval_batches=0")

MUTANTS = (
    # gradients: reduced, averaged, accumulated
    Mutant("summed-gradients", "gradients are summed over the ranks, not averaged", "neuralmagic/sparseml#135", "ddp"),
    Mutant("fsdp-divisor-missing", "the reduce-scatter sums and nothing divides",
           "ultralytics/ultralytics#18616", "fsdp"),
    Mutant("averaged-twice", "gradients are divided by the ranks twice", "verl-project/verl-SpeCo#29", "fsdp"),
    Mutant("doubled-each-pass", "each micro-batch scales what was accumulated before",
           "pytorch/torchtitan#1733", "ddp"),
    Mutant("passes-not-divided", "the loss is not divided by the micro-batches", "karpathy/nanoGPT#206", "ring"),
    Mutant("last-pass-only", "each micro-batch counts as the boundary, so only the last one's gradient is left",
           "allenai/open-instruct#1498", "zero2"),
    Mutant("parameter-not-reduced", "one parameter's gradient is not reduced", "hao-ai-lab/FastVideo#1666", "ddp"),
    Mutant("sync-one-pass-early", "no_sync covers the last micro-batch, not the ones before",
           "modelscope/FunASR#3472", "ddp"),
    Mutant("bucket-end", "the end of each bucket is not reduced, so the result depends on the bucket size",
           "deepspeedai/DeepSpeed#6351", "ddp"),
    Mutant("replicas-not-reduced", "hybrid sharding reduces inside a replica only", "verl-project/verl#7493", "fsdp",
           ("strategy.sharding=hybrid", "strategy.replica_size=2"), size=4),
    Mutant("stale-chunk", "a rank keeps its own chunk where the ring's last turn brings the sum",
           "deepspeedai/DeepSpeed#5545", "ring"),
    Mutant("reduced-in-bf16", "gradients of fp32 are reduced in bf16", "jax-ml/jax#27496", "ddp"),
    Mutant("weights-not-sent", "updated weights stay with their owner", "lodestone-rock/RamTorch#13", "ps"),
    # the mean over uneven samples
    Mutant("mean-of-pass-means", "each micro-batch has the same weight, however many targets it has",
           "huggingface/transformers#34191", "ddp+uneven"),
    Mutant("mean-of-rank-means", "targets are counted on each rank, not over all",
           "huggingface/transformers#34242", "ddp+uneven"),
    Mutant("mean-of-pass-means-pipeline", "the same in a pipeline's loss",
           "pytorch/torchtitan#2972", "pipeline+uneven"),
    # norm and clipping
    Mutant("norm-times-world", "the gradient norm is multiplied by the ranks", "ByteDance-Seed/VeOmni#862", "fsdp"),
    Mutant("local-norm", "each rank clips by the norm of its own shard", "pytorch/pytorch#170862", "fsdp"),
    Mutant("copies-in-norm", "what all tensor ranks hold counts once for each", "ROCm/TransformerEngine#715", "tensor"),
    Mutant("clip-before-unscale", "gradients are clipped before the loss scale is taken out",
           "Lightning-AI/pytorch-lightning#9599", "ddp", precision="fp16"),
    # pipelines, tied weights, tensor parallel
    Mutant("tied-weight-twice", "a weight on two stages counts twice in the norm",
           "NVIDIA/Megatron-LM#7228", "pipeline"),
    Mutant("tied-gradient-alone", "each stage updates its copy of a tied weight with its own gradient",
           "NVIDIA/Megatron-LM#844", "pipeline"),
    Mutant("other-targets", "a micro-batch gets the targets of another one", "ooples/AiDotNet#845", "pipeline"),
    Mutant("passes-divided-twice", "loss and schedule both divide by the micro-batches",
           "areal-project/AReaL#1273", "pipeline"),
    Mutant("stale-stage", "a stage updates with the gradient of the step before", "arXiv:1806.03377", "pipeline"),
    Mutant("norm-weights-not-reduced", "under sequence parallel each rank's norms keep their own gradient",
           "NVIDIA/Megatron-LM#1446", "tensor", ("strategy.sequence_parallel=true",)),
    Mutant("adapters-not-reduced", "replicated factors of adapters keep their own gradient on each tensor rank",
           "modelscope/mcore-bridge#173", "tensor", ("lora.rank=4",)),
    Mutant("vocabulary-max", "the maximum of the logits is not reduced over the vocabulary's shards",
           "bigscience-workshop/Megatron-DeepSpeed#394", "tensor", ("strategy.loss_parallel=true",)),
    # data
    Mutant("same-data", "all ranks read the same samples", "Shark-NLP/DiffuSeq#37", "ddp"),
    Mutant("order-by-rank", "each rank shuffles with a seed of its own", "yangkky/distributed_tutorial#5", "ddp"),
    Mutant("epochs-alike", "each epoch has the order of the first", "pytorch/pytorch#31771", "ddp", FEW),
    Mutant("draws-alike-in-batch", "the samples of a batch share random draws",
           "facebookresearch/fairseq#1383", "ddp+uneven"),
    Mutant("draws-alike-each-epoch", "a sample has the same draws in each epoch",
           "Lightning-AI/pytorch-lightning#20412",
           "ddp+uneven", ("data.num_samples=24", "train.eval_batches=0")),
    # random numbers and initial weights
    Mutant("dropout-alike", "all data ranks drop the same activations", "huggingface/accelerate#114", "ddp"),
    Mutant("dropout-differs", "tensor ranks drop different activations of those that they share",
           "NVIDIA/Megatron-LM#206", "tensor"),
    Mutant("dropout-each-step", "each step draws the same random numbers", "pytorch/pytorch#5059", "fsdp"),
    Mutant("recompute-draws-anew", "activations that are computed again are dropped by new draws",
           "allenai/OLMo-core#828", "fsdp+dropout"),
    Mutant("weights-by-rank", "each rank draws its own initial weights", "pytorch/torchtitan#166", "ring"),
    Mutant("eval-drops", "the evaluation is in training mode", "wolny/pytorch-3dunet#53", "fsdp+dropout"),
    # optimizer
    Mutant("norms-decay", "weight decay reaches norms and biases", "verl-project/verl#5070", "zero1"),
    Mutant("schedule-by-world", "the schedule advances by the number of ranks", "huggingface/accelerate#2926", "ddp"),
    # resume
    Mutant("batch-skipped", "a resumed run begins one batch late", "verl-project/verl#7401", "ddp+resume"),
    Mutant("data-restarts", "a resumed run reads its data from the beginning",
           "KempnerInstitute/KempnerForge#51", "fsdp+resume"),
    Mutant("rank-data-dropped", "the last rank of a resumed run loses what it had read ahead",
           "alibaba/TorchEasyRec#544", "ddp+resume"),
    Mutant("moments-lost", "a resumed optimizer begins with no moments",
           "KempnerInstitute/KempnerForge#115", "fsdp+resume"),
    Mutant("updates-from-zero", "a resumed Adam corrects its bias as if it had made no update",
           "deepspeedai/DeepSpeed#5289", "ddp+resume"),
    Mutant("masters-not-loaded", "a resumed run computes with weights that the checkpoint did not reach",
           "deepspeedai/DeepSpeed#762", "zero2+resume"),
)  # fmt: skip


def chosen(names: list[str]) -> list[Mutant]:
    """Return the mutants of these names; `all`: every one."""
    known = {mutant.name: mutant for mutant in MUTANTS}
    for name in names:
        if name not in known and name != "all":
            near = difflib.get_close_matches(name, known, 1)
            fix = f"mutants={near[0]}" if near else "mutants=all"
            raise bad("mutants", name, "there is no such mutant", fix)
    return list(MUTANTS) if "all" in names else [known[name] for name in names]
