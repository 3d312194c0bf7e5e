"""Files that are there whole or not at all.

Results are written beside their place and renamed, so that a reader never sees half a file, and a
run that is cut off leaves none behind. A link is followed; what is no file, such as `/dev/stdout`,
is written to as it is.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

__all__ = ["write_atomically"]


def write_atomically(path: str | os.PathLike[str], data: str | bytes) -> None:
    """Write a file, text as UTF-8: a reader sees the old file or the whole new one.

    Raises:
        OSError: if the folder does not exist or cannot be written; the old file is as it was.
    """
    content = data.encode() if isinstance(data, str) else data
    if (special := Path(path)).exists() and not special.is_file():  # nothing may take its place
        special.write_bytes(content)
        return
    target = Path(os.path.realpath(path))
    # Not tempfile: its files are readable by their owner alone, and keep that when renamed.
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.filename == str(temporary):
            error.filename = os.fspath(path)  # the one that the caller knows
        raise
