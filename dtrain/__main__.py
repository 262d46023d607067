"""`python -m dtrain …` is `dtrain …`."""

import sys

from dtrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
