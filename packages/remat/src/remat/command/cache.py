"""`remat cache`: what is kept between processes, and where."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

import typer
from rich.table import Table

from remat.command.main import app
from remat.command.terminal import JsonOption, out, print_json
from remat.errors import RematError

if TYPE_CHECKING:
    from remat.cache import Store

__all__ = ["clear", "list_entries", "path"]

cache = typer.Typer(no_args_is_help=True, help="List or remove what is kept between processes.")
app.add_typer(cache, name="cache")


@cache.command()
def path(json: JsonOption = False) -> None:
    """Print the folder of the cache."""
    folder = str(_store().folder)
    if json:
        print_json({"path": folder})
    else:
        typer.echo(folder)


@cache.command("list")
def list_entries(json: JsonOption = False) -> None:
    """List the entries, the one used last first."""
    entries = _store().entries()
    if json:
        print_json(
            [
                {
                    "kind": entry.kind,
                    "path": str(entry.path),
                    "size_bytes": entry.size_bytes,
                    "used": entry.modified,
                }
                for entry in entries
            ]
        )
        return
    if not entries:
        out.print(f"nothing is kept in {_store().folder}", markup=False, soft_wrap=True)
        return
    table = Table("kind", "bytes", "last used", "file")
    for entry in entries:
        used = datetime.fromtimestamp(entry.modified).isoformat(" ", "minutes")
        name = str(entry.path.relative_to(_store().folder))
        table.add_row(entry.kind, f"{entry.size_bytes:,}", used, name)
    out.print(table)


@cache.command()
def clear(json: JsonOption = False) -> None:
    """Remove all entries."""
    removed = _store().clear()
    size = sum(entry.size_bytes for entry in removed)
    if json:
        print_json({"entries": len(removed), "size_bytes": size})
    else:
        out.print(f"removed {len(removed):,} entries, {size:,} bytes")


def _store() -> Store:
    from remat.cache import Store

    store = Store.here()
    if store is None:
        raise RematError("REMAT_CACHE switches the cache off")
    return store
