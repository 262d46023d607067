"""A fix that names an option names the settings that are then still missing."""

import pytest

from dtrain.config.needed import needed, with_needed
from dtrain.errors import bad


@pytest.mark.parametrize(
    ("typed", "settings"),
    [
        ([], []),
        (["data=text"], ["data.path"]),
        (["model=net.Net"], ["data.seq_len"]),
        (["model=net.Net", "data=text"], ["data.path", "data.seq_len"]),
        (["model=net.Net", "data=text", "data.path=x", "+model.seq_len=8"], []),
        (["model=net.Net", "data=net.Points"], []),
        (["model=net.Net", "data=net.Points", "hooks=[early_stop]"], []),
    ],
)
def test_what_has_no_value(typed: list[str], settings: list[str]) -> None:
    assert needed(typed) == settings


def test_a_fix_is_completed() -> None:
    error = bad("model", "net.Nett", "net.py has no Nett", "did you mean model=net.Net?")
    assert str(with_needed(error, ["model=net.Nett"])).endswith("\n  fix: model=net.Net data.seq_len=128")
    assert with_needed(error, ["model=net.Nett", "data=net.Points"]) is error
    other = bad("model", "net.Nett", "net.py has no Nett", "define Nett there")
    assert with_needed(other, ["model=net.Nett"]) is other
