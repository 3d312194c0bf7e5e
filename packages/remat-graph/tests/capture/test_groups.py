"""Which ops are in a group, and that a program of groups computes what it did before."""

import io
import itertools
import os
import pickle
import shutil
import signal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from remat_graph import Numerics
from remat_graph.torch import CaptureError, capture, run_fused
from remat_graph.torch.calls import Body, Call, TensorFacts, Variable
from remat_graph.torch.fusing import beside
from remat_graph.torch.fusing.beside import Compilation
from remat_graph.torch.fusing.compiling import _traced, compile_kernels
from remat_graph.torch.fusing.groups import find_groups
from remat_graph.torch.fusing.kernel import Kernel, kernel_of
from remat_graph.torch.fusing.program import fused, kernels_of
from remat_graph.torch.fusing.sized_code import SizedCode

aten = torch.ops.aten


class Gelu(nn.Module):
    """Two layers of two products, with an activation that autograd differentiates step by step."""

    def __init__(self, width=16, depth=2):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2 * depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        for first, second in zip(self.layers[::2], self.layers[1::2], strict=True):
            hidden = first(self.norm(x))
            hidden = 0.5 * hidden * (1.0 + torch.tanh(0.8 * (hidden + 0.04 * hidden**3)))
            x = x + second(hidden)
        return x.square().sum()


def program_of(model, *args):
    return capture(model, args, costs="estimate").program


def in_groups(program, unfused=(), *, give_again=False):
    return fused(program, find_groups(program, unfused, give_again=give_again))


def groups_of(program):
    return [group for group in find_groups(program) if group.body.outputs]


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
    four, eight = (
        kernels_of(in_groups(program_of(Gelu(depth=depth), torch.randn(8, 16)))) for depth in (4, 8)
    )
    assert four.keys() == eight.keys()


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


def test_compiled_kernels_give_what_their_calls_give():
    program = program_of(Gelu().double(), torch.randn(8, 16, dtype=torch.double))
    kernels = list(kernels_of(in_groups(program)).values())
    compile_kernels(kernels)
    torch.manual_seed(0)
    for kernel in kernels:
        assert kernel.compiled is not None, kernel.failure
        inputs = [
            torch.rand(kernel.facts[name].shape, dtype=kernel.facts[name].dtype)
            for name in kernel.body.inputs
        ]
        for one, two in zip(kernel.interpreted(inputs), kernel.run(inputs), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)
        assert kernel.compiled is not None, kernel.failure


ACTIVATIONS = [
    functional.elu, functional.selu, functional.mish, functional.hardtanh, functional.softsign,
    functional.tanhshrink, functional.softshrink, functional.hardshrink, functional.logsigmoid,
    functional.leaky_relu, functional.relu6, functional.glu, functional.hardsigmoid,
    functional.gelu, functional.silu, functional.softplus, functional.hardswish,
    lambda x: functional.gelu(x, approximate="tanh"), lambda x: functional.softmax(x, -1),
    lambda x: functional.log_softmax(x, -1), lambda x: functional.layer_norm(x, x.shape[-1:]),
]  # fmt: skip


class Activations(nn.Module):
    """The sum of many activations of a product."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return sum(activation(self.layer(x) * 3).sin().sum() for activation in ACTIVATIONS)


def test_operators_are_taken_apart_in_their_own_precision():
    program = program_of(Activations().double(), torch.randn(40, 6, dtype=torch.double))
    torch.manual_seed(0)
    kernels = kernels_of(in_groups(program)).values()
    assert sum(len(kernel.body.calls) for kernel in kernels) > 2 * len(ACTIVATIONS)
    for kernel in kernels:
        inputs = [2 * torch.randn(kernel.facts[n].shape).double() for n in kernel.body.inputs]
        inputs = [
            each.to(kernel.facts[n].dtype)
            for each, n in zip(inputs, kernel.body.inputs, strict=True)
        ]
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(each) for each in inputs]
            traced = _traced(kernel, kernel.facts, fakes, 0)
        for one, two in zip(kernel.interpreted(inputs), traced(*inputs), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.half])
def test_rounding_to_16_bits_is_computed(dtype):
    class Rounded(nn.Module):
        def forward(self, x):
            lost = x - x.to(dtype).float()
            return lost.exp() * x

    program = program_of(Rounded(), torch.randn(64, 33, requires_grad=True))
    (kernel, *_) = kernels_of(in_groups(program)).values()
    compile_kernels([kernel])
    inputs = [torch.randn(kernel.facts[name].shape) for name in kernel.body.inputs]
    for one, two in zip(kernel.interpreted(inputs), run_fused(kernel, *inputs), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-7)
    assert kernel.compiled is not None


def test_calls_run_one_by_one_where_inputs_lie_otherwise():
    program = program_of(Gelu(), torch.randn(8, 16))
    kernel = max(kernels_of(in_groups(program)).values(), key=lambda each: len(each.body.calls))
    compile_kernels([kernel])
    inputs = [torch.rand(kernel.facts[name].shape) for name in kernel.body.inputs]
    expected = kernel.interpreted(inputs)
    for one, two in zip(expected, run_fused(kernel, *inputs), strict=True):
        torch.testing.assert_close(one, two)
    transposed = [each.mT.contiguous().mT if each.ndim > 1 else each for each in inputs]
    assert any(
        each.stride() != other.stride() for each, other in zip(transposed, inputs, strict=True)
    )
    assert kernel.compiled is not None
    for one, two in zip(expected, run_fused(kernel, *transposed), strict=True):
        torch.testing.assert_close(one, two)
    assert kernel.compiled is None
    assert "stride" in kernel.failure


def test_code_that_gives_other_tensors_than_planned_is_not_run_again():
    program = program_of(Gelu(), torch.randn(8, 16))
    group = groups_of(program)[0]
    kernel = kernel_of(group.body, {**program.facts})
    kernel.compiled = lambda inputs: [inputs[0] for _ in kernel.body.outputs]
    kernel.failure = None
    inputs = [torch.rand(kernel.facts[name].shape) for name in kernel.body.inputs]
    expected = kernel.interpreted(inputs)
    for one, two in zip(expected, run_fused(kernel, *inputs), strict=True):
        assert torch.equal(one, two)
    assert kernel.compiled is None
    assert "not" in kernel.failure


def test_what_cannot_be_compiled_says_why(monkeypatch):
    program = program_of(Gelu(8), torch.randn(4, 8))
    kernel = next(iter(kernels_of(in_groups(program)).values()))
    monkeypatch.setattr(
        "torch._inductor.compile_fx.compile_fx_inner",
        lambda *_, **__: (_ for _ in ()).throw(RuntimeError("no such thing")),
    )
    compile_kernels([kernel])
    assert kernel.failure == "RuntimeError: no such thing"
    inputs = [torch.rand(kernel.facts[name].shape) for name in kernel.body.inputs]
    assert len(kernel.run(inputs)) == len(kernel.body.outputs)


@pytest.mark.sweep
def test_kernels_are_compiled_in_other_processes():
    program = program_of(Gelu(24), torch.randn(5, 24))
    kernels = list(kernels_of(in_groups(program)).values())
    compilation = Compilation(kernels[:2])
    (worker,) = compilation._workers
    compilation.wait()
    assert compilation.is_done
    assert worker.process.poll() is None
    compile_kernels(kernels[:2])
    assert all(kernel.compiled for kernel in kernels[:2])
    assert Compilation(kernels[:2]).count == 0
    again = Compilation(kernels[2:4])
    assert again._workers == [worker]  # nothing starts for the next
    again.wait()
    os.killpg(worker.process.pid, signal.SIGKILL)
    worker.process.wait()
    after = Compilation(kernels[2:4])
    assert after._workers != [worker]
    del after


def test_processes_that_do_not_start_or_end_at_once_are_no_error(monkeypatch):
    program = program_of(Gelu(20), torch.randn(5, 20))
    kernels = list(kernels_of(in_groups(program)).values())
    monkeypatch.setattr(beside.sys, "executable", "")
    compilation = Compilation(kernels)
    assert compilation.is_done
    assert compilation.count == len(kernels)
    monkeypatch.setattr(beside.sys, "executable", shutil.which("true"))
    compilation = Compilation(kernels * 100)  # more than a pipe holds
    compilation.wait()
    assert compilation.is_done


@pytest.mark.sweep
def test_other_processes_end_with_what_they_started_when_nobody_waits():
    program = program_of(Gelu(28), torch.randn(5, 28))
    compilation = Compilation(kernels_of(in_groups(program)).values())
    processes = [worker.process for worker in compilation._workers]
    del compilation
    assert all(process.wait() == -signal.SIGTERM for process in processes)
    with pytest.raises(ProcessLookupError):
        os.killpg(processes[0].pid, 0)


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
