"""Ranges of ranks and nodes, as they are typed."""

from __future__ import annotations

import pytest

from dtrain.config.elastic import Range, parse, range_of, sized


def test_a_range_is_read_and_one_of_its_numbers_put_in_its_place() -> None:
    config = {"cluster": {"nodes": 1, "processes": "2:4"}, "name": "x"}
    found = range_of(config)
    assert found == Range("processes", 2, 4) and (found.unit, str(found)) == ("rank", "cluster.processes=2:4")
    assert sized(config, 3) == {"cluster": {"nodes": 1, "processes": 3}, "name": "x"}
    assert config["cluster"] == {"nodes": 1, "processes": "2:4"}, "the original stays"
    fixed = {"cluster": {"nodes": 2, "processes": None}}
    assert range_of(fixed) is None and sized(fixed, 3) == fixed


@pytest.mark.parametrize("text", ["4:2", "2:2", "0:2", "2", "2:", ":", "a:b", "2:3:4", "-1:2", "2:4 ", "1:2000", "²:³"])
def test_other_texts_are_refused_with_an_example_that_works(text: str) -> None:
    with pytest.raises(ValueError, match=r"cluster\.processes=") as refused:
        parse("processes", text)
    example = str(refused.value).rpartition("cluster.processes=")[2]
    assert parse("processes", example).low >= 1


def test_only_one_setting_may_be_a_range() -> None:
    with pytest.raises(ValueError, match=r"only one of cluster\.processes and cluster\.nodes"):
        range_of({"cluster": {"nodes": "1:2", "processes": "2:4"}})
