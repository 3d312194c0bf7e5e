"""Each operator's rule on random inputs: whole against slices, along every axis it admits.

One sample of arguments for each operator that has a rule, in the order of the rules' files: hence
the length of this one.
"""

import math
from inspect import isfunction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from remat_graph.torch import Body, Call, TensorFacts, Variable
from remat_graph.torch.kernels.cross_entropy import cross_entropy, cross_entropy_backward
from remat_graph.torch.operators import operator_of, placements
from remat_graph.torch.slices import linear
from remat_graph.torch.slices.elementwise import is_pointwise, pointwise
from remat_graph.torch.slices.placement import SUMMED, Sliced, Summed
from remat_graph.torch.slices.rules import RULES
from remat_graph.torch.ways.slice_by_slice import SlicedBody, _part

aten = torch.ops.aten
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
_NONE, _MEAN, _SUM = 0, 1, 2


class Draw:
    """Random arguments, of one floating type."""

    def __init__(self, draw):
        self._draw = draw
        self.dtype = self.of(torch.float64, torch.float64, torch.float64, torch.float32)
        self.generator = torch.Generator().manual_seed(self.int(0, 999))

    def int(self, least, most):
        return self._draw(st.integers(least, most))

    def of(self, *choices):
        return self._draw(st.sampled_from(choices))

    def sizes(self, least=1, most=4, longest=6):
        return [self.int(1, longest) for _ in range(self.int(least, most))]

    def tensor(self, *shape):
        """Numbers between 0.1 and 0.9."""
        numbers = torch.rand(shape, generator=self.generator, dtype=torch.float64)
        return (numbers * 0.8 + 0.1).to(self.dtype)

    def signed(self, *shape):
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def indices(self, end, *shape):
        return torch.randint(end, shape, generator=self.generator)

    def axis(self, rank):
        """An axis, as often counted from the back."""
        return self.int(-rank, rank - 1)

    def cuts(self, units):
        """Bounds of one to five slices of any sizes."""
        inner = self._draw(st.lists(st.integers(1, max(units - 1, 1)), max_size=4, unique=True))
        return [0, *sorted(cut for cut in inner if cut < units), units]


def call_of(target, args, kwargs):
    """A call with variables in place of tensors, the tensors, and what is known of all."""
    tensors = {}

    def named(item):
        name = next((n for n, known in tensors.items() if known is item), f"t{len(tensors)}")
        tensors[name] = item
        return Variable(name)

    args, kwargs = pytree.tree_map_only(torch.Tensor, named, (tuple(args), kwargs))
    return args, kwargs, tensors


def whole_of(target, args, kwargs):
    made = target(*args, **kwargs)
    sequence = isinstance(made, (tuple, list))
    parts = list(made) if sequence else [made]
    args, kwargs, tensors = call_of(target, args, kwargs)
    results = {f"r{i}": p for i, p in enumerate(parts) if isinstance(p, torch.Tensor)}
    names = tuple(f"r{i}" if f"r{i}" in results else None for i in range(len(parts)))
    facts = {name: TensorFacts.of(t.contiguous()) for name, t in (tensors | results).items()}
    return Call(target, args, kwargs, names, sequence), facts, tensors, results


def check(d, target, args, kwargs=None):
    """Compare all ways of running a call in slices with the whole; give the ways."""
    call, facts, tensors, results = whole_of(target, args, kwargs or {})
    ways = placements(call, facts)
    for way in ways:
        if Summed() in way.inputs:
            check_sums(d, call, way, tensors, results)
        else:
            units = way.units(call, facts)
            outputs = tuple(name for name in call.results if name is not None)
            sliced = SlicedBody(Body(tuple(tensors), (call,), outputs), (way,), units, facts)
            made = sliced.run(tuple(tensors.values()), d.cuts(units))
            for name, part in zip(outputs, made, strict=True):
                compare(part, results[name], (call, way))
    return ways


def check_sums(d, call, way, tensors, results):
    """Compare what a call makes of a sum with the sum of what it makes of addends."""
    assert not way.is_sliced
    summed = {n for n, p in zip(call.variables, way.inputs, strict=True) if p == SUMMED}
    count = d.int(1, 4)
    parts = {name: d.indices(count, *tensors[name].shape) for name in summed}
    totals = None
    for at in range(count):
        addends = {name: torch.where(parts[name] == at, tensors[name], 0) for name in summed}
        made = run(call, tensors | addends)
        totals = made if totals is None else [a + b for a, b in zip(totals, made, strict=True)]
    for name, total, place in zip(call.results, totals, way.outputs, strict=True):
        assert place == SUMMED
        compare(total, results[name], (call, way))


def run(call, tensors):
    args, kwargs = pytree.tree_map_only(
        Variable, lambda item: tensors[item.name], (call.args, call.kwargs)
    )
    made = call.target(*args, **kwargs)
    return list(made) if call.sequence else [made]


def check_linear(target, args, kwargs=None):
    """Where a call is linear in some tensors, twice these give twice its results, to the bit."""
    call, _, tensors, results = whole_of(target, args, kwargs or {})
    numbers = [name for name, tensor in tensors.items() if tensor.is_floating_point()]
    for variables in (*({name} for name in numbers), set(numbers)):
        if linear.is_linear(call, variables):
            made = run(call, tensors | {name: 2 * tensors[name] for name in variables})
            for name, part in zip(call.results, made, strict=True):
                if name is not None:
                    torch.testing.assert_close(
                        part, 2 * results[name], rtol=0, atol=0, equal_nan=True
                    )


def compare(found, expected, what):
    assert found.shape == expected.shape, what
    assert found.dtype == expected.dtype, what
    if expected.is_floating_point():
        limit = TOLERANCE.get(expected.dtype, 1e-2)
        finite = expected[expected.isfinite()]
        scale = max(1.0, float(finite.abs().max())) if finite.numel() else 1.0
        torch.testing.assert_close(
            found,
            expected,
            rtol=limit,
            atol=limit * scale,
            equal_nan=True,
            msg=lambda m: f"{what}: {m}",
        )
    else:
        assert torch.equal(found, expected), what


SAMPLES = {}


def sample(*operators):
    def register(make):
        SAMPLES.update(dict.fromkeys(operators, make))
        return make

    return register


# pointwise


def by_schema(d, target):
    """Tensors that broadcast, and numbers of the types that the schema asks for."""
    shape = d.sizes()
    args = []
    for argument in target._schema.arguments:
        kind = str(argument.type)
        if kind in ("Tensor", "Optional[Tensor]"):
            own = [size if d.int(0, 3) else 1 for size in shape[d.int(0, 1) :]]
            args.append(d.tensor(*own))
        elif argument.default_value is not None or argument.kwarg_only or "Optional" in kind:
            break
        else:
            args.append({"bool": False, "int": 1, "float": 0.3, "str": "floor"}.get(kind, 0.3))
    return args


def in_a_type_taken(target, args):
    """Give arguments in the first types that an operator takes; `None` if in none."""
    tensors = [at for at, item in enumerate(args) if isinstance(item, torch.Tensor)]
    integers = [item.mul(5).ceil().long() if at in tensors else 2 for at, item in enumerate(args)]
    mask = [item.gt(0.5) if at in tensors[:1] else item for at, item in enumerate(args)]
    for taken in (args, integers, mask):
        try:
            target(*taken)
        except (RuntimeError, TypeError):
            continue
        return taken
    return None


POINTWISE = sorted(
    {
        overload
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::")
        for packet in [getattr(aten, name[6:].partition(".")[0])]
        for overload in (getattr(packet, each) for each in packet.overloads())
        if is_pointwise(overload) and operator_of(overload).in_slices in (None, pointwise)
    }
    | {target for target, rule in RULES.items() if rule is pointwise},
    key=str,
)
OF_THEIR_OWN = {  # what stands behind, and arguments by name
    aten.clamp.default: ([0.3], {}),
    aten.clip.default: ([None, 0.6], {}),
    aten.gelu_backward.default: ([], {"approximate": "tanh"}),
    aten.div.Scalar_mode: ([0.3], {"rounding_mode": "floor"}),
    aten.div.Tensor_mode: ([torch.tensor(0.3)], {"rounding_mode": "trunc"}),
    aten.masked_fill.Scalar: ([], {}),
    aten.masked_fill.Tensor: ([], {}),
    aten.round.decimals: ([], {"decimals": 1}),
}


@pytest.mark.parametrize("target", [t for t in POINTWISE if t not in OF_THEIR_OWN], ids=str)
@settings(max_examples=4, deadline=None)
@given(st.data())
def test_pointwise(target, data):
    d = Draw(data.draw)
    args = in_a_type_taken(target, by_schema(d, target))
    assert args is not None
    ways = check(d, target, args)
    shape = torch.broadcast_shapes(*(a.shape for a in args if isinstance(a, torch.Tensor)))
    check_linear(target, args)
    alone = [way for way in ways if not way.outputs[0].joined]
    assert len(alone) == sum(size > 1 for size in shape)


@sample(*OF_THEIR_OWN)
def _own_arguments(d, target):
    rest, named = OF_THEIR_OWN[target]
    x = d.tensor(*d.sizes())
    return [x, *([x + 1] if target is aten.gelu_backward.default else rest)], named


@sample(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def _masked(d, target):
    x = d.tensor(*d.sizes())
    mask = d.of(x > 0.5, x[:1] > 0.5, torch.tensor(True))
    return [x, mask, torch.tensor(0.3) if target is aten.masked_fill.Tensor else 0.3], {}


@sample(aten.neg.default, aten.clone.default)
def _one(d, target):
    return [d.signed(*d.sizes())], {}


@sample(aten._to_copy.default)
def _cast(d, target):
    x = d.signed(*d.sizes())
    source = d.of(torch.float32, torch.float64, torch.bfloat16, torch.int64)
    return [x.to(source)], {"dtype": d.of(torch.float64, torch.float32, torch.int64)}


@sample(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)
def _two(d, target):
    shape = d.sizes()
    other = [size if d.int(0, 3) else 1 for size in shape[d.int(0, 1) :]]
    args = [d.tensor(*shape), d.of(d.tensor(*other), 0.5)]
    return args[:: d.of(1, -1)] if isinstance(args[1], torch.Tensor) else args, {}


@sample(aten.mul.Scalar, aten.div.Scalar)
def _scaled(d, target):
    return [d.tensor(*d.sizes()), 0.7], {}


@sample(aten.full.default)
def _full(d, target):
    return [d.sizes(), 0.5], {"dtype": d.dtype}


@sample(aten.zeros.default, aten.ones.default)
def _numbers(d, target):
    return [d.sizes()], {"dtype": d.dtype}


@sample(aten.new_zeros.default, aten.new_ones.default, aten.new_full.default)
def _new(d, target):
    number = [0.5] if target is aten.new_full.default else []
    return [d.tensor(3), d.sizes(), *number], {}


# views


@sample(aten.alias.default, aten.detach.default)
def _same(d, target):
    return [d.tensor(*d.sizes())], {}


@sample(aten.view.default, aten._unsafe_view.default)
def _view(d, target):
    """Join axes, part them, and put in axes of length one."""
    shape = d.sizes(2, 5)
    x = d.tensor(*shape)
    new = list(shape)
    for _ in range(d.int(0, 2)):
        at = d.int(0, len(new) - 2)
        new[at : at + 2] = [new[at] * new[at + 1]]
        if len(new) < 2:
            break
    at = d.int(0, len(new) - 1)
    factor = d.of(*(f for f in range(1, new[at] + 1) if new[at] % f == 0))
    new[at : at + 1] = [factor, new[at] // factor]
    if d.int(0, 1):
        x, new = x.reshape(new), shape
    return [x, list(new)], {}


@sample(aten.permute.default)
def _permute(d, target):
    x = d.tensor(*d.sizes())
    dims = sorted(range(x.dim()), key=lambda _: d.int(0, 99))
    return [x, [dim - d.of(0, x.dim()) for dim in dims]], {}


@sample(aten.t.default)
def _t(d, target):
    return [d.tensor(*d.sizes(1, 2))], {}


@sample(aten.transpose.int)
def _transpose(d, target):
    x = d.tensor(*d.sizes())
    return [x, d.axis(x.dim()), d.axis(x.dim())], {}


@sample(aten.unsqueeze.default)
def _unsqueeze(d, target):
    x = d.tensor(*d.sizes())
    return [x, d.axis(x.dim() + 1)], {}


@sample(aten.squeeze.dim)
def _squeeze(d, target):
    x = d.tensor(*d.sizes(longest=2))
    return [x, d.axis(x.dim())], {}


@sample(aten.squeeze.dims)
def _squeeze_several(d, target):
    x = d.tensor(*d.sizes(2, 4, longest=2))
    return [x, [d.int(0, x.dim() - 2), -1]], {}


@sample(aten.expand.default)
def _expand(d, target):
    shape = d.sizes(longest=3)
    size = [d.int(2, 5) if length == 1 else d.of(length, -1) for length in shape]
    return [d.tensor(*shape), [*d.sizes(0, 2), *size]], {}


@sample(aten.repeat.default)
def _repeat(d, target):
    shape = d.sizes(longest=4)
    return [d.tensor(*shape), [*d.sizes(0, 1), *(d.of(1, 1, 2, 6) for _ in shape)]], {}


@sample(aten.select.int, aten.unbind.int)
def _select(d, target):
    x = d.tensor(*d.sizes(2, 4))
    dim = d.axis(x.dim())
    return [x, dim, *([d.int(0, x.shape[dim] - 1)] if target is aten.select.int else [])], {}


@sample(aten.slice.Tensor)
def _slice(d, target):
    x = d.tensor(*d.sizes())
    return [x, d.axis(x.dim()), d.int(0, 1), d.int(2, 9), d.int(1, 2)], {}


@sample(aten.split.Tensor)
def _split(d, target):
    x = d.tensor(*d.sizes())
    return [x, d.int(1, 3), d.axis(x.dim())], {}


@sample(aten.split_with_sizes.default)
def _split_sizes(d, target):
    x = d.tensor(*d.sizes())
    dim = d.axis(x.dim())
    first = d.int(0, x.shape[dim])
    return [x, [first, x.shape[dim] - first], dim], {}


@sample(aten.unfold.default)
def _unfold(d, target):
    x = d.tensor(*d.sizes(1, 3))
    dim = d.axis(x.dim())
    return [x, dim, d.int(1, x.shape[dim]), d.int(1, 2)], {}


@sample(aten.cat.default)
def _cat(d, target):
    shape = d.sizes()
    dim = d.axis(len(shape))
    parts = []
    for _ in range(d.int(1, 3)):
        own = list(shape)
        own[dim] = d.int(1, 3)
        parts.append(d.tensor(*own))
    return [parts, dim], {}


@sample(aten.stack.default)
def _stack(d, target):
    shape = d.sizes(0, 3)
    return [[d.tensor(*shape) for _ in range(d.int(1, 3))], d.axis(len(shape) + 1)], {}


@sample(aten.constant_pad_nd.default)
def _pad(d, target):
    x = d.tensor(*d.sizes(2, 4))
    return [x, [d.int(0, 1) for _ in range(2 * d.int(1, x.dim()))], d.of(0, 0, 0.5)], {}


@sample(aten.select_backward.default)
def _select_backward(d, target):
    shape = d.sizes(2, 4)
    dim = d.int(0, len(shape) - 1)
    grad = d.tensor(*(size for axis, size in enumerate(shape) if axis != dim))
    return [grad, shape, dim - d.of(0, len(shape)), d.int(0, shape[dim] - 1)], {}


@sample(aten.slice_backward.default)
def _slice_backward(d, target):
    x = d.tensor(*d.sizes())
    where = (d.axis(x.dim()), d.int(0, 1), d.int(2, 9), d.int(1, 2))
    return [aten.slice.Tensor(x, *where).clone(), list(x.shape), *where], {}


@sample(aten.slice_scatter.default)
def _slice_scatter(d, target):
    x = d.tensor(*d.sizes())
    where = (d.axis(x.dim()), d.int(0, 1), d.int(2, 9), d.int(1, 2))
    return [x, d.tensor(*aten.slice.Tensor(x, *where).shape), *where], {}


@sample(aten.select_scatter.default)
def _select_scatter(d, target):
    x = d.tensor(*d.sizes(2, 4))
    dim = d.axis(x.dim())
    where = (dim, d.int(0, x.shape[dim] - 1))
    return [x, d.tensor(*x.select(*where).shape), *where], {}


# products


@sample(aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default)
def _product(d, target):
    rows, inner, columns = d.int(1, 6), d.int(1, 6), d.int(1, 6)
    batch = [d.int(1, 4)] if "bmm" in str(target) else []
    factors = [d.signed(*batch, rows, inner), d.signed(*batch, inner, columns)]
    if "add" not in str(target):
        return factors, {}
    shapes = [(*batch, rows, columns), (columns,), (1, columns), (rows, 1), (1,)]
    return [d.signed(*d.of(*shapes)), *factors], d.of({}, {"beta": 2, "alpha": 0.5})


@sample(aten.mv.default)
def _matrix_vector(d, target):
    inner = d.int(1, 6)
    return [d.signed(d.int(1, 6), inner), d.signed(inner)], {}


@sample(aten.dot.default)
def _dot(d, target):
    inner = d.int(1, 6)
    return [d.signed(inner), d.signed(inner)], {}


# reductions, and what goes along an axis


@sample(aten.sum.default, aten.mean.default, aten.any.default, aten.all.default)
def _over_all(d, target):
    x = d.signed(*d.sizes(0, 4))
    return [x > 0 if target in (aten.any.default, aten.all.default) else x], {}


@sample(
    aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default,
    aten.logsumexp.default,
)  # fmt: skip
def _over_some(d, target):
    x = d.signed(*d.sizes())
    dims = sorted({d.int(0, x.dim() - 1) for _ in range(d.int(1, 3))})
    dims = [dim - d.of(0, x.dim()) for dim in dims]
    return [x, dims if target is aten.logsumexp.default else d.of(dims, []), bool(d.int(0, 1))], {}


@sample(aten.any.dims, aten.all.dims)
def _bools_over_some(d, target):
    x = d.signed(*d.sizes()) > 0
    return [x, [d.axis(x.dim())], bool(d.int(0, 1))], {}


@sample(
    aten.any.dim, aten.all.dim, aten.max.dim, aten.min.dim, aten.prod.dim_int,
    aten.argmax.default, aten.argmin.default,
)  # fmt: skip
def _over_one(d, target):
    x = d.signed(*d.sizes())
    x = x > 0 if target in (aten.any.dim, aten.all.dim) else x
    whole = target in (aten.argmax.default, aten.argmin.default) and not d.int(0, 3)
    return [x, None if whole else d.axis(x.dim()), bool(d.int(0, 1))], {}


@sample(aten.linalg_vector_norm.default)
def _norm(d, target):
    x = d.signed(*d.sizes())
    return [x, d.of(1, 2, math.inf), d.of([d.axis(x.dim())], None), bool(d.int(0, 1))], {}


@sample(aten.var.correction, aten.std.correction, aten.var_mean.correction)
def _variance(d, target):
    x = d.signed(*d.sizes())
    dims = d.of([d.axis(x.dim())], None)
    return [x, dims], {"correction": d.of(0, None), "keepdim": bool(d.int(0, 1))}


@sample(aten._softmax.default, aten._log_softmax.default)
def _softmax(d, target):
    x = d.signed(*d.sizes())
    return [x, d.axis(x.dim()), False], {}


@sample(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def _softmax_backward(d, target):
    x = d.signed(*d.sizes())
    dim = d.axis(x.dim())
    return [d.signed(*x.shape), x.softmax(dim), dim, x.dtype], {}


@sample(
    aten._safe_softmax.default, aten.cumsum.default, aten.cumprod.default,
    aten.logcumsumexp.default, aten.sort.default,
)  # fmt: skip
def _along(d, target):
    x = d.signed(*d.sizes())
    return [x, d.axis(x.dim())], {}


@sample(aten.sort.stable)
def _stable(d, target):
    x = d.signed(*d.sizes())
    return [x], {"stable": True, "dim": d.axis(x.dim())}


@sample(aten.topk.default)
def _topk(d, target):
    x = d.signed(*d.sizes())
    dim = d.axis(x.dim())
    return [x, d.int(1, x.shape[dim]), dim], {}


@sample(aten.glu.default, aten.glu_backward.default)
def _glu(d, target):
    shape = d.sizes()
    dim = d.axis(len(shape))
    shape[dim] *= 2
    x = d.signed(*shape)
    return [d.signed(*aten.glu(x, dim).shape), x, dim] if "back" in str(target) else [x, dim], {}


@sample(aten.flip.default)
def _flip(d, target):
    x = d.signed(*d.sizes())
    return [x, d.of([d.axis(x.dim())], [])], {}


@sample(aten.roll.default)
def _roll(d, target):
    x = d.signed(*d.sizes())
    return [x, [d.int(-2, 2)], d.of([d.axis(x.dim())], [])], {}


@sample(aten.tril.default, aten.triu.default)
def _triangle(d, target):
    return [d.signed(*d.sizes(2, 4)), d.int(-1, 1)], {}


# norms and attention


@sample(aten.native_layer_norm.default, aten._fused_rms_norm.default)
def _layer_norm(d, target):
    shape, own = d.sizes(1, 3), d.sizes(1, 2)
    weights = [d.of(d.tensor(*own), None) for _ in range(1 + ("layer" in str(target)))]
    return [d.signed(*shape, *own), own, *weights, 1e-5], {}


@sample(aten.native_layer_norm_backward.default)
def _layer_norm_backward(d, target):
    x, own, weight, bias, eps = _layer_norm(d, aten.native_layer_norm.default)[0]
    _, mean, rstd = aten.native_layer_norm(x, own, weight, bias, eps)
    mask = [True, weight is not None, bias is not None]
    return [d.signed(*x.shape), x, own, mean, rstd, weight, bias, mask], {}


@sample(aten.native_group_norm.default, aten.native_group_norm_backward.default)
def _group_norm(d, target):
    batch, group, per, space = d.int(1, 6), d.int(1, 3), d.int(1, 3), d.sizes(1, 2)
    channels, area = group * per, math.prod(space)
    x, weight = d.signed(batch, channels, *space), d.of(d.tensor(channels), None)
    sizes = [batch, channels, area, group]
    forward = [x, weight, None if weight is None else d.tensor(channels), *sizes, 1e-5]
    if target is aten.native_group_norm.default:
        return forward, {}
    _, mean, rstd = aten.native_group_norm(*forward)
    mask = [True, weight is not None, weight is not None]
    return [d.signed(*x.shape), x, mean, rstd, weight, *sizes, mask], {}


@sample(
    aten.native_batch_norm.default, aten._native_batch_norm_legit_no_training.default,
    aten.native_batch_norm_backward.default,
)  # fmt: skip
def _batch_norm(d, target):
    channels = d.int(1, 4)
    x = d.signed(d.int(1, 6), channels, *d.sizes(0, 2))
    statistics = [d.tensor(channels), d.tensor(channels)]
    weights = [d.tensor(channels), d.tensor(channels)]
    if target is aten.native_batch_norm.default:
        return [x, *weights, *statistics, False, 0.1, 1e-5], {}
    if target is aten._native_batch_norm_legit_no_training.default:
        return [x, *weights, *statistics, 0.1, 1e-5], {}
    saved = [x.new_empty(0), x.new_empty(0)]
    grad = d.signed(*x.shape)
    return [grad, x, weights[0], *statistics, *saved, False, 1e-5, [True, True, True]], {}


@sample(
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)
def _attention(d, target):
    batch, heads, rows, columns, width = d.int(1, 5), d.int(1, 5), d.int(1, 5), d.int(1, 5), 8
    q = d.signed(batch, heads, rows, width)
    k, v = (d.signed(batch, heads, columns, width) for _ in range(2))
    masks = [None, d.signed(batch, heads, rows, columns), d.signed(1, heads, rows, columns),
             d.signed(batch, 1, rows, columns), d.signed(rows, columns)]  # fmt: skip
    causal = bool(d.int(0, 1)) and rows == columns
    more = {} if causal else {"attn_mask": d.of(*masks)}
    forward = aten._scaled_dot_product_flash_attention_for_cpu
    if target is forward.default:
        return [q, k, v, 0.0, causal], more
    made, sums = forward(q, k, v, 0.0, causal, **more)
    return [d.signed(*q.shape), q, k, v, made, sums, 0.0, causal], more


# losses


@sample(aten.nll_loss_forward.default, aten.nll_loss_backward.default)
def _nll(d, target):
    return nll(d, target, aten.nll_loss_forward, [])


@sample(aten.nll_loss2d_forward.default, aten.nll_loss2d_backward.default)
def _nll2d(d, target):
    return nll(d, target, aten.nll_loss2d_forward, [d.int(1, 4), d.int(1, 4)])


@sample(cross_entropy, cross_entropy_backward)
def _cross_entropy(d, target):
    rows, classes = d.int(1, 7), d.int(2, 5)
    scores, wanted = d.signed(rows, classes), d.indices(classes, rows)
    weight, reduction = d.of(None, d.tensor(classes)), d.of(_NONE, _MEAN, _SUM)
    given = [wanted, weight, reduction, d.of(-100, 1)]
    how = scores.dtype, d.int(1, 4)
    if target is cross_entropy:
        return [scores, *given, *how], {}
    made, total = cross_entropy(scores, *given, *how)
    return [scores, d.signed(*made.shape), *given, total, *how], {}


def nll(d, target, forward, space):
    rows, classes = d.int(1, 7), d.int(2, 5)
    scores = d.signed(rows, classes, *space).log_softmax(1)
    wanted = d.indices(classes, rows, *space)
    ignored = d.of(-100, 1)
    if ignored == -100 and rows > 1:
        wanted[0] = -100
    weight = d.of(None, d.tensor(classes))
    reduction = d.of(_NONE, _MEAN, _SUM)
    given = [scores, wanted, weight, reduction, ignored]
    if target is forward.default:
        return given, {}
    made, total = forward(*given)
    return [d.signed(*made.shape), *given, total], {}


@sample(
    aten.mse_loss.default, aten.huber_loss.default, aten.smooth_l1_loss.default,
    aten.soft_margin_loss.default, aten.binary_cross_entropy.default,
)  # fmt: skip
def _loss(d, target):
    shape = d.sizes(1, 3)
    entropy = target is aten.binary_cross_entropy.default
    weight = [d.of(None, d.tensor(*shape))] if entropy else []
    given = [d.tensor(*shape), d.tensor(*shape), *weight, d.of(_NONE, _MEAN, _SUM)]
    return given + ([0.3] if has_limit(target) else []), {}


@sample(
    aten.mse_loss_backward.default, aten.huber_loss_backward.default,
    aten.smooth_l1_loss_backward.default, aten.soft_margin_loss_backward.default,
    aten.binary_cross_entropy_backward.default,
)  # fmt: skip
def _loss_backward(d, target):
    shape, reduction = d.sizes(1, 3), d.of(_NONE, _MEAN, _SUM)
    grad = d.signed(*(shape if reduction == _NONE else ()))
    entropy = target is aten.binary_cross_entropy_backward.default
    weight = [d.of(None, d.tensor(*shape))] if entropy else []
    given = [grad, d.tensor(*shape), d.tensor(*shape), *weight, reduction]
    return given + ([0.3] if has_limit(target) else []), {}


def has_limit(target):
    return target._schema.arguments[-1].name in ("delta", "beta")


# images


@sample(aten.convolution.default, aten.convolution_backward.default)
def _convolution(d, target):
    axes, groups, transposed = d.int(1, 2), d.int(1, 2), bool(d.int(0, 1))
    ins, outs = 2 * groups, groups
    x = d.signed(d.int(1, 5), ins, *([6] * axes))
    weight = d.signed(
        *((ins, outs // groups) if transposed else (outs, ins // groups)), *([3] * axes)
    )
    bias = d.of(None, d.signed(outs))
    rest = [[d.int(1, 2)] * axes, [1] * axes, [1] * axes, transposed, [0] * axes, groups]
    if target is aten.convolution.default:
        return [x, weight, bias, *rest], {}
    grad = d.signed(*aten.convolution(x, weight, None, *rest).shape)
    return [grad, x, weight, [outs], *rest, [True, True, True]], {}


def image(d, axes=2):
    return d.signed(
        *([d.int(1, 4)] if d.int(0, 3) or axes == 1 else []), d.int(1, 4), *([6] * axes)
    )


@sample(
    aten.avg_pool2d.default, aten.avg_pool3d.default, aten.max_pool2d_with_indices.default,
    aten.max_pool3d_with_indices.default, aten._adaptive_avg_pool2d.default,
    aten._adaptive_avg_pool3d.default, aten.adaptive_max_pool2d.default,
)  # fmt: skip
def _pool(d, target):
    axes = 3 if "3d" in str(target) else 2
    return [image(d, axes), [d.int(2, 3)] * axes], {}


@sample(
    aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default,
    aten.max_pool2d_with_indices_backward.default, aten.max_pool3d_with_indices_backward.default,
    aten._adaptive_avg_pool2d_backward.default, aten._adaptive_avg_pool3d_backward.default,
    aten.adaptive_max_pool2d_backward.default,
)  # fmt: skip
def _pool_backward(d, target):
    axes = 3 if "3d" in str(target) else 2
    forward = getattr(aten, str(target).split(".")[1].removesuffix("_backward"))
    x, size = image(d, axes), [2] * axes
    made = forward(x, size)
    if "adaptive" in str(target):
        pooled, *indices = made if isinstance(made, tuple) else (made,)
        return [d.signed(*pooled.shape), x, *indices], {}
    window = [size, size, [0] * axes]
    if "max" in str(target):
        grad = d.signed(*made[0].shape)
        return [grad, x, *window, [1] * axes, False, made[1]], {}
    return [d.signed(*made.shape), x, *window, False, True, None], {}


PADS = ("reflection_pad1d", "reflection_pad2d", "replication_pad2d")


@sample(*(getattr(aten, name).default for name in PADS))
def _border(d, target):
    axes = 1 if "1d" in str(target) else 2
    return [image(d, axes), [1, 2] * axes], {}


@sample(*(getattr(aten, f"{name}_backward").default for name in PADS))
def _border_backward(d, target):
    forward = getattr(aten, str(target).split(".")[1].removesuffix("_backward"))
    (x, pad), _ = _border(d, target)
    return [d.signed(*forward(x, pad).shape), x, pad], {}


UPSAMPLES = {
    "upsample_nearest1d": [], "upsample_nearest2d": [], "upsample_nearest3d": [],
    "upsample_linear1d": [False], "upsample_bilinear2d": [True], "upsample_bicubic2d": [False],
    "upsample_trilinear3d": [False],
}  # fmt: skip


@sample(*(getattr(aten, name).default for name in UPSAMPLES))
def _upsample(d, target):
    axes = int(str(target).split("d.")[0][-1])
    x = d.signed(d.int(1, 4), d.int(1, 4), *([4] * axes))
    return [x, [d.int(3, 8)] * axes, *UPSAMPLES[str(target).split(".")[1]]], {}


@sample(*(getattr(aten, f"{name}_backward").default for name in UPSAMPLES))
def _upsample_backward(d, target):
    name = str(target).split(".")[1].removesuffix("_backward")
    (x, size, *rest), _ = _upsample(d, getattr(aten, name).default)
    return [d.signed(*x.shape[:2], *size), size, list(x.shape), *rest], {}


@sample(aten.pixel_shuffle.default, aten.pixel_unshuffle.default)
def _shuffle(d, target):
    return [d.signed(*d.sizes(0, 2), 4, 4, 4), 2], {}


# indexing


@sample(aten.embedding.default)
def _embedding(d, target):
    return [d.signed(7, d.int(1, 5)), d.indices(7, *d.sizes(0, 3))], {}


@sample(aten.embedding_dense_backward.default)
def _embedding_backward(d, target):
    indices = d.indices(7, *d.sizes(1, 3))
    grad = d.signed(*indices.shape, d.int(1, 5))
    return [grad, indices, 7, d.of(-1, 2), bool(d.int(0, 1))], {}


@sample(aten.index_select.default, aten.index_add.default)
def _along_indices(d, target):
    x = d.signed(*d.sizes())
    dim = d.axis(x.dim())
    index = d.indices(x.shape[dim], d.int(1, 5))
    if target is aten.index_select.default:
        return [x, dim, index], {}
    return [x, dim, index, d.signed(*x.index_select(dim, index).shape)], {"alpha": 2}


@sample(aten.gather.default)
def _gather(d, target):
    x = d.signed(*d.sizes())
    dim = d.axis(x.dim())
    shape = [d.of(size, d.int(1, size)) for size in x.shape]
    shape[dim] = d.int(1, 6)
    return [x, dim, d.indices(x.shape[dim], *shape)], {}


@sample(
    aten.scatter.value, aten.scatter.src, aten.scatter.reduce, aten.scatter.value_reduce,
    aten.scatter_add.default,
)  # fmt: skip
def _scatter(d, target):
    """The indices along an axis differ, or which is written last would be left open."""
    x = d.signed(*d.sizes())
    dim = d.axis(x.dim())
    shape = [d.of(size, size, d.int(1, size)) for size in x.shape]
    index = torch.argsort(d.signed(*x.shape), dim)[tuple(map(slice, shape))]
    source = 0.5 if "value" in str(target) else d.signed(*index.shape)
    return [x, dim, index, source], {"reduce": "add"} if "reduce" in str(target) else {}


def several_indices(d):
    x = d.signed(*d.sizes(2, 4))
    shape = d.sizes(1, 2, longest=4)
    places = [bool(d.int(0, 1)) for _ in x.shape]
    places[d.int(0, x.dim() - 1)] = True
    own = [[size if d.int(0, 3) else 1 for size in shape] for _ in x.shape]
    indices = [
        d.indices(size, *sizes) if there else None
        for size, sizes, there in zip(x.shape, own, places, strict=True)
    ]
    while indices[-1] is None:
        indices.pop()
    return x, indices


@sample(aten.index.Tensor, aten._unsafe_index.Tensor)
def _index(d, target):
    return list(several_indices(d)), {}


@sample(aten.index_put.default, aten._unsafe_index_put.default)
def _index_put(d, target):
    x, indices = several_indices(d)
    shape = aten.index(x, indices).shape
    values = d.of(d.signed(*shape), d.signed(*shape[1:]), d.signed(1))
    return [x, indices, values, True], {}


# the rules


def test_batch_and_tokens_are_cut_as_one_where_each_row_is_made_by_itself():
    x, weight = torch.rand(4, 6, 8), torch.rand(8)
    cases = [
        (aten.gelu.default, [x], {0, 1, 2}),
        (aten.native_layer_norm.default, [x, [8], weight, weight, 1e-5], {0, 1}),
        (aten._softmax.default, [x, 1, False], {0, 2}),
        (aten.bmm.default, [x, x.mT.contiguous()], {0}),
    ]
    for target, args, apart in cases:
        call, facts, _, _ = whole_of(target, args, {})
        outputs = [way.outputs[0] for way in placements(call, facts)]
        joined = {place for place in outputs if isinstance(place, Sliced) and place.joined}
        assert (Sliced(1, joined=1) in joined) == ({0, 1} <= apart)
        assert (Sliced(2, joined=2) in joined) == ({0, 1, 2} <= apart)
    call, facts, _, _ = whole_of(aten.view.default, [x, [24, 8]], {})
    views = {(way.inputs[0], way.outputs[0]) for way in placements(call, facts)}
    assert {(Sliced(0), Sliced(0)), (Sliced(1, joined=1), Sliced(0))} <= views


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_axes_that_lie_apart_are_cut_as_one_all_the_same(order):
    x = torch.rand(3, 4, 5).permute(order)
    x = torch.empty(x.shape).copy_(x).permute(sorted(range(3), key=order.__getitem__))
    call = Call(aten.neg.default, (Variable("x"),), {}, ("y",), False)
    facts = {"x": TensorFacts.of(x), "y": TensorFacts.of(x)}
    way = next(w for w in placements(call, facts) if w.outputs[0] == Sliced(1, joined=1))
    sliced = SlicedBody(Body(("x",), (call,), ("y",)), (way,), 12, facts)
    (made,) = sliced.run([x], [0, 1, 6, 12])
    assert torch.equal(made, -x)
    assert made.stride() == x.stride()


def test_every_rule_has_samples_or_runs_on_cuda_alone():
    assert RULES.keys() - SAMPLES.keys() - set(POINTWISE) == {target for target, *_ in CUDA}


TARGETS = pytest.mark.parametrize(
    "target", SAMPLES, ids=lambda each: each.__qualname__ if isfunction(each) else str(each)
)


def check_sample(d, target):
    args, kwargs = SAMPLES[target](d, target)
    check(d, target, args, kwargs)
    check_linear(target, args, kwargs)


@TARGETS
@settings(max_examples=5, deadline=None)
@given(st.data())
def test_slices_make_up_the_whole(target, data):
    check_sample(Draw(data.draw), target)


@pytest.mark.sweep
@TARGETS
@settings(max_examples=50, deadline=None)
@given(st.data())
def test_slices_of_more_samples_make_up_the_whole(target, data):
    check_sample(Draw(data.draw), target)


def test_what_is_linear_has_samples():
    assert SAMPLES.keys() | set(POINTWISE) >= linear.LINEAR


@pytest.mark.parametrize(
    ("target", "args", "variables", "expected"),
    [
        (aten.mul.Tensor, [1, 2], {1, 2}, False),
        (aten.mul.Tensor, [1, 2], {2}, True),
        (aten.add.Tensor, [1, 2], {1}, False),
        (aten.add.Tensor, [1, 2], {1, 2}, True),
        (aten.add.Tensor, [1, 3.0], {1}, False),
        (aten.div.Tensor, [1, 2], {2}, False),
        (aten.where.ScalarOther, [0, 1, 0.0], {1}, True),
        (aten.where.ScalarOther, [0, 1, 0.5], {1}, False),
        (aten.masked_fill.Scalar, [1, 0, 0], {1}, True),
        (aten.masked_fill.Scalar, [1, 0, 1], {1}, False),
        (aten.clamp.default, [1, 0.2], {1}, False),
        (aten.tanh_backward.default, [1, 2], {1}, True),
        (aten.tanh_backward.default, [1, 2], {2}, False),
        (aten.tanh_backward.default, [1, 1], {1}, False),
    ],
)
def test_what_is_linear(target, args, variables, expected):
    """Variables are written as integers here, but for the number behind a mask."""
    tensors = {at for at, item in enumerate(target._schema.arguments) if "Tensor" in str(item.type)}
    given = (
        Variable(f"v{item}") if at in tensors and isinstance(item, int) else item
        for at, item in enumerate(args)
    )
    call = Call(target, tuple(given), {}, ("result",), False)
    assert linear.is_linear(call, {f"v{each}" for each in variables}) == expected


def meta(*shape, dtype=torch.float16):
    return torch.empty(shape, dtype=dtype, device="meta")


def attentions(batch):
    """What CUDA has for attention, and the backward of it, of tensors without data."""
    x, seed = meta(batch, 6, 32, 64), meta(dtype=torch.int64)
    sums, mask = meta(batch, 6, 32, dtype=torch.float32), meta(1, 6, 32, 32)
    flash, efficient, cudnn = (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
    yield flash, [x, x, x]
    yield efficient, [x, x, x, mask.expand(batch, -1, -1, -1), True]
    yield cudnn, [x, x, x, None, True]
    rest = [0.0, False, seed, seed]
    yield f"{flash}_backward", [x, x, x, x, x, sums, None, None, 32, 32, *rest]
    rest = [seed, seed, 0.0, [True, True, True, False]]
    yield f"{efficient}_backward", [x, x, x, x, mask, x, sums, *rest]
    rest = [seed, seed, mask, None, None, 32, 32, 0.0, False]
    yield f"{cudnn}_backward", [x, x, x, x, x, sums[..., None], *rest]


X, W = meta(4, 6), meta(6, 8)
CUDA = [  # with how many axes can be cut
    *((getattr(aten, name).default, args, 1) for name, args in attentions(batch=4)),
    *((getattr(aten, name).default, args, 1) for name, args in attentions(batch=1)),
    (aten.mm.dtype, [X, W, torch.float32], 3),
    (aten.addmm.dtype, [meta(8), X, W, torch.float32], 2),
    (aten.bmm.dtype, [X[None], W[None], torch.float32], 3),
    (aten._fused_rms_norm_backward.default, [X, X, [6], X[:, :1], W[:, 0], [True, True]], 1),
]


@pytest.mark.parametrize(("target", "args", "count"), CUDA, ids=lambda item: str(item)[:60])
def test_slices_of_what_runs_on_cuda_alone_have_the_shapes_of_parts(target, args, count):
    call, facts, tensors, results = whole_of(target, args, {})
    ways = [way for way in placements(call, facts) if way.is_sliced]
    assert len(ways) == count
    for way in ways:
        units = way.units(call, facts)
        places = dict(zip(call.variables, way.inputs, strict=True))
        parts = {
            name: part_of(tensor, places[name], units, units - 1)
            for name, tensor in tensors.items()
        }
        made = run(way.call_for(call, units - 1, units), parts)
        for name, part, place in zip(call.results, made, way.outputs, strict=True):
            if name is not None:
                assert part.shape == part_of(results[name], place, units, units - 1).shape


def part_of(tensor, place, units, count):
    return _part(tensor, place, units, 0, count)
