"""`dtrain verify script=theirs.py`: a script that follows one process, and scripts with the usual bugs."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from dtrain import check
from dtrain.cli import main
from dtrain.commands.verify.script_check import Step, arguments, judge, read_log, read_request

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import dtrain.check

batch, bug = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs = torch.randn(64, 4)
for step in range(3):
    first = step * batch * size + (0 if bug == "same-data" else rank * batch)
    x = inputs[first : first + batch]
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    (loss * (size if bug == "summed" else 1)).backward()
    dtrain.check.step(loss, model, x)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


def verify(bug: str, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[dict[str, object]]]:
    Path("theirs.py").write_text(SCRIPT)
    code = main(["verify", "script=theirs.py", f"script_args={{batch_per_process}} {bug}", "batch=8", "--json", *words])
    return code, json.loads(capsys.readouterr().out)


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_script_that_follows_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    code, (row,) = verify("none", capsys, "processes=1,2")
    assert code == 0 and row["follows"] and row["reason"] == "" and row["steps"] == 3, row
    assert float(str(row["max_gradient_diff"])) < 1e-5


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("bug", "named", "reason"),
    [
        (
            "summed",
            "2.weight",
            "it is 2 times as large, as if summed over the 2 ranks, not averaged; the loss is right",
        ),
        (
            "same-data",
            "samples",
            "step 1: 4 of 8 samples are not those that one process reads, 4 are read more than once",
        ),
    ],
)
def test_the_usual_bugs_are_named(bug: str, named: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, (row,) = verify(bug, capsys, "processes=1,2")
    assert code == 3 and not row["follows"] and row["first_step"] == 1
    assert reason in str(row["reason"]) and (named == "samples") == (row["named"] == "samples")


# ---- the judgement, without processes --------------------------------------------------------------------------------


def steps(*losses: float, gradient: float = 1.0, ranks: int = 1, drift: float = 0.0) -> dict[int, Step]:
    found = {}
    for i, loss in enumerate(losses, 1):
        gradients = [{"w": [gradient + r * drift, gradient + r * drift]} for r in range(ranks)]
        found[i] = Step([loss] * ranks, gradients, Counter())
    return found


@pytest.mark.parametrize(
    ("ours", "reason"),
    [
        (steps(3.0, 2.0, ranks=2), ""),
        (steps(3.0, 2.0, gradient=2.0), "as if summed over the 2 ranks, not averaged; the loss is right"),
        (steps(3.0, 2.0, gradient=0.5), "as if averaged twice over the 2 ranks"),
        (steps(3.0, 2.0, ranks=2, drift=0.1), "the ranks' gradients of w differ (rank 1): they are not reduced"),
        (steps(6.0, 4.0), "step 1: the loss is 6, not 3: 2 times, as if summed over the 2 processes"),
        (steps(3.1, 2.0), "other samples, other first weights, dropout, or a mean over parts of unequal size"),
        (steps(3.0, 2.2), "gradients agree up to here, so the update differs (learning rate, weight decay, clipping)"),
        (steps(3.0), "it makes 1 step, one process 2: each of the 2 processes takes as many samples as one alone"),
        (steps(3.0, float("nan")), "step 2: the loss is nan, not 2"),
    ],
)
def test_likely_causes(ours: dict[int, Step], reason: str) -> None:
    verdict = judge(2, ours, steps(3.0, 2.0), 1e-4)
    assert verdict.follows == (reason == "") and reason in verdict.reason, verdict


def test_losses_are_read_from_a_log(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text(
        "start\n{'loss': '3.5', 'grad_norm': '1.0'}\nstep 2 loss=2.25e+00 lr 1e-3\n{\"loss\": 1}\nlossless\n"
    )
    assert [step.loss for step in read_log(log).values()] == [3.5, 2.25, 1.0]
    assert read_log(tmp_path / "none.log") == {}


def test_placeholders_keep_the_global_batch(tmp_path: Path) -> None:
    (tmp_path / "a.py").touch()
    args = "script_args=--b {batch_per_process} --n {processes} {other}"
    request = read_request([f"script={tmp_path}/a.py", args, "batch=8", "processes=2,4", "script.env=torchrun"])
    assert request.sizes == [1, 2, 4] and request.others == ["script.env=torchrun"]
    assert [arguments(request, n) for n in (1, 4)] == ["--b 8 --n 1 {other}", "--b 2 --n 4 {other}"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["script=none.py"], "script=none.py: there is no such file"),
        (["script=a.py", "script_args={batch_per_process}"], "batch=: script_args has a placeholder for it"),
        (["script=a.py", "script_args={batch}", "batch=6"], "batch=6: script_args has a placeholder for it"),
        (["script=a.py", "processes=two"], "processes=two: must be whole numbers"),
    ],
)
def test_bad_input(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.py").touch()
    assert main(["verify", *words]) == 2
    assert message in capsys.readouterr().err


# ---- the hook --------------------------------------------------------------------------------------------------------


def test_the_hook_does_nothing_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DTRAIN_CHECK", raising=False)
    check.step(1.0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("module.layers.0.weight", "layers.0.weight"),
        ("_orig_mod.module.a", "a"),
        ("a._fsdp_wrapped_module.b", "a.b"),
        ("a.module_list.0", "a.module_list.0"),
    ],
)
def test_names_are_those_without_wrappers(name: str, expected: str) -> None:
    assert check.canonical(name) == expected
