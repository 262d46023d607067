"""Quoted values, as Hydra reads them."""

from __future__ import annotations

from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.launch.quoting import quote


@settings(max_examples=60)
@given(st.text(st.characters(exclude_categories=("Cc", "Cs")), min_size=1, max_size=20))
def test_any_path_survives_hydras_grammar(text: str) -> None:
    path = Path(text)
    [override] = OverridesParser.create().parse_overrides([f"run_dir={quote(path)}"])
    assert override.value() == str(path) or "${" in text
