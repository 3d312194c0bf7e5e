"""Greedy merging of candidate groups by score: the inner loop of H-Partition.

HiRemate, section 3.1 and algorithm 2: take the candidate of least score, equation (1),

    s(C) = (bytes of the values that enter or leave C) * (original ops in C) ** alpha,

make it a group, add it whole to every candidate that it meets, drop those that grow beyond the
bound; until none is left, or no more than `most` groups.

A candidate is a set of groups. It changes, and so does its score, only when a group that it holds
is merged, so an index from groups to candidates finds all that must be scored again, and the heap
drops outdated entries as they surface. Each change of a candidate leaves it fewer groups or gives
it more nodes, and it has at most `bound` of either, so it is scored at most 2 * bound times: n
candidates cost O(n * bound) scores and O(n * bound * log n) for the heap, however deep they nest. A
score takes time linear in what the groups of the candidate read and make, so the bound counts twice
where candidates are large: `h_partition` gives a small one. Candidates of two neighbours are merged
with one of two others at a time, whatever the bound: O(n) scores.

Guarantee: where every union of intersecting candidates is again of a kind whose disjoint members
close no cycle (see `dominators`; intervals of the order are another such kind), the quotient by
the result is acyclic. Equal scores go to the candidate that was given first, so the result depends
on the order of the candidates alone.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable

from remat_partition.quotient import Quotient

__all__ = ["merge"]


def merge(
    quotient: Quotient,
    candidates: Iterable[Collection[int]],
    *,
    bound: int,
    most: int,
    alpha: float,
) -> list[list[int]]:
    """Merge the nodes of a quotient into groups of at most `bound` members; list the groups.

    Candidates have two nodes or more and at most `bound` members. Stops when there are at most
    `most` groups, and never merges everything into one.
    """
    merging = _Merging(quotient, bound, alpha)
    merging.take(candidates)
    merging.run(most)
    return [nodes for nodes in merging.nodes if nodes]


class _Merging:
    """Groups, candidates over them and the heap; a group goes by the number of its first node.

    A candidate that is gone is empty. Tuples rather than sets: there are many, and the garbage
    collector leaves tuples of ints alone.
    """

    def __init__(self, quotient: Quotient, bound: int, alpha: float) -> None:
        count = len(quotient)
        self.bound = bound
        self.alpha = alpha
        self.groups = count
        self.nodes = [[node] for node in range(count)]
        self.members = list(quotient.members)
        self.ops = list(quotient.ops)
        self.sizes = list(quotient.flows.values())
        self.kept = [flow.kept for flow in quotient.flows]
        self.readers = [len(flow.readers) for flow in quotient.flows]
        reads: list[list[int]] = [[] for _ in range(count)]
        makes: list[list[int]] = [[] for _ in range(count)]
        for i, flow in enumerate(quotient.flows):
            makes[flow.producer].append(i)
            for reader in flow.readers:
                reads[reader].append(i)
        self.reads = list(map(tuple, reads))
        self.makes = list(map(tuple, makes))
        self.candidates: list[tuple[int, ...]] = []
        self.scores: list[float] = []
        self.holding: list[list[int]] = [[] for _ in range(count)]
        self.heap: list[tuple[float, int]] = []

    def take(self, candidates: Iterable[Collection[int]]) -> None:
        """Take in the candidates, each once."""
        for candidate in dict.fromkeys(tuple(sorted(nodes)) for nodes in candidates):
            number = len(self.candidates)
            self.candidates.append(candidate)
            self.scores.append(self.score(candidate))
            for group in candidate:
                self.holding[group].append(number)
            self.heap.append((self.scores[number], number))
        heapq.heapify(self.heap)

    def run(self, most: int) -> None:
        """Merge by least score."""
        while self.heap and self.groups > most:
            score, number = heapq.heappop(self.heap)
            candidate = self.candidates[number]
            if not candidate or score != self.scores[number]:
                continue
            self.candidates[number] = ()
            if len(candidate) < self.groups:
                self.unite(candidate)
                self.update(candidate)

    def score(self, groups: tuple[int, ...]) -> float:
        """Give the logarithm of equation (1), which no size overflows."""
        border = 0
        ops = 0
        inside: dict[int, int] = {}
        for group in groups:
            ops += self.ops[group]
            for flow in self.reads[group]:
                inside[flow] = inside.get(flow, 0) + 1
        for group in groups:
            for flow in self.makes[group]:
                # What is made here is at the border only if it is read elsewhere too.
                if inside.pop(flow, 0) < self.readers[flow] or self.kept[flow]:
                    border += self.sizes[flow]
        for flow in inside:
            border += self.sizes[flow]
        return math.log(border) + self.alpha * math.log(ops) if border else -math.inf

    def unite(self, groups: tuple[int, ...]) -> None:
        """Make several groups, ascending, the first of them."""
        first, *others = groups
        reads: set[int] = set()
        makes: set[int] = set()
        for group in groups:
            makes.update(self.makes[group])
            for flow in self.reads[group]:
                if flow in reads:
                    self.readers[flow] -= 1
                else:
                    reads.add(flow)
        for flow in reads & makes:
            self.readers[flow] -= 1
        self.reads[first] = tuple(reads - makes)
        self.makes[first] = tuple(f for f in makes if self.readers[f] or self.kept[f])
        for group in others:
            self.nodes[first] += self.nodes[group]
            self.members[first] += self.members[group]
            self.ops[first] += self.ops[group]
            self.nodes[group] = []
            self.reads[group] = self.makes[group] = ()
        self.groups -= len(others)

    def update(self, merged: tuple[int, ...]) -> None:
        """Put a new group into every candidate that held a part of it, and score those again."""
        group = merged[0]
        touched = {number for part in merged for number in self.holding[part]}
        for part in merged:
            self.holding[part] = []
        met: set[tuple[int, ...]] = set()
        for number in sorted(touched):
            candidate = self.candidates[number]
            if not candidate:
                continue
            rest = [part for part in candidate if part not in merged]
            candidate = tuple(sorted((*rest, group)))
            size = sum([self.members[part] for part in candidate])
            if not rest or size > self.bound or candidate in met:
                self.candidates[number] = ()
                continue
            met.add(candidate)
            self.candidates[number] = candidate
            self.holding[group].append(number)
            self.scores[number] = self.score(candidate)
            heapq.heappush(self.heap, (self.scores[number], number))
