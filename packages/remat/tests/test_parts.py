"""Cutting a graph of TorchDynamo into parts that give what it gives."""

import torch

from remat.dynamo.parts import cut_at


def graph_of(function, *inputs):
    graphs = []
    torch._dynamo.reset()
    torch.compile(function, backend=lambda graph, _: graphs.append(graph) or graph, dynamic=True)(
        *inputs
    )
    return graphs[0]


def test_parts_of_a_graph_give_what_it_gives():
    def function(x, scale):
        a = x * scale
        left, right = a.split(2, 1)
        b = left @ right.t() + x.shape[0]
        c = b.exp()
        c.add_(1)
        return a, c, (b * c).view(x.shape[0] * 3)

    inputs = torch.rand(3, 4), torch.tensor(2.0)
    graph = graph_of(function, *inputs)
    placeholders = [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]
    given = iter(inputs)
    flat = [3 if isinstance(item, torch.SymInt) else next(given) for item in placeholders]
    expected = graph(*flat)
    for asked_for, count in (([0], 2), ([1], 2), ([0, 1], 3), ([1, 2], 2), ([2], 0), ([], 0)):
        parts = cut_at(graph, asked_for)
        assert (0 if parts is None else len(parts.parts)) == count
        if parts is not None:
            got = parts.run([part.graph for part in parts.parts], flat)
            assert all(a is b or torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_a_graph_is_not_cut_within_a_context_nor_before_a_change_in_place():
    def function(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            a = x * 2
            b = a.sin()
        c = b.cos()
        c[0].add_(1)
        d = c * 3
        c.mul_(2)
        return a, c, d, c + d

    graph = graph_of(function, torch.rand(3, 4))
    (first, second) = (cut_at(graph, [at]).parts for at in (0, 1))
    assert [node.name for node in first[0].outputs] == ["a", "b"]
    assert [node.name for node in second[0].outputs] == ["a", "c", "d"]
