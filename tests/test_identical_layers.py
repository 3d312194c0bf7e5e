"""From a module to its unique blocks: equal layers are cut alike, found, and scheduled once."""

import pytest
import torch

import remat
from remat_graph import Block, Compute, Free, Schedule, simulate
from remat_graph.torch import capture
from remat_graph.torch.capturing import trace as tracing
from remat_partition import partition
from zoo import gpt2


@pytest.fixture(scope="module")
def graphs():
    """GPT-2 with 4 and with 8 layers."""
    examples = [gpt2.make("gpt2", (layers, 16, 2, 32, 2, 8)) for layers in (4, 8)]
    return [capture(e.model, e.args, e.kwargs, costs="estimate").graph for e in examples]


@pytest.fixture(scope="module", params=["h-partition", "repeats"])
def cut(request, graphs):
    bounds = {"max_top_ops": 5, "max_block_ops": 10}  # small enough for whole levels in both
    return [partition(graph, partitioner=request.param, **bounds) for graph in graphs]


def lowest(hierarchy):
    """The classes of the blocks that hold no blocks."""
    return {
        unique.hash: unique
        for unique in hierarchy.unique_blocks
        if not any(isinstance(member, Block) for member in unique.representative.members)
    }


@pytest.mark.sweep
def test_more_layers_make_no_more_kinds_of_lowest_blocks(cut):
    few, many = map(lowest, cut)
    assert many.keys() <= few.keys()
    assert len(many) < sum(len(unique.members) for unique in many.values()) / 2
    repeated = [key for key in many if len(many[key].members) > 1]
    assert all(len(many[key].members) >= len(few[key].members) + 4 for key in repeated)


def keeping_little(graph):
    """Compute in order, and free all that nothing later reads."""
    last = {v: max(readers, default=-1) for v, readers in graph.consumers.items()}
    steps = []
    for i, op in enumerate(graph.ops):
        steps.append(Compute(op.name))
        done = [v for v in (*op.inputs, *op.outputs) if last[v] <= i]
        steps += [Free(v) for v in done if v not in graph.results | graph.resident]
    return Schedule(tuple(steps))


@pytest.mark.sweep
def test_a_schedule_of_one_block_is_one_for_all_of_its_class(cut):
    hierarchy = cut[1]
    translated = 0
    for unique in hierarchy.unique_blocks:
        graph = hierarchy.subgraph(unique.representative).graph
        schedule = keeping_little(graph)
        expected = simulate(graph, schedule)
        for member in unique.members[1:]:
            own = hierarchy.subgraph(member).graph
            found = simulate(own, unique.translation(member).schedule(schedule))
            assert found == expected
            translated += 1
    assert translated > len(hierarchy.unique_blocks)


@pytest.mark.sweep
def test_a_model_of_which_few_layers_were_traced_trains_as_in_eager(monkeypatch):
    rows = []
    shortened = tracing.shortened
    monkeypatch.setattr(tracing, "shortened", lambda *a: rows.append(shortened(*a)) or rows[-1])
    other = gpt2.make("gpt2", (1, 24, 2, 32, 2, 8))  # whose widths TorchDynamo remembers
    remat.rematerialize(other.model, other.args, other.kwargs, budget="1GiB")
    rows.clear()
    example = gpt2.make("gpt2", (10, 16, 2, 32, 2, 8), dropout=0.3)
    plain = example.model
    planned = remat.rematerialize(
        plain, example.args, example.kwargs, budget=0.6, limit_seconds=0.1
    )
    ((_, repeats),) = rows
    assert [len(repeat.blocks) >= 8 for repeat in repeats] == [True]
    results = []
    for model in (planned, plain):
        torch.manual_seed(3)
        plain.zero_grad()
        loss = model(*example.args, **example.kwargs).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in plain.parameters())])
    assert all(map(torch.equal, *results))
    assert planned.plan.predicted_overhead > 0  # something is computed again
