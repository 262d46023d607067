"""Small worlds on this machine: ranks forked from a server that imported torch once.

A fresh Python takes 2 s to import torch; a fork takes 20 ms. `dtrain verify` and the tests start hundreds of ranks.
In real training each run has a process of its own that forks its ranks (launch/forked.py).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import connection, forkserver, resource_tracker
from pathlib import Path
from typing import Any

from dtrain import start
from dtrain.config.hardware import count_gpus
from dtrain.launch.failures import first_failure
from dtrain.launch.supervisor import PEERS_S
from dtrain.runs.folder import newest_metrics
from dtrain.runs.protocol import Deadline, die_with_parent, place_sockets
from dtrain.util import file_handles

_server = multiprocessing.get_context("forkserver")


def start_server(strategy_modules: Iterable[str] = ()) -> None:
    """Start the fork server, unless it exists; it imports in the background.

    With GPUs, the ranks import the strategies: an optional package may initialize CUDA on import, and CUDA does not
    survive a fork. torch and our own code do not initialize it.
    """
    modules = [
        "torch._dynamo",
        "torch._inductor.compile_fx",
        "dtrain.train.loop",
        *([] if count_gpus() else strategy_modules),
    ]
    wanted = start.environment(argv=()) | {"DTRAIN_PRELOAD": " ".join(dict.fromkeys(modules))}
    before_us = {name: os.environ.get(name) for name in wanted}
    os.environ |= wanted
    _server.set_forkserver_preload(["dtrain.commands.verify.preload"])
    # Only this process handles Ctrl-C and ends the ranks: the server and its forks inherit SIGINT as blocked. The
    # resource tracker must start first, because it unblocks SIGINT when it starts.
    resource_tracker.ensure_running()
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
    """Delay these signals until the block ends. Not with a mask: it covers one thread, and another would take them."""
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
    """N ranks that run `function(*arguments)`, which returns an exit code, with the launcher's environment variables.

    As a context manager it leaves no rank behind, whatever happens inside.
    """

    def __init__(
        self, size: int, function: Callable[..., Any], *arguments: Any, env: dict[str, str] | None = None
    ) -> None:
        start_server()
        with socket.create_server(("127.0.0.1", 0)) as listening:  # rank 0 gets it: nobody can take the port before
            shared = {
                "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(listening.getsockname()[1]), "OMP_NUM_THREADS": "1", **(env or {}),
            }  # fmt: skip
            self.ranks = [
                _server.Process(
                    target=_rank, daemon=True,
                    args=(
                        function, arguments, shared | {"RANK": str(r), "LOCAL_RANK": str(r)},
                        None if r else listening,
                    ),
                )
                for r in range(size)
            ]  # fmt: skip
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
        """Wait for all ranks; return exit codes, None for a killed rank. Peers of a failed rank may hang.

        timeout: seconds on an idle machine; longer on a busy one.
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


def _rank(
    function: Callable[..., Any], arguments: tuple[Any, ...], env: dict[str, str], listening: socket.socket | None
) -> None:
    """listening: on MASTER_PORT, for the store of rank 0."""
    die_with_parent()  # the parent is the server, which ends with its own parent
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may start loaders
    file_handles.raise_limit()
    import torch

    os.environ |= env
    torch.set_num_threads(int(env["OMP_NUM_THREADS"]))  # the server already read that variable
    store = hosted(listening) if listening else None  # noqa: F841  # init_process_group finds it by its port
    code = function(*arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)  # a failed rank must not wait for its peers in its process group's destructor


def hosted(listening: socket.socket) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    (host, port), handle = listening.getsockname(), listening.detach()
    return TCPStore(host, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=handle)


def train_rank(run_dir: Path) -> int:
    """Train with the output in the run folder, as dtrain.train.rank does under torchrun."""
    from dtrain.train import loop
    from dtrain.train import process as worker

    worker.redirect_output(run_dir, int(os.environ["RANK"]))
    return loop.main(run_dir)


def failure(run_dir: Path, codes: list[int | None]) -> str:
    """Describe in one line what went wrong in a world that trained, or return ""."""
    if all(code == 0 for code in codes):
        return ""
    for r, code in enumerate(codes):
        if code is not None and code < 0:  # it leaves no note, and its peers report only the lost connection
            return f"rank {r} was killed by {signal.Signals(-code).name}"
    if any((run_dir / "logs").glob("failure-*.json")):
        first = first_failure(run_dir) or {}
        return f"rank {first['rank']}: {first['type']}: {first['message'].strip().splitlines()[0]}"
    if None in codes:
        steps = newest_metrics(run_dir).get("steps", "none")
        return f"rank {codes.index(None)} did not end in time; the last step was {steps}"
    rank, code = next((r, code) for r, code in enumerate(codes) if code)
    return f"rank {rank} ended with {code} and wrote no error report; see {run_dir}/logs"
