"""strategy=auto: the best layout is launched as if its words had been typed."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

import dtrain
from dtrain.cli import main
from dtrain.config.files import options_of
from dtrain.launch import auto
from dtrain.launch.local import Local
from dtrain.launch.options import STAND_IN
from dtrain.plan.sections import missing_package, strategy_section
from dtrain.runs.folder import read_json
from tests.test_bad_inputs import COMPOSE_ONCE

CLUSTER = ["cluster=infiniband", "data=synthetic", "precision=bf16"]


@pytest.fixture(autouse=True)
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Work in an empty folder, without GPUs; the run folders that were handed to the launcher."""
    folders: list[Path] = []
    monkeypatch.setattr(*COMPOSE_ONCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("DTRAIN_STRICT", "1")
    monkeypatch.setattr(Local, "launch", lambda self, run_dir: folders.append(run_dir) or 0)
    return folders


def read(run_dir: Path) -> dict[str, Any]:
    config = OmegaConf.to_container(OmegaConf.load(run_dir / "config.yaml"))
    assert isinstance(config, dict)
    return config  # type: ignore[return-value]


def dry(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["launch", "strategy=auto", *words, "dry_run=true"]) == 0, capsys.readouterr().err
    return capsys.readouterr().err


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["launch", "strategy=auto", *words]) == 2
    return capsys.readouterr().err


def test_the_run_has_the_layout_and_not_the_word(
    started: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dtrain.config.hardware.count_gpus", lambda: 2)
    assert main(["launch", "strategy=auto", "model=gpt2-124m", "hardware=h100", "precision=bf16"]) == 0
    config, plan = read(started[0]), read_json(started[0] / "plan.json")
    strategy = config["choices"]["strategy"]
    assert strategy in options_of("strategy") and started[0].name.endswith(f"-gpt2-124m-{strategy}")
    assert config["name"] == f"gpt2-124m-{strategy}"
    assert config["strategy"]["_target_"] == strategy_section(strategy)["_target_"]
    assert (plan["strategy"], plan["fits"]) == (strategy, True)
    assert plan["micro_batch_size"] == config["train"]["micro_batch_size"]
    assert plan["chosen"] == config["choices"]["auto"] and plan["chosen"].startswith(strategy)
    assert f"auto      {plan['chosen']}\n" in capsys.readouterr().out
    record = json.loads((started[0] / "launch.json").read_text())
    assert "strategy=auto" in record["command"] and f"strategy={strategy}" in record["overrides"]
    hydra = OmegaConf.load(started[0] / ".hydra" / "overrides.yaml")
    assert "strategy=auto" not in hydra


def test_the_words_that_it_names_give_the_same_run(started: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtrain.config.hardware.count_gpus", lambda: 2)
    words = ["model=llama-1b", "hardware=h100", "data=synthetic", "precision=bf16"]
    assert main(["launch", "strategy=auto", *words, "run_dir=auto"]) == 0
    chosen = read(started[0])["choices"]["auto"].partition("As overrides: ")[2].split()
    assert main(["launch", *chosen, *words, "run_dir=typed"]) == 0
    first, second = read(started[0]), read(started[1])
    assert first.pop("run_dir") != second.pop("run_dir")
    assert first["choices"].pop("auto") and first == second


@pytest.mark.parametrize("more", [[], ["train.micro_batch_size=2"], ["strategy.tp=2"], ["recipe=llama-1b-single-gpu"]])
def test_it_is_the_first_line_of_the_plan(
    more: list[str], started: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dtrain.config.hardware.count_gpus", lambda: 8)
    words = ["model=llama-1b", "hardware=h100", "data=synthetic", "precision=bf16", "cluster.processes=8", *more]
    assert main(["plan", *words, "strategy=auto", "--json"]) == 0
    first = next(row for row in json.loads(capsys.readouterr().out) if not missing_package(row["strategy"]))
    assert main(["launch", "strategy=auto", *words]) == 0
    plan = read_json(started[0] / "plan.json")
    assert {key: plan[key] for key in first if key in plan} == {key: first[key] for key in first if key in plan}
    assert {"strategy", "tp", "micro_batch_size", "memory_gib", "step_s"} <= set(first) & set(plan)


def test_what_is_typed_stays(capsys: pytest.CaptureFixture[str], started: list[Path]) -> None:
    words = ["hardware=h100", "model=gpt2-124m", "train.micro_batch_size=4", "activation_checkpointing=full"]
    assert main(["launch", "strategy=auto", *words]) == 0
    config = read(started[0])
    assert (config["train"]["micro_batch_size"], config["activation_checkpointing"]) == (4, "full")
    err = dry(capsys, *CLUSTER, "model=llama-7b", "strategy.tp=4")
    assert "strategy.tp=4" in err and ("auto      tensor" in err or "auto      3d" in err)


def test_on_a_cluster_from_a_node_without_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    err = dry(capsys, *CLUSTER, "model=llama-7b")
    assert "auto      ddp" not in err and "ddp would need " in err
    assert err.count("predicted ") == 1


def test_in_a_sweep(started: list[Path], tmp_path: Path) -> None:
    words = ["strategy=auto,local_sgd", "model=gpt2-124m,gpt2-350m", "hardware=h100", "hydra.sweep.dir=sweep"]
    assert main(["launch", "-m", *words]) == 0
    configs = [read(run_dir) for run_dir in started]
    assert [c["choices"]["model"] for c in configs] == ["gpt2-124m", "gpt2-350m"] * 2
    assert all(c["choices"]["strategy"] in options_of("strategy") for c in configs)
    assert [c["choices"]["strategy"] == "local_sgd" for c in configs] == [False, False, True, True]
    assert [c["run_dir"] for c in configs] == [str(run_dir) for run_dir in started]
    assert [p.parent for p in started] == [tmp_path / "sweep"] * 4
    assert started[0].name == "0-model=gpt2-124m,strategy=auto", "the planner may change its mind, the folder not"
    assert [("chosen" in read_json(p / "plan.json")) for p in started] == [True, True, False, False]


def test_with_a_recipe_for_another_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    """What a recipe says of its own strategy (degrees, offload) is not for the one that is chosen."""
    for recipe in ("llama-70b-3d-64gpu", "llama-7b-zero3-offload"):
        assert "predicted " in dry(capsys, f"recipe={recipe}", *CLUSTER, "cluster.nodes=8"), recipe


def test_a_recipe_may_leave_it_to_the_planner(started: list[Path], tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults:\n  - override /strategy: auto\ntrain: {steps: 5}\n")
    assert main(["launch", "recipe=./mine.yaml", "hardware=h100"]) == 0
    config = read(started[0])
    assert config["choices"]["strategy"] in options_of("strategy") and config["train"]["steps"] == 5


def test_a_run_goes_on_under_it(started: list[Path]) -> None:
    assert main(["launch", "model=gpt2-124m", "strategy=local_sgd", "run_dir=outputs/run", "train.steps=9"]) == 0
    assert main(["launch", "resume=latest", "strategy=auto", "hardware=h100"]) == 0
    assert started[0] == started[1]
    config = read(started[1])
    assert config["choices"]["strategy"] not in ("auto", "local_sgd") and config["train"]["steps"] == 9


def test_from_a_script(started: list[Path]) -> None:
    dtrain.fit("gpt2-124m", strategy="auto", hardware="h100")
    assert read(started[0])["choices"]["strategy"] in options_of("strategy")


def test_defaults_that_were_planned_for_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned(*words: str) -> str:
        found = re.search(r"; planned for the default (.*?)\)", dry(capsys, "model=gpt2-tiny", *words))
        return found[1] if found else ""

    both = "2 ranks and fp32 (to change it: cluster.processes=… precision=bf16"
    assert planned() == both
    assert planned("hardware=h100") == both, "on a CPU, and for a GPU"
    assert planned("cluster.processes=2") == "fp32 (to change it: precision=bf16"
    assert planned("precision=bf16") == "2 ranks (to change it: cluster.processes=…"
    assert not planned("cluster.processes=2", "precision=fp32")
    assert planned(*CLUSTER) == "1 node of 8 ranks (to change it: cluster.nodes=…"
    assert not planned(*CLUSTER, "cluster.nodes=1")
    monkeypatch.setattr("dtrain.config.hardware.count_gpus", lambda: 4)
    assert planned("hardware=v100") == "4 ranks and fp32 (to change it: cluster.processes=… precision=fp16"


def test_without_a_gpu_it_is_ddp_when_that_fits(
    started: list[Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["launch", "strategy=auto"]) == 0
    assert read(started[0])["choices"]["strategy"] == "ddp"
    assert capsys.readouterr().out.startswith("auto      ddp: there is no GPU here")
    monkeypatch.setattr("os.sysconf", lambda name: 1024)
    assert re.search(r"training needs \S+ GiB of memory \(2 ranks × \S+ GiB\) under ddp, ", refused(capsys))
    assert len(started) == 1


def test_what_does_not_fit_has_a_fix_that_does(started: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(capsys, "model=llama-7b", "cluster.processes=1")
    assert re.search(r"strategy=auto: training needs \S+ GiB of memory under ddp, ", error)
    assert "  fix: strategy=ddp model=" in error and "cluster.processes=" not in error
    fix = refused(capsys, "model=llama-7b", "cluster.processes=2").partition("fix: ")[2].partition(" (")[0]
    assert main(["launch", "cluster.processes=2", *fix.split()]) == 0 and len(started) == 1


def test_without_figures_it_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    error = refused(capsys, "cluster=slurm")
    assert "hardware=unknown" in error and "fix: hardware=NAME (a100-40gb" in error and "dtrain plan calibrate" in error
    assert not list(tmp_path.iterdir())


def test_a_model_of_ones_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "my_net_auto.py").write_text(
        "class Net:\n    def __init__(self, dim: int = 4):\n        self.dim = dim\n"
    )
    words = ["model=my_net_auto.Net", "data=digits", "data.image_size=8", "data.channels=1", "hardware=h100"]
    error = refused(capsys, *words)
    assert error.startswith("error: strategy=auto: ") and "fix: choose a strategy" in error


def test_nothing_fits(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    error = refused(capsys, *CLUSTER, "model=llama-70b", "hardware=l4", "cluster.nodes=1")
    assert "no layout fits" in error and "more GPUs" in error and not list(tmp_path.iterdir())


def test_a_fault_of_the_planner_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("oops")

    monkeypatch.setattr(auto, "search", broken)
    monkeypatch.delenv("DTRAIN_STRICT")
    error = refused(capsys, "hardware=h100")
    assert error.startswith("error: strategy=auto: the planner failed (KeyError: 'oops')")
    assert "fix: choose a strategy" in error


def test_mistakes_are_told_before_anything_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert "train.steps=0: must be at least 1" in refused(capsys, "hardware=h100", "train.steps=0")
    assert "train.stpes" in refused(capsys, "hardware=h100", "+train.stpes=3")
    assert main(["verify", "strategy=auto"]) == 2 and "no strategy 'auto'" in capsys.readouterr().err
    assert main(["verify", "strategies=auto"]) == 2 and "strategies can be " in capsys.readouterr().err


@given(st.sampled_from(options_of("strategy")), st.sampled_from(options_of("strategy")))
def test_nothing_of_the_recipe_s_strategy_is_left(recipe: str, chosen: str) -> None:
    """Every setting of one strategy, as a recipe could say it, becomes a word that Hydra understands."""
    section = {**STAND_IN, **strategy_section(recipe)}
    words = auto.unsaid(section, set(), [f"strategy={chosen}"])
    target = strategy_section(chosen)
    for override in OverridesParser.create().parse_overrides(words):
        key = override.key_or_group.removeprefix("strategy.")
        assert override.is_delete() == (key not in target)
        assert override.is_delete() or override.value() == target[key]
