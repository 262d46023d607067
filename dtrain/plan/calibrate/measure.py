"""The measurements of `dtrain plan calibrate`, by the clocks of util/device_rates.py and comm/measure.py.

Functions import torch. Times are medians after a warm-up, on random data: zeros would run faster than real values.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from dtrain.util.host_memory import total_bytes

GIB, MIB, KIB = 2**30, 2**20, 2**10
Row = dict[str, Any]
# (rows, inner, cols): squares, our models' matmuls (GPT-2 124M and 1.5B, Llama 7B), tall ones, thin ones
GPU_SHAPES = (
    (512, 512, 512), (1024, 1024, 1024), (2048, 2048, 2048), (4096, 4096, 4096), (8192, 8192, 8192),
    (2048, 13312, 2048), (32768, 768, 768), (32768, 768, 3072), (32768, 3072, 768), (32768, 768, 50304),
    (8192, 1600, 6400), (8192, 6400, 1600), (16384, 1600, 1600), (4096, 4096, 11008), (4096, 11008, 4096),
    (1024, 4096, 4096), (128, 8192, 8192), (8192, 64, 8192), (8192, 256, 8192), (65536, 1024, 64),
)  # fmt: skip
CPU_SHAPES = (
    (64, 64, 64), (128, 128, 128), (256, 256, 256), (512, 512, 512), (1024, 1024, 1024),
    (2048, 128, 512), (2048, 512, 128), (8, 512, 512), (512, 16, 512), (4096, 256, 64),
)  # fmt: skip
GPU_SIZES = (64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, GIB)
CPU_SIZES = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB)
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
ADAM_BYTES = 28  # in fp32: weight, gradient and two moments are read, all but the gradient written


def device_rates(budget_s: float) -> dict[str, Any]:
    """Measure one device: {"figures": settings of Hardware, "matmul": rows, "more": other values}."""
    import torch

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    if not cuda:  # a run without a GPU has two ranks here, each with half of the cores
        torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))
    shapes = GPU_SHAPES if cuda else CPU_SHAPES
    each = 0.5 * budget_s / (len(shapes) + 2)
    half = torch.bfloat16
    rows = [matmul(shape, half if cuda else torch.float32, device, each) for shape in shapes]
    best = max(rows, key=lambda row: row["tflops"])
    square = (4096,) * 3 if cuda else (512,) * 3
    # long enough for the GPU's power limit to lower its clock, as in training: keep the second of two rounds
    shape = (best["rows"], best["inner"], best["cols"]) if cuda else square
    lasting = [matmul(shape, half, device, 0.08 * budget_s) for _ in range(2)]
    rest = 0.34 * budget_s / 5
    values: dict[str, float | int] = {
        "matmul_tflops": lasting[-1]["tflops"],
        "peak_fp32_tflops": matmul(square, torch.float32, device, each)["tflops"] if cuda else best["tflops"],
        "stream_gb_s": stream_gb_s(device, rest),
        "cpu_adam_gb_s": adam_gb_s(torch.device("cpu"), rest),
        **launch_costs(device, rest),
        "host_memory_gib": total_bytes() / GIB,
    }
    more: dict[str, Any] = {}
    if not cuda:
        values["num_sms"] = 1  # a CPU matmul has no waves of tiles
    else:
        properties = torch.cuda.get_device_properties(device)
        values |= {
            "usable_memory_gib": torch.cuda.mem_get_info(device)[1] / GIB,
            "num_sms": properties.multi_processor_count,
            "l2_mib": properties.L2_cache_size / MIB,
            "pcie_gb_s": pcie_gb_s(device, rest),
        }
        more = {
            "gpu": torch.cuda.get_device_name(device),
            "adam_gb_s": adam_gb_s(device, rest),
            "best_tflops": best["tflops"],
        }
    return {"figures": values, "matmul": rows, "more": more}


def matmul(shape: tuple[int, ...], dtype: Any, device: Any, budget_s: float) -> Row:
    """Time one matmul [rows × inner] · [inner × cols], as a row of the table."""
    import torch

    from dtrain.util import device_rates as rates

    rows, inner, cols = shape
    a = torch.randn(rows, inner, device=device, dtype=torch.float32).to(dtype)
    b = torch.randn(inner, cols, device=device, dtype=torch.float32).to(dtype)
    out = torch.empty(rows, cols, device=device, dtype=dtype)
    seconds = rates.seconds_per_call(lambda: torch.mm(a, b, out=out), device, budget_s)
    tflops = 2 * rows * inner * cols / seconds / 1e12
    return {"rows": rows, "inner": inner, "cols": cols, "dtype": str(dtype)[6:], "us": seconds * 1e6, "tflops": tflops}


def stream_gb_s(device: Any, budget_s: float) -> float:
    """Measure a copy too large for any cache: each byte is read once and written once."""
    import torch

    from dtrain.util import device_rates as rates

    source = torch.randn((GIB if device.type == "cuda" else 128 * MIB) // 4, device=device)
    target = torch.empty_like(source)
    return 2 * 4 * source.numel() / rates.seconds_per_call(lambda: target.copy_(source), device, budget_s) / 1e9


def pcie_gb_s(device: Any, budget_s: float) -> float:
    import torch

    from dtrain.util import device_rates as rates

    host = torch.randn(64 * MIB).pin_memory()
    there = torch.empty_like(host, device=device)
    seconds = rates.seconds_per_call(lambda: there.copy_(host, non_blocking=True), device, budget_s)
    return 4 * host.numel() / seconds / 1e9


def adam_gb_s(device: Any, budget_s: float) -> float:
    """Measure torch's fused AdamW in fp32; on the CPU it matches DeepSpeed's, which needs compiling."""
    import torch

    from dtrain.util import device_rates as rates

    count = 100_000_000 if device.type == "cuda" else 8_000_000
    weight = torch.nn.Parameter(torch.randn(count, device=device))
    weight.grad = torch.randn(count, device=device)
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(os.cpu_count() or 1)
    optimizer = torch.optim.AdamW([weight], lr=1e-6, fused=True)
    seconds = rates.seconds_per_call(optimizer.step, device, budget_s)
    torch.set_num_threads(threads)
    return ADAM_BYTES * count / seconds / 1e9


def launch_costs(device: Any, budget_s: float) -> dict[str, float]:
    """launch_us: host time per kernel in training, forward and backward; kernel_us: time of the shortest kernel.

    A CPU has no launch queue, so both are the time of the smallest operation.
    """
    import torch

    from dtrain.util import device_rates as rates

    x = torch.randn(64, 64, device=device)
    if device.type != "cuda":
        smallest = rates.seconds_per_call(lambda: x.add_(1.0), device, budget_s) * 1e6
        return {"launch_us": smallest, "kernel_us": smallest}
    layers = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(32))
    ).to(device)

    def train() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = layers(x).float().square().mean()
        loss.backward()

    for _ in range(3):
        train()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        train()
        torch.cuda.synchronize(device)
    kernels = sum(str(event.device_type).endswith("CUDA") for event in profile.events() or [])
    host = []
    for _ in range(max(3, int(budget_s / 2 / 0.01))):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        train()
        host.append(time.perf_counter() - began)
    graph, count = torch.cuda.CUDAGraph(), 500
    with torch.cuda.graph(graph):
        for _ in range(count):
            x.add_(1e-6)
    replay = rates.seconds_per_call(graph.replay, device, budget_s / 2)
    return {"launch_us": statistics.median(host) / max(1, kernels) * 1e6, "kernel_us": replay / count * 1e6}


# ---- collectives: one process per GPU, or two on a CPU ------------------------------------------------------


def collective_rows(ranks: int, budget_s: float) -> list[Row]:
    """Time collectives by size over `ranks` processes here, and the all-reduce over two of them."""
    import torch
    from torch.multiprocessing.spawn import start_processes

    groups = [ranks] if ranks <= 2 else [2, ranks]
    rows: list[Row] = []
    for size in groups:
        names = COLLECTIVES if size == ranks else COLLECTIVES[:1]
        with tempfile.TemporaryDirectory() as folder:
            arguments = (size, folder, names, torch.cuda.is_available(), budget_s / len(groups))
            context = start_processes(one_rank, arguments, nprocs=size, join=False, start_method="spawn")
            until = time.monotonic() + 60 + 2 * budget_s
            try:
                while not context.join(timeout=1):
                    if time.monotonic() > until:
                        raise TimeoutError(f"the collectives of {size} processes did not end")
            finally:
                for process in context.processes:
                    if process.is_alive():
                        process.kill()
            rows += json.loads((Path(folder) / "rows.json").read_text())
    return rows


def one_rank(rank: int, size: int, folder: str, names: tuple[str, ...], cuda: bool, budget_s: float) -> None:
    """One process of `collective_rows`: all run the same sizes, as often as the slowest has time for."""
    import warnings

    import torch
    import torch.distributed as dist

    from dtrain.comm.measure import measure, slowest_of

    warnings.simplefilter("ignore", FutureWarning)  # torch renames collectives
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 2) // size))
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/meet", rank=rank, world_size=size)
    sizes = GPU_SIZES if cuda else CPU_SIZES
    each = budget_s / len(names) / len(sizes)
    rows = []
    for name, num_bytes in ((name, num_bytes) for name in names for num_bytes in sizes):
        found = measure(name, num_bytes, dist.group.WORLD, slowest_of(dist.group.WORLD), device, each)
        row = {"collective": name, "ranks": size, "bytes": num_bytes}
        rows.append(row | {"us": found.p50 * 1e6, "busbw_gb_s": found.bus_gb_s})
    if rank == 0:
        (Path(folder) / "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()
