"""Resume a run: what may differ from the previous launch, and whether the run can resume at all."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from dtrain.checks import profile as profiling
from dtrain.checks.init_from import WITHOUT_WEIGHTS
from dtrain.config.files import CODE, HOOKS, flatten, is_script
from dtrain.config.run_file import allows
from dtrain.config.schema import own_defaults
from dtrain.errors import bad, unknown
from dtrain.runs import record as records
from dtrain.runs.folder import checkpoints, latest_checkpoint, read_summary, write_json
from dtrain.runs.protocol import GO_BACK
from dtrain.util.format import argument, as_dict, counted, shell_path, short_path

# Settings that may change on resume: they define how it runs. Dropout depends on the data ranks and micro-batches.
FREE_ON_RESUME = (
    "strategy", "cluster", "hardware", "preflight", "logger", "profile", "nsys", "choices", "checkpoint", "compile",
    "fused_loss", "cuda_graphs", "deterministic", "activation_checkpointing", "activation_checkpointing_every",
    "train.micro_batch_size", "train.log_every", "train.eval_every", "train.eval_batches", "train.loader_workers",
    "train.stop_after", "train.nonfinite", "train.spike", "train.check_replicas_every", "guard",
    "resume", "fork", "tags", "resume_allow", "run_dir", "name", "trust", "dry_run", "force",
)  # fmt: skip


def check_resume(
    old: dict[str, Any], new: dict[str, Any], allow: Iterable[str], run_dir: Path, typed: Iterable[str] | None = None
) -> None:
    """Reject a resume that would silently compute something else; name what changed and how to allow it.

    A setting that did not exist when the run started (with an older version) has its default, unless it is typed.
    """
    before, after = flatten(old), flatten(new)
    for key, default in own_defaults(old).items():  # of the user's own classes: config.yaml has what was typed
        if (key in before) != (key in after) and key in own_defaults(new):
            before.setdefault(key, default)
            after.setdefault(key, default)
    allow = list(allow)
    for name in allow:
        if not any(key == name or key.startswith(name + ".") for key in (*before, *after)):
            text = str(unknown(name, {*before, *after})).replace(name, f"resume_allow=[{name}]", 1)
            raise ValueError(re.sub(r"did you mean (\S+)\?$", r"'resume_allow=[\1]'", text))
    free = [*FREE_ON_RESUME, *allow]
    if "batch_norm" in new.get("model", {}) and "train.micro_batch_size" not in allow:
        free.remove("train.micro_batch_size")  # batch norm statistics depend on the micro-batch size
    changed = [
        key for key in sorted({*before, *after})
        if before.get(key) != after.get(key) and not any(key == f or key.startswith(f + ".") for f in free)
        and (typed is None or key in before or any(key == t or key.startswith(t + ".") for t in typed))
    ]  # fmt: skip
    if changed:
        diff = "\n".join(f"    {k}: {before.get(k, 'not set')} → {after.get(k, 'not set')}" for k in changed)

        def leave_out(keys: list[str]) -> str:
            words = [t for t in typed or () if any(key == t or key.startswith(t + ".") for key in keys)]
            return f"leave out {' '.join(words or keys)}"

        shapes = [key for key in changed if changes_shapes(key, before, after)]
        rest = [key for key in changed if key not in shapes]
        allowed = f"'resume_allow=[{','.join([*allow, *changed])}]'"
        fix = f"{leave_out(changed)}, or allow what changed: {allowed}"
        if is_longer(before, after) and asked_step(new) is None and read_summary(run_dir).get("status") == "done":
            fix = f"{allowed}, which allows what changed"  # without more steps, nothing is left to do
        if shapes:  # allowing them would only fail later
            is_ours = str(after.get("model._target_")).startswith("dtrain.")
            fix = f"{leave_out(shapes)}: the saved weights {'' if is_ours else 'probably '}have other shapes"
            if rest:
                fix += f"; and allow the rest: 'resume_allow=[{','.join([*allow, *rest])}]'"
            fix += "; for a new run leave out resume="
        raise ValueError(
            f"resume={os.path.relpath(run_dir)}: these settings differ from the run's own, "
            f"and would change what it computes\n{diff}\n  fix: {fix}"
        )


def is_longer(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Is more asked for than the run had, in steps or epochs?"""
    pairs = [(before.get(key), after.get(key)) for key in ("train.steps", "train.epochs")]
    return any(a is not None and a != b and (b is None or a > b) for b, a in pairs)


def changes_shapes(key: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Does a setting decide the names or shapes of the weights? Of a user's own class, any whole number may."""
    if key in ("lora.rank", "lora.targets"):
        return True
    if not key.startswith("model."):
        return False
    if before.get("model._target_") != after.get("model._target_"):
        return True
    if key.partition(".")[2] in WITHOUT_WEIGHTS:
        return False
    if key == "model.seq_len" and "model.rope_theta" in after:  # no weight for each place
        return False
    kinds = {type(values.get(key)) for values in (before, after)}
    return int in kinds and float not in kinds  # a rate of 0.1 that becomes 0 is none


def check_code(old: dict[str, Any], config: dict[str, Any]) -> None:
    """Reject code from a run folder, which may come from someone else, unless the user types it again."""
    for name in CODE:
        then, now = (c.get("cluster", {}).get(name) for c in (old, config))
        if then and name in config["cluster"] and then != now:
            key, value = f"cluster.{name}", json.dumps(then)
            if isinstance(then, dict):  # Hydra's syntax has no quotes around keys
                value = "{" + ", ".join(f"{k}: {json.dumps(v)}" for k, v in then.items()) + "}"
            rule = f"the run was started with {value}, which is never read from a run folder: it may not be yours"
            raise bad(key, now, rule, f"check it; if it is yours, give it again: {key}=…")


def check_queue(config: dict[str, Any], run_dir: Path) -> None:
    """Reject a run whose job is still queued: it resumes by itself, and a second job would interfere."""
    (record,), problem = records.load([run_dir], ask_all=True)
    fix = f"wait for it, or cancel it first: dtrain cancel {shell_path(run_dir)}"
    if record.job and not record.job.ended:
        state = f"its job {record.job.id} is in {record.scheduler}'s queue ({record.job.state.lower()})"
        raise bad("resume", config["resume"], state, fix)
    if record.job_id and record.job is None and not record.is_final:
        why = f"cannot tell whether its job {record.job_id} is still queued ({problem or 'no SLURM commands here'})"
        where = "the API server" if record.on_kubernetes else "squeue"
        raise bad("resume", config["resume"], why, f"try again where {where} answers")


def asked_step(config: dict[str, Any]) -> int | None:
    """Return the step of resume=RUN@STEP; None: from the newest checkpoint."""
    path, at, step = str(config["resume"]).rpartition("@")
    return int(step) if at and path == config["run_dir"] and step.isdecimal() else None


def check_checkpoints(old: dict[str, Any], config: dict[str, Any], run_dir: Path) -> None:
    """Reject a resume of a run that saves nothing."""
    if not is_script(config) and not old.get("checkpoint", {}).get("save", True) and not num_steps_saved(run_dir):
        rule = "the run saves no checkpoint (checkpoint.save=false), so there is nothing to continue from"
        raise bad("resume", config["resume"], rule, "leave out resume= for a new run")
    if config.get("fork") and not checkpoints(run_dir / "checkpoints"):
        rule = "has not even the checkpoint that it was forked from: its launch ended before, or it was removed"
        raise bad("resume", config["resume"], rule, f"{argument('fork', config['fork'])}, which makes a new folder")


def check_unfinished(config: dict[str, Any], run_dir: Path) -> None:
    """Reject a resume that has no steps left: the user probably wants more steps."""
    step = asked_step(config)
    if (
        step is None and read_summary(run_dir).get("status") == "running"
    ):  # killed between its last save and its summary
        return
    if is_script(config):
        if read_summary(run_dir).get("status") == "done":
            rule = "its program has ended with exit code 0"
            raise bad("resume", config["resume"], rule, "leave out resume= for a new run")
        return
    ended = as_dict(read_summary(run_dir).get("ended_by"))
    if step is None and ended and ended.get("hook") in config[HOOKS] and not allows(config["resume_allow"], HOOKS):
        rule = f"hooks={ended['hook']} ended the run after step {ended.get('step')}: {ended.get('reason')}"
        fix = f"to train on without it: hooks=none 'resume_allow=[{HOOKS}]'"
        raise bad("resume", config["resume"], rule, fix)
    done = num_steps_saved(run_dir) if step is None else step
    for key in ("steps", "stop_after"):
        if (config["train"][key] or math.inf) <= done:
            fix = f"train.{key}={2 * done}" + (" 'resume_allow=[train.steps]'" if key == "steps" else "")
            raise bad(f"train.{key}", config["train"][key], f"the run has already done {counted(done, 'step')}", fix)
    epochs, total = config["train"].get("epochs"), read_summary(run_dir).get("total_steps")
    if epochs is not None and epochs == read_summary(run_dir).get("epochs") and (total or math.inf) <= done:
        fix = f"train.epochs={2 * epochs} 'resume_allow=[train.epochs]'"
        raise bad("train.epochs", epochs, f"the run has already done {counted(done, 'step')}", fix)


def check_profile(config: dict[str, Any], run_dir: Path, typed: Iterable[str]) -> None:
    """Check that a profile requested with the resume has enough steps left.

    A profile that the run had from the start does not block the resume: the ranks then report that there is none.
    """
    if any(name == "nsys" or name.partition(".")[0] == "profile" for name in typed):
        step = asked_step(config)
        profiling.check_steps(config, num_steps_saved(run_dir) if step is None else step, read_summary(run_dir))


def num_steps_saved(run_dir: Path) -> int:
    """Return the step a resume starts from, unless the newest checkpoint turns out to be damaged."""
    newest = latest_checkpoint(run_dir)
    return int(newest.name.removeprefix("step-")) if newest else 0


def say_beginning(run_dir: Path, file: TextIO) -> None:
    """Report a resume without a checkpoint; otherwise the run's header shows the step that it resumes from."""
    folder = run_dir / "checkpoints"
    if not checkpoints(folder) and not (folder / "latest").exists():
        print(
            f"{short_path(run_dir)} has no checkpoint yet, so the run starts again from step 1", file=file, flush=True
        )


def go_back(config: dict[str, Any], run_dir: Path, file: TextIO) -> None:
    """Ask the ranks to go back to the step of resume=RUN@STEP; without a step, forget what an earlier launch asked."""
    step, note = asked_step(config), run_dir / "checkpoints" / GO_BACK
    newer = [path.name for path in checkpoints(note.parent) if step is not None and int(path.name[5:]) > step]
    note.unlink(missing_ok=True)
    if newer:
        write_json(note, {"step": step})
        what = f"{newer[-1]} and the metrics" if len(newer) == 1 else f"{len(newer)} newer checkpoints and the metrics"
        where = short_path(note.parent)
        print(f"going back to step {step}: {what} after it are moved to {where}/replaced-…", file=file, flush=True)
