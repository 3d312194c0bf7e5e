"""Groups of any size: compiled once for the sizes that a compiler treats alike."""

import io
import pickle

import pytest
import torch

from remat_graph.torch import CaptureError
from remat_graph.torch.calls import Body, Call, TensorFacts, Variable
from remat_graph.torch.fusing import beside
from remat_graph.torch.fusing.compiling import compile_kernels
from remat_graph.torch.fusing.kernel import Kernel, kernel_of
from remat_graph.torch.fusing.sized_code import SizedCode

aten = torch.ops.aten


def rows_summed(rows=71, wide=128):
    """A group that sums rows, as one of any number of them."""
    calls = (
        Call(aten.relu.default, (Variable("x"),), {}, ("positive",), sequence=False),
        Call(aten.expand.default, (Variable("bias"), [rows, wide]), {}, ("wide",), sequence=False),
        Call(aten.add.Tensor, (Variable("positive"), Variable("wide")), {}, ("y",), sequence=False),
        Call(aten.sum.dim_IntList, (Variable("y"), [0]), {}, ("sum",), sequence=False),
    )
    body = Body(("x", "bias"), calls, ("y", "sum"))
    facts = {
        name: TensorFacts.of(torch.empty(shape))
        for name, shape in {
            "x": (rows, wide), "bias": (wide,), "positive": (rows, wide), "y": (rows, wide),
            "sum": (wide,),
        }.items()
    }  # fmt: skip
    facts["wide"] = TensorFacts.of(torch.empty(wide).expand(rows, wide))
    return body, facts


def test_code_of_any_size_is_for_sizes_that_compilers_treat_alike():
    """A sum over more than 4,096 rows is another for TorchInductor."""
    body, facts = rows_summed()
    kernel = kernel_of(body, facts)
    body, facts = kernel.body, kernel.facts
    sized = SizedCode.of(body, facts, {71: "rows"}, {"rows": "rows"}, {"rows": 71})
    for rows, count in ((71, 1), (90, 1), (5000, 2), (6000, 2), (33, 2)):
        other = Kernel.of_size(kernel, sized, (rows,))
        assert other.facts["v0"].shape == (rows, 128)
        assert other == kernel_of(*rows_summed(rows))
        assert (other == kernel) == (rows == 71)
        compile_kernels([other])
        assert len(sized.codes) == count
        assert other.compiled is not None
        x, bias = torch.randn(rows, 128), torch.randn(128)
        for one, two in zip(other.interpreted([x, bias]), other.run([x, bias]), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-3)
    sized.failure = "of other sizes"
    other = Kernel.of_size(kernel, sized, (72,))
    assert (other.compiled is not None, other.failure) == (True, None)
    assert Kernel.of_size(kernel, sized, (1,)).failure == "of other sizes"
    assert sized.code_at((1,)) is None  # which is no size for a compiler
    job = io.BytesIO()
    beside._Pickler(job).dump(sized)
    again = pickle.loads(job.getvalue())
    assert (again.key, again.codes) == (sized.key, [])
    assert again.body_at((9,)) == sized.body_at((9,))


def test_a_number_that_is_no_size_is_in_no_group_of_any_size():
    body, facts = rows_summed()
    with pytest.raises(CaptureError, match="no size"):
        SizedCode.of(body, facts, {71: "rows"}, {}, {"rows": 71})
    assert SizedCode.of(body, facts, {72: "rows"}, {"rows": "rows"}, {"rows": 72}) is None


def test_a_group_of_which_the_compiler_decides_a_size_runs_op_by_op():
    calls = (
        Call(aten.relu.default, (Variable("x"),), {}, ("positive",), sequence=False),
        Call(
            aten.constant_pad_nd.default,
            (Variable("positive"), [0, 0, 0, 1], 2.0),
            {},
            ("y",),
            sequence=False,
        ),
    )
    shapes = {"x": (71, 8), "positive": (71, 8), "y": (72, 8)}
    facts = {name: TensorFacts.of(torch.empty(shape)) for name, shape in shapes.items()}
    kernel = kernel_of(Body(("x",), calls, ("y",)), facts)
    names, formulas = {71: "rows", 72: "more"}, {"rows": "rows", "more": "1 + rows"}
    sized = SizedCode.of(kernel.body, kernel.facts, names, formulas, {"rows": 71, "more": 72})
    for rows in (71, 50):
        other = Kernel.of_size(kernel, sized, (rows,))
        compile_kernels([other])
        assert (other.compiled, sized.codes) == (None, [])
        assert "decides" in other.failure
        assert other.run([torch.randn(rows, 8)])[0].shape == (rows + 1, 8)
