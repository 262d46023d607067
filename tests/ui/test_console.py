"""Errors, and the end of a run on one screen."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dtrain.ui import console
from dtrain.ui.console import LAUNCH, next_commands, print_error, print_summary, resume_command, slow_ranks
from tests.screens import RUNNING, append, lines, metric, plain, text, write


def summary_of(run_dir: Path, **values: Any) -> list[str]:
    write(run_dir, "summary.json", {**RUNNING, **values})
    out = plain(width=30)
    print_summary(run_dir, out)
    return lines(out)


def test_only_the_newest_slow_ranks_are_shown() -> None:
    slow = [{"text": f"rank {rank} is slow"} for rank in range(5)]
    assert slow_ranks({"slow_ranks": slow[:2]}) == ["rank 0 is slow", "rank 1 is slow"]
    assert slow_ranks({"slow_ranks": slow})[0] == "rank 2 is slow"
    assert slow_ranks({"slow_ranks": slow})[-1] == "and 2 more in summary.json"
    assert slow_ranks({}) == slow_ranks({"slow_ranks": "nonsense"}) == []


def test_summary_of_a_finished_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / "outputs" / "my run"
    for step, name in ((900, "manifest.json"), (1000, "manifest.json"), (1100, "torn")):
        folder = run_dir / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / name).touch()
    predicted = {"tokens_per_s": 79000, "memory_gib": {"total": 11.9}, "step_s": {"total": 0.4}, "mfu": 0.4}
    shown = summary_of(
        run_dir,
        status="done",
        steps=1000,
        train_loss=3.2,
        val_loss=2.0,
        val_perplexity=7.389,
        tokens_per_s=81920.0,
        mfu=0.4123,
        peak_mem_gib=12.345,
        wall_s=83.4,
        predicted=predicted,
        skipped_steps=0,
        saves=10,
        save_s=20.0,
        save_gib=45.0,
        save_stall_s=0.9,
        save_stall_median_s=0.0352,
    )
    assert shown == [
        "status           done",
        "run              outputs/my run",
        "steps            1000 of 1000",
        "train loss       3.2000",
        "validation loss  2.0000 (perplexity 7.39)",
        "tokens/s         81.9K (median)  predicted 79K",
        "step time        400 ms        predicted 400 ms",
        "MFU              41.2%         predicted 40.0%",
        "peak memory      12.3 GiB      predicted 11.9 GiB",
        "wall time        1m 23s",
        "saves            10 (median stall 35.2 ms, 2.25 GiB/s)",
        "checkpoint       outputs/my run/checkpoints/step-00001000",
        "next             dtrain sample 'outputs/my run' \"def \"",
        "                 dtrain export 'outputs/my run'",
        "                 python launch.py 'resume=\"outputs/my run\"' train.steps=2000 'resume_allow=[train.steps]'",
    ]


def test_summary_of_a_preempted_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "a").mkdir(parents=True)
    shown = summary_of(tmp_path / "runs" / "a", status="preempted", steps=0)
    assert shown[0] == "status           preempted"
    assert shown[2] == "steps            0 of 1000"
    assert shown[-1] == "next             python launch.py resume=runs/a"


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("http://host:5000", " logger.mlflow.uri=http://host:5000"),
        ("sqlite:///mlflow.db", " logger.mlflow.uri=sqlite:///mlflow.db"),
        ("null", ""),
        ("http://me:pass@host", ""),  # a launch refuses it, but the file may be from someone else
        ("'http://host; rm -r ~'", ""),
    ],
)
def test_a_resume_needs_the_address_of_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str, expected: str
) -> None:
    """checks/loggers.py: it must be typed again."""
    monkeypatch.chdir(tmp_path)
    Path("a").mkdir()
    Path("a/config.yaml").write_text(f"logger:\n  mlflow:\n    uri: {uri}\n    experiment: x\n")
    assert resume_command(Path("a")).removeprefix(LAUNCH) == f" resume=./a{expected}"
    assert next_commands(Path("a"), "preempted", {}) == [resume_command(Path("a"))]


def test_summary_of_a_failed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    message = "\n".join([*(f"noise {i}" for i in range(10)), "", "CUDA error: [bold]\x1b[31massert\x1b[0m " + "x" * 90])
    write(
        tmp_path,
        "failure.json",
        {
            "rank": 1,
            "type": "RuntimeError",
            "message": message,
            "traceback": "…",
            "log": "logs/rank-1.log",
            "exit_code": -9,
        },
    )
    shown = summary_of(tmp_path, status="failed", steps=3)
    at = shown.index("first error      rank 1: RuntimeError (exit code -9)")
    assert [line.strip() for line in shown[at + 1 :]] == [
        "noise 6",
        "noise 7",
        "noise 8",
        "noise 9",
        "CUDA error: [bold]assert " + "x" * 90,
        "log              logs/rank-1.log",
        "next             dtrain why .",
        "python launch.py resume=./.",
    ]
    out = plain(width=30)
    print_summary(tmp_path, out, why="code. Starting again without a change would end the same way.")
    assert lines(out)[-2:] == ["next             dtrain why .", "after the change python launch.py resume=./."]


def test_a_refused_resume_leaves_a_run_done_and_repeats_what_was_typed(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-00000003").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-00000003" / "manifest.json").touch()
    write(tmp_path, "summary.json", {**RUNNING, "status": "done"})
    typed = ["resume=run", "train.steps=6", "optim._target_=evil.f", "resume_allow=[train.steps]", "hooks=[evil.H]"]
    write(tmp_path, "launch.json", {"launches": [{"overrides": ["train.steps=3"]}, {"overrides": typed}]})
    out, refused = plain(width=30), {"type": "ValueError", "exit_code": 2, "message": "x"}
    print_summary(tmp_path, out, "failed", refused, why="settings. Starting again without a change would end alike.")
    shown = lines(out)
    assert shown[0] == "status           failed: this launch; the run is done, as it was" and "steps " not in text(out)
    assert shown[-1].endswith("train.steps=6 'resume_allow=[train.steps]'") and "dtrain why" not in text(out)


def test_summary_without_files(tmp_path: Path) -> None:
    out = plain()
    print_summary(tmp_path, out)
    assert lines(out)[0] == "status           unknown" and len(lines(out)) == 2
    write(tmp_path, "failure.json", {"type": "OSError", "traceback": "Traceback\n  x\nOSError: no space"})
    out = plain()
    print_summary(tmp_path, out)
    assert lines(out)[0] == "status           failed"
    assert "OSError: no space" in text(out)


def test_summary_of_a_killed_run_uses_its_metrics(tmp_path: Path) -> None:
    append(
        tmp_path,
        '{"step": 40, "val_loss": 3.5, "val_perplexity": 33.1}\n',
        *(metric(s) for s in range(1, 48)),
        '{"step": 48, "lo',
    )
    write(tmp_path, "failure.json", {"type": "OldError"})  # of an attempt before
    write(tmp_path, "summary.json", {**RUNNING, "steps": 0})
    out = plain()
    print_summary(tmp_path, out, status="died")
    assert "steps            47 of 1000" in lines(out)
    assert "train loss       4.9530" in lines(out)
    assert "validation loss  3.5000 (perplexity 33.1)" in lines(out)
    assert "none was recorded" in text(out) and "OldError" not in text(out)
    assert "python launch.py resume=" in lines(out)[-1]


def test_error_is_plain_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    print_error("strategy=[bold]x[/bold]: " + "long " * 40 + "\x1b[31m\n  fix: y")
    assert capsys.readouterr().err == "error: strategy=[bold]x[/bold]: " + "long " * 40 + "\n  fix: y\n"


@pytest.mark.parametrize(("env", "label"), [({}, "\x1b[1;31merror:\x1b[0m"), ({"NO_COLOR": "1"}, "error:")])
def test_error_is_red_on_a_terminal(monkeypatch: pytest.MonkeyPatch, env: dict[str, str], label: str) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    print_error("no [b]")
    assert stderr.getvalue() == f"{label} no [b]\n"


def test_a_pipe_stays_plain_and_the_import_light() -> None:
    program = (
        "import sys, dtrain.ui.console, dtrain.runs.find\n"
        "heavy = {'torch', 'hydra', 'omegaconf', 'rich', 'yaml', 'numpy'} & set(sys.modules)\n"
        "print(sorted(heavy), dtrain.ui.console.stdout_console().is_terminal)"
    )
    env = {**os.environ, "FORCE_COLOR": "1", "PYTHONPATH": str(Path(console.__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "[] False\n"


def test_what_was_evaluated_is_said(tmp_path: Path) -> None:
    """Without a validation split, `dtrain evaluate` needs another one."""
    part = {"batches": 8, "samples": 256, "of": 300}
    for values, expected in (
        ({"val_loss": 2.0, "evaluated": part}, ["validation loss  2.0000, of the first 8 batches"]),
        ({"val_loss": 2.0, "evaluated": part | {"of": 256}}, ["validation loss  2.0000"]),
        (
            {"val_loss": None, "evaluated": {"of": 0}},
            ["validation loss  none, because the data have no validation split"],
        ),
        ({"val_loss": None, "evaluated": {}}, []),
    ):
        assert [line for line in summary_of(tmp_path, **values) if line.startswith("validation")] == expected
    assert next_commands(tmp_path, "done", {"evaluated": {"of": 0}})[0] == f"dtrain evaluate {tmp_path} --split=train"
    assert next_commands(tmp_path, "done", {"evaluated": part})[0] == f"dtrain evaluate {tmp_path}"


def test_a_run_that_saves_nothing_is_not_promised_a_resume(tmp_path: Path) -> None:
    said = "\n".join(summary_of(tmp_path, status="preempted", steps=5, saves=0))
    assert "nothing was saved (checkpoint.save=false)" in said and "resume=" not in said


@pytest.mark.parametrize(
    ("skipped", "said"),
    [
        (1, "1 of 20"),
        (20, "20 of 20: nothing was trained, loss or gradient was never finite"),
        (12, "12 of 20: loss or gradient not finite, or a spike"),
    ],
)
def test_skipped_steps_are_counted_with_a_reason_if_they_are_many(tmp_path: Path, skipped: int, said: str) -> None:
    found = summary_of(tmp_path, status="done", steps=30, start_step=10, skipped_steps=skipped)
    assert [" ".join(line.split()[2:]) for line in found if line.startswith("skipped steps")] == [said]
