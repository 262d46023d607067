"""Options of the suite. Tests marked gpu or slow are skipped, visibly, without a GPU or without --all."""

from __future__ import annotations

import logging
import os
import sys

import pytest

os.environ["DTRAIN_STRICT"] = "1"  # a fault of the planner is heard, also in launches that tests start


@pytest.fixture(autouse=True)
def loggers_speak() -> None:
    """A launch in this process has Hydra switch logging off, for all tests after it."""
    logging.getLogger().setLevel(logging.WARNING)
    log = logging.getLogger("dtrain")
    log.disabled = False
    log.setLevel(logging.NOTSET)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also what is marked slow, and every pair of strategies")
    parser.addoption("--matrix", metavar="FILE", help="write what they found there to FILE.json and FILE.md")


@pytest.hookimpl(tryfirst=True)  # before xdist looks at the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow: make test-all"))
    keep_together(items)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="no CUDA device here"))


def keep_together(items: list[pytest.Item]) -> None:
    """For the workers of `make test`: a file stays on one, with its worlds; all that start SLURM on the same one."""
    for item in items:
        module = item.getparent(pytest.Module)
        uses_slurm = module is not None and getattr(module.obj, "slurm", None) is sys.modules.get("tests.slurm", item)
        item.add_marker(pytest.mark.xdist_group("slurm" if uses_slurm else str(item.path)))
