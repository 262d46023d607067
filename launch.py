#!/usr/bin/env python
"""`python launch.py …` is `dtrain launch …`: compose the configuration, check it, start the run."""

import sys

from dtrain.cli import main

if __name__ == "__main__":
    sys.exit(main(["launch", *sys.argv[1:]]))
