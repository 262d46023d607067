"""Imported once by the fork server of dtrain/world.py: what each rank would else import for itself.

A module that cannot be imported is left to the ranks that need it, where the error has a place to be told. Without
this file the server would do the imports itself, and die of any error but an ImportError, and every world with it.
"""

from __future__ import annotations

import contextlib
import importlib
import os

for name in os.environ.get("DTRAIN_PRELOAD", "").split():
    with contextlib.suppress(Exception):
        importlib.import_module(name)
