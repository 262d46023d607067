"""`python -m dtrain …` is `dtrain …`."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        sys.path.append(sys.path.pop(0))  # the working folder: a queue.py in it is not Python's own
    from dtrain.cli import main

    sys.exit(main())
