"""The picture of a lineage: complete, and safe whatever the file says."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.report.lineage import lineage_svg

EVIL = "</title></svg><script>alert(1)</script>"
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def events() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for steps in (10, 20):
        for trial in (0, 1):
            found.append({"event": "train", "trial": trial, "steps": steps, "run": "r", "values": {"lr": 0.1}})
            found.append({"event": "result", "trial": trial, "steps": steps, "value": 1.5 + trial})
        if steps == 10:
            found.append({"event": "exploit", "trial": 1, "donor": 0, "steps": 10, "values": {"lr": 0.12}})
    return found


def parsed(svg: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(svg).iter()) if svg else []


def count(svg: str, tag: str) -> int:
    return sum(element.tag.endswith("}" + tag) for element in parsed(svg))


def test_one_line_for_each_training_and_one_arrow_for_each_copy() -> None:
    svg = lineage_svg(events())
    assert (count(svg, "line"), count(svg, "polygon"), count(svg, "title")) == (4, 1, 5)
    assert "step 10: member 1 copies member 0, then lr=0.12" in svg and "2.5" in svg
    strokes = [e.get("stroke") for e in parsed(svg) if e.tag.endswith("}line")]
    assert strokes[0] == strokes[2] == strokes[3] != strokes[1], "after the copy, member 1 has the colour of member 0"


def test_without_a_copy_there_is_no_picture() -> None:
    assert lineage_svg([]) == lineage_svg([e for e in events() if e["event"] != "exploit"]) == ""


def test_a_donor_that_nobody_knows_is_left_out() -> None:
    assert count(lineage_svg([*events(), events()[4] | {"donor": 7}]), "polygon") == 1


def test_trainings_without_steps_are_left_out() -> None:
    assert lineage_svg([e | {"steps": 0} for e in events()]) == ""


def test_text_stays_text() -> None:
    found = events()
    found[0]["values"] = {EVIL: EVIL, "a\x00b": "\x1b[31m"}
    svg = lineage_svg(found)
    assert "<script" not in svg and count(svg, "line") == 4


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_values_of_any_type_are_no_error(data: st.DataObject) -> None:
    found = events()
    for event in found:
        event.update(data.draw(st.dictionaries(st.sampled_from([*event, "donor"]), JSON, max_size=2)))
        event["event"] = str(event["event"])  # what read_journal returns has one
    parsed(lineage_svg(found))
