"""`python -m dtrain …` is `dtrain …`."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        sys.path.append(sys.path.pop(0))  # working folder last: a queue.py there must not shadow the standard library
    from dtrain.cli import main

    sys.exit(main())
