"""Options of the suite. Tests marked gpu or slow are skipped, visibly, without a GPU or without --all."""

from __future__ import annotations

import functools
import logging
import os
import re
from typing import Any

import hypothesis
import pytest

from tests.long_tests import is_long, unknown
from tests.patience import patience

# its limits of 200 ms an example and 1 s for drawing them are for a quiet machine
ANY_MACHINE = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
# `make test` draws the same examples each time, so that a commit fails by its own fault; test-all draws new ones
hypothesis.settings.register_profile("same", ANY_MACHINE, derandomize=True)
hypothesis.settings.register_profile("new", ANY_MACHINE)
os.environ["DTRAIN_STRICT"] = "1"  # a fault of the planner is heard, also in launches that tests start
os.environ["DTRAIN_COMPILE_CACHE"] = "none"  # tests leave nothing in the user's cache folder


@pytest.fixture(autouse=True)
def loggers_speak() -> None:
    """A launch in this process has Hydra switch logging off, for all tests after it."""
    logging.getLogger().setLevel(logging.WARNING)
    log = logging.getLogger("dtrain")
    log.disabled = False
    log.setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def ample_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a launch in this process may plan for does not depend on this machine's memory."""
    monkeypatch.setattr("dtrain.plan.host_memory.machine_bytes", lambda: 2**50)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also what is marked slow, and every pair of strategies")
    parser.addoption("--matrix", metavar="FILE", help="write what they found there to FILE.json and FILE.md")


def pytest_configure(config: pytest.Config) -> None:
    hypothesis.settings.load_profile("new" if config.getoption("--all") else "same")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    selected = any("::" in word for word in config.args)  # on the command line: then a file is not collected whole
    tests = [item.nodeid.removeprefix("tests/") for item in items]
    if not selected and (gone := unknown(tests)):
        raise pytest.UsageError(f"tests/long_tests.py names tests that there are not: {', '.join(gone)}")
    for item, test in zip(items, tests, strict=True):
        if is_long(test):
            item.add_marker(pytest.mark.slow)
    if not config.getoption("--all"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow: make test-all"))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="no CUDA device here"))


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Any:
    """A test's time limit is for a quiet machine, and is longer while this one is busy."""
    import pytest_timeout

    return pytest_timeout.pytest_timeout_set_timer(item, settings._replace(timeout=patience(settings.timeout)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """For `make test WORKERS=2`: a file stays on one worker, with its worlds; all that start SLURM are one file.

    Not by xdist's own groups: xdist 3.8 writes them to where pytest 9.2 no longer looks.
    """
    from xdist.scheduler import LoadScopeScheduling

    if config.getvalue("dist") != "load":  # what -n means; another one was typed
        return None

    @functools.cache
    def starts_slurm(file: str) -> bool:
        text = (config.rootpath / file).read_text()
        return re.search(r"^from tests(\.slurm import | import .*\bslurm\b)", text, re.MULTILINE) is not None

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "slurm" if starts_slurm(file) else file

    return ByFile(config, log)
