"""What is said of a name that a user's module does not have."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtrain.config.build import locate
from dtrain.config.schema import signature
from dtrain.config.source import find

NET = """
from torch.nn import Linear, ReLU
from layers_of_mine import Norm
from .sibling import Head
class Net: ...
"""


@pytest.fixture(autouse=True)
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "mine").mkdir()
    for name, text in {"__init__": "", "net": NET, "sibling": "class Head: ..."}.items():
        (tmp_path / "mine" / f"{name}.py").write_text(text)
    (tmp_path / "layers_of_mine.py").write_text("class Norm: ...")


@pytest.mark.parametrize(
    ("typed", "fix"),
    [("Nett", "did you mean model=mine.net.Net?"), ("Nrm", "did you mean model=mine.net.Norm?"),
     ("Heads", "did you mean model=mine.net.Head?"), ("Linnear", "mine.net has Net, Norm, Head")],
)  # fmt: skip
def test_only_what_the_user_wrote_is_suggested(typed: str, fix: str) -> None:
    with pytest.raises(ValueError) as error:
        find(f"mine.net.{typed}", "model")
    assert str(error.value).partition("fix: ")[2] == fix


def test_the_same_once_the_module_is_imported() -> None:
    for typed, fix in {"Linnear": "check the spelling", "Nett": "did you mean mine.net.Net?"}.items():
        with pytest.raises(ValueError) as error:
            locate(f"mine.net.{typed}", ["mine"])
        assert str(error.value).partition("fix: ")[2] == fix


def test_a_class_of_another_module_names_the_module_to_trust(tmp_path: Path) -> None:
    (tmp_path / "late_of_mine.py").write_text("from layers_of_mine import *\n")
    with pytest.raises(ValueError, match=r"model\._target_=layers_of_mine\.Norm: only dtrain's own code") as error:
        signature("late_of_mine.Norm", "model._target_", ["late_of_mine"])
    assert "fix: 'trust=[late_of_mine,layers_of_mine]' if" in str(error.value)
    with pytest.raises(ValueError) as error:
        locate("late_of_mine.Norm", ["late_of_mine"])
    assert "fix: 'trust=[late_of_mine,layers_of_mine]' if" in str(error.value)
    assert signature("late_of_mine.Norm", "model._target_", ["late_of_mine", "layers_of_mine"]) == {}
    assert locate("late_of_mine.Norm", ["late_of_mine", "layers_of_mine"]).__name__ == "Norm"


def test_what_a_module_only_imports_is_named_where_it_is_defined(tmp_path: Path) -> None:
    (tmp_path / "imports_of_mine.py").write_text(
        "import functools, subprocess\nimport torch\nfrom torch.optim import RAdam\n"
        "adam = functools.partial(torch.optim.Adam, lr=0.1)\nrun = functools.partial(subprocess.run, 'true')\n"
    )
    with pytest.raises(ValueError, match=r"optim=imports_of_mine\.RAdam: is torch\.optim.*\n  fix: optim=torch\.optim"):
        signature("imports_of_mine.RAdam", "optim._target_", ["imports_of_mine"])
    with pytest.raises(ValueError, match=r"is a functools\.partial of torch\.optim\.Adam.*\n  fix: torch\.optim\.Adam"):
        locate("imports_of_mine.adam", ["imports_of_mine"])
    with pytest.raises(ValueError, match=r"partial of subprocess\.run.*\n  fix: a class or function of imports_of"):
        locate("imports_of_mine.run", ["imports_of_mine"])


def test_a_file_beside_the_one_that_imports_it_is_no_package_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "beside_pkg"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "net.py").write_text("from beside_layers import Block\n")
    (package / "beside_layers.py").write_text("Block = 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"\n  fix: from beside_pkg\.beside_layers import …, or start in beside_pkg$"):
        locate("beside_pkg.net.Net", ["beside_pkg"])


def test_of_several_files_with_a_class_the_one_with_the_nearest_name_is_meant(tmp_path: Path) -> None:
    for name in ("a_guard", "own_net", "z_net"):
        (tmp_path / f"{name}.py").write_text("class Wave: ...\n")
    with pytest.raises(ValueError, match=r"\n  fix: did you mean model=own_net\.Wave\?$"):
        find("own_nett.Wave", "model")


def test_the_line_of_an_object_is_found_in_a_file_of_any_encoding(tmp_path: Path) -> None:
    text = "# -*- coding: latin-1 -*-\nname = 'Jürgen'\nsizes = [1, 2]\n"
    (tmp_path / "latin_things.py").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"def my_sizes\(\): return \[1, 2\]") as refused:
        locate("latin_things.sizes", ["latin_things"])
    assert 'latin_things.py", line 3' in refused.value.__notes__[0]
