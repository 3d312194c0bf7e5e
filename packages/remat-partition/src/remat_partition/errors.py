"""What `remat_partition` raises."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence

from remat_graph import RematError

__all__ = [
    "BrokenPartitioner",
    "DuplicatePartitioner",
    "InvalidOption",
    "PartitionError",
    "UnknownOption",
    "UnknownPartitioner",
]


class PartitionError(RematError, ValueError):
    """Base of the errors of this package; a partitioner that refuses a graph raises one."""


class UnknownPartitioner(PartitionError):
    """No installed distribution offers a partitioner of this name."""

    def __init__(self, name: str, installed: Sequence[str]) -> None:
        super().__init__(
            f"no partitioner is called {name!r}; installed are: {', '.join(installed) or 'none'}. "
            f"A distribution offers one by an entry point in the group 'remat.partitioners'"
        )
        self.name = name


class DuplicatePartitioner(PartitionError):
    """A name is offered more than once: by several distributions, or by one of them."""

    def __init__(
        self, name: str, origins: Sequence[str], remedy: str = "uninstall all but one"
    ) -> None:
        super().__init__(f"partitioner {name!r} is offered by {' and by '.join(origins)}; {remedy}")
        self.name = name
        self.origins = tuple(origins)


class BrokenPartitioner(PartitionError):
    """A partitioner that does not load, failed, or returned what is no hierarchy of the graph."""

    def __init__(self, name: str, origin: str, cause: str) -> None:
        super().__init__(f"partitioner {name!r} of {origin} is broken: {cause}; report it there")
        self.name = name
        self.origin = origin


class UnknownOption(PartitionError):
    """A partitioner was given an option that it does not have.

    `options` are the options that it has; None for a partitioner that is handed over already made.
    """

    def __init__(self, partitioner: str, option: str, options: Sequence[str] | None) -> None:
        if options is None:
            rule = "it is made already: give the option to its class"
        else:
            rule = f"its options are: {', '.join(options) or 'none'}"
        super().__init__(f"partitioner {partitioner!r} takes no option {option!r}; {rule}")
        self.partitioner = partitioner
        self.option = option


class InvalidOption(PartitionError):
    """An option of a partitioner has a value that it cannot have."""

    def __init__(self, option: str, value: object, rule: str) -> None:
        super().__init__(f"{option}={_shown(value)} will not do; {rule}")
        self.option = option
        self.value = value


def _shown(value: object) -> str:
    """Write a value in a line, whatever it is: Python refuses to write ints of 4300 digits."""
    try:
        return reprlib.repr(value)
    except Exception:
        return f"a {type(value).__name__}"
