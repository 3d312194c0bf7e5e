"""The folder of the cache: entries are JSON, written atomically, and say what they are."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import platformdirs

from remat_graph import write_atomically

__all__ = ["DAMAGE", "Entry", "Store"]

logger = logging.getLogger(__name__)

Body = TypeVar("Body")

DAMAGE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError)
_VERSION = 1
_MOST_BYTES = 200 * 10**6
_FLAT = ("costs", "peaks", "smallest")
_OFF = ("", "0", "off", "no", "false")


class _Envelope(msgspec.Struct, forbid_unknown_fields=True):
    kind: str
    version: int
    key: dict[str, str]
    body: msgspec.Raw


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of the cache; `modified` is when it was last used, in seconds since the epoch."""

    path: Path
    size_bytes: int
    modified: float

    @property
    def kind(self) -> str:
        """What it holds: `costs`, `peaks`, `smallest` or `solutions`."""
        folder = self.path.parent
        return folder.name if folder.name in _FLAT else folder.parent.name


@dataclass(frozen=True, slots=True)
class Store:
    """The entries in a folder, which need not exist."""

    folder: Path

    @classmethod
    def here(cls) -> Store | None:
        """Give the store that the environment names, `None` if it is switched off."""
        named = os.environ.get("REMAT_CACHE")
        if named is not None and named.strip().lower() in _OFF:
            return None
        root = Path(named or platformdirs.user_cache_path("remat", False))
        with contextlib.suppress(RuntimeError):  # "~someone", whom nobody knows
            root = root.expanduser()
        return cls(root / f"v{_VERSION}")

    def read(self, path: Path, key: Mapping[str, str], body: type[Body]) -> Body | None:
        """Read an entry; `None`, and a warning that names it, if it is damaged or another's."""
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self.refuse(path, error)
            return None
        try:
            envelope = msgspec.json.decode(data, type=_Envelope)
            if (envelope.kind, envelope.version) != ("remat cache", _VERSION):
                raise ValueError("it is no entry of this version")
            if envelope.key != dict(key):
                raise ValueError("it is of another key")
            return msgspec.json.decode(bytes(envelope.body), type=body)
        except DAMAGE as error:
            self.refuse(path, error)
            return None

    def refuse(self, path: Path, reason: object) -> None:
        """Warn of an entry that is left out."""
        logger.warning(
            "the cache entry %s is left out: %s; `remat cache clear` removes it", path, reason
        )

    def write(self, path: Path, key: Mapping[str, str], body: Any) -> None:
        """Write an entry, and drop the ones unused for longest where all are too large.

        A folder that cannot be written is warned of, and the entry is not kept.
        """
        dumped = msgspec.Raw(msgspec.json.encode(body))
        envelope = _Envelope("remat cache", _VERSION, dict(key), dumped)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, msgspec.json.encode(envelope) + b"\n")
        except OSError as error:
            logger.warning("nothing is cached: %s; REMAT_CACHE names another folder", error)
            return
        self._drop_oldest()

    def used(self, path: Path) -> None:
        """Note that an entry was of use."""
        with contextlib.suppress(OSError):
            os.utime(path)

    def entries(self) -> list[Entry]:
        """List the entries, the one used last first."""
        return sorted(self._list_entries(), key=lambda entry: -entry.modified)

    def clear(self) -> list[Entry]:
        """Remove all entries, and nothing else that may be in the folder."""
        entries = self.entries()
        for entry in entries:
            entry.path.unlink(missing_ok=True)
        for folder in sorted(self.folder.glob("**"), reverse=True):
            with contextlib.suppress(OSError):  # something else is in it
                folder.rmdir()
        return entries

    def _list_entries(self) -> Iterator[Entry]:
        for pattern in (*(f"{kind}/*.json" for kind in _FLAT), "solutions/*/*.json"):
            for path in self.folder.glob(pattern):
                with contextlib.suppress(OSError):
                    status = path.stat()
                    yield Entry(path, status.st_size, status.st_mtime)

    def _drop_oldest(self) -> None:
        kept = 0
        for entry in self.entries():
            kept += entry.size_bytes
            if kept > _MOST_BYTES:
                with contextlib.suppress(OSError):
                    entry.path.unlink()
