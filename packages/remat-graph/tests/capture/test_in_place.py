"""What may run over what it reads gives the same bits, and takes nothing beside."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from remat_graph.torch import (
    SUMMED,
    WHOLE,
    Body,
    Call,
    Placement,
    Sliced,
    SlicedBody,
    TensorFacts,
    Variable,
    capture,
)
from remat_graph.torch.cost.memory import AllocationRecorder
from remat_graph.torch.kernels import cross_entropy, embedding, packing, unit_tangent
from remat_graph.torch.operators import OPERATORS

aten = torch.ops.aten
STRANGE = [0.0, -0.0, 1e-45, -1e-45, 0.5, -0.5, 6.0, 3.0, float("inf"), -float("inf")]
ARGUMENTS = {  # behind the gradient
    aten.elu_backward.default: lambda x: (1.5, 1.0, 1.0, False, x),
    aten.gelu_backward.default: lambda x: (x,),
    aten.hardshrink_backward.default: lambda x: (x, 0.5),
    aten.hardsigmoid_backward.default: lambda x: (x,),
    aten.hardtanh_backward.default: lambda x: (x, 0.0, 6.0),
    aten.leaky_relu_backward.default: lambda x: (x, 0.1, False),
    aten.sigmoid_backward.default: lambda x: (x,),
    aten.silu_backward.default: lambda x: (x,),
    aten.softplus_backward.default: lambda x: (x, 1.0, 20.0),
    aten.softshrink_backward.default: lambda x: (x, 0.5),
    aten.tanh_backward.default: lambda x: (x,),
    aten.threshold_backward.default: lambda x: (x, 0),
}
TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
OTHERS = {  # what else is read: numbers, and tensors, of which some have no dimensions
    aten.relu.default: [()],
    aten.hardtanh.default: [(), (-0.37, 1.3)],
    aten.leaky_relu.default: [(), (0.37,)],
    aten.sigmoid.default: [()],
    aten.tanh.default: [()],
    aten.neg.default: [()],
    **dict.fromkeys((aten.mul.Scalar, aten.div.Scalar), ((0.37,), (3,))),
    **dict.fromkeys(
        (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor),
        ((0.37,), (torch.tensor(0.37),), (torch.tensor(0.37, dtype=torch.float64),)),
    ),
}

PLACES = torch.tensor([4000, 3, 3, 0, 17, 4000])
VALUES = torch.tensor([1.5, -0.37, 1e-3, 6.0, -0.0, 2.25])
MASK = torch.arange(4099) % 3 == 0
ASSIGNED = {  # what is behind the tensor that some elements are written to
    aten.index_add.default: lambda values: (0, PLACES, values),
    aten.index_copy.default: lambda values: (0, PLACES[2:], values[2:]),
    aten.index_put.default: lambda values: ([PLACES], values, True),
    aten._unsafe_index_put.default: lambda values: ([PLACES], values, True),
    aten.masked_fill.Scalar: lambda values: (MASK, 0.37),
    aten.masked_fill.Tensor: lambda values: (MASK, values[1]),
    aten.masked_scatter.default: lambda values: (MASK, values.repeat(300)),
    aten.put.default: lambda values: (PLACES, values, True),
    aten.scatter.src: lambda values: (0, PLACES[2:], values[2:]),
    aten.scatter.value: lambda values: (0, PLACES, 0.37),
    aten.scatter_add.default: lambda values: (0, PLACES, values),
}


def same(one, other):
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.itemsize]
    return one.dtype == other.dtype and torch.equal(one.view(bits), other.view(bits))


def images(layout):
    x = torch.randn(3, 5, 7, 11).mul_(4)
    x.view(-1)[: len(STRANGE)] = torch.tensor(STRANGE)
    return x.to(memory_format=layout)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("operator", [*OTHERS], ids=str)
def test_a_function_over_its_input_gives_the_same_bits(operator, dtype):
    x = torch.randn(4099).to(dtype)
    others = OTHERS[operator]
    if operator._overloadname == "Tensor":
        others = [*others, (torch.randn(4099).to(dtype),), (torch.randn(1).to(dtype),)]
    for rest in others:
        expected = operator(x, *rest)
        found = OPERATORS[operator].in_place(x.clone(), *rest)
        assert same(found, expected), rest


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("operator", [*ASSIGNED], ids=str)
def test_what_writes_some_elements_in_place_gives_the_same_bits(operator, dtype):
    x, rest = torch.randn(4099).to(dtype), ASSIGNED[operator](VALUES.to(dtype))
    with AllocationRecorder(x.device) as apart:
        expected = operator(x, *rest)
    with AllocationRecorder(x.device) as over:
        OPERATORS[operator].in_place(x, *rest)
    assert same(x, expected)
    assert over.requested_bytes <= apart.requested_bytes - x.nbytes


@pytest.mark.parametrize("dtype", TYPES[:3], ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("operator", [*ARGUMENTS], ids=str)
def test_a_pointwise_backward_over_its_gradient_gives_the_same_bits(operator, layout, dtype):
    read, grad = images(layout).to(dtype), images(layout).mul_(0.3).to(dtype)
    arguments = ARGUMENTS[operator](read)
    expected = operator(grad, *arguments)
    with AllocationRecorder(grad.device) as recorder:
        OPERATORS[operator].in_place(grad, *arguments)
    assert recorder.requested_bytes == 0
    assert same(grad, expected)


@pytest.mark.parametrize("planned", [torch.contiguous_format, torch.channels_last], ids=str)
def test_a_packed_backward_over_its_gradient_gives_the_same_bits(planned):
    read, grad = images(planned), images(torch.contiguous_format)
    packed = packing.pack_above(read, read.stride(), 0)
    arguments = (packed, read.shape, read.stride())
    expected = packing.backward_of_kept(grad, *arguments)
    for given in (grad.clone(), grad.to(memory_format=planned)):
        OPERATORS[packing.backward_of_kept].in_place(given, *arguments)
        assert torch.equal(given, expected)
    with AllocationRecorder(grad.device) as recorder:
        OPERATORS[packing.backward_of_kept].in_place(expected, *arguments)
    assert recorder.requested_bytes <= packing.mask_workspace(packed.nbytes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("output", ["rows", "sums"])
@pytest.mark.parametrize("factor", [1.0, -2.5, float("inf"), float("nan")])
def test_a_gradient_scaled_in_place_has_the_same_bits(factor, output, dtype):
    x, tangent = torch.randn(6, 4).to(dtype), torch.tensor(factor, dtype=dtype)
    rows = Call(aten.mul.Tensor, (Variable("x"), Variable("t")), {}, ("rows",), False)
    sums = Call(aten.sum.dim_IntList, (Variable("rows"), [0]), {}, ("sums",), False)
    body = Body(("x", "t"), (rows, sums), (output,))
    ways = Placement((Sliced(0), WHOLE), (Sliced(0),)), Placement((Sliced(0),), (SUMMED,))
    made = {"x": x, "t": tangent, "rows": x, "sums": x.sum(0)}
    facts = {name: TensorFacts.of(tensor) for name, tensor in made.items()}
    backward, gradient = SlicedBody(body, ways, 6, facts), made[output].clone()
    expected = unit_tangent.scaled(gradient, tangent, backward, 3, x, tangent)
    found = OPERATORS[unit_tangent.scaled].in_place(gradient, tangent, backward, 3, x, tangent)
    assert found is gradient
    assert same(found, expected)


def test_all_that_may_overwrite_is_tried_here():
    assert {target for target, operator in OPERATORS.items() if operator.in_place} == {
        *OTHERS,
        *ARGUMENTS,
        *ASSIGNED,
        packing.backward_of_kept,
        unit_tangent.scaled,
        cross_entropy.cross_entropy_backward,  # in test_cross_entropy.py
        embedding.add_embedding_gradient,  # in test_embeddings.py
    }


def test_a_slice_writes_over_what_ends_in_it():
    """Of five tensors two are there at once: the third is read once more, through a view."""
    x, y = torch.randn(60, 50), torch.randn(60, 50)
    names = ("x", "y", "a", "b", "c", "d", "e", "f")
    calls = [
        Call(aten.add.Tensor, (Variable("x"), Variable("y")), {}, ("a",), False),
        Call(aten.relu.default, (Variable("a"),), {}, ("b",), False),
        Call(aten.tanh.default, (Variable("b"),), {}, ("c",), False),
        Call(aten.alias.default, (Variable("c"),), {}, ("d",), False),
        Call(aten.neg.default, (Variable("c"),), {}, ("e",), False),
        Call(aten.mul.Tensor, (Variable("e"), Variable("d")), {}, ("f",), False),
    ]
    rows = Sliced(0)
    ways = tuple(Placement((rows,) * len(call.reads), (rows,)) for call in calls)
    facts = {name: TensorFacts.of(x) for name in names}
    body = SlicedBody(Body(("x", "y"), tuple(calls), ("f",)), ways, 60, facts)
    expected = (x + y).relu().tanh()
    expected = -expected * expected
    assert torch.equal(body.run((x, y), body.bounds(6))[0], expected)
    with AllocationRecorder(x.device) as recorder:
        body.run((x, y), body.bounds(6))
    assert body.workspace_bytes(6) == 2 * x.nbytes // 6
    assert recorder.requested_bytes == x.nbytes + body.workspace_bytes(6)


def test_a_gradient_is_written_over_unless_it_came_from_outside():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Hardtanh())
    graph = capture(model, (torch.randn(4, 8),), costs="estimate").graph
    found = {op.name: bool(op.overwrites) for op in graph.ops if "backward" in op.name}
    assert found == {"hardtanh_backward": False, "threshold_backward": True}


READERS = {
    "lookup": lambda x: x[:, torch.arange(8, 0, -1, device=x.device)],
    "gather": lambda x: x.gather(1, x.argsort(1)),
    "index select": lambda x: x.index_select(1, x[0].argsort()),
    "maximum": lambda x: x.max(1)[0],
    "sort": lambda x: x.sort(1)[0],
    "take": lambda x: x.take(torch.arange(9, device=x.device)),
}


@pytest.mark.parametrize("name", READERS)
def test_a_backward_writes_into_its_zeros(name):
    class Reads(nn.Module):
        def forward(self, x):
            return READERS[name](x.sin())

    x = torch.randn(8, 64, requires_grad=True)
    graph = capture(Reads(), (x,), costs="estimate").graph
    (op,) = (op for op in graph.ops if any("zeros" in value for value in op.inputs))
    assert [read for read, _ in op.overwrites] == [op.inputs[0]]


def test_what_is_looked_up_by_itself_is_not_written_over():
    class Own(nn.Module):
        def forward(self, x):
            numbers = x.argsort(0)
            return x * numbers.index_put((numbers.view(-1),), numbers.new_zeros(()))

    graph = capture(Own(), (torch.randn(64, requires_grad=True),), costs="estimate").graph
    (op,) = (op for op in graph.ops if op.name.startswith("index_put"))
    assert not op.overwrites


def test_what_is_conjugate_by_a_bit_is_not_written_over():
    """The result would have the bit, too, and fail where it is viewed as real numbers."""

    class Lazy(nn.Module):
        def forward(self, x):
            return (x @ x).conj() * 3

    x = torch.randn(8, 8, dtype=torch.complex64, requires_grad=True)
    graph = capture(Lazy(), (x,), costs="estimate").graph
    assert not any(op.overwrites for op in graph.ops if op.name == "mul")


class Tied(nn.Module):
    """An embedding, and a head with its weight."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 8)

    def forward(self, ids):
        return functional.linear(torch.tanh(self.words(ids)), self.words.weight).logsumexp(-1).sum()


def test_both_gradients_of_a_tied_weight_are_summed_in_place():
    torch.manual_seed(0)
    model, ids = Tied(), torch.randint(50, (2, 6))
    captured = capture(model, (ids,), {}, costs="estimate")
    (gradient,) = captured.program.gradients.values()
    of_head = captured.program.calls[gradient].reads[0]
    assert captured.program.overwrites[gradient] == ((of_head, gradient),)
    (op,) = (op for op in captured.graph.ops if gradient in op.outputs)
    assert op.overwrites == ((captured.program.storage[of_head], gradient),)
