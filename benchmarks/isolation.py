"""Work in a process of its own: nothing that ran before it weighs on what it measures."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

__all__ = ["Ended", "run_alone"]

Result = TypeVar("Result")
ENDING_SECONDS = 30.0


class Ended(RuntimeError):
    """The process gave no result: it raised, died, or took too long. The message says which."""


def run_alone(work: Callable[..., Result], *arguments: Any, timeout_seconds: float) -> Result:
    """Run a function of a module in a new process and return its result.

    The function, its arguments and its result are pickled. The process is gone on return.

    Raises:
        Ended: if there is no result.
    """
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sending, work, arguments))
    process.start()
    sending.close()
    try:
        if not receiving.poll(timeout_seconds):
            raise Ended(f"timeout: {timeout_seconds:.0f} s")
        error, result = receiving.recv()
        process.join(ENDING_SECONDS)  # it ends what it started itself
    except EOFError:
        process.join()
        raise Ended(f"crash: exit code {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
    if error is not None:
        raise Ended(error)
    found: Result = result
    return found


def _send(sending: Connection, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    answer: tuple[str | None, Any]
    try:
        answer = (None, work(*arguments))
    except Exception as error:
        answer = (f"{type(error).__name__}: {error}".partition("\n")[0], None)
    sending.send(answer)
