"""Which ops are in a group, and that a program of groups computes what it did before."""

import itertools

import pytest
import torch
from graph_cases.groups import Gelu, groups_of, in_groups, program_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from remat_graph import Numerics
from remat_graph.torch import capture
from remat_graph.torch.fusing.groups import find_groups
from remat_graph.torch.fusing.program import kernels_of

aten = torch.ops.aten


def test_groups_end_at_products():
    program = program_of(Gelu(), torch.randn(8, 16))
    for group in groups_of(program):
        targets = {program.calls[op].target for op in group.ops}
        assert targets.isdisjoint({aten.mm.default, aten.addmm.default})
        assert len({op in program.backward_ops for op in group.ops}) == 1
    ops = list(itertools.chain.from_iterable(group.ops for group in find_groups(program)))
    assert len(ops) == len(set(ops))


def test_what_only_backward_groups_read_is_made_again_there():
    program = program_of(Gelu(), torch.randn(8, 16))
    new = in_groups(program)
    forward = {
        v for op, call in new.calls.items() if op not in new.backward_ops for v in call.results
    }
    assert not any("tanh" in str(name) for name in forward)
    assert any(group.again for group in groups_of(program))
    # the activation of each layer is given out, and what it is made of, but nothing between
    large = [name for name in forward if name and new.facts[name].storage_bytes == 8 * 16 * 4]
    assert len(large) <= 4 * 2 + 3


def test_what_products_read_behind_is_given_out_again():
    captured = capture(Gelu(), (torch.randn(8, 16),), costs="estimate")
    grouped = captured.with_alternatives(Numerics.ROUNDING, laid_out=()).in_groups()
    again = grouped.giving_again()
    assert again.gives_again
    assert again.giving_again() is again
    assert again.variant(frozenset()).gives_again
    assert not again.without_groups().gives_again
    new = [name for name in again.program.storage if name not in grouped.program.storage]
    assert len(new) == 2 * 2  # the norm and the activation of each layer
    behind = again.program.backward_ops
    readers = again.program.readers()
    assert all(readers[name] <= behind for name in new)
    assert len(again.graph.ops) == len(grouped.graph.ops)


def test_groups_that_give_nothing_again_are_as_they_were():
    captured = capture(nn.Linear(4, 4), (torch.randn(8, 4),), costs="estimate")
    grouped = captured.with_alternatives(Numerics.ROUNDING, laid_out=()).in_groups()
    assert grouped.giving_again() is grouped
    assert captured.giving_again() is captured


def test_equal_layers_have_equal_kernels():
    three, four = (
        kernels_of(in_groups(program_of(Gelu(depth=depth), torch.randn(8, 16)))) for depth in (3, 4)
    )
    assert three.keys() == four.keys()


def test_ops_left_out_stay_as_they_are():
    program = program_of(Gelu(), torch.randn(8, 16))
    everything = set(program.calls)
    assert in_groups(program, everything).calls == program.calls


def test_a_graph_of_groups_is_legal_and_smaller():
    captured = capture(Gelu(), (torch.randn(8, 16),), costs="estimate")
    grouped = captured.with_alternatives(Numerics.ROUNDING, laid_out=()).in_groups()
    assert len(grouped.graph.ops) < len(captured.graph.ops)
    assert (grouped.unfused, grouped.left_out) == ((), ())
    place = next(at for at, op in enumerate(captured.program.calls) if "layer_norm" in op)
    others = captured.with_alternatives(Numerics.ROUNDING, laid_out=()).in_groups([place])
    assert others.left_out == (list(captured.program.calls)[place],)
    assert grouped.without_groups().unfused is None
    assert grouped.variant(frozenset()).unfused == ()


def test_groups_round_otherwise():
    captured = capture(Gelu(), (torch.randn(8, 16),), costs="estimate")
    with pytest.raises(Exception, match="round otherwise"):
        captured.in_groups()
    with pytest.raises(Exception, match="round otherwise"):
        _ = captured.with_alternatives(Numerics.BITWISE).group_kernels


UNARY = [torch.tanh, torch.sigmoid, torch.relu, lambda x: x * 2 + 1, lambda x: x.square()]


BINARY = [torch.add, torch.mul, torch.sub, torch.maximum]


class Random(nn.Module):
    """A random graph of pointwise functions, norms, sums and products."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps
        self.weight = nn.Parameter(torch.randn(6, 6) / 3)

    def forward(self, x):
        values = [x, torch.tanh(x)]
        for kind, one, two in self.steps:
            a, b = values[one % len(values)], values[two % len(values)]
            if kind < len(UNARY):
                values.append(UNARY[kind](a))
            elif kind < len(UNARY) + len(BINARY):
                values.append(BINARY[kind - len(UNARY)](a, b))
            elif kind == 9:
                values.append(a @ self.weight)
            elif kind == 10:
                values.append(torch.softmax(a, -1))
            else:
                values.append(a - a.mean(-1, keepdim=True) + b.t().contiguous().t())
        return sum(value.sum() for value in values[2:]) + values[-1].square().sum()


@settings(max_examples=8, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 11), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=14
    )
)
def test_groups_of_random_programs_compute_the_same(steps):
    torch.manual_seed(0)
    model, x = Random(steps).double(), torch.randn(6, 6, dtype=torch.double, requires_grad=True)
    program = program_of(model, x)
    tensors = {"x": x, "weight": model.weight}
    for again in (False, True):
        assert_equal_steps(program, in_groups(program, give_again=again), model, tensors)


def assert_equal_steps(program, new, model, tensors):
    plain, grouped = (run(each, model, tensors["x"]) for each in (program, new))
    for one, two in zip(plain, grouped, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


def run(program, model, x):
    """Run a program by its order, call by call; give what is returned and the gradients."""
    there = {}
    for item in program.inputs:
        there[item.variable] = (
            x if item.kind == "input" else dict(model.named_parameters())[item.key]
        )
    there.update(program.constants)
    there = {name: item.detach() for name, item in there.items()}

    def read(name):
        if name not in there:
            call = program.views[name]
            take(call)
        return there[name]

    def fill(item):
        if hasattr(item, "name") and type(item).__name__ == "Variable":
            return read(item.name)
        if isinstance(item, (list, tuple)):
            return [fill(part) for part in item]
        return item

    def take(call):
        result = call.target(*map(fill, call.args), **{k: fill(v) for k, v in call.kwargs.items()})
        parts = result if call.sequence else [result]
        there.update({n: p for n, p in zip(call.results, parts, strict=True) if n is not None})

    for op in program.order:
        if op == "loss":
            for name in program.tangents:
                there[name] = torch.ones_like(read(program.returned[program.tangents[name]]))
        elif op in program.calls:
            take(program.calls[op])
    return [read(name) for name in (*program.returned, *program.gradients.values())]
