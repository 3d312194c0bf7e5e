"""What holds for the tests of all packages."""

import gc
import logging
import sys


def pytest_collection_finish() -> None:
    """Let torch trace its compilations for nobody, which takes a quarter of a test's time.

    pytest listens to loggers that do not propagate, and torch writes out every graph for whoever
    listens to this one.
    """
    logging.getLogger("torch.__trace").propagate = True


def pytest_runtest_setup() -> None:
    """Collect what the last test left in cycles, then leave all that is there out of this test's.

    A test collects garbage four times for each plan, and would look at all that was imported. A
    recorded step of a model that another test left, or that a fixture holds, is dropped here, lest
    an optimizer of this test ends it: to look for the model among all that was left out takes a
    second.
    """
    gc.collect()
    if _is_recorded():
        sys.modules["torch._dynamo"].reset()
        recordings = sys.modules["remat.session.recording"].StepRecording
        for listener in list(sys.modules["remat.session.optimizers"]._listeners):
            if isinstance(listener, recordings):
                listener.stop()
        gc.collect()
    gc.freeze()


def _is_recorded() -> bool:
    """Whether torch's profiler is on, where a test may have used it."""
    if not {"torch._dynamo", "remat.session.recording"} <= sys.modules.keys():
        return False
    return bool(sys.modules["torch"]._C._autograd._profiler_enabled())
