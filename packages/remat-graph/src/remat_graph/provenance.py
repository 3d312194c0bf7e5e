"""Where in the user's code an operation comes from."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Provenance"]


@dataclass(frozen=True, slots=True)
class Provenance:
    """The module and the source line that an operation comes from: data to show, nothing else.

    `module` is the dotted path of the innermost module that ran it, as in
    `model.get_submodule(module)`; empty for the model itself. `source` is `file:line`, the file as
    below the folder that it is imported from; empty if it is not known.
    """

    module: str = ""
    source: str = ""
