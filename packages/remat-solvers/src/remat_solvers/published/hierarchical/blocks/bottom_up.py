"""From the lowest blocks of a hierarchy to the top: options for every block, each class once.

Identical blocks are planned once, and their options translated to every member (HiRemate, C.1.1).
All blocks of one height are independent of one another and are planned through the executor. A
planner turns a level and a target into a sequence of computations of the closed block.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from remat_graph import Block, Hierarchy, Subgraph, UniqueBlock
from remat_solvers.core.parallel import run_all
from remat_solvers.core.wiring import Ints, Wiring
from remat_solvers.published.hierarchical.blocks.adopt import adopt
from remat_solvers.published.hierarchical.blocks.closed import close
from remat_solvers.published.hierarchical.blocks.level import Layer, Level
from remat_solvers.published.hierarchical.blocks.options import (
    BlockOption,
    choose,
    read_option,
    shares,
)
from remat_solvers.published.hierarchical.blocks.targets import targets_of

__all__ = ["Blocks", "Planner", "plan_block"]

# Level, budget in bytes, seconds -> sequences of computations within the budget, best last.
Planner = Callable[[Level, int, float], "list[Ints]"]


@dataclass(frozen=True, slots=True)
class _BlockPlan:
    """A class of blocks, its subgraph, and the options found for it."""

    unique: UniqueBlock
    subgraph: Subgraph
    options: tuple[BlockOption, ...]


class Blocks:
    """The options of the blocks of a hierarchy, found from the bottom up."""

    def __init__(self, hierarchy: Hierarchy, most_options: int) -> None:
        self.hierarchy = hierarchy
        self._most_options = most_options
        self._plans: dict[str, _BlockPlan] = {}

    def plan(
        self,
        planner: Planner,
        executor: Executor | None,
        deadline: float,
        tell: Callable[[str], None],
    ) -> None:
        """Plan every block below the top, for at most until `deadline`."""
        waves = self._waves()
        total = sum(len(wave) for wave in waves)
        done = 0
        for number, wave in enumerate(waves):
            left = deadline - time.perf_counter()
            until = time.perf_counter() + max(0.0, left) / (len(waves) - number)
            tasks = []
            for unique in wave:
                subgraph = self.hierarchy.subgraph(unique.representative)
                layers, order = self._inside(unique.representative.members, subgraph)
                share = (until - time.perf_counter()) / max(1, len(wave))
                task = (planner, subgraph, layers, order, max(0.05, share))
                tasks.append((f"block {unique.representative.name}", task))
            for unique, (_, task), options in zip(
                wave, tasks, run_all(executor, plan_block, tasks), strict=True
            ):
                plan = _BlockPlan(unique, task[1], options)
                self._plans.update(dict.fromkeys((b.name for b in unique.members), plan))
            done += len(wave)
            tell(f"planned {done} of {total} kinds of blocks")

    def top(self, most_nodes: int, starts: Sequence[Ints] = ()) -> Level:
        """Make the level of the whole graph.

        The blocks of fewest ops are dissolved into it while it has at most `most_nodes` nodes. What
        the sequences of ops in `starts` do in the others is an option of them, too.
        """
        graph = self.hierarchy.graph
        members = list(self.hierarchy.root.members)
        size = {
            block.name: len(self._plans[block.name].subgraph.graph.ops)
            for block in self.hierarchy.root.blocks()
            if block.name in self._plans
        }
        inside = sum(size[m.name] for m in members if isinstance(m, Block))
        nodes = len(graph.ops) - inside + 2 * sum(isinstance(m, Block) for m in members)
        while blocks := [m for m in members if isinstance(m, Block)]:
            smallest = min(blocks, key=lambda block: size[block.name])
            inner = [m for m in smallest.members if isinstance(m, Block)]
            nodes += size[smallest.name] - 2 + sum(2 - size[block.name] for block in inner)
            if nodes > most_nodes:
                break
            at = members.index(smallest)
            members[at : at + 1] = smallest.members
        layers, order = self._layers(members, lambda op: graph.op_index[op])
        wiring = Wiring.of(graph)
        return Level.of(wiring, [adopt(wiring, layer, starts) for layer in layers], order)

    def _waves(self) -> list[list[UniqueBlock]]:
        """Sort the classes below the top by height; what is inside a block comes before it."""
        height: dict[str, int] = {}
        waves: list[list[UniqueBlock]] = []
        root = self.hierarchy.root
        for unique in self.hierarchy.unique_blocks:
            inside = [
                height[member.name]
                for member in unique.representative.members
                if isinstance(member, Block)
            ]
            own = 1 + max(inside, default=-1)
            height.update(dict.fromkeys((block.name for block in unique.members), own))
            if unique.representative.name == root.name:
                continue
            waves += [[] for _ in range(own + 1 - len(waves))]
            waves[own].append(unique)
        return [wave for wave in waves if wave]

    def _inside(
        self, members: Sequence[str | Block], subgraph: Subgraph
    ) -> tuple[tuple[Layer, ...], list[int]]:
        """Make the layers of members of a block, numbered as in its closed graph."""
        forward = len(subgraph.forward)
        index = subgraph.graph.op_index

        def number(op: str) -> int:
            return index[op] + (index[op] >= forward)

        return self._layers(members, number)

    def _layers(
        self, members: Sequence[str | Block], number: Callable[[str], int]
    ) -> tuple[tuple[Layer, ...], list[int]]:
        """Make layers of the blocks among members, and list the forward ops in their order."""
        blocks = [member for member in members if isinstance(member, Block)]
        plans = [self._plans[block.name] for block in blocks]
        counts = [len(plan.subgraph.graph.ops) for plan in plans]
        layers: list[Layer] = []
        for member, plan, most in zip(
            blocks, plans, shares(counts, self._most_options), strict=True
        ):
            names = plan.unique.translation(member).ops
            numbers = [number(names[op.name]) for op in plan.subgraph.graph.ops]
            forward = len(plan.subgraph.forward)
            layers.append(
                Layer(
                    name=member.name,
                    forward=tuple(sorted(numbers[:forward])),
                    backward=tuple(sorted(numbers[forward:])),
                    options=tuple(
                        (
                            _renumbered(option.forward, numbers),
                            _renumbered(option.backward, numbers),
                        )
                        for option in choose(plan.options, most)
                    ),
                )
            )
        order = [
            number(op)
            for member in members
            for op in (member.op_names() if isinstance(member, Block) else (member,))
        ]
        return tuple(layers), order


def _renumbered(ops: Iterable[int], numbers: list[int]) -> tuple[int, ...]:
    return tuple(numbers[op] for op in ops)


def plan_block(
    planner: Planner,
    subgraph: Subgraph,
    layers: tuple[Layer, ...],
    order: list[int],
    seconds: float,
) -> tuple[BlockOption, ...]:
    """Plan one block for all its targets; at least storing everything is among the options."""
    started = time.perf_counter()
    closed = Wiring.of(close(subgraph))
    options, targets = targets_of(closed, started + seconds)
    if not subgraph.backward:
        return tuple(options[:1])
    for place, target in enumerate(targets):
        left = started + seconds - time.perf_counter()
        if left <= 0:
            break
        graph = close(subgraph, withheld_bytes=target.withheld_bytes)
        level = Level.of(Wiring.of(graph), layers, order)
        for sequence in planner(level, target.peak_bytes, left / (len(targets) - place)):
            option = read_option(closed, sequence)
            if option is not None:
                options.append(option)
    return choose(options, len(options))
