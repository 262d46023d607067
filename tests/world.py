"""Real worlds for tests: a run folder composed from the real conf/, and ranks that train in it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from dtrain.commands.verify import compare, world
from dtrain.commands.verify.world import World
from dtrain.config.build import TRUST
from dtrain.config.files import CONF, options_of, section
from dtrain.config.hardware import count_gpus, cpu_has_fp16, no_cpu_fp16
from dtrain.config.run_file import save
from dtrain.launch.resolve import resolve
from dtrain.runs.folder import latest_checkpoint

ROOT = Path(__file__).parent.parent
SMALL = [*compare.SMALL, "train.eval_batches=0"]
# by their yaml: a new one is tested without a new test; horovod where it is built, or else its own tests are skipped
STRATEGIES = [name for name in options_of("strategy") if name != "horovod" or find_spec("horovod")]


def start_server() -> None:
    """Not at import: ranks import this file, too."""
    world.start_server(f"dtrain.strategies.{path.stem}" for path in (ROOT / "dtrain" / "strategies").glob("[a-z]*.py"))


def sizes_of(strategy: str, among: Sequence[int] = (2, 4)) -> list[int]:
    """The numbers of ranks that suit the axes in the strategy's yaml."""
    return compare.world_sizes(OmegaConf.load(CONF / "strategy" / f"{strategy}.yaml"), among)


def skip_without_fp16(strategy: str, precision: str = "fp16") -> None:
    """Skip a test of DeepSpeed in fp16 where it has neither a GPU nor a CPU for it, with the launcher's reason."""
    target = section("strategy", strategy)["_target_"]
    if precision == "fp16" and target == "dtrain.strategies.deepspeed.Zero" and not (count_gpus() or cpu_has_fp16()):
        pytest.skip(str(no_cpu_fp16(strategy)).splitlines()[0])


def layouts(*among: int) -> list[tuple[str, int]]:
    """Every strategy at every number of ranks that suits it."""
    return [(strategy, size) for strategy in STRATEGIES for size in sizes_of(strategy, among)]


def make_run(run_dir: Path, *overrides: str) -> Path:
    """A run folder as the launcher would write it, from SMALL and more overrides."""
    # a folder that holds a run already is refused to users; tests change a run's configuration under it
    config = resolve(compare.compose([*SMALL, f"run_dir={run_dir}.new", *overrides])) | {"run_dir": str(run_dir)}
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    save(run_dir, config)
    return run_dir


def train(run_dir: Path, size: int = 1, env: dict[str, str] | None = None) -> list[int | None]:
    """Train the run with `size` ranks to its end; exit codes. A rank's failure is printed."""
    codes = start(run_dir, size, env).join()
    for note in sorted((run_dir / "logs").glob("failure-*.json")):
        print(json.loads(note.read_text())["traceback"])
    return codes


def start(run_dir: Path, size: int = 1, env: dict[str, str] | None = None) -> World:
    start_server()
    typed = ",".join(OmegaConf.load(run_dir / "config.yaml").trust)  # by the test, which wrote the folder
    return World(size, world.train_rank, run_dir, env={TRUST: typed, **(env or {})})


def spawn(size: int, function: Callable[..., Any], *arguments: Any, timeout: float = 120) -> None:
    """Run a collective test function on `size` ranks of one process group; fail if one of them fails."""
    start_server()
    codes = World(size, _in_group, function, *arguments).join(timeout)
    assert codes == [0] * size, codes


def _in_group(function: Callable[..., Any], *arguments: Any) -> int:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    function(*arguments)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []


def wait_for(ranks: World, run_dir: Path, step: int) -> None:
    """Until that step was seen, and a checkpoint: it is written beside the steps, on a busy machine long after."""
    while not ((done := metrics(run_dir)) and done[-1]["step"] >= step and latest_checkpoint(run_dir)):
        assert ranks.ranks[0].exitcode is None
        time.sleep(0.001)


def losses(run_dir: Path) -> dict[int, float]:
    return {m["step"]: m["loss"] for m in metrics(run_dir) if "loss" in m}


def summary(run_dir: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return result
