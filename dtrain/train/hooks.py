"""The hooks of a run: what users add to the loop, without a place for it in the loop (docs/your-own.md).

A hook is any class with some of the methods in config/hook_methods.py. All ranks build it and call its methods in the
same order. Nothing is wrapped and no collective is added for a method that no hook has.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import re
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from dtrain.config.build import build, locate
from dtrain.config.files import TARGET
from dtrain.config.hook_methods import METHODS, STATE, Arity, check_methods
from dtrain.errors import bad
from dtrain.runs import causes
from dtrain.runs.metrics import OWN, is_name, own_names
from dtrain.runs.source_lines import at_class, at_return
from dtrain.train.hook_means import Means
from dtrain.train.hook_run import HookRun, meant
from dtrain.train.process import log
from dtrain.util import collective, json_state
from dtrain.util.format import kind_of

RESERVED = ("step", "time", OWN, "own_metrics", "loss", "train_loss", "val_loss", "predicted")


class HookError(RuntimeError):
    """A method of a user's hook failed."""


class Hooks:
    """All hooks of a run. Without any, each method returns at once."""

    def __init__(self, sections: Mapping[str, Any], trust: list[str], view: HookRun) -> None:
        self.view = view
        self.run: Any = None  # set when it begins; `dtrain evaluate` has none
        self.targets = {name: str(section[TARGET]) for name, section in sections.items()}
        self.all = {name: self._made(name, section, trust) for name, section in sections.items()}
        self.initial = self._states()  # of a hook that a checkpoint does not know
        self.evaluation: dict[str, float] = {}  # the newest one
        self.ended: dict[str, Any] | None = None  # by which hook, why, and after which step
        self.means: dict[int, Means] = {}  # of train_metrics, by step, until they are read
        self.own: set[str] = set()  # names of metrics that hooks have returned
        self.givers: dict[str, tuple[str, str]] = {}  # name of a metric → hook and method that returned it here

    def _made(self, name: str, section: Mapping[str, Any], trust: list[str]) -> Any:
        target = self.targets[name]
        try:
            locate(target, trust)
        except ValueError as error:  # which names no setting
            error.args = (str(error).replace(f"{TARGET}=", "hooks=", 1),)
            raise
        with self._named(name, "__init__"):
            hook = build(section, trust)
        names = dict.fromkeys([*vars(type(hook)), *dir(hook)])  # its own before those that it inherits
        found = {method: arity(getattr(hook, method)) for method in names if callable(getattr(hook, method))}
        try:
            check_methods(target, {k: v for k, v in found.items() if not k.startswith("_")})
            if isinstance(hook, nn.Module) and not found.keys() & METHODS.keys() - STATE:
                raise bad("hooks", target, "is a model, and a hook has a method that dtrain calls", f"model={target}")
            every = getattr(hook, "every", 1)
            if "after_step" in found and (not isinstance(every, Real) or every < 1):
                rule = f"every={every!r} must be a whole number of at least 1: after_step is called every so many steps"
                raise bad("hooks", target, rule, "every = 1")
        except ValueError as error:
            raise at_class(error, type(hook)) from None
        return hook

    # ---- what the loop calls -----------------------------------------------------------------------------------

    def begin(self, run: Any) -> None:
        """Before the first step, once the checkpoint is loaded."""
        self.run, self.view.step = run, run.step
        if self._having("train_metrics"):
            self._watch_steps()
        self._call_each("begin", self.view)

    def of_no_validation(self) -> list[str]:
        """Warn of hooks that only measure an evaluation, for data without a validation split."""
        rule = "eval_metrics is never called, as the data have no validation split; train_metrics sees the training"
        others = METHODS.keys() - STATE - {"eval_metrics", "begin", "end"}
        alone = [n for n in self._having("eval_metrics") if not any(hasattr(self.all[n], other) for other in others)]
        return [f"hooks={self.targets[name]}: {rule}" for name in alone]

    def is_due(self, step: int) -> bool:
        """Whether a hook wants to see this step: then its metrics are read at once."""
        return any(step % getattr(self.all[name], "every", 1) == 0 for name in self._having("after_step"))

    def follows_evaluations(self) -> bool:
        """Whether a hook counts evaluations, so that a stop must not skip one."""
        return any(self._having(method) for method in ("after_evaluation", "evaluate", "eval_metrics"))

    def evaluate(self, found: dict[str, float], enter: Callable[[], None]) -> dict[str, float]:
        """Add the hooks' metrics of this evaluation: the same numbers on all ranks.

        found: dtrain's own. enter: tells the watch for hangs that the evaluation moves.
        """
        if not self.all:
            return found
        self.view.step = self.run.step if self.run else self.view.step
        mine = self._eval_metrics(enter)
        for name in self._having("evaluate"):
            enter()
            self.view.begin_evaluation()
            with torch.no_grad():
                numbers = self._numbers(name, "evaluate", self._call(name, "evaluate", self.view))
            mine |= {key: (value, 1.0) for key, value in numbers.items()}
        if self.run and self._having("evaluate"):
            self.run.strategy.free_gathered()
        everywhere = collective.gather((found, mine))
        found = everywhere[0][0]
        own = merged([part for _, part in everywhere])
        self._check_new(own, found)
        self.evaluation = found | own
        return self.evaluation

    def after_step(self, step: int, evaluated: bool) -> bool:
        """Call the hooks that want to see this step, or the evaluation after it; return whether one ends the run."""
        due = [(name, "after_evaluation") for name in self._having("after_evaluation") if evaluated]
        due += [(name, "after_step") for name in self._having("after_step") if self._is_due(name, step)]
        if not due:
            return False
        self.view.step, self.view.metrics = step, self._newest_metrics()
        self.view.stopped_because = ""
        because, numbers = "", dict[str, float]()
        with torch.no_grad():
            for name, method in due:
                returned = self._call(name, method, self.view)
                numbers |= self._numbers(name, method, returned) if returned is not None else {}
                if self.view.stopped_because and not because:
                    because = f"{name}: {self.view.stopped_because}"
        self.run.strategy.free_gathered()
        if any_rank(bool(because), bool(numbers)):
            self._conclude(step, because, numbers)
        return self.ended is not None

    def _conclude(self, step: int, because: str, numbers: dict[str, float]) -> None:
        """Agree on what the hooks of all ranks want, and record it."""
        everywhere = collective.gather((because, {key: (value, 1.0) for key, value in numbers.items()}))
        own = merged([part for _, part in everywhere])
        run = self.run
        if own:
            self._check_new(own, {})
            run.record(own)
        because = next((text for text, _ in everywhere if text), "")
        if because:
            name, _, reason = because.partition(": ")
            self.ended = {"hook": name, "reason": reason, "step": step}
            run.summary["ended_by"] = self.ended
            log.info("hooks=%s ends the run after step %d: %s", name, step, reason)

    def end(self) -> None:
        """Before the run's process ends, also when it was stopped."""
        self._call_each("end", self.view)

    # ---- metrics of the steps ----------------------------------------------------------------------------------

    def _watch_steps(self) -> None:
        """Let the loss pass the outputs of each recorded step on."""
        run = self.run
        strategy, model, every = run.strategy, run.strategy.module, run.cfg.train.log_every
        names = self._having("train_metrics")
        if not hasattr(model, "watch"):
            rule = "train_metrics needs the outputs of a training step, and with loss=own only the model has them"
            raise bad("hooks", self.targets[names[0]], rule, "rename it to eval_metrics, or loss=cross_entropy")
        step, passes = strategy.train_step, strategy.forward_backward

        def train_step(inputs: Tensor, targets: Tensor) -> Any:
            number = run.step + 1
            if number % every and number != run.last_step:
                return step(inputs, targets)
            means = Means()

            @torch.compiler.disable
            def watch(outputs: Any, targets: Any) -> None:
                detached = tree_map_only(Tensor, Tensor.detach, outputs)
                for name in names:
                    with torch.no_grad():
                        found = self._call(name, "train_metrics", detached, targets)
                    self._add(means, name, "train_metrics", found, targets)

            def watched(*batch: Tensor) -> Any:  # not in a rehearsal, whose results are discarded
                model.watch = watch
                try:
                    return passes(*batch)
                finally:
                    model.watch = None

            strategy.forward_backward = watched
            try:
                result = step(inputs, targets)
            finally:
                strategy.forward_backward = passes
            means.reduce()
            self.means = {old: kept for old, kept in self.means.items() if old > number - 4} | {number: means}
            return result

        strategy.train_step = train_step

    def train_metrics(self, step: int) -> dict[str, Any]:
        """The hooks' metrics of a step that was read, for its line in metrics.jsonl."""
        if step not in self.means:
            return {}
        found = self.means[step].read()
        self._check_new(found, {})
        return found | ({OWN: list(found)} if found else {})

    # ---- metrics of evaluations --------------------------------------------------------------------------------

    def _eval_metrics(self, enter: Callable[[], None]) -> dict[str, tuple[float, float]]:
        names, means = self._having("eval_metrics"), Means()
        if not names:
            return {}

        def see(outputs: Tensor, targets: Tensor) -> None:
            for name in names:
                self._add(means, name, "eval_metrics", self._call(name, "eval_metrics", outputs, targets), targets)

        with torch.no_grad():
            for inputs, targets in self.view.batches():
                enter()
                self.view.forward(inputs, targets, see)
        return means.sums()

    def _add(self, means: Means, name: str, method: str, found: Any, targets: Tensor) -> None:
        prefix = "train_" if method == "train_metrics" else "val_"
        for key, value in self._named_values(name, method, found).items():
            if not isinstance(value, (Tensor, int, float)) and not hasattr(value, "item"):
                raise self._no_number(name, method, key, value)
            if math.prod(getattr(value, "shape", ())) != 1:
                raise self._no_number(name, method, key, value)
            key = key if key.startswith(prefix) else f"{prefix}{key}"
            self.givers[key] = name, method
            means.add(key, value, targets)

    def _numbers(self, name: str, method: str, found: Any) -> dict[str, float]:
        """What a method returned, as numbers of this rank."""
        numbers = {}
        for key, value in self._named_values(name, method, {} if found is None else found).items():
            try:
                numbers[key] = float(value)
            except (TypeError, ValueError, RuntimeError):
                raise self._no_number(name, method, key, value) from None
            self.givers[key] = name, method
        return numbers

    def _named_values(self, name: str, method: str, found: Any) -> dict[str, Any]:
        """What a method returned, if it is a dict with names of metrics."""
        if not isinstance(found, dict):
            nothing = " (is a `return` missing?)" if found is None else ""
            rule = f"returned {'None' if found is None else kind_of(found)}{nothing}, not metrics by name"
            fix = 'return {"accuracy": x}, a dict with one number for each name'
            raise self._refused(name, method, rule, fix)
        for key in found:
            if not is_name(key):
                rule = f"returned {key!r}, which is not a name of a metric: use letters, digits, _ - . and /"
                better = re.sub(r"[^\w./-]+", "_", str(key), flags=re.ASCII).strip("_")
                raise self._refused(name, method, rule, f'"{better if is_name(better) else "my_metric"}"')
        return found

    def _no_number(self, name: str, method: str, key: str, value: Any) -> ValueError:
        shape = list(getattr(value, "shape", ()))
        what = f"of the shape {shape}" if shape else f"as {'None' if value is None else kind_of(value)}"
        fix = f'return {{"{key}": x}} with one number x'
        if shape:
            fix = f'one number, such as the mean: {{"{key}": x.mean()}}'
        elif value is None:
            fix = f"leave {key} out of the dict where it has no value"
        return self._refused(name, method, f"returned {key} {what}, and a metric is one number", fix)

    def _check_new(self, own: Mapping[str, float], found: Mapping[str, float]) -> None:
        """Reject a name that means something else in the files of a run."""
        known = self.run.summary if self.run else {}
        taken = {*RESERVED, *found, *(key for key, value in known.items() if value is not None and key not in self.own)}
        for key in own:
            if key in taken:
                rule = f"returned {key}, but dtrain itself has a value named {key}"
                name, method = self.givers.get(key, (next(iter(self.all)), "evaluate"))  # a pipeline's other rank
                raise self._refused(name, method, rule, f"another name for this metric, such as my_{key}")
        self.own |= own.keys()

    def _newest_metrics(self) -> dict[str, Any]:
        run = self.run
        newest = run.recent[-1] if run.recent else None
        line = run.step_metrics(newest) if newest is not None and newest.step == run.step else {}
        return {key: value for key, value in (self.evaluation | line).items() if key != OWN}

    # ---- state -------------------------------------------------------------------------------------------------

    def state(self, alone: bool = False) -> dict[str, Any]:
        """What a checkpoint keeps of the hooks. It must be the same on all ranks. alone: the others are gone."""
        if not self.all:
            return {}
        states = self._states()
        digests = {name: hashlib.sha256(json.dumps(one).encode()).hexdigest() for name, one in states.items()}
        for rank, theirs in enumerate([digests] if alone else collective.gather(digests)):
            if name := next((name for name, digest in digests.items() if theirs[name] != digest), ""):
                rule = f"differs between ranks {collective.rank()} and {rank}, and a checkpoint keeps one"
                raise self._refused(name, "state_dict", rule, "keep only what is the same on all ranks")
        return {"states": states, "evaluation": json_state.encode(self.evaluation), "ended": self.ended}

    def _states(self) -> dict[str, Any]:
        states = {}
        for name in self._having("state_dict"):
            state = self._call(name, "state_dict")
            try:
                states[name] = json_state.encode(state)
            except TypeError as error:
                fix = "return a dict of numbers, text, lists, dicts and small tensors, without the other values"
                raise self._refused(name, "state_dict", f"returned what cannot be saved: {error}", fix) from None
        if (size := json_state.size(states)) > json_state.MOST_BYTES:
            rule = f"returned {size:,} bytes as text, and a checkpoint keeps {json_state.MOST_BYTES:,} of all hooks"
            largest = max(states, key=lambda name: json_state.size(states[name]))
            raise self._refused(largest, "state_dict", rule, "write large states to files in run.folder")
        return states

    def load(self, saved: Mapping[str, Any], may_continue: bool) -> None:
        """Restore the state of a checkpoint. may_continue: the user allows a run to go on that a hook has ended."""
        self.means, self.evaluation = {}, json_state.decode(saved.get("evaluation", {}))
        self.own |= {key for key in own_names(self.evaluation)}
        ended = saved.get("ended")
        self.ended = ended if ended and ended["hook"] in self.all and not may_continue else None
        states = self.initial | {k: v for k, v in saved.get("states", {}).items() if k in self.all}
        for name in self._having("load_state_dict"):
            if name in states:
                self._call(name, "load_state_dict", json_state.decode(states[name]))

    # ---- calls of user code ------------------------------------------------------------------------------------

    def _having(self, method: str) -> list[str]:
        return [name for name, hook in self.all.items() if hasattr(hook, method)]

    def _is_due(self, name: str, step: int) -> bool:
        return step % getattr(self.all[name], "every", 1) == 0

    def _call_each(self, method: str, *arguments: Any) -> None:
        for name in self._having(method):
            with torch.no_grad():
                self._call(name, method, *arguments)

    def _call(self, name: str, method: str, *arguments: Any) -> Any:
        with self._named(name, method):
            return getattr(self.all[name], method)(*arguments)

    def _named(self, name: str, method: str) -> _Named:
        return _Named(f"hooks: {self.targets[name]}.{method}", self.view)

    def _refused(self, name: str, method: str, rule: str, fix: str) -> ValueError:
        """The error of what a method returned; with the line of its `return`."""
        function = getattr(self.all[name], method, None)  # None: that of another rank
        error = bad("hooks", self.targets[name], f"{method} {rule}", fix)
        return at_return(error, inspect.unwrap(function) if function else None)


class _Named:
    """Names the hook, and its file and line, in an error that leaves the block."""

    def __init__(self, what: str, run: HookRun) -> None:
        self.what, self.run = what, run

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: Any) -> None:
        if not isinstance(error, Exception) or isinstance(error, HookError) or "\n  fix: " in str(error):
            return
        where = causes.own_line(error).partition(", in ")[0]
        at = f" ({where})" if where else ""
        text = f"{self.what}{at} failed at step {self.run.step}: {type(error).__name__}: {error}"
        fix = meant(self.run, error, causes.own_frames(error))
        text += f"\n  fix: {fix}" if fix else ""
        raise HookError(text).with_traceback(error.__traceback__) from error


def arity(method: Callable[..., Any]) -> Arity | None:
    try:
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in parameters):
        return math.inf, 0
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    most = math.inf if any(p.kind is p.VAR_POSITIONAL for p in parameters) else len(places)
    return sum(p.default is p.empty for p in places), most


def any_rank(*flags: bool) -> bool:
    """Whether one of the flags is set on any rank."""
    if collective.world_size() == 1:
        return any(flags)
    found = torch.tensor([any(flags)], dtype=torch.int32)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found.item())


def merged(parts: list[dict[str, tuple[float, float]]]) -> dict[str, float]:
    """The means over the ranks that have a value, given as (sum, weight)."""
    found = {}
    for key in dict.fromkeys(key for part in parts for key in part):
        values = [part[key] for part in parts if key in part]
        weight = math.fsum(each for _, each in values)
        alike = all(value == values[0] for value in values)
        total, weight = values[0] if alike else (math.fsum(value for value, _ in values), weight)
        found[key] = total / weight if weight else math.nan
    return found
