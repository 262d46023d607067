"""`script=FILE` as a user meets it: real launches of programs that know nothing of dtrain, and of one that does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dtrain import script
from dtrain.config.run_file import program
from dtrain.launch import script_rank, script_world
from dtrain.runs.protocol import SCRIPT_TYPED
from tests.launch.test_local import listen_to_signals
from tests.patience import patience, until
from tests.world import ROOT, spawn

PLAIN = """
import os, sys, time
import beside
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "got", sys.argv[1:], flush=True)
if "fail" in sys.argv and os.environ["RANK"] == "1" and not os.path.exists("healed"):
    open("healed", "w").close()
    def load(sample): raise ValueError(f"bad sample {sample}")
    load(17)
if "usage" in sys.argv:
    sys.exit(2)
time.sleep(float(os.environ.get("SLEEP", 0)))
"""
# a counter that two ranks keep in step without torch; a save after each step that is asked to be the last
TAKES_PART = """
import json, os, sys, time
from dtrain import script
path = script.checkpoint_dir() / f"count-{script.rank()}.json"
count = json.loads(path.read_text()) if path.exists() else 0
while count < int(sys.argv[1]):
    count += 1
    script.log(count, loss=1 / count)
    if script.stop_requested():
        path.write_text(json.dumps(count))
        script.exit_stopped()
    time.sleep(0.05)
"""


# a shell script without exec; its child has a session of its own, and a child
SHELL = """#!/bin/sh
echo begins
setsid sh -c 'sleep 987 & echo $! > grandchild; wait' &
echo $! > child
wait
echo ends
"""


def launch(cwd: Path, *words: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(ROOT / "launch.py"), *words],
        cwd=cwd, env=os.environ | {"OMP_NUM_THREADS": "1"} | (env or {}),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=listen_to_signals,
    )  # fmt: skip


def run(cwd: Path, *words: str) -> tuple[int, str]:
    process = launch(cwd, *words)
    output, _ = process.communicate(timeout=patience(90))
    return process.returncode, output


def summary(run_dir: Path) -> dict[str, Any]:
    return dict(json.loads((run_dir / "summary.json").read_text()))


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "plain.py").write_text(PLAIN)
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "part.py").write_text(TAKES_PART)
    yield tmp_path


def test_a_program_that_fails_once_is_named_and_started_again(here: Path) -> None:
    words = ["script=plain.py", "script_args=[--lr,1e-3,True,fail]", "cluster.processes=2", "cluster.max_restarts=1"]
    code, output = run(here, *words, "run_dir=run")
    assert code == 0, output
    assert "attempt 1 failed: rank 1: ValueError: bad sample 17 (logs/rank-1.log)" in output
    assert "rank 0 of 2 got ['--lr', '1e-3', 'True', 'fail']" in output, "the program's words, as typed"
    assert summary(here / "run")["status"] == "done" and "plain.py --lr 1e-3 True fail · 2 ranks" in output
    assert "rank 1 of 2" in (here / "run/logs/rank-1.log").read_text()


def test_a_failure_is_reported_as_for_our_own_runs(here: Path) -> None:
    code, output = run(here, "script=plain.py", "script_args=fail", "cluster.processes=2", "run_dir=run")
    assert code == 3 and "rank 1: ValueError" in output and f"{here}/plain.py:7, in load" in output
    assert f"resume=./run script={here}/plain.py" in output
    note = json.loads((here / "run/failure.json").read_text())
    assert (note["rank"], note["type"], note["message"]) == (1, "ValueError", "bad sample 17")
    assert note["traceback"].startswith("Traceback") and summary(here / "run")["status"] == "failed"


def test_exit_code_2_is_a_bad_configuration_and_is_not_tried_again(here: Path) -> None:
    words = ["script=plain.py", "script_args=usage", "cluster.processes=1", "cluster.max_restarts=3", "run_dir=run"]
    code, output = run(here, *words)
    assert code == 2 and "restart" not in output


def test_ctrl_c_saves_and_a_resume_has_each_step_once(here: Path) -> None:
    process = launch(here, "script=part.py", "script_args=60", "cluster.processes=2", "run_dir=run", "logger=csv")
    metrics = here / "run/metrics.jsonl"
    until(lambda: metrics.exists() and metrics.read_text().count("\n") > 3, "four steps", 60)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=patience(60))
    assert process.returncode == 75 and summary(here / "run")["status"] == "preempted", output
    assert (here / "run/checkpoints/count-0.json").exists() and (here / "run/checkpoints/count-1.json").exists()

    code, output = run(here, "resume=run")
    assert code == 2 and f"script={here}/part.py, which is never read from a run folder" in output
    code, output = run(here, "resume=run", "script=part.py", "script_args=9")
    assert code == 2 and "script.args: ['60'] → ['9']" in output
    code, output = run(here, "resume=run", "script=part.py")
    assert code == 0 and summary(here / "run")["status"] == "done", output
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == list(range(1, 61))
    assert (here / "run/metrics.csv").read_text().count("\n") == 61, "the trackers follow it, too"
    assert summary(here / "run")["steps"] == 60
    code, output = run(here, "resume=run", "script=part.py")
    assert code == 2 and "has ended with exit code 0" in output


def test_a_program_that_knows_nothing_gets_the_signal(here: Path) -> None:
    process = launch(here, "script=plain.py", "cluster.processes=2", "run_dir=run", env={"SLEEP": "600"})
    log = here / "run/logs/rank-1.log"
    until(lambda: log.exists() and "rank 1 of 2" in log.read_text(), "the program", 60)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=patience(60))
    assert process.returncode == 75 and "ended with SIGTERM after a stop request" in log.read_text(), output


@pytest.mark.parametrize("victim", ["rank", "its child"])
def test_a_killed_rank_leaves_no_process_behind(victim: str, here: Path) -> None:
    (here / "run.sh").write_text(SHELL)
    (here / "run.sh").chmod(0o755)
    process = launch(here, "script=run.sh", "cluster.processes=1", "run_dir=run")
    until(lambda: (here / "grandchild").exists() and (here / "grandchild").read_text(), "the shell's children", 60)
    rank = next(p for p in psutil.process_iter(["cmdline"]) if is_rank(p.info["cmdline"] or [], here / "run"))
    left = [rank, *rank.children(recursive=True)]
    assert int((here / "grandchild").read_text()) in [p.pid for p in left] and len(left) > 4
    (rank if victim == "rank" else rank.children()[0]).kill()
    output, _ = process.communicate(timeout=patience(60))
    assert process.returncode == 3 and "SIGKILL" in output
    until(lambda: not any(p.is_running() and p.status() != "zombie" for p in left), "all processes gone", 20)


def is_rank(words: list[str], run_dir: Path) -> bool:
    return words[-2:] == ["dtrain.launch.script_rank", str(run_dir)] and "torch.distributed.run" not in words


def test_a_failed_save_after_a_stop_request_is_a_failure(here: Path) -> None:
    (here / "part.py").write_text(TAKES_PART.replace("path.write_text(", "raise OSError('no space left') #"))
    process = launch(here, "script=part.py", "script_args=600", "cluster.processes=1", "run_dir=run")
    metrics = here / "run/metrics.jsonl"
    until(lambda: metrics.exists() and metrics.read_text(), "a step", 60)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=patience(60))
    assert process.returncode == 3 and "OSError" in output and "no space left" in output


def test_a_progress_bar_is_shown_now_and_then(here: Path) -> None:
    (here / "bar.py").write_text(
        "import time\nprint('begins')\n"
        "for i in range(100): print(f'\\r{i}% |###', end='', flush=True); time.sleep(0.03)\nprint('\\rall of it')\n"
    )
    code, output = run(here, "script=bar.py", "cluster.processes=1", "run_dir=run")
    texts = [line for line in output.splitlines() if line.endswith("% |###")]
    assert code == 0 and 1 <= len(texts) <= 5 and "all of it" in output.splitlines(), output


def test_a_sweep_over_arguments(here: Path) -> None:
    code, output = run(
        here, "-m", "script=plain.py", "script_args=[a],[b,2]", "cluster.processes=1", "hydra.sweep.dir=s"
    )
    assert code == 0, output
    logs = sorted(path.read_text() for path in (here / "s").glob("*/logs/rank-0.log"))
    assert len(logs) == 2 and "got ['a']" in logs[0] and "got ['b', '2']" in logs[1]


def test_what_a_run_folder_names_is_never_started(here: Path) -> None:
    """Whoever changes a run's config.yaml must not choose what the next start executes."""
    (here / "evil.py").write_text("open('evil', 'w')")
    process = launch(here, "script=part.py", "script_args=600", "cluster.processes=1", "run_dir=run")
    metrics = here / "run/metrics.jsonl"
    until(lambda: metrics.exists() and metrics.read_text(), "a step", 60)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=patience(60))
    assert process.returncode == 75, output
    config = here / "run/config.yaml"
    was = config.read_text()
    config.write_text(was.replace("python: null", f"python: {here}/evil.sh"))
    code, output = run(here, "resume=run", "script=part.py", "script_args=1")
    assert code == 2 and f"script.python={here}/evil.sh, which is never read from a run folder" in output
    config.write_text(was.replace("part.py", "evil.py"))
    ranks = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        SCRIPT_TYPED: f"{here}/part.py",
    }
    command = [sys.executable, "-m", "dtrain.launch.script_rank", str(here / "run")]
    started = subprocess.run(command, cwd=here, env=os.environ | ranks | {"PYTHONPATH": str(ROOT)})
    assert started.returncode == 2 and not (here / "evil").exists()
    assert "that was not typed" in (here / "run/logs/rank-0.log").read_text()


@pytest.mark.parametrize("level", ["quick", "full"])
def test_preflight_comes_first(level: str, here: Path) -> None:
    code, output = run(here, "script=plain.py", "cluster.processes=1", f"preflight={level}", "run_dir=run")
    assert code == 0 and "preflight" in output, output


# ---- refused before anything starts --------------------------------------------------------------------------


@pytest.mark.parametrize("words, problem", [
    (["script=no.py"], "there is no such file"),
    (["script=notes.txt"], "cannot be executed"),
    (["script=plain.py", "model=gpt2-tiny"], "is a setting of dtrain's own training loop"),
    (["script=plain.py", "train.steps=3"], "is a setting of dtrain's own training loop"),
    (["script=plain.py", "script.env=slurm"], "must be one of torchrun, horovod"),
    (["script=plain.py", "cluster.processes=1:2"], "the number of ranks of a program is fixed"),
    (["script=plain.py", "script.arg=3"], "script.args"),
    (["recipe=theirs.yaml"], "script may be given on the command line only"),
])  # fmt: skip
def test_bad_input(words: list[str], problem: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from dtrain.launch.app import main

    (here / "notes.txt").write_text("no program")
    (here / "theirs.yaml").write_text("script: {path: plain.py}\n")
    monkeypatch.chdir(here)
    assert main(words) == 2
    assert problem in capsys.readouterr().err
    assert not (here / "outputs").exists()


# ---- the command line ----------------------------------------------------------------------------------------


def test_a_hostile_name_is_not_offered(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("script:\n  path: 'x; rm -rf ~'\n")
    assert program(tmp_path) == []


# ---- stops ---------------------------------------------------------------------------------------------------


def ask(run_dir: Path, calls: int, stop_at: int) -> None:
    """One rank of a program: quick calls, then slow ones; rank 1 alone sees the request. Writes when it stopped."""
    import torch.distributed as dist

    rank, sent = dist.get_rank(), []
    all_reduce = dist.all_reduce
    dist.all_reduce = lambda *words: (sent.append(1), all_reduce(*words))
    os.environ |= {"DTRAIN_RUN_DIR": str(run_dir)}
    for call in range(1, calls + 1):
        if rank == 1 and call == stop_at:
            (run_dir / "stop").touch()
        if script.stop_requested():
            (run_dir / f"stopped-{rank}").write_text(f"{call} {len(sent)}")
            return
    (run_dir / f"stopped-{rank}").write_text("never")


def test_ranks_stop_after_the_same_call_and_vote_seldom(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    spawn(2, ask, tmp_path, 200, 100)
    (call, votes), other = ((tmp_path / f"stopped-{rank}").read_text().split() for rank in (0, 1))
    assert [call, votes] == other and 100 <= int(call) <= 120 and int(votes) < int(call)


# ---- worlds --------------------------------------------------------------------------------------------------


def variables(world: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> list[dict[str, str]]:
    """What each of `size` ranks of one host gets; ranks are threads, which share an environment."""
    (tmp_path / "logs").mkdir()
    ranks = threading.local()

    class Environment(dict[str, str]):
        def __getitem__(self, name: str) -> str:
            return str(ranks.number) if name in ("RANK", "LOCAL_RANK") else super().__getitem__(name)

    shared = {"WORLD_SIZE": f"{size}", "LOCAL_WORLD_SIZE": f"{size}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    monkeypatch.setattr(script_world.os, "environ", Environment(shared))
    found: dict[int, dict[str, str]] = {}

    def rank(number: int) -> None:
        ranks.number = number
        with script_world.environment(world, tmp_path) as wanted:
            found[number] = dict(wanted)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[number] for number in range(size)]


def test_tensorflow_gets_every_workers_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs = [json.loads(found["TF_CONFIG"]) for found in variables("tensorflow", tmp_path, monkeypatch, 3)]
    assert [config["task"] for config in configs] == [{"type": "worker", "index": i} for i in range(3)]
    workers = configs[0]["cluster"]["worker"]
    assert all(config["cluster"]["worker"] == workers for config in configs) and len(set(workers)) == 3


def test_jax_gets_one_coordinator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = variables("jax", tmp_path, monkeypatch, 2)
    assert [one["JAX_PROCESS_ID"] for one in found] == ["0", "1"]
    assert len({one["JAX_COORDINATOR_ADDRESS"] for one in found}) == 1 and found[0]["JAX_NUM_PROCESSES"] == "2"
    # what jax.distributed.initialize() without arguments looks for
    assert "OMPI_MCA_orte_hnp_uri" in found[1] and found[1]["OMPI_COMM_WORLD_RANK"] == "1"


def test_horovod_gets_its_place_and_rank_0s_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = variables("horovod", tmp_path, monkeypatch, 2)
    assert [one["HOROVOD_RANK"] for one in found] == ["0", "1"] and found[1]["HOROVOD_LOCAL_SIZE"] == "2"
    stores = {(one["HOROVOD_GLOO_RENDEZVOUS_ADDR"], one["HOROVOD_GLOO_RENDEZVOUS_PORT"]) for one in found}
    assert len(stores) == 1 and found[1]["HOROVOD_GLOO_IFACE"] == "lo"


def test_mpi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = variables("mpi", tmp_path, monkeypatch, 2)
    assert [one["OMPI_COMM_WORLD_RANK"] for one in found] == ["0", "1"] and found[0]["PMI_SIZE"] == "2"


# ---- last words ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text, kind, message", [
    ("Traceback (most recent call last):\n  File \"/x/a.py\", line 3, in f\nKeyError: 'k'\n", "KeyError", "'k'"),
    ("[rank1]: Traceback (most recent call last):\n[rank1]: torch.OutOfMemoryError: no\n", "OutOfMemoryError", "no"),
    ("usage: a.py\na.py: error: --lr is missing\n", "exit code 1", "usage: a.py\na.py: error: --lr is missing"),
    ("", "exit code 1", "it printed nothing"),
])  # fmt: skip
def test_last_words(text: str, kind: str, message: str, tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text("of an earlier start: ValueError: old\n")
    began = log.stat().st_size
    with open(log, "a") as file:
        file.write(text)
    found = script_rank.last_words(log, began, 1)
    assert (found["type"], found["message"]) == (kind, message)


def test_a_silent_program_is_found_once(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs/rank-0.log"
    log.write_text("begins")
    silence = script_rank.Silence(tmp_path, 0.2)
    assert silence.look() == ""
    time.sleep(0.25)
    assert "no rank has written anything for 0.3s (cluster.hang_timeout=0.2)" in silence.look().replace("0.2s", "0.3s")
    assert silence.look() == "", "once"
    log.write_text("goes on")
    assert silence.look() == "" and script_rank.Silence(tmp_path, None).look() == ""
