"""What is printed: tables or JSON on stdout, progress on stderr once something takes a while."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.progress import Progress as Bar
from rich.progress import ProgressColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from remat.errors import RematError
from remat.planning.kernels import Kernels
from remat_graph import Numerics

if TYPE_CHECKING:
    from remat_solvers import Progress

__all__ = [
    "AS_JSON",
    "BudgetOption",
    "JsonOption",
    "KernelsOption",
    "LeavingOption",
    "LimitOption",
    "NumericsOption",
    "OutputsOption",
    "SolverOption",
    "check_output",
    "err",
    "out",
    "print_figures",
    "print_json",
    "print_rows",
    "waiting",
]

out = Console()
err = Console(stderr=True)

AS_JSON = "--json"

BudgetOption = Annotated[
    str,
    typer.Option(help="Bytes with a unit ('8GiB'), or a share of storing everything ('50%')."),
]
SolverOption = Annotated[
    str, typer.Option(help="A name from `remat solvers`, also as 'checkmate(gap=0.01)'.")
]
NumericsOption = Annotated[
    Numerics | None,
    typer.Option(
        help="Choose among other ways to make a value, too: of the same bits, rounded otherwise "
        "(also in slices), or of less precision."
    ),
]
KernelsOption = Annotated[
    Kernels,
    typer.Option(
        help="What operators run by: eager kernels, or groups of them compiled by TorchInductor."
    ),
]
OutputsOption = Annotated[
    str | None,
    typer.Option(
        help="What is read of the output, by names or positions with commas ('loss'): the rest is "
        "not made."
    ),
]
LeavingOption = Annotated[
    bool,
    typer.Option(
        "--optimizer-in-backward",
        help="Gradients leave at once: hooks step an optimizer in the backward and drop them.",
    ),
]
LimitOption = Annotated[
    float | None, typer.Option(min=0, help="Stop the search after so many seconds.")
]
JsonOption = Annotated[bool, typer.Option(AS_JSON, help="Print JSON instead of a table.")]

_STDOUT, _STDERR = 1, 2
_QUIET_SECONDS = 2.0
_WIDEST = 1000  # columns


def print_json(document: Any) -> None:
    """Print a document as JSON."""
    typer.echo(json.dumps(document, indent=2))


def print_rows(rows: Mapping[str, object]) -> None:
    """Print pairs as a table."""
    table = Table(show_header=False)
    for name, text in rows.items():
        for line in text if isinstance(text, Sequence) and not isinstance(text, str) else [text]:
            table.add_row(Text(name), Text(str(line)))
    out.print(table)


def print_figures(table: Table) -> None:
    """Print a table of figures: where the terminal is too narrow it wraps lines, and cuts none."""
    wide = Measurement.get(out, out.options.update(max_width=_WIDEST), table).maximum
    Console(width=wide).print(table)


def check_output(*paths: Path | None) -> None:
    """Refuse, before any work, what could not be written.

    Raises:
        OSError: if its folder does not exist or cannot be written to, or it is a folder.
        RematError: if two are the same.
    """
    wanted = [path for path in paths if path is not None]
    for path in wanted:
        if not path.parent.is_dir():
            raise FileNotFoundError(f"the folder of {str(path)!r} does not exist")
        if path.is_dir():
            raise IsADirectoryError(f"{str(path)!r} is a folder; name a file")
        is_special = path.exists() and not path.is_file()
        if not is_special and not os.access(os.path.realpath(path.parent), os.W_OK):
            raise PermissionError(f"nothing can be written into the folder of {str(path)!r}")
    if len({*wanted}) < len(wanted):
        raise RematError(f"{str(wanted[0])!r} is named for two things to write")


class Left(ProgressColumn):
    """The time left of a limit, which begins when the search does."""

    def __init__(self, limit_seconds: float | None) -> None:
        super().__init__(Column(no_wrap=True))
        self._limit = limit_seconds
        self._end: float | None = None

    def searching(self, seconds: float) -> None:
        """Note that a search has been going on for so long, if none was known of."""
        if self._limit is not None and self._end is None:
            self._end = time.monotonic() + self._limit - seconds

    def render(self, task: Task | None) -> Text:
        """Say it, once there is a search."""
        if self._end is None:
            return Text("")
        left = max(0.0, self._end - time.monotonic())
        return Text(f"{left:.0f} s left; Ctrl-C keeps the best")


@contextmanager
def _to_stderr() -> Iterator[None]:
    """Let what is written to stdout come out on stderr, from whatever language."""
    sys.stdout.flush()
    before = os.dup(_STDOUT)
    os.dup2(_STDERR, _STDOUT)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(before, _STDOUT)
        os.close(before)


@contextmanager
def waiting(
    what: str, limit_seconds: float | None, describe_time: Callable[[float], str] | None = None
) -> Iterator[Callable[[Progress], None]]:
    """Show, after two seconds, what is going on; give what takes a solver's progress.

    What a model prints meanwhile, or a process that it starts, goes to stderr: on stdout it would
    stand amid JSON. `describe_time` says the time of the best schedule so far in words.
    """
    left = Left(limit_seconds)
    doing = TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True))
    columns = SpinnerColumn(), doing, TimeElapsedColumn(Column(no_wrap=True)), left
    bar = Bar(*columns, console=err, transient=True, disable=not err.is_terminal, expand=True)
    task = bar.add_task(what)
    timer = threading.Timer(_QUIET_SECONDS, bar.start)
    timer.daemon = True

    def report(progress: Progress) -> None:
        left.searching(progress.seconds)
        best = progress.incumbent_time
        best_time = "" if best is None or describe_time is None else f"{describe_time(best)}; "
        bar.update(task, description=f"{what}: {best_time}{progress.message}".replace("[", "\\["))

    timer.start()
    try:
        with _to_stderr():
            yield report
    finally:
        timer.cancel()
        timer.join()
        bar.stop()
