"""Which flipped bits does the guard find? Single bit flips in one rank's memory while it trains, one at a time.

    python benchmarks/bit_flips.py [--flips 300] [--every 10] [--json FILE]

Each flip hits a random rank, tensor, element, bit and step, in one of four places: a weight or the optimizer state
between two steps, a gradient before it is reduced over the ranks (in the backward pass), or a gradient after it. The
same steps run once without checks, to see whether the flip changes a weight, and once with them, with a save at a
random later step. All flips of a strategy happen in one world of ranks, which goes back to the same state each time.

    python benchmarks/bit_flips.py --updates [--flips 300] [--every 10] [--json FILE]

The same on one GPU, where AdamW's kernel keeps checksums: flips in weights and optimizer state, in fp32 and bf16, in a
world of one rank, in which nothing has a replica. Every flip counts as changed, even if no weight follows it.

A gradient that is wrong before the reduction is equally wrong on all replicas. Only a replay of that very step
(`guard.replay_every=1` here) or the spike detector (`train.spike`) can see it: these flips are counted separately.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "planner")]
WORLDS = {"ddp": (3, []), "fsdp": (2, []), "tensor": (2, ["strategy.tp=2"]), "zero1": (2, [])}
PLACES = ("weight", "optimizer", "gradient before", "gradient after")
SMALL = [
    "model=gpt2-tiny", "model.num_layers=2", "model.dim=32", "model.num_heads=4", "model.vocab_size=61",
    "model.vocab_multiple=16", "model.seq_len=16", "data=synthetic", "train.global_batch_size=6",
]  # fmt: skip
HISTORY = 30  # steps before the first flip: the spike detector needs recent losses


class Rank:
    """One rank of a world, whose training can go back to the same state."""

    def __init__(self, overrides: list[str], every: int) -> None:
        import torch
        from replicas import set_up

        from dtrain.config.run_file import Settings
        from dtrain.launch.compose import compose
        from dtrain.train.spikes import limit

        cfg = Settings(compose([*SMALL, *overrides]))
        self.strategy, self.every = set_up(cfg, torch.device("cpu")), every
        self.update, self.first = self.strategy.update, 0
        results = [self.step(step) for step in range(1, HISTORY + 1)]
        self.limits = limit([r.loss for r in results]), limit([r.grad_norm for r in results])
        self.first = -(-HISTORY // every) * every  # a multiple of the interval, so that flips are between two checks
        for step in range(HISTORY + 1, self.first + 1):
            self.step(step)
        self.start = [tensor.clone() for tensor in self.live()]

    def live(self) -> list[Any]:
        """Every tensor that a step changes: weights, masters, optimizer state, update counts, buffers."""
        import torch

        from dtrain.util.dtensor import local

        s = self.strategy
        own = [p for group in s.optimizer.param_groups for p in group["params"]]
        found = [*s.module.parameters(), *s.module.buffers(), *own]
        for state in s.optimizer.state.values():
            found += [value for value in state.values() if isinstance(value, torch.Tensor)]
        return [local(tensor.detach()) for tensor in found]

    def go_back(self) -> None:
        for tensor, before in zip(self.live(), self.start, strict=True):
            tensor.copy_(before)

    def step(self, number: int) -> Any:
        import torch

        s = self.strategy
        generator = torch.Generator().manual_seed(1000 * number + s.data_rank)
        tokens = torch.randint(0, 61, (6 // s.sizes.dp, 17), generator=generator)
        s.set_lr(0.1)
        return s.train_step(tokens[:, :-1], tokens[:, 1:]).read()

    def targets(self, place: str) -> list[tuple[str, Any]]:
        """What this rank holds in a place, by name; a gradient is named by its weight."""
        from dtrain.strategies.replicas import held_tensors
        from dtrain.train.guard import masters
        from dtrain.util.dtensor import local

        trained = {f"model.{name}" for name, p in self.strategy.module.named_parameters() if p.requires_grad}
        held = held_tensors(self.strategy, None) | masters(self.strategy)
        kinds = {"weight": "model.", "optimizer": "optim."}
        if place in kinds:
            names = [n for n in held if n.startswith(kinds[place]) and "*" not in n]
        else:
            names = [n for n in held if n in trained]
        return [(name, local(held[name])) for name in names if local(held[name]).numel()]


def flip(tensor: Any, element: float, bit: int) -> None:
    import torch

    bits = tensor.reshape(-1).view(torch.int32)
    assert bits.data_ptr() == tensor.data_ptr()
    bits[int(element * len(bits))] ^= -(2**31) if bit == 31 else 1 << bit


def arm(rank: Rank, plan: dict[str, Any], step: int) -> Any:
    """Before the steps: where a flip is in a gradient, set it up; return what ends it."""
    import torch.distributed as dist

    from dtrain.util.dtensor import is_dtensor, local

    s, done = rank.strategy, []
    if dist.get_rank() != plan["rank"]:
        return lambda: None
    path, _, leaf = plan["name"].removeprefix("model.").rpartition(".")
    if plan["place"] == "gradient after":

        def update(loss: Any) -> Any:
            if rank.now == step and not done:
                done.append(1)
                if hasattr(s, "zero"):
                    held = [g for group in s.zero.averaged_gradients.values() for g in group if g.numel()]
                    flip(held[int(plan["choice"] * len(held))], plan["element"], plan["bit"])
                else:
                    flip(local(dict(s.module.named_parameters())[f"{path}.{leaf}"].grad), plan["element"], plan["bit"])
            return rank.update(loss)

        s.update = update
        return lambda: setattr(s, "update", rank.update)
    if plan["place"] == "gradient before":
        handles: list[Any] = []

        def wrong(gradient: Any) -> Any:
            if rank.now != step or done:
                return gradient
            done.append(1)
            changed = gradient.clone()
            flip(local(changed), plan["element"], plan["bit"])
            return changed

        def forward(module: Any, _: Any) -> None:  # under fsdp, the gathered weight exists only now
            if rank.now == step and not done and not handles:
                handles.append(getattr(module, leaf).register_hook(wrong))

        parameter = dict(s.module.named_parameters())[f"{path}.{leaf}"]
        if not is_dtensor(parameter):
            return parameter.register_hook(wrong).remove
        handle = s.module.get_submodule(path).register_forward_pre_hook(forward)
        return lambda: [handle.remove(), *(h.remove() for h in handles)]
    return lambda: None


def run(rank: Rank, plan: dict[str, Any] | None, guarded: bool, replay: bool = False) -> dict[str, Any]:
    """The steps around a flip, up to the check that follows it, or to where the guard stops."""
    import torch.distributed as dist

    from dtrain.strategies.replicas import ReplicaError
    from dtrain.train.guard import CorruptionError, Guard

    s, every = rank.strategy, rank.every
    rank.go_back()
    # the flip is in or before this step; a check follows at the end of the interval
    step = rank.first + 1 + (plan["offset"] if plan else 0)
    last = -(-step // every) * every
    guard = Guard(s, every if guarded else 0, 1 if replay else 0)
    end = arm(rank, plan, step) if plan else lambda: None
    found, spiked, saved, is_written = "", False, plan["save"] if plan else 0, False
    try:
        guard.after_step(rank.first)
        for number in range(rank.first + 1, last + 1):
            rank.now = number
            at_rest = plan and plan["place"] in ("weight", "optimizer") and number == step
            if at_rest and dist.get_rank() == plan["rank"]:
                flip(dict(rank.targets(plan["place"]))[plan["name"]], plan["element"], plan["bit"])
            guard.before_step(number)
            result = rank.step(number)
            if number == step:
                spiked = result.loss > rank.limits[0] or result.grad_norm > rank.limits[1]
            is_saved = guarded and number == min(last, step + saved)
            if is_saved:
                guard.replicas.check(number, s.state_dict())
                is_written = True
            guard.after_step(number, is_saved)
    except (ReplicaError, CorruptionError) as error:
        found = str(error)
        if hasattr(s, "engine") and isinstance(error, CorruptionError):
            s.engine.step()  # it keeps gradients until then
        s.optimizer.zero_grad(set_to_none=True)
    finally:
        end()
        s.passes = None
    return {"found": found, "spiked": spiked, "written": is_written, "sums": sums(rank)}


def sums(rank: Rank) -> list[int]:
    """Checksums of this rank's weights, masters and optimizer state."""
    import torch

    from dtrain.strategies.checksums import checksums

    return checksums(rank.live(), torch.device("cpu")).tolist()


def differs(a: list[int], b: list[int], num_weights: int) -> bool:
    """On any rank, in a weight."""
    import torch
    import torch.distributed as dist

    found = torch.tensor([a[:num_weights] != b[:num_weights]], dtype=torch.int32)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found.item())


def flips(overrides: list[str], strategy: str, count: int, every: int, seed: int, file: Path) -> int:
    import torch.distributed as dist

    from dtrain.train import process

    process.join_process_group()
    rank = Rank(overrides, every)
    draw = random.Random(f"{seed} {strategy}")
    held = [*rank.strategy.module.parameters(), *rank.strategy.module.buffers()]
    num_weights = len(held) + sum(len(g["params"]) for g in rank.strategy.optimizer.param_groups)
    usual: dict[int, list[int]] = {}  # by the last step: here always the same
    rows = []
    for i in range(count):
        plan: dict[str, Any] = {
            "place": PLACES[i % len(PLACES)], "rank": draw.randrange(dist.get_world_size()), "choice": draw.random(),
            "element": draw.random(), "bit": draw.randrange(32), "offset": draw.randrange(every),
            "save": draw.randrange(every),
        }  # fmt: skip
        names: list[Any] = [[name for name, _ in rank.targets(plan["place"])]]
        dist.broadcast_object_list(names, src=plan["rank"])
        dist.barrier()
        plan["name"] = names[0][int(plan["choice"] * len(names[0]))]
        if not usual:
            usual[every] = run(rank, None, guarded=False)["sums"]
        alone = run(rank, plan, guarded=False)
        changed = differs(alone["sums"], usual[every], num_weights)
        for replay in (False, True) if plan["place"] == "gradient before" and strategy != "zero1" else (False,):
            guarded = run(rank, plan, guarded=True, replay=replay)
            text = guarded["found"]
            differs_now = differs(guarded["sums"], usual[every], len(guarded["sums"]))
            saved = guarded["written"] and (bool(text) or differs_now)
            blamed = text.partition(" differ")[0].partition(" computed ")[0].partition(" held ")[0]
            parts = plan["name"].removeprefix("model.").removeprefix("optim.").split(" ")[0].rpartition(".")
            weight = parts[0] if plan["place"] == "optimizer" else f"{parts[0]}.{parts[2]}"
            rows.append(
                {
                    "strategy": strategy, "ranks": dist.get_world_size(), **plan, "replay": replay, "changed": changed,
                    "spiked": alone["spiked"], "found": bool(text), "saved": saved, "message": text[:160],
                    "rank_named": f"rank {plan['rank']} (" in blamed, "ranks_named": blamed.count("rank "),
                    "tensor_named": weight in text,
                }
            )  # fmt: skip
    if dist.get_rank() == 0:
        file.write_text(json.dumps(rows))
    dist.barrier()
    return 0


def flips_on_gpu(overrides: list[str], count: int, every: int, seed: int, file: Path) -> int:
    """Each flip: some steps with the guard until it stops; then the state before the flip is loaded again."""
    import torch
    from replicas import set_up

    from dtrain.config.run_file import Settings
    from dtrain.launch.compose import compose
    from dtrain.train import process
    from dtrain.train.guard import CorruptionError, Guard

    device = process.join_process_group()
    cfg = Settings(compose([*SMALL, *overrides]))
    strategy, draw = set_up(cfg, device), random.Random(seed)
    guard, held, names = Guard(strategy, every, 0), [], []

    def step(number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(0, 61, (6, 17), generator=generator).to(device)
        strategy.set_lr(0.1)
        guard.before_step(number)
        strategy.train_step(tokens[:, :-1], tokens[:, 1:])
        guard.after_step(number)

    for number in range(1, HISTORY + 1):  # any error here is a false alarm
        step(number)
    for name, p in strategy.module.named_parameters():
        for kind, tensor in {"weight": p.detach(), **strategy.optimizer.state[p]}.items():
            names.append((name, kind))
            held.append(tensor)
    start, rows = [tensor.clone() for tensor in held], []
    for _ in range(count):
        for tensor, before in zip(held, start, strict=True):
            tensor.copy_(before)
        guard = Guard(strategy, every, 0)
        at, place = draw.randrange(1, 2 * every), draw.randrange(len(held))
        size = held[place].element_size()
        words = held[place].data.view(-1).view({4: torch.int32, 2: torch.int16}[size])  # which torch does not count
        element, bit, message, number = draw.randrange(len(words)), draw.randrange(8 * size), "", 0
        saves = draw.random() < 0.3  # a save right after the flip, instead of the next comparison
        try:
            for number in range(1, 4 * every):
                if number == at:
                    words[element] ^= -(1 << bit) if bit == 8 * size - 1 else 1 << bit
                    if saves:
                        guard.before_save(number)
                step(number)
        except CorruptionError as error:
            message = str(error)
        name, kind = names[place]
        rows.append(
            {
                "name": name, "kind": kind, "dtype": str(held[place].dtype), "bit": bit, "at": at, "saves": saves,
                "found": bool(message), "tensor_named": f" model.{name}, " in message, "steps_later": number - at,
            }
        )  # fmt: skip
    file.write_text(json.dumps(rows))
    return 0


def updates(options: argparse.Namespace) -> None:
    from dtrain.commands.verify.world import World

    rows: list[dict[str, Any]] = []
    common = ["strategy=ddp", "cluster.processes=1", "cuda_graphs=none"]
    for precision in ("bf16", "bf16-pure"):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "rows.json"
            arguments = ([*common, f"precision={precision}"], options.flips // 2, options.every, options.seed, file)
            codes = World(1, flips_on_gpu, *arguments).join(3600)
            if any(codes):
                sys.exit(f"{precision}: the rank ended with {codes}")
            rows += [{"precision": precision, **row} for row in json.loads(file.read_text())]
    lines = []
    for precision, kind in dict.fromkeys((row["precision"], row["kind"]) for row in rows):
        some = [row for row in rows if (row["precision"], row["kind"]) == (precision, kind)]
        late = max((row["steps_later"] for row in some if row["found"]), default=None)
        found, named = (sum(row[key] for row in some) for key in ("found", "tensor_named"))
        lines.append(
            {"precision": precision, "kind": kind, "flips": len(some), "found": found, "tensor": named, "latest": late}
        )
    print("".join(f"{head:>12}" for head in lines[0]))
    for line in lines:
        print("".join(f"{value!s:>12}" for value in line.values()))
    if options.json:
        from throughput import environment

        content = {"benchmark": "bit_flips --updates", **environment(), "every": options.every, "table": lines}
        options.json.write_text(json.dumps(content | {"flips": rows}, indent=1) + "\n")


def table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    groups: dict[tuple[str, str, bool], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["strategy"], row["place"], row["replay"]), []).append(row)
    lines = []
    order = sorted(groups, key=lambda group: (group[0], PLACES.index(group[1]), group[2]))
    for strategy, place, replay in order:
        some = groups[strategy, place, replay]
        counted = [row for row in some if row["changed"]]
        found = [row for row in counted if row["found"]]
        count = Counter(key for row in found for key in ("rank_named", "tensor_named") if row[key])
        lines.append(
            {
                "strategy": strategy, "place": place, "replay": replay, "flips": len(some), "changed": len(counted),
                "found": len(found), "rank": count["rank_named"],
                "only_that_rank": sum(row["rank_named"] and row["ranks_named"] == 1 for row in found),
                "tensor": count["tensor_named"], "saved": sum(row["saved"] for row in counted),
                "spiked": sum(row["spiked"] for row in counted),
            }
        )  # fmt: skip
    return lines


def main() -> None:
    from dtrain.commands.verify.world import World

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=300)
    parser.add_argument("--every", type=int, default=10, help="guard.replicas_every")
    parser.add_argument("--strategies", nargs="*", choices=list(WORLDS), default=list(WORLDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--updates", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.updates:
        return updates(options)
    rows: list[dict[str, Any]] = []
    for strategy in options.strategies:
        size, overrides = WORLDS[strategy]
        words = [f"strategy={strategy}", f"cluster.processes={size}", *overrides]
        count = options.flips // len(options.strategies)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "rows.json"
            codes = World(size, flips, words, strategy, count, options.every, options.seed, file).join(3600)
            if any(codes):
                sys.exit(f"{strategy}: ranks ended with {codes}")
            rows += json.loads(file.read_text())
        if options.json:  # after each strategy, because all of them take long
            from throughput import environment

            content = {"benchmark": "bit_flips", **environment(), "every": options.every, "table": table(rows)}
            options.json.write_text(json.dumps(content | {"flips": rows}, indent=1) + "\n")
    lines = table(rows)
    print("".join(f"{head:>16}" for head in lines[0]))
    for line in lines:
        print("".join(f"{value!s:>16}" for value in line.values()))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
