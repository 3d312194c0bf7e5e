"""The command line itself, and how it ends."""

from __future__ import annotations

from typing import Annotated

import typer

from remat.__about__ import __version__
from remat.command.terminal import err, out
from remat.errors import RematError
from remat_solvers import BudgetTooSmall

__all__ = ["NOTHING_FITS", "app", "main"]

NOTHING_FITS = 3
_WRONG, _INTERRUPTED = 1, 130

app = typer.Typer(
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
    """Run the command; errors are told on stderr and by the exit code."""
    try:
        app()
    except BudgetTooSmall as error:
        _end(error, NOTHING_FITS)
    except (RematError, OSError) as error:
        _end(error, _WRONG)
    except KeyboardInterrupt:
        _end("stopped before anything was found", _INTERRUPTED)


def _end(reason: object, code: int) -> None:
    err.print(f"remat: {reason}", style="red", highlight=False, markup=False)
    raise SystemExit(code) from None
