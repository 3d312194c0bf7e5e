"""Where the operations of a captured graph come from."""

import inspect

import torch
from torch import nn

from remat_graph import Numerics, Provenance, Stage
from remat_graph.torch import capture, capture_region, note, source_of

X = torch.ones(2, 8, requires_grad=True)


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x):
        return x + Scale.apply(self.mlp(self.norm(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().sum()


def line_of(function, text):
    lines, first = inspect.getsourcelines(function)
    (offset,) = (i for i, line in enumerate(lines) if text in line)
    return source_of([(__file__, first + offset)])


def places(graph, stage):
    """Map modules to the source lines of their ops."""
    found = {}
    for op in graph.ops:
        if op.stage is stage and op.provenance is not None:
            found.setdefault(op.provenance.module, set()).add(op.provenance.source)
    return found


def test_ops_know_their_module_and_line():
    graph = capture(Model(), (X,), costs="estimate").graph
    block = line_of(Block.forward, "return")
    inner = {
        f"blocks.{i}.{name}": {block}
        for i in range(2)
        for name in ("norm", "mlp.0", "mlp.1", "mlp.2")
    }
    forward = places(graph, Stage.FORWARD)
    assert {name: forward.get(name) for name in inner} == inner
    assert forward[""] == {line_of(Model.forward, "square")}
    assert forward["blocks.1"] == {block, line_of(Scale.forward, "return")}
    assert [op.name for op in graph.ops if op.provenance is None] == ["loss"]


def test_a_backward_op_comes_from_where_its_forward_does():
    graph = capture(Model(), (X,), costs="estimate").graph
    assert places(graph, Stage.BACKWARD).keys() >= {"", "blocks.0.norm", "blocks.1.mlp.2"}
    twins = [op for op in graph.ops if op.twin is not None]
    assert len(twins) > 8
    for op in twins:
        assert op.provenance == graph.ops[graph.op_index[op.twin]].provenance, op


def test_a_sum_of_gradients_comes_from_the_last_of_them():
    ops = capture(Model(), (X,), costs="estimate").graph.ops
    sums = [op for op in ops if op.stage is Stage.BACKWARD and op.name.startswith("add")]
    assert [op.twin for op in sums] == [None, None]
    assert [op.provenance.module for op in sums] == ["blocks.1.norm", "blocks.0.norm"]


def test_alternatives_and_packing_come_from_what_they_are_for():
    found = capture(Model(), (X,), costs="estimate").with_alternatives(Numerics.LOSSY)
    added = [op for op in found.graph.ops if not op.owed]
    assert {op.optional for op in added} == {True, False}
    for op in added:
        if op.alternative_of is not None:
            origin = found.graph.ops[found.graph.op_index[op.alternative_of]]
            assert op.provenance == origin.provenance is not None
        assert op.provenance is not None


def test_a_traced_graph_tells_by_its_nodes():
    traced = torch.fx.symbolic_trace(lambda x: (x.sin().exp().sum(),))
    sine, exponential, _ = traced.graph.find_nodes(op="call_method", target="sin") + [
        node for node in traced.graph.nodes if node.target in ("exp", "sum")
    ]
    note(sine, Provenance("a", "a.py:1"))
    note(exponential, Provenance("b", "b.py:2"))
    graph = capture_region(traced, [X], costs="estimate").graph
    forward = [op.provenance for op in graph.ops if op.stage is Stage.FORWARD]
    assert forward == [Provenance("a", "a.py:1"), *2 * [Provenance("b", "b.py:2")]]
    assert graph.ops[-1].provenance == Provenance("a", "a.py:1")


def test_files_are_named_below_the_folder_they_are_imported_from(monkeypatch):
    frames = [(torch.nn.modules.linear.__file__, 3), ("/some/where/pack/age.py", 7)]
    assert source_of(frames) == "pack/age.py:7"
    monkeypatch.syspath_prepend("/other")
    assert source_of([("/other/a/b/c.py", 1), *frames]) == "a/b/c.py:1"
    assert source_of(frames[:1]) == ""
