"""What does each word of strategy.compress send, cost in loss, and save in time? gpt2-tiny on text, ddp on CPUs.

    python benchmarks/compression.py [--parts bytes loss time] [--json benchmarks/results/compression-cpu.json]

- bytes: what the kernel counted on the loopback of a network namespace of its own, per rank and step, against
  dtrain.plan.compression. Runs of 12 and of 2 steps send the same at their start and end.
- loss: 200 steps on two ranks, against ddp without compression.
- time: two ranks in two namespaces, joined by a link that a token bucket (tc tbf) holds at 100 Mbit/s or 1 Gbit/s in
  each direction. Rounds are interleaved; a row is the median step of all rounds.

Needs root, `ip` and `tc`. The batch of `time` is small (1 sample a rank), so that the network is the bill: with a
larger one, computation hides what compression saves.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import statistics
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from throughput import environment

from dtrain.commands.verify import compare, world
from dtrain.config.run_file import save
from dtrain.plan.compression import gradient_shapes, sent_bytes
from dtrain.plan.model_shape import shape_of

WORDS = ("none", "fp16", "bf16", "int8", "powersgd", "topk", "onebit")
RATES = {"100 Mbit/s": "100mbit", "1 Gbit/s": "1gbit"}
MODEL = ["model=gpt2-tiny", "strategy=ddp", "checkpoint.every=0", "train.eval_every=0", "train.log_every=1"]
TEXT = ["data=stdlib", "train.steps=200", "optim.lr=2e-3", "train.global_batch_size=8", "train.eval_batches=8"]
TIMED = ["data=synthetic", "train.steps=25", "train.eval_batches=0", "train.global_batch_size=2"]
# larger, so that what else is sent in a step (votes, losses, acknowledgements: some kB) counts little
COUNTED = ["model.num_layers=8", "model.dim=256", "model.seq_len=16", "data=synthetic", "train.eval_batches=0"]
COUNTED += ["train.global_batch_size=8", "train.micro_batch_size=1", "schedule.warmup_steps=0"]
CLONE_NEWNET = 0x40000000


def sh(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True)


def enter(namespace: str) -> None:
    """Move this process into a network namespace."""
    with open(f"/var/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")


@contextlib.contextmanager
def namespaces(count: int) -> Iterator[list[str]]:
    """Namespaces of this process, with a loopback; two are joined by a link: 10.77.0.1 and 10.77.0.2 on eth0."""
    names = [f"dtrain-compress-{os.getpid()}-{i}" for i in range(count)]
    try:
        for name in names:
            sh(f"ip netns add {name}")
            sh(f"ip -n {name} link set lo up")
        if count == 2:
            sh(f"ip -n {names[0]} link add eth0 type veth peer name eth0 netns {names[1]}")
            for i, name in enumerate(names):
                sh(f"ip -n {name} addr add 10.77.0.{i + 1}/24 dev eth0")
                sh(f"ip -n {name} link set eth0 up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def in_namespace(names: list[str], run_dir: Path, env: dict[str, str]) -> int:
    """One rank in its own namespace; with a link of its own it is timed, and runs ahead of what else happens here."""
    enter(names[int(os.environ["RANK"]) % len(names)])
    os.environ |= env
    with contextlib.suppress(OSError):
        os.nice(-15)
        if len(names) > 1:
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(20))
    return world.train_rank(run_dir)


def train(word: str, ranks: int, overrides: list[str], names: list[str], folder: Path, env: dict[str, str]) -> Path:
    cfg = compare.compose([*MODEL, *overrides, f"strategy.compress={word}"])
    case = compare.make_case("ddp", ranks, "fp32", cfg, folder)
    assert not case.refused, case.refused
    (folder / "logs").mkdir(parents=True)
    save(folder, case.config)
    with world.World(ranks, in_namespace, names, folder, env) as started:
        problem = world.failure(folder, started.join(600))
    if problem:
        raise RuntimeError(problem)
    return folder


def steps_of(run_dir: Path, key: str) -> list[float]:
    return [row[key] for row in compare.steps_of(run_dir).values() if key in row]


# ---- the parts -----------------------------------------------------------------------------------------------


def count_bytes(rows: dict[str, dict[str, Any]], folder: Path) -> None:
    shape = shape_of(compare.compose([*MODEL, *COUNTED]))
    assert shape is not None
    for ranks in (2, 4):
        for word in WORDS:
            sent = {}
            with namespaces(1) as names:
                for steps in (2, 12):
                    before = sent_on_lo(names[0])
                    overrides = [*COUNTED, f"train.steps={steps}"]
                    train(word, ranks, overrides, names, folder / f"bytes-{word}-{ranks}-{steps}", {})
                    sent[steps] = sent_on_lo(names[0]) - before
            counted, expected = (sent[12] - sent[2]) / 10 / ranks, sent_bytes(word, gradient_shapes(shape), ranks)
            row = {"counted": round(counted), "formula": round(expected), "ratio": round(counted / expected, 4)}
            rows[word][f"bytes, {ranks} ranks"] = row
            print(word, ranks, row, flush=True)


def sent_on_lo(name: str) -> int:
    text = subprocess.run(["ip", "netns", "exec", name, "cat", "/proc/net/dev"], capture_output=True, text=True).stdout
    line = next(x for x in text.splitlines() if x.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def train_on_text(rows: dict[str, dict[str, Any]], folder: Path) -> None:
    variants = {word: (word, []) for word in WORDS}
    variants["topk, ratio 0.1"] = ("topk", ["strategy.compress_ratio=0.1"])
    for name, (word, settings) in variants.items():
        with namespaces(1) as names:
            run = train(word, 2, [*TEXT, *settings], names, folder / f"loss-{name}", {})
        summary = json.loads((run / "summary.json").read_text())
        last = statistics.mean(steps_of(run, "loss")[-20:])
        rows[name] |= {"loss": round(last, 4), "val_loss": round(summary["val_loss"], 4)}
        rows[name]["val_loss_to_ddp"] = round(summary["val_loss"] - rows["none"]["val_loss"], 4)
        print(name, rows[name], flush=True)


def time_steps(
    rows: dict[str, dict[str, Any]], folder: Path, rounds: int, words: Sequence[str], rates: Sequence[str]
) -> None:
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    env = {"MASTER_ADDR": "10.77.0.1", "GLOO_SOCKET_IFNAME": "eth0"}
    with namespaces(2) as names:
        for i in range(rounds):
            for rate, limit in ((rate, RATES[rate]) for rate in rates):
                for name in names:
                    sh(f"tc -n {name} qdisc replace dev eth0 root tbf rate {limit} burst 128kb latency 400ms")
                for word in words:
                    run = train(word, 2, TIMED, names, folder / f"time-{word}-{limit}-{i}", env)
                    seconds[word, rate] += steps_of(run, "step_s")[5:]
                    median = statistics.median(seconds[word, rate])
                    speed = statistics.median(seconds["none", rate]) / median
                    rows[word][rate] = {"step_s": round(median, 4), "speed_to_ddp": round(speed, 2)}
                    print(i, word, rate, rows[word][rate], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", default=["bytes", "loss", "time"], choices=["bytes", "loss", "time"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--words", nargs="*", default=WORDS, choices=WORDS, help="of the part time; none is needed")
    parser.add_argument("--rates", nargs="*", default=list(RATES), choices=list(RATES))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    world.start_server(["dtrain.strategies.ddp"])
    rows: dict[str, dict[str, Any]] = defaultdict(dict)
    if options.json and options.json.exists():  # parts that were measured before stay
        rows.update(json.loads(options.json.read_text())["rows"])
    with tempfile.TemporaryDirectory() as folder:
        if "bytes" in options.parts:
            count_bytes(rows, Path(folder))
        if "loss" in options.parts:
            train_on_text(rows, Path(folder))
        if "time" in options.parts:
            time_steps(rows, Path(folder), options.rounds, options.words, options.rates)
    if options.json:
        setting = {"loss": TEXT, "time": TIMED, "bytes": COUNTED}
        content = {"benchmark": "compression", **environment(), "settings": setting, "rows": rows}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
