"""How much memory and time does a step take? One GPU goes through many layouts; the planner is judged on the rows.

    python benchmarks/planner/measure.py --json FILE [--groups ddp fsdp ...]     (on a GPU)
    python benchmarks/planner/measure.py --cpu                                   (a dry check with tiny models)
    python benchmarks/planner/measure.py --compare [FILE]                        (the planner's error, without a GPU)
    python benchmarks/planner/trade.py FILE                                      (the table of the group `trade`)

Each case is set up as dtrain/train/loop.py does it: the composed configuration, the model on the meta device, the
strategy's own setup and train_step. Batches are random numbers on the device, so no loader is in the time. A case with
more than one rank runs on torch's fake process group: the messages do nothing, so only its memory means something.

The cases are in cases.py. Those of one world size share a process; between two of them everything is freed, what
DeepSpeed has replaced in torch is put back, and the peak is begun anew.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import statistics
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

from cases import GROUPS, LENGTHS

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
RESULTS = ROOT / "benchmarks" / "results" / "planner-h200.json"
GIB = 2**30
WARM_UP, TIMED = 2, 5  # steps


# ---- one case ------------------------------------------------------------------------------------------------


class Quick:
    """First weights at once: those of initial_weights.Drawn take seconds to draw, and do not matter here."""

    def fill(self, model: Any, name: str, held: Any, device: Any) -> None:
        from dtrain.util.dtensor import chunks_of

        for chunk in chunks_of(held):
            if name.endswith(("bias", "running_mean")):
                chunk.values.zero_()
            elif "norm" in name:
                chunk.values.fill_(1.0)
            else:
                chunk.values.normal_(0.0, 0.02)


def batch_of(cfg: Any, samples: int, device: Any) -> tuple[Any, Any]:
    """Random inputs and targets as the model's data would be."""
    import torch

    model = cfg.model
    if "image_size" in model:
        images = torch.randn(samples, model.get("channels", 3), model.image_size, model.image_size, device=device)
        return images, torch.randint(model.num_classes, (samples,), device=device)
    tokens = torch.randint(1, model.vocab_size, (samples, model.seq_len), device=device)
    task = model.get("task", "next")
    if task == "classify":
        return tokens, torch.randint(model.num_classes, (samples,), device=device)
    targets = torch.roll(tokens, -1, 1)
    if task == "mlm":
        targets[:, round(0.15 * model.seq_len) :] = -100
    return tokens, targets


class Watch:
    """Bytes at the seams of a step: when the backward pass begins, when it has ended, after the update."""

    def __init__(self, device: Any) -> None:
        self.device, self.rows = device, {}

    def mark(self, name: str) -> None:
        import torch

        if self.device.type == "cuda":
            self.rows[f"{name}_gib"] = torch.cuda.memory_allocated() / GIB
            self.rows[f"{name}_peak_gib"] = torch.cuda.max_memory_allocated() / GIB
            torch.cuda.reset_peak_memory_stats()

    def around(self, strategy: Any) -> None:
        """Marks are set by the strategy's own two halves, and by whoever calls for gradients inside the first."""
        import torch

        passes, update, backward = strategy.forward_backward, strategy.update, torch.autograd.backward

        def marked(*args: Any, **kwargs: Any) -> Any:
            self.mark("forward")
            torch.autograd.backward = backward
            return backward(*args, **kwargs)

        def halves(*args: Any) -> Any:
            torch.autograd.backward = marked
            try:
                return passes(*args)
            finally:
                torch.autograd.backward = backward
                self.mark("backward")

        def updated(*args: Any) -> Any:
            result = update(*args)
            self.mark("update")
            return result

        strategy.forward_backward, strategy.update = halves, updated


def alone(strategy: Any) -> None:
    """Let one rank of a fake group go through whole steps: what it is sent is whatever lies in memory."""
    from torch.nn.parallel import DistributedDataParallel

    from dtrain.strategies import base

    base.math = types.SimpleNamespace(isfinite=lambda value: True)  # type: ignore[assignment]  # update all the same
    if hasattr(strategy, "zero"):
        strategy.zero._overflow_check_and_loss_scale_update = lambda **options: False
    if isinstance(strategy.model, DistributedDataParallel):
        # the fake group's futures hold nothing
        strategy.model.register_comm_hook(None, lambda state, bucket: finished(bucket.buffer()))


def finished(value: Any) -> Any:
    """A message that is over when it begins."""
    import torch

    future: Any = torch.futures.Future()
    future.set_result(value)
    return future


def measure(spec: dict[str, Any], device: Any) -> dict[str, Any]:
    """Set one case up, take its steps, and free everything."""
    import torch
    import torch.distributed as dist

    from dtrain.config.build import build
    from dtrain.config.run_file import Settings
    from dtrain.launch.compose import compose
    from dtrain.plan.layout import layout_of
    from dtrain.train import build as models

    ranks = spec["ranks"]
    length = [f"model.seq_len={LENGTHS[spec['model']]}"] if spec["model"] in LENGTHS else []
    overrides = [
        f"model={spec['model']}", f"strategy={spec['strategy']}", f"precision={spec['precision']}",
        f"activation_checkpointing={spec['checkpointing']}", f"compile={spec['compile']}".lower(),
        f"train.micro_batch_size={spec['batch']}", "cluster.nodes=1", f"cluster.processes={ranks}",
        *length, *spec["words"],
    ]  # fmt: skip
    deterministic = f"deterministic={spec['deterministic']}".lower()
    settings = compose([*overrides, deterministic, "train.global_batch_size=1000000"])
    strategy = build(settings["strategy"]).for_world(ranks)
    sizes = strategy.resolve_mesh(ranks, ranks)
    per_rank = spec["batch"] * spec["passes"]
    settings["train"]["global_batch_size"] = per_rank * sizes.dp
    layout, cfg = layout_of(settings), Settings(settings)
    torch.use_deterministic_algorithms(spec["deterministic"])

    model = models.make(cfg)
    strategy.setup(
        model, build(settings["optim"], global_batch_size=per_rank * sizes.dp), precision=build(settings["precision"]),
        device=device, first=Quick(), micro_batch_size=spec["batch"], max_grad_norm=1.0,
        activation_checkpointing=spec["checkpointing"],
        activation_checkpointing_every=cfg.activation_checkpointing_every, compile=spec["compile"],
        masked=cfg.model.get("task") == "mlm",
    )  # fmt: skip
    if ranks > 1:
        alone(strategy)
    inputs, targets = batch_of(cfg, per_rank, device)
    sync = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    seconds, watch = [], Watch(device)
    for step in range(WARM_UP + (TIMED if ranks == 1 else 0)):
        sync()
        began = time.perf_counter()
        strategy.set_lr(1e-4)
        strategy.train_step(inputs, targets)
        sync()
        seconds.append(time.perf_counter() - began)
        if device.type == "cuda" and step == 0:  # what only happens once (compiling, buckets, state) is over
            torch.cuda.reset_peak_memory_stats()
    row: dict[str, Any] = {}
    if device.type == "cuda":
        free, all_bytes = torch.cuda.mem_get_info()
        row = {
            "peak_gib": torch.cuda.max_memory_allocated() / GIB,
            "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
            "outside_gib": (all_bytes - free - torch.cuda.memory_reserved()) / GIB,
        }
        torch.cuda.reset_peak_memory_stats()
        watch.mark("states")
        watch.around(strategy)
        strategy.train_step(inputs, targets)
        if spec["limits"]:
            row["runs_within"] = smallest(strategy, inputs, targets, row["peak_gib"] * GIB)
    timed = seconds[WARM_UP:] if ranks == 1 else []
    samples_per_s = per_rank * sizes.dp / statistics.median(timed) if timed else None
    strategy.close()
    tokens = targets[0].numel()
    return {
        "model": spec["model"], "strategy": spec["strategy"], "world_size": ranks, "tp": sizes.tp, "pp": sizes.pp,
        "dp": sizes.dp, "micro_batch_size": spec["batch"], "micro_batches": spec["passes"],
        "seq_len": cfg.model.get("seq_len"), "activation_checkpointing": spec["checkpointing"],
        "compile": spec["compile"], "precision": spec["precision"], "deterministic": spec["deterministic"],
        "words": [*length, *spec["words"]], "data": layout.data, "layout": dataclasses.asdict(layout), **row,
        "step_s": statistics.median(timed) if timed else None, "steps_s": timed,
        "tokens_per_s": samples_per_s * tokens if samples_per_s else None, "first_step_s": seconds[0], **watch.rows,
        "fake": dist.get_backend() == "fake", "allocator": os.environ.get("PYTORCH_ALLOC_CONF", ""),
    }  # fmt: skip


def smallest(strategy: Any, inputs: Any, targets: Any, peak: float) -> float | None:
    """The smallest of some multiples of its peak that a case runs within; a failed step ends the search."""
    import torch

    within = None
    for multiple in (1.3, 1.2, 1.15, 1.1, 1.07, 1.05, 1.03, 1.02, 1.01, 1.0):
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(multiple * peak / torch.cuda.get_device_properties(0).total_memory)
        try:
            for _ in range(2):
                strategy.train_step(inputs, targets)
            within = multiple
        except torch.cuda.OutOfMemoryError:
            break
    torch.cuda.set_per_process_memory_fraction(1.0)
    return within


def free(device: Any) -> None:
    """Let go of everything; DeepSpeed keeps references to what it made, so the memory is taken from under them."""
    import torch

    gc.collect()
    torch._dynamo.reset()
    gc.collect()
    if device.type != "cuda":
        return
    if torch.cuda.memory_allocated() > 0.2 * GIB:
        for thing in gc.get_objects():
            if isinstance(thing, torch.Tensor) and thing.is_cuda:
                with contextlib.suppress(RuntimeError):
                    (thing.to_local() if hasattr(thing, "to_local") else thing).untyped_storage().resize_(0)
                if hasattr(thing, "ds_tensor"):
                    thing.ds_tensor.untyped_storage().resize_(0)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    if torch.cuda.memory_allocated() > 0.2 * GIB:
        print(f"  still held: {torch.cuda.memory_allocated() / GIB:.2f} GiB", flush=True)


def run_world(ranks: int, specs: list[dict[str, Any]], out: Path, cpu: bool) -> None:
    """All cases of one world size, in this process."""
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as a launched run: comm/profile.py
    import torch
    import torch.distributed as dist

    from dtrain.plan.calibrate.measure import launch_costs
    from dtrain.train import process

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29500 + ranks)}
    if ranks == 1:
        device = process.join_process_group(True)
    else:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        device = torch.device("cpu") if cpu else torch.device("cuda", 0)
        dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    linear = torch.nn.functional.linear
    host = {"launch_us": launch_costs(device, 1.0)["launch_us"]} if ranks == 1 and device.type == "cuda" else {}
    for spec in specs:
        began, held = time.perf_counter(), torch.cuda.memory_allocated() if device.type == "cuda" else 0
        try:
            row = measure(spec, device)
        except Exception as error:  # a case that is too large says so, and the others go on
            row = {**spec, "error": f"{type(error).__name__}: {error}"[:400]}
            torch.use_deterministic_algorithms(True)
        row |= {"wall_s": time.perf_counter() - began, "held_before_gib": held / GIB, **host}
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print({k: v for k, v in row.items() if k not in ("steps_s", "words")}, flush=True)
        torch.nn.functional.linear = linear  # zero3 puts its own in its place, which keeps float32 inputs
        free(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("planner.json"))
    parser.add_argument(
        "--groups",
        nargs="*",
        default=[name for name in GROUPS if name not in ("again", "dry", "fast", "trade", "largest")],
        choices=list(GROUPS),
    )
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--compare", nargs="?", type=Path, const=RESULTS)
    parser.add_argument("--world", type=int, help="used by the script itself: the cases of one world size")
    options = parser.parse_args()
    if options.compare:
        import compare

        compare.show(options.compare)
        return
    groups = ["dry"] if options.cpu else options.groups
    specs = [spec for name in groups for spec in GROUPS[name]()]
    lines = options.json.with_suffix(".jsonl")
    if options.world:
        run_world(options.world, [s for s in specs if s["ranks"] == options.world], lines, options.cpu)
        return
    lines.unlink(missing_ok=True)
    for ranks in sorted({spec["ranks"] for spec in specs}):
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--world", str(ranks)], check=False)
    from throughput import environment

    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    options.json.write_text(json.dumps({"benchmark": "planner", **environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
