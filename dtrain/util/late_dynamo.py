"""Keep torch.compile's front end, torch._dynamo, out of processes that compile nothing: it imports longer than torch.

Eager code in torch imports it only to shield functions from the compiler. As long as nothing has imported it, nothing
is compiled, and these functions may run unshielded. Once something imports it, all is as torch made it.

Only with CPU builds of torch: ranks with GPUs usually compile, and this was not tried with CUDA builds.
"""

from __future__ import annotations

import gc
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch._compile import _disable_dynamo

DYNAMO = "torch._dynamo"
IS_CUDA_BUILD = torch.version.cuda is not None
_waiting: list[Callable[[], object]] = []  # called when something imports it


def shield(namespace: dict[str, Any], name: str) -> None:
    """Do `name = torch.compiler.disable(name)` in a module, now or when torch._dynamo is imported."""

    def now() -> None:
        namespace[name] = torch.compiler.disable(namespace[name])

    _when_imported(now)


def defer() -> None:
    """Let the functions that torch has shielded so far run as they are until torch._dynamo is imported."""
    if IS_CUDA_BUILD or DYNAMO in sys.modules:
        return
    code = next((c for c in _disable_dynamo.__code__.co_consts if inspect.iscode(c)), None)
    functions = [f.__wrapped__ for f in gc.get_referrers(code) if inspect.isfunction(f) and hasattr(f, "__wrapped__")]
    attribute = "__dynamo_disable"  # where torch keeps the shielded function once it has made it
    functions = [function for function in functions if not hasattr(function, attribute)]
    for function in functions:
        setattr(function, attribute, function)

    def undo() -> None:
        for function in functions:
            delattr(function, attribute)

    _when_imported(undo)


def step_of(optimizer: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """Return an optimizer's step for a caller without gradients; torch's own decorator imports torch._dynamo."""
    return optimizer.step if IS_CUDA_BUILD or DYNAMO in sys.modules else inspect.unwrap(optimizer.step)


@contextmanager
def ddp_default() -> Iterator[None]:
    """Answer DistributedDataParallel's one question to torch._dynamo: nobody can have changed its default yet."""
    stand_in: Any = _StandIn()
    if not IS_CUDA_BUILD and DYNAMO not in sys.modules:
        torch._dynamo = stand_in
    try:
        yield
    finally:
        if vars(torch).get("_dynamo") is stand_in:
            del torch._dynamo


class _StandIn:
    class utils:
        @staticmethod
        def get_optimize_ddp_mode() -> str:
            return "ddp_optimizer"

    def __getattr__(self, name: str) -> Any:
        """Whatever else is asked is for the real one, which this import puts in our place."""
        return getattr(importlib.import_module(DYNAMO), name)


def _when_imported(act: Callable[[], object]) -> None:
    if IS_CUDA_BUILD or DYNAMO in sys.modules:
        act()
        return
    if not _waiting:
        sys.meta_path.insert(0, _Watch())
    _waiting.append(act)


class _Watch:
    """Sees the import of torch._dynamo, and acts when it is complete. Who only asks for its spec changes nothing."""

    is_asking = False

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != DYNAMO or self.is_asking:
            return None
        self.is_asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.is_asking = False
        assert spec is not None and spec.loader is not None
        load = spec.loader.exec_module

        def load_and_act(module: ModuleType) -> None:
            load(module)
            sys.meta_path.remove(self)
            while _waiting:
                _waiting.pop()()

        spec.loader.exec_module = load_and_act  # type: ignore[method-assign]
        return spec


defer()
