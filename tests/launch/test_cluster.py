"""A cluster class of the user: it may be older than a setting of dtrain."""

from pathlib import Path

import pytest

from dtrain.cli import main
from tests.test_bad_inputs import COMPOSE_ONCE

MINE = """
class Fixed:
    def __init__(self, nodes: int = 1, grace_s: int = 30, queue: str = "") -> None:
        self.got = [nodes, grace_s, queue]

    def launch(self, run_dir):
        print("launched", *self.got)
        return 0

class Any(Fixed):
    def __init__(self, **settings):
        self.got = sorted(settings)
"""


@pytest.fixture(autouse=True)
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*COMPOSE_ONCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    Path("older_cluster.py").write_text(MINE)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["cluster=older_cluster.Fixed"], "launched 1 30"),
        (["cluster=older_cluster.Fixed", "cluster.queue=night"], "launched 1 30 night"),
        # it has all settings of cluster=local, and those of slurm
        (["cluster._target_=older_cluster.Fixed", "trust=[older_cluster]"], "launched 1 300"),
        (["cluster=slurm", "cluster._target_=older_cluster.Fixed", "trust=[older_cluster]"], "launched 1 300"),
        (["cluster=older_cluster.Any", "cluster.queue=night"], "launched nodes processes queue"),
    ],
)
def test_it_gets_what_its_constructor_takes(
    overrides: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "train.steps=2", *overrides, "run_dir=run"]) == 0, capsys.readouterr().err
    assert capsys.readouterr().out.strip().splitlines()[-1].strip() == expected


@pytest.mark.parametrize("typed", ["cluster.metrics_port=9000", "cluster.max_restarts=2", "cluster.quue=x"])
def test_a_typed_setting_that_it_lacks_is_an_error(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "cluster=older_cluster.Fixed", typed, "run_dir=run"]) == 2
    assert f"{typed.partition('=')[0]}: there is no such setting" in capsys.readouterr().err
    assert not Path("run").exists()
