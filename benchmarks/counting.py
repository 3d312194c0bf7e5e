"""How often graphs are traced, plans rehearsed and solved, and calls run plain to measure them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from remat.planning import planner, solving
from remat.session import kind_finder, nearby_sizes
from remat.session.call_runner import CallRunner
from remat_graph.torch.capturing import capture, sized_trace

__all__ = ["counted"]


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count what is traced, rehearsed and solved, and what runs plain."""
    counts: Counter[str] = Counter()
    places: list[tuple[Any, str, str]] = [
        (capture, "trace_region", "traced as it comes"),
        (sized_trace, "trace_region", "traced with symbols"),
        (planner, "rehearsed", "rehearsed"),
        (nearby_sizes, "rehearsed", "rehearsed"),
        (kind_finder, "region_front", "solved"),
        (solving, "solve", "solved"),
        (CallRunner, "_run_plain", "ran plain"),
    ]
    originals = [getattr(module, name) for module, name, _ in places]
    for (module, name, what), original in zip(places, originals, strict=True):

        def run(*args: Any, original: Any = original, what: str = what, **options: Any) -> Any:
            counts[what] += 1
            return original(*args, **options)

        setattr(module, name, run)
    try:
        yield counts
    finally:
        for (module, name, _), original in zip(places, originals, strict=True):
            setattr(module, name, original)
