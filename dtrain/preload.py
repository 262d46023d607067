"""Imported once by the fork server of dtrain/world.py: what each rank would else import for itself.

A module that cannot be imported is left to the ranks that need it, where the error has a place to be told. Without
this file the server would do the imports itself, and die of any error but an ImportError, and every world with it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os

gc.disable()
for name in os.environ.get("DTRAIN_PRELOAD", "").split():
    with contextlib.suppress(Exception):
        module = importlib.import_module(name)
        getattr(module, "preload", lambda: None)()  # what it imports only when it is used
gc.freeze()  # the ranks' collections pass over it: else they would look at, and so copy, every page of the server
gc.enable()
