"""Which trackers a configuration may have: one or several, installed, and without secrets."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from dtrain.checks import loggers
from dtrain.config.run_file import with_current_targets
from dtrain.launch.compose import compose
from dtrain.loggers.wandb import Wandb


def chosen(*overrides: str) -> dict[str, Any]:
    config = compose(list(overrides))
    loggers.check(config)
    return {"choice": config["choices"]["logger"], **config["logger"]}


def test_one_or_several_loggers_each_with_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen() == {"choice": "none"}
    assert chosen("logger=csv") == {"choice": "csv", "csv": {"_target_": "dtrain.loggers.csv.Csv", "every": 1}}
    found = chosen("logger=[csv, mlflow]", "logger.mlflow.uri=http://localhost:5000")
    assert list(found) == ["choice", "csv", "mlflow"] and found["choice"] == "csv,mlflow"
    assert found["mlflow"]["uri"] == "http://localhost:5000" and found["mlflow"]["experiment"] == "dtrain"
    monkeypatch.setenv("WANDB_API_KEY", "not-a-real-key")
    for setting in ("logger.wandb.project=mine", "logger.project=mine"):  # as it is, and as it was before
        assert chosen("logger=wandb", setting)["wandb"]["project"] == "mine"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["logger=[csv,mlfow]"], "logger=mlfow: there is no such option\n  fix: did you mean logger=mlflow?"),
        (["logger=[]"], "logger=[]: has no value\n  fix: leave out logger="),
        (
            ["logger=csv", "logger.mlflow.uri=http://a"],
            "logger.mlflow.uri: mlflow is not among the chosen loggers\n  fix: ",
        ),
        (["logger=mlflow", "logger.mlflow.url=http://a"], "logger.mlflow.url"),
        (["logger=mlflow", "logger.mlflow.uri=5"], "logger.mlflow.uri=5: must be text or null"),
        (["logger=mlflow", "logger.mlflow.uri=localhost"], "logger.mlflow.uri=localhost: must be an address"),
        (["logger=mlflow", "logger.mlflow.uri=http://:80"], "must be an address"),
        (
            ["logger=mlflow", "logger.mlflow.uri=http://me:pw@host"],
            "logger.mlflow.uri=…: has a password or token in it",
        ),
        (["logger=trackio", "logger.trackio.server_url='http://host?write_token=x'"], "server_url=…: has a password"),
        (["logger=csv", "logger.csv.every=0"], "logger.csv.every=0: must be at least 1"),
        (["logger=wandb", "logger.wandb.mode=on"], "logger.wandb.mode=on: must be one of online, offline, disabled"),
        (["logger=wandb"], "logger=wandb: no key for api.wandb.ai is known\n  fix: wandb login, or"),
    ],
)
def test_what_is_refused(overrides: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    with pytest.raises(ValueError) as error:
        chosen(*overrides)
    assert message in str(error.value) and "\n  fix: " in str(error.value)


@pytest.mark.parametrize("name", loggers.NEEDS)
def test_a_missing_library_is_named_with_its_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    with pytest.raises(
        ValueError, match=rf"logger={name}: {name} is not installed\n  fix: pip install 'dtrain\[{name}\]'"
    ):
        loggers.check_installed(name)


def test_the_logger_of_an_old_run() -> None:
    old = {"_target_": "dtrain.train.loggers.Wandb", "project": "mine", "mode": "offline"}
    wandb = old | {"_target_": "dtrain.loggers.wandb.Wandb"}
    assert with_current_targets({"logger": old})["logger"] == {"wandb": wandb}
    for module in ("dtrain.loggers", "dtrain.train.loggers"):
        assert with_current_targets({"logger": {"_target_": f"{module}.NoLogger"}})["logger"] == {}
    assert with_current_targets({"logger": {"wandb": wandb}})["logger"] == {"wandb": wandb}


def test_a_run_folder_names_no_server() -> None:
    old = {"logger": {"mlflow": {"uri": "http://elsewhere"}}}
    with pytest.raises(ValueError, match=r"type it again: logger\.mlflow\.uri=http://elsewhere"):
        loggers.check_resumed(old, {"logger": {"mlflow": {"uri": None}}})
    loggers.check_resumed(old, {"logger": {"mlflow": {"uri": "http://elsewhere"}}})
    loggers.check_resumed(old, {"logger": {}})


@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_the_environment_can_turn_the_network_of_wandb_off(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NETRC", "/nowhere")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_MODE", mode)
    chosen("logger=wandb")
    assert Wandb().mode == mode and not Wandb().is_remote
