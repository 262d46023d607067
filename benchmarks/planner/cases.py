"""The layouts that measure.py measures, in groups."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

Case = dict[str, Any]
LENGTHS = {"llama-1b": 2048, "llama-8b": 2048}  # what a step is measured with; else the model's own
BATCHES = {"gpt2-124m": (32, 16, 8), "gpt2-1.5b": (8, 16, 4), "llama-1b": (4, 8, 2)}
SPREAD = {"gpt2-124m": 16, "gpt2-1.5b": 8, "llama-1b": 4}


def case(model: str, strategy: str, batch: int, *overrides: str, ranks: int = 1, **settings: Any) -> Case:
    """One layout: `batch` samples a rank and pass."""
    made = {"model": model, "strategy": strategy, "batch": batch, "words": list(overrides), "ranks": ranks}
    made |= {"checkpointing": "none", "compile": False, "precision": "bf16", "deterministic": True, "passes": 1}
    return made | {"limits": False} | settings


def grid(strategy: str) -> list[Case]:
    """Three models at three batch sizes, with and without checkpointing, on one rank."""
    return [
        case(model, strategy, batch, checkpointing=mode)
        for model, batches in BATCHES.items()
        for batch in batches
        for mode in ("none", "full")
    ]


def compiled() -> list[Case]:
    cases = [case("gpt2-124m", "ddp", batch, compile=True) for batch in (32, 16, 8)]
    cases += [case("gpt2-124m", "ddp", 32, compile=True, deterministic=False)]
    for model, batches in (("gpt2-124m", (32, 8)), ("gpt2-1.5b", (16, 8)), ("llama-1b", (8, 4))):
        cases += [case(model, "fsdp", batch, compile=True) for batch in batches]
        cases += [case(model, "fsdp", batches[0], compile=True, checkpointing="full")]
    cases += [case("gpt2-1.5b", "zero1", 8, compile=True), case("llama-1b", "ddp", 4, compile=True)]
    cases += [case("gpt2-124m", "ddp", 32, compile=True, checkpointing="full")]
    return [*cases, case("vit-b16", "ddp", 128, compile=True), case("resnet50", "ddp", 128, compile=True)]


def others() -> list[Case]:
    """Other models, precisions, checkpointing and adapters, on one rank."""
    cases = [case(name, "ddp", batch) for name, batch in (("vit-b16", 128), ("resnet50", 128), ("bert-large", 16))]
    cases += [case("vit-b16", "ddp", 64, checkpointing="full"), case("resnet50", "ddp", 64, checkpointing="full")]
    cases += [case("bert-large", "fsdp", 32, checkpointing="full"), case("resnet50", "fsdp", 64)]
    cases += [case("bert-large", "ddp", 32, "model.task=classify", "model.num_classes=3", "model.seq_len=128")]
    for model, batch in (("gpt2-124m", 16), ("gpt2-1.5b", 8), ("llama-1b", 4)):
        cases += [case(model, strategy, batch, checkpointing="selective") for strategy in ("ddp", "fsdp")]
        cases += [case(model, "ddp", batch // 2, precision="fp32"), case(model, "ddp", batch, deterministic=False)]
    cases += [case("gpt2-124m", strategy, 8, passes=4) for strategy in ("ddp", "fsdp", "zero1", "zero2", "zero3")]
    cases += [case("llama-1b", "fsdp", 4, precision="fp32"), *adapters()]
    return [*cases, case("gpt2-1.5b", "fsdp", 8, "strategy.offload=cpu")]


def adapters() -> list[Case]:
    cases = [case("llama-8b", strategy, 2, "lora.rank=16", "lora.targets=[]") for strategy in ("ddp", "fsdp")]
    cases += [case("gpt2-124m", "ddp", 16, "model.dropout=0.1")]
    return [*cases, case("gpt2-1.5b", "fsdp", 8, "strategy.sharding=grad_op")]


def spread(strategies: tuple[str, ...] = ("fsdp", "ddp", "zero1", "zero2", "zero3")) -> list[Case]:
    """One rank of 8, on the fake process group."""
    cases = []
    for model, batch in SPREAD.items():
        for mode in ("none", "full"):
            cases += [case(model, strategy, batch, ranks=8, checkpointing=mode) for strategy in strategies]
    for overrides in ((), ("strategy.sequence_parallel=true",), ("strategy.loss_parallel=true",)):
        cases += [case("llama-1b", "tensor", 4, "strategy.tp=8", *overrides, ranks=8)]
    for data in ("fsdp", "ddp"):
        cases += [case("llama-1b", "tensor", 4, "strategy.tp=2", "strategy.dp=4", f"strategy.data={data}", ranks=8)]
    cases += [
        case("llama-8b", "fsdp", 1, ranks=8, checkpointing="full"),
        case("gpt2-1.5b", "fsdp", 4, ranks=8, passes=2),
    ]
    return [*cases, case("llama-1b", "fsdp", 4, "strategy.sharding=grad_op", ranks=8)]


def wide() -> list[Case]:
    """One rank of 64."""
    cases = [case(model, "fsdp", batch, ranks=64) for model, batch in SPREAD.items()]
    return [*cases, case("llama-8b", "fsdp", 1, ranks=64), case("gpt2-1.5b", "fsdp", 8, ranks=64, compile=True)]


def limits() -> list[Case]:
    """How much more than its peak must a case have, to run at all? Some that fragment least and most."""
    chosen = [("gpt2-124m", "ddp", 32, "none"), ("gpt2-1.5b", "fsdp", 8, "none"), ("llama-1b", "fsdp", 8, "full")]
    chosen += [("gpt2-1.5b", "zero2", 16, "full"), ("llama-1b", "ddp", 4, "none"), ("gpt2-1.5b", "ddp", 8, "full")]
    return [case(m, name, batch, checkpointing=mode, limits=True) for m, name, batch, mode in chosen]


def again() -> list[Case]:
    """Rows with `aside` came after a zero3 case, which had replaced torch's linear layer; zero3's own go last."""
    several = [case("gpt2-124m", "fsdp", 8, passes=4)]
    missing = [case("gpt2-1.5b", "zero3", batch, checkpointing=mode) for batch, mode in ((16, "full"), (4, "none"))]
    missing += [case("gpt2-1.5b", "zero3", 4, checkpointing="full")]
    return spread(("fsdp", "ddp", "zero1", "zero2")) + adapters() + several + missing


def today(model: str, strategy: str, batch: int, *overrides: str, **settings: Any) -> Case:
    """A layout of the defaults. Compiled by block: one graph for all layers takes seconds, one of them all a minute."""
    return case(model, strategy, batch, *overrides, **{"compile": "blocks", "deterministic": False} | settings)


def fast() -> list[Case]:
    """The code of today: head and loss in one, a bf16 stream, one kernel for the update. About two minutes."""
    cases = [today("gpt2-124m", "ddp", batch, compile="auto") for batch in (32, 64)]
    for model, batches in (("gpt2-1.5b", (8, 16)), ("llama-1b", (4, 8))):
        cases += [today(model, "ddp", batch) for batch in batches]
        cases += [today(model, "ddp", batches[1], checkpointing=mode) for mode in ("ops", "full")]
        cases += [today(model, "fsdp", batches[1], compile="none")]  # on one rank as ddp
    cases += [today("llama-1b", "ddp", 8, precision="bf16-pure")]
    cases += [today("gpt2-1.5b", "fsdp", 8, ranks=8), today("llama-1b", "fsdp", 4, ranks=8, checkpointing="ops")]
    cases += [today("gpt2-1.5b", "zero2", 8, ranks=8)]
    return [*cases, today("gpt2-124m", "ddp", 32, ranks=8, compile="auto", checkpointing="ops")]


def trade() -> list[Case]:
    """What each kind of checkpointing gives and costs: the table of docs/performance.md."""
    return [
        today(model, "ddp", batch, compile=compile, checkpointing=mode)
        for compile in ("blocks", "none")
        for model, batch in (("gpt2-1.5b", 16), ("llama-1b", 8))
        for mode in ("none", "ops", "selective", "full")
    ]


def largest() -> list[Case]:
    """The largest batch that `dtrain plan` says fits on an H200, to be confirmed; with the launcher's allocator:

    PYTORCH_ALLOC_CONF=expandable_segments:True python benchmarks/planner/measure.py --groups largest
    """
    from dtrain.commands.plan.capacity import most_samples
    from dtrain.launch.compose import compose
    from dtrain.plan.layout import layout_of
    from dtrain.plan.predict import task_of

    cases = []
    for model, mode in (("gpt2-1.5b", "none"), ("gpt2-1.5b", "ops"), ("llama-1b", "none"), ("llama-1b", "ops")):
        length = [f"model.seq_len={LENGTHS[model]}"] if model in LENGTHS else []
        overrides = [f"model={model}", f"activation_checkpointing={mode}", "compile=blocks", "precision=bf16", *length]
        config = compose([*overrides, "strategy=ddp", "hardware=h200", "cluster.processes=1"])
        task = task_of(config)
        assert task is not None
        cases.append(today(model, "ddp", most_samples(layout_of(config), task), checkpointing=mode))
    return cases


def dry() -> list[Case]:
    """Tiny models, for a CPU: does the harness itself work?"""
    cases = [case("gpt2-tiny", name, 2, checkpointing="full") for name in ("ddp", "fsdp", "zero1", "zero3")]
    cases += [case(name, "ddp", 2) for name in ("llama-tiny", "bert-tiny", "bert-tiny-classify", "vit-tiny", "convnet")]
    cases += [case("gpt2-tiny", name, 2, ranks=4) for name in ("ddp", "fsdp", "tensor", "zero1", "zero2", "zero3")]
    cases += [today("gpt2-tiny", name, 2, checkpointing="ops", compile="auto") for name in ("ddp", "fsdp", "zero2")]
    return [c | {"precision": "fp32"} for c in cases]


GROUPS: dict[str, Callable[[], list[Case]]] = {
    **{name: partial(grid, name) for name in ("ddp", "fsdp", "zero1", "zero2", "zero3")},
    "others": others, "spread": spread, "wide": wide, "limits": limits, "compile": compiled, "again": again, "dry": dry,
    "fast": fast, "trade": trade, "largest": largest,
}  # fmt: skip
