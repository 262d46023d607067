"""Distributed training where one setting changes the parallelism and nothing else changes.

`dtrain.fit(model=…, data=…, strategy="fsdp")` trains from a script (docs/your-own.md); `dtrain.load(RUN)` opens a run.
"""

from __future__ import annotations

TYPE_CHECKING = False  # no imports here: `python -m dtrain` searches the working folder first until __main__.py runs
if TYPE_CHECKING:
    from typing import Any

    from dtrain.api import Preempted, Result, RunFailed, fit
    from dtrain.notebook import load

__all__ = ["Preempted", "Result", "RunFailed", "__version__", "fit", "load"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import `fit` or `load` on first use: every rank and every command imports this file first."""
    if name not in __all__:
        raise absent(name)
    if name == "load":  # without Hydra, which takes a second
        from dtrain.notebook import load

        return load
    from dtrain import api

    return getattr(api, name)


def absent(name: str) -> Exception:
    """Return the error of a name that dtrain lacks, with what to use in place of those of other programs."""
    import sys
    from importlib.util import find_spec

    verbs = ("train", "launch", "run")  # the first two are folders, too
    if name.startswith("_") or (name not in verbs and find_spec(f"{__name__}.{name}")):  # from dtrain import start
        return AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dtrain.runs import causes

    fix = f"dtrain has {', '.join(sorted(__all__))}"
    theirs = name in ("Trainer", "Accelerator", "Fabric", "LightningModule", "initialize")
    bases = name in ("Hook", "Callback", "Dataset", "Module", "Model", "Optimizer")
    if theirs or name in verbs:
        fix = "dtrain.fit(model=Net, data=my_data)   (docs/your-own.md)"
    elif bases:
        fix = "a plain class, or torch's; dtrain has no base classes   (docs/your-own.md)"
    # `from dtrain import Trainer` replaces the text of an AttributeError by its own; hasattr() and getattr() expect one
    is_import = sys._getframe(2).f_code.co_name == "_handle_fromlist" and name not in verbs
    kind = ImportError if is_import else AttributeError
    causes.watch_script()
    return causes.refused(kind(f"dtrain has no {name}\n  fix: {fix}"))
