"""Published measurements that the planner is held against: the model, how it was spread, how long a step took.

data/*.csv has one file per source. Lines `# name: value` at its top hold for all of its rows; columns and names are the
fields of `Transformer` and `Layout` (dtrain/plan), and: label, source, hardware, stack, gpus, gpus_per_node,
global_batch_size, and one measured quantity. What a source does not say is the field's default.
"""

from __future__ import annotations

import csv
import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # run as a script, from a checkout that is not installed

from dtrain.plan.layout import Layout  # noqa: E402
from dtrain.plan.model_shape import Shape, Transformer, shape_of  # noqa: E402

CONF = ROOT / "conf"
DATA = Path(__file__).resolve().parent / "data"


@dataclass(frozen=True)
class Row:
    """One measurement."""

    source: str  # the name of the file
    label: str
    shape: Shape
    layout: Layout
    hardware: str  # a yaml of conf/hardware
    nodes: int
    gpus: int
    stack: str  # a name of dtrain/plan/time/stack.py: the software that was measured
    step_s: float
    group: str  # same model, GPUs, their number and global batch: the rows among which a planner would choose
    launch_us: float | None = None  # of the host that it was measured on, where that is known


def sources(folder: Path = DATA) -> list[str]:
    """The names of the files that hold measured steps."""
    return sorted(path.stem for path in folder.glob("*.csv") if "stack" in header(path))


def header(path: Path) -> set[str]:
    """The names that a file gives values for, in its columns or above them."""
    constants, lines = _split(path)
    return set(constants) | set(next(csv.reader(lines)))


def records(path: Path) -> list[dict[str, str]]:
    """A file's rows as it has them, each with what holds for all."""
    constants, lines = _split(path)
    return [{**constants, **{k: v for k, v in record.items() if v != ""}} for record in csv.DictReader(lines)]


def caution(source: str, folder: Path = DATA) -> str:
    """What a reader of a source's errors must know about its figures; "" when there is nothing."""
    return _split(folder / f"{source}.csv")[0].get("caution", "")


def read(source: str, folder: Path = DATA) -> list[Row]:
    """All rows of one source."""
    return [row_of(source, record) for record in records(folder / f"{source}.csv")]


def row_of(source: str, record: dict[str, str]) -> Row:
    """One record as shape, layout and seconds."""
    unknown = set(record) - KNOWN
    if unknown:
        raise ValueError(
            f"{source}.csv: column {', '.join(sorted(unknown))} is not known\n  fix: one of {', '.join(sorted(KNOWN))}"
        )
    shape = _shape(record)
    gpus = int(record["gpus"])
    tp, pp = int(record.get("tp", 1)), int(record.get("pp", 1))
    micro, batch = int(record["micro_batch_size"]), int(record["global_batch_size"])
    dp, rest = divmod(gpus, tp * pp)
    passes, left = divmod(batch, dp * micro)
    if rest or left:
        raise ValueError(
            f"{source}.csv: {record}: gpus must be tp × pp × dp, and global_batch_size dp × micro_batch_size × passes\n"
            "  fix: the figure that was copied wrongly"
        )
    layout = Layout(**{**_fields(Layout, record), "dp": dp, "micro_batches": passes})
    label = record.get("label", f"{layout.dp}x{tp}x{pp} (dp tp pp), {passes} of {micro}")
    sizes = (str(getattr(shape, name, "")) for name in ("num_layers", "dim", "seq_len", "vocab_size"))
    model = record.get("model") or "-".join(sizes)
    return Row(
        source=source,
        label=label,
        shape=shape,
        layout=layout,
        hardware=record["hardware"],
        nodes=-(-gpus // int(record.get("gpus_per_node", 8))),
        gpus=gpus,
        stack=record["stack"],
        step_s=step_seconds(record, shape, batch, gpus),
        group=f"{source} {model} {record['hardware']} x{gpus} batch {batch}",
    )


def step_seconds(record: dict[str, str], shape: Shape, batch: int, gpus: int) -> float:
    """Seconds of a step from the quantity that was published."""
    given = [name for name in MEASURED if name in record]
    if len(given) != 1:
        raise ValueError(f"{record}: one measured quantity is needed\n  fix: exactly one of {', '.join(MEASURED)}")
    value = float(record[given[0]])
    if given[0] == "step_s":
        return value
    if given[0] == "step_ms":
        return value / 1e3
    if given[0] == "samples_per_s":
        return batch / value
    assert isinstance(shape, Transformer)
    if given[0] == "tokens_per_s":
        return batch * shape.seq_len / value
    if given[0] == "tokens_per_s_per_gpu":
        return batch * shape.seq_len / (value * gpus)
    flops = {"megatron": megatron_flops, "model": model_flops}[record["flops"]](shape, batch)
    return flops / (value * 1e12 * gpus)


def megatron_flops(shape: Transformer, batch: int) -> float:
    """Operations of a step with every block computed twice, as SC21 counts them (arXiv 2104.04473, equation 3)."""
    s, l, h, v = shape.seq_len, shape.num_layers, shape.dim, shape.vocab_size  # noqa: E741 (the paper's letters)
    return 96 * batch * s * l * h**2 * (1 + s / (6 * h) + v / (16 * l * h))


def model_flops(shape: Transformer, batch: int) -> float:
    """Operations of a step without recomputation: 6 per weight of a matrix and token, 12 per layer, width and position.

    The count of the PaLM paper (appendix B), which torchtitan and llm-foundry also use: attention without its mask.
    """
    head = shape.dim // shape.num_heads
    attention = 2 * shape.dim * (shape.num_heads + shape.num_kv_heads) * head
    mlp = (3 if shape.gated else 2) * shape.dim * shape.hidden_dim
    weights = shape.num_layers * (attention + mlp) + shape.vocab_size * shape.dim
    return batch * shape.seq_len * (6 * weights + 12 * shape.num_layers * shape.dim * shape.seq_len)


def _shape(record: dict[str, str]) -> Shape:
    """What was trained: a model of conf/model, or the transformer that the columns describe.

    Not said: keys and values have as many heads as queries, an MLP is four times as wide as the model.
    """
    if "model" in record:
        shape = shape_of({"model": yaml.safe_load((CONF / "model" / f"{record['model']}.yaml").read_text())})
        assert shape is not None
        return shape
    given = {"num_kv_heads": record["num_heads"], "hidden_dim": str(4 * int(record["dim"])), **record}
    return Transformer(**_fields(Transformer, given))


def _fields(kind: Any, record: dict[str, str]) -> dict[str, Any]:
    """What a record says about the fields of a dataclass, as the types of those."""
    convert: dict[str, Any] = {"int": int, "float": float, "str": str, "bool": {"true": True, "false": False}.get}
    return {
        field.name: convert[str(field.type).split(" |")[0]](record[field.name])
        for field in dataclasses.fields(kind)
        if field.name in record
    }


def _split(path: Path) -> tuple[dict[str, str], list[str]]:
    """The `# name: value` lines of a file, and those behind them."""
    lines = path.read_text().splitlines()
    pairs = [line[1:].split(":", 1) for line in lines if line.startswith("#")]
    return {name.strip(): value.strip() for name, value in pairs}, [line for line in lines if not line.startswith("#")]


MEASURED = ("step_s", "step_ms", "tokens_per_s", "tokens_per_s_per_gpu", "samples_per_s", "tflops_per_gpu")
KNOWN = (
    {field.name for kind in (Transformer, Layout) for field in dataclasses.fields(kind)}
    | {"label", "source", "model", "measured", "note", "caution", "hardware", "stack", "flops"}
    | {"gpus", "gpus_per_node", "global_batch_size"}
    | {"num_params"}  # as published: tests hold the shape against it
    | set(MEASURED)
)
SOURCES = sources()
