"""`launch --help`: every setting with its default and its meaning, without Hydra."""

from __future__ import annotations

import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from dtrain import cli
from dtrain.commands import launch
from dtrain.config import describe
from dtrain.config.files import GROUPS, RECIPES, flatten, options_of
from dtrain.launch.compose import hydra_config


def helped(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["launch", *words]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["strategy=fsdp", "precision=fp16"]])
def test_it_shows_what_hydra_composes(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    text = helped(capsys, "--help", *words)
    composed = OmegaConf.to_container(hydra_config(words), resolve=False)
    assert isinstance(composed, dict)
    composed.pop("hydra")
    lines = {line.strip().partition("  ")[0] for line in text.splitlines()}
    for name, value in flatten(composed).items():
        shown = describe.as_value(value).replace("`", "")
        if not name.rpartition(".")[2].startswith("_") and name not in ("logger", "hooks"):  # none is chosen
            assert f"{name}={shown}" in lines or f"{name} ({shown})" in lines, name


def test_each_setting_has_its_meaning_and_each_group_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(helped(capsys, "-h").split())
    for setting in describe.top_settings():
        assert " ".join(setting.meaning.split()) in text, setting.name
    for group in GROUPS:
        assert f" {group}: " in text and all(option in text for option in options_of(group)), group
    assert all(path.stem in text for path in RECIPES.glob("*/*.yaml"))


def test_no_line_is_longer_than_a_usual_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    text = helped(capsys, "--help").partition("== Groups")[2].partition("== Common commands")[0]
    assert 0 < max(map(len, text.splitlines())) <= launch.WIDTH


def test_changed_settings_are_left_to_hydra(capsys: pytest.CaptureFixture[str]) -> None:
    assert "\n  steps: 77\n" in helped(capsys, "--help", "train.steps=77")
    assert "data.digits.Digits" in helped(capsys, "--help", "model=convnet"), "which chooses its own data"


def test_what_the_help_imports() -> None:
    code = (
        "import sys; from dtrain.cli import main; main(['launch', '--help']); "
        "sys.exit(' '.join({'torch', 'numpy', 'hydra', 'omegaconf', 'rich'} & set(sys.modules)) or 0)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (0, "")
