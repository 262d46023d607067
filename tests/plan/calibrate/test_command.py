"""`dtrain plan calibrate`: what it measures here becomes a file that the launcher takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dtrain.config.files import section
from dtrain.config.hardware import Hardware
from dtrain.plan.calibrate import command


def hardware_of(path: Path) -> Hardware:
    return Hardware(**{k: v for k, v in yaml.safe_load(path.read_text()).items() if k != "_target_"})


# ---- this machine --------------------------------------------------------------------------------------------


def test_this_machine_is_measured_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "here.yaml"
    assert command.main([f"out={out}", "seconds=1", "--json", str(tmp_path / "all.json")]) == 0
    it: Any = hardware_of(out)
    assert it.stream_gb_s and it.launch_us and it.kernel_us and it.cpu_adam_gb_s and it.host_memory_gib
    assert it.matmul_tflops and it.peak_fp32_tflops and it.peak_bf16_tflops and it.gpu_memory_gib and it.num_sms
    everything = json.loads((tmp_path / "all.json").read_text())
    assert len(everything["matmul"]) >= 10
    if it.gpu is None:  # two processes here
        assert {row["collective"] for row in everything["collectives"]} == set(calibrate_collectives())
        assert it.nvlink_max_gb_s and it.collective_us and it.nvlink_latency_us
        assert max(row["tflops"] for row in everything["matmul"]) == pytest.approx(it.peak_fp32_tflops, rel=0.01)
    text = out.read_text()
    assert text.startswith(command.MARK) and "torch " in text and "TFLOP/s" in text
    assert "wrote" in capsys.readouterr().out
    assert set(yaml.safe_load(text)) == set(section("hardware", "unknown"))


def calibrate_collectives() -> tuple[str, ...]:
    from dtrain.plan.calibrate.measure import COLLECTIVES

    return COLLECTIVES


# ---- the command line ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["secnds=3"], r"secnds=3: is not an option.*\n  fix: did you mean seconds=3\?"),
        (["--outt", "x"], r"--outt: is not an option.*\n  fix: did you mean out=NAME\?"),
        (["fast"], r"fast: is not an option.*\n  fix: use one of out=NAME"),
        (["seconds=0"], r"seconds=0: must be.*\n  fix: seconds=40"),
        (["seconds=soon"], r"seconds=soon: must be"),
        (["--out"], r"out=: needs a value\n  fix: out=NAME"),
        (["out=h100"], r"out=h100: would replace a file that this command did not write\n  fix: out=my-h100"),
        (["out=/no/such/folder/a.yaml"], r"there is no folder"),
        (["out=folder/name"], r"must be a name, or a file that ends in .yaml\n  fix: out=folder/name.yaml"),
    ],
)
def test_a_mistake_is_told_before_anything_is_measured(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "measure", lambda seconds: pytest.fail("it measured"))
    with pytest.raises(ValueError, match=message):
        command.main(words)


def test_dashes_are_as_good() -> None:
    assert command.parse(["--out", "a", "--seconds=3", "json=b"]) == {"out": "a", "seconds": "3", "json": "b"}


# ---- one run -------------------------------------------------------------------------------------------------


def make_run(folder: Path, tokens_per_s: float, calibration: float | None = None, **plan: Any) -> Path:
    """A run on an H200 that was predicted to take 1 s a step, 0.8 s of it compute."""
    step = {"total": 1.0, "compute": 0.8, "communication": 0.2}
    (folder / "launch.json").write_text("{}")
    (folder / "plan.json").write_text(json.dumps({"hardware": "h200", "step_s": step, "tokens_per_s": 1000.0} | plan))
    (folder / "summary.json").write_text(json.dumps({"tokens_per_s": tokens_per_s}))
    (folder / "config.yaml").write_text(
        yaml.safe_dump({"hardware": section("hardware", "h200") | {"calibration": calibration}})
    )
    return folder


@pytest.mark.parametrize(("before", "after"), [(None, 1.5), (2.0, 3.0)])
def test_a_run_calibrates_its_stack(tmp_path: Path, before: float | None, after: float) -> None:
    run = make_run(tmp_path, 1000 / 1.4, before)  # 1.4 s a step: compute took 1.2 s
    out = tmp_path / "mine.yaml"
    assert command.main([f"from={run}", f"out={out}"]) == 0
    made = hardware_of(out)
    assert made.calibration == pytest.approx(after, rel=0.01), "a second time it is on top of the first"
    assert made.gpu == "H200" and made.stream_gb_s == section("hardware", "h200")["stream_gb_s"]
    assert "compute took 1.2 s" in out.read_text()


def test_a_run_on_hardware_that_was_found_takes_that_file(tmp_path: Path) -> None:
    run = make_run(tmp_path, 1000)
    (run / "config.yaml").write_text(yaml.safe_dump({"hardware": section("hardware", "unknown")}))
    assert command.main([f"from={run}", f"out={tmp_path / 'mine.yaml'}"]) == 0
    assert hardware_of(tmp_path / "mine.yaml").gpu == "H200"


@pytest.mark.parametrize("name", ["h200\ndefaults: [x]", "../../README", "h200\u2028x", "", None, 3, "nothing-like-it"])
def test_a_foreign_run_writes_no_line_of_its_own(tmp_path: Path, name: Any) -> None:
    """plan.json's words come into a file that the launcher reads."""
    run = make_run(tmp_path, 1000, hardware=name)
    if name == "nothing-like-it":  # a plain word, which may be a file of one's own: then the figures are in config.yaml
        (run / "config.yaml").write_text(yaml.safe_dump({"hardware": {}}))
    with pytest.raises(ValueError, match=r"from=.*hardware.*\n  fix: choose a run on"):
        command.main([f"from={run}", f"out={tmp_path / 'mine.yaml'}"])
    assert not (tmp_path / "mine.yaml").exists()


def test_settings_that_a_foreign_run_adds_are_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path, 1000, hardware="mine")
    more = {"_target_": "os.system", "made_up": 3, "defaults": ["x"]}
    (run / "config.yaml").write_text(yaml.safe_dump({"hardware": section("hardware", "h200") | more}))
    assert command.main([f"from={run}", f"out={tmp_path / 'mine.yaml'}"]) == 0
    made = yaml.safe_load((tmp_path / "mine.yaml").read_text())
    assert set(made) == set(section("hardware", "unknown")) and made["_target_"] == "dtrain.config.hardware.Hardware"


@pytest.mark.parametrize(
    ("key", "value"),
    [("gpu", "a\nb"), ("gpu", 3), ("source", ["x"]), ("launch_us", "fast"), ("launch_us", float("nan")),
     ("matmul_tflops", float("inf")), ("pcie_gb_s", True), ("num_sms", {"a": 1})],
)  # fmt: skip
def test_a_foreign_run_s_figures_are_figures(tmp_path: Path, key: str, value: Any) -> None:
    run = make_run(tmp_path, 1000)
    (run / "config.yaml").write_text(yaml.safe_dump({"hardware": section("hardware", "h200") | {key: value}}))
    with pytest.raises(ValueError, match=rf"hardware.{key}=.*is not a valid value\n  fix: choose another run"):
        command.main([f"from={run}", f"out={tmp_path / 'mine.yaml'}"])


@pytest.mark.parametrize(
    ("tokens_per_s", "plan", "message"),
    [
        (1000.0, {"step_s": None, "reason": "model=x is your own"}, "nothing was predicted .*model=x is your own"),
        (0.0, {}, "its summary.json has no tokens_per_s"),
        (float("nan"), {}, "its summary.json has no tokens_per_s"),
        (1000.0, {"step_s": {"total": float("inf"), "compute": 0.8}}, "nothing was predicted for this run"),
        (10000.0, {}, "less than the 0.2 s predicted for everything but compute"),
    ],
)
def test_a_run_that_cannot_calibrate_says_why(
    tmp_path: Path, tokens_per_s: float, plan: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        command.main([f"from={make_run(tmp_path, tokens_per_s, **plan)}", f"out={tmp_path / 'a.yaml'}"])
    assert not (tmp_path / "a.yaml").exists()
