"""Runs of a user's own models and data: typed words as the launcher would take them, ranks that train."""

import signal
from pathlib import Path

from dtrain.commands.verify.compare import compose
from dtrain.config.run_file import save
from dtrain.launch.arguments import prepare_arguments
from dtrain.launch.resolve import resolve
from tests.world import train

WORDS = (
    "train.steps=6", "train.global_batch_size=8", "train.eval_every=0", "train.eval_batches=1", "optim.lr=1e-2",
    "schedule.warmup_steps=2", "checkpoint.every=0",
)  # fmt: skip


def own_run(run_dir: Path, size: int, *words: str, code: int | None = 0, env: dict[str, str] | None = None) -> Path:
    """Train from these words to the end, again if the folder holds a run: it resumes. code=None: it is killed."""
    has_epochs = any(word.startswith("train.epochs=") for word in words)
    given = [word for word in WORDS if not (has_epochs and word.startswith("train.steps="))]
    given += [f"cluster.processes={size}", f"run_dir={run_dir}.new", *words]
    config = resolve(compose(prepare_arguments(given))) | {"run_dir": str(run_dir)}
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    save(run_dir, config)
    codes = train(run_dir, size, env)
    is_as_expected = -signal.SIGKILL in codes if code is None else codes == [code] * size
    assert is_as_expected, (codes, (run_dir / "logs" / "rank-0.log").read_text()[-2000:])
    return run_dir
