"""ASHA and PBT on real runs: what is paused, promoted and copied, and that a killed search changes nothing."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.search import search
from dtrain import start
from dtrain.cli import main
from dtrain.commands.search.driver import Driver
from dtrain.commands.search.request import algorithm, read_request
from dtrain.commands.search.trials import Trials, ending
from dtrain.launch import fork
from dtrain.runs.find import At
from dtrain.runs.protocol import PREEMPTED
from dtrain.runs.search_journal import JOURNAL, Journal, read_journal
from tests import slurm
from tests.patience import patience, until
from tests.world import losses, make_run, start_server, summary, train

cluster = slurm.cluster
TINY = [
    "model.num_layers=1", "model.dim=16", "model.num_heads=2", "model.vocab_size=31", "model.vocab_multiple=16",
    "model.seq_len=8", "data=synthetic", "train.global_batch_size=8", "train.eval_every=0", "train.eval_batches=2",
    "checkpoint.every=0", "schedule.warmup_steps=1", "cluster.processes=1",
]  # fmt: skip
ASHA = ["algorithm=asha", *TINY, "train.steps=6", "factor=3", "min_steps=2", "optim.lr=1e-3,1e-2,3e-2"]
PBT = ["algorithm=pbt", *TINY, "train.steps=6", "every=2", "population=2", "optim.lr=tag(log,interval(1e-3,1e-1))"]


@pytest.fixture(scope="module", autouse=True)
def server_of_all_tests() -> None:
    """The benchmark's ranks would start one without the strategies, and tests after these in this process find it."""
    start_server()


def of_kind(events: Sequence[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [e for e in events if e["event"] == kind]


def bits(values: dict[int, float]) -> dict[int, str]:
    return {step: loss.hex() for step, loss in values.items()}


def test_a_promoted_trial_is_the_run_that_never_paused(tmp_path: Path) -> None:
    events = search(tmp_path / "asha", ASHA)
    assert [(e["steps"]) for e in of_kind(events, "train")] == [2, 2, 2, 6]
    last = of_kind(events, "train")[-1]
    run = tmp_path / "asha" / last["run"]
    values = {e["trial"]: e["value"] for e in of_kind(events, "result")[:3]}
    assert last["trial"] == min(values, key=lambda trial: values[trial])
    whole = make_run(tmp_path / "whole", *TINY, "train.steps=6", f"optim.lr={last['values']['optim.lr']}")
    assert train(whole) == [0]
    assert bits(losses(run)) == bits(losses(whole)), "the schedule is that of the whole run, and so are all losses"
    assert summary(run)["weights_sha256"] == summary(whole)["weights_sha256"]
    assert summary(run)["start_step"] == 2, "resumed, not trained again"
    assert search(tmp_path / "asha", ASHA) == events, "the same search again has nothing to do"


@pytest.fixture(scope="module")
def population(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a search by PBT that nobody disturbed."""
    folder = tmp_path_factory.mktemp("pbt")
    search(folder, PBT)
    return folder


def test_a_member_that_copies_continues_the_donor(population: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, events = population, read_journal(population)
    exploits = of_kind(events, "exploit")
    assert [e["steps"] for e in exploits] == [2, 4] and len(of_kind(events, "train")) == 6
    for e in exploits:
        mine, donors = losses(folder / e["run"]), losses(folder / e["donor_run"])
        first = e["steps"] + 1
        assert e["values"] != e["donor_values"]
        assert mine[first].hex() == donors[first].hex(), "same weights, same samples"
        assert mine[first + 1] != donors[first + 1], "another learning rate"
        assert bits({s: mine[s] for s in range(1, first)}) == bits({s: donors[s] for s in range(1, first)})
    assert search(folder, PBT) == events, "the same search again has nothing to do, and lists the lineage"
    said = capsys.readouterr().out
    assert all(f"step {e['steps']}: trial {e['trial']} copies trial {e['donor']}; optim.lr " in said for e in exploits)
    assert main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    assert '<template id="lineage-picture"><svg' in page and page.count("copies member") == 2
    assert main(["runs", str(folder)]) == 0
    assert f"at-2-from-{exploits[0]['donor']}" in capsys.readouterr().out


def test_a_decision_that_was_not_carried_out_is_made_up_for(
    population: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search ends after each decision that it writes down, before it does anything about it."""
    carry_out, ends = Driver._carry_out, set()

    def end_once(self: Driver, event: dict[str, Any]) -> None:
        key = (event["event"], event["trial"], event["steps"])
        if key not in ends:
            ends.add(key)
            raise InterruptedError
        carry_out(self, event)

    monkeypatch.setattr(Driver, "_carry_out", end_once)
    for _ in range(50):
        with contextlib.suppress(InterruptedError):
            search(tmp_path, PBT)
            break
    assert len(ends) == 8 and outcome(tmp_path) == outcome(population)


def test_a_fork_has_an_id_of_its_own_and_leaves_the_donor_alone(tmp_path: Path) -> None:
    donor = make_run(tmp_path / "donor", *TINY, "train.steps=4", "train.stop_after=2")
    (donor / "launch.json").write_text(json.dumps({"id": "a" * 32}))
    assert train(donor) == [0]
    before = {p: p.read_bytes() for p in donor.rglob("*") if p.is_file()}
    (tmp_path / ".copy" / "checkpoints" / "step-00000002").mkdir(parents=True)  # of a process that was killed
    fork.make_run(At(donor, 2), tmp_path / "copy")
    assert json.loads((tmp_path / "copy" / "launch.json").read_text())["id"] != "a" * 32
    make_run(tmp_path / "copy", *TINY, "train.steps=4")
    assert train(tmp_path / "copy") == [0] and summary(tmp_path / "copy")["start_step"] == 2
    assert {p: p.read_bytes() for p in donor.rglob("*") if p.is_file()} == before
    assert not (tmp_path / ".copy").exists()


def test_a_journal_forgets_a_line_that_was_not_finished(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append({"event": "train", "trial": 0})
    with open(tmp_path / JOURNAL, "a") as file:
        file.write('{"event": "resu')
    assert read_journal(tmp_path) == [{"event": "train", "trial": 0}]
    Journal(tmp_path).append({"event": "result", "trial": 0})
    assert [e["event"] for e in read_journal(tmp_path)] == ["train", "result"]


def test_a_launcher_is_known_to_the_next_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the moment it is started, before the run has a folder."""
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    monkeypatch.setattr(start, "command", lambda module: sleep)
    first, second, run_dir = Trials(tmp_path, []), Trials(tmp_path, []), tmp_path / "0-run"
    assert not second.has_launcher(run_dir)
    first.launch(run_dir, [])
    try:
        assert first.has_launcher(run_dir) and second.has_launcher(run_dir) and second.num_launchers() == 1
        with pytest.raises(BlockingIOError):
            second.launch(run_dir, [])
    finally:
        first.processes[run_dir].kill()
        first.processes[run_dir].wait()
    assert not first.has_launcher(run_dir) and not second.has_launcher(run_dir) and second.num_launchers() == 0


def test_a_stop_before_a_trial_has_begun_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher is ended by the signal while it imports: the trial has no result, and is started again."""
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    monkeypatch.setattr(start, "command", lambda module: sleep)
    handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in handled}
    timer = threading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM))
    request = read_request(ASHA)
    driver = Driver(tmp_path, request, algorithm(request))
    monkeypatch.setattr(driver.trials, "pause", lambda: time.sleep(0.05))
    try:
        timer.start()
        assert driver.run() == PREEMPTED
    finally:
        timer.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)
    assert [e["event"] for e in read_journal(tmp_path)] == ["train"]


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (["algorithm=hyperband"], ("algorithm=hyperband", "optuna, asha, bohb, pbt")),
        (["algorithm=asha", "every=5"], ("every=5", "not an option of algorithm=asha")),
        (["algorithm=asha", "factor=1"], ("factor=1", "at least 2")),
        (["algorithm=asha", "min_steps=0"], ("min_steps=0", "at least 1")),
        (["algorithm=asha", "min_steps=20", "train.steps=20"], ("min_steps=20", "less than train.steps=20")),
        (["algorithm=asha", "train.steps=10,20"], ("train.steps", "the same number")),
        (["algorithm=asha", "train.stop_after=3"], ("train.stop_after=3", "for each run")),
        (["algorithm=asha", "train.eval_batches=0"], ("metric=val_loss", "do not evaluate")),
        (["algorithm=asha", "train.stepps=3"], ("train.stepps", "did you mean train.steps")),
        (["algorithm=pbt", "population=1"], ("population=1", "at least 2")),
        (["algorithm=pbt", "quantile=0.6"], ("quantile=0.6", "at most 0.5")),
        (["algorithm=pbt", "resample=2"], ("resample=2", "between 0 and 1")),
        (["algorithm=pbt", "factors=0.8,1"], ("factors=0.8,1", "other than 1")),
        (["algorithm=pbt", "factors=few"], ("factors=few", "must be a number")),
        (["algorithm=pbt", "every=300"], ("every=300", "less than train.steps=300")),
        (["algorithm=pbt", "model.dim=32,64"], ("model.dim", "cannot change there")),
        (["algorithm=pbt", "train.seed=1,2"], ("train.seed", "cannot change there")),
        (["algorithm=pbt", "optim=sgd", "optim.momentum=0.0,0.9"], ("optim.momentum", "keeps that state")),
        (["algorithm=pbt", "optim=sgd", "optim.nesterov=true,false"], ("optim.nesterov", "keeps that state")),
        (["algorithm=pbt", "trials=5"], ("trials=5", "not an option of algorithm=pbt", "fix: population=5")),
    ],
)
def test_mistakes_are_explained_and_leave_nothing(
    typed: list[str], words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["search", "optim.lr=interval(1e-3,1e-2)", *typed]) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in (*words, "fix: ")), error
    assert not list(tmp_path.iterdir())


def test_a_recipe_of_another_algorithm_gives_its_space_only() -> None:
    request = read_request(["recipe=search-lr", "algorithm=pbt", "population=6"])
    assert "trials" not in request.options and request.options["population"] == "6"
    assert [o.key_or_group for o in request.space] == ["optim.lr", "schedule.warmup_steps"]
    assert read_request(["recipe=search-lr", "algorithm=asha"]).options["trials"] == "8"


def test_another_search_in_the_same_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sweep.json").write_text(json.dumps({"arguments": ["search", *sorted(PBT)]}))
    assert main(["search", *ASHA, f"dir={tmp_path}"]) == 2
    assert "other settings" in capsys.readouterr().err


TRAIN = {"event": "train", "trial": 0, "steps": 2, "run": "0-optim.lr=0.01", "values": {"optim.lr": 0.01}}


@pytest.mark.parametrize(
    "change",
    [
        {"run": "../../elsewhere"}, {"run": ".hidden"}, {"run": 3}, {"values": {"model": "theirs.Net"}}, {"steps": 3},
        {"values": {"optim.lr": 0.5}}, {"values": {"optim.lr": "0.01"}}, {"trial": -1}, {"event": "exploit"},
    ],
)  # fmt: skip
def test_a_journal_of_another_search_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    request = read_request(ASHA)
    journal = Journal(tmp_path)
    journal.append(TRAIN)
    assert len(Driver(tmp_path, request, algorithm(request)).journal.events) == 1
    journal.append(TRAIN | change)
    with pytest.raises(ValueError, match="other settings"):
        Driver(tmp_path, request, algorithm(request))


def test_a_failed_trial_has_its_reason(tmp_path: Path) -> None:
    (tmp_path / "failure.json").write_text(json.dumps({"rank": 1, "type": "ValueError", "message": "no such word"}))
    assert ending(3, "failed", tmp_path).startswith("trial 3: failed: rank 1: ValueError: no such word; dtrain why ")
    assert ending(3, "died", tmp_path).startswith("trial 3: died; dtrain why ")


def test_for_an_accuracy_large_is_good() -> None:
    assert read_request([*ASHA, "metric=val_accuracy"]).sign == -1
    assert read_request([*ASHA, "metric=val_accuracy", "direction=minimize"]).sign == 1


# ---- the command itself, with its launcher: long


NET = """
from dtrain.models.gpt2 import GPT2


class Net(GPT2):
    def __init__(self, num_layers: int, dim: int, num_heads: int, vocab_size: int, seq_len: int) -> None:
        super().__init__(num_layers, dim, num_heads, vocab_size, seq_len)
"""


def test_a_model_of_the_users_own_is_promoted(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET)
    folder = tmp_path / "search"
    words = [w for w in ASHA if not w.startswith("model.vocab_multiple")]
    assert begin(folder, ["model=net.Net", *words]).wait(patience(300)) == 0, (tmp_path / "search.log").read_text()
    assert [e["steps"] for e in of_kind(read_journal(folder), "train")] == [2, 2, 2, 6]


def begin(folder: Path, words: Sequence[str], env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "dtrain", "search", *words, f"dir={folder}"]
    with open(folder.with_suffix(".log"), "ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=env, cwd=folder.parent)


def outcome(folder: Path) -> tuple[list[str], dict[str, str]]:
    """What the search decided and found, in any order, and the weights of all its runs."""
    events = read_journal(folder)
    return sorted(map(str, events)), {
        run: summary(folder / run)["weights_sha256"] for run in sorted({e["run"] for e in events if "run" in e})
    }


@pytest.mark.parametrize("words", [ASHA, [*PBT, "parallel=2"]], ids=["asha", "pbt"])
@pytest.mark.timeout(3600)
def test_killing_the_search_ten_times_changes_nothing(words: list[str], tmp_path: Path) -> None:
    began = time.monotonic()
    plain, killed = tmp_path / "plain", tmp_path / "killed"
    assert begin(plain, words).wait(patience(300)) == 0, (tmp_path / "plain.log").read_text()
    whole_s, rng, num_kills = time.monotonic() - began, random.Random(os.urandom(8)), 0
    process = begin(killed, words)
    while num_kills < 10:
        try:
            assert process.wait(rng.uniform(0, 0.1) * whole_s) == 0, (tmp_path / "killed.log").read_text()
            break
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            num_kills += 1
            process = begin(killed, words)
    assert process.wait(patience(600)) == 0, (tmp_path / "killed.log").read_text()
    assert num_kills == 10, "the search was over before it could be killed"
    assert outcome(killed) == outcome(plain)
    for event in of_kind(read_journal(plain), "exploit"):  # in the table at the end
        name = event["run"].partition("-")[2]
        assert f"{name} optim.lr={event['values']['optim.lr']}" in (tmp_path / "plain.log").read_text()
    trainings = Counter(e["run"] for e in of_kind(read_journal(killed), "train"))
    for (
        run,
        count,
    ) in trainings.items():  # a run that was training when the search was killed was neither lost nor doubled
        assert len(json.loads((killed / run / "launch.json").read_text())["launches"]) == count


def test_asha_on_slurm(tmp_path: Path, cluster: slurm.Cluster) -> None:
    folder = tmp_path / "search"
    where = ["cluster=slurm", "cluster.gpus_per_node=0", "preflight=off", "parallel=2"]
    words = [w for w in ASHA if not w.startswith("cluster.")]
    process = begin(folder, [*words, *where], cluster.client_env())
    assert process.wait(patience(120)) == 0, (tmp_path / "search.log").read_text()
    log = folder / "search.log"
    until(lambda: "best: trial" in log.read_text(), "the end", 180, lambda: log.read_text() + cluster.state())
    events = read_journal(folder)
    assert Counter(e["steps"] for e in of_kind(events, "train")) == {2: 3, 6: 1}
    assert len(of_kind(events, "result")) == 4 and all(e["value"] is not None for e in of_kind(events, "result"))
    assert summary(folder / of_kind(events, "train")[-1]["run"])["start_step"] == 2


def test_asha_on_ray(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    folder = tmp_path / "search"
    assert begin(folder, [*ASHA, "cluster=ray"]).wait(patience(300)) == 0, (tmp_path / "search.log").read_text()
    events = read_journal(folder)
    assert Counter(e["steps"] for e in of_kind(events, "train")) == {2: 3, 6: 1}
    assert summary(folder / of_kind(events, "train")[-1]["run"])["start_step"] == 2
