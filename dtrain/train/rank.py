"""What torchrun or srun starts for each rank: tie its life to its parent's, and only then import torch (seconds)."""

import gc
import os
import signal
import sys
from pathlib import Path

from dtrain import file_handles
from dtrain.contract import DONE, PREEMPTED, STOP_FILE, STOP_SIGNALS, die_with_parent, name_slurm_rank, remove_sockets
from dtrain.start import import_folders

if __name__ == "__main__":
    import_folders()
    run_dir = Path(sys.argv[1])
    on_slurm = "RANK" not in os.environ
    if on_slurm:
        name_slurm_rank(os.environ)
    die_with_parent()
    # that works from now on; if torchrun died before, we have another parent already
    parent = Path(f"/proc/{os.getppid()}/cmdline")
    if not on_slurm and parent.exists() and b"torch" not in parent.read_bytes():
        sys.exit(1)
    for number in STOP_SIGNALS:  # until the loop listens: a stop that comes while torch is imported is kept for it
        signal.signal(number, lambda *_: (run_dir / STOP_FILE).touch())

    file_handles.raise_limit()  # srun passes on the limit of the shell that submitted the job
    gc.disable()  # imports leave next to nothing to collect; looking for it takes a fifth of their time
    from dtrain import train, worker

    gc.freeze()  # nor do collections while training look at what was imported
    gc.enable()
    worker.redirect_output(run_dir, int(os.environ["RANK"]))
    code = train.main(run_dir)
    sys.stdout.flush()
    remove_sockets()
    # srun ends the whole step when a task ends with anything but 0; the supervisor reads summary.json
    code = DONE if on_slurm and code == PREEMPTED else code
    os._exit(code)  # a failed rank must not wait for its peers in the destructor of its process group
