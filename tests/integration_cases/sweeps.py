"""Which cases of a test are always run, and which by `hatch run sweep` alone."""

import pytest


def swept(names, kept):
    """Give a parameter for each name; all but the kept ones, each of another kind, are a sweep."""
    kept = set(kept)
    assert kept <= set(names), kept - set(names)
    return [
        pytest.param(
            name,
            marks=() if name in kept else pytest.mark.sweep,
            id=getattr(name, "__name__", str(name)),
        )
        for name in names
    ]
