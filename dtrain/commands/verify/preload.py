"""Preloaded by the fork server of dtrain/commands/verify/world.py: imports that every rank would repeat otherwise.

If a module cannot be imported, the ranks that need it import it and report the error. Without this file the server
would do the imports itself, and any error except an ImportError would kill the server and every world with it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os

from dtrain.runs.protocol import die_with_parent

die_with_parent()  # otherwise the imports would continue for seconds after Ctrl-C
gc.disable()
for name in os.environ.get("DTRAIN_PRELOAD", "").split():
    with contextlib.suppress(Exception):
        module = importlib.import_module(name)
        getattr(module, "preload", lambda: None)()  # imports that the module defers until first use
gc.freeze()  # the ranks' collections skip these objects; scanning would copy every page of the server
gc.enable()
