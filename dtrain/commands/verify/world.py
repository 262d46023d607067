"""Small worlds on this machine: ranks forked from a server that has imported torch once.

A fresh Python takes 2 s to import torch; a fork takes 20 ms. `dtrain verify` and the tests start hundreds of ranks.
Training proper goes through torchrun (launchers/local.py): a fork server is no place for a run of days.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any

from dtrain import file_handles, start
from dtrain.config import count_gpus
from dtrain.contract import Deadline, die_with_parent, free_port, place_sockets
from dtrain.launchers.supervisor import PEERS_S, first_failure
from dtrain.rundir import newest_figures

_server = multiprocessing.get_context("forkserver")


def start_server(strategy_modules: Iterable[str] = ()) -> None:
    """Start the fork server, unless there is one; it imports while the caller goes on.

    With GPUs it leaves the strategies to the ranks: an optional package may ask for the GPUs when it is imported, and
    CUDA does not survive a fork. torch and our own code do not ask.
    """
    modules = ["torch._dynamo", "dtrain.train", *([] if count_gpus() else strategy_modules)]
    wanted = start.environment(argv=()) | {"DTRAIN_PRELOAD": " ".join(dict.fromkeys(modules))}
    before_us = {name: os.environ.get(name) for name in wanted}
    os.environ |= wanted
    _server.set_forkserver_preload(["dtrain.preload"])
    # blocked, and so in all that it forks: Ctrl-C is for the process that asked for the ranks, and that ends them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    place_sockets()
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for name, value in before_us.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


@contextlib.contextmanager
def held_back(*numbers: signal.Signals) -> Iterator[None]:
    """These signals come when the block is over. A mask is of one thread only: another one would take them."""
    came: list[int] = []
    before = {number: signal.signal(number, lambda n, _: came.append(n)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for n in came:
            signal.raise_signal(n)


class World:
    """N ranks that run `function(*arguments)`, which gives an exit code; each has the launcher's environment contract.

    As a context it leaves no rank behind, whatever happens inside.
    """

    def __init__(
        self, size: int, function: Callable[..., Any], *arguments: Any, env: dict[str, str] | None = None
    ) -> None:
        shared = {
            "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1", **(env or {}),
        }  # fmt: skip
        start_server()
        self.ranks = [
            _server.Process(
                target=_rank, args=(function, arguments, shared | {"RANK": str(r), "LOCAL_RANK": str(r)}), daemon=True
            )
            for r in range(size)
        ]
        try:
            for process in self.ranks:
                process.start()
        except BaseException:  # Ctrl-C
            self.kill()
            raise

    def __enter__(self) -> World:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def join(self, timeout: float = 120) -> list[int | None]:
        """Wait for all ranks; their exit codes, None for one that had to be killed. Peers of a failed one may hang.

        timeout: seconds on a quiet machine; a busy one has longer.
        """
        deadline, failed = Deadline(timeout), False
        waiting = {process.sentinel: process for process in self.ranks}
        while waiting and (left := deadline.left()) > 0:
            for sentinel in connection.wait(list(waiting), left):
                if waiting.pop(sentinel).exitcode and not failed:  # type: ignore[arg-type]
                    deadline, failed = Deadline(min(PEERS_S, left)), True
        codes = [process.exitcode for process in self.ranks]
        self.kill()
        return codes

    def kill(self) -> None:
        started = [process for process in self.ranks if process.pid is not None]
        for process in started:
            process.kill()
        for process in started:
            process.join()


def _rank(function: Callable[..., Any], arguments: tuple[Any, ...], env: dict[str, str]) -> None:
    die_with_parent()  # the server, which ends when who started it does
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may have loaders
    file_handles.raise_limit()
    import torch

    os.environ |= env
    torch.set_num_threads(int(env["OMP_NUM_THREADS"]))  # the server has read that variable before
    code = function(*arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)  # a failed rank must not wait for its peers in the destructor of its process group


def train_rank(run_dir: Path) -> int:
    """What dtrain.rank does under torchrun: train, with the output in the run folder."""
    from dtrain import train, worker

    worker.redirect_output(run_dir, int(os.environ["RANK"]))
    return train.main(run_dir)


def failure(run_dir: Path, codes: list[int | None]) -> str:
    """What went wrong in a world that trained, in one line, or ""."""
    if all(code == 0 for code in codes):
        return ""
    for r, code in enumerate(codes):
        if code is not None and code < 0:  # it leaves no note, and those of its peers are about the lost connection
            return f"rank {r} was killed by {signal.Signals(-code).name}"
    if any((run_dir / "logs").glob("failure-*.json")):
        first = first_failure(run_dir) or {}
        return f"rank {first['rank']}: {first['type']}: {first['message'].strip().splitlines()[0]}"
    if None in codes:
        steps = newest_figures(run_dir).get("steps", "none")
        return f"rank {codes.index(None)} did not end in time; the last step was {steps}"
    rank, code = next((r, code) for r, code in enumerate(codes) if code)
    return f"rank {rank} ended with {code} and left no note; see {run_dir}/logs"
