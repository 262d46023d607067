#!/usr/bin/env python
"""`python launch.py …` is `dtrain launch …`: compose the configuration, check it, start the run."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # this folder, before any import: a queue.py in it is not Python's own (dtrain/start.py)
    import os
    import runpy

    sys.argv[1:1] = ["-m", "dtrain.cli", "launch"]
    runpy.run_path(os.path.join(os.path.dirname(os.path.realpath(__file__)), "dtrain", "start.py"), run_name="__main__")
