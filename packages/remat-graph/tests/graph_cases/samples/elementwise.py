"""What is computed element by element."""

import torch

from graph_cases.samples.drawing import sample
from remat_graph.torch.operators import operator_of
from remat_graph.torch.slices.elementwise import is_pointwise, pointwise
from remat_graph.torch.slices.rules import RULES

aten = torch.ops.aten


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
    return [d.tensor(*d.sizes(0, 2)), d.sizes(), *number], {}
