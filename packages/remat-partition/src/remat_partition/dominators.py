"""Candidate groups from immediate dominators: one way in, or one way out.

HiRemate, section 3.1: for every node x, with a(x) the closest node that all paths to x pass, the
nodes on all paths from a(x) to x, with and without x and a(x): four candidates. Several entries get
a common source, which is in no group. What is too large is found out by walking back from x, which
meets nothing but members, and giving up one node beyond the bound. So all candidates together take
time linear in the nodes, times the bound, times the in-degree.

Each group has one way in: a node outside that precedes one inside precedes the head alone, or is
the head (Property 1 of appendix A, with the head itself excepted where it is a member). Appendix A
proves that the union of two such groups that intersect is one again; that several disjoint ones
close no cycle is proved in `docs/decisions/0008`. `leaving=True` gives the mirror image, groups
with one way out, by post-dominators. The two kinds must not meet in one round of merging.

A node with more than 256 direct dependencies on either side is in no candidate: it would be in as
many, and each would be scored over as many values.
"""

from __future__ import annotations

import rustworkx as rx

from remat_partition.quotient import Quotient

__all__ = ["dominated_groups"]

_HUB = 256


def dominated_groups(quotient: Quotient, bound: int, *, leaving: bool = False) -> list[list[int]]:
    """List the candidates of at least two nodes and at most `bound` members, by their node x."""
    before, after = quotient.before, quotient.after
    if leaving:
        before, after = after, before
    source = len(quotient)
    closest = _immediate_dominators(before, source)
    members = quotient.members
    hubs = {n for n in range(source) if max(len(before[n]), len(after[n])) > _HUB}
    found = []
    for x in range(source):
        head = closest[x]
        between = _between(before, members, head, x, bound)
        if between is None:
            continue
        with_x = [*between, x]
        found += [between, with_x]
        if head != source:
            found += [[*between, head], [*with_x, head]]
    return [
        group
        for group in found
        if len(group) > 1
        and sum([members[node] for node in group]) <= bound
        and hubs.isdisjoint(group)
    ]


def _immediate_dominators(before: tuple[tuple[int, ...], ...], source: int) -> dict[int, int]:
    dag: rx.PyDiGraph[None, None] = rx.PyDiGraph()
    dag.add_nodes_from([None] * (source + 1))
    edges = [(p, x) for x, sources in enumerate(before) for p in (sources or (source,))]
    dag.add_edges_from_no_data(edges)
    return rx.immediate_dominators(dag, source)


def _between(
    before: tuple[tuple[int, ...], ...],
    members: tuple[int, ...],
    head: int,
    x: int,
    bound: int,
) -> list[int] | None:
    """Collect what lies strictly between `head` and `x`, or nothing if it is above the bound."""
    found: set[int] = set()
    waiting = [x]
    size = 0
    while waiting:
        for node in before[waiting.pop()]:
            if node != head and node not in found:
                size += members[node]
                if size > bound:
                    return None
                found.add(node)
                waiting.append(node)
    return list(found)
