"""Why vTrain's figures are no measure of a choice: what they are put together from, and what of it cannot be.

`python benchmarks/planner/computed.py`. A pass over L blocks takes L times a block's seconds plus those of the ends, to
the nanosecond, so a block's seconds follow from rows that differ in nothing but L. In some of them more samples take
less time; and over more than 1 GiB of gradients, more ranks take less time. The choice is judged with both mended, too.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from choose import any_batch, choices, summary
from rows import Row, read
from score import score_all

from dtrain.plan.model_shape import Transformer

SOURCE = "vtrain_single_node"
Kind = tuple[int, int, int]  # columns, tensor ranks, samples of a micro-batch: what a block's seconds depend on
# Its simulator's bus bandwidth at 1 GiB, in 2**30 bytes a second (VIA-Research/vTrain@f8dda84, trace/a100). Above 1 GiB
# it divides whole gradients by that, and forgets that a ring sends each byte 2 (n - 1) / n times (src/predictor.py).
BUS = {2: 196.89, 4: 221.37, 8: 229.25}


def kind(row: Row) -> Kind:
    assert isinstance(row.shape, Transformer)
    return row.shape.dim, row.layout.tp, row.layout.micro_batch_size


def layers(row: Row) -> int:
    assert isinstance(row.shape, Transformer)
    return row.shape.num_layers


def block_seconds(rows: list[Row]) -> dict[Kind, float]:
    """Seconds of a block in both passes, with its messages, where rows without a pipeline tell.

    A step is passes × a pass + the rest; the rest hardly depends on the micro-batch, so where a series has but one
    number of passes it is another's.
    """
    series: dict[tuple[Kind, int, int], dict[int, float]] = defaultdict(dict)
    for row in rows:
        if row.layout.pp == 1:
            series[kind(row), layers(row), row.layout.dp][row.layout.micro_batches] = row.step_s
    rest: dict[tuple[int, int, int, int], float] = {}
    for (what, count, ranks), steps in series.items():
        few, many = min(steps), max(steps)
        if few < many:
            one = (steps[many] - steps[few]) / (many - few)
            rest.setdefault((*what[:2], count, ranks), steps[few] - few * one)
    passes: dict[Kind, dict[int, float]] = defaultdict(dict)
    for (what, count, ranks), steps in series.items():
        if (known := rest.get((*what[:2], count, ranks))) is not None:
            passes[what][count] = (steps[max(steps)] - known) / max(steps)
    return {
        what: (by[max(by)] - by[min(by)]) / (max(by) - min(by)) for what, by in sorted(passes.items()) if len(by) > 1
    }


def never_less(blocks: dict[Kind, float]) -> dict[Kind, float]:
    """The same, with no micro-batch taking less time than a smaller one."""
    return {
        (dim, tp, micro): max(blocks[dim, tp, m] for m in (1, 2, 4, 8) if m <= micro and (dim, tp, m) in blocks)
        for dim, tp, micro in blocks
    }


def gradient_bytes(row: Row) -> float:
    """16-bit gradients of a rank without a pipeline: blocks, an embedding, positions, and a head of its own."""
    assert isinstance(row.shape, Transformer)
    dim, tp, count = row.shape.dim, row.layout.tp, row.shape.num_layers
    block = 12 * dim * dim / tp + 7 * dim / tp + 6 * dim
    return 2.0 * (count * block + row.shape.seq_len * dim + 2 * (row.shape.vocab_size // tp) * dim)


def reduce_seconds(row: Row) -> float:
    """Of the gradients, as the figures have it where they are more than 1 GiB."""
    return round(gradient_bytes(row) / 2**20) / 1024 / BUS[row.layout.dp]


def is_large(row: Row) -> bool:
    return row.layout.pp == 1 and row.layout.dp > 1 and gradient_bytes(row) > 2**30


def ring(row: Row) -> float:
    """How often a ring sends each byte."""
    return 2 * (row.layout.dp - 1) / row.layout.dp


def mended(rows: list[Row]) -> list[Row]:
    """The rows without the two impossibilities: slower where they were too fast, never faster."""
    blocks = block_seconds(rows)
    least, found = never_less(blocks), []
    for row in rows:
        added = 0.0
        if kind(row) in blocks:
            through = (row.layout.micro_batches + row.layout.pp - 1) * layers(row) / row.layout.pp
            added += through * (least[kind(row)] - blocks[kind(row)])
        if is_large(row):
            added += (ring(row) - 1) * reduce_seconds(row)
        found.append(replace(row, step_s=row.step_s + added))
    return found


def main() -> None:
    rows = read(SOURCE)
    blocks = block_seconds(rows)
    least = never_less(blocks)
    print("ms of a block, forward and backward; *: less than a smaller micro-batch takes")
    for dim, tp in sorted({what[:2] for what in blocks}):
        cells = [f"{blocks[dim, tp, m] * 1e3:6.3f}{'*' if least[dim, tp, m] > blocks[dim, tp, m] else ' '}"
                 for m in (1, 2, 4, 8) if (dim, tp, m) in blocks]  # fmt: skip
        print(f"  {dim} columns, {tp} tensor ranks, 1 to 8 samples: {'  '.join(cells)}")
    print("bus bandwidth that gradients of more than 1 GiB would need (NVLink of an A100: 300 GB/s)")
    for ranks in sorted(BUS):
        large = [row for row in rows if is_large(row) and row.layout.dp == ranks]
        rate = max(ring(row) * gradient_bytes(row) / reduce_seconds(row) for row in large)
        print(f"  {ranks} data ranks: {rate / 1e9:.0f} GB/s, {len(large)} rows")
    for title, these in (("as published", rows), ("mended", mended(rows))):
        scored = score_all(these)[0]
        print(f"choosing, {title}: {summary(choices(scored, any_batch))}")


if __name__ == "__main__":
    main()
