"""The local launcher as a user meets it: real `python launch.py` processes, signals, kills, restarts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtrain.launch.failures import first_failure
from dtrain.launch.supervisor import origin
from dtrain.launch.torchrun import killed_ranks
from tests.patience import patience, until
from tests.world import ROOT, SMALL, losses, metrics, summary

FAILING = """
import os, time
from dtrain.models.gpt2 import GPT2

class Failing(GPT2):
    def forward(self, inputs, targets=None):
        if os.environ["RANK"] == "1" and not os.path.exists(os.environ["HEALED"]):
            self.calls = getattr(self, "calls", 0) + 1
            if self.calls > 7:  # ddp begins with a pass that does not count
                open(os.environ["HEALED"], "w").close()
                {how}
        return super().forward(inputs, targets)
"""


def launch(cwd: Path, *overrides: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / "launch.py"), *SMALL, "run_dir=run", *overrides]
    environment = os.environ | {"OMP_NUM_THREADS": "1", **(env or {})}
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=listen_to_signals,
    )
    STARTED.append(process)
    return process


def listen_to_signals() -> None:
    """A background job ignores SIGINT, one under nohup SIGHUP, and dtrain respects that; these tests send both."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


STARTED: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """A test that failed must not leave a run behind, which would slow all others down."""
    yield
    for process in STARTED:
        if process.poll() is None:
            process.kill()
            process.communicate()
    STARTED.clear()


def wait_for_step(run: Path, step: int, process: subprocess.Popen[str]) -> None:
    def reached() -> bool:
        assert process.poll() is None, process.communicate()[0]
        return bool(lines := metrics(run)) and lines[-1]["step"] >= step

    until(reached, f"step {step} of {run}", 60, lambda: str(metrics(run)[-1:]))


def ranks_of(run: Path) -> list[int]:
    """Processes that train in this run folder: torchrun and the ranks, found by their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if (b"dtrain.train.rank" in command or b"dtrain.train.starter" in command) and str(run).encode() in command:
                found.append(int(entry.name))
    return found


def assert_no_orphans(run: Path) -> None:
    until(lambda: not ranks_of(run), "the end of all ranks", 5, lambda: f"still alive: {ranks_of(run)}")


def test_a_run_whose_output_nobody_reads_continues_and_saves(tmp_path: Path) -> None:
    """`launch.py | head -3`, or `| tee log`: Ctrl-C ends tee before the launcher has printed its last lines."""
    process = launch(tmp_path, "train.steps=100000")
    assert process.stdout is not None and process.stdout.readline()
    process.stdout.close()
    wait_for_step(tmp_path / "run", 30, process)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 75
    assert summary(tmp_path / "run")["status"] == "preempted" and (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP])
def test_a_signal_saves_at_the_step_boundary_and_ends_with_75(number: signal.Signals, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = launch(tmp_path, "train.steps=100000", "cluster.processes=2")
    wait_for_step(run, 5, process)
    process.send_signal(number)
    output, _ = process.communicate(timeout=patience(60))
    assert process.returncode == 75, output
    assert_no_orphans(run)
    last = metrics(run)[-1]["step"]
    assert summary(run)["status"] == "preempted" and summary(run)["steps"] == last
    assert (run / "checkpoints" / "latest").read_text() == f"step-{last:08d}\n"
    assert "stop requested" in output and "resume=./run" in output


@pytest.mark.parametrize("after", [0.5, 1.5, 2.5, 3.5, 5.0])
def test_killing_the_launcher_while_it_starts_leaves_no_orphans(after: float, tmp_path: Path) -> None:
    process = launch(tmp_path, "train.steps=100000", "cluster.processes=2")
    time.sleep(after)
    process.kill()
    process.communicate()
    assert_no_orphans(tmp_path / "run")


def test_two_signals_of_a_scheduler_are_one_request(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    words = ("train.steps=100000", "cluster.processes=2", "train.loader_workers=1")
    process = launch(tmp_path, *words, env={"TMPDIR": str(tmp_path / "tmp")})
    wait_for_step(tmp_path / "run", 2, process)
    process.send_signal(signal.SIGUSR1)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=patience(60))
    assert process.returncode == 75, output
    # nothing is left of torchrun's folder, nor of the loaders' sockets; torch's cache of compiled code is meant to stay
    assert {p.name for p in (tmp_path / "tmp").iterdir() if not p.name.startswith("torchinductor")} == set()


def test_a_run_that_is_running_is_not_resumed(tmp_path: Path) -> None:
    process = launch(tmp_path, "train.steps=100000", "cluster.processes=1", "checkpoint.every=5")
    wait_for_step(tmp_path / "run", 6, process)
    command = [sys.executable, str(ROOT / "launch.py"), "resume=run"]
    second = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert second.returncode == 2 and f"the run is running (process {process.pid})" in second.stderr
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75


def test_a_failed_resume_leaves_the_configuration_as_it_was(tmp_path: Path) -> None:
    assert launch(tmp_path, "cluster.processes=1", "train.stop_after=4").wait(60) == 0
    before = (tmp_path / "run" / "config.yaml").read_text()
    command = [sys.executable, str(ROOT / "launch.py"), "resume=run", "model.dim=64", "resume_allow=[model.dim]"]
    second = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert second.returncode == 2 and "is a checkpoint of another model" in second.stdout
    assert (tmp_path / "run" / "config.yaml").read_text() == before


def test_killing_the_launcher_leaves_no_orphans(tmp_path: Path) -> None:
    process = launch(tmp_path, "train.steps=100000", "cluster.processes=2")
    wait_for_step(tmp_path / "run", 2, process)
    assert len(ranks_of(tmp_path / "run")) == 3  # the starter and two ranks
    process.kill()
    process.communicate()
    assert_no_orphans(tmp_path / "run")


@pytest.mark.parametrize(
    "how, message",
    [
        ("raise RuntimeError('the loss function exploded')", "the loss function exploded"),
        ("os.kill(os.getpid(), 9)", "killed by SIGKILL"),
    ],
)
def test_the_first_error_is_shown_with_its_rank(how: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FAILING.format(how=how))
    process = launch(
        tmp_path,
        "cluster.processes=2",
        "model._target_=mine.Failing",
        "trust=[mine]",
        env={"HEALED": str(tmp_path / "healed"), "PYTHONPATH": str(tmp_path)},
    )
    output, _ = process.communicate(timeout=patience(90))
    assert process.returncode == 3, output
    failure = json.loads((tmp_path / "run" / "failure.json").read_text())
    assert failure["rank"] == 1 and message in failure["message"]
    assert "rank 1" in output and message in output and "logs/rank-1.log" in output
    assert "Traceback" not in output
    assert summary(tmp_path / "run")["status"] == "failed"
    assert_no_orphans(tmp_path / "run")


def test_a_restart_before_the_first_save_says_so(tmp_path: Path) -> None:
    assert origin(tmp_path) == "from the beginning, as nothing was saved yet"
    saved = tmp_path / "checkpoints" / "step-00000006"
    saved.mkdir(parents=True)
    assert origin(tmp_path) == "from the beginning, as nothing was saved yet", "without its manifest it is none"
    (saved / "manifest.json").touch()
    assert origin(tmp_path) == "from step-00000006"


def test_restart_goes_on_from_the_newest_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FAILING.format(how="raise RuntimeError('once')"))
    process = launch(
        tmp_path,
        "cluster.processes=2",
        "model._target_=mine.Failing",
        "trust=[mine]",
        "checkpoint.every=3",
        "cluster.max_restarts=1",
        env={"HEALED": str(tmp_path / "healed"), "PYTHONPATH": str(tmp_path)},
    )
    output, _ = process.communicate(timeout=patience(90))
    assert process.returncode == 0, output
    assert "restart 1 of 1 from step-00000006" in output
    assert "attempt 1 failed: rank 1: RuntimeError: once (logs/rank-1.log)" in output
    assert not (tmp_path / "run" / "failure.json").exists(), "it has not failed"
    assert not list((tmp_path / "run" / "logs").glob("failure-*.json"))
    assert summary(tmp_path / "run")["start_step"] == 6
    assert sorted(losses(tmp_path / "run")) == list(range(1, 21)), "every step once, none twice"


def test_resume_under_another_strategy_and_world_size(tmp_path: Path) -> None:
    first = launch(tmp_path, "strategy=ddp", "cluster.processes=2", "train.stop_after=6")
    assert first.wait(60) == 0
    command = [sys.executable, str(ROOT / "launch.py"), "resume=run", "strategy=fsdp", "cluster.processes=1"]
    second = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert second.returncode == 0, second.stdout + second.stderr
    assert "resuming from step 6" in second.stdout
    assert summary(tmp_path / "run")["strategy"] == "fsdp" and sorted(losses(tmp_path / "run")) == list(range(1, 21))
    third = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert third.returncode == 2 and "the run has already done 20 steps" in third.stderr
    assert summary(tmp_path / "run")["train_loss"], "a finished run's summary is left alone"
    launches = json.loads((tmp_path / "run" / "launch.json").read_text())["launches"]
    assert [entry["choices"]["strategy"] for entry in launches] == ["ddp", "fsdp"]
    assert os.stat(tmp_path / "run").st_mode & 0o777 == 0o700


def test_a_host_name_that_does_not_resolve_costs_nothing(tmp_path: Path) -> None:
    """torchrun hands the ranks the host's name unless it is told an address, and they look it up for ten minutes."""
    host = ["unshare", "--uts", "sh", "-c", 'hostname no-such-host-4711 && exec "$@"', "sh"]
    if shutil.which("unshare") is None or subprocess.run([*host, "true"], capture_output=True).returncode:
        pytest.skip("this user may not change the host's name, not even in a namespace of its own")
    words = [*SMALL, "run_dir=run", "train.steps=2", "cluster.processes=2", "preflight=quick"]
    command = [*host, sys.executable, str(ROOT / "launch.py"), *words]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stdout + result.stderr
    said = (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    assert "on no-such-host-4711" in said and "cannot be retrieved" not in said, said


def test_a_sweep_ends_in_one_table(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "launch.py"),
        "-m",
        *SMALL,
        "train.steps=3",
        "cluster.processes=1",
        "strategy=ddp,fsdp",
    ]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    runs = sorted(p.parent for p in tmp_path.glob("multirun/*/*/*/summary.json"))
    assert len(runs) == 2 and all(summary(r)["status"] == "done" for r in runs)
    table = result.stdout[result.stdout.rindex("next ") :]
    for word in ("strategy=ddp", "strategy=fsdp", "done", "tok"):
        assert word in table, table


def test_the_killed_rank_is_named_not_the_one_that_lost_its_peer(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    note = {
        "time": 1.0,
        "rank": 0,
        "type": "RuntimeError",
        "message": "Connection closed by peer [127.0.0.1]:1",
        "lost_peer": True,
        "exit_code": 3,
    }
    (tmp_path / "logs" / "failure-0.json").write_text(json.dumps(note))
    log = "Root Cause:\n  rank      : 0 (local_rank: 0)\n  exitcode  : 3 (pid: 7)\n"
    log += "[1]:\n  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 8)\n"
    assert first_failure(tmp_path, killed_ranks(log))["rank"] == 1
    note["lost_peer"] = False  # the same words, but of the user's own code
    (tmp_path / "logs" / "failure-0.json").write_text(json.dumps(note))
    assert first_failure(tmp_path, killed_ranks(log))["rank"] == 0


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FAILING.format(how="time.sleep(600)"))
    process = launch(
        tmp_path,
        "cluster.processes=2",
        "model._target_=mine.Failing",
        "trust=[mine]",
        "checkpoint.every=2",
        env={"HEALED": str(tmp_path / "healed"), "PYTHONPATH": str(tmp_path)},
    )
    wait_for_step(tmp_path / "run", 6, process)
    for _ in range(2):  # rank 1 hangs in its step: the first request cannot be met
        time.sleep(3)  # a second Ctrl-C counts when it comes more than 1 s after the first was handled
        process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=patience(20))
    assert process.returncode == 3, output
    assert "stopped twice" in output and "resume=./run" in output
    assert_no_orphans(tmp_path / "run")
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == "step-00000006\n"
