"""What workers are asked to do in tests; importable there, as `solver_cases` is on the path."""

from __future__ import annotations

import os
import time
from pathlib import Path

from remat_graph import Graph, Schedule
from remat_solvers import solve


def square(number: int) -> int:
    return number * number


def fail(number: int) -> int:
    if number % 2:
        raise LookupError(f"{number} is odd")
    return number


class Untransportable(Exception):
    """Made of more than its message."""

    def __init__(self, name, kind):
        super().__init__(f"no {kind} is called {name!r}")


def fail_untransportably(name):
    raise Untransportable(name, "solver")


def die(number: int) -> int:
    if number == 3:
        os._exit(1)
    return number


def leave_trace(folder: str, name: str) -> str:
    """Leave a file at the start and one at the end, which takes a moment; `bad` fails."""
    if name == "bad":
        raise ValueError(name)
    Path(folder, name).touch()
    time.sleep(0.05)
    Path(folder, f"{name}-ended").touch()
    return name


def linger(folder: str, number: int) -> int:
    """Leave a file named after the process, then take long."""
    Path(folder, str(os.getpid())).touch()
    time.sleep(60)
    return number


def plan(graph: Graph, budget_bytes: int) -> Schedule:
    """Schedule by a solver whose answer does not depend on the clock."""
    solution = solve(graph, budget_bytes, solver="xla-greedy")
    assert solution.schedule is not None
    return solution.schedule
