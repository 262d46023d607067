"""How fast is LoRA, and in how much memory? `launch.py lora.rank=16` beside peft on transformers' Llama.

    python benchmarks/lora.py [--rows NAME ...] [--json benchmarks/results/lora-h200.json]
    python benchmarks/lora.py --model llama-tiny --batch 2 --seq-len 64 --steps 5      (a dry check on a CPU)

The same architecture with random weights, the same batch of made-up tokens, rank, targets, AdamW and clipping, one
process. Every measurement is a process of its own, and the tools take turns: each round does all rows. A step is all
of it: batch, forward, backward, clip, update, and the loss on the host. Ours also writes its metrics.

The base is held in bfloat16 on both sides, by us all but embedding and norms, which stay float32. Adapters are
float32 with products in bfloat16 by us. peft is measured as it is used: float32 adapters under autocast (its default,
and what transformers' Trainer does with bf16=True), and all in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from throughput import ROOT, environment

WARM_UP = 5  # steps that are not counted; the first of them compile
THEIRS = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "proj": "o_proj", "gate": "gate_proj", "up": "up_proj"}
THEIRS |= {"down": "down_proj"}
ROWS: dict[str, dict[str, Any]] = {
    "dtrain ddp": {"tool": "dtrain", "strategy": "ddp"},
    "peft, fp32 adapters, autocast": {"tool": "peft", "adapters": "fp32"},
    "dtrain fsdp": {"tool": "dtrain", "strategy": "fsdp"},
    "peft, bf16 adapters": {"tool": "peft", "adapters": "bf16"},
    "dtrain ddp, compile": {"tool": "dtrain", "strategy": "ddp", "compile": True},
    "peft, fp32 adapters, autocast, compile": {"tool": "peft", "adapters": "fp32", "compile": True},
    "dtrain fsdp, compile": {"tool": "dtrain", "strategy": "fsdp", "compile": True},
    "peft, bf16 adapters, compile": {"tool": "peft", "adapters": "bf16", "compile": True},
}


def ours(row: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """One run of the launcher: its own figures of every step, and of its memory."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        settings = [
            f"model={options.model}", f"model.seq_len={options.seq_len}", "data=synthetic", "precision=bf16",
            f"strategy={row['strategy']}", f"compile={str(row.get('compile', False)).lower()}", "cluster.processes=1",
            f"train.global_batch_size={options.batch}", f"train.steps={WARM_UP + options.steps}",
            "train.eval_batches=0", "checkpoint.every=0", "deterministic=false", "optim.lr=1e-4",
            f"lora.rank={options.rank}", f"lora.targets=[{','.join(options.targets)}]",
        ]  # fmt: skip
        result = subprocess.run(
            [sys.executable, str(ROOT / "launch.py"), f"run_dir={run_dir}", *settings],
            capture_output=True, text=True, timeout=options.timeout,
        )  # fmt: skip
        if result.returncode:
            notes = sorted((run_dir / "logs").glob("failure-*.json"))
            told = json.loads(notes[0].read_text())["traceback"] if notes else result.stdout + result.stderr
            return {"error": told[-1500:]}
        steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        summary = json.loads((run_dir / "summary.json").read_text())
    times = [step["step_s"] for step in steps if "step_s" in step]
    return {"times": times, "losses": [steps[0]["loss"], steps[-1]["loss"]], "peak_mem_gib": summary["peak_mem_gib"]}


def theirs(row: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """This script once more, as a process that trains with peft."""
    command = [sys.executable, __file__, "--peer", json.dumps(row), *sys.argv[1:]]
    result = subprocess.run(command, capture_output=True, text=True, timeout=options.timeout)
    if result.returncode:
        return {"error": (result.stderr or result.stdout)[-1500:]}
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def train_peer(row: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    import peft
    import torch
    import transformers
    from omegaconf import OmegaConf

    from dtrain.formats import huggingface
    from dtrain.train.metrics import memory_gib

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings: Any = OmegaConf.to_container(OmegaConf.load(ROOT / "conf" / "model" / f"{options.model}.yaml"))
    settings["seq_len"] = options.seq_len
    config = transformers.LlamaConfig(**huggingface.FAMILIES["llama"].config(settings), use_cache=False)
    torch.manual_seed(0)
    with device:  # at once in 16 bits and where it belongs
        torch.set_default_dtype(torch.bfloat16)
        model: Any = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        torch.set_default_dtype(torch.float32)
    wide = row["adapters"] == "fp32"
    choice = peft.LoraConfig(
        task_type="CAUSAL_LM", r=options.rank, lora_alpha=16, lora_dropout=0.0,
        target_modules=[THEIRS[name] for name in options.targets or THEIRS],
    )  # fmt: skip
    model = peft.get_peft_model(model, choice, autocast_adapter_dtype=wide)
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert {p.dtype for p in trained} == {torch.float32 if wide else torch.bfloat16}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    optimizer = torch.optim.AdamW(trained, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=device.type == "cuda")
    called = torch.compile(model) if row.get("compile") else model
    generator = torch.Generator().manual_seed(0)
    times, losses = [], []
    for _ in range(WARM_UP + options.steps):
        began = time.perf_counter()
        tokens = torch.randint(settings["vocab_size"], (options.batch, options.seq_len), generator=generator)
        tokens = tokens.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=wide):
            loss = called(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())  # waits for the GPU
        times.append(time.perf_counter() - began)
    return {
        "times": times, "losses": [losses[0], losses[-1]], "peak_mem_gib": memory_gib(device),
        "trained_parameters": sum(p.numel() for p in trained),
    }  # fmt: skip


def summarise(name: str, found: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """A row of the results: all rounds together."""
    row = {"row": name, **ROWS[name], "model": options.model, "batch": options.batch, "seq_len": options.seq_len}
    row |= {"rank": options.rank, "targets": options.targets or sorted(THEIRS), "precision": "bf16"}
    good = [f for f in found if "error" not in f]
    if not good:
        return row | {"error": found[-1]["error"]}
    rounds = [statistics.median(f["times"][WARM_UP:]) for f in good]
    step_s = statistics.median([t for f in good for t in f["times"][WARM_UP:]])
    return row | {
        "step_s": step_s, "step_s_of_rounds": rounds, "tokens_per_s": options.batch * options.seq_len / step_s,
        "peak_mem_gib": max(f["peak_mem_gib"] for f in good), "losses": good[-1]["losses"],
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """Ours beside theirs: each pair is one kind of use."""
    lines = [f"{'row':<42}{'step, ms':>10}{'tokens/s':>11}{'GiB':>8}"]
    for row in rows:
        if "error" in row:
            lines.append(f"{row['row']:<42}  {row['error'].strip().splitlines()[-1][:80]}")
        else:
            figures = f"{row['step_s'] * 1e3:>10.0f}{row['tokens_per_s']:>11,.0f}{row['peak_mem_gib']:>8.1f}"
            lines.append(f"{row['row']:<42}{figures}")
    return "\n".join(lines)


def packages() -> dict[str, str]:
    found = {}
    for name in ("transformers", "peft"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            sys.exit(f"{name} is not installed, and it is what this compares with\n  fix: pip install {name}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS), metavar="NAME")
    parser.add_argument("--model", default="llama-8b")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--targets", nargs="*", default=[], choices=list(THEIRS), help="default: all seven")
    parser.add_argument("--steps", type=int, default=20, help="that are measured, in each round")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=400, help="seconds for each measurement")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peer", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        print(json.dumps(train_peer(options.peer, options)))
        return
    versions = packages()
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in options.rows}
    for _ in range(options.rounds):
        for name in options.rows:
            row = ROWS[name]
            try:
                found[name].append((ours if row["tool"] == "dtrain" else theirs)(row, options))
            except subprocess.TimeoutExpired:
                found[name].append({"error": f"not done after {options.timeout:.0f} s"})
            rows = [summarise(n, f, options) for n, f in found.items() if f]
            print(rows[-1] if len(rows) < len(found) else table(rows), flush=True)
            if options.json:  # after each measurement: a lent machine may be taken back
                head = environment()
                head["versions"] |= versions  # type: ignore[operator]
                content = {"benchmark": "lora", **head, "warm_up_steps": WARM_UP, "rows": rows}
                options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
