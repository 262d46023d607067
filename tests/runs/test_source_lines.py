"""An error about what a user's function returned, or made, shows the line that does it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from dtrain.runs.causes import own_frames
from dtrain.runs.source_lines import at_attribute, at_class, at_return, has_changed, is_users


def one_return(x: int) -> int:
    y = x + 1
    return y  # the only one


def two_returns(x: int) -> int:
    if x:
        return 1
    return 2


def no_return(x: int) -> None:
    print(x)
    print(x + 1)  # the last statement


def one_inside(x: int) -> Callable[[], int]:
    def inside() -> int:
        return x

    class Inside:
        def method(self) -> int:
            return x

    return inside  # of the function itself


async def later(x: int) -> int:
    return x + 3


class Base:
    def __init__(self) -> None:
        self.first = nn.Linear(2, 2)
        self.second: nn.Module = nn.Identity()

    def grow(self) -> None:
        self.first.extra = nn.Linear(3, 3)
        self.late = 1


class Net(Base):
    def __init__(self) -> None:
        super().__init__()
        self.base = Base()


def shown(error: Exception) -> tuple[str, str]:
    """The function and the text of the line that a user sees."""
    frame = own_frames(error)[-1]
    return frame["function"], frame["text"]


@pytest.mark.parametrize(
    ("function", "name", "text"),
    [
        (one_return, "one_return", "return y  # the only one"),
        (two_returns, "two_returns", "def two_returns(x: int) -> int:"),
        (no_return, "no_return", "print(x + 1)  # the last statement"),
        (one_inside, "one_inside", "return inside  # of the function itself"),
        (later, "later", "return x + 3"),
        (Base.grow, "grow", "self.late = 1"),
    ],
)
def test_the_line_of_a_return(function: Any, name: str, text: str) -> None:
    error = ValueError("wrong")
    assert at_return(error, function) is error
    assert shown(error) == (name, text)


@pytest.mark.parametrize("thing", [len, None, nn.Linear.forward, nn.Linear, lambda: 1, 3])
def test_what_is_no_function_of_the_user_has_no_line(thing: Any) -> None:
    assert own_frames(at_return(ValueError("wrong"), thing)) == []


def test_a_class_has_the_line_of_its_definition() -> None:
    assert [frame["text"] for frame in own_frames(at_return(ValueError("wrong"), Base))] == ["class Base:"]


def test_the_line_of_a_class() -> None:
    assert shown(at_class(ValueError("wrong"), Net)) == ("Net", "class Net(Base):")
    assert own_frames(at_class(ValueError("wrong"), nn.Linear)) == []
    assert is_users(Net) and is_users(one_return) and not is_users(nn.Linear) and not is_users(3)


@pytest.mark.parametrize(
    ("path", "function", "text"),
    [
        ("first", "__init__", "self.first = nn.Linear(2, 2)"),  # of the base class
        ("second", "__init__", "self.second: nn.Module = nn.Identity()"),
        ("late", "grow", "self.late = 1"),
        ("base.first", "__init__", "self.first = nn.Linear(2, 2)"),
        ("base.first.weight", "__init__", "self.first = nn.Linear(2, 2)"),  # torch's own line is no help
    ],
)
def test_the_line_that_makes_an_attribute(path: str, function: str, text: str) -> None:
    assert shown(at_attribute(ValueError("wrong"), Net(), path)) == (function, text)
    assert own_frames(at_attribute(ValueError("wrong"), Net(), "nothing")) == []


def test_a_class_that_has_changed_is_named(tmp_path: Path) -> None:
    class Mine: ...

    assert has_changed("pathlib.Path", Path, tmp_path, ["w is new"]) == "", "not the user's"
    said = has_changed("m.Mine", Mine, tmp_path, ["w is new"])
    assert re.fullmatch(
        r"model=m.Mine: the class at .*lines.py:\d+ has changed since .*: w is new; 1 diff.* in all", said
    )
