"""Distributed training where one setting changes the parallelism and nothing else changes.

`dtrain.fit(model=…, data=…, strategy="fsdp")` trains from a script (docs/your-own.md).
"""

from __future__ import annotations

TYPE_CHECKING = False  # no imports here: `python -m dtrain` searches the working folder first until __main__.py runs
if TYPE_CHECKING:
    from typing import Any

    from dtrain.api import Preempted, Result, RunFailed, fit

__all__ = ["Preempted", "Result", "RunFailed", "__version__", "fit"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import `fit` and its dependencies on first use: every rank and every command imports this file first."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dtrain import api

    return getattr(api, name)
