"""The entry point that torchrun or srun starts for each rank: tie it to its parent, then import torch (seconds)."""

import faulthandler
import gc
import os
import signal
import sys
from pathlib import Path

from dtrain.runs import system
from dtrain.runs.protocol import (
    DONE,
    PREEMPTED,
    STACK_SIGNAL,
    STARTER,
    STOP_FILE,
    STOP_SIGNALS,
    die_with_parent,
    name_slurm_rank,
    note_leave,
    remove_sockets,
)
from dtrain.start import import_folders
from dtrain.util import file_handles


def keep_stop_requests(run_dir: Path, rank: int) -> None:
    """Note stop requests that arrive before the loop handles signals."""

    def on_signal(number: int, frame: object) -> None:
        note_leave(run_dir, rank)
        (run_dir / STOP_FILE).touch()

    for number in STOP_SIGNALS:
        signal.signal(number, on_signal)


def import_loop() -> None:
    """Import the training loop, and with it torch."""
    gc.disable()  # imports create almost no garbage, and collections would take a fifth of the import time
    import dtrain.train.loop  # noqa: F401 (before the freeze below)

    gc.freeze()  # collections during training skip imported objects, too
    gc.enable()


def train(run_dir: Path, rank: int) -> int:
    """Run the training loop in this process, which has imported torch; return the exit code."""
    from dtrain.train import loop, position, process

    process.redirect_output(run_dir, rank)
    # the handler is written in C: it prints the stacks even while a thread does not release the GIL
    faulthandler.register(STACK_SIGNAL, file=sys.stderr)
    faulthandler.enable(file=sys.stderr)  # the stacks of a crash (SIGSEGV, SIGABRT, SIGBUS), too
    if os.environ.get("DTRAIN_FAULT"):  # dtrain chaos
        from dtrain.faults import inject

        inject.install(position.Position, run_dir, rank)
    code = loop.main(run_dir)
    sys.stdout.flush()
    remove_sockets()
    return code


if __name__ == "__main__":
    import_folders()
    run_dir = Path(sys.argv[1])
    on_slurm = "RANK" not in os.environ
    if on_slurm:
        name_slurm_rank(os.environ)
    starter = os.environ.pop(STARTER, None)  # not for the processes that this one starts
    die_with_parent(int(starter) if starter else None)
    # this takes effect from now on; if torchrun died earlier, this process already has another parent
    parent = Path(f"/proc/{os.getppid()}/cmdline")
    if not on_slurm and not starter and parent.exists() and b"torch" not in parent.read_bytes():
        sys.exit(1)
    keep_stop_requests(run_dir, int(os.environ["RANK"]))
    if os.environ["LOCAL_RANK"] == "0":
        system.begin(run_dir)

    file_handles.raise_limit()  # srun inherits the limit of the shell that submitted the job
    import_loop()
    code = train(run_dir, int(os.environ["RANK"]))
    # srun ends the whole job step when a task exits with anything but 0; the supervisor reads summary.json
    code = DONE if on_slurm and code == PREEMPTED else code
    os._exit(code)  # a failed rank must not wait for its peers in the process group's destructor
