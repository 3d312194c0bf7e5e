"""What holds for the tests of all packages."""

import gc
import logging
import sys
from pathlib import Path

import pytest

_held: set[Path] = set()
_WITHOUT_TENSORS = {
    "_pytest", "hypothesis", "iniconfig", "msgspec", "networkx", "platformdirs", "pluggy",
    "pygments", "pytest", "sortedcontainers",
}  # fmt: skip


def pytest_collection_finish() -> None:
    """Let torch trace its compilations for nobody, which takes a quarter of a test's time.

    pytest listens to loggers that do not propagate, and torch writes out every graph for whoever
    listens to this one. A capture looks for caches of tensors in all that the code of a model
    imports, which are tools of tests where a test defines the model.
    """
    logging.getLogger("torch.__trace").propagate = True
    if caches := sys.modules.get("remat_graph.torch.tracing.caches"):
        caches._NOT_THEIRS |= _WITHOUT_TENSORS


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Collect what the last test left in cycles, then leave all that is there out of this test's.

    A test collects garbage four times for each plan, and would look at all that was imported. A
    recorded step of a model that another test compiled by `torch.compile`, and left, ends here;
    one of a model that a fixture of the file holds is looked for once, which takes half a second.
    """
    gc.collect()
    if not _is_recorded():
        _held.clear()
    elif item.path not in _held:
        gc.unfreeze()
        sys.modules["torch._dynamo"].reset()
        gc.collect()
        _held.update({item.path} if _is_recorded() else ())
    gc.freeze()


def _is_recorded() -> bool:
    """Whether torch's profiler is on, where a test may have used it."""
    if "torch" not in sys.modules or "torch._dynamo" not in sys.modules:
        return False
    return bool(sys.modules["torch"]._C._autograd._profiler_enabled())
