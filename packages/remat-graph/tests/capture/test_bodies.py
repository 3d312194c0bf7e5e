"""A call that stands for several is judged, and known again, by its body."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from remat_graph.torch import Body, Call, TensorFacts, Variable, capture
from remat_graph.torch.kernels.packing import pack_mask
from remat_graph.torch.lowering import equivalence_of
from remat_graph.torch.recomputing import is_collective, may_run_again

aten = torch.ops.aten
CPU = torch.device("cpu")
FACTS = {name: TensorFacts((4, 8), (8, 1), 0, torch.float32, CPU, 128) for name in "ab"}


def calls_of(*targets, random=None, names="xyz", args=()):
    """A chain of calls, each of what the last one made."""
    return tuple(
        Call(target, (Variable(source), *args), {}, (made,), False, random)
        for target, source, made in zip(targets, names, names[1:], strict=False)
    )


def body_of(*targets, **more):
    calls = calls_of(*targets, **more)
    return Body((calls[0].reads[0],), calls, (calls[-1].results[0],))


def made_to_run(number):
    def fused(x):
        return x * number

    return fused


def call_of(body=None, target=None, reads="a"):
    return Call(target or made_to_run(1), (Variable(reads),), {}, ("b",), False, body=body)


def test_equal_bodies_are_one_class_whatever_their_variables_are_called():
    ours = call_of(body_of(aten.relu.default, aten.neg.default))
    other = call_of(body_of(aten.relu.default, aten.neg.default, names="pqr"))
    assert equivalence_of(ours, FACTS) == equivalence_of(other, FACTS)


@pytest.mark.parametrize(
    "other",
    [
        body_of(aten.neg.default, aten.relu.default),
        body_of(aten.relu.default),
        replace(body_of(aten.relu.default, aten.neg.default), outputs=("y",)),
        None,
    ],
    ids=["order", "part", "results", "none"],
)
def test_two_bodies_of_one_name_are_two_classes(other):
    ours = call_of(body_of(aten.relu.default, aten.neg.default))
    assert equivalence_of(ours, FACTS) != equivalence_of(call_of(other), FACTS)


def test_a_variable_of_a_body_is_no_number():
    call = Call(aten.add.Tensor, (Variable("x"), 0), {}, ("y",), False)
    twice = replace(call, args=(Variable("x"), Variable("x")))
    one, other = (call_of(Body(("x",), (each,), ("y",))) for each in (call, twice))
    assert equivalence_of(one, FACTS) != equivalence_of(other, FACTS)


def test_numbers_within_a_body_tell_it_from_others():
    one, other = (call_of(body_of(aten.mul.Scalar, args=(number,))) for number in (2.0, 3.0))
    assert equivalence_of(one, FACTS) != equivalence_of(other, FACTS)


def test_bodies_within_bodies_count():
    inner = (body_of(aten.relu.default), body_of(aten.neg.default))
    run = made_to_run(1)
    outer = [
        call_of(Body(("x",), (Call(run, (Variable("x"),), {}, ("y",), False, body=each),), ("y",)))
        for each in inner
    ]
    assert equivalence_of(outer[0], FACTS) != equivalence_of(outer[1], FACTS)


def test_functions_of_one_name_without_a_body_are_two_classes():
    one, other = (call_of(target=made_to_run(number)) for number in (1, 2))
    assert equivalence_of(one, FACTS) != equivalence_of(other, FACTS)
    assert equivalence_of(one, FACTS) == equivalence_of(one, FACTS)


def test_a_call_of_other_variables_keeps_its_body():
    call = call_of(body_of(aten.relu.default))
    assert call.of(["b"], ("a",)).body is call.body


@pytest.mark.parametrize(
    ("body", "again"),
    [
        (body_of(aten.relu.default, aten.neg.default), True),
        (body_of(aten.relu.default, aten.topk.default, args=(2,)), False),
        (body_of(aten.bernoulli.p, args=(0.5,), random=CPU), False),
        (body_of(pack_mask, args=([8, 1],)), True),
        (body_of(made_to_run(2)), False),
        (body_of(torch.ops._c10d_functional.all_reduce.default, args=("sum", "0")), False),
        (Body(("x",), (call_of(body_of(aten.topk.default, args=(2,)), reads="x"),), ("b",)), False),
    ],
    ids=["plain", "decides", "draws", "ours", "unknown", "communicates", "inner"],
)
def test_a_body_runs_again_if_all_within_does_and_nothing_is_drawn(body, again):
    assert may_run_again(made_to_run(1), body) is again


def test_a_function_without_a_body_runs_again_only_if_its_record_says_so():
    assert may_run_again(pack_mask)
    assert not may_run_again(made_to_run(1))
    assert not may_run_again(lambda x: x)


@pytest.mark.parametrize(
    "target",
    [
        aten.argmax.default, aten.cummax.default, aten.cummin.default, aten.max.dim,
        aten.median.dim, aten.mode.default, aten.nonzero.default, aten.sort.stable,
        aten.topk.default,
    ],
    ids=str,
)  # fmt: skip
def test_what_decides_is_not_run_again(target):
    """Another rounding of what it reads could decide otherwise."""
    assert not may_run_again(target)
    assert may_run_again(aten.amax.default)


def test_a_collective_within_a_body_is_seen():
    assert is_collective(
        made_to_run(1),
        body_of(torch.ops._c10d_functional.all_reduce.default, args=("sum", "0")),
    )
    assert not is_collective(made_to_run(1), body_of(aten.relu.default))


@pytest.mark.parametrize(
    ("inner", "again"), [((aten.relu.default,), True), ((aten.sort.default,), False)]
)
def test_an_op_of_a_graph_is_replayable_as_its_body_is(inner, again):
    program = capture(
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), (torch.rand(3, 4),)
    ).program
    op = next(op for op, call in program.calls.items() if call.target is aten.relu.default)
    call = replace(program.calls[op], target=made_to_run(1), body=body_of(*inner))
    changed = replace(program, calls={**program.calls, op: call})
    graph = changed.graph({}, {}, changed.loss_allowance)
    assert graph.ops[graph.op_index[op]].replayable is again
