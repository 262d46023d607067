"""The training loop, top to bottom. Each rank runs `main(run_dir)`; run_dir/config.yaml holds all settings.

A run is a pure function of (config, step). The samples of a step depend only on how many were consumed, every random
draw on (seed, step, data rank), and the learning rate on the step. So a resumed run equals one that was never
interrupted.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from dtrain.checkpoint import background, store
from dtrain.checkpoint.peer import PeerCopies
from dtrain.config import run_file
from dtrain.config.build import typed_trust
from dtrain.config.files import GROUPS
from dtrain.config.run_file import Settings
from dtrain.config.schema import check_run
from dtrain.runs.folder import wall_s, write_json
from dtrain.runs.protocol import BAD_CONFIG, DONE, FAILED, PREEMPTED
from dtrain.train import failed_step, metrics, nonfinite, process, rescue
from dtrain.train.best import rule_of
from dtrain.train.guard import Guard
from dtrain.train.pending import FinishedStep, PendingSteps
from dtrain.train.position import Position
from dtrain.train.process import log
from dtrain.train.restore import roll_back
from dtrain.train.run import Run
from dtrain.train.setup import set_up
from dtrain.train.startup import StartTimes, end_compile_cache
from dtrain.train.stragglers import StragglerWatch


def train(run: Run, saver: background.Saver, stop: process.StopRequest, position: Position) -> bool:
    """Train until the last step or a stop request. Return True if training stopped before the last step."""
    settings, checks, strategy, device = run.cfg.train, run.cfg.guard, run.strategy, run.device
    pending, guard = PendingSteps(), Guard(strategy, checks.replicas_every, checks.replay_every)
    stragglers = StragglerWatch(run, saver)
    stopping, saves = False, run.cfg.checkpoint
    if saver.only_in_memory:  # of hosts that may be lost, too
        save(run, saver, guard, position, is_last=run.step == run.last_step)
    while run.step < run.last_step and not stopping:
        pending.begin()
        position.enter("data", run.step + 1)
        before = time.perf_counter()
        run.samples = run.spikes.next_samples(run.samples)
        inputs, targets = run.train_data.batch(run.samples)
        inputs, targets = inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        data_s = time.perf_counter() - before

        position.enter("step", run.step + 1)
        stragglers.start_step()
        vote = stop.start_vote(stragglers.values)
        lr = strategy.set_lr(run.schedule(run.step))
        process.seed_everything(settings.seed, run.step, strategy.random_rank)
        guard.before_step(run.step + 1)
        run.spikes.set_limits(run.step + 1)
        # Run forward and backward over the micro-batches, average the gradients over the data ranks, clip them by one
        # global norm, and update the weights. The update is skipped if the loss or the norm is not finite or a spike.
        result = strategy.train_step(inputs, targets)
        stragglers.end_step(data_s, pending.waited_s)
        run.step, run.samples = run.step + 1, run.samples + settings.global_batch_size
        stopping = stop.read_vote(vote)
        stragglers.read(vote)

        is_last = run.step == run.last_step or stopping
        # a stop leaves out an evaluation, unless a hook or keep_best compares it with others: a resume must do alike
        may_evaluate = not stopping or run.hooks.follows_evaluations() or bool(saves.get("keep_best"))
        eval_due = run.step == run.last_step or (may_evaluate and _every(settings.eval_every, run.step))
        on_disk = saves.save and (is_last or _every(saves.every, run.step))
        save_due = on_disk or _every(saves.peer_every, run.step)
        pending.add(result, run.step, run.samples, lr, data_s)
        for finished in pending.read(all_of_them=eval_due or save_due or run.hooks.is_due(run.step)):
            log_step(run, finished)
        if run.spikes.rollback_from:
            position.enter("rollback", run.step)
            roll_back(run, saver)
            pending, guard = PendingSteps(), Guard(strategy, checks.replicas_every, checks.replay_every)
            stragglers.restart()
            if stopping:  # what was rolled back to may be in memory only
                save(run, saver, guard, position, is_last=True)
            continue

        # once in a while: evaluate, save, compare what must be equal
        if eval_due:
            evaluate(run, position)
        if run.hooks.after_step(run.step, evaluated=eval_due):  # a hook ends the run: this was its last step
            run.last_step, is_last, on_disk, save_due = run.step, True, saves.save, saves.save
        if run.best.step == run.step:  # this evaluation is better than all before: checkpoint.keep_best
            on_disk = save_due = True
        if save_due:
            save(run, saver, guard, position, is_last, on_disk)
        guard.after_step(run.step, is_saved=save_due)
        if saver.failed:  # the next vote informs all ranks, and the next save raises the error
            stop.requested = True  # not |=: it could overwrite a signal that arrives between its read and its write
        if run.recorder:
            for of_a_save in saver.finished():
                run.recorder.write(step=run.step, **of_a_save)
    stragglers.finish()
    return stopping and run.step < run.last_step


def _every(interval: int, step: int) -> bool:
    return bool(interval) and step % interval == 0


def log_step(run: Run, finished: FinishedStep) -> None:
    """Record a step whose metrics have been read; stop the run if they are not finite."""
    if "start_s" not in run.summary:
        run.note_start(finished)
    run.num_skipped += not finished.updated
    run.spikes.read(finished, run.train_data, run.folder if run.recorder else None)
    if not finished.updated and not finished.spiked:
        norm = f"gradient norm {finished.grad_norm}"
        log.warning("step %d: loss %s, %s: not finite, weights unchanged", finished.step, finished.loss, norm)
        if error := nonfinite.error(run, finished):
            raise error
    run.step_times.append(finished.step_s)
    run.recent = [*run.recent[-1:], finished]
    run.summary.update(steps=finished.step, train_loss=finished.loss if math.isfinite(finished.loss) else None)
    if run.recorder and (finished.step % run.cfg.train.log_every == 0 or finished.step == run.last_step):
        run.recorder.write(**run.step_metrics(finished))


def evaluate(run: Run, position: Position) -> None:
    """The mean over some batches of the held-out split, if there is one, and what the hooks evaluate."""
    results, enter = [], partial(position.enter, "evaluation", run.step)
    with run.strategy.evaluated_weights():
        for inputs, targets in run.validation.batches(run.device) if run.validation else ():
            enter()
            results.append(run.strategy.eval_step(inputs, targets))
        values = torch.stack(results).mean(dim=0).reshape(-1).tolist() if results else []
        found = run.hooks.evaluate(metrics.evaluated(run.model, values) if values else {}, enter)
    if found:
        run.record(found)
        run.evaluated = (run.step, found)
        run.best.evaluated(run.step, found)


def save(
    run: Run, saver: background.Saver, guard: Guard, position: Position, is_last: bool, on_disk: bool = True
) -> None:
    """Compare the replicas and save; the files are written while training continues."""
    asked = time.perf_counter()
    position.enter("compare", run.step)
    guard.before_save(run.step)
    meta = run.checkpoint_meta() | {"extra": run.strategy.extra_state()}
    state = run.strategy.state_dict()
    guard.replicas.check(run.step, state)  # a tensor that differs between ranks is never saved
    position.enter("save", run.step)
    saver.save(run.step, state, meta, asked, is_last, on_disk)


def finish(run: Run, saver: background.Saver, preempted: bool) -> None:
    """Wait for the last save, and write the summary."""
    run.hooks.end()
    saved = saver.wait() or (run.loaded_from if run.step == run.summary["start_step"] else None)
    run.strategy.close()
    run.summary |= {"status": "preempted" if preempted else "done"} | run.strategy.totals()
    run.summary |= end_compile_cache(run.strategy)
    run.summary["peak_mem_gib"] = max(store.gather(metrics.memory_gib(run.device)))
    if run.recorder:
        if run.step_times:
            step_s = statistics.median(run.step_times[1:] or run.step_times)  # the first includes compilation
            run.summary |= {"tokens_per_s": run.rate.tokens_per_s(step_s), "mfu": run.rate.mfu(step_s)}
        run.summary |= {
            "skipped_steps": run.num_skipped, "cuda_graph": run.strategy.is_captured, **saver.totals,
            "weights_sha256": store.weights_sha256(saved) if saved else None, **run.best.summary(),
            "wall_s": wall_s(run.folder) or time.perf_counter() - run.began,  # with earlier attempts
        }  # fmt: skip
        write_json(run.folder / "summary.json", run.summary)
    if saver.peer:
        saver.peer.remove()


def main(run_dir: Path) -> int:
    """One rank, from the process group to the exit code."""
    times, position = StartTimes(run_dir), Position(run_dir, int(os.environ["RANK"]))
    try:
        cfg = Settings(run_file.completed(run_file.load(run_dir)) | {"trust": typed_trust()})
        check_run(cfg, cfg.trust, GROUPS)
        position.hang_timeout = cfg.cluster.get("hang_timeout")  # an old run has no such setting
        device = process.join_process_group(cfg.deterministic)
        saves = cfg.checkpoint
        peer = PeerCopies(run_dir) if saves.peer else None
        saver = background.Saver(
            run_dir / "checkpoints", saves.keep, saves.background, saves.incremental, peer, rule_of(saves)
        )
        with saver, position:
            stop = process.StopRequest(run_dir)
            times.done("process_group")
            run = set_up(run_dir, cfg, device, saver, times)
            stop.steps_late, stop.ranks_meet = run.strategy.steps_ahead, run.strategy.ranks_meet
            with rescue.on_lost_peer(run), failed_step.explained(run):
                preempted = train(run, saver, stop, position)
            position.enter("end", run.step)
            finish(run, saver, preempted)
        dist.barrier()  # rank 0 may still be writing the summary; if we left early, it would see a lost peer
        dist.destroy_process_group()
        return PREEMPTED if preempted else DONE
    except BaseException as error:
        error = process.explained(error)
        # our own errors about settings include a fix; any other ValueError is an ordinary failure
        exit_code = BAD_CONFIG if isinstance(error, ValueError) and "\n  fix: " in str(error) else FAILED
        process.report_failure(run_dir, position.rank, error, exit_code)
        return exit_code
    finally:
        position.end()
