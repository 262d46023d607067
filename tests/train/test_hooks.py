"""Hooks: a user's metrics, callbacks, evaluations and state, the same under every strategy and after a resume."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dtrain.checkpoint import store
from dtrain.checks.resume import check_unfinished
from dtrain.config import run_file
from dtrain.errors import CheckpointError
from dtrain.launch.arguments import prepare_arguments
from dtrain.runs.folder import latest_checkpoint
from dtrain.runs.protocol import BAD_CONFIG, FAILED
from dtrain.train.hook_run import HookRun
from dtrain.train.hooks import HookError, Hooks, _Named
from dtrain.util import json_state
from tests.world import make_run, metrics, start, summary, train

OWN = "tests.train.own_hooks"
SHORT = ["train.steps=6", "train.eval_every=2", "checkpoint.every=2", "model.num_layers=2",
         "train.eval_batches=2", "model.vocab_multiple=1"]  # fmt: skip
BOTH = f"hooks=[{OWN}.Likelihood,{OWN}.Everything]"


def hooked(path: Path, *overrides: str, hooks: str = BOTH, size: int = 2) -> Path:
    return make_run(path, *prepare_arguments([*SHORT, hooks, f"cluster.processes={size}", *overrides]))


def told(run: Path) -> list[dict[str, Any]]:
    """What metrics.jsonl has, without the times."""
    left_out = ("time", "step_s", "data_s", "tokens_per_s", "mem_gib", "exposed_comm_s")
    lines = [{k: v for k, v in line.items() if k not in left_out} for line in metrics(run)]
    return [line for line in lines if not any(key.startswith(("save", "slow", "rank")) for key in line)]


def failure(run: Path) -> str:
    return str(json.loads(next((run / "logs").glob("failure-*.json")).read_text())["message"])


# ---- under every strategy, and after a kill --------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1", "tensor", "pipeline"])
def test_all_methods_under_a_strategy_and_after_a_kill(strategy: str, tmp_path: Path) -> None:
    # a save in the background may not be complete yet when the ranks are killed
    options = [
        f"strategy={strategy}",
        "train.micro_batch_size=2",
        "hooks.Everything.die_at=4",
        "checkpoint.background=false",
    ]
    whole, killed = (hooked(tmp_path / name, *options) for name in ("whole", "killed"))
    assert train(whole, 2) == [0, 0]
    evaluations = {line["step"]: line for line in metrics(whole) if "val_loss" in line}
    assert evaluations.keys() == {2, 4, 6}
    for line in evaluations.values():
        assert line["val_nll"] == pytest.approx(line["val_loss"], abs=2e-6), "averaged over micro-batches and ranks"
        assert line["own_nll"] == pytest.approx(line["val_loss"], abs=2e-6)
        assert line["own"] == ["val_nll", "own_nll"]
    steps = {line["step"]: line for line in metrics(whole) if "seen" in line}
    assert [line["seen"] for line in steps.values()] == [1.0, 2.0, 3.0] and steps.keys() == {2, 4, 6}
    found = summary(whole)
    assert found["own_metrics"] == ["own_nll", "seen", "sum_of_losses", "val_nll"]
    assert found["val_nll"] == evaluations[6]["val_nll"] and found["seen"] == 3.0

    codes = start(killed, 2, {"DIE": "1"}).join()
    assert codes != [0, 0] and latest_checkpoint(killed)
    assert train(killed, 2) == [0, 0]
    assert told(killed) == told(whole), "every bit, the hooks' metrics included"
    assert summary(killed)["weights_sha256"] == summary(whole)["weights_sha256"]
    ends = {run: [(run / f"end-{rank}.txt").read_text() for rank in (0, 1)] for run in (whole, killed)}
    assert ends[killed] == ends[whole] and ends[whole][0] == ends[whole][1]


def test_state_moves_to_another_strategy_and_number_of_ranks(tmp_path: Path) -> None:
    run = hooked(tmp_path, "train.stop_after=4")
    assert train(run, 2) == [0, 0]
    assert train(hooked(tmp_path, "strategy=fsdp", size=1)) == [0]
    assert (run / "end-0.txt").read_text().startswith("([2, 4, 6],")
    assert [line["seen"] for line in metrics(run) if "seen" in line] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("at", "saves", "evaluated"), [(5, "null", {2, 4, 6}), (3, "null", {2}), (3, "val_loss", {2, 4})]
)
def test_a_stop_leaves_out_no_evaluation_that_counts(at: int, saves: str, evaluated: set[int], tmp_path: Path) -> None:
    """The last one is the result of the run, and keep_best compares each of them."""
    run = hooked(tmp_path, f"hooks.Stops.at={at}", f"checkpoint.keep_best={saves}", hooks=f"hooks={OWN}.Stops", size=1)
    train(run)
    assert summary(run)["status"] == ("done" if at == 5 else "preempted")
    assert {line["step"] for line in metrics(run) if "val_loss" in line} == evaluated


def test_a_hook_that_is_never_called_is_warned_of() -> None:
    found = {}
    for name in ("Likelihood", "Everything"):
        view: Any = SimpleNamespace(step=0)
        found[name] = Hooks({name: {"_target_": f"{OWN}.{name}"}}, [OWN], view).of_no_validation()
    assert "Likelihood: eval_metrics is never called, as the data have no validation" in found["Likelihood"][0]
    assert found["Everything"] == [], "it does more than that"


def test_hooks_change_no_bit_of_the_training(tmp_path: Path) -> None:
    with_hooks, without = hooked(tmp_path / "with", size=1), hooked(tmp_path / "without", hooks="hooks=none", size=1)
    assert train(with_hooks) == train(without) == [0]
    assert summary(with_hooks)["weights_sha256"] == summary(without)["weights_sha256"]
    manifest = store.read_manifest(latest_checkpoint(without))  # type: ignore[arg-type]
    assert "hooks" not in manifest.meta and "own_metrics" not in summary(without)


def test_one_rank_is_enough_to_end_a_run_and_it_is_done(tmp_path: Path) -> None:
    run = hooked(tmp_path, hooks=f"hooks={OWN}.OnOneRank")
    assert train(run, 2) == [0, 0]
    found = summary(run)
    assert found["status"] == "done" and found["steps"] == 3
    assert found["ended_by"] == {"hook": "OnOneRank", "reason": "enough", "step": 3}
    (run / "summary.json").unlink()  # as if killed before it was written
    assert train(run, 2) == [0, 0], "a resume trains no further"
    assert summary(run)["status"] == "done" and summary(run)["steps"] == 3
    assert summary(run)["ended_by"]["reason"] == "enough"


def test_early_stop(tmp_path: Path) -> None:
    run = hooked(tmp_path, "hooks.early_stop.patience=2", "hooks.early_stop.min_delta=9.0", "train.steps=40",
                 hooks="hooks=early_stop", size=1)  # fmt: skip
    assert train(run) == [0]
    found = summary(run)
    assert (found["status"], found["steps"], found["ended_by"]["hook"]) == ("done", 6, "early_stop")
    config = run_file.load(run) | {"resume_allow": [], "resume": str(run)}
    with pytest.raises(ValueError, match="early_stop ended the run after step 6: val_loss has not improved"):
        check_unfinished(config, run)
    check_unfinished(config | {"resume_allow": ["hooks"]}, run)
    first = next(line["val_loss"] for line in metrics(run) if "val_loss" in line)
    assert found["ended_by"]["reason"] == f"val_loss has not improved for 2 evaluations (best: {first:.6g} at step 2)"


# ---- errors ----------------------------------------------------------------------------------------------------


def test_an_error_names_the_hook_its_file_and_line(tmp_path: Path) -> None:
    run = hooked(tmp_path, hooks=f"hooks={OWN}.Divides", size=1)
    assert train(run) == [FAILED]
    source = Path(__file__).with_name("own_hooks.py")
    number = next(i for i, text in enumerate(source.read_text().splitlines(), 1) if "1 / (run" in text)
    assert failure(run).startswith(
        f"hooks: {OWN}.Divides.after_step ({source}:{number}) failed at step 2: ZeroDivisionError: "
    )


@pytest.mark.parametrize(
    ("asks", "fix"),
    [
        (lambda run: run.net, r"run\.model; run has batches, metrics, model, "),
        (lambda run: run.stepp, r"run\.step; run has "),
        (lambda run: run.val_loss, r'run\.metrics\["val_loss"\]; run has '),
        (lambda run: run.optimizer, r"run has "),
        (lambda run: run.scheduler, r"run has "),
        (lambda run: run.metrics["train_loss"], r'run\.metrics\["loss"\]; run\.metrics has loss, val_loss'),
        (lambda run: run.metrics["accuracy"], r"run\.metrics has loss, val_loss"),
        (lambda run: run.metrics["val_accuracy"], r".*; val_accuracy after an evaluation: after_evaluation\(run\)"),
    ],
)
def test_what_a_run_does_not_have_leads_to_what_it_has(asks: Callable[[Any], Any], fix: str) -> None:
    view = HookRun.__new__(HookRun)
    view.model, view.step, view.metrics = torch.nn.Linear(1, 1), 1, {"loss": 1.0, "val_loss": 2.0}
    with pytest.raises(HookError, match=rf"failed at step 1: .*\n  fix: {fix}"), _Named("h", view):
        asks(view)


@pytest.mark.parametrize(
    ("hook", "words", "size"),
    [
        ("Apart", ["Apart: state_dict differs between ranks", "keep only what is the same"], 2),
        ("TakesTheLoss", ["dtrain itself has a value named val_loss", "such as my_val_loss"], 1),
        (
            "ReturnsText",
            ["ReturnsText: evaluate returned quality as a str", 'return {"quality": x} with one number'],
            1,
        ),
        ("ReturnsAll", ["eval_metrics returned sure of the shape [", '{"sure": x.mean()}'], 1),
        ("ReturnsTensor", ["after_step returned a Tensor, not metrics by name", 'return {"accuracy": x}'], 1),
        ("OddName", ["'my score!', which is not a name", 'fix: "my_score"'], 1),
        ("KeepsAnObject", ["state_dict returned what cannot be saved: state['x'] is an object"], 1),
        ("Never", ["every=0 must be a whole number of at least 1", "fix: every = 1"], 1),
        ("an_object", ["is an object (Divides)", f"fix: hooks={OWN}.Divides, the class"], 1),
        ("Network", ["is a model", f"fix: model={OWN}.Network"], 1),
    ],
)
def test_what_a_hook_may_not_return(hook: str, words: list[str], size: int, tmp_path: Path) -> None:
    run = hooked(tmp_path, hooks=f"hooks={OWN}.{hook}", size=size)
    assert BAD_CONFIG in train(run, size)
    assert failure(run).startswith(f"hooks={OWN}.{hook}: "), failure(run)
    assert all(word in failure(run) for word in words), failure(run)
    place = json.loads(next((run / "logs").glob("failure-*.json")).read_text())["where"]
    assert "own_hooks.py:" in place, "the line of the user's code"


@pytest.mark.parametrize(
    "hook",
    ["Assigned", "AssignedLater", "Dispatches", "HasProperty", "Helped", "HelpedByAFunction", "Looks", "Tenth"],
)
def test_methods_of_other_forms_and_names_are_no_mistake(hook: str, tmp_path: Path) -> None:
    hooked(tmp_path, hooks=f"hooks={OWN}.{hook}", size=1)
    view: Any = SimpleNamespace(step=0)
    hooks = Hooks({hook: {"_target_": f"{OWN}.{hook}"}}, ["tests"], view)
    with pytest.raises(ValueError, match="dtrain itself has a value named loss"):  # which another rank returned
        hooks._check_new({"loss": 1.0}, {})


@pytest.mark.parametrize(
    ("hooks", "words"),
    [
        ("hooks.Mine.size=3", ["Mine is not among the chosen hooks", "fix: hooks=MODULE.Mine hooks.Mine.size=…"]),
        ("hooks.earlystop.patience=3", ["earlystop is not among", "fix: hooks=early_stop hooks.early_stop.patience=…"]),
        ("++hooks.early_stop.patience=3", ["early_stop is not among the chosen hooks", "hooks=[…,early_stop]"]),
        ("hooks=early_stp", ["did you mean hooks=early_stop?"]),
        (f"hooks={OWN}.Misspelt", ["Misspelt.after_stp is not a method", "did you mean after_step?"]),
        (f"hooks={OWN}.Shy", ["cannot be called as evaluate(run)", "def evaluate(self, run)"]),
        (f"hooks={OWN}.Idle", ["Idle has no method that dtrain calls", "after_evaluation"]),
        (f"hooks={OWN}.OtherName", ["OtherName has no method", "def after_step(self, run), in place of on_step_end"]),
        (f"hooks={OWN}.OneOtherName", ["OneOtherName.on_train_end is not a method", "did you mean end?"]),
        (f"hooks={OWN}.SetsAnother", ["SetsAnother has no method that dtrain calls"]),
        (f"hooks={OWN}.HalfState", ["has state_dict, but not load_state_dict"]),
        (f"hooks={OWN}.a_function", ["is a function, and a hook is a class"]),
        (f"hooks={OWN}.Trained", ["train_metrics needs the outputs of a training step", "rename it to eval_metrics"]),
        (f"hooks={OWN}.Nowhere", ["has no Nowhere"]),
        (f"hooks=[{OWN}.Idle,tests.other.Idle]", ["two of them are named Idle"]),
        ("hooks=early_stop hooks.early_stop.patence=3", ["did you mean hooks.early_stop.patience"]),
        ("hooks=early_stop hooks.early_stop.mode=max", ["val_loss is better if it is smaller", "mode=min"]),
        (f"hooks=early_stop data={OWN}.OnlyTrain", ["needs a validation split", '{"train": …']),
        (f"{BOTH} hooks.Everything.evry=3", ["hooks.Everything.every"]),
        (f"{BOTH} hooks.Everything.every=many", ["must be a whole number"]),
        (f"{BOTH} hooks.Likelihood.x=1", ["hooks.Likelihood.x: there is no such setting"]),
        (f"{BOTH} train.eval_batches=0", ["needs evaluations"]),
        (f"{BOTH} strategy=tensor strategy.loss_parallel=true", ["eval_metrics needs whole outputs"]),
    ],
)
def test_a_mistake_is_found_before_the_start(hooks: str, words: list[str], tmp_path: Path) -> None:
    from dtrain.config.hydra_errors import MISTAKES, explain

    with pytest.raises(MISTAKES) as caught:
        make_run(tmp_path, *prepare_arguments(["train.eval_batches=2", *hooks.split(), "cluster.processes=2"]))
    text = explain(caught.value)
    assert all(word in text for word in words) and "\n  fix: " in text, text


# ---- state -----------------------------------------------------------------------------------------------------


def test_every_value_comes_back_to_the_bit() -> None:
    state: dict[str, Any] = {
        "a": [1, -2.5, True, None, "é", [], {}], "inf": [math.inf, -math.inf], "big": 2**70, "tiny": 5e-324,
        **{name: (torch.randn(2, 3) * 100).to(dtype) for name, dtype in json_state.DTYPES.items()},
        "scalar": torch.tensor(3), "empty": torch.empty(0, 4), "slice": torch.arange(10)[::3],
    }  # fmt: skip
    back = json_state.decode(json.loads(json.dumps(json_state.encode(state))))
    assert back.keys() == state.keys()
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            assert back[name].dtype == value.dtype and torch.equal(back[name], value), name
        else:
            assert back[name] == value, name


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": [1, {"b": (1, 2)}]}, "state['a'][1]['b'] is a tuple"),
        ({"a": {1: 2}}, "state['a'] has the key 1"),
        ({"a": torch.zeros(2**20)}, "state['a']: the tensor has more than"),
        ({"a": torch.zeros(2, dtype=torch.complex64)}, "has the dtype complex64"),
        ({"f": len}, "state['f'] is a builtin_function_or_method"),
    ],
)
def test_what_cannot_be_restored_is_refused(value: Any, words: str) -> None:
    with pytest.raises(TypeError) as caught:
        json_state.encode(value)
    assert words in str(caught.value)


@pytest.mark.parametrize("tensor", [["float32", [2], "AAAA"], ["object", [1], "AAAA"], "x", ["float32", [-1], "!"], 1])
def test_a_damaged_tensor_is_no_crash(tensor: Any) -> None:
    with pytest.raises(CheckpointError):
        json_state.decode({"a": {json_state.TENSOR: tensor}})
