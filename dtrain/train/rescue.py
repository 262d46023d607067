"""After a peer was killed: a rank that holds a full copy of the state saves it alone, so that no step is lost.

Only in elastic runs under ddp on CPUs. With NCCL, torch's watchdog ends the survivors; under other strategies each rank
holds a part. A model with buffers (batch norm) may have changed them in the step that was interrupted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from dtrain.checkpoint import store
from dtrain.runs import causes
from dtrain.runs.folder import newest_metrics
from dtrain.runs.protocol import ELASTIC, RESCUE_FILE
from dtrain.runs.recorder import Recorder
from dtrain.strategies.ddp import DDP
from dtrain.train.process import log
from dtrain.train.run import Run


@contextmanager
def on_lost_peer(run: Run) -> Iterator[None]:
    """If a collective fails because a peer is gone, save the state of the last finished step."""
    try:
        yield
    except Exception as error:
        if ELASTIC in os.environ and causes.is_lost_peer(error) and holds_everything(run) and claims(run):
            try:
                save_alone(run)
            except Exception:  # the run continues from the newest checkpoint
                log.exception("what this rank holds could not be saved")
        raise


def holds_everything(run: Run) -> bool:
    """Is this rank's state that of the whole run? The update comes after the last collective of a step.

    Not with Muon, whose update has collectives: a part of the weights may be one step ahead.
    """
    if type(run.strategy) is not DDP or run.device.type != "cpu" or run.step == run.summary["start_step"]:
        return False
    if getattr(run.strategy.optimizer, "pieces", None) is not None:
        return False
    if run.hooks.all:  # they have not seen this step
        return False
    if run.strategy.compressor is not None and run.strategy.compressor.state:  # other ranks hold their own errors
        return False
    return next(run.strategy.module.buffers(), None) is None


def claims(run: Run) -> bool:
    """One survivor saves: the first."""
    try:
        os.close(os.open(run.folder / RESCUE_FILE, os.O_CREAT | os.O_EXCL, 0o600))
    except OSError:
        return False
    return True


def save_alone(run: Run) -> None:
    meta: dict[str, Any] = run.checkpoint_meta(alone=True)
    dist.destroy_process_group()  # from now on, this rank is a world of one
    meta["extra"] = run.strategy.extra_state()
    state = run.strategy.state_dict()
    store.save(run.folder / "checkpoints", run.step, state, meta, run.cfg.checkpoint.keep, best=run.best.rule)
    logged = newest_metrics(run.folder).get("steps", 0)  # rank 0 may have been killed before it logged the last step
    run.recorder = run.recorder or Recorder(run.folder, run.step)
    for finished in run.recent:
        if finished.step > logged:
            run.recorder.write(**run.step_metrics(finished))
    log.info("a peer was lost: saved step %d alone", run.step)
