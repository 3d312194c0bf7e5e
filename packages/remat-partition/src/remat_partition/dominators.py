"""Candidate groups from immediate dominators: one way in, or one way out.

HiRemate, section 3.1: for every node x, with a(x) the closest node that all paths to x pass, the
nodes on all paths from a(x) to x, with and without x and a(x): four candidates. Several entries get
a common source, which is in no group.

Only an a(x) within the bound matters, so no tree of dominators is made. Walk back from x, always on
from the latest of the nodes that wait. When one alone waits, all paths pass it, and it is the
closest such node: at a node that all paths pass, whatever else waits would be a way around it. What
was left behind is what lies between, so the walk gives up one member beyond the bound. It also
gives up where what it meets is too far from x: if a(x) is m members away on the longest path, the
longest path to x is by m longer than that to a(x), and so by m or more than that to any node in
between. So a value that is read all along a chain costs each reader one comparison. For n nodes
with d dependencies each and the bound b, all candidates together take O(n * b * d * log(b * d)),
whatever the graph.

Each group has one way in: a node outside that precedes one inside precedes the head alone, or is
the head (Property 1 of appendix A, with the head itself excepted where it is a member). Appendix A
proves that the union of two such groups that intersect is one again; that several disjoint ones
close no cycle is proved in `docs/decisions/0008`. `leaving=True` gives the mirror image, groups
with one way out, by post-dominators. The two kinds must not meet in one round of merging.

A node with more than four times as many direct dependencies on either side as the bound is in no
candidate: it would be in as many, and each would be scored over as many values.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet
from heapq import heapify, heappop, heappush

from remat_partition.quotient import Quotient

__all__ = ["dominated_groups"]

_HUB = 4


def dominated_groups(quotient: Quotient, bound: int, *, leaving: bool = False) -> list[list[int]]:
    """List the candidates of at least two nodes and at most `bound` members, by their node x."""
    count = len(quotient)
    # The walk goes up: back by mirrored numbers, or ahead by those that the nodes have.
    number = range(count) if leaving else range(count - 1, -1, -1)
    ways: Sequence[Sequence[int]] = quotient.after
    if not leaving:
        ways = [[number[source] for source in quotient.before[node]] for node in number]
    hubs = {
        number[node]
        for node in range(count)
        if max(len(quotient.before[node]), len(quotient.after[node])) > _HUB * bound
    }
    walk = _Walk(ways, [quotient.members[node] for node in number], hubs, bound)
    groups = []
    for x in number:
        way = walk.to_dominator(x)
        if way is None:
            continue
        between, head = way
        for group in (between, [*between, x], [*between, head], [*between, head, x]):
            if len(group) > 1 and walk.allows(group):
                groups.append([number[node] for node in group])
    return groups


class _Walk:
    """Ways from each node to later ones, and from those without any to a common end.

    `far` has the most members on a way from each node to the end, itself included.
    """

    def __init__(
        self,
        ways: Sequence[Sequence[int]],
        members: Sequence[int],
        hubs: AbstractSet[int],
        bound: int,
    ) -> None:
        self.end = len(ways)
        self.ways = [way or (self.end,) for way in ways]
        self.members = members
        self.hubs = hubs
        self.bound = bound
        self.far = [0] * (self.end + 1)
        for node in reversed(range(self.end)):
            self.far[node] = members[node] + max([self.far[later] for later in self.ways[node]])

    def to_dominator(self, x: int) -> tuple[list[int], int] | None:
        """Find the first node that all ways from x meet, and what is before; None beyond the bound.

        What holds a hub is beyond it.
        """
        far = self.far
        least = far[x] - self.members[x] - self.bound
        waiting = list(self.ways[x])
        if min([far[node] for node in waiting]) < least:
            return None
        heapify(waiting)
        met = set(waiting)
        between: list[int] = []
        size = 0
        while len(waiting) > 1:
            node = heappop(waiting)
            size += self.members[node]
            if size + len(waiting) - 1 > self.bound or node in self.hubs:
                return None
            between.append(node)
            for later in self.ways[node]:
                if later not in met:
                    if far[later] < least:
                        return None
                    met.add(later)
                    heappush(waiting, later)
        return between, waiting[0]

    def allows(self, group: Collection[int]) -> bool:
        """Say whether a group is within the bound, without a hub and without the end."""
        if self.end in group or not self.hubs.isdisjoint(group):
            return False
        return sum([self.members[node] for node in group]) <= self.bound
