"""How much host memory does `init_from` take? Peak memory of each rank beyond its start, in units of the file.

    python benchmarks/import_memory.py [--json benchmarks/results/import-memory-cpu.json]

A model is written in Hugging Face's format, and fresh processes set up a strategy with it. Each resets its peak (VmHWM)
just before. A rank of fsdp over 2 keeps half of the weights; what it reads of the mapped file counts, too, while it is
read. `drawn` is the same without the file: what the strategy itself needs (ddp's buckets, DeepSpeed's copies) and one
whole weight at a time.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from pathlib import Path

from throughput import environment

from dtrain.commands.verify import compare, world
from dtrain.config.run_file import load, save

SIZES = ["num_layers=8", "dim=1024", "num_heads=16", "vocab_size=16384", "vocab_multiple=128", "seq_len=256"]
MODELS = {  # 471 MB and 638 MB in float32
    "gpt2": ["model=gpt2-tiny"],
    "llama": ["model=llama-tiny", "model.num_kv_heads=8", "model.hidden_dim=4096"],
}
LAYOUTS = (("ddp", 2), ("fsdp", 2), ("zero3", 2), ("tensor", 2), ("pipeline", 2))
COMMON = ["data=synthetic", "train.eval_batches=0", "train.global_batch_size=8"]


def memory(key: str) -> int:
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def rank(run_dir: Path) -> int:
    """One rank: set the strategy up with weights from the file, and leave its peak memory in a file."""
    import os

    import torch
    import torch.distributed as dist

    from dtrain.config.build import build
    from dtrain.train import build as models

    dist.init_process_group("gloo")
    cfg = load(run_dir)
    strategy = build(cfg.strategy)
    if cfg.choices.strategy.startswith("zero"):
        from dtrain.strategies.deepspeed_state import import_deepspeed

        import_deepspeed(torch.device("cpu"))  # 300 MB of modules, which are not the import's
    model, first = models.make(cfg), models.first_weights(cfg)
    optimizer = build(cfg.optim, global_batch_size=cfg.train.global_batch_size)
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory("VmRSS")
    strategy.setup(
        model, optimizer, precision=build(cfg.precision), device=torch.device("cpu"), first=first, micro_batch_size=1
    )
    (run_dir / f"peak-{os.environ['RANK']}").write_text(str(memory("VmHWM") - before))
    dist.barrier()
    dist.destroy_process_group()
    return 0


def write_model(folder: Path, overrides: list[str]) -> int:
    """A drawn model in Hugging Face's format; the bytes of its weights."""
    import torch

    from dtrain.checkpoint import store
    from dtrain.inference.export_hf import export_hf
    from dtrain.train import build as models

    case = compare.make_case("ddp", 1, "fp32", compare.compose(overrides), folder / "run")
    case.run_dir.mkdir(parents=True)
    save(case.run_dir, case.config)
    cfg = load(case.run_dir)
    model, first = models.make(cfg), models.first_weights(cfg)
    model.to_empty(device="cpu")
    for name, parameter in model.named_parameters():
        first.fill(model, name, parameter, torch.device("cpu"))
    state = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    store.save(case.run_dir / "checkpoints", 1, state, {"samples": 0, "data": "", "extra": {}}, keep=1)
    return (export_hf(case.run_dir, folder / "hf") / "model.safetensors").stat().st_size


def measure(run_dir: Path, strategy: str, ranks: int, overrides: list[str]) -> list[int]:
    """The peak of each rank, in bytes."""
    case = compare.make_case(strategy, ranks, "fp32", compare.compose(overrides), run_dir)
    assert not case.refused, case.refused
    (run_dir / "logs").mkdir(parents=True)
    save(run_dir, case.config)
    with world.World(ranks, rank, run_dir) as processes:
        assert processes.join(300) == [0] * ranks
    return [int((run_dir / f"peak-{i}").read_text()) for i in range(ranks)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for name in options.models:
        with tempfile.TemporaryDirectory() as temporary:
            overrides = [*COMMON, *MODELS[name], *(f"model.{size}" for size in SIZES)]
            size = write_model(Path(temporary), overrides)
            for strategy, ranks in LAYOUTS:
                row = {"model": name, "file_mb": round(size / 1e6), "strategy": strategy, "ranks": ranks}
                for how, origin in (("loaded", f"{temporary}/hf"), ("drawn", "null")):
                    words = [*overrides, f"strategy={strategy}", f"init_from={origin}"]
                    peaks = measure(Path(temporary) / f"{strategy}-{how}", strategy, ranks, words)
                    row[f"{how}_peak_in_files"] = round(max(peaks) / size, 3)
                rows.append(row)
                print(row, flush=True)
    if options.json:
        content = {"benchmark": "import_memory", **environment(), "rows": rows}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
