"""The command line itself, and how it ends."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from remat.__about__ import __version__
from remat.command.terminal import AS_JSON, err, out, print_json
from remat.errors import RematError

__all__ = ["INTERRUPTED", "NOTHING_FITS", "app", "main", "noticing_ctrl_c"]

NOTHING_FITS = 3
INTERRUPTED = 130
_WRONG = 1
_STOPPED = {"error": "KeyboardInterrupt", "message": "stopped before there was a schedule"}

_ORDER = (
    "plan", "explain", "report", "trace", "tradeoff", "largest-batch", "compare", "solve", "check",
    "solvers", "doctor", "cache",
)  # fmt: skip


class _InOrder(TyperGroup):
    """Lists what is used first first."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=_ORDER.index)


app = typer.Typer(
    cls=_InOrder,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    help="Plan the re-materialization of PyTorch models, and of saved training graphs.",
    epilog="Exit codes: 1 wrong input, 2 wrong command line, 3 nothing fits, 130 Ctrl-C.",
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        out.print(f"remat {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command; errors go to stderr and into the exit code, Ctrl-C by 130 alone.

    With `--json` each is a document on stdout, too.
    """
    for stream in (
        sys.stdout,
        sys.stderr,
    ):  # what a terminal has no letter for is written by number
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    with noticing_ctrl_c() as pressed:
        try:
            app()
        except SystemExit as end:
            _tell_of_end(end)
            raise
        except (RematError, OSError) as error:
            if not pressed():  # else its reason: compiled modules make an ImportError of Ctrl-C
                message, code = _message_and_code(error)
                _tell(_document(error, message))
                for text in (message, *getattr(error, "__notes__", ())):
                    err.print(text, style="red", highlight=False, markup=False, soft_wrap=True)
                raise SystemExit(code) from None
            _tell(_STOPPED)
            raise SystemExit(INTERRUPTED) from None


@contextmanager
def noticing_ctrl_c() -> Iterator[Callable[[], bool]]:
    """Give what says whether Ctrl-C was pressed, also where its `KeyboardInterrupt` was caught."""
    pressed = False

    def stop(signal_number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        (before if callable(before) else signal.default_int_handler)(signal_number, frame)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _tell_of_end(end: SystemExit) -> None:
    """Write as a document why typer ended: a wrong command line, or Ctrl-C."""
    cause: BaseException | None = end
    while cause is not None:
        if isinstance(cause, KeyboardInterrupt):
            return _tell(_STOPPED)
        if hasattr(cause, "format_message"):  # as errors of the command line have it
            message = " ".join(cause.format_message().split())
            return _tell({"error": type(cause).__name__, "message": message})
        cause = cause.__context__
    return None


def _tell(document: dict[str, Any]) -> None:
    if AS_JSON in sys.argv:
        print_json(document)


def _message_and_code(error: RematError | OSError) -> tuple[str, int]:
    """Give an error in one line, and its exit code."""
    if isinstance(error, OSError):
        has_name = error.filename is not None and error.strerror is not None
        return f"remat: {f'{error.filename}: {error.strerror}' if has_name else error}", _WRONG
    from remat_solvers import BudgetTooSmall

    return f"remat: {error}", NOTHING_FITS if isinstance(error, BudgetTooSmall) else _WRONG


def _document(error: RematError | OSError, message: str) -> dict[str, Any]:
    """Give an error for other programs: its class, its message, and the figures that it has."""
    figures = {name: value for name, value in vars(error).items() if isinstance(value, int | str)}
    return {"error": type(error).__name__, "message": message.removeprefix("remat: "), **figures}
