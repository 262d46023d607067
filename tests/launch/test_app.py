"""`dtrain launch` up to the launcher: the words it takes, the run folder, sweeps and resumes. Nothing is trained."""

import json
import os
import shlex
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from dtrain.cli import main
from dtrain.config.files import options_of
from dtrain.config.hydra_errors import probably_meant
from dtrain.launch import app as launch
from dtrain.launch import resume_arguments
from dtrain.launch.app import slug
from dtrain.launch.arguments import prepare_arguments
from dtrain.launch.local import Local
from dtrain.launch.quoting import quote
from dtrain.launch.resolve import resolve
from tests.test_bad_inputs import COMPOSE_ONCE

NAMED = "hydra.job.config.override_dirname.exclude_keys="


@pytest.fixture(autouse=True)
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Work in an empty folder; the run folders that were handed to the launcher."""
    folders: list[Path] = []
    monkeypatch.setattr(*COMPOSE_ONCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.setattr(Local, "launch", lambda self, run_dir: folders.append(run_dir) or 0)
    return folders


def read(run_dir: Path) -> dict[str, Any]:
    config = OmegaConf.to_container(OmegaConf.load(run_dir / "config.yaml"))
    assert isinstance(config, dict)
    return config  # type: ignore[return-value]


def run(*arguments: str) -> None:
    assert main(["launch", *arguments]) == 0


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["launch", *arguments]) == 2
    return capsys.readouterr().err


def test_a_warning_is_printed_before_the_start_and_stops_nothing(
    started: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train.steps=5", "schedule.warmup_steps=50", "run_dir=run"]
    run(*words, "dry_run=true")
    shown = capsys.readouterr()
    assert shown.err.startswith("warning: schedule.warmup_steps=50 is longer") and "warning:" not in shown.out
    run(*words)
    shown = capsys.readouterr()
    assert shown.err.count("warning:") == 1 and len(started) == 1


# ---- the run folder ------------------------------------------------------------------------------------------


def test_a_run_folder(started: list[Path], tmp_path: Path) -> None:
    run("strategy=fsdp", "train.steps=7", "name=mine")
    [run_dir] = started
    assert run_dir.relative_to(tmp_path / "outputs").parts[1].endswith("-mine")
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    config = read(run_dir)
    assert config["train"]["steps"] == 7
    assert config["run_dir"] == str(run_dir)
    assert config["choices"] | {"strategy": "fsdp", "model": "gpt2-tiny", "recipe": None} == config["choices"]
    record = json.loads((run_dir / "launch.json").read_text())
    assert shlex.split(record["command"]) == ["dtrain", "launch", "strategy=fsdp", "train.steps=7", "name=mine"]
    assert record["cwd"] == str(tmp_path)
    assert [launch["overrides"] for launch in record["launches"]] == [["strategy=fsdp", "train.steps=7", "name=mine"]]
    assert {p.name for p in run_dir.iterdir()} == {".hydra", ".lock", "config.yaml", "launch.json", "plan.json"}


def test_data_paths_are_absolute_so_that_a_resume_finds_them_from_anywhere(started: list[Path], tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("words and words\n" * 40)
    run("data=text", "data.path=text.txt")
    assert read(started[0])["data"]["path"] == str(tmp_path / "text.txt")


@pytest.mark.parametrize("code", [3, 75])
def test_the_exit_code_is_the_launchers(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Local, "launch", lambda self, run_dir: code)
    assert main(["launch"]) == code


def test_a_cluster_of_ones_own(started: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_cluster_xyz.py").write_text(
        "from dtrain.launch.local import Local\n"
        "class Mine(Local):\n"
        "    def __init__(self, nodes: int, processes: int, max_restarts: int, grace_s: int,\n"
        "                 hang_timeout: float | None, on_hang: str, system_metrics_every: float,\n"
        "                 metrics_port: int | None, metrics_host: str):\n"
        "        super().__init__(1, processes)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    run("cluster._target_=my_cluster_xyz.Mine", "trust=[my_cluster_xyz]", "cluster.nodes=3", "cluster.processes=2",
        "train.global_batch_size=6")  # fmt: skip
    assert read(started[0])["cluster"]["nodes"] == 3


def test_an_empty_folder_may_be_the_run_folder(started: list[Path], tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    run("run_dir=here")
    assert started == [tmp_path / "here"]


# ---- words that are ours -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "want"),
    [
        (["--dry-run"], ["dry_run=true"]),
        (["+strategy=fsdp", "++model=gpt2-124m"], ["strategy=fsdp", "model=gpt2-124m"]),
        (["+recipe=cpu-tiny"], ["recipe=cpu-tiny"]),
        (["recipe=null", "train.steps=3"], ["train.steps=3"]),
        (["run_dir=~/x", "data.path=~", "name=a~b"], ["run_dir=/home/me/x", "data.path=/home/me", "name=a~b"]),
        (
            ["strategy=ddp,fsdp", "-m", "+train.foo=1"],
            ["-m", "strategy=ddp,fsdp", "+train.foo=1", f"{NAMED}[train.foo,trust]"],
        ),
        (["--cfg", "job", "-p", "train", "--info", "--help"], ["--cfg", "job", "-p", "train", "--info", "--help"]),
        (["resume=null"], ["resume=null"]),
    ],
)
def test_arguments(typed: list[str], want: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert prepare_arguments(typed) == want


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("fsdp", "strategy=fsdp"), ("strategy", "strategy=…"), ("strategy:fsdp", "strategy=fsdp"),
        ("model/gpt2-tiny", "model=gpt2-tiny"),
        ("train.steps = 5", "train.steps=5"), ("train.steps==", "train.steps=300"),
        ("strategy fsdp", "strategy=fsdp"), ("run_dir=a=b", "'run_dir=\"a=b\"'"), ("", "key=value"), ("?", "key=value"),
        ("cluster.srun=[--a=b, -c]", """'cluster.srun=["--a=b","-c"]'"""),
    ],
)  # fmt: skip
def test_what_was_probably_meant(typed: str, meant: str) -> None:
    assert probably_meant(typed) == meant


def test_what_was_probably_meant_by_words_with_spaces() -> None:
    assert probably_meant("strategy", ["strategy", "fsdp"]) == "strategy=fsdp"
    assert probably_meant("strategy", ["strategy"]).startswith("strategy=ddp; strategy can be 3d, ")
    assert probably_meant("train.steps", ["train.steps", "=", "100"]) == "train.steps=100"
    assert probably_meant("train.steps", ["train.steps", "=100"]) == "train.steps=100"
    assert probably_meant("train.steps", ["train.steps", "=", "few"]) == "train.steps=300"
    assert probably_meant("my/train.py") == "script=my/train.py"


@settings(max_examples=60)
@given(st.text(st.characters(exclude_categories=("Cc", "Cs")), min_size=1, max_size=20))
def test_any_path_survives_hydras_grammar(text: str) -> None:
    path = Path(text)
    [override] = OverridesParser.create().parse_overrides([f"run_dir={quote(path)}"])
    assert override.value() == str(path) or "${" in text


@given(st.text(max_size=300))
def test_a_slug_is_one_folder_name(text: str) -> None:
    name = slug(text)
    assert len(name) <= 120
    assert not set(name) & set("/\\ \0\n'\"$*?<>|:;&")
    assert slug(name) == name


def test_a_folder_name_of_a_sweep_has_no_plus_before_a_name() -> None:
    assert slug("1-++model.layers=1,+model.width=32") == "1-model.layers=1,model.width=32"
    assert slug("0-optim.lr=1e+05") == "0-optim.lr=1e+05" and slug("0-") == "0"


def test_a_recipe_is_a_start_and_the_command_line_wins(started: list[Path], tmp_path: Path) -> None:
    (tmp_path / "my own.yaml").write_text(
        "defaults:\n  - override /strategy: fsdp\n  - override /model: gpt2-tiny\ntrain: {steps: 11, seed: 5}\n"
    )
    run("recipe=my own.yaml", "train.seed=6", "run_dir=out")
    config = read(started[0])
    assert (config["choices"]["strategy"], config["train"]["steps"], config["train"]["seed"]) == ("fsdp", 11, 6)
    assert config["choices"]["recipe"] == "my own"


# ---- sweeps --------------------------------------------------------------------------------------------------


def test_a_sweep(started: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("-m", "strategy=ddp,fsdp", "train.seed=2", "hydra.sweep.dir=sweep")
    assert [p.parent for p in started] == [tmp_path / "sweep"] * 2
    assert [(read(p)["choices"]["strategy"], read(p)["train"]["seed"]) for p in started] == [("ddp", 2), ("fsdp", 2)]
    assert [read(p)["run_dir"] for p in started] == [str(p) for p in started]
    table = capsys.readouterr().out
    assert "strategy=fsdp" in table and "train.seed=2" in table


def test_a_sweep_over_all_options_of_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    run("-m", "schedule=glob(*)", "dry_run=true")
    commands = [c for c in capsys.readouterr().out.splitlines() if "dtrain.train.rank" in c]
    assert len(commands) == len(options_of("schedule")) > 1


def test_a_dry_sweep_shows_each_command_and_starts_none(
    started: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("-m", "train.seed=1,2", "dry_run=true", "hydra.sweep.dir=sweep")
    commands = [shlex.split(c) for c in capsys.readouterr().out.splitlines() if "dtrain.train.rank" in c]
    assert [Path(c[-1]).parent for c in commands] == [tmp_path / "sweep"] * 2
    assert [Path(c[-1]).name.partition("-")[0] for c in commands] == ["0", "1"]
    assert started == [] and not list(tmp_path.iterdir())


def test_the_folder_that_was_checked_is_the_one_that_is_used(
    started: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`${now:}` is read once: a second later it would be a folder that nobody has looked at."""
    checked: list[str] = []

    def spy(cfg: DictConfig) -> dict[str, Any]:
        config = resolve(cfg)
        checked.append(config["run_dir"])
        return config

    monkeypatch.setattr(launch, "resolve", spy)
    run("run_dir=outputs/${now:%f}")
    run("-m", "train.seed=1,2", "hydra.sweep.dir=multirun/${now:%f}")
    assert sorted(set(checked)) == sorted(map(str, started))
    assert len(started) == 3


# ---- resume --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was launched once; made once, because composing takes a quarter of a second."""
    folder = tmp_path_factory.mktemp("template")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*COMPOSE_ONCE)
        patch.chdir(folder)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setattr(Local, "launch", lambda self, run_dir: 0)
        run("run_dir=run", "train.steps=9", "train.stop_after=4", "optim.lr=0.25", "schedule=linear")
    return folder / "run"


@pytest.fixture
def old(template: Path, tmp_path: Path) -> Path:
    copy = shutil.copytree(template, tmp_path / "old, with = odd 'signs'")
    os.chmod(copy, 0o755)
    return copy


def test_a_resume_goes_on_in_its_folder_with_its_own_settings(old: Path, template: Path, started: list[Path]) -> None:
    before = read(old)
    run(f"resume={old}")
    assert started == [old]
    after = read(old)
    assert after.pop("resume") == str(old)
    assert before.pop("resume") is None
    assert (before.pop("run_dir"), after.pop("run_dir")) == (str(template), str(old)), "it may have been moved"
    assert (before["train"].pop("stop_after"), after["train"].pop("stop_after")) == (4, None), "it meant that launch"
    assert after == before
    assert len(json.loads((old / "launch.json").read_text())["launches"]) == 2
    assert stat.S_IMODE(old.stat().st_mode) == 0o700


def test_the_classes_of_a_run_named_again_keep_their_arguments(started: list[Path], tmp_path: Path) -> None:
    """Another class has its own defaults; what is typed beside the class changes."""
    own = ["model=tests.data.own_data.Net", "data=tests.data.own_data.Drawing", "loss=cross_entropy"]
    run(*own, "model.inputs=16", "data.num=24", "run_dir=run", "train.steps=4")
    run("resume=run", *own)
    config = read(tmp_path / "run")
    assert len(started) == 2 and config["model"] == {"_target_": "tests.data.own_data.Net", "inputs": 16}
    run("resume=run", *own, "data.num=32", "resume_allow=[data.num]")
    assert read(tmp_path / "run")["data"]["num"] == 32
    words = ["model=tests.data.own_data.Named", own[1], "strategy=ddp"]
    given = dict(word.split("=") for word in words)
    assert resume_arguments.without_same_classes(words, given, tmp_path / "run") == (
        [words[0], "strategy=ddp"], ["model", "strategy"]
    )  # fmt: skip


@pytest.mark.parametrize("word", ["latest", "= odd 'sig"])
def test_a_resume_by_name(old: Path, started: list[Path], word: str, tmp_path: Path) -> None:
    (tmp_path / "outputs").mkdir()
    moved = old.rename(tmp_path / "outputs" / old.name)
    run(f"resume={word}")
    assert started == [moved]


def test_how_a_run_is_run_may_change_on_resume(old: Path, started: list[Path]) -> None:
    run(
        f"resume={old}", "strategy=fsdp", "strategy.sharding=grad_op", "cluster.processes=4", "compile=true",
        "checkpoint.every=1", "train.micro_batch_size=2", "train.stop_after=8", "logger=wandb", "logger.mode=offline",
        "activation_checkpointing=full",
    )  # fmt: skip
    config = read(old)
    assert started == [old]
    assert config["choices"]["strategy"] == "fsdp" and config["choices"]["schedule"] == "linear"
    assert config["strategy"]["sharding"] == "grad_op" and "bucket_mb" not in config["strategy"]
    assert config["train"]["stop_after"] == 8 and config["train"]["steps"] == 9
    run(f"resume={old}", "strategy=ddp")
    assert read(old)["strategy"]["bucket_mb"] == 25
    assert read(old)["cluster"]["processes"] == 4, "what the last launch set stays"


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ("train.steps=20", "train.steps: 9 → 20"),
        ("schedule=cosine", "schedule._target_: dtrain.optim.schedule.linear → dtrain.optim.schedule.cosine"),
    ],
)
def test_what_is_computed_may_change_only_by_name(
    old: Path, started: list[Path], change: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (old / "config.yaml").read_bytes()
    text = refused(capsys, f"resume={old}", change)
    assert f"    {shown}\n" in text
    assert started == [] and (old / "config.yaml").read_bytes() == before
    allow = text.rsplit("'", 2)[1]  # exactly what the message says
    assert allow.startswith("resume_allow=[")
    run(f"resume={old}", change, allow)
    assert started == [old]


def test_a_resume_does_not_depend_on_what_the_defaults_are_today(old: Path, started: list[Path]) -> None:
    """As if conf/ had said something else when the run was made. Its recipe is not asked, either."""
    config = OmegaConf.load(old / "config.yaml")
    config.train.seed, config.optim.lr, config.model.dropout = 77, 0.25, 0.5
    OmegaConf.save(config, old / "config.yaml")
    run(f"resume={old}")
    after = read(old)
    assert (after["train"]["seed"], after["optim"]["lr"], after["model"]["dropout"]) == (77, 0.25, 0.5)


def test_a_resume_can_be_a_dry_run(old: Path, started: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    before = (old / "config.yaml").read_bytes()
    run(f"resume={old}", "--dry-run", "cluster.processes=4")
    out = capsys.readouterr().out
    assert "--nproc-per-node=4" in out and shlex.split(out)[-1] == str(old)
    assert started == [] and (old / "config.yaml").read_bytes() == before


def saved(run_dir: Path, step: int) -> None:
    """As if the run had saved there."""
    folder = run_dir / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")


def test_a_resume_without_a_checkpoint_says_where_it_begins(
    old: Path, started: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    said = f"{old.name} has no checkpoint yet, so the run starts again from step 1\n"
    run(f"resume={old}", "dry_run=true")
    assert said in capsys.readouterr().err
    run(f"resume={old}")
    assert said in capsys.readouterr().out
    saved(old, 4)
    run(f"resume={old}")  # the header has the step
    assert "no checkpoint" not in capsys.readouterr().out
    assert started == [old, old]


@pytest.mark.parametrize(
    "words, complaint",
    [
        (["profile=torch", "profile.start=4"], "the run ends after 9 steps, and step 10 is the last one to record"),
        (["profile=torch", "profile.start=4"], "fix: profile.start=3, or train.steps=10 'resume_allow=[train.steps]'"),
        (["profile=torch", "profile.start=5", "train.stop_after=8"],
         "fix: profile.start=3 profile.num_steps=1, or train.stop_after=11"),
        (["nsys=true", "profile.start=6", "profile.num_steps=1"], "step 10 is the last one to record"),
        (["profile.start=3"], "profile.start=3: profile=none records nothing"),
    ],
)  # fmt: skip
def test_a_profile_that_a_resume_cannot_reach_is_refused(
    old: Path, started: list[Path], words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(old, 4)
    assert complaint in refused(capsys, f"resume={old}", *words)
    assert started == []


def test_a_resume_that_reaches_its_profile_is_not_refused(old: Path, started: list[Path]) -> None:
    saved(old, 4)
    run(f"resume={old}", "profile=torch", "profile.start=3", "profile.num_steps=3")
    assert started == [old]
    saved(old, 8)
    run(f"resume={old}")  # nothing of a profile is typed: it is no reason not to end the run
    assert started == [old, old]


def test_points_of_a_sweep_that_record_nothing_share_its_words(started: list[Path]) -> None:
    run("-m", "profile=none,torch", "profile.start=3", "profile.num_steps=1", "train.steps=9", "hydra.sweep.dir=sweep")
    assert len(started) == 2


@pytest.mark.parametrize("damage", ["", "- a list\n", "train: [1\n", "just words\n", None])
def test_a_run_with_a_damaged_config_is_refused(
    old: Path, started: list[Path], damage: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    (old / "config.yaml").unlink()
    if damage is not None:
        (old / "config.yaml").write_text(damage)
    text = refused(capsys, f"resume={old}")
    assert "resume=" in text and "config.yaml" in text and "  fix: " in text and "Traceback" not in text
    assert started == []


@pytest.mark.parametrize(
    "text",
    [
        "hydra:\n  callbacks:\n    x:\n      _target_: evil_module.Thing\n",
        "defaults:\n  - override hydra/launcher: evil\n",
        "defaults:\n  - /model/gpt2-tiny@hydra.callbacks.x\n",
    ],
)
def test_a_recipe_cannot_reach_hydras_own_settings(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hydra makes its callbacks before the gate looks at anything."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "evil_module.py").write_text("open('was-imported', 'w').close()\nclass Thing: pass\n")
    (tmp_path / "mine.yaml").write_text(text)
    assert main(["launch", "recipe=./mine.yaml", "dry_run=true"]) == 2
    assert "remove them from the file" in capsys.readouterr().err
    assert not (tmp_path / "was-imported").exists()


def test_a_run_folder_cannot_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "evil_too.py").write_text("open('was-imported', 'w').close()\nclass Thing: pass\n")
    config: dict[str, Any] = {"train": {"steps": 3}, "hydra": {"callbacks": {"x": {"_target_": "evil_too.Thing"}}}}
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    OmegaConf.save(OmegaConf.create(config), run_dir / "config.yaml")
    with pytest.raises(ValueError, match=r"hydra\.callbacks\.x\._target_"):
        resume_arguments.store_as_run(run_dir, [])
    config |= {"hydra": {"searchpath": ["."]}, "defaults": [{"override hydra/launcher": "evil"}]}
    OmegaConf.save(OmegaConf.create(config), run_dir / "config.yaml")
    resume_arguments.store_as_run(run_dir, [])
    stored = ConfigStore.instance().load("recipe/as-run.yaml").node
    assert "hydra" not in stored and not any("hydra" in str(entry) for entry in stored.defaults)


def test_a_mistake_in_your_own_file_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_net.py").write_text("class Net(:\n    pass\n")
    assert (
        main(["launch", "model=broken_net.Net", "data=digits", "data.image_size=8", "data.channels=1", "dry_run=true"])
        == 2
    )
    error = capsys.readouterr().err
    assert "broken_net.py:1 is not valid Python" in error and "fix: correct broken_net.py:1" in error
