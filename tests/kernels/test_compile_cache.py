"""What is compiled is kept: one rank compiles, others and later starts load; never what is damaged or foreign."""

from __future__ import annotations

import os
import shutil
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.compiler._cache import CacheArtifact, CacheArtifactFactory, CacheArtifactManager

from dtrain.commands.verify import world
from dtrain.commands.verify.compare import compose
from dtrain.commands.verify.world import World
from dtrain.config.build import TRUST
from dtrain.config.run_file import save
from dtrain.kernels import compile_cache
from dtrain.kernels.compile_cache import CompileCache, Inductor, name_of
from dtrain.launch.arguments import prepare_arguments
from dtrain.launch.resolve import resolve
from dtrain.runs.protocol import Deadline
from dtrain.util import checked_file
from tests.world import losses, summary, wait_for

TORCHS = "TORCHINDUCTOR_CACHE_DIR"  # the folder of a machine


@CacheArtifactFactory.register
class Graph(CacheArtifact):
    """What torch stores of a compiled graph; here a file in its machine's folder."""

    def populate_cache(self) -> None:
        Path(os.environ[TORCHS], self.key).touch()

    @staticmethod
    def type() -> str:
        return "dtrain_test"


class Torch:
    """Stands in for the compiler of a process: what it has compiled or loaded is recorded as torch does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_compiled = self.num_loaded = 0
        self.restart()
        monkeypatch.setattr(compile_cache, "num_compiled", lambda: self.num_compiled)
        monkeypatch.setattr(compile_cache, "num_loaded", lambda: self.num_loaded)

    def restart(self) -> None:
        CacheArtifactManager.clear()

    def compile(self, name: str) -> str:
        file = Path(os.environ[TORCHS], name)
        self.num_loaded += file.exists()
        self.num_compiled += not file.exists()
        file.touch()
        CacheArtifactManager.record_artifact(Graph.type(), name, b"")
        return name


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Torch:
    """A machine and a user of its own."""
    monkeypatch.setenv(TORCHS, str(tmp_path / "a"))
    monkeypatch.setenv(compile_cache.VARIABLE, str(tmp_path / "shared"))
    monkeypatch.setattr(compile_cache, "QUIET_S", 0.05)
    monkeypatch.setattr(compile_cache, "_current", None)
    return Torch(monkeypatch)


def begin(about: dict[str, Any] | None = None) -> CompileCache:
    found = compile_cache.begin(about or {"a": 1})
    assert found is not None
    found.stores = found.takes_turns = True
    return found


def stored(cache: CompileCache) -> list[str]:
    found = CacheArtifactManager.deserialize(checked_file.read(cache.path, cache.about)[0])
    return [artifact.key for artifact in (found or {})[Graph.type()]]


def graphs(path: str) -> set[str]:
    return {name for name in os.listdir(path) if name != compile_cache.MARKS}


def test_another_machine_finds_what_was_stored(machine: Torch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = begin()
    assert not cache.found
    assert cache.compile(lambda: machine.compile("one"), lambda: "1") == "one"
    totals = compile_cache.finish()
    assert (totals["found"], totals["graphs_compiled"], totals["graphs_loaded"]) == (False, 1, 0)
    assert stored(cache) == ["one"]
    assert begin().found and not begin({"a": 2}).found and begin({"a": 2}).path != cache.path

    monkeypatch.setenv(TORCHS, str(tmp_path / "b"))
    there, written = begin(), cache.path.stat().st_ino
    assert there.found and graphs(str(tmp_path / "b")) == {"one"}
    there.compile(lambda: machine.compile("one"), lambda: "1")
    assert (compile_cache.finish()["graphs_loaded"], cache.path.stat().st_ino) == (1, written), "nothing new"
    (tmp_path / "b" / "one").unlink()
    begin()
    assert graphs(str(tmp_path / "b")) == set(), "it was put there once, and torch has the rest"


def test_all_graphs_are_stored_by_one_rank_whoever_compiled_them(machine: Torch, caplog: Any) -> None:
    cache = begin()
    cache.stores = False
    cache.compile(lambda: machine.compile("one"), lambda: "1")
    compile_cache.finish()
    assert not cache.path.exists()
    cache.stores = True
    compile_cache.finish()
    assert stored(cache) == ["one"]
    machine.compile("two")  # an earlier run, or another rank, just now
    cache.compile(lambda: machine.compile("two"), lambda: "2")
    compile_cache.finish()
    assert stored(cache) == ["one", "two"]
    machine.restart()
    begin().compile(lambda: machine.compile("three"), lambda: "3")
    compile_cache.finish()
    assert stored(cache) == ["one", "two", "three"], "what a run does not need stays"
    assert not caplog.records


def test_a_run_ends_well_though_torchs_folder_was_deleted(machine: Torch, caplog: pytest.LogCaptureFixture) -> None:
    cache = begin()
    cache.compile(lambda: machine.compile("one"), lambda: "1")
    shutil.rmtree(cache.marks)
    assert compile_cache.finish()["graphs_compiled"] == 1
    assert "not stored" in caplog.text


def test_it_is_stored_while_training_goes_on(machine: Torch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = begin()
    for names in (["one"], ["one", "two"]):
        cache.compile(partial(machine.compile, names[-1]), partial(str, names[-1]))
        deadline = Deadline(10)
        while not (cache.path.exists() and stored(cache) == names) and deadline.left() > 0:
            time.sleep(0.01)
        assert stored(cache) == names
    monkeypatch.setenv(TORCHS, str(tmp_path / "b"))
    assert begin().found and graphs(str(tmp_path / "b")) == {"one", "two"}


def test_what_is_damaged_or_not_ones_own_is_compiled_again(machine: Torch, caplog: pytest.LogCaptureFixture) -> None:
    cache = begin()
    checked_file.write(cache.path, cache.about, compile_cache.serialize([Graph("one", b"")]))
    assert begin().found
    whole = cache.path.read_bytes()
    damages = {
        "its checksum is wrong": lambda: cache.path.write_bytes(whole[:-1] + b"?"),
        "this user's own": lambda: (cache.path.write_bytes(whole), cache.path.chmod(0o666)),
        "for something else": lambda: checked_file.write(cache.path, {"torch": "1"}, b""),
        "torch cannot read it": lambda: checked_file.write(cache.path, cache.about, b"bad"),
    }
    for message, damage in damages.items():
        damage()
        assert not begin().found and message in caplog.text and not cache.path.exists()


def test_it_can_be_switched_off(
    machine: Torch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in ((compile_cache.VARIABLE, "none"), ("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")):
        with monkeypatch.context() as changed:
            changed.setenv(name, value)
            assert compile_cache.begin({}) is None
    assert compile_cache.finish()["found"] is None and not (tmp_path / "shared").exists()
    shared = tmp_path / "shared" / f"dtrain-compiled-{os.geteuid()}"
    shared.mkdir(parents=True)
    shared.chmod(0o777)
    assert compile_cache.begin({}) is None and "compile cache: off" in caplog.text


def test_of_equal_graphs_one_is_compiled_and_the_others_wait(machine: Torch) -> None:
    cache, order, lock = begin(), [], threading.Lock()

    def take_turn() -> None:
        own = CompileCache({"a": 1})  # another rank
        own.takes_turns = True

        def compile_graph() -> None:
            with lock:
                order.append("begin")
            time.sleep(0.1)
            with lock:
                order.append("end")

        own.compile(compile_graph, lambda: "same")

    threads = [threading.Thread(target=take_turn) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert order[:2] == ["begin", "end"] and len(order) == 6

    def fails() -> None:
        raise RuntimeError("no compiler")

    with pytest.raises(RuntimeError):
        cache.compile(fails, lambda: "bad")
    assert not (cache.marks / "bad.compiled").exists() and cache.compile(lambda: 7, lambda: "bad") == 7


def test_a_graph_is_named_by_what_it_computes() -> None:
    def named(function: Any, *inputs: Any) -> str:
        return name_of(torch.fx.symbolic_trace(function), inputs)

    def twice(x: Any) -> Any:
        return x * 2

    def thrice(x: Any) -> Any:
        return x * 3

    one = torch.ones(2, 3)
    assert named(twice, one) == named(twice, one + 1)
    others = [one.double(), one.T, one[:1], one.clone().requires_grad_(), 3]
    names = [named(twice, one), named(thrice, one), *(named(twice, other) for other in others)]
    assert len(set(names)) == len(names)
    assert Inductor({"a": 1}) == Inductor({"a": 1}) != Inductor({})


# ---- ranks that train ----------------------------------------------------------------------------------------

NET = (
    "model=tests.kernels.own_net.Net", "data=tests.kernels.own_net.Numbers", "trust=[tests]", "cluster.processes=2",
    "compile=whole", "checkpoint.every=1", "train.steps=400", "train.global_batch_size=8", "train.eval_batches=0",
)  # fmt: skip


def write(run_dir: Path, *words: str) -> Path:
    config = resolve(compose(prepare_arguments([*NET, f"run_dir={run_dir}.new", *words]))) | {"run_dir": str(run_dir)}
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    save(run_dir, config)
    return run_dir


def rank_of(run_dir: Path) -> int:
    """Train without trying out what vector instructions the C++ compiler has: that takes longer than the rest."""
    from torch._inductor import config

    config.cpp.vec_isa_ok = True
    compile_cache.QUIET_S = 0.01  # it stores between the forward and the backward pass
    return world.train_rank(run_dir)


def start(run_dir: Path, tmp_path: Path, node: str) -> World:
    env = {compile_cache.VARIABLE: str(tmp_path / "shared"), TORCHS: str(tmp_path / node), TRUST: "tests"}
    return World(2, rank_of, run_dir, env=env)


def test_of_two_ranks_one_compiles_and_after_a_kill_both_load(tmp_path: Path) -> None:
    first = write(tmp_path / "first", "train.stop_after=2")
    assert start(first, tmp_path, "a").join() == [0, 0]
    found = summary(first)["compile_cache"]
    assert (found["graphs_compiled"], found["graphs_loaded"], found["found"]) == (2, 2, False), "each by one rank"
    assert found["compile_s"] > 0 and summary(first)["start_s"]["compile"] > 0

    killed = write(tmp_path / "killed")
    with start(killed, tmp_path, "a") as ranks:
        wait_for(ranks, killed, 2)
        ranks.kill()
    # its restart on the same machine, and another run on a machine that has nothing but the user's folder
    for run, node in ((killed, "a"), (tmp_path / "third", "b")):
        write(run, f"train.stop_after={2 + max(losses(run), default=0)}")
        assert start(run, tmp_path, node).join() == [0, 0]
        found = summary(run)["compile_cache"]
        assert (found["graphs_compiled"], found["graphs_loaded"], found["found"]) == (0, 4, True), (node, found)
