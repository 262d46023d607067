"""`dtrain verify`: what it runs, what it prints, and that it can fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from dtrain.cli import main
from dtrain.commands.verify import compare
from dtrain.commands.verify.command import Request, dropout_of, plan, settings
from dtrain.commands.verify.compare import SMALL
from dtrain.config.hardware import CPU_FP16, no_cpu_fp16
from tests.patience import patience, until
from tests.world import ROOT, STRATEGIES, sizes_of, start_server

QUICK = ["strategies=ddp", "processes=2", "precisions=fp32", "train.steps=3"]
OWN = ["strategy._target_=own.Own", "trust=[own]"]
STRATEGY = """
import time
from dtrain.strategies.{module} import {base}

class Own({base}):
    {body}
"""
FORGETS = ("base", "Strategy", "def __init__(self, dp: int = -1, **ddps): super().__init__(dp=dp)")
RAISES = ("ddp", "DDP", "def wrap(self, model): raise RuntimeError('no such wire\\nand more')")
HANGS = ("ddp", "DDP", "def wrap(self, model): time.sleep(99)")

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    start_server()  # before, or it would have its socket in the folder that is looked at
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    assert not left_behind(tmp_path / "tmp")


def left_behind(folder: Path) -> list[Path]:
    """Its own folders, and those of multiprocessing; torch's cache of compiled code is meant to stay."""
    return [*folder.glob("dtrain-*"), *folder.glob("pymp-*")]


def own_strategy(module: str, base: str, body: str) -> None:
    Path("own.py").write_text(STRATEGY.format(module=module, base=base, body=body))


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


# ---- the command ---------------------------------------------------------------------------------------------


def test_json_from_any_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dtrain", "verify", *QUICK, "--json"]
    environment = os.environ | {"TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [(row["strategy"], row["world_size"], row["precision"]) for row in rows] == [
        ("ddp", 2, "fp32"),
    ]
    for row in rows:
        assert list(row) == [
            "strategy", "world_size", "precision", "max_loss_diff", "max_grad_norm_diff", "max_weight_diff",
            "max_gradient_diff", "tolerance", "passed", "seconds", "mesh", "reason", "left_out", "named",
        ]  # fmt: skip
        assert row["passed"] is True and row["tolerance"] == 1e-5
        assert row["reason"] == row["left_out"] == row["named"] == ""
        assert 0 <= row["max_gradient_diff"] < 1e-5
        assert 0 <= row["max_loss_diff"] < 1e-5 and 0 < row["max_weight_diff"] < 1e-3 and row["seconds"] > 0
    assert "1 of 1 passed in " in done.stderr and "Traceback" not in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["tmp"] and not left_behind(tmp_path / "tmp")


def test_a_layout_that_is_refused_is_a_row_that_did_not_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *QUICK, "processes=2,3", "train.global_batch_size=8"]) == 3
    header, two, three, end = lines(capsys)
    assert header.split()[:4] == ["strategy", "ranks", "mesh", "precision"]
    assert "PASS" in two and "FAIL  train.global_batch_size=8: must be a multiple of the 3 data-parallel ranks" in three
    assert end.startswith("1 of 2 passed in ")


def test_what_nobody_named_and_cannot_run_here_is_left_out_aloud(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "dtrain.commands.verify.command.options_of", lambda group: ["3d", "ddp"] if group == "strategy" else ["fp32"]
    )
    monkeypatch.setattr("dtrain.commands.verify.command.variants", dict)
    assert main(["verify", *(word for word in QUICK if not word.startswith("strategies")), "processes=2"]) == 0
    _, row, left_out, end = lines(capsys)
    assert row.startswith("ddp ") and "PASS" in row
    assert left_out.startswith("left out: 3d at 2 in fp32: strategy.pp=2")
    assert end.startswith("1 of 1 passed in ") and end.endswith(" s, 1 left out")


@needs_deepspeed
@pytest.mark.parametrize(
    ("fake", "words", "passed"),
    [
        ("1", ["precisions=fp16"], {"fp16": True}),
        ("0", [], {"fp32": True, "bf16": True, "bf16-pure": None, "fp16": None}),
        ("0", ["precisions=fp16"], {"fp16": False}),  # it was named
    ],
)
def test_deepspeed_in_fp16_runs_or_is_left_out_as_the_cpu_can(
    fake: str, words: list[str], passed: dict[str, bool | None], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "dtrain", "verify", "strategies=zero1", "processes=2", "train.steps=1", "--json"]
    environment = os.environ | {"TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": str(ROOT), CPU_FP16: fake}
    environment |= {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([*command, *words], env=environment, capture_output=True, text=True)
    assert done.returncode == (3 if False in passed.values() else 0), done.stderr
    rows = {row["precision"]: row for row in json.loads(done.stdout) if row["strategy"] == "zero1"}
    assert {name: row["passed"] for name, row in rows.items()} == passed
    ran = [value for value in passed.values() if value is not None]
    assert f"{sum(ran)} of {len(ran)} passed in " in done.stderr
    reason = str(no_cpu_fp16("zero1")).splitlines()[0]
    assert rows["fp16"]["left_out"] == (reason if passed["fp16"] is None else "")
    assert (f"left out: zero1 at 2 in fp16: {reason}" in done.stderr) is (passed["fp16"] is None)
    assert rows["fp16"]["reason"] == (reason if passed["fp16"] is False else "")


def test_a_strategy_that_forgets_to_average_gradients_fails(capsys: pytest.CaptureFixture[str]) -> None:
    own_strategy(*FORGETS)
    assert main(["verify", *QUICK, *OWN, "--json"]) == 3
    (row,) = json.loads(capsys.readouterr().out)
    assert not row["passed"]
    assert "ReplicaError" in row["reason"] and "rank 0" in row["reason"] and "rank 1" in row["reason"]


def test_a_strategy_with_other_maths_states_its_tolerance(capsys: pytest.CaptureFixture[str]) -> None:
    own_strategy("ddp", "DDP", "tolerance = 0.5\n    def set_lr(self, share): return super().set_lr(0.9 * share)")
    assert main(["verify", *QUICK, *OWN, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["tolerance"] == 0.5 and row["max_loss_diff"] > 1e-5


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [(RAISES, "rank 0: RuntimeError: no such wire"), (HANGS, "rank 0 did not end in time; the last step was none")],
)
def test_a_rank_that_fails_or_hangs(
    strategy: tuple[str, str, str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    own_strategy(*strategy)
    assert main(["verify", *QUICK, *OWN, "--timeout", "20" if strategy is RAISES else "6"]) == 3
    assert lines(capsys)[1].replace("rank 1", "rank 0").endswith(f"FAIL  {reason}")


def test_keep(tmp_path: Path) -> None:
    assert main(["verify", *QUICK, "--keep", "kept"]) == 0
    assert sorted(p.name for p in (tmp_path / "kept").iterdir()) == ["ddp-2-fp32", "one-fp32"]
    assert (tmp_path / "kept" / "ddp-2-fp32" / "logs" / "rank-1.log").exists()
    assert main(["verify", *QUICK, "--keep", "kept"]) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("importing", [True, False])
def test_ctrl_c_ends_quietly_and_takes_the_ranks_along(importing: bool, number: signal.Signals, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "dtrain", "verify", "strategies=ddp", "train.steps=99999", "--keep", "kept"],
        env=os.environ | {"TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        # a background job is born with SIGINT ignored; a foreground one is meant here
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    metrics = tmp_path / "kept" / "one-fp32" / "metrics.jsonl"

    def soon() -> bool:
        """The fork server has loaded torch's C++ and is still importing, or the ranks train."""
        if importing:
            return any("libtorch_python" in maps_of(pid) for pid in session(process.pid))
        return metrics.exists() and bool(metrics.read_text())

    try:
        until(lambda: soon() or process.poll() is not None, "the moment for the signal", 120)
        assert process.poll() is None and len(session(process.pid)) > 1
        os.killpg(process.pid, number)  # as a terminal does: to all of them
        _, err = process.communicate(timeout=patience(30))
        assert (process.returncode, err) == (130, "")
        until(lambda: not session(process.pid), "the fork server ends when it sees that we did", 5)
        assert not left_behind(tmp_path / "tmp")
    finally:
        for pid in session(process.pid):
            os.kill(pid, signal.SIGKILL)


def session(leader: int) -> list[int]:
    """Its processes, but for those that only wait to be asked how they ended."""
    found = subprocess.run(["ps", "-o", "pid=,stat=", "-s", str(leader)], capture_output=True, text=True).stdout
    return [int(line.split()[0]) for line in found.splitlines() if not line.split()[1].startswith("Z")]


def maps_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except OSError:  # it has just ended
        return ""


# ---- bad input -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message", "fix"),
    [
        (["strategies=dpd"], "strategies=dpd: there is no strategy 'dpd'", "did you mean strategies=ddp?"),
        (["strategies=frobnicate"], "there is no strategy 'frobnicate'", "strategies can be "),
        (["precisions=fp31"], "precisions=fp31: there is no precision 'fp31'", "did you mean precisions=fp32?"),
        (["precision=fp31"], "there is no precision 'fp31'", "did you mean precisions=fp32?"),
        (["processes=two"], "processes=two: must be whole numbers", "processes=2,4"),
        (["processes=0"], "processes=0: must be", "processes=2,4"),
        (["strategy=fspd"], "strategies=fspd: there is no strategy 'fspd'", "did you mean strategies=fsdp?"),
        (["cluster.processes=0"], "processes=0: must be", "processes=2,4"),
        (["run_dir=x"], "is not for verify", "--keep DIR"),
        (["train.stpes=3"], "train.stpes: there is no such setting", "did you mean train.steps"),
        (["train.steps=-1"], "train.steps=-1: must be at least 1", "train.steps=300"),
        (["model=gpt3"], "model=gpt3: there is no such option", "model can be"),
        (["strategies=ddp", "strategy.bucket_mb=0"], "strategy.bucket_mb=0: must be at least 1", "strategy.bucket_mb"),
        (["strategies=ddp,fsdp", "strategy.bucket_mb=9"], "the chosen strategy has no such setting",
         "leave out strategy.bucket_mb"),
        (["strategies=ddp", *OWN[:1]], "only dtrain's own code and the modules you trust", "trust=[…]"),
        (["--timeout", "0"], "--timeout=0.0: must be more than 0", "--timeout 120"),
    ],
)  # fmt: skip
def test_bad_input(
    words: list[str], message: str, fix: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dtrain.commands.verify.world.start_server", lambda *_: pytest.fail("something was started"))
    assert main(["verify", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and message in err and fix in err.partition("\n  fix: ")[2]


# ---- what it runs --------------------------------------------------------------------------------------------


@needs_deepspeed
def test_by_default_every_strategy_at_its_two_smallest_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv(CPU_FP16, "0")
    references, cases = plan(Request(STRATEGIES, False, [], [], []), tmp_path)
    assert list(references) == ["fp32", "bf16", "bf16-pure", "fp16"]  # fp8 has no GPU here
    for strategy in STRATEGIES:
        mine = [(case.precision, case.size) for case in cases if case.strategy == strategy]
        sizes = sizes_of(strategy, (2, 4, 8))[:2]
        mine = [(precision, size) for precision, size in mine if precision != "fp8"]
        halves = [(precision, sizes[0]) for precision in ("bf16", "bf16-pure", "fp16")]
        assert mine == [("fp32", sizes[0]), ("fp32", sizes[1]), *halves]
    refused = {(case.precision, case.strategy) for case in cases if case.refused}
    others = {strategy for strategy in STRATEGIES if strategy not in ("ddp", "fsdp")}
    in_fp16 = {("fp16", strategy) for strategy in ("zero1", "zero2", "zero3")}
    assert refused == {("fp8", "ddp"), *(("bf16-pure", strategy) for strategy in others), *in_fp16}
    for case in (case for case in cases if not case.refused):
        accumulation = case.config["train"]["global_batch_size"] // case.config["train"]["micro_batch_size"]
        dp = compare.mesh_of(case.config["strategy"], case.size).dp
        assert accumulation // dp > 1, "every layout accumulates"


@pytest.mark.parametrize(
    ("axes", "sizes"),
    [
        ({"dp": -1}, [2, 4, 8]),
        ({"pp": 2, "dp": -1, "tp": 2}, [4, 8]),
        ({"tp": -1, "dp": 2}, [2, 4, 8]),
        ({"dp": 4}, [4]),
        ({"dp": 3}, [3]),
    ],
)
def test_sizes_follow_from_the_axes(axes: dict[str, int], sizes: list[int]) -> None:
    assert compare.world_sizes(axes) == sizes


def test_what_is_typed_wins_over_the_small_defaults() -> None:
    small = settings(["train.steps=5", "model.dim=64"], SMALL)
    assert "train.steps=20" not in small and "model.dim=32" not in small and "model.num_layers=4" in small
    large = settings(["model=gpt2-124m"], SMALL)
    assert not [s for s in large if s.startswith("model.") or s == "optim.lr=3e-3"]
    assert "data=synthetic" not in large and "data=synthetic" in small, "a model brings data that suits it"
    assert settings(["recipe=cpu-tiny"], [*SMALL, "precision=bf16"]) == ["precision=bf16", "recipe=cpu-tiny"]
    assert settings(["train.steps=5"], [compare.FEWER_STEPS]) == ["train.steps=5"]


def test_the_batch_suits_every_number_of_processes(tmp_path: Path) -> None:
    for sizes, batch in (([3], 9), ([3, 4], 12), ([2, 4], 8)):
        references, cases = plan(Request(["ddp"], True, sizes, ["fp32"], []), tmp_path)
        assert not any(case.refused for case in cases)
        assert {case.config["train"]["global_batch_size"] for case in (*references.values(), *cases)} == {batch}


def test_dropout_is_named_with_the_setting_that_turns_it_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    text = "class A(Module):\n    def __init__(self, {}):\n        self.drop = nn.Dropout({})\n"
    for name, arguments in {"rate": ("drop_rate=0.1", "drop_rate"), "fixed": ("", "0.1"), "off": ("", "0.0")}.items():
        (tmp_path / f"dropping_{name}.py").write_text(text.format(*arguments))
    found = {name: dropout_of({"model": {"_target_": f"dropping_{name}.A"}}) for name in ("rate", "fixed", "off")}
    assert found["rate"] == "model.drop_rate=0" and "dropping_fixed.py:3" in found["fixed"] and not found["off"]
    assert dropout_of({"model": {"_target_": "dtrain.models.gpt2.GPT2", "dropout": 0.1}}) == "model.dropout=0"
    assert not dropout_of({"model": {"_target_": "dtrain.models.gpt2.GPT2", "dropout": 0.0}})


def test_strategy_settings_are_not_for_the_one_process(tmp_path: Path) -> None:
    request = Request(["fsdp"], True, [2], ["bf16"], ["strategy.sharding=grad_op", "model=gpt2-124m"])
    references, (case,) = plan(request, tmp_path)
    assert case.config["strategy"]["sharding"] == "grad_op" and case.config["model"]["num_layers"] == 12
    one = references["bf16"].config
    assert one["choices"]["strategy"] == "ddp" and one["model"] == case.config["model"]
    assert one["precision"]["dtype"] == "bfloat16"


def test_nothing_imports_torch_before_there_is_something_to_run() -> None:
    parse = "from dtrain.commands.verify import command; command.argument_parser()"
    code = f"import sys; {parse}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_a_skipped_step_must_be_skipped_under_both() -> None:
    assert compare.apart(None, None) == 0.0
    assert compare.apart(None, 1.0) == compare.apart(1.0, None) == float("inf")
    assert compare.apart(2.2, 2.0, relative=True) == pytest.approx(0.1)
