"""The gradient of an embedding is added to another one of its table: eager's bits, no table."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from remat_graph.torch import capture
from remat_graph.torch.calls import Call, TensorFacts, Variable
from remat_graph.torch.kernels.embedding import (
    add_embedding_gradient,
    add_embedding_gradient_over,
    workspace_of_rows,
)
from remat_graph.torch.operators import operator_of

aten = torch.ops.aten
BITS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16}
WORDS, WIDTH = 30, 4


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_bits_are_those_of_the_sum_of_both(data):
    """Signs of zeros, too: eager adds zeros to all rows that were not looked up."""
    draw = data.draw
    dtype = draw(st.sampled_from(sorted(BITS, key=str)))
    shape = draw(st.sampled_from([(0,), (1,), (7,), (3, 5), (29,), (30,), (2, 3, 9)]))
    words = draw(st.sampled_from([2, 9, WORDS]))
    padding, by_frequency = draw(st.sampled_from([-1, 0, 1])), draw(st.booleans())
    torch.manual_seed(draw(st.integers(0, 10**6)))
    indices = torch.randint(
        0, words, shape, dtype=draw(st.sampled_from([torch.int32, torch.int64]))
    )
    grad, total = torch.randn(*shape, WIDTH).to(dtype), torch.randn(WORDS, WIDTH).to(dtype)
    grad[torch.rand(grad.shape) < 0.2] = -0.0
    total[torch.rand(total.shape) < 0.2] = -0.0
    settings = padding, by_frequency
    expected = total + aten.embedding_dense_backward(grad, indices, WORDS, *settings)
    before = total.clone()
    made = add_embedding_gradient(total, grad, indices, *settings)
    assert torch.equal(total.view(BITS[dtype]), before.view(BITS[dtype]))
    over = add_embedding_gradient_over(total, grad, indices, *settings)
    assert over is total
    for each in (made, over):
        assert torch.equal(each.view(BITS[dtype]), expected.view(BITS[dtype]))


def of(shape, dtype=torch.float32):
    return TensorFacts.of(torch.empty(shape, dtype=dtype, device="meta"))


def test_it_is_known_to_take_rows_for_the_indices_but_no_table():
    args = (Variable("total"), Variable("grad"), Variable("indices"), -1, False)
    call = Call(add_embedding_gradient, args, {}, ("sum",), sequence=False)
    facts = {"total": of((50_000, 64)), "grad": of((2, 100, 64))}
    few = workspace_of_rows(facts | {"indices": of((2, 100), torch.int64)}, call)
    many = workspace_of_rows(facts | {"indices": of((2, 400_000), torch.int64)}, call)
    expanded = TensorFacts.of(torch.empty(2, 1, 64, device="meta").expand(2, 100, 64))
    copied = workspace_of_rows(
        facts | {"indices": of((2, 100), torch.int64), "grad": expanded}, call
    )
    assert 200 * 64 * 4 < few < 300 * 64 * 4
    assert copied == few + 200 * 64 * 4
    turned = TensorFacts.of(torch.empty(100, 2, 64, device="meta").transpose(0, 1))
    assert (
        workspace_of_rows(facts | {"indices": of((2, 100), torch.int64), "grad": turned}, call)
        == copied
    )
    assert many > 50_000 * 64 * 4
    assert operator_of(add_embedding_gradient).workspace is workspace_of_rows


class Tied(nn.Module):
    """Reads its table as often as told, and shares it with its head."""

    def __init__(self, times=1, **options):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.times = nn.Embedding(WORDS, WIDTH, **options), times
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, indices):
        x = sum(self.words(indices + at) * (at + 1) for at in range(self.times))
        return self.head(x.tanh()).square().mean()


def targets(model):
    indices = torch.arange(12).view(3, 4)
    program = capture(model, (indices,), costs="estimate").program
    return [call.target for call in program.calls.values()], program


@pytest.mark.parametrize("times", [1, 3])
def test_the_gradient_of_a_table_that_is_the_head_too_is_made_once(times):
    """Of three lookups eager sums the gradients before that of the head comes to them."""
    found, program = targets(Tied(times))
    assert found.count(add_embedding_gradient) == max(1, times - 1)
    assert found.count(aten.embedding_dense_backward.default) == (times > 1)
    for op, call in program.calls.items():
        if call.target is add_embedding_gradient:
            assert program.overwrites[op] == ((call.args[0].name, call.results[0]),)
            assert call.workspace_bytes > 12 * WIDTH * 4


def test_a_sum_with_what_lies_otherwise_stays():
    model = Tied()
    model.forward = lambda indices: model.words(indices).sum() + model.head.weight.sum()
    found, _ = targets(model)
    assert aten.embedding_dense_backward.default in found
    assert add_embedding_gradient not in found
