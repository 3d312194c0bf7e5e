"""What operators make of fake tensors is what they made of others that look the same."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

from remat_graph.torch.repeats.fake_outputs import FakeOutputs, looks_of

aten = torch.ops.aten
CALLS = {
    "a new tensor": (aten.add.Tensor, (3, 4), lambda x: (x, 2)),
    "a view": (aten.transpose.int, (3, 4), lambda x: (x, 0, 1)),
    "a part": (aten.slice.Tensor, (3, 4), lambda x: (x, 1, 1, 3)),
    "another type": (aten._to_copy.default, (3, 4), lambda x: (x,)),
}


def run_twice(func, make, arguments, outputs):
    """Run an operator on two tensors that look the same; say how often it was run."""
    ran, made = [], []
    for _ in range(2):
        x = make()
        args = arguments(x)
        kwargs = {"dtype": torch.float16} if func is aten._to_copy.default else {}

        def run(args=args, kwargs=kwargs):
            ran.append(func)
            return func(*args, **kwargs)

        key = (func, looks_of(x), args[1:])
        made.append((x, outputs.run(func, key, [x], run)))
    return len(ran), made


@pytest.mark.parametrize("name", CALLS)
def test_what_is_known_is_made_again(name):
    func, shape, arguments = CALLS[name]
    with FakeTensorMode():
        ran, made = run_twice(func, lambda: torch.zeros(shape), arguments, FakeOutputs())
    assert ran == 1
    (x, first), (y, second) = made
    assert first is not second
    assert looks_of(first) == looks_of(second)
    shared = [a.untyped_storage()._cdata == b.untyped_storage()._cdata for a, b in
              ((x, first), (y, second))]  # fmt: skip
    assert shared == [name in ("a view", "a part")] * 2


def test_operators_that_write_are_run():
    with FakeTensorMode():
        ran, made = run_twice(
            aten.add_.Tensor, lambda: torch.zeros(3), lambda x: (x, 1), FakeOutputs()
        )
    assert ran == 2
    assert all(x is result for x, result in made)


def test_tensors_whose_data_is_known_are_run():
    outputs, values = FakeOutputs(), iter([3, 5])
    with FakeTensorMode():
        ran, made = run_twice(
            aten.add.Tensor, lambda: torch.tensor(next(values)), lambda x: (x, 1), outputs
        )
    assert ran == 2
    assert [result.item() for _, result in made] == [4, 6]


def test_several_are_made_again_each_in_a_storage_of_its_own():
    with FakeTensorMode():
        ran, made = run_twice(
            aten.var_mean.correction, lambda: torch.zeros(3, 4), lambda x: (x, (1,)), FakeOutputs()
        )
    assert ran == 1
    (_, first), (_, second) = made
    assert list(map(looks_of, first)) == list(map(looks_of, second))
    assert len({part.untyped_storage()._cdata for part in (*first, *second)}) == 4


def test_what_reads_no_tensor_is_made_again():
    outputs, ran = FakeOutputs(), []

    def run():
        ran.append(1)
        return aten.scalar_tensor.default(2.0)

    with FakeTensorMode():
        key = (aten.scalar_tensor.default, float, 2.0)
        first, second = (outputs.run(key[0], key, [], run) for _ in range(2))
    assert len(ran) == 1
    assert looks_of(first) == looks_of(second)
    assert first.untyped_storage()._cdata != second.untyped_storage()._cdata


def test_a_list_of_views_is_run():
    with FakeTensorMode():
        ran, _ = run_twice(
            aten.split.Tensor, lambda: torch.zeros(4), lambda x: (x, 2), FakeOutputs()
        )
    assert ran == 2
