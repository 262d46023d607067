"""Formats: numbers, times and paths as people read and type them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.ui import console
from dtrain.util.format import duration, kind_of, number, resume_argument, si, step_time, three_digits


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (124_439_808, "124.4M"),
        (1_557_611_200, "1.56B"),
        (512, "512"),
        (0, "0"),
        (1000, "1K"),
        (65536, "65.5K"),
        (999_960, "1M"),
        (0.25, "0.25"),
        (-2500, "-2.5K"),
        (3e12, "3T"),
        (None, "-"),
        (float("nan"), "nan"),
        ("x", "-"),
    ],
)
def test_si(value: object, expected: str) -> None:
    assert si(value) == expected


@given(st.floats(1, 9e14))
def test_si_keeps_the_value_and_is_short(n: float) -> None:
    shown = si(n)
    scale = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(shown[-1], 1)
    assert abs(float(shown.rstrip("KMBT")) * scale - n) <= 0.006 * n
    assert len(shown) <= 6


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, "0.0s"),
        (4.21, "4.2s"),
        (9.97, "10s"),
        (59.4, "59s"),
        (59.7, "1m 00s"),
        (83, "1m 23s"),
        (7500, "2h 05m"),
        (3599.6, "1h 00m"),
        (273_600, "3d 04h"),
        (None, "-"),
        (-1, "-"),
        (float("inf"), "-"),
    ],
)
def test_duration(value: object, expected: str) -> None:
    assert duration(value) == expected


@given(st.floats(0, 1e7))
def test_duration_names_the_time(seconds: float) -> None:
    units = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    parts = [(float(n), u) for n, u in re.findall(r"([\d.]+)([smhd])", duration(seconds))]
    shown = sum(n * units[u] for n, u in parts)
    assert abs(shown - seconds) <= units[parts[-1][1]]
    assert all(n < {"s": 60, "m": 60, "h": 24}.get(u, 1e9) for n, u in parts)  # never 1m 60s


def test_an_integer_that_no_float_holds_is_no_number() -> None:
    assert number(10**400) is None


def test_small_formats() -> None:
    assert console.loss_text(3.21014) == "3.2101"
    assert console.loss_text(1.5e-7) == "1.500e-07"
    assert console.loss_text(float("nan")) == "nan"
    assert console.percent(0.4123) == "41.2%"
    assert console.gib(3.214) == "3.21 GiB" and console.gib(139.6) == "139.6 GiB"
    assert console.perplexity(7.389) == "7.39" and console.perplexity(1e12) == "-"
    assert console.clean("\x1b[31mred\x1b[0m\r\x07 a\n\tb\x1b]0;title\x07!") == "red a\n\tb!"


NAMES = st.text(st.characters(codec="utf-8", exclude_characters="/\0", exclude_categories=("Cc", "Cs")), min_size=1)


@given(NAMES.filter(lambda name: name not in (".", "..") and "${" not in name))
def test_resume_argument_survives_the_shell_and_hydra(name: str) -> None:
    parser = pytest.importorskip("hydra.core.override_parser.overrides_parser").OverridesParser.create()
    [word] = shlex.split(resume_argument(Path("multirun") / name))
    override = parser.parse_override(word)
    assert override.key_or_group == "resume"
    assert not override.is_sweep_override()
    assert override.value() == f"multirun/{name}"


def test_paths_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert console.shell_path(tmp_path / "outputs" / "a") == "outputs/a"
    assert console.shell_path(tmp_path / "a b") == "'a b'"
    assert console.shell_path(tmp_path / "-x") == "./-x"
    assert console.shell_path(tmp_path.parent / "other") == str(tmp_path.parent / "other")
    assert resume_argument(tmp_path / "outputs/12-00-00-a") == "resume=outputs/12-00-00-a"
    assert resume_argument(tmp_path / "12") == "resume=./12"  # else Hydra reads a number
    assert resume_argument(tmp_path / "m/0-lr=1,a=2") == "'resume=\"m/0-lr=1,a=2\"'"


@pytest.mark.parametrize(
    ("value", "expected"), [(0.01234, "0.0123"), (4.567, "4.57"), (999.6, "1,000"), (4190.4, "4,190")]
)
def test_large_figures_of_three_digits_are_written_out(value, expected):
    assert three_digits(value) == expected
    assert three_digits(-value) == f"-{expected}"


def test_a_step_just_below_a_second_is_a_number_of_milliseconds():
    assert step_time(0.9996) == "1,000 ms"


def test_the_article_of_a_type() -> None:
    assert kind_of(3) == "an int" and kind_of([]) == "a list"
