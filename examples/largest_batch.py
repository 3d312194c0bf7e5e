"""The largest batch within a budget, found without running anything, and trained with."""

import torch
from torch import Tensor, nn

import remat
from remat_graph import Graph
from remat_solvers import max_batch_size

BUDGET = 4 * 2**20  # bytes
OF_BATCH = 16


class Net(nn.Module):
    """Gives the loss, so that it is in the graph, too."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in "1234"]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def graph_of(batch: int) -> Graph:
    """Give the training graph of a batch, of a model without data."""
    with torch.device("meta"):
        model, x = Net(), torch.empty(batch, 64)
    return remat.plan(model, (x,), budget="1TiB", costs="estimate").graph


def main() -> None:
    graph, twice = graph_of(OF_BATCH), graph_of(2 * OF_BATCH)
    pairs = zip(graph.values, twice.values, strict=True)
    fixed = [value.name for value, other in pairs if value.size_bytes == other.size_bytes]
    largest = max_batch_size(
        graph, int(0.98 * BUDGET), of_batch=OF_BATCH, fixed=fixed, max_overhead=0.1, limit_seconds=3
    )
    print(f"largest batch at 10% more time: {largest.batch_size}")

    x = torch.randn(largest.batch_size, 64)
    model = Net()
    with remat.measure_peak() as plain:
        model(x).backward()
    model = remat.rematerialize(Net(), x, budget=BUDGET, limit_seconds=2)
    model(x).backward()
    print(model.plan)
    assert model.plan.measured_peak_bytes <= BUDGET < plain.peak_bytes


if __name__ == "__main__":
    main()
