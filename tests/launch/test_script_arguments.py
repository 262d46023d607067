"""The short forms `script=FILE` and `script_args=…`, without starting a program."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from dtrain.launch.arguments import prepare_arguments
from dtrain.launch.script_arguments import points, script_overrides


@given(st.lists(st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1)))
def test_arguments_reach_hydra_as_they_were_typed(items: list[str]) -> None:
    word = script_overrides([f"script_args={subprocess.list2cmdline([])}"])[0]
    assert word == "script.args=[]"
    from dtrain.launch.quoting import quoted_list

    (override,) = OverridesParser.create().parse_overrides([f"script.args={quoted_list(items)}"])
    assert override.value() == items


def test_short_forms(tmp_path: Path) -> None:
    assert points("--lr 1e-3 --name 'a b'", False) == [["--lr", "1e-3", "--name", "a b"]]
    assert points("[--lr,1e-3],[--lr, 1e-2]", True) == [["--lr", "1e-3"], ["--lr", "1e-2"]]
    assert points("[--prompt=two words,-v]", False) == [["--prompt=two words", "-v"]]
    assert points("--lr 1e-3,--lr 1e-2", True) == [["--lr", "1e-3"], ["--lr", "1e-2"]]
    assert points("--sizes 1,2", False) == [["--sizes", "1,2"]]
    words = prepare_arguments([f"script={tmp_path}/a b.py", "name=x"])
    assert words == [f"script.path='{tmp_path}/a b.py'", "name=x"]
    swept = script_overrides(["-m", f"script={tmp_path}/a.py,{tmp_path}/b.py"])
    assert swept == ["-m", f"script.path='{tmp_path}/a.py','{tmp_path}/b.py'"]
    with pytest.raises(ValueError, match="cannot be split"):
        points("'", False)


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["train.py", "--lr", "1e-3"], "script=train.py 'script_args=[--lr,1e-3]'"),
        (["script=train.py --lr 1e-3"], "script=train.py 'script_args=[--lr,1e-3]'"),
        (["script=python train.py --lr=1e-3"], "script=train.py 'script_args=[--lr=1e-3]'"),
        (["script=t.py", "cluster.processes=2", "--lr", "3"], "script=t.py 'script_args=[--lr,3]'"),
        (["script=t.py", "--name", "a b"], "script=t.py \"script_args=--name 'a b'\""),
        (["script=t.py", "script_args=--lr", "3"], "'script_args=[--lr,3]'"),
        (["script=t.py", "script_args=[--lr 3,-v]"], "'script_args=[--lr,3,-v]'"),
        (["script=t.py", "script_args=[--lr=3 --wd=1]"], "'script_args=[--lr=3,--wd=1]'"),
        (["torchrun", "--nproc_per_node=2", "t.py"], "script=t.py cluster.processes=2"),
        (
            ["accelerate", "launch", "--num_processes", "4", "t.py", "--lr", "3"],
            "script=t.py cluster.processes=4 'script_args=[--lr,3]'",
        ),
        (["python", "t.py"], "script=t.py"),
    ],
)
def test_a_program_typed_with_its_arguments(words: list[str], fix: str) -> None:
    with pytest.raises(ValueError, match="\n  fix: ") as refused:
        prepare_arguments(words)
    assert str(refused.value).partition("\n  fix: ")[2] == fix


@pytest.mark.parametrize(
    "words",
    [
        ["--dry-run"],
        ["--cfg", "job"],
        ["-m", "train.seed=1,2"],
        ["~tags"],
        ["script_args=-v"],
        ["trust=[a]", "--cfg=job"],
    ],
)
def test_what_is_typed_beside_a_program(words: list[str]) -> None:
    prepare_arguments(["script=t.py", *words])
