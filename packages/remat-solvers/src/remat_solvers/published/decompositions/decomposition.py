"""Tree and path decompositions of a computation graph, and how they are cut.

Kumar, Purohit, Svitkina, Vee, Wang: "Efficient Rematerialization for Deep Networks" (NeurIPS 2019),
sections 2.2, 3 and 5. The nodes are the ops and one virtual final node that needs every op nothing
else needs, and every op that makes a result; edges are dependencies without their direction.

Tree decompositions come from the minimum fill-in heuristic, above 2,500 nodes from the minimum
degree heuristic (both of networkx). Path decompositions come from a walk through a tree
decomposition. There is no guarantee on the width. Minimum fill-in takes quadratic time for long
graphs: half a second for 600 ops.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import networkx as nx
from networkx.algorithms.approximation import treewidth_min_degree, treewidth_min_fill_in

from remat_solvers.core.wiring import Wiring

__all__ = [
    "Bag",
    "Precedence",
    "Tree",
    "balanced_bag",
    "path_of",
    "shrink_path",
    "tree_of",
    "without_bag",
]

Bag = frozenset[int]

_MOST_NODES_FOR_FILL_IN = 2_500


@dataclass(frozen=True, slots=True)
class Precedence:
    """What each node needs, directly; node `final` is virtual. Nodes are topologically numbered."""

    before: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, wiring: Wiring) -> Precedence:
        """Read the dependencies of the ops, those that only fix an order included."""
        graph = wiring.graph
        before: list[tuple[int, ...]] = []
        needed: set[int] = set()
        for op, row in enumerate(wiring.inputs):
            sources = {wiring.producer_list[v] for v in row}
            sources.update(graph.op_index[name] for name in graph.ops[op].order_after)
            before.append(tuple(sorted(sources)))
            needed |= sources
        last = set(range(len(before))) - needed
        last.update(wiring.producer_list[v] for v in wiring.results.tolist())
        return cls((*before, tuple(sorted(last))))

    @property
    def final(self) -> int:
        """Number of the virtual node, the last."""
        return len(self.before) - 1

    def ancestors(self, wanted: Iterable[int], among: frozenset[int]) -> frozenset[int]:
        """Collect some nodes and all that they need, as far as these are `among` some."""
        nodes = set(wanted)
        waiting = list(nodes)
        while waiting:
            for node in self.before[waiting.pop()]:
                if node in among and node not in nodes:
                    nodes.add(node)
                    waiting.append(node)
        return frozenset(nodes)

    def undirected(self, *, spine: bool = False) -> nx.Graph[int]:
        """Write the graph without directions; with a spine, a path through all in order."""
        graph: nx.Graph[int] = nx.Graph()
        graph.add_nodes_from(range(len(self.before)))
        graph.add_edges_from((p, node) for node, row in enumerate(self.before) for p in row)
        if spine:
            graph.add_edges_from(pairwise(range(len(self.before))))
        return graph


@dataclass(frozen=True, slots=True)
class Tree:
    """Bags and the numbers of each bag's neighbours."""

    bags: tuple[Bag, ...]
    neighbours: tuple[tuple[int, ...], ...]


def tree_of(precedence: Precedence) -> Tree:
    """Decompose a graph into a tree of bags, shrunk by Lemma 1 to at most as many as nodes."""
    return _tree_of(precedence.undirected())


def _tree_of(graph: nx.Graph[int]) -> Tree:
    few = len(graph) <= _MOST_NODES_FOR_FILL_IN
    _, decomposition = treewidth_min_fill_in(graph) if few else treewidth_min_degree(graph)
    # The heuristics return a graph of sets whose order varies from run to run.
    bags = sorted((frozenset(bag) for bag in decomposition), key=sorted)
    number = {bag: i for i, bag in enumerate(bags)}
    neighbours = tuple(
        tuple(sorted(number[frozenset(other)] for other in decomposition[bag])) for bag in bags
    )
    return _shrunk(Tree(tuple(bags), neighbours))


def _shrunk(tree: Tree) -> Tree:
    """Merge bags into neighbours that contain them (Lemma 1), in one pass over the edges."""
    parent = list(range(len(tree.bags)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    edges = [(i, j) for i, row in enumerate(tree.neighbours) for j in row if i < j]
    for i, j in edges:
        a, b = root(i), root(j)
        if tree.bags[a] <= tree.bags[b]:
            parent[a] = b
        elif tree.bags[b] <= tree.bags[a]:
            parent[b] = a
    kept = [i for i in range(len(tree.bags)) if parent[i] == i]
    number = {i: position for position, i in enumerate(kept)}
    neighbours: list[set[int]] = [set() for _ in kept]
    for i, j in edges:
        a, b = number[root(i)], number[root(j)]
        if a != b:
            neighbours[a].add(b)
            neighbours[b].add(a)
    return Tree(tuple(tree.bags[i] for i in kept), tuple(tuple(sorted(row)) for row in neighbours))


def balanced_bag(tree: Tree) -> int:
    """Find the bag whose removal leaves the smallest largest component (Lemma 3), linear time.

    The components have at most half of the bags if the tree is one tree.
    """
    count = len(tree.bags)
    order, parent = _walk(tree, 0)
    weight = [1] * count
    heaviest = [0] * count
    for i in reversed(order):
        if parent[i] >= 0:
            weight[parent[i]] += weight[i]
            heaviest[parent[i]] = max(heaviest[parent[i]], weight[i])
    return min(order, key=lambda i: (max(heaviest[i], len(order) - weight[i]), i))


def _walk(tree: Tree, start: int) -> tuple[list[int], list[int]]:
    """List the bags by distance from one, and the bag from which each is reached."""
    parent = [-1] * len(tree.bags)
    order = [start]
    for i in order:
        for j in tree.neighbours[i]:
            if j != parent[i]:
                parent[j] = i
                order.append(j)
    return order, parent


def without_bag(tree: Tree, bag: int) -> list[Tree]:
    """Take out a bag, and its nodes from all others; one tree per component that has nodes left."""
    gone = tree.bags[bag]
    parts: list[Tree] = []
    for start in tree.neighbours[bag]:
        members = [start]
        came = {start: bag}
        for i in members:
            for j in tree.neighbours[i]:
                if j != came[i]:
                    came[j] = i
                    members.append(j)
        number = {i: position for position, i in enumerate(members)}
        part = Tree(
            tuple(tree.bags[i] - gone for i in members),
            tuple(tuple(number[j] for j in tree.neighbours[i] if j != bag) for i in members),
        )
        if any(part.bags):
            parts.append(part)
    return parts


def path_of(precedence: Precedence) -> tuple[Bag, ...]:
    """Decompose the graph with its spine into a path of bags, shrunk.

    A tree decomposition is walked from an end of its longest path, lighter branches first; a bag is
    a node, in the order in which they are met, with the nodes met before that have neighbours to
    come. So a path is wider than the tree by at most the number of light branches on a way down.
    """
    graph = precedence.undirected(spine=True)
    tree = _tree_of(graph)
    far = _walk(tree, 0)[0][-1]
    ends = (far, _walk(tree, far)[0][-1])
    paths = [shrink_path(_path_bags(graph, _nodes_in_order(tree, end))) for end in ends]
    return min(paths, key=lambda path: max(map(len, path), default=0))


def shrink_path(bags: Sequence[Bag]) -> tuple[Bag, ...]:
    """Merge bags into neighbours that contain them (Lemma 1); empty ones go."""
    kept: list[Bag] = []
    for bag in bags:
        while kept and kept[-1] <= bag:
            kept.pop()
        if bag and not (kept and bag <= kept[-1]):
            kept.append(bag)
    return tuple(kept)


def _nodes_in_order(tree: Tree, start: int) -> list[int]:
    """List the nodes of the bags, depth first, at each bag the smallest branch first."""
    order, parent = _walk(tree, start)
    weight = [1] * len(tree.bags)
    for i in reversed(order[1:]):
        weight[parent[i]] += weight[i]
    nodes: dict[int, None] = {}
    waiting = [start]
    while waiting:
        i = waiting.pop()
        nodes.update(dict.fromkeys(sorted(tree.bags[i])))
        branches = [j for j in tree.neighbours[i] if j != parent[i]]
        waiting.extend(sorted(branches, key=lambda j: (-weight[j], j)))
    return list(nodes)


def _path_bags(graph: nx.Graph[int], order: list[int]) -> list[Bag]:
    """Make a bag for each node of an order: itself and the nodes before that are still open."""
    to_come = {node: graph.degree(node) for node in graph}
    open_nodes: dict[int, None] = {}
    bags: list[Bag] = []
    for node in order:
        bags.append(frozenset((*open_nodes, node)))
        for other in graph[node]:
            to_come[other] -= 1
            if not to_come[other]:
                open_nodes.pop(other, None)
        if to_come[node]:
            open_nodes[node] = None
    return bags
