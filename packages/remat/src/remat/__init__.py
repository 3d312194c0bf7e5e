"""Train PyTorch models in less memory: a budget in bytes, the same gradients, a certified plan.

Names are those of `remat.front.api`, which is imported when one is first asked for: torch takes
seconds, and half of the commands need none.
"""

import functools
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from remat.__about__ import __version__ as __version__

if TYPE_CHECKING:
    from remat.front.api import *  # noqa: F403
    from remat.front.api import __all__ as __all__


def __getattr__(name: str) -> Any:
    api = _api()
    if name != "__all__" and name not in api.__all__:
        raise AttributeError(f"module 'remat' has no attribute {name!r}")
    return getattr(api, name)


def __dir__() -> list[str]:
    return list(_api().__all__)


@functools.cache
def _api() -> ModuleType:
    """Import it whole: parts of torch cannot be imported again once Ctrl-C has stopped them."""
    from remat_graph.plugins import interrupts_deferred  # noqa: PLC0415 - as late as all else

    with interrupts_deferred():
        return import_module("remat.front.api")
