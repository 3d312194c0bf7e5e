"""What holds for the tests of all packages."""

import gc
import logging


def pytest_collection_finish() -> None:
    """Let torch trace its compilations for nobody, which takes a quarter of a test's time.

    pytest listens to loggers that do not propagate, and torch writes out every graph for whoever
    listens to this one.
    """
    logging.getLogger("torch.__trace").propagate = True


def pytest_runtest_setup() -> None:
    """Collect what the last test left in cycles, then leave all that is there out of this test's.

    A test collects garbage four times for each plan, and would look at all that was imported.
    """
    gc.collect()
    gc.freeze()
