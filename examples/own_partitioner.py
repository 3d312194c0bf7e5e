"""A partitioner of one's own: checked, and used by a solver that cuts first."""

import copy
from dataclasses import dataclass

import torch
from torch import nn

import remat
from remat_graph import Block, Graph, Hierarchy
from remat_partition.testing import check_partitioner


@dataclass(frozen=True)
class EqualParts:
    """Blocks of as many consecutive operations each, and blocks of these, up to the root."""

    name = "equal-parts"

    members: int = 6

    def partition(self, graph: Graph) -> Hierarchy:
        parts: list[str | Block] = [op.name for op in graph.ops[: graph.boundary_index]]
        while len(parts) > self.members:
            cuts = range(0, len(parts), self.members)
            parts = [self.block(tuple(parts[at : at + self.members])) for at in cuts]
        return Hierarchy(graph, Block("root", tuple(parts)))

    def block(self, members: tuple[str | Block, ...]) -> Block:
        first = members[0]
        name = first.name if isinstance(first, Block) else first
        return Block(f"{len(members)} from {name}", members)


def main() -> None:
    print(check_partitioner(EqualParts))
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(4)]
    plain, x = nn.Sequential(*layers), torch.randn(512, 64)
    model = remat.rematerialize(
        copy.deepcopy(plain), x, budget=0.7, limit_seconds=1,
        solver="h-ilp", partitioner=EqualParts(members=5),
    )  # fmt: skip
    print(model.plan)
    for each in (plain, model):
        each(x).square().mean().backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(ours.grad, theirs.grad) for ours, theirs in pairs)
    assert model.plan.measured_peak_bytes <= model.plan.budget_bytes


if __name__ == "__main__":
    main()
