"""The program of a pod, or of a container of compose: one node of a run. `python -m dtrain.launch.pod FOLDER`.

FOLDER has the run's configuration, as cluster=kubernetes has mounted it; compose sends it as a variable. All pods share
the run folder. There the first one writes its address and a free port, and the others find it: after a restart both
are new, so that nobody connects to a pod that is about to end. The first pod's exit code is that of the run, as it
reads the failures of all ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from dtrain.checks.validate import validate
from dtrain.config import run_file
from dtrain.config.build import build
from dtrain.config.files import is_script
from dtrain.launch.attempts import idle_starts, is_done, num_failed
from dtrain.launch.failures import failure
from dtrain.launch.torchrun import Torchrun
from dtrain.runs.folder import (
    last_launch,
    locked,
    look_again,
    newest_step,
    note_attempt,
    read_json,
    read_summary,
    write_json,
)
from dtrain.runs.protocol import (
    BAD_CONFIG,
    DONE,
    FAILED,
    NODE_RANK,
    POD_IP,
    PREEMPTED,
    PREFLIGHT,
    RENDEZVOUS_FILE,
    RUN_FILES,
    free_port,
)
from dtrain.ui.console import print_error

LOCK_S = 180.0  # wait for the last pod to exit; NFS frees a lost node's lock after 90 s
LOOK_S = 0.5
RETRY = 138  # PyTorchJob starts a pod again whose exit code is 128 or more; this one is for users


def main(argv: list[str]) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(PREEMPTED))  # the first process of a container ignores it else
    files = run_files(Path(argv[0]))
    config = run_file.load(files)
    try:
        code = run(config, files, is_preflight=argv[1:] == ["preflight"])
    except SystemExit as stop:  # before the ranks had started
        code = int(stop.code or DONE)
    except ValueError as error:
        print_error(str(error))
        code = BAD_CONFIG
    return RETRY if code == PREEMPTED and config["cluster"]["kind"] == "pytorchjob" else code


def run_files(mounted: Path) -> Path:
    """Return the folder with the run's configuration: the mounted one, or a new one with what compose has sent."""
    sent = os.environ.pop(RUN_FILES, None)
    if sent is None:
        return mounted
    folder = Path(tempfile.mkdtemp(prefix="dtrain-"))
    for name, text in json.loads(sent).items():
        (folder / name).write_text(text)
    return folder


def run(config: dict[str, Any], files: Path, is_preflight: bool) -> int:
    run_dir = Path(config["run_dir"])
    run_dir.mkdir(parents=True, exist_ok=True)
    if is_preflight:
        return preflight(config, run_dir)
    rank = node_rank()
    for name in [name for name in os.environ if name.startswith("PET_")]:
        del os.environ[name]  # an operator's settings of torchrun
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    validate(config)  # data and files that the submitting machine may not have
    return first_node(config, files, run_dir) if rank == 0 else other_node(config, run_dir, rank)


def node_rank() -> int:
    """Return this node's number: compose has our variable, Jobs and JobSets the second one, PyTorchJobs the third."""
    found = [os.environ[name] for name in (NODE_RANK, "JOB_COMPLETION_INDEX", "RANK") if name in os.environ]
    if not found:
        raise ValueError(f"{NODE_RANK}: this node's number is not known\n  fix: start it with cluster=kubernetes")
    return int(found[0])


def preflight(config: dict[str, Any], run_dir: Path) -> int:
    """Check this node, as an init container; the pods' reports must not overwrite that of a bad node."""
    from dtrain.preflight.run import local_starter

    host = socket.gethostname()
    folder = run_dir / "preflight" / host
    folder.mkdir(parents=True, exist_ok=True)
    report = build(config["preflight"]).run(config, folder, [host], local_starter, print)
    if not report.ok or not (run_dir / "preflight.json").exists():
        report.write(run_dir / "preflight.json")
    if not report.ok:
        why = "; ".join(text for texts in report.bad.values() for text in texts)
        write_json(run_dir / "failure.json", failure(None, "preflight", f"{host}: {why}", "preflight.json"))
    return DONE if report.ok else PREFLIGHT


def first_node(config: dict[str, Any], files: Path, run_dir: Path) -> int:
    """Own the run folder, let the others find this node, and run the ranks; return the exit code of the run."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(run_dir, LOCK_S))
        except ValueError:
            print(f"another pod held the run folder for {LOCK_S:.0f} s", flush=True)
            return PREEMPTED
        for file in sorted(files.glob("[a-z]*.*")):  # config.yaml, launch.json, plan.json; not a ConfigMap's ..data
            shutil.copyfile(file, run_dir / f".{file.name}.tmp")
            os.replace(run_dir / f".{file.name}.tmp", run_dir / file.name)
        if is_done(run_dir, config):
            return DONE
        job_id = last_launch(read_json(run_dir / "launch.json")).get("job_id")
        (run_dir / "logs").mkdir(exist_ok=True)
        address = "127.0.0.1" if config["cluster"]["nodes"] == 1 else own_address()
        place = {"address": address, "port": free_port()}
        write_json(run_dir / RENDEZVOUS_FILE, place)
        try:
            return run_first(Node(config, 0, place, job_id), run_dir, job_id)
        finally:
            (run_dir / RENDEZVOUS_FILE).unlink(missing_ok=True)


def run_first(ranks: Node, run_dir: Path, job_id: str | None) -> int:
    cluster = ranks.config["cluster"]
    idle = idle_starts(run_dir, (job_id, newest_step(run_dir)))
    if idle > cluster["max_idle_starts"] and not is_script(ranks.config):
        why = f"{idle} starts in a row from step {newest_step(run_dir)}, and none reached another checkpoint"
        note_attempt(run_dir, "start", **ranks.place())
        note_attempt(run_dir, "end", code=BAD_CONFIG, why=why)
        write_json(run_dir / "failure.json", failure(None, "no progress", why, ""))
        write_json(run_dir / "summary.json", read_summary(run_dir) | {"status": "failed"})
        print_error(f"{why}\n  fix: a smaller checkpoint.every, or a longer cluster.grace_s")
        return BAD_CONFIG  # the exit code that Kubernetes does not start again
    code = ranks.launch(run_dir)
    is_alone = cluster["nodes"] == 1
    if code == FAILED and ranks.failure.get("lost_peer") and not is_alone:
        resumes(run_dir)
        print(f"a pod was lost: {ranks.failure['message'].splitlines()[0]}", flush=True)
        return PREEMPTED  # that pod's own end counts, not this one
    if code == FAILED and num_failed(run_dir, job_id) <= cluster["max_restarts"]:
        resumes(run_dir)
    return code


def resumes(run_dir: Path) -> None:
    """Note that only this start has failed: Kubernetes starts the run again. attempts.jsonl keeps the cause."""
    write_json(run_dir / "summary.json", read_summary(run_dir) | {"status": "preempted"})
    (run_dir / "failure.json").unlink(missing_ok=True)


def other_node(config: dict[str, Any], run_dir: Path, rank: int) -> int:
    """Find the first node and run this node's ranks; return this pod's exit code.

    A failure is the first node's to report and to count, as it reads what ranks note. A killed rank notes nothing.
    """
    place = wait_for_first(config, run_dir)
    if place is None:
        return DONE
    if not place:
        start_s = config["cluster"]["start_s"]
        print(f"the first pod did not start within cluster.start_s={start_s} seconds", flush=True)
        return PREEMPTED
    ranks = Node(config, rank, place)
    code = ranks.launch(run_dir)
    return PREEMPTED if code == FAILED and not ranks.failure["type"].startswith("SIG") else code


def wait_for_first(config: dict[str, Any], run_dir: Path) -> dict[str, Any] | None:
    """Return where the first node listens; {}: it did not come; None: the run is done, and this pod is late."""
    deadline = time.monotonic() + config["cluster"]["start_s"]
    while time.monotonic() < deadline:
        look_again(run_dir)
        if is_done(run_dir, config):
            return None
        place = read_json(run_dir / RENDEZVOUS_FILE)
        try:
            socket.create_connection((place["address"], place["port"]), timeout=2).close()
            return place
        except (OSError, KeyError):  # not yet, or the file is of a pod that has ended
            time.sleep(LOOK_S)
    return {}


def own_address() -> str:
    return os.environ.get(POD_IP) or socket.gethostbyname(socket.gethostname())


class Node(Torchrun):
    """The ranks of this node. Restarts are Kubernetes' own."""

    def __init__(self, config: dict[str, Any], rank: int, place: dict[str, Any], job_id: str | None = None) -> None:
        self.job_id = job_id
        if config["cluster"]["kind"] != "compose":  # the init container has done it
            config["preflight"]["level"] = "off"
        cluster = config["cluster"]
        rendezvous = [f"--nnodes={cluster['nodes']}", f"--node-rank={rank}"]
        rendezvous += [f"--master-addr={place['address']}", f"--master-port={place['port']}"]
        super().__init__(config, rendezvous, 0, cluster["grace_s"], rank)

    def place(self) -> dict[str, Any]:
        return super().place() | {"job_id": self.job_id}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
