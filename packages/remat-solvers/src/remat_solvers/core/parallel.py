"""Independent sub-problems, run here or by any `concurrent.futures.Executor`.

A task is a name, for messages, and the positional arguments of a function of some module; function,
arguments and results are plain data, as processes and other machines need. Dask takes keywords of
`submit` for itself, so there are none.

Guarantee: results come in the order of the tasks, so they are those of running the tasks one after
another. What the function raises is raised here as it is (of several errors that of the first
task); it travels as a result, so anything else that comes out of a future is the executor's own: a
worker that died is `WorkerDied`. On any error, Ctrl-C too, no task starts any more, and those that
run are waited for. The executor is never shut down here.
Limits: a task that runs cannot be stopped, but for Ctrl-C in a terminal, which reaches processes
too; so each needs a time limit of its own. A second Ctrl-C does not wait for them. Dask calls a
task that runs cancelled, so one there ends by itself. A pool of processes that breaks does not tell
which of the tasks that ran broke it.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    as_completed,
    wait,
)
from dataclasses import dataclass
from typing import Any, TypeVar

from remat_solvers.errors import InvalidProblem, WorkerDied

__all__ = ["run_all"]

_Result = TypeVar("_Result")
_DASK_LOSSES = ("KilledWorker", "CancelledError")  # by name: Dask need not be installed


@dataclass(frozen=True, slots=True)
class _Raised:
    """What a function raised in a worker."""

    error: Exception


def run_all(
    executor: Executor | None,
    function: Callable[..., _Result],
    tasks: Sequence[tuple[str, tuple[Any, ...]]],
) -> list[_Result]:
    """Call the function with the arguments of every task; results in the order of the tasks.

    Raises:
        WorkerDied: if the executor lost a task.
        InvalidProblem: if the executor does not take tasks, or a task cannot be sent to it.
        Exception: whatever the function raises.
    """
    if executor is None:
        return [function(*arguments) for _, arguments in tasks]
    futures: list[Future[_Result | _Raised]] = []
    try:
        _submit_all(executor, function, tasks, futures)
        withdrawn = _wait(futures)
    except BaseException:
        _stop(futures)
        raise
    ended = [
        (name, future)
        for (name, _), future in zip(tasks, futures, strict=False)
        if future not in withdrawn
    ]
    results = _read(executor, ended)
    if len(results) < len(tasks):
        raise WorkerDied([name for name, _ in tasks[len(results) :]], "the executor broke")
    return results


def _call(function: Callable[..., _Result], *arguments: Any) -> _Result | _Raised:
    """Run in a worker: hand back what the function raises, in a form that can be sent."""
    try:
        return function(*arguments)
    except Exception as error:
        error.add_note(f"In the worker:\n{traceback.format_exc()}")
        return _Raised(error if _travels(error) else _described(error))


def _travels(error: Exception) -> bool:
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)
    except Exception:
        return False


def _described(error: Exception) -> Exception:
    replacement = RuntimeError(f"{type(error).__name__}: {error}")
    for note in error.__notes__:
        replacement.add_note(note)
    return replacement


def _submit_all(
    executor: Executor,
    function: Callable[..., _Result],
    tasks: Sequence[tuple[str, tuple[Any, ...]]],
    futures: list[Future[_Result | _Raised]],
) -> None:
    """Submit as many at once as there are workers, where that is known, until one fails.

    A pool of processes starts one more than it has workers, which could not be withdrawn.
    """
    workers = getattr(executor, "_max_workers", None)
    most = workers if isinstance(workers, int) else len(tasks)
    running: set[Future[_Result | _Raised]] = set()
    for name, arguments in tasks:
        while len(running) >= most:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            if any(map(_failed, done)):
                return
        try:
            future = executor.submit(_call, function, *arguments)
        except BrokenExecutor as error:
            if running:
                return  # one of them broke it, as its future will say
            raise WorkerDied((name,), f"{type(error).__name__}: {error}") from error
        except Exception as error:
            raise InvalidProblem(
                f"the executor {type(executor).__name__} did not take {name!r} "
                f"({type(error).__name__}: {error}); give one that is not shut down, or None"
            ) from error
        futures.append(future)
        running.add(future)


def _wait(futures: Sequence[Future[Any]]) -> set[Future[Any]]:
    """Wait for all, or until one fails; then stop the others, and return those withdrawn."""
    for future in as_completed(futures):
        if _failed(future):
            return _stop(futures)
    return set()


def _failed(future: Future[Any]) -> bool:
    if future.cancelled() or future.exception() is not None:
        return True
    return isinstance(future.result(), _Raised)


def _stop(futures: Sequence[Future[Any]]) -> set[Future[Any]]:
    """Cancel what has not started, and wait for what runs, which no one can stop."""
    # The last first: a worker that becomes free meanwhile would start the next.
    withdrawn = {future for future in reversed(futures) if not future.done() and future.cancel()}
    wait(set(futures) - withdrawn)
    return withdrawn


def _read(
    executor: Executor, ended: Sequence[tuple[str, Future[_Result | _Raised]]]
) -> list[_Result]:
    """Take the results, or raise what happened to the first task that has none."""
    results: list[_Result] = []
    for name, future in ended:
        cause = _cause(future)
        if cause is None:
            outcome = future.result()
            if isinstance(outcome, _Raised):
                raise outcome.error
            results.append(outcome)
        elif _is_loss(cause):
            lost = [each for each, other in ended if _is_loss(_cause(other))]
            raise WorkerDied(lost, f"{type(cause).__name__}: {cause}") from cause
        elif isinstance(cause, Exception):
            raise InvalidProblem(
                f"the executor {type(executor).__name__} could not run {name!r} "
                f"({type(cause).__name__}: {cause}); what goes to it must be plain data"
            ) from cause
        else:
            raise cause
    return results


def _cause(future: Future[Any]) -> BaseException | None:
    """Return what kept a future from its result: none of it is the function's own."""
    if future.cancelled():
        return CancelledError("cancelled by the executor")
    return future.exception()


def _is_loss(cause: BaseException | None) -> bool:
    if isinstance(cause, BrokenExecutor | CancelledError):
        return True
    return any(base.__name__ in _DASK_LOSSES for base in type(cause).__mro__)
