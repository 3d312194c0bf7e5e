"""Functions in the place of kernels of torch, while this thread traces."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch._C import DispatchKey

__all__ = ["overridden"]


@contextlib.contextmanager
def overridden(
    operator: Any, function: Callable[..., Any], *keys: DispatchKey, if_there: bool = False
) -> Iterator[None]:
    """Let calls of this thread by these keys come to a function; `if_there`, where Python has one.

    They do where the dispatcher asks Python, as while torch traces.
    """
    thread = threading.get_ident()
    kernels = operator.py_kernels
    before = {key: kernels.get(key) for key in keys if not if_there or key in kernels}

    def chosen(theirs: Callable[..., Any]) -> Callable[..., Any]:
        def choose(*args: Any, **kwargs: Any) -> Any:
            own = threading.get_ident() == thread
            return (function if own else theirs)(*args, **kwargs)

        return choose

    for key, theirs in before.items():
        kernels[key] = chosen(theirs or functools.partial(operator._op_dk, key))
    operator._dispatch_cache.clear()
    try:
        yield
    finally:
        for key, theirs in before.items():
            kernels.pop(key)
            if theirs is not None:
                kernels[key] = theirs
        operator._dispatch_cache.clear()
