"""Searches that end by the clock, for tests that may not depend on it."""

from remat.session import kind_finder


def repeat_searches(monkeypatch):
    """Give for a region what the first search for its graph found."""
    found, front = [], kind_finder.region_front

    def same_again(graph, **options):
        for before, of_before in found:
            if graph == before:
                return of_before
        found.append((graph, front(graph, **options)))
        return found[-1][1]

    monkeypatch.setattr(kind_finder, "region_front", same_again)
