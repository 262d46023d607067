"""Build everything that the training loop needs from a run's configuration, and load the newest good checkpoint."""

from __future__ import annotations

import itertools
import math
import os
import re
import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtrain.checkpoint import ownership, store
from dtrain.checkpoint.background import Saver
from dtrain.config import run_file, run_length
from dtrain.config.build import build, locate
from dtrain.config.files import TARGET
from dtrain.config.mesh import MeshSizes, batch_sizes, eval_batch_size
from dtrain.config.run_file import Settings, allows
from dtrain.data.adapt import in_memory, open_data
from dtrain.data.check import class_names, dataset_of, name_of, reader_of, without_targets
from dtrain.data.fields import Fields, has_targets
from dtrain.data.loader import Loader
from dtrain.data.stream_loader import StreamLoader
from dtrain.errors import CheckpointError, bad
from dtrain.models.calling import shifts_labels
from dtrain.models.check_model import check_reads, check_trains, of_squashed, of_sum
from dtrain.optim import build as optimizers
from dtrain.optim.schedule import checked
from dtrain.runs.best import METRICS, check_split
from dtrain.runs.folder import newest_metrics, predicted, read_json, write_json
from dtrain.runs.metrics import OWN, own_names
from dtrain.runs.recorder import Recorder
from dtrain.runs.source_lines import at_def, has_changed
from dtrain.strategies.base import Strategy
from dtrain.train import build as models
from dtrain.train import metrics, process
from dtrain.train.best import Best, rule_of
from dtrain.train.fresh_state import FreshState
from dtrain.train.hook_run import HookRun
from dtrain.train.hooks import Hooks
from dtrain.train.pending import FinishedStep
from dtrain.train.process import log
from dtrain.train.spikes import SpikeError, Spikes
from dtrain.train.startup import StartTimes, begin_compile_cache
from dtrain.util.collective import from_rank_0
from dtrain.util.format import as_dict, short_path, start_text

FIX = "\n  fix: "
# settings of a run folder that are repeated in a command to paste: the folder may be someone else's
LEFT_OUT = ("resume", "resume_allow", "run_dir", "name", "trust")  # of a run that starts anew
PLAIN = re.compile(
    r"(model|data|loss|optim|schedule|strategy|precision|train|checkpoint)(\.\w+)*=[\w.+-]+|cluster(\.processes)?=[\w-]+"
)
FORKED = "is_forked"  # of what load_newest returns: it is the first checkpoint of a fork, saved by another run


@dataclass
class Validation:
    """The held-out split, and how much of it an evaluation reads."""

    data: Loader
    batch_size: int
    num_batches: int

    def batches(self, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        """This data rank's share of the batches of an evaluation."""
        for i in range(self.num_batches):
            inputs, targets = self.data.batch(i * self.batch_size)
            yield inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)


@dataclass
class Run:
    """One rank's run. `step` and `samples` are its position; `spikes`, `summary` and the last fields change, too."""

    folder: Path
    cfg: Settings
    device: torch.device
    model: nn.Module
    strategy: Strategy
    schedule: Callable[[int], float]
    mesh: MeshSizes
    train_data: Loader | StreamLoader
    validation: Validation | None
    data_identity: str
    rate: metrics.Rate
    recorder: Recorder | None  # on rank 0
    summary: dict[str, Any]
    last_step: int
    step: int
    samples: int
    spikes: Spikes
    hooks: Hooks
    loaded_from: Path | None
    began: float
    best: Best
    fresh: FreshState
    classes: list[str]
    times: StartTimes
    num_skipped: int = 0
    step_times: list[float] = field(default_factory=list)
    recent: list[FinishedStep] = field(default_factory=list)  # the newest two, for train/rescue.py
    evaluated: tuple[int, dict[str, float]] = (0, {})  # the newest evaluation: its step and metrics
    exposed_comm_s: float | None = None  # of a step, mean of the newest window (stragglers.py)

    def step_metrics(self, finished: FinishedStep) -> dict[str, Any]:
        """A step's line in metrics.jsonl."""
        rate, step_s = self.rate, finished.step_s
        exposed = {} if self.exposed_comm_s is None else {"exposed_comm_s": round(self.exposed_comm_s, 6)}
        return {
            "step": finished.step, "loss": finished.loss, "lr": finished.lr, "grad_norm": finished.grad_norm,
            "tokens": finished.samples * rate.tokens_per_sample, "tokens_per_s": rate.tokens_per_s(step_s),
            "step_s": step_s, "data_s": finished.data_s, "mfu": rate.mfu(step_s),
            "mem_gib": metrics.memory_gib(self.device), **exposed, **self.hooks.train_metrics(finished.step),
        }  # fmt: skip

    def note_start(self, first: FinishedStep) -> None:
        """After the first step: put the seconds of each phase of the start into the summary, and log them."""
        self.summary["start_s"] = self.times.first_step(first)
        if self.strategy.unused:
            self.summary["unused"] = self.strategy.unused
        if self.recorder:
            write_json(self.folder / "summary.json", self.summary)
            log.info("%s", start_text(self.summary["start_s"]))

    def record(self, found: dict[str, float]) -> None:
        """Put the metrics of an evaluation, or of a hook, into the summary and on a line of their own."""
        own = own_names(found)
        self.summary |= found
        if own:
            self.summary["own_metrics"] = sorted({*self.summary.get("own_metrics", ()), *own})
        if self.recorder:
            self.recorder.write(step=self.step, **found, **({OWN: own} if own else {}))

    def checkpoint_meta(self, alone: bool = False) -> dict[str, Any]:
        """What a checkpoint says about the run, besides the strategy's state. alone: without the other ranks."""
        of_hooks, cursor = self.hooks.state(alone), self.train_data.cursor_at(self.samples)
        step, found = self.evaluated
        finite = {name: value for name, value in found.items() if step == self.step and math.isfinite(value)}
        return {
            "samples": self.samples, "data": self.data_identity, "mesh": self.mesh.as_dict(),
            "world_size": dist.get_world_size(), "choices": dict(self.cfg.choices),
            "config_sha256": run_file.fingerprint(self.folder), "spikes": self.spikes.state(), METRICS: finite,
            **({"hooks": of_hooks} if of_hooks else {}), **({"classes": self.classes} if self.classes else {}),
            **({"stream": cursor} if cursor else {}), **getattr(self.model, "_own_names", {}),
        }  # fmt: skip


def set_up(folder: Path, cfg: Settings, device: torch.device, saver: Saver, times: StartTimes) -> Run:
    """Build data, model and strategy, load the checkpoint, and write the first summary."""
    began = time.perf_counter()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    profiler = build(cfg.profile, cfg.trust).begin(folder, rank, device, cfg.nsys)
    batch_size, seed, trust = cfg.train.global_batch_size, cfg.train.seed, cfg.trust

    # ---- data, model, strategy -------------------------------------------------------------------------------
    data = open_data(cfg.data, trust)
    train_set = dataset_of(data, "train", cfg.data)
    val_set = held_out(dataset_of(data, "val", cfg.data), cfg) if cfg.train.eval_batches else None
    data_identity = process.check_same_start(folder, train_set, val_set)
    epochs, per_epoch = cfg.train.get("epochs"), samples_of(train_set)
    cfg.train["steps"] = run_length.steps_of(cfg.train, per_epoch, name_of(train_set))
    warnings = [*of_few_samples(cfg, per_epoch, world_size)]
    times.done("data")
    model = models.make(cfg, trust)  # on the meta device: the strategy decides which shard each rank holds
    models.set_num_targets(model, train_set, val_set)
    check_trains(model)
    warnings += of_squashed(model, cfg.loss[TARGET])
    warnings += of_sum(locate(cfg.loss[TARGET], trust), cfg.loss)
    precision = build(cfg.precision, trust)
    schedule = build(cfg.schedule, trust, partial=True, steps=cfg.train.steps)
    if not cfg.schedule[TARGET].startswith("dtrain."):
        schedule, small = checked(schedule, cfg.schedule[TARGET], cfg.train.steps)
        warnings += small
    chosen: Strategy = build(cfg.strategy, trust)
    strategy = chosen.for_world(world_size)
    if strategy is not chosen:
        log.info("strategy=%s on one rank has nothing to shard: it runs as ddp", cfg.choices.strategy)
    strategy.folder = folder
    mesh = strategy.resolve_mesh(world_size, int(os.environ["LOCAL_WORLD_SIZE"]))
    _, micro_batch_size, accumulation = batch_sizes(cfg, mesh)
    make_optimizer = optimizers.factory(cfg.optim, trust, batch_size)
    strategy.setup(
        model,
        make_optimizer,
        precision=precision,
        device=device,
        first=models.first_weights(cfg),
        micro_batch_size=micro_batch_size,
        max_grad_norm=cfg.train.max_grad_norm,
        activation_checkpointing=cfg.activation_checkpointing,
        activation_checkpointing_every=cfg.activation_checkpointing_every,
        compile=cfg.compile,
        cuda_graphs=cfg.cuda_graphs,
        masked=getattr(train_set, "masked", False),
    )
    classes = class_names(data, cfg.model.get("num_classes", 0))
    if cfg.ema.decay:
        strategy.average_weights(cfg.ema.decay, cfg.ema.evaluate)
    times.done("model")
    if not cfg.optim[TARGET].startswith("dtrain."):
        names = [name for name, p in strategy.module.named_parameters() if p.requires_grad]
        optimizers.check(make_optimizer, strategy.splits_weights(), names)
    reading = {"pin_memory": device.type == "cuda", "workers": cfg.train.loader_workers}
    of_rank = (seed, strategy.data_rank, strategy.data_ranks)
    train_data: Loader | StreamLoader
    if getattr(train_set, "is_stream", False):
        train_data = StreamLoader(train_set, batch_size, *of_rank, reading["pin_memory"])
    else:
        train_data = Loader(train_set, batch_size, *of_rank, **reading)
    sample = train_data.sample()
    if getattr(train_set, "is_stream", False):
        warnings += of_whole_batches(cfg, *sample)
    begin_compile_cache(cfg, strategy, sample)
    if type(model).__module__.startswith("dtrain.") and not cfg.data[TARGET].startswith("dtrain."):
        check_reads(model, *sample, cfg.choices)
    check_batch(model, strategy, *sample, train_set, cfg.loss[TARGET])
    validation, evaluated = None, {"of": 0} if cfg.train.eval_batches else {}  # no such split; not asked for
    if val_set is not None:
        size = eval_batch_size(len(val_set), batch_size, micro_batch_size, mesh, str(cfg.choices.get("data")))
        val_data = Loader(val_set, size, *of_rank, **reading, shuffle=False)
        validation = Validation(val_data, size, min(cfg.train.eval_batches, len(val_set) // size))
        evaluated = {"batches": validation.num_batches, "samples": validation.num_batches * size, "of": len(val_set)}

    batches = partial(validation.batches, device) if validation else lambda: iter(())
    of_run = (folder, cfg, strategy.module, device, min(cfg.train.steps, cfg.train.stop_after or cfg.train.steps))
    view = HookRun(*of_run, strategy.eval_outputs, batches, strategy.begin_evaluation)
    hooks = Hooks(cfg.get("hooks", {}), trust, view)  # an old run has no such section
    times.done("loader")

    if validation is None:
        check_split(cfg, str(cfg.choices.get("data")))
        warnings += hooks.of_no_validation()

    # ---- the newest good checkpoint of this run, whatever layout it was saved under ----------------------------
    fresh = FreshState(cfg.train.spike == "rollback")
    found = load_newest(saver, cfg, strategy, data_identity, fresh)
    loaded_from, step, samples, saved = found or (None, 0, 0, {})
    if epochs is not None:
        check_epochs(folder, cfg, step)
    continue_stream(train_data, saved)
    hooks.load(saved.get("hooks", {}), may_continue=allows(cfg.resume_allow, "hooks") or bool(saved.get(FORKED)))
    times.done("checkpoint")

    # ---- what will run -----------------------------------------------------------------------------------------
    last_step = step if hooks.ended else view.last_step
    rate = metrics.Rate(model, train_data, batch_size, device, precision.dtype, world_size)
    summary = {
        "status": "running", "model": cfg.choices.model, "strategy": cfg.choices.strategy,
        "effective_strategy": cfg.choices.strategy if strategy is chosen else "ddp",
        "precision": cfg.choices.precision, "parameters": model.num_parameters,
        "trained_parameters": getattr(model, "num_trained", model.num_parameters), "mesh": mesh.as_dict(),
        "world_size": world_size, "global_batch_size": batch_size, "micro_batch_size": micro_batch_size,
        "accumulation": accumulation, "tokens_per_step": rate.tokens_per_step, "unit": rate.unit,
        "device": metrics.device_name(device), "compile": strategy.compile,
        **({} if epochs is None else {"epochs": epochs, "samples_per_epoch": per_epoch}),
        "start_step": step, **({"start_lr": strategy.set_lr(schedule(step))} if 0 < step < last_step else {}),
        "total_steps": cfg.train.steps, "steps": step, "train_loss": None, "val_loss": None,
        "val_accuracy": None, "evaluated": evaluated, "predicted": predicted(folder),
        "versions": metrics.versions(device),
        **({"ended_by": hooks.ended} if hooks.ended else {}), **({"warnings": warnings} if warnings else {}),
    }  # fmt: skip
    if origin := ownership.forked_from(folder / "checkpoints"):
        summary["forked_from"] = origin
    recorder = Recorder(folder, step) if rank == 0 else None
    if recorder:
        for line in warnings:
            log.warning("%s", line)
        if step == last_step:  # the run saved its last step but ended before writing its summary
            summary |= newest_metrics(folder)
        write_json(folder / "summary.json", summary)
        if strategy.compile != "none" and step < last_step:  # gpt2-1.5b: 8 s by blocks, 71 s whole
            log.info("compiling the model: the first step takes longer")
    if recorder:
        profiler.report = partial(report, recorder, summary)
    profiler.attach(strategy, train_data, step, last_step - step)  # wraps the steps to profile, if any
    every = cfg.checkpoint.peer_every or cfg.checkpoint.every
    if device.type == "cuda" and cfg.checkpoint.save and every and step - step % every + every < last_step:
        saver.prepare(strategy.state_dict())  # allocates memory for the copies while the first step compiles
    spikes = Spikes(cfg.train.spike, strategy, saved.get("spikes", {}))
    run = Run(
        folder, cfg, device, model, strategy, schedule, mesh, train_data, validation, data_identity, rate, recorder,
        summary, last_step, step, samples, spikes, hooks, loaded_from, began,
        Best(folder / "checkpoints", rule_of(cfg.checkpoint)), fresh, classes, times,
    )  # fmt: skip
    hooks.begin(run)
    times.done("prepare")
    return run


def check_epochs(folder: Path, cfg: Settings, step: int) -> None:
    """What the launcher checks of train.steps: do they go beyond the checkpoint, and how long is the warm-up?"""
    before = from_rank_0(lambda: read_json(folder / "summary.json"), "reading the summary")
    is_saved = before.get("status") not in ("done", "preempted") and before.get("epochs") == cfg.train.epochs
    run_length.check_reaches(cfg, cfg.train.steps, step, is_saved)
    if dist.get_rank() == 0:
        for line in run_length.of_warmup(cfg, cfg.train.steps):
            log.warning(line)


def of_few_samples(cfg: Settings, num_samples: int | None, world_size: int) -> Iterator[str]:
    """Warn of data that are less than one batch: each step then reads a sample several times."""
    size, group = cfg.train.global_batch_size, world_size if cfg.train.micro_batch_size is None else 0
    if num_samples is None or not 0 < num_samples < size:
        return
    has = f"{num_samples} sample{'s' * (num_samples != 1)}"
    fitting = num_samples // group * group if group else 0
    fix = f"train.global_batch_size={fitting}, or more samples" if fitting else "more samples, or a smaller batch"
    yield (
        f"data={cfg.choices.get('data')} has {has}, fewer than a batch of train.global_batch_size={size}: each step "
        f"repeats samples, and is {size / num_samples:.3g} epochs; fix: {fix}"
    )


def of_whole_batches(cfg: Settings, inputs: Any, targets: Any) -> Iterator[str]:
    """Warn where a sample looks like a batch: each input has its own target, and there are as many as in a batch."""
    count = cfg.train.global_batch_size
    are_tensors = isinstance(inputs, torch.Tensor) and isinstance(targets, torch.Tensor)
    if cfg.data[TARGET].startswith("dtrain.") or not are_tensors or not inputs.is_floating_point():
        return
    if inputs.dim() > 2 and targets.dim() == 2 and inputs.shape[1] == targets.shape[1] == count > 1:
        yield (
            f"data={cfg.choices.get('data')}: each sample is {count} inputs with a target each, as if it was a batch, "
            f"and a step reads train.global_batch_size={cfg.train.global_batch_size} of them; a stream gives "
            "single samples by `yield from zip(inputs, targets)`"
        )


def samples_of(dataset: Any) -> int | None:
    """Return the samples of an epoch; None: a stream that does not say."""
    return dataset.length if getattr(dataset, "is_stream", False) else len(dataset)


def held_out(dataset: Any, cfg: Settings) -> Any:
    """Return the validation split; of a stream, the samples of one evaluation, kept in memory."""
    if getattr(dataset, "is_stream", False):
        return in_memory(dataset, cfg.train.eval_batches * cfg.train.global_batch_size)
    return dataset


def continue_stream(data: Loader | StreamLoader, saved: dict[str, Any]) -> None:
    if isinstance(data, StreamLoader):
        data.load(saved.get("stream"))


def check_batch(
    model: nn.Module, strategy: Strategy, inputs: Any, targets: Any, dataset: Any = None, loss: str = ""
) -> None:
    """Reject a batch that the model, the loss or the strategy does not take, before the first step."""
    call = getattr(model, "batch_call", None)
    is_known = loss.partition(".")[0] in ("dtrain", "torch")  # one of the user may do without targets
    if is_known and hasattr(model, "watch") and not has_targets(targets):
        raise without_targets(dataset, inputs, f"loss={loss.rpartition('.')[2]}")
    if isinstance(inputs, Fields):
        has = f"gives batches with {', '.join(name for name, _ in inputs.leaves())}"
        if call is None:
            rule, fix = f"{has}, but dtrain's models take one tensor", "return (inputs, targets) from the data set"
            raise bad("data", "…", rule, fix)
        if strategy.sizes.pp > 1 or strategy.sizes.tp > 1:
            rule = f"{has}, but pipeline and tensor parallelism divide one tensor"
            raise bad("data", "…", rule, "strategy=fsdp, or return (inputs, targets)")
        # a Hugging Face model compares each place with the next label, so the first label never counts
        shifts = shifts_labels(model) and isinstance(targets, torch.Tensor) and targets.dim() == 2
        if shifts and hasattr(model, "watch"):  # another loss was chosen, which would learn to copy the input
            raise bad("loss", "…", "only the model's own loss compares each place with the next label", "loss=own")
        strategy.first_target = int(shifts)
    elif call is not None and shifts_labels(model) and inputs.shape == targets.shape and torch.equal(inputs, targets):
        rule = "the targets equal the inputs, but those of a pair (inputs, targets) must be the next tokens"
        raise bad("data", "…", rule, 'return {"input_ids": …, "labels": …}, whose labels the model shifts itself')
    if call is not None:
        with_targets = not hasattr(model, "watch")
        if with_targets and call.target in call.required and not has_targets(targets):
            raise without_targets(dataset, inputs, f"{call.name}.forward({', '.join(call.names)})")
        call.check(inputs, with_targets, reader_of(dataset))
    strategy.own_targets(targets)  # an error if sequences cannot be divided


def report(recorder: Recorder, summary: dict[str, Any], step: int, **values: Any) -> None:
    """Record what a profile of some steps found."""
    summary.update(values)
    recorder.write(step=step, **values)


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
