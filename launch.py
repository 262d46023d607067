#!/usr/bin/env python
"""`python launch.py …` is `dtrain launch …`: compose the configuration, check it, start the run."""

import gc
import sys

from dtrain.cli import main

if __name__ == "__main__":
    code = main(["launch", *sys.argv[1:]])
    gc.freeze()  # the process ends: what Hydra made need not be looked through once more, for a tenth of its time
    sys.exit(code)
