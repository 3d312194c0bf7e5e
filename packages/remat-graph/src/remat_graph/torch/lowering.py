"""From a rewritten joint graph to a `Program`: which node is an op, which a view, which a role."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from inspect import isfunction
from typing import Any, cast

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from remat_graph.provenance import Provenance
from remat_graph.torch.calls import Body
from remat_graph.torch.errors import CaptureError
from remat_graph.torch.operators import operator_of
from remat_graph.torch.program import (
    LOSS,
    Call,
    Input,
    Output,
    Program,
    TensorFacts,
    Variable,
    Write,
)
from remat_graph.torch.tracing.fakes import elements_of, storage_key
from remat_graph.torch.tracing.joint import (
    Joint,
    OutputRole,
    is_backward,
    is_gradient_sum,
    is_random,
    returned_nodes,
)
from remat_graph.torch.tracing.provenance import noted

__all__ = ["build_program", "equivalence_of", "with_workspace"]

aten = torch.ops.aten


def build_program(joint: Joint) -> Program:
    """Read the program out of a rewritten joint graph whose nodes carry `meta["fake"]`.

    Raises:
        CaptureError: if an operator returns both a new tensor and a view of what it read, or an
            output is a view that cannot be made.
    """
    reader = _Reader(joint)
    for node in joint.graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            reader.read(node)
    program = reader.finish()
    for at, output in enumerate(joint.outputs):
        _check_view(program, at, output)
    return program


def _check_view(program: Program, at: int, output: OutputRole) -> None:
    """Look whether an output can be made as a view of its base.

    Raises:
        CaptureError: if no known views make it, and its layout does not say how it is read.
    """
    node, base = output.node, output.base
    if base is None or output.layout is not None or node.name in program.returned:
        return
    bases = base.name, *program.written_into(base.name)
    elements, elements_of_base = (elements_of(each.meta["fake"]) for each in (node, base))
    if elements != elements_of_base and program.view_chain(node.name, *bases) is None:
        raise CaptureError(
            f"output {at}, of {elements[0]}, is a view of {base.name}, of {elements_of_base[0]}, "
            f"as another type, conjugated or negated, and how it is made is lost; return a copy "
            f"of it, as by .clone()"
        )


class _Reader:
    """One pass over a joint graph."""

    def __init__(self, joint: Joint) -> None:
        self.joint = joint
        self.storage: dict[str, str] = {}
        self.facts: dict[str, TensorFacts] = {}
        self.value_of_storage: dict[int, str] = {}
        self.calls: dict[str, Call] = {}
        self.views: dict[str, Call] = {}
        self.equivalence: dict[str, str] = {}
        self.backward: set[str] = set()
        self.forward_order: list[str] = []
        self.backward_order: list[str] = []
        self.twin_of_sequence: dict[int, str] = {}
        self.twins: dict[str, str] = {}
        self.provenance: dict[str, Provenance] = {}
        self.constants: dict[str, Any] = {}
        for node in joint.graph.find_nodes(op="get_attr"):
            self.constants[node.name] = getattr(joint.constants, str(node.target))
        for node in (*joint.inputs, *joint.tangents, *joint.graph.find_nodes(op="get_attr")):
            if isinstance(node.meta["fake"], torch.Tensor):
                self._add(node.name, node.meta["fake"])

    def _add(self, name: str, fake: torch.Tensor) -> None:
        self.storage[name] = self.value_of_storage.setdefault(storage_key(fake), name)
        self.facts[name] = TensorFacts.of(fake)

    def read(self, node: Node) -> None:
        self._trace_back(node)
        fake = node.meta["fake"]
        sequence = isinstance(fake, (tuple, list))
        parts = list(fake) if sequence else [fake]
        names: list[str | None] = [None] * len(parts)
        if sequence:
            for user in node.users:
                names[cast("int", user.args[1])] = user.name
        elif node.users or node in self._roots():
            names[0] = node.name
        tensors = [part for part in parts if isinstance(part, torch.Tensor)]
        are_views = {storage_key(part) in self.value_of_storage for part in tensors}
        if are_views == {True, False}:
            raise CaptureError(
                f"the operator {node.target} returns a new tensor together with a view of its "
                f"input, which cannot be planned; please report it"
            )
        for name, part in zip(names, parts, strict=True):
            if name is not None and isinstance(part, torch.Tensor):
                self._add(name, part)
        if is_random(node) and _has_generator(node):
            raise CaptureError(
                f"the operator {node.target} draws from a generator of its own, whose draws could "
                f"not be repeated; leave the argument generator out, and seed torch instead"
            )
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), _variable)
        random = tensors[0].device if is_random(node) and tensors else None
        call = with_workspace(
            Call(node.target, args, kwargs, tuple(names), sequence, random, _replay(node, names)),
            self.facts,
        )
        if are_views == {True}:
            for name in names:
                if name is not None:
                    self.views[name] = call
            return
        self._add_op(node, call)

    def _trace_back(self, node: Node) -> None:
        """Find where a node comes from: it knows, or it is a copy or a sum of what is made last."""
        origin = noted(node)
        for source in sorted(node.all_input_nodes, reverse=True):
            origin = origin or noted(source) or self.provenance.get(source.name)
        if origin is not None:
            self.provenance[node.name] = origin

    def _roots(self) -> set[Node]:
        joint = self.joint
        return {
            *joint.gradients.values(),
            *(output.node for output in joint.outputs),
            *(new for _, new in joint.mutations),
        }

    def _add_op(self, node: Node, call: Call) -> None:
        name = node.name
        if is_backward(node):
            call = self._new_addend_first(call)
        self.calls[name] = call
        self.equivalence[name] = equivalence_of(call, self.facts)
        sequence = node.meta.get("seq_nr")
        if is_backward(node):
            self.backward.add(name)
            self.backward_order.append(name)
            if sequence in self.twin_of_sequence and not is_gradient_sum(node):
                self.twins[name] = self.twin_of_sequence[sequence]
        else:
            self.forward_order.append(name)
            if sequence is not None and self._may_be_differentiated(call):
                # What is computed without gradients has the number of the op before it.
                for number in (sequence, *node.meta.get("merged_seq_nrs", ())):
                    self.twin_of_sequence.setdefault(number, name)

    def _may_be_differentiated(self, call: Call) -> bool:
        """Whether a result could get a gradient."""
        facts = [self.facts[name] for name in call.results if name in self.facts]
        return any(each.dtype.is_floating_point or each.dtype.is_complex for each in facts)

    def _new_addend_first(self, call: Call) -> Call:
        """Let a sum begin with what is no view: it can be written over, and the bits are the same.

        Of a tied weight both gradients are as large as the weight, and the sum is a third one else.
        """
        if call.target is not aten.add.Tensor or call.kwargs or len(call.variables) != 2:
            return call
        one, other = call.variables
        alike = self.facts[one] == self.facts[other]
        swapped = alike and one in self.views and other not in self.views
        return call.of((other, one), call.results) if swapped else call

    def finish(self) -> Program:
        joint = self.joint
        inputs = tuple(Input(node.name, *role) for node, role in joint.inputs.items())
        writes = {f"write_{node.name}": Write(node.name, new.name) for node, new in joint.mutations}
        outputs = tuple(_output(output) for output in joint.outputs)
        returned = tuple(node.name for node in returned_nodes(joint))
        position = {variable: i for i, variable in enumerate(returned)}
        return Program(
            inputs=inputs,
            constants=self.constants,
            calls=self.calls,
            writes=writes,
            views=self.views,
            order=(*self.forward_order, *writes, LOSS, *self.backward_order),
            storage=self.storage,
            facts=self.facts,
            returned=returned,
            tangents={node.name: position[output.name] for node, output in joint.tangents.items()},
            outputs=outputs,
            gradients={node.name: gradient.name for node, gradient in joint.gradients.items()},
            backward_ops=frozenset((LOSS, *self.backward)),
            twins=self.twins,
            equivalence=self.equivalence,
            provenance={op: self.provenance[op] for op in self.calls if op in self.provenance},
        )


def with_workspace(call: Call, facts: Mapping[str, TensorFacts]) -> Call:
    """Note what a call is known to take while it runs."""
    predict = operator_of(call.target).workspace
    return call if predict is None else replace(call, workspace_bytes=predict(facts, call))


def equivalence_of(call: Call, facts: Mapping[str, TensorFacts]) -> str:
    """Name the class of calls that run the same code on the same shapes as this one.

    A function with a body runs what the body says, whatever its variables are called. One without
    is known by the place where it is defined; one that is made anew each time is like no other.
    """

    def describe(name: str) -> Any:
        tensor = facts.get(name)
        if tensor is None:
            return name
        return (tensor.shape, tensor.stride, str(tensor.dtype), str(tensor.device))

    text = repr(_described(call, describe))
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def _described(call: Call, describe: Callable[[str], Any]) -> tuple[Any, ...]:
    flat, spec = pytree.tree_flatten((call.args, dict(call.kwargs)))
    items = [describe(item.name) if isinstance(item, Variable) else item for item in flat]
    unused = tuple(result is None for result in call.results)
    described = (_name(call), items, str(spec), unused)
    return described if call.body is None else (*described, _described_body(call.body))


def _described_body(body: Body) -> tuple[Any, ...]:
    """Describe the calls of a body, with a number for each variable, in the order of appearance."""
    number: dict[str, tuple[int]] = {}

    def of(name: str) -> tuple[int]:  # no argument is a tuple, once arguments are flat
        return number.setdefault(name, (len(number),))

    inputs = list(map(of, body.inputs))
    calls = [
        (_described(call, of), [of(name) for name in call.results if name is not None])
        for call in body.calls
    ]
    overwrites = [(of(read), of(new)) for read, new in body.overwrites]
    return (inputs, calls, list(map(of, body.outputs)), overwrites)


def _name(call: Call) -> str:
    """Name the code that a call runs."""
    if not isfunction(call.target):
        return str(call.target)
    name = f"{call.target.__module__}.{call.target.__qualname__}"
    return name if call.body is not None or "<" not in name else repr(call.target)


def _variable(node: Node) -> Any:
    return Variable(node.name)


def _output(output: OutputRole) -> Output:
    base = output.node if output.base is None else output.base
    return Output(
        output.kind,
        output.node.name,
        base.name,
        output.requires_grad,
        output.layout,
        output.computed_from,
    )


def _has_generator(node: Node) -> bool:
    sources = [source.meta["fake"] for source in node.all_input_nodes]
    operands = [*node.args, *node.kwargs.values(), *sources]
    opaque = [item for item in sources if not isinstance(item, (torch.Tensor, tuple, list))]
    return bool(opaque) or any(isinstance(item, torch.Generator) for item in operands)


def _replay(node: Node, names: list[str | None]) -> Call | None:
    """Batch norm in training mode is replayed without its running statistics, written once."""
    if node.target is not aten._native_batch_norm_legit_functional.default:
        return None
    x, weight, bias, _mean, _var, training, momentum, eps = node.args
    statistics = [user for user in node.users if user.args[1] in (3, 4)]
    read = any(user.op == "call_function" for item in statistics for user in item.users)
    if training is not True or read:
        return None
    args = torch.fx.map_arg((x, weight, bias, True, momentum, eps), _variable)
    target = aten._native_batch_norm_legit.no_stats
    return Call(target, args, {}, tuple(names[:3]), sequence=True)
