"""What torchrun starts for each rank: tie its life to torchrun's, and only then import torch, which takes seconds."""

import os
import sys
from pathlib import Path

from dtrain.contract import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    # that works from now on; if torchrun died before, we have another parent already
    parent = Path(f"/proc/{os.getppid()}/cmdline")
    if parent.exists() and b"torch" not in parent.read_bytes():
        sys.exit(1)

    from dtrain import train, worker

    run_dir = Path(sys.argv[1])
    worker.redirect_output(run_dir, int(os.environ["RANK"]))
    code = train.main(run_dir)
    sys.stdout.flush()
    os._exit(code)  # a failed rank must not wait for its peers in the destructor of its process group
