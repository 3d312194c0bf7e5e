"""The traced program: which call makes which variable, which variables share a buffer.

A `Program` is what a `Graph` leaves out: the code. Its ops, values and order are the graph's, so a
schedule of the graph is a schedule of the program. Variables are the program's tensors; a value of
the graph is a storage, and may have several variables, all but one of them views.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from remat_graph.graph import Graph, Op, Stage, Value
from remat_graph.torch._aot import Joint, OutputRole
from remat_graph.torch.errors import CaptureError
from remat_graph.torch.rewrite import is_backward, is_random, storage_key

__all__ = [
    "GENERATOR_STATE_BYTES",
    "Call",
    "Input",
    "Output",
    "Program",
    "TensorFacts",
    "Variable",
    "Write",
    "build_program",
    "returned_nodes",
]

aten = torch.ops.aten
LOSS = "loss"
GENERATOR_STATE_BYTES = 5056  # of torch's CPU generator


@dataclass(frozen=True, slots=True)
class Variable:
    """A tensor of the program, by its name."""

    name: str


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """What is known of a variable before it is computed; sizes in elements, storage in bytes."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    storage_bytes: int


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an operator. `args` and `kwargs` hold `Variable`s where tensors go.

    `results` are the variables that the call makes, in the order of what it returns; `None` for
    what nothing reads. `sequence` says whether it returns a tuple or list. `random` is the device
    whose generator it draws from. `replay` is the call to make when its results are made again.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[str | None, ...]
    sequence: bool
    random: torch.device | None = None
    replay: Call | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        """The variables that the call reads."""
        leaves = pytree.tree_leaves((self.args, dict(self.kwargs)))
        return tuple(dict.fromkeys(leaf.name for leaf in leaves if isinstance(leaf, Variable)))


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor that the program is given: `kind` is `parameter`, `buffer`, `attribute` or `input`.

    `key` is the dotted name on the module, or the position among the distinct input tensors.
    """

    variable: str
    kind: str
    key: str | int


@dataclass(frozen=True, slots=True)
class Output:
    """A tensor that the user gets: `variable`, made from `base` outside the differentiated program.

    `kind` is `fresh` (the program returns it), `input`, `input_view` or `view` (of what the program
    returns): see `OutputRole`.
    """

    kind: str
    variable: str
    base: str
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class Write:
    """The op that writes `variable` into the buffer or input `target`, after the forward."""

    target: str
    variable: str


@dataclass(frozen=True, slots=True)
class Program:
    """Calls by the name of their op, in order, and what their variables mean.

    `calls` holds computing ops, `writes` the updates of mutated inputs; the op `loss` stands for
    what the user does between forward and backward. `views` are made on demand. `returned` is what
    the forward half returns, in order; `tangents` maps a variable to the position in `returned`
    whose gradient it is; `gradients` maps input variables to the variable of their gradient.
    """

    inputs: tuple[Input, ...]
    constants: Mapping[str, Any]
    calls: Mapping[str, Call]
    writes: Mapping[str, Write]
    views: Mapping[str, Call]
    order: tuple[str, ...]
    storage: Mapping[str, str]
    facts: Mapping[str, TensorFacts]
    returned: tuple[str, ...]
    tangents: Mapping[str, int]
    outputs: tuple[Output, ...]
    gradients: Mapping[str, str]
    backward_ops: frozenset[str]
    twins: Mapping[str, str]
    equivalence: Mapping[str, str] = field(repr=False)

    @property
    def resident(self) -> frozenset[str]:
        """The values that are there before the program runs."""
        names = (*(i.variable for i in self.inputs), *self.constants)
        return frozenset(self.storage[n] for n in names if n in self.storage)

    def __deepcopy__(self, memo: dict[int, Any]) -> Program:
        """Return the program itself: it is immutable and belongs to no module."""
        return self

    def view_chain(self, variable: str, base: str) -> tuple[Call, ...] | None:
        """Find the calls that make `variable` out of `base`, first to last; `None` without one."""
        chain: list[Call] = []
        current = variable
        while current != base:
            call = self.views.get(current)
            if call is None:
                return None
            chain.append(call)
            current = call.reads[0]
        return tuple(reversed(chain))

    def graph(self, times: Mapping[str, float], workspaces: Mapping[str, int]) -> Graph:
        """Make the graph of this program; times in seconds and workspaces in bytes by op name."""
        resident = self.resident
        sizes: dict[str, int] = {}
        for variable, value in self.storage.items():
            facts = self.facts[variable]
            sizes[value] = _allocated(facts.storage_bytes, facts.device)
        ops = []
        last_random: dict[torch.device, str] = {}
        written = self._written()
        held = {self.storage[name] for name in self.returned}
        for name in self.order:
            call = self.calls.get(name)
            inputs, outputs = self._values_of(name)
            order_after: list[str] = []
            replayable = call is not None and bool(outputs)
            if call is not None and call.random is not None:
                if call.random in last_random:
                    order_after.append(last_random[call.random])
                last_random[call.random] = name
            if call is not None and call.replay is None and written.intersection(inputs):
                replayable = False
            if held.intersection(outputs):  # the user has it from its first computation on
                replayable = False
            ops.append(
                Op(
                    name,
                    inputs,
                    outputs,
                    times.get(name, 0.0),
                    self._loss_bytes()
                    if name == LOSS
                    else workspaces.get(name, 0) + _state_bytes(call),
                    Stage.BACKWARD if name in self.backward_ops else Stage.FORWARD,
                    self.twins.get(name),
                    self.equivalence.get(name),
                    replayable,
                    tuple(order_after) if call is not None else self._writes_after(name),
                )
            )
        used = {v for op in ops for v in (*op.inputs, *op.outputs)}
        results = {self.storage[v] for v in (*self.returned, *self.gradients.values())}
        return Graph(
            tuple(Value(value, size) for value, size in sizes.items() if value in used),
            tuple(ops),
            frozenset(resident & used),
            frozenset((results - resident) & used),
            LOSS,
        )

    def _loss_bytes(self) -> int:
        """Allow a loss outside the module one buffer for each output that is no scalar."""
        outputs = [self.facts[self.returned[position]] for position in self.tangents.values()]
        return sum(math.prod(f.shape) * f.dtype.itemsize for f in outputs if f.shape)

    def _written(self) -> set[str]:
        return {self.storage[write.target] for write in self.writes.values()}

    def _writes_after(self, name: str) -> tuple[str, ...]:
        """Name the forward ops that must have read a mutated input before it is written."""
        write = self.writes.get(name)
        if write is None:
            return ()
        target = self.storage[write.target]
        return tuple(
            op
            for op, call in self.calls.items()
            if op not in self.backward_ops and target in {self.storage[v] for v in call.reads}
        )

    def _values_of(self, name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        if name == LOSS:
            read = [self.returned[position] for position in self.tangents.values()]
            made: list[str] = list(self.tangents)
        elif name in self.writes:
            read, made = [self.writes[name].variable], []
        else:
            call = self.calls[name]
            read = [v for v in call.reads if v in self.storage]
            made = [v for v in call.results if v is not None]
        storage = self.storage
        return (
            tuple(dict.fromkeys(storage[v] for v in read)),
            tuple(dict.fromkeys(storage[v] for v in made)),
        )


def _state_bytes(call: Call | None) -> int:
    """Memory that a replay takes to put the generator back: on CUDA it is not on the device."""
    drawing = call is not None and call.random is not None and call.random.type == "cpu"
    return GENERATOR_STATE_BYTES if drawing else 0


def _allocated(size: int, device: torch.device) -> int:
    """Bytes that the allocator of a device takes for a buffer: CUDA's works in blocks of 512."""
    return -(-size // 512) * 512 if device.type == "cuda" else size


def build_program(joint: Joint) -> Program:
    """Read the program out of a rewritten joint graph whose nodes carry `meta["fake"]`.

    Raises:
        CaptureError: if an operator returns both a new tensor and a view of what it read.
    """
    reader = _Reader(joint)
    for node in joint.graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            reader.read(node)
    return reader.finish()


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
        self.constants: dict[str, Any] = {}
        for node in joint.graph.find_nodes(op="get_attr"):
            self.constants[node.name] = getattr(joint.module, str(node.target))
        for node in (*joint.inputs, *joint.tangents, *joint.graph.find_nodes(op="get_attr")):
            if isinstance(node.meta["fake"], torch.Tensor):
                self._add(node.name, node.meta["fake"])

    def _add(self, name: str, fake: torch.Tensor) -> None:
        storage = fake.untyped_storage()
        self.storage[name] = self.value_of_storage.setdefault(storage_key(fake), name)
        self.facts[name] = TensorFacts(
            tuple(fake.shape),
            tuple(fake.stride()),
            int(fake.storage_offset()),
            fake.dtype,
            fake.device,
            int(storage.nbytes()),
        )

    def read(self, node: Node) -> None:
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
        known = {storage_key(part) in self.value_of_storage for part in tensors}
        if known == {True, False}:
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
        call = Call(node.target, args, kwargs, tuple(names), sequence, random, _replay(node, names))
        if known == {True}:
            for name in names:
                if name is not None:
                    self.views[name] = call
            return
        self._add_op(node, call)

    def _roots(self) -> set[Node]:
        joint = self.joint
        return {
            *joint.gradients.values(),
            *(output.node for output in joint.outputs),
            *(new for _, new in joint.mutations),
        }

    def _add_op(self, node: Node, call: Call) -> None:
        name = node.name
        self.calls[name] = call
        self.equivalence[name] = self._equivalence(call)
        sequence = node.meta.get("seq_nr")
        if is_backward(node):
            self.backward.add(name)
            self.backward_order.append(name)
            if sequence in self.twin_of_sequence:
                self.twins[name] = self.twin_of_sequence[sequence]
        else:
            self.forward_order.append(name)
            if sequence is not None:
                self.twin_of_sequence[sequence] = name

    def _equivalence(self, call: Call) -> str:
        def describe(item: Any) -> Any:
            if isinstance(item, Variable):
                facts = self.facts.get(item.name)
                if facts is None:
                    return item.name
                return (facts.shape, facts.stride, str(facts.dtype), str(facts.device))
            return item

        flat, spec = pytree.tree_flatten((call.args, dict(call.kwargs)))
        unused = tuple(result is None for result in call.results)
        text = repr((str(call.target), [describe(item) for item in flat], str(spec), unused))
        return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()

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
            tangents={node.name: position[made.name] for node, made in joint.tangents.items()},
            outputs=outputs,
            gradients={node.name: gradient.name for node, gradient in joint.gradients.items()},
            backward_ops=frozenset((LOSS, *self.backward)),
            twins=self.twins,
            equivalence=self.equivalence,
        )


def returned_nodes(joint: Joint) -> list[Node]:
    """List what the forward half returns: outputs, and bases of those that are views."""
    nodes = [output.node if output.base is None else output.base for output in joint.outputs]
    own = [output.kind in ("fresh", "view") for output in joint.outputs]
    return list(dict.fromkeys(node for node, ours in zip(nodes, own, strict=True) if ours))


def _variable(node: Node) -> Any:
    return Variable(node.name)


def _output(output: OutputRole) -> Output:
    base = output.node if output.base is None else output.base
    return Output(output.kind, output.node.name, base.name, output.requires_grad)


def _has_generator(node: Node) -> bool:
    sources = [source.meta["fake"] for source in node.all_input_nodes]
    given = [*node.args, *node.kwargs.values(), *sources]
    opaque = [item for item in sources if not isinstance(item, (torch.Tensor, tuple, list))]
    return bool(opaque) or any(isinstance(item, torch.Generator) for item in given)


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
