"""Options of the suite, and tests that need a GPU: they say so with a mark, and are skipped, visibly, without one."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="every pair of strategies in tests/parity/test_exchange.py")
    parser.addoption("--matrix", metavar="FILE", help="write what they found there to FILE.json and FILE.md")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="no CUDA device here"))
