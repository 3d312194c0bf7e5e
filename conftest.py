"""What holds for the tests of all packages."""

import gc
import logging
import sys
from types import SimpleNamespace


def pytest_collection_finish() -> None:
    """Let torch trace its compilations and its seeds for nobody, which takes a quarter of the time.

    pytest listens to each logger that does not propagate, of which torch has sixty, and torch
    writes out every graph for whoever listens to `torch.__trace`. A seed is kept for each kind of
    device that is not there, with the stack of where it was set written out, files and all.
    """
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.startswith("torch."):
            logger.propagate = True
    logging.getLogger("torch.__trace").propagate = True
    for name in ("torch.cuda", "torch.xpu", "torch.mtia"):
        if name in sys.modules:
            sys.modules[name].traceback = SimpleNamespace(format_stack=list)


def pytest_runtest_setup() -> None:
    """Collect what the last test left in cycles, then leave all that is there out of this test's.

    Twice, as what goes at first lets go of more: TorchDynamo's entries for a model held its
    session. Left there, its graphs would stay for the rest of the run, and each trace by torch.fx
    sets attributes of the classes of all of them.

    A test collects garbage four times for each plan, and would look at all that was imported. A
    recorded step of a model that another test left, or that a fixture holds, is dropped here, lest
    an optimizer of this test ends it: to look for the model among all that was left out takes a
    second.
    """
    if gc.collect():
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
