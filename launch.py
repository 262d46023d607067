#!/usr/bin/env python
"""`python launch.py …` is `dtrain launch …`: compose the configuration, check it, start the run."""

import os
import runpy
import sys

if __name__ == "__main__":
    here = os.path.dirname(os.path.realpath(__file__))
    if not sys.flags.safe_path:
        del sys.path[0]  # this folder: a queue.py in it is not Python's own (dtrain/start.py)
    sys.argv[1:1] = ["-m", "dtrain.cli", "launch"]
    runpy.run_path(os.path.join(here, "dtrain", "start.py"), run_name="__main__")
