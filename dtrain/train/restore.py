"""Load the newest good checkpoint of a run: at its start, and after a spike."""

from __future__ import annotations

import itertools
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from dtrain.checkpoint import ownership, store
from dtrain.checkpoint.background import Saver
from dtrain.config.build import locate
from dtrain.config.files import TARGET
from dtrain.config.run_file import Settings
from dtrain.data.loader import Loader
from dtrain.data.stream_loader import StreamLoader
from dtrain.errors import CheckpointError
from dtrain.runs.folder import read_json
from dtrain.runs.source_lines import at_def, has_changed
from dtrain.strategies.base import Strategy
from dtrain.train.fresh_state import FreshState
from dtrain.train.process import log
from dtrain.train.run import Run
from dtrain.train.spikes import SpikeError
from dtrain.util.collective import from_rank_0
from dtrain.util.format import as_dict, short_path

FIX = "\n  fix: "
# settings of a run folder that are repeated in a command to paste: the folder may be someone else's
LEFT_OUT = ("resume", "resume_allow", "run_dir", "name", "trust")  # of a run that starts anew
PLAIN = re.compile(
    r"(model|data|loss|optim|schedule|strategy|precision|train|checkpoint)(\.\w+)*=[\w.+-]+|cluster(\.processes)?=[\w-]+"
)
FORKED = "is_forked"  # of what load_newest returns: it is the first checkpoint of a fork, saved by another run


def continue_stream(data: Loader | StreamLoader, saved: dict[str, Any]) -> None:
    if isinstance(data, StreamLoader):
        data.load(saved.get("stream"))


def load_newest(
    saver: Saver, cfg: Settings, strategy: Strategy, data_identity: str, fresh: FreshState
) -> tuple[Path, int, int, dict[str, Any]] | None:
    """Load the newest good checkpoint of a run; return its path, step, samples and what else its manifest has."""
    found = saver.newest_good(strategy.needed_to_resume())
    if found is None:
        if cfg.get("fork"):
            raise CheckpointError(f"the checkpoint that this run was forked from is gone. Fix: fork={cfg.fork} again")
        return None
    path, manifest = found
    anew = from_rank_0(lambda: started_anew(path), f"reading {saver.folder}")
    parts = anew or []
    if manifest["data"] != data_identity and "data" not in (*cfg.resume_allow, *parts):
        raise ValueError(
            f"data: differs from what this run has trained on ({manifest['data']} then, {data_identity} now)\n"
            "  fix: restore the old data, or allow the new: 'resume_allow=[data]'"
        )
    state, saved, extra = strategy.state_dict(), manifest, manifest["extra"]
    if "optimizer" in parts:  # that of another optimizer: this one starts as in a new run
        saved = replace(manifest, tensors={k: v for k, v in manifest.tensors.items() if k.startswith("model.")})
        extra = fresh.extra_of(strategy, state) | {"base": extra.get("base")}
    kept = {name: held for name, held in state.items() if name in saved.tensors or saved is manifest}
    try:
        store.load(path, saved, kept)
    except ValueError as error:
        if not hasattr(error, "differences"):
            raise
        raise of_changed_model(cfg, path, error) from error
    strategy.load_state_dict(state, extra)
    log.info("resumed from %s", path)
    meta = manifest.meta | {FORKED: anew is not None}
    if manifest["data"] != data_identity:  # a cursor of another stream
        meta.pop("stream", None)
    if "data" in parts:  # other data: read from its start
        return path, manifest["step"], 0, meta | {"spikes": {}, "hooks": {}}
    return path, manifest["step"], manifest["samples"], meta


def of_changed_model(cfg: Settings, path: Path, error: ValueError) -> ValueError:
    """Explain a checkpoint of another model by what was changed: the user's class, or a setting."""
    target = cfg.model[TARGET]
    made_by = locate(target, cfg.trust)
    changed = has_changed(target, made_by, path, error.differences)  # type: ignore[attr-defined]
    fix = f"put the old code of {target} back, and type the same command again" if changed else "use the old settings"
    fix = f"{changed or str(error).partition(FIX)[0]}{FIX}{fix}"
    run_dir = path.parents[1]
    launches = from_rank_0(lambda: read_json(run_dir / "launch.json").get("launches"), "reading launch.json")
    if not launches:
        return at_def(ValueError(fix), made_by)
    words = [word.lstrip("+") for one in (launches[0], launches[-1]) for word in as_dict(one).get("overrides") or ()]
    if any(not PLAIN.fullmatch(word) and word.partition("=")[0] not in LEFT_OUT for word in words):
        return at_def(ValueError(f"{fix}; or a new run, with another run_dir"), made_by)
    typed = {word.partition("=")[0]: word for word in words if PLAIN.fullmatch(word)}
    new = next(name for n in itertools.count(2) if not (name := run_dir.with_name(f"{run_dir.name}-{n}")).exists())
    command = shlex.join(["launch", *typed.values(), f"run_dir={short_path(new)}"])
    return at_def(ValueError(f"{fix}; or train this model from the start: dtrain {command}"), made_by)


def started_anew(path: Path) -> list[str] | None:
    """Return what a fork does not take over from its first checkpoint: optimizer, data (launch/fork.py).

    None: it is a checkpoint of the run itself.
    """
    anew = ownership.forked_from(path.parent).get("anew", [])
    return [str(part) for part in anew if isinstance(anew, list)] if ownership.is_forked(path) else None


def roll_back(run: Run, saver: Saver) -> None:
    """After a spike: load the newest checkpoint, and pass over the samples of the spike from now on."""
    spike = run.spikes.rollback_from
    assert spike is not None
    saver.wait()
    known = run.spikes.passed_over
    found = load_newest(saver, run.cfg, run.strategy, run.data_identity, run.fresh)
    if found is None:
        fix = "a smaller checkpoint.every, or train.spike=skip"
        raise SpikeError(f"step {spike.step}: a spike, and there is no checkpoint to go back to. Fix: {fix}")
    run.loaded_from, run.step, run.samples, saved = found
    run.hooks.load(saved.get("hooks", {}), may_continue=True)
    continue_stream(run.train_data, saved)
    run.spikes.restore(saved.get("spikes", {}) | {"passed_over": known})
    run.spikes.pass_over(spike, run.cfg.train.global_batch_size)
    run.spikes.rollback_from = None
    if run.recorder:
        run.recorder.rewind(run.step)
