"""Blocks along repeated code: the layers of a model stay whole, and so identical.

The ops in execution order are a sequence of equivalence classes (HiRemate, C.1.1, uses them to
find identical blocks after cutting; here they say where to cut). A run of this sequence, the same
classes again and again, that is longer than a block may be, is cut into its periods, where in the
period the fewest bytes cross on average; what lies between runs is grouped by one level of
H-Partition. The blocks so found are elements of a shorter sequence, equal where they are the same
inside, which is cut in the same way: layers into groups of layers. What is left without runs, and
is still too much for a block, H-Partition cuts, which keeps the elements whole.

A period above `max_block_ops` is one block cut inside, by the same rules, into as few parts as may
do; short periods are taken together, as many as fit and divide their number evenly where some do.
Blocks that are the same inside are cut once, so identical blocks are identical at every level.

Guarantee: as H-Partition for bounds, validity and determinism. A repeated layer makes the same
blocks however often it is repeated, but for the groups of layers at the levels above. O(n log² n)
for the runs of each level, and as H-Partition for what it cuts.

Limits: repeats are found where they follow one another in the order of the graph (see `runs`).
Without `equivalence`, ops count as the same if they cost the same.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import ClassVar

from remat_graph import Graph, Hierarchy, equivalence_classes
from remat_partition.h_partition import MAX_BLOCK_OPS, MAX_TOP_OPS, HPartition
from remat_partition.options import as_alpha, as_bound
from remat_partition.quotient import Quotient
from remat_partition.runs import Run, find_runs
from remat_partition.tree import Member, build

__all__ = ["Repeats"]


class Repeats:
    """Cuts between repeats first, and with H-Partition where nothing repeats.

    Raises:
        InvalidOption: as `HPartition`.
    """

    name: ClassVar[str] = "repeats"

    def __init__(
        self,
        *,
        max_top_ops: int = MAX_TOP_OPS,
        max_block_ops: int = MAX_BLOCK_OPS,
        alpha: float = 0.5,
    ) -> None:
        self.max_top_ops = as_bound("max_top_ops", max_top_ops)
        self.max_block_ops = as_bound("max_block_ops", max_block_ops)
        self.alpha = as_alpha(alpha)

    def partition(self, graph: Graph) -> Hierarchy:
        """Cut a graph; any graph can be cut."""
        quotient = Quotient.of(graph)
        number: dict[str, int] = {}
        for i, names in enumerate(equivalence_classes(graph)):
            number.update(dict.fromkeys(names, i))
        tokens = [number[op.name] for op in graph.ops[: len(quotient)]]
        cutting = _Cutting(self.max_block_ops, self.alpha, first_token=len(number))
        return build(graph, cutting.cut(quotient, tokens, self.max_top_ops))


class _Cutting:
    """What one graph is cut with: the blocks met so far, by what is inside them."""

    def __init__(self, bound: int, alpha: float, first_token: int) -> None:
        self.bound = bound
        self.alpha = alpha
        self.first_token = first_token
        self.blocks: dict[Hashable, tuple[int, list[Member]]] = {}

    def cut(self, quotient: Quotient, tokens: list[int], most: int) -> list[Member]:
        """Cut a quotient into at most `most` members, with its nodes for ops."""
        members: list[Member] = list(range(len(quotient)))
        while len(quotient) > most:
            groups = self.groups(quotient, tokens, most)
            if len(groups) == len(quotient) or len(groups) == 1:
                break
            parts = quotient.split(groups)
            cut = [
                self.block(part, [tokens[node] for node in group])
                for part, group in zip(parts, groups, strict=True)
            ]
            members = [
                members[group[0]] if len(group) == 1 else _put(inside, [members[i] for i in group])
                for group, (_, inside) in zip(groups, cut, strict=True)
            ]
            quotient = quotient.contract(groups).fresh()
            tokens = [token for token, _ in cut]
        rest = HPartition(max_top_ops=most, max_block_ops=self.bound, alpha=self.alpha)
        return _put(rest.cut(quotient), members)

    def groups(self, quotient: Quotient, tokens: list[int], most: int) -> list[list[int]]:
        """Cut the order into periods of runs, and what lies in between as H-Partition does."""
        crossing = _crossing(quotient)
        periods: list[range] = []
        between: list[range] = []
        done = 0
        for run in find_runs(tokens):
            if run.length > self.bound:
                start, count = _best_phase(run, crossing)
                step = run.period * self.together(run.period, count, len(quotient), most)
                end = start + run.period * count
                periods += [range(i, min(i + step, end)) for i in range(start, end, step)]
                between.append(range(done, start))
                done = end
        between.append(range(done, len(quotient)))
        fits = len(periods) + sum(map(len, between)) <= most
        if fits or not periods:
            between = [range(i, i + 1) for nodes in between for i in nodes]
        groups = [list(nodes) for nodes in periods]
        for nodes, part in zip(between, quotient.split(between), strict=True):
            groups += [[nodes[i] for i in group] for group in self.level(part)]
        return quotient.order(groups)

    def level(self, part: Quotient) -> list[list[int]]:
        """Group the nodes of a stretch by one level of H-Partition, or all if they fit."""
        if len(part) <= self.bound:
            return [list(range(len(part)))] if len(part) else []
        return HPartition(max_top_ops=2, max_block_ops=self.bound, alpha=self.alpha).level(part)

    def together(self, period: int, periods: int, count: int, most: int) -> int:
        """Choose how many periods make one block."""
        fit = min(self.bound // period, periods)
        least = 2 if period == 1 else 1
        if fit < least:
            return 1
        for together in range(least, fit + 1):
            left = count - period * periods + periods // together
            if periods % together == 0 and left <= most:
                return together
        best = min(range((fit + 2) // 2, fit + 1), key=lambda k: (k < least, periods % k > 0, -k))
        return math.ceil(periods / math.ceil(periods / best))

    def block(self, part: Quotient, tokens: list[int]) -> tuple[int, list[Member]]:
        """Give the token of a block, the same for the same inside, and its members."""
        if len(part) == 1:
            return tokens[0], []
        key = (tuple(tokens), part.before, frozenset(part.flows.items()))
        if key not in self.blocks:
            token = self.first_token + len(self.blocks)
            most = self.bound
            if len(part) > most:
                # Cut down to the bound alone, it would be full of pairs.
                most = min(most, math.ceil(len(part) / most))
            self.blocks[key] = (token, self.cut(part, tokens, most))
        return self.blocks[key]


def _put(tree: Sequence[Member], members: Sequence[Member]) -> list[Member]:
    """Put members for the numbers of a tree."""
    return [members[node] if isinstance(node, int) else _put(node, members) for node in tree]


def _crossing(quotient: Quotient) -> list[int]:
    """Give the bytes alive between neighbours in the order: at i, between nodes i - 1 and i."""
    steps = [0] * (len(quotient) + 1)
    for flow, size in quotient.flows.items():
        if flow.readers:
            steps[flow.producer + 1] += size
            steps[flow.readers[-1] + 1] -= size
    return list(accumulate(steps))


def _best_phase(run: Run, crossing: Sequence[int]) -> tuple[int, int]:
    """Choose where the periods of a run start: first node and number of whole periods."""

    def phases() -> Iterator[tuple[Fraction, int, int]]:
        for start in range(run.start, run.start + min(run.period, run.length - 2 * run.period + 1)):
            periods = (run.start + run.length - start) // run.period
            cuts = crossing[start : start + run.period * periods + 1 : run.period]
            yield Fraction(sum(cuts), len(cuts)), -periods, start

    _, periods, start = min(phases())
    return start, -periods
