"""How much does each strategy send? Bytes over the loopback interface, per rank and step, in units of the weights.

    unshare -n sh -c 'ip link set lo up; python benchmarks/traffic.py [--strategies NAME ...] [--json FILE]'
    python benchmarks/traffic.py --steps 40 --strategies ddp ring "diloco strategy.every=20"

A run of 12 steps and one of 2 send the same at their start and end; the difference of what the kernel counted on `lo`
belongs to the 10 steps between. gloo sends everything over it. In a network namespace of its own (unshare, as root)
nothing else is counted. A strategy may have overrides. benchmarks/results/traffic-cpu.json has every strategy,
traffic-exchanges-cpu.json those that send less often.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from throughput import environment

from dtrain.commands.verify import compare
from dtrain.config.files import options_of

MODEL = ["model.num_layers=8", "model.dim=256", "model.num_heads=4", "model.vocab_size=256", "model.seq_len=64"]
COMMON = [*MODEL, "data=synthetic", "train.eval_batches=0", "checkpoint.every=0", "train.global_batch_size=8"]
COMMON += ["schedule.warmup_steps=0", "train.micro_batch_size=2"]


def sent() -> int:
    """Bytes that the loopback interface has sent since the machine started."""
    line = next(x for x in Path("/proc/net/dev").read_text().splitlines() if x.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def bytes_of_run(strategy: str, ranks: int, steps: int) -> tuple[int, dict[str, object]]:
    with tempfile.TemporaryDirectory() as folder:
        name, *more = strategy.split()
        overrides = [*COMMON, f"strategy={name}", *more, f"train.steps={steps}"]
        case = compare.make_case(name, ranks, "fp32", compare.compose(overrides), Path(folder) / "run")
        if case.refused:
            raise ValueError(case.refused)
        before = sent()
        problem = compare.run(case, timeout=300)
        if problem:
            raise RuntimeError(problem)
        summary = json.loads((case.run_dir / "summary.json").read_text())
        return sent() - before, summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="*", default=options_of("strategy"))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for strategy in options.strategies:
        short, _ = bytes_of_run(strategy, options.ranks, 2)
        long, summary = bytes_of_run(strategy, options.ranks, 2 + options.steps)
        per_step = (long - short) / options.steps / options.ranks
        weights = 4 * float(str(summary["parameters"]))
        row = {"strategy": strategy, "mesh": summary["mesh"], "parameters": summary["parameters"]}
        row |= {"micro_batches": summary["accumulation"], "sent_bytes": round(per_step)}
        rows.append(row | {"sent_in_weights": round(per_step / weights, 3)})
        print(rows[-1], flush=True)
    if options.json:
        content = {"benchmark": "traffic", **environment(), "rows": rows}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
