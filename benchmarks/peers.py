"""How fast do the tools train the same models on one GPU? Ours beside plain torch, Lightning, accelerate and others.

    python benchmarks/peers.py [--models NAME ...] [--peers NAME ...] [--budget SECONDS] [--json FILE] [--add]
    python benchmarks/peers.py --cpu                      (a dry check with tiny models, not compiled)
    python benchmarks/peers.py --chart FILE.svg [--json FILE]      (draws the results, without a GPU)

Each (model, peer) is a process that warms up and then runs a block of steps when told. The processes of a wave are
alive at once, and exactly one runs at a time, in turn, so what comes and goes on the machine hits all; between blocks
each hands back all memory but its parameters, gradients and optimizer state. Plain torch is in every wave of a model:
what is compared is the median over the rounds of a peer's step to plain torch's of the same round. A wave holds as many
peers as fit the GPU by the rough figures below.

All take the same four random batches, which lie on the device, in bf16 with gradient clipping. Language models other
than ours and Hugging Face's are benchmarks/peer/yardsticks.py, vision models timm's and torchvision's, of which the
faster counts as plain torch. MFU is by one formula for all peers of a model, against the H200's 989 TFLOP/s: (6N + 12·
layers·dim·length) a token; for pictures the model's own count. Memory is the most that torch has allocated in the
timed steps.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import statistics
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "peers-h200.json"

OURS = ["precision=bf16"]  # beside the defaults; every peer of ours has these overrides
# name: row label, loop in peer/loops.py, its overrides, the packages it needs, its memory beside plain torch's
PEERS: dict[str, tuple[str, str, list[str], list[str], float]] = {
    "plain": ("plain torch", "plain", [], [], 1.0),
    "ddp": ("dtrain ddp", "ours", ["strategy=ddp"], [], 0.75),
    "fsdp": ("dtrain fsdp", "ours", ["strategy=fsdp"], [], 0.75),
    "zero2": ("dtrain zero2", "ours", ["strategy=zero2"], ["deepspeed"], 0.9),
    "plain-torchvision": ("plain torch, torchvision's model", "plain_torchvision", [], ["torchvision"], 1.0),
    "lightning": ("Lightning", "lightning", [], ["lightning"], 1.0),
    "accelerate": ("accelerate", "accelerate", [], ["accelerate"], 1.0),
    "hf-trainer": ("HF Trainer, its models", "hf_trainer", [], ["transformers", "accelerate"], 1.5),
    "deepspeed": ("DeepSpeed zero2, eager", "deepspeed", [], ["deepspeed"], 1.5),
    "plain-bf16": ("plain torch, bf16 parameters", "plain_bf16", [], [], 0.9),
    "torchtitan": ("torchtitan", "", [], ["torchtitan"], 0.0),
}
FIRST = ("plain", "plain-torchvision", "ddp", "fsdp", "zero2")  # of several models, before the other peers of any
VISION = ("resnet50", "vit-b16")
# name: overrides, batch, GiB of plain torch's peak (roughly), and the tiny one for --cpu
CASES: dict[str, tuple[list[str], int, float, list[str]]] = {
    "gpt2-124m": (["model=gpt2-124m"], 32, 16, ["model=gpt2-tiny"]),
    "gpt2-124m-4": (["model=gpt2-124m"], 4, 6, ["model=gpt2-tiny"]),
    "gpt2-124m-64": (["model=gpt2-124m"], 64, 29, ["model=gpt2-tiny"]),
    "gpt2-1.5b": (["model=gpt2-1.5b"], 16, 65, ["model=gpt2-tiny"]),
    "gpt2-1.5b-32": (["model=gpt2-1.5b"], 32, 106, ["model=gpt2-tiny"]),
    "llama-1b": (["model=llama-1b", "model.seq_len=2048"], 8, 48, ["model=llama-tiny"]),
    "resnet50": (["model=resnet50"], 256, 24, ["model=resnet18", "model.image_size=64", "model.num_classes=10"]),
    "vit-b16": (["model=vit-b16"], 256, 26, ["model=vit-tiny", "model.channels=3", "model.image_size=16"]),
    "bert-base": (["model=bert-base"], 64, 18, ["model=bert-tiny"]),
}
ROOM = 124.0  # GiB that a wave may take while it warms up
IDLE = 0.32  # of its peak, what plain torch keeps between its blocks, at most: 1.5 billion × 12 bytes of 65 GiB
UNTIMED = 2  # steps at the start of a block
WARM_UP_S = 300.0  # for one peer to answer first
Row = dict[str, Any]


# ---- one model -----------------------------------------------------------------------------------------------


def overrides_of(case: str, peer: str, cpu: bool) -> list[str]:
    overrides, batch, _, tiny = CASES[case]
    batch = min(4, batch) if cpu else batch
    model = tiny if cpu else overrides
    common = [*model, *OURS, "cluster.nodes=1", "cluster.processes=1", f"train.global_batch_size={batch}"]
    return [*common, *PEERS[peer][2]]


def spec_of(case: str, peer: str, cpu: bool) -> dict[str, Any]:
    batch = CASES[case][1]
    overrides = overrides_of(case, peer, cpu)
    return {"peer": peer, "loop": PEERS[peer][1], "words": overrides, "batch": min(4, batch) if cpu else batch}


def waves(case: str, peers: list[str]) -> list[list[str]]:
    """Which peers are alive at once, beside plain torch: as many as fit, in their order."""
    peak = CASES[case][2]
    found: list[list[str]] = []
    room = ROOM - peak  # in the first wave plain torch warms up, too
    for peer in peers:
        need = peak * PEERS[peer][4]
        if not found or need > room:
            room = ROOM - peak * (IDLE if found else 1.0)
            if not found and need > room:  # nothing fits beside a plain torch that warms up
                found.append([])
                room = ROOM - peak * IDLE
            found.append([])
        found[-1].append(peer)
        room -= need
    return found or [[]]


def missing(peer: str, case: str) -> str | None:
    """Why a peer is left out."""
    peak = CASES[case][2]
    if peak * (PEERS[peer][4] + IDLE) > ROOM:
        return f"does not fit beside plain torch, which takes {peak:.0f} GiB"
    absent = [name for name in PEERS[peer][3] if importlib.util.find_spec(name) is None]
    if absent:
        return f"{absent[0]} is not installed here"
    return "is installed, but this script does not drive it" if peer == "torchtitan" else None


class Measured:
    """The rounds of one case in one pass, and the rows that they give."""

    def __init__(self, case: str, options: argparse.Namespace, deadline: float) -> None:
        self.case, self.options, self.deadline = case, options, deadline
        self.reference: Any = None
        self.steps = 2  # of a timed block, for all peers; set from plain torch's warm-up
        self.flops, self.unit, self.per_step, self.shape = self.sizes()

    def sizes(self) -> tuple[float, str, int, Row]:
        """Operations of a step, what is counted and how many a step has, and what the row says of the model."""
        from dtrain.config.run_file import Settings
        from dtrain.launch.compose import compose
        from dtrain.train import build as models

        spec = spec_of(self.case, "plain", self.options.cpu)
        cfg, batch = Settings(compose(spec["words"])), spec["batch"]
        model: Any = models.make(cfg)
        shape = {"model": cfg.choices.model, "batch": batch, "seq_len": cfg.model.get("seq_len")}
        if "image_size" in cfg.model:
            return batch * model.flops_per_sample(), "images", batch, shape
        length = cfg.model.seq_len
        a_token = 6.0 * model.num_parameters + 12.0 * model.num_layers * model.dim * length
        return batch * length * a_token, "tokens", batch * length, shape

    def wave(self, names: list[str]) -> dict[str, Row]:
        """Let peers warm up, run the rounds in turn, end them; plain torch stays.

        Others warm up at once, and then each of ours alone: which kernel is the fastest is found by a clock.
        """
        from benchmarks.peer.process import Peer

        starting = [*([] if self.reference else ["plain"]), *names]
        ours = [name for name in starting if PEERS[name][1] == "ours"]
        groups = [[name for name in starting if name not in ours], *([name] for name in ours)]
        peers: dict[str, Any] = {}
        found: dict[str, Row] = {}
        warm: dict[str, Row] = {}
        try:
            for group in groups:
                threads = max(1, (os.cpu_count() or 1) // max(1, len(group)))
                began = time.perf_counter()
                peers |= {name: Peer(spec_of(self.case, name, self.options.cpu), threads) for name in group}
                for name in group:
                    wait = min(WARM_UP_S, self.deadline - time.perf_counter() + 20) - (time.perf_counter() - began)
                    try:
                        warm[name] = peers[name].report(wait) | {"warm_up_s": time.perf_counter() - began}
                    except RuntimeError as error:
                        found[name] = {"error": str(error)}
                        peers[name].stop()
            if not self.reference:
                if "plain" not in warm:
                    print(f"plain torch: {found['plain']['error']}", flush=True)
                    return {name: {"error": "plain torch failed, so there is no ratio"} for name in names}
                self.reference = peers["plain"]
                step_s = warm["plain"]["seconds"] / warm["plain"]["steps"]
                self.steps = max(2, math.ceil(self.options.block_s / step_s))
            found |= self.rounds({n: peers[n] for n in warm if n != "plain"}, warm)
        finally:
            for peer in peers.values():
                if peer is not self.reference:
                    peer.stop()
        return found

    def rounds(self, peers: dict[str, Any], warm: dict[str, Row]) -> dict[str, Row]:
        """Blocks in turn, once forwards and once backwards; the rows of all that came through."""
        alive = {"plain": self.reference, **peers}
        blocks: dict[str, list[Row]] = {name: [] for name in alive}
        found: dict[str, Row] = {}
        for i in range(self.options.rounds):
            for name in list(alive) if i % 2 else list(reversed(alive)):
                try:
                    alive[name].go(UNTIMED, self.steps)
                    blocks[name].append(alive[name].report(120))
                except (RuntimeError, OSError) as error:
                    found[name] = {"error": str(error)}
                    alive.pop(name)
                    if name == "plain":
                        raise
        seconds = {name: [block["seconds"] / block["steps"] for block in blocks[name]] for name in alive}
        for name, steps in seconds.items():
            plain, step_s = seconds["plain"], statistics.median(steps)
            found[name] = {
                f"{self.unit}_per_s": self.per_step / step_s, "mfu": self.flops / step_s / 989e12,
                "peak_mem_gib": max(block["peak_gib"] for block in blocks[name]), "step_s": step_s,
                "reference_step_s": statistics.median(plain), "reference_rounds_s": plain,
                "ratio_to_reference": statistics.median(p / s for p, s in zip(plain, steps, strict=True)),
                "rounds_s": steps, "steps_a_round": self.steps, "loss": blocks[name][-1]["loss"],
                "warm_up_s": warm[name]["warm_up_s"] if name in warm else None,
            }  # fmt: skip
            if "ddp" in seconds:  # ours, in the same rounds
                found[name]["ratio_to_ddp"] = statistics.median(
                    ours / theirs for ours, theirs in zip(seconds["ddp"], steps, strict=True)
                )
        return found

    def run(self, peers: list[str], keep: Any) -> None:
        others = [p for p in peers if p != "plain"]
        for name in [p for p in others if missing(p, self.case)]:
            keep(self.row(name, {"skipped": missing(name, self.case)}))
        first_done = False
        due = waves(self.case, [p for p in others if not missing(p, self.case)])
        for names in due:  # which grows by those that found no room beside others
            if self.deadline - time.perf_counter() < 30 and not self.options.cpu:
                for name in names:
                    keep(self.row(name, {"skipped": "no time was left (--budget)"}))
                continue
            found = self.wave(names)
            if "plain" in peers and not first_done and "plain" in found:
                keep(self.row("plain", found["plain"]))
                first_done = True
            for name in names:
                if len(names) > 1 and "out of memory" in found.get(name, {}).get("error", ""):
                    due.append([name])
                else:
                    keep(self.row(name, found.get(name, {"error": "no figures"})))
        if self.reference:
            self.reference.stop()

    def row(self, peer: str, figures: Row) -> Row:
        overrides = {"words": overrides_of(self.case, peer, self.options.cpu)} if PEERS[peer][1] == "ours" else {}
        return {"case": self.case, **self.shape, "peer": peer, "name": PEERS[peer][0], **figures, **overrides}


# ---- results -------------------------------------------------------------------------------------------------


def complete(rows: list[Row]) -> None:
    """Ratios against the best plain torch with float32 parameters that a case has."""
    for row in rows:
        if "ratio_to_reference" in row:
            same = [r for r in rows if r["case"] == row["case"] and r["peer"] in ("plain", "plain-torchvision")]
            row["ratio_to_plain"] = row["ratio_to_reference"] / max(
                [1.0, *(r["ratio_to_reference"] for r in same if "ratio_to_reference" in r)]
            )


def line_of(row: Row) -> str:
    head = f"{row['case']:<13} {row['batch']:>4}  {row['name']:<34}"
    if "step_s" not in row:
        return f"{head} {row.get('skipped') or 'FAILED: ' + row.get('error', '')}"
    rate = row.get("tokens_per_s") or row.get("images_per_s")
    return (
        f"{head}{rate:>11,.0f}{row['mfu']:>8.1%}{row['peak_mem_gib']:>8.1f} GiB{row['ratio_to_reference']:>8.3f}  "
        f"loss {row['loss'] or math.nan:.3f}, warm after {row['warm_up_s'] or 0:.0f} s"
    )


def versions() -> dict[str, str]:
    found = {}
    for name in ("lightning", "accelerate", "transformers", "timm", "torchvision", "deepspeed", "torchtitan"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(CASES), choices=list(CASES), metavar="NAME")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=list(PEERS), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--block-s", type=float, default=0.5, help="how long the timed steps of a block take")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no wave is begun")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--add", action="store_true", help="keep the rows of FILE that are not measured again")
    parser.add_argument("--cpu", action="store_true", help="tiny models, not compiled: does every peer run?")
    parser.add_argument("--chart", type=Path, metavar="SVG", help="only draw the results")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
    if options.worker:
        from benchmarks.peer.process import work

        return work(options.worker)
    if options.chart:
        from benchmarks.peer.chart import draw

        options.chart.write_text(draw(json.loads((options.json or RESULTS).read_text())))
        return None

    from throughput import environment

    deadline = time.perf_counter() + options.budget
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / "peers-inductor"))
    if options.cpu:
        os.environ |= {"TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}
        options.rounds, options.block_s = 2, 0.01
    head = environment()
    head["versions"] |= versions()  # type: ignore[operator]
    began = datetime.now(UTC).isoformat(timespec="seconds")
    rows: list[Row] = json.loads(options.json.read_text())["rows"] if options.add and options.json.exists() else []

    def keep(row: Row) -> None:
        row["run"], row["commit"] = began, head["commit"]  # rows of one run can be compared, others hardly
        rows[:] = [r for r in rows if (r["case"], r["peer"]) != (row["case"], row["peer"])] + [row]
        complete(rows)
        print(line_of(row), flush=True)
        if options.json:  # after each row: a lent machine may be taken back
            content = {"benchmark": "peers", **head, "rows": rows}
            options.json.write_text(json.dumps(content, indent=1) + "\n")

    # of one model all at once, as many as fit, so that they are compared in the same rounds
    for chosen in [PEERS] if len(options.models) == 1 else [FIRST, [p for p in PEERS if p not in FIRST]]:
        for case in options.models:
            peers = [p for p in PEERS if p in chosen and p in options.peers]
            peers = [p for p in peers if p != "plain-torchvision" or case in VISION]
            if peers:
                Measured(case, options, deadline).run(peers, keep)
    return None


if __name__ == "__main__":
    main()
