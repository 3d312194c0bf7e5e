"""What holds for the tests of all packages."""

import gc
import logging
from collections.abc import Iterator

import pytest


def pytest_collection_finish() -> None:
    """Let torch trace its compilations for nobody, which takes a quarter of a test's time.

    pytest listens to loggers that do not propagate, and torch writes out every graph for whoever
    listens to this one.
    """
    logging.getLogger("torch.__trace").propagate = True


def pytest_runtest_setup() -> None:
    """Leave what is there already out of the test's garbage collections, four for each plan.

    They look at all that was imported otherwise, which takes most of their time.
    """
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _collected_after_each_module() -> Iterator[None]:
    """Drop what the tests of a module left in cycles."""
    yield
    gc.unfreeze()
    gc.collect()
